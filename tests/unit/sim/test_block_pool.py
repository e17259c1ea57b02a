"""The prefix cache: sharing, eviction order, copies, and what it refuses."""

from __future__ import annotations

import pytest

from router.sim import block_pool
from router.sim.block_pool import BlockPool, Cleared, Removed, Stored


def filled(pool: BlockPool, hashes: list[int]) -> list[int]:
    """Blocks of one owner with these contents, still held."""
    blocks = pool.allocate(len(hashes))
    pool.store(None, blocks, hashes, 0, len(hashes))
    return blocks


def test_one_block_is_the_null_block() -> None:
    pool = BlockPool(64, 32)
    assert (pool.usable_blocks, pool.free_blocks, pool.usage) == (63, 63, 0.0)
    pool.allocate(63)
    assert pool.usage == 1.0
    with pytest.raises(ValueError, match="1 blocks asked of 0"):
        pool.allocate(1)


def test_a_match_is_the_longest_prefix_and_ends_at_the_limit() -> None:
    pool = BlockPool(10, 16)
    blocks = filled(pool, [1, 2, 3])
    assert pool.match([1, 2, 3, 4], 9) == blocks
    assert pool.match([1, 9, 3], 9) == blocks[:1]
    assert pool.match([1, 2, 3], 2) == blocks[:2]
    assert pool.match([2, 3], 9) == blocks[1:]  # chained hashes name a place in a prompt: the caller starts at the root


def test_idle_blocks_stay_until_taken_tail_first() -> None:
    pool = BlockPool(5, 16, emit_events=True)
    pool.release(filled(pool, [1, 2, 3, 4]))
    pool.take_events()
    assert pool.usage == 0.0
    assert pool.cached_blocks == 4
    pool.allocate(2)
    assert pool.take_events() == [Removed(4), Removed(3)]
    assert len(pool.match([1, 2, 3, 4], 9)) == 2


def test_least_recently_used_goes_first() -> None:
    pool = BlockPool(5, 16, emit_events=True)
    first, second = filled(pool, [1, 2]), filled(pool, [3, 4])
    pool.release(first)
    pool.release(second)
    pool.hold(pool.match([1, 2], 9))
    pool.release(first)
    pool.take_events()
    pool.allocate(2)
    assert pool.take_events() == [Removed(4), Removed(3)]


def test_blank_blocks_go_before_any_content() -> None:
    pool = BlockPool(5, 16, emit_events=True)
    pool.release(filled(pool, [1, 2]))
    blank = pool.allocate(2)
    pool.release(blank)
    pool.take_events()
    assert sorted(pool.allocate(2)) == sorted(blank)
    assert pool.take_events() == []


def test_held_blocks_are_never_evicted() -> None:
    pool = BlockPool(4, 16)
    held = filled(pool, [1])
    pool.hold(held)
    pool.release(held)
    assert pool.free_blocks == 2
    pool.allocate(2)
    assert pool.match([1], 1) == held


def test_two_copies_of_one_hash_come_and_go_each_on_its_own() -> None:
    pool = BlockPool(4, 16, emit_events=True)
    first, second = filled(pool, [7]), filled(pool, [7])
    assert pool.cached_blocks == 2
    pool.release(first)
    pool.release(second)
    pool.check()
    pool.take_events()
    pool.allocate(2)  # the blank one, then the first copy
    assert pool.take_events() == [Removed(7)]
    assert pool.match([7], 1) == second
    pool.allocate(1)
    assert pool.take_events() == [Removed(7)]
    assert pool.match([7], 1) == []
    pool.check()


def test_stored_events_name_owner_place_and_parent() -> None:
    pool = BlockPool(10, 16, emit_events=True)
    owner = object()
    blocks = pool.allocate(3)
    pool.store(owner, blocks, [1, 2, 3], 0, 2)
    pool.store(owner, blocks, [1, 2, 3], 2, 3)
    pool.store(owner, blocks, [1, 2, 3], 3, 3)
    assert pool.take_events() == [Stored(owner, 0, (1, 2), None), Stored(owner, 2, (3,), 2)]


def test_reset_needs_an_idle_pool() -> None:
    pool = BlockPool(4, 16, emit_events=True)
    blocks = filled(pool, [1])
    assert not pool.reset()
    assert pool.match([1], 1) == blocks
    pool.release(blocks)
    pool.take_events()
    assert pool.reset()
    assert pool.take_events() == [Cleared()]
    assert pool.match([1], 1) == []
    pool.check()


def test_events_that_nobody_takes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_pool, "MAX_PENDING_EVENTS", 3)
    pool = BlockPool(10, 16, emit_events=True)
    for value in range(3):
        filled(pool, [value])
    with pytest.raises(RuntimeError, match="nobody takes"):
        filled(pool, [9])


@pytest.mark.parametrize(("blocks", "size"), [(1, 16), (10, 0)])
def test_sizes_that_cannot_be(blocks: int, size: int) -> None:
    with pytest.raises(ValueError, match="a pool needs"):
        BlockPool(blocks, size)


def test_check_finds_a_broken_table() -> None:
    pool = BlockPool(4, 16)
    filled(pool, [1])
    pool._cached[2] = pool._cached.pop(1)
    with pytest.raises(AssertionError, match="another hash"):
        pool.check()
