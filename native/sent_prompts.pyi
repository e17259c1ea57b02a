"""Prompts that were sent to engines and that no KV event tells of yet: what an engine will hold once it is through."""

from typing import final

from native.block_hash import BlockHashes

@final
class SentPrompts:
    """By slot, a number that the caller gives each engine. Whoever adds a prompt discards it, the same object: there
    are never more of them than attempts open, and `len` is their number."""

    def __len__(self) -> int: ...
    def add(self, slot: int, blocks: BlockHashes) -> None: ...
    def discard(self, slot: int, blocks: BlockHashes) -> bool:
        """Whether this object was there."""

    def forget(self, slot: int) -> None:
        """All of the slot's: its engine is gone."""

    def longest(self, slot: int, blocks: BlockHashes, at_least: int = 0) -> int:
        """Leading blocks that `blocks` shares with one of the slot's prompts, or `at_least` if that is more."""
