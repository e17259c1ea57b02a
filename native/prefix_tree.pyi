"""Which backend holds which prefix: a radix tree over chained block hashes, one for all models and backends."""

from array import array
from typing import Self, final

from native.block_hash import BlockHashes

MAX_BACKENDS: int
MIN_MEMORY_LIMIT_BYTES: int

@final
class PrefixTree:
    """For each backend, the blocks that it likely has cached: a mirror of its LRU cache, written as prompts are sent.

    A backend is named by its slot, a small number from add_backend(); every method raises ValueError for one that is
    not live, and TypeError for arguments of the wrong type. Where memory cannot be had, insert() and add_backend()
    raise MemoryError and leave the tree as it was.

    Two bounds evict, both the least recently used first and of one prompt the tail before the head: a backend's own
    capacity (set_capacity), and `memory_limit_bytes` over everything, which takes the blocks used longest ago whoever
    holds them. What an insert() touches is the most recent.
    """

    matched: array[int]
    """What the last match() found: matched[slot] blocks. It has MAX_BACKENDS places, those without a backend are 0,
    and it belongs to the tree: read it before the next call of match()."""

    def __new__(cls, memory_limit_bytes: int) -> Self:
        """ValueError below MIN_MEMORY_LIMIT_BYTES."""

    def add_backend(self) -> int:
        """The slot of a new backend: empty, without a capacity. The lowest free one, so slots of removed backends come
        again. ValueError for more than MAX_BACKENDS at once."""

    def remove_backend(self, slot: int) -> None:
        """Forget the backend with all that it held; the slot is free."""

    def clear_backend(self, slot: int) -> None:
        """Forget all that it held (its cache was reset, it restarted). Capacity and counters stay."""

    def set_capacity(self, slot: int, blocks: int) -> None:
        """The most blocks that the backend can hold, 0 for no limit of its own. Evicts down to it at once."""

    def insert(self, slot: int, blocks: BlockHashes) -> int:
        """This prompt was sent to this backend: it holds these blocks now, as the most recently used.

        Evicts the backend down to its capacity, then everything to the memory limit. A prompt longer than the capacity
        keeps its head: the rest is not inserted. Returns how many blocks were new to the backend.
        """

    def match(self, blocks: BlockHashes) -> int:
        """The longest prefix that any backend holds, in blocks; each backend's own goes to `matched`. Touches
        nothing."""

    def match_one(self, slot: int, blocks: BlockHashes) -> int:
        """The longest prefix that this backend holds, in blocks. Touches nothing, `matched` included."""

    def forget_after(self, slot: int, blocks: BlockHashes, keep: int) -> int:
        """This backend never computed the prompt past its first `keep` blocks (the attempt failed before its prefill):
        drop the rest, and what the backend holds below it. Returns how many blocks went; they do not count as evicted.
        ValueError for a negative `keep`."""

    def blocks_of(self, slot: int) -> int:
        """Blocks that the backend holds."""

    def evicted(self, slot: int) -> int:
        """Blocks evicted from the backend since it was added, for its capacity or for the memory limit."""

    @property
    def evicted_by_memory(self) -> int:
        """Blocks evicted for the memory limit since the start, over all backends."""

    @property
    def node_count(self) -> int: ...
    @property
    def entry_count(self) -> int:
        """Pairs of a node and a backend that holds some of it."""

    @property
    def memory_limit_bytes(self) -> int: ...
    def memory_bytes(self) -> int:
        """Bytes allocated: arrays with their slack, table, and runs as the C library rounds them up."""

    def __len__(self) -> int:
        """Pairs of a block and a backend that holds it."""

    def check(self) -> None:
        """Walk all invariants, links and counters; AssertionError says what is wrong. Slow: for tests."""

    def holdings(self) -> dict[int, list[tuple[int, int, int]]]:
        """For tests: by slot, in the order of eviction, each block as (depth, chain, tick of its last use), where
        chain = hash((chain of the block before, or 0, block hash)) names the block with its prefix."""

    def _fail_allocation(self, after: int) -> None:
        """For tests: make the allocation that comes as number `after` from now fail, once; 0 for none."""
