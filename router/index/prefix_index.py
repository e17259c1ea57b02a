"""What routing asks of an index of prefixes, and the one place that picks the native one.

The contract in words is in native/prefix_tree.pyi; router/index/reference.py is the same contract at its plainest.
"""

from __future__ import annotations

from array import array
from typing import Literal, Protocol

from native.block_hash import BlockHashes
from native.prefix_tree import PrefixTree
from router.index.reference import ReferenceIndex

__all__ = ["BlockHashes", "IndexKind", "PrefixIndex", "PrefixTree", "ReferenceIndex", "build_index"]

IndexKind = Literal["native", "reference"]


class PrefixIndex(Protocol):
    """For each backend, named by its slot, the blocks that it likely has cached, least recently used evicted first."""

    @property
    def matched(self) -> array[int]:
        """Blocks by slot, as the last match() found them."""
        ...

    @property
    def evicted_by_memory(self) -> int: ...

    @property
    def memory_limit_bytes(self) -> int: ...

    def add_backend(self) -> int: ...

    def remove_backend(self, slot: int) -> None: ...

    def clear_backend(self, slot: int) -> None: ...

    def set_capacity(self, slot: int, blocks: int) -> None: ...

    def insert(self, slot: int, blocks: BlockHashes) -> int: ...

    def match(self, blocks: BlockHashes) -> int: ...

    def match_one(self, slot: int, blocks: BlockHashes) -> int: ...

    def forget_after(self, slot: int, blocks: BlockHashes, keep: int) -> int: ...

    def blocks_of(self, slot: int) -> int: ...

    def evicted(self, slot: int) -> int: ...

    def memory_bytes(self) -> int: ...

    def check(self) -> None: ...

    def __len__(self) -> int: ...


def build_index(kind: IndexKind, memory_limit_bytes: int) -> PrefixIndex:
    """The index that the configuration names. `reference` is a degraded mode: right, some hundred times slower, and
    good for a small part of the blocks in the same memory."""
    if kind == "native":
        return PrefixTree(memory_limit_bytes)
    if kind == "reference":
        return ReferenceIndex(memory_limit_bytes)
    raise ValueError(f"index: {kind!r} is neither native nor reference")
