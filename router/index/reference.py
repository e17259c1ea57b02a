"""The index of prefixes at its plainest: one object a block, one ordered dict a backend.

Two uses: what the native tree is held against, and `index = "reference"` for whoever must do without native code.
The contract is in native/prefix_tree.pyi; nothing here is clever, so that a difference is the tree's mistake.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from native.block_hash import BlockHashes

MAX_BACKENDS = 1024
MIN_MEMORY_LIMIT_BYTES = 65536

# What CPython takes, measured with tracemalloc on prompts of 200 blocks: an estimate, where the tree counts.
BYTES_PER_BLOCK = 600
BYTES_PER_PAIR = 60


class _Block:
    """One block of one prefix, or the root before all prefixes. `holders`: slot -> tick of the last use."""

    __slots__ = ("chain", "children", "depth", "hash", "holders", "parent")

    def __init__(self, parent: _Block | None, block_hash: int) -> None:
        self.parent = parent
        self.hash = block_hash
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.chain: int = 0 if parent is None else hash((parent.chain, block_hash))  # names the whole prefix
        self.children: dict[int, _Block] = {}
        self.holders: dict[int, int] = {}


class _Backend:
    """`lru` is in the order of eviction: the least recently used first, of one prompt the tail first."""

    __slots__ = ("capacity", "evicted", "lru")

    def __init__(self) -> None:
        self.capacity = 0
        self.evicted = 0
        self.lru: dict[_Block, None] = {}


class ReferenceIndex:
    """See native/prefix_tree.pyi."""

    def __init__(self, memory_limit_bytes: int) -> None:
        if memory_limit_bytes < MIN_MEMORY_LIMIT_BYTES:
            raise ValueError(f"memory_limit_bytes must be at least {MIN_MEMORY_LIMIT_BYTES}, not {memory_limit_bytes}")
        self.memory_limit_bytes = memory_limit_bytes
        self.matched = array("I", bytes(4 * MAX_BACKENDS))
        self.evicted_by_memory = 0
        self._root = _Block(None, 0)
        self._backends: dict[int, _Backend] = {}
        self._tick = 0
        self._blocks = 0
        self._pairs = 0

    def add_backend(self) -> int:
        slot = next((slot for slot in range(MAX_BACKENDS) if slot not in self._backends), None)
        if slot is None:
            raise ValueError(f"at most {MAX_BACKENDS} backends")
        self._backends[slot] = _Backend()
        return slot

    def remove_backend(self, slot: int) -> None:
        self.clear_backend(slot)
        del self._backends[slot]
        self.matched[slot] = 0

    def clear_backend(self, slot: int) -> None:
        backend = self._backend(slot)
        while backend.lru:
            self._drop(next(iter(backend.lru)), slot)

    def set_capacity(self, slot: int, blocks: int) -> None:
        backend = self._backend(slot)
        if blocks < 0:
            raise ValueError(f"a capacity is 0 or more blocks, not {blocks}")
        backend.capacity = blocks
        self._evict_to_capacity(slot)

    def insert(self, slot: int, blocks: BlockHashes) -> int:
        backend = self._backend(slot)
        hashes = blocks.tolist()
        if backend.capacity:
            del hashes[backend.capacity :]
        if not hashes:
            return 0
        self._tick += 1
        fresh = 0
        block = self._root
        path = []
        for block_hash in hashes:
            child = block.children.get(block_hash)
            if child is None:
                child = block.children[block_hash] = _Block(block, block_hash)
                self._blocks += 1
            block = child
            path.append(block)
        for block in reversed(path):
            if slot in block.holders:
                del backend.lru[block]
            else:
                fresh += 1
                self._pairs += 1
            backend.lru[block] = None
            block.holders[slot] = self._tick
        self._evict_to_capacity(slot)
        self._evict_to_memory_limit()
        return fresh

    def match(self, blocks: BlockHashes) -> int:
        for slot in self._backends:
            self.matched[slot] = 0
        longest = 0
        for block in self._walk(blocks):
            longest = block.depth
            for slot in block.holders:
                self.matched[slot] = block.depth
        return longest

    def match_one(self, slot: int, blocks: BlockHashes) -> int:
        self._backend(slot)
        return sum(1 for block in self._walk(blocks) if slot in block.holders)

    def forget_after(self, slot: int, blocks: BlockHashes, keep: int) -> int:
        self._backend(slot)
        if keep < 0:
            raise ValueError(f"keep is 0 or more blocks, not {keep}")
        first = next((block for block in self._walk(blocks) if block.depth == keep + 1), None)
        if first is None or slot not in first.holders:
            return 0
        found = [first]
        for block in found:  # grows as it goes: each parent before its children
            found += (child for child in block.children.values() if slot in child.holders)
        for block in reversed(found):
            self._drop(block, slot)
        return len(found)

    def blocks_of(self, slot: int) -> int:
        return len(self._backend(slot).lru)

    def evicted(self, slot: int) -> int:
        return self._backend(slot).evicted

    def evict_oldest(self, blocks: int) -> None:
        """Evict so many pairs as for the memory limit: whoever's block was used longest ago goes first."""
        for _ in range(blocks):
            oldest = [(next(iter(backend.lru)), slot) for slot, backend in self._backends.items() if backend.lru]
            block, slot = min(oldest, key=lambda candidate: candidate[0].holders[candidate[1]])
            self._evict(block, slot)
            self.evicted_by_memory += 1

    def memory_bytes(self) -> int:
        return self._blocks * BYTES_PER_BLOCK + self._pairs * BYTES_PER_PAIR

    def __len__(self) -> int:
        return self._pairs

    def holdings(self) -> dict[int, list[tuple[int, int, int]]]:
        """For tests: by slot, in the order of eviction, each block as (depth, chain, tick of its last use)."""
        return {
            slot: [(block.depth, block.chain, block.holders[slot]) for block in backend.lru]
            for slot, backend in self._backends.items()
        }

    def check(self) -> None:
        """Walk all blocks and hold them against the LRU dicts and the counters; AssertionError says what is wrong."""
        held: dict[int, set[_Block]] = {slot: set() for slot in self._backends}
        found = [self._root]
        for block in found:
            found += block.children.values()
            if block is not self._root and not block.holders:
                raise AssertionError(f"nobody holds block {block.chain} at {block.depth}")
            for slot in block.holders:
                held[slot].add(block)
                if block.parent is not self._root and block.parent is not None and slot not in block.parent.holders:
                    raise AssertionError(f"backend {slot} holds block {block.chain} and not the one before")
        for slot, backend in self._backends.items():
            if held[slot] != set(backend.lru):
                raise AssertionError(f"backend {slot}: its LRU and the blocks differ")
            if backend.capacity and len(backend.lru) > backend.capacity:
                raise AssertionError(f"backend {slot} holds {len(backend.lru)} of {backend.capacity} blocks")
        if len(found) - 1 != self._blocks or sum(map(len, held.values())) != self._pairs:
            raise AssertionError("blocks or pairs are miscounted")
        if self.memory_bytes() > self.memory_limit_bytes:
            raise AssertionError(f"{self.memory_bytes()} bytes are over the limit of {self.memory_limit_bytes}")

    def _backend(self, slot: int) -> _Backend:
        try:
            return self._backends[slot]
        except KeyError:
            raise ValueError(f"no backend has slot {slot}") from None

    def _walk(self, blocks: BlockHashes) -> Iterator[_Block]:
        block: _Block | None = self._root
        for block_hash in blocks.tolist():
            assert block is not None
            block = block.children.get(block_hash)
            if block is None:
                return
            yield block

    def _drop(self, block: _Block, slot: int) -> None:
        del self._backends[slot].lru[block]
        del block.holders[slot]
        self._pairs -= 1
        if not block.holders:
            # Nobody holds what comes after, either: it has no children.
            assert block.parent is not None
            del block.parent.children[block.hash]
            self._blocks -= 1

    def _evict(self, block: _Block, slot: int) -> None:
        self._drop(block, slot)
        self._backends[slot].evicted += 1

    def _evict_to_capacity(self, slot: int) -> None:
        backend = self._backends[slot]
        while backend.capacity and len(backend.lru) > backend.capacity:
            self._evict(next(iter(backend.lru)), slot)

    def _evict_to_memory_limit(self) -> None:
        while self._pairs and self.memory_bytes() > self.memory_limit_bytes:
            self.evict_oldest(1)
