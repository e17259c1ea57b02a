"""The tree's memory: its hard limit, its account, allocations that fail, and nothing left behind."""

from __future__ import annotations

import gc
import os
import random
import sys

import pytest

from native.block_hash import BlockHashes
from native.prefix_tree import MAX_BACKENDS, MIN_MEMORY_LIMIT_BYTES, PrefixTree

AMPLE = 1 << 28


def fresh(rng: random.Random, n: int) -> BlockHashes:
    return BlockHashes.from_list([rng.getrandbits(64) for _ in range(n)])


@pytest.mark.parametrize("limit", [MIN_MEMORY_LIMIT_BYTES, 300_000, 1 << 20])
@pytest.mark.parametrize("shortest", [1, 40, 2000])
def test_the_limit_holds_after_every_insert_and_is_used(limit: int, shortest: int) -> None:
    rng = random.Random(f"{limit} {shortest}")
    tree = PrefixTree(limit)
    slots = [tree.add_backend() for _ in range(4)]
    inserts = 4 * limit // (100 + 8 * shortest)
    for i in range(inserts):
        tree.insert(slots[i % 4], fresh(rng, rng.randint(shortest, 2 * shortest)))
        assert tree.memory_bytes() <= limit
        if i % (inserts // 8 + 1) == 0:
            tree.check()
    tree.check()
    assert tree.evicted_by_memory > 0
    assert tree.evicted_by_memory == sum(tree.evicted(slot) for slot in slots)
    # A sixth may lie idle where the table cannot double; one run at most is evicted beyond need.
    assert tree.memory_bytes() > limit * 0.8 - 16_000 * (shortest == 2000)


def test_one_insert_over_the_limit_drives_out_all_else_and_keeps_its_head() -> None:
    tree = PrefixTree(MIN_MEMORY_LIMIT_BYTES)
    a, b = tree.add_backend(), tree.add_backend()
    tree.insert(a, BlockHashes.from_list([1, 2, 3]))
    giant = BlockHashes.from_list(list(range(10, 50_010)))
    assert tree.insert(b, giant) == 50_000
    assert tree.memory_bytes() <= MIN_MEMORY_LIMIT_BYTES
    assert tree.blocks_of(a) == 0
    kept = tree.match(giant)
    assert kept == tree.blocks_of(b) == len(tree)
    assert kept * 8 > MIN_MEMORY_LIMIT_BYTES * 0.8
    assert tree.evicted_by_memory == 3 + 50_000 - kept
    tree.check()


def test_the_limit_takes_the_oldest_whoever_holds_it() -> None:
    tree = PrefixTree(MIN_MEMORY_LIMIT_BYTES)
    a, b = tree.add_backend(), tree.add_backend()
    prompts = [BlockHashes.from_list(list(range(i * 1000, i * 1000 + 900))) for i in range(40)]
    for i, blocks in enumerate(prompts):
        tree.insert((a, b)[i % 3 == 0], blocks)
    kept = [tree.match(blocks) for blocks in prompts]
    first = next(i for i, n in enumerate(kept) if n > 0)
    assert first > 0
    assert kept[:first] == [0] * first
    assert kept[first + 1 :] == [900] * (39 - first)
    assert 0 < kept[first] <= 900
    tree.check()


def test_a_shared_prompt_is_given_up_holder_by_holder() -> None:
    tree = PrefixTree(MIN_MEMORY_LIMIT_BYTES)
    slots = [tree.add_backend() for _ in range(100)]
    shared = BlockHashes.from_list(list(range(2000)))
    for slot in slots:
        tree.insert(slot, shared)
    assert len(tree) == 200_000
    other = BlockHashes.from_list(list(range(10_000, 17_000)))
    tree.insert(slots[0], other)
    tree.check()
    assert tree.match(other) > 4000
    tree.match(shared)
    left = tree.matched[:100].tolist()
    assert left[1:] == sorted(left[1:])


def test_the_limit_holds_with_the_most_backends() -> None:
    rng = random.Random(3)
    tree = PrefixTree(MIN_MEMORY_LIMIT_BYTES)
    first = tree.add_backend()
    tree.insert(first, fresh(rng, 7500))
    before = tree.blocks_of(first)
    for _ in range(MAX_BACKENDS - 1):
        tree.add_backend()
        assert tree.memory_bytes() <= MIN_MEMORY_LIMIT_BYTES
    assert tree.blocks_of(first) < before, "the array of backends took its part"
    tree.check()
    for slot in range(MAX_BACKENDS):
        tree.insert(slot, fresh(rng, 3))
        assert tree.memory_bytes() <= MIN_MEMORY_LIMIT_BYTES
    tree.check()
    assert len(tree) > 300


def test_memory_follows_the_load_from_tiny_nodes_to_long_runs_and_back() -> None:
    rng = random.Random(4)
    limit = 1 << 20
    tree = PrefixTree(limit)
    slot = tree.add_backend()
    for _ in range(2):
        for _ in range(8000):
            tree.insert(slot, fresh(rng, 1))
        tree.check()
        assert tree.node_count > limit // 200
        for _ in range(400):
            tree.insert(slot, fresh(rng, 1000))
        tree.check()
        assert len(tree) * 8 > limit * 0.75, "the arrays for the tiny nodes were given back"


def test_a_long_run_costs_little_more_than_its_hashes() -> None:
    rng = random.Random(5)
    tree = PrefixTree(AMPLE)
    slot = tree.add_backend()
    empty = tree.memory_bytes()
    for _ in range(200):
        tree.insert(slot, fresh(rng, 256))
    assert (tree.memory_bytes() - empty) / len(tree) < 9.0


def test_the_account_is_what_the_allocator_was_asked_for() -> None:
    tree = PrefixTree(AMPLE)
    slot = tree.add_backend()
    empty = tree.memory_bytes()
    tree.insert(slot, BlockHashes.from_list([1]))
    assert tree.memory_bytes() - empty == 32  # the smallest heap chunk
    tree.insert(slot, BlockHashes.from_list(list(range(1, 101))))
    assert tree.memory_bytes() - empty == 816  # 100 hashes, the heap's header, rounded up to 16
    tree.set_capacity(slot, 10)
    assert tree.memory_bytes() - empty == 96


def build(tree: PrefixTree) -> list[int]:
    slots = [tree.add_backend() for _ in range(3)]
    base = list(range(100, 160))
    for slot in slots:
        tree.insert(slot, BlockHashes.from_list(base[: 20 + 10 * slot]))
    for i in range(30):
        tree.insert(slots[i % 3], BlockHashes.from_list([*base[:i], 10_000 + i, 20_000 + i]))
    return slots


@pytest.mark.parametrize(
    "blocks",
    [
        [*range(100, 160), 1, 2],  # extends or branches at the deepest
        [*range(100, 104), 7, 8, 9],  # a child below an inner node
        list(range(100, 130)),  # ends inside
        [*range(100, 155), 5],  # splits
        list(range(5000, 5100)),  # a new root
    ],
)
def test_every_allocation_of_an_insert_may_fail_and_nothing_changes(blocks: list[int]) -> None:
    prompt = BlockHashes.from_list(blocks)
    failures = 0
    # Trees of different sizes, so that each array in turn is full and must grow.
    for extra in range(0, 60, 3):
        for after in range(1, 12):
            tree = PrefixTree(AMPLE)
            slots = build(tree)
            for i in range(extra):
                tree.insert(slots[0], BlockHashes.from_list([900_000 + i]))
            before = tree.holdings()
            tree._fail_allocation(after)
            try:
                tree.insert(slots[2], prompt)
            except MemoryError:
                failures += 1
                tree._fail_allocation(0)
                tree.check()
                assert tree.holdings() == before
                tree.insert(slots[2], prompt)
            tree._fail_allocation(0)
            tree.check()
            assert tree.match_one(slots[2], prompt) == len(prompt)
    assert failures >= 20


def test_adding_a_backend_may_fail_and_nothing_changes() -> None:
    tree = PrefixTree(AMPLE)
    for _ in range(8):
        tree.add_backend()
    tree._fail_allocation(1)
    with pytest.raises(MemoryError):
        tree.add_backend()
    assert tree.add_backend() == 8
    tree.check()


def test_memory_that_cannot_be_shrunk_stays_on_the_account() -> None:
    tree = PrefixTree(AMPLE)
    slot = tree.add_backend()
    tree.insert(slot, BlockHashes.from_list(list(range(100))))
    held = tree.memory_bytes()
    tree._fail_allocation(1)
    tree.set_capacity(slot, 10)
    assert tree.memory_bytes() == held
    tree.check()
    tree.set_capacity(slot, 9)
    assert tree.memory_bytes() == held - 816 + 80
    tree.check()


def test_compaction_that_gets_no_memory_leaves_a_sound_tree() -> None:
    for after in range(1, 6):
        tree = PrefixTree(AMPLE)
        a, b = tree.add_backend(), tree.add_backend()
        for i in range(500):  # parents with many children at three depths, so that every kind of link moves
            tree.insert(a if i % 5 else b, BlockHashes.from_list([i % 7, i % 31 + 100, i + 1000, i + 2000]))
        expected = tree.holdings()[b]
        tree._fail_allocation(after)
        tree.clear_backend(a)
        tree._fail_allocation(0)
        tree.check()
        assert tree.holdings()[b] == expected
        tree.insert(a, BlockHashes.from_list([0, 100, 1, 2, 3]))
        tree.check()


def test_nothing_is_left_when_all_backends_are_gone() -> None:
    rng = random.Random(6)
    tree = PrefixTree(AMPLE)
    slots = [tree.add_backend() for _ in range(8)]
    empty = tree.memory_bytes()
    heads = [[rng.getrandbits(64) for _ in range(30)] for _ in range(10)]
    for _ in range(3000):
        head = rng.choice(heads)[: rng.randint(0, 30)]
        tail = [rng.getrandbits(64) for _ in range(rng.randint(0, 20))]
        tree.insert(rng.choice(slots), BlockHashes.from_list(head + tail))
    assert tree.node_count > 1000
    for slot in slots:
        tree.remove_backend(slot)
        tree.check()
    assert (len(tree), tree.node_count, tree.entry_count) == (0, 0, 0)
    assert tree.memory_bytes() == empty


def test_calls_keep_no_reference_to_what_they_are_given() -> None:
    tree = PrefixTree(AMPLE)
    slot = tree.add_backend()
    blocks = BlockHashes.from_list(list(range(1000)))
    matched = tree.matched
    references = (sys.getrefcount(blocks), sys.getrefcount(matched))
    for keep in range(100):
        tree.insert(slot, blocks)
        tree.match(blocks)
        tree.match_one(slot, blocks)
        tree.forget_after(slot, blocks, keep)
        tree.set_capacity(slot, 500)
    assert (sys.getrefcount(blocks), sys.getrefcount(matched)) == references


@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer holds freed memory back")
def test_a_dropped_tree_gives_its_memory_back() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * 4096

    blocks = BlockHashes.from_list(list(range(100_000)))

    def cycle() -> None:
        tree = PrefixTree(AMPLE)
        slot = tree.add_backend()
        tree.insert(slot, blocks)
        tree.insert(slot, BlockHashes.from_list([1, 2, 3]))

    cycle()
    gc.collect()
    before = resident()
    for _ in range(100):
        cycle()
    # 80 MB passed through.
    assert resident() - before < 16_000_000
