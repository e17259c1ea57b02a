"""What each engine holds, told by its KV events: for a request's block hashes, the longest unbroken run of each rank.

Block hashes are our own (native/token_hash); the engines' hashes serve to remove. How it works: kv_index.pyx.
"""

from array import array
from typing import Never, Self, final

from native.block_hash import BlockHashes

MAX_RANKS: int
MAX_GROUPS: int
MIN_MEMORY_LIMIT_BYTES: int
MAX_ORPHANS_PER_RANK: int

@final
class Applied:
    """What one batch did, counted in blocks unless it says events. Made by KvIndex.apply() alone."""

    def __init__(self, *args: Never, **kwargs: Never) -> None: ...
    @property
    def stored(self) -> int:
        """(Block, medium, group) that the rank did not hold before."""

    @property
    def removed(self) -> int:
        """Removals of what was held or waiting; of several references, each counts."""

    @property
    def cleared(self) -> int:
        """AllBlocksCleared events."""

    @property
    def unknown(self) -> int:
        """Events of a type or shape that we do not know, or of a group beyond MAX_GROUPS: skipped."""

    @property
    def orphans(self) -> int:
        """Events whose parent the rank does not hold: they wait."""

    @property
    def joined(self) -> int:
        """Events that waited and found their parent; their blocks count as stored."""

    @property
    def orphans_dropped(self) -> int:
        """Events that waited and never will be stored: the oldest at the bound, or all their blocks were removed."""

    @property
    def duplicates(self) -> int:
        """Stored again: one reference more (or an event that waits already)."""

    @property
    def retiered(self) -> int:
        """Known blocks that an event without tokens added to another medium."""

    @property
    def absent(self) -> int:
        """Hashes to remove or to re-tier that the rank does not hold."""

    @property
    def other_size(self) -> int:
        """Events of a block size that is not the rank's, in another group or medium, or of a partial block: skipped."""

    @property
    def refused(self) -> int:
        """Blocks that found no room even after eviction: the rank is incomplete."""

    @property
    def block_size_changed(self) -> bool:
        """The rank's block size is another one than before: what it held under the old one is forgotten."""

    @property
    def timestamp(self) -> float:
        """The engine's, Unix seconds; 0.0 where the batch could not be read so far."""

    @property
    def data_parallel_rank(self) -> int:
        """As the batch has it; -1 for none."""

    @property
    def malformed(self) -> bool:
        """The bytes broke: events before that place are applied, the one at it and those behind are not."""

@final
class KvIndex:
    """For each rank (one data-parallel rank of one engine) the blocks that it holds, by medium.

    A rank is a small number from add_rank(); every method raises ValueError for one that is not live. MemoryError comes
    from the constructor and add_rank() alone: elsewhere an allocation that fails is treated as the cap.

    At `memory_limit_bytes` the leaves stored longest ago go first, and what is above them once it is a leaf; a leaf
    stored again since the last turn is spared once. Whoever held them is incomplete: a match finds too
    little, never too much.
    """

    matched_gpu: array[int]
    """What the last match() found: matched_gpu[rank] leading blocks in GPU memory; in GPU or CPU memory; in any tier.
    MAX_RANKS places each, 0 without a rank; they belong to the index: read them before the next call of match()."""
    matched_cpu: array[int]
    matched_any: array[int]

    def __new__(cls, memory_limit_bytes: int) -> Self:
        """ValueError below MIN_MEMORY_LIMIT_BYTES. The decoder's scratch is in the limit up to 256 KiB; while a larger
        frame is read, up to 12 times its size stands beside it."""

    def add_rank(self) -> int:
        """The lowest free number. ValueError for more than MAX_RANKS at once."""

    def remove_rank(self, rank: int) -> None:
        """Forget the rank with all that it held; the number is free."""

    def clear_rank(self, rank: int) -> None:
        """Forget all that it held and what waits (restart, reset, a gap that no replay fills). It is complete
        again. Its block size stays until an event brings another one."""

    def apply(self, rank: int, payload: bytes) -> Applied:
        """Read one batch of events (the payload frame), of any vLLM release. Costs time in proportion to its size."""

    def match(self, blocks: BlockHashes, block_size: int) -> int:
        """How many leading blocks each rank of this block size holds without a gap, into the arrays; the others get 0.
        Returns the longest run of any. Touches nothing else."""

    def blocks_of(self, rank: int) -> int:
        """Blocks that the rank holds in any medium."""

    def evicted(self, rank: int) -> int:
        """Blocks that the memory limit took from the rank since it was added."""

    def incomplete(self, rank: int) -> bool:
        """The rank holds more than is known here, for want of memory."""

    def orphans_of(self, rank: int) -> int:
        """Events that wait for their parent, at most MAX_ORPHANS_PER_RANK. Their bytes are at most a sixteenth of the
        memory limit over all ranks."""

    def rank_block_size(self, rank: int) -> int:
        """Tokens; 0 before its first BlockStored."""

    @property
    def block_count(self) -> int:
        """Different blocks, whoever holds them, those included that only their children keep."""

    @property
    def memory_limit_bytes(self) -> int: ...
    def memory_bytes(self) -> int:
        """Bytes allocated, as the C library rounds them up."""

    def __len__(self) -> int:
        """Pairs of a block and a rank that holds it."""

    def check(self) -> None:
        """Walk all invariants, links and counters; AssertionError says what is wrong. Slow: for tests."""

    def holdings(self, rank: int) -> dict[int, tuple[int, dict[tuple[int, int], int]]]:
        """For tests: by engine hash, (block hash, references by (medium, group))."""

    def _purge(self) -> None:
        """For tests: sweep out what removed and cleared ranks held, now."""

    def _fail_allocation(self, after: int) -> None:
        """For tests: make the allocation that comes as number `after` from now fail, once; 0 for none."""
