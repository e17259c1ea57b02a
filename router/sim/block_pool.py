"""vLLM's prefix cache: fixed blocks, named by chained hashes, shared by reference count, evicted least recently used.

The rules are those of vLLM 0.32, held against its recorded KV events (tests/unit/sim/test_block_pool.py):

- One block is the null block, so `num_blocks` of the engine's flag leave `num_blocks - 1` to use.
- A block that nobody holds keeps its content until it is taken again. The one freed first is taken first; a request
  frees its tail before its head, so that a long prompt loses its end first. Blocks without content are taken before
  any with.
- The same hash may live in two blocks (a prompt that is an exact multiple of the block size recomputes its last
  block): each copy is stored and removed on its own.
- A block becomes visible to others when its computation is scheduled, not when it ends.

Nothing here knows tokens or time. Work is O(1) a block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple


class Stored(NamedTuple):
    """A run of consecutive blocks of one owner came into the cache."""

    owner: Any  # as given to `store`: whoever renders the event finds the tokens there
    first: int  # position of the run's first block in the owner's sequence
    hashes: tuple[int, ...]
    parent: int | None  # hash of the block before the run, None at the root


class Removed(NamedTuple):
    """One copy of a block was evicted."""

    hash: int


class Cleared(NamedTuple):
    """The whole cache was dropped."""


PoolEvent = Stored | Removed | Cleared

MAX_PENDING_EVENTS = 1_000_000  # between two steps; only a caller that never takes them gets there


class BlockPool:
    """`num_blocks` as in --num-gpu-blocks-override, `block_size` in tokens."""

    __slots__ = (
        "_cached",
        "_copies",
        "_emit",
        "_events",
        "_free",
        "_hash_of",
        "_references",
        "block_size",
        "changes",
        "num_blocks",
    )

    def __init__(self, num_blocks: int, block_size: int, *, emit_events: bool = False) -> None:
        if num_blocks < 2 or block_size < 1:
            raise ValueError(f"a pool needs 2 blocks of 1 token, got {num_blocks} of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.changes = 0  # grows with whatever may change the answer to "does it fit"
        self._emit = emit_events
        self._events: list[PoolEvent] = []
        # Block 0 is the null block. OrderedDict, not dict: taking the first key of a dict that is consumed from the
        # front walks over all the holes before it.
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(1, num_blocks))
        self._references = [0] * num_blocks
        self._hash_of: list[int | None] = [None] * num_blocks
        self._cached: dict[int, int] = {}  # hash -> the copy that is handed out
        self._copies: dict[int, list[int]] = {}  # hash -> further copies, oldest first

    @property
    def usable_blocks(self) -> int:
        return self.num_blocks - 1

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds, cached or blank."""
        return len(self._free)

    @property
    def cached_blocks(self) -> int:
        """Blocks with content, held or not; copies count."""
        return len(self._cached) + sum(map(len, self._copies.values()))

    @property
    def usage(self) -> float:
        """Share of blocks held, 0 to 1: vllm:kv_cache_usage_perc."""
        return 1.0 - len(self._free) / (self.num_blocks - 1)

    def match(self, hashes: Sequence[int], limit: int) -> list[int]:
        """The cached blocks of the longest prefix of `hashes`, at most `limit`; nothing is taken."""
        cached = self._cached
        found: list[int] = []
        for position in range(min(limit, len(hashes))):
            block = cached.get(hashes[position])
            if block is None:
                break
            found.append(block)
        return found

    def match_length(self, hashes: Sequence[int], limit: int) -> int:
        """How many blocks `match` would find."""
        cached = self._cached
        for position in range(min(limit, len(hashes))):
            if hashes[position] not in cached:
                return position
        return min(limit, len(hashes))

    def is_cached(self, block_hash: int) -> bool:
        return block_hash in self._cached

    def unheld(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` are on the free list: taking them costs as many free blocks."""
        references = self._references
        return sum(1 for block in blocks if references[block] == 0)

    def hold(self, blocks: Sequence[int]) -> None:
        """Take matched blocks for one more owner."""
        self.changes += 1
        references, free = self._references, self._free
        for block in blocks:
            if references[block] == 0:
                del free[block]
            references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """`count` blocks for one owner, evicting what was used longest ago. The caller has checked `free_blocks`."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks asked of {len(self._free)} free ones")
        self.changes += 1
        taken: list[int] = []
        for _ in range(count):
            block, _nothing = self._free.popitem(last=False)
            self._evict(block)
            self._references[block] = 1
            taken.append(block)
        return taken

    def store(self, owner: object, blocks: Sequence[int], hashes: Sequence[int], first: int, end: int) -> None:
        """Name the owner's blocks at positions `first` to `end`, whose content is now (being) computed."""
        if first >= end:
            return
        self.changes += 1
        for position in range(first, end):
            block, block_hash = blocks[position], hashes[position]
            self._hash_of[block] = block_hash
            if self._cached.setdefault(block_hash, block) != block:
                self._copies.setdefault(block_hash, []).append(block)
        if self._emit:
            self._note(Stored(owner, first, tuple(hashes[first:end]), hashes[first - 1] if first else None))

    def release(self, blocks: Sequence[int]) -> None:
        """One owner lets go of its blocks, given in order; the tail becomes free, and evictable, before the head."""
        self.changes += 1
        references, free, hash_of = self._references, self._free, self._hash_of
        for block in reversed(blocks):
            references[block] -= 1
            if references[block] == 0:
                free[block] = None
                if hash_of[block] is None:
                    free.move_to_end(block, last=False)

    def reset(self) -> bool:
        """Forget all content. False, and nothing done, while any block is held."""
        if len(self._free) != self.num_blocks - 1:
            return False
        self.changes += 1
        self._cached.clear()
        self._copies.clear()
        self._hash_of = [None] * self.num_blocks
        if self._emit:
            self._note(Cleared())
        return True

    def take_events(self) -> list[PoolEvent]:
        """What happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    def check(self) -> None:
        """Walk all invariants; AssertionError with detail if one is broken."""
        for block in range(1, self.num_blocks):
            assert self._references[block] >= 0, f"block {block} has {self._references[block]} references"
            assert (self._references[block] == 0) == (block in self._free), (
                f"block {block} is held and free, or neither"
            )
        assert 0 not in self._free, "the null block is free"
        named = sorted(block for block in range(1, self.num_blocks) if self._hash_of[block] is not None)
        known = list(self._cached.values())
        for block_hash, copies in self._copies.items():
            assert copies, f"an empty list of copies for {block_hash}"
            assert block_hash in self._cached, f"copies of {block_hash} without a first one"
            known.extend(copies)
        assert sorted(known) == named, "blocks with a hash and the table of hashes differ"
        for block_hash, block in self._cached.items():
            assert self._hash_of[block] == block_hash, f"block {block} is filed under another hash"

    def _evict(self, block: int) -> None:
        block_hash = self._hash_of[block]
        if block_hash is None:
            return
        self._hash_of[block] = None
        copies = self._copies.get(block_hash)
        if self._cached[block_hash] == block:
            if copies:
                self._cached[block_hash] = copies.pop(0)
            else:
                del self._cached[block_hash]
        elif copies:
            copies.remove(block)
        if copies is not None and not copies:
            del self._copies[block_hash]
        if self._emit:
            self._note(Removed(block_hash))

    def _note(self, event: PoolEvent) -> None:
        if len(self._events) >= MAX_PENDING_EVENTS:
            raise RuntimeError("nobody takes the pool's events")
        self._events.append(event)
