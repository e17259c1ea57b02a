"""Micro benchmarks of hashing and of the index, at the sizes of real prompts: pytest tests/benchmarks/test_index.py

Absolute times are for reading. Block sizes side by side, with memory: python -m tests.benchmarks.test_index_block_size
"""

from __future__ import annotations

import random

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from native.block_hash import BlockHashes
from native.prefix_tree import PrefixTree

HOLDERS = 8


def fresh(rng: random.Random, n: int) -> list[int]:
    return [rng.getrandbits(64) for _ in range(n)]


@pytest.mark.parametrize("block_bytes", [64, 128, 256, 512])
def test_hash_40_kb(benchmark: BenchmarkFixture, block_bytes: int) -> None:
    data = random.Random(1).randbytes(40_000)
    blocks = benchmark(BlockHashes.from_bytes, data, block_bytes)
    assert len(blocks) == 40_000 // block_bytes


@pytest.mark.parametrize("turns", [1, 64])
def test_match_2048_blocks_over_8_holders(benchmark: BenchmarkFixture, turns: int) -> None:
    # One run, or one that side branches have parted into `turns` nodes.
    rng = random.Random(2)
    tree = PrefixTree(1 << 28)
    slots = [tree.add_backend() for _ in range(HOLDERS)]
    prompt = fresh(rng, 2048)
    for slot in slots:
        for turn in range(1, turns + 1):
            tree.insert(slot, BlockHashes.from_list([*prompt[: 2048 * turn // turns], 1]))
        tree.insert(slot, BlockHashes.from_list(prompt))
    blocks = BlockHashes.from_list(prompt)
    assert benchmark(tree.match, blocks) == 2048
    assert tree.matched[:HOLDERS].tolist() == [2048] * HOLDERS


def test_match_below_a_system_prompt_in_a_full_index(benchmark: BenchmarkFixture) -> None:
    # 4,000 conversations of 8 system prompts over 8 backends, looked up in random order: the caches are cold.
    rng = random.Random(3)
    tree = PrefixTree(1 << 28)
    slots = [tree.add_backend() for _ in range(HOLDERS)]
    systems = [fresh(rng, 64) for _ in range(8)]
    prompts = [BlockHashes.from_list(rng.choice(systems) + fresh(rng, 192)) for _ in range(4000)]
    for blocks in prompts:
        tree.insert(rng.choice(slots), blocks)
    order = rng.sample(prompts, 1000)

    def look_up_all() -> int:
        return sum(tree.match(blocks) for blocks in order)

    assert benchmark(look_up_all) == 256 * 1000


def test_insert_1000_runs_of_256_blocks(benchmark: BenchmarkFixture) -> None:
    rng = random.Random(4)
    runs = [BlockHashes.from_list(fresh(rng, 256)) for _ in range(1000)]

    def empty() -> tuple[tuple[PrefixTree, int], dict[str, object]]:
        tree = PrefixTree(1 << 28)
        return (tree, tree.add_backend()), {}

    def insert_all(tree: PrefixTree, slot: int) -> int:
        for blocks in runs:
            tree.insert(slot, blocks)
        return len(tree)

    assert benchmark.pedantic(insert_all, setup=empty, rounds=20) == 256_000


@pytest.mark.parametrize("by", ["capacity", "memory"])
def test_insert_into_a_full_index(benchmark: BenchmarkFixture, by: str) -> None:
    # Every insert of 256 blocks evicts as many.
    rng = random.Random(5)
    tree = PrefixTree(1 << 28 if by == "capacity" else 1 << 22)
    slots = [tree.add_backend() for _ in range(HOLDERS)]
    if by == "capacity":
        for slot in slots:
            tree.set_capacity(slot, 100_000)
    runs = [BlockHashes.from_list(fresh(rng, 256)) for _ in range(5000)]
    for i, blocks in enumerate(runs):
        tree.insert(slots[i % HOLDERS], blocks)
    assert sum(tree.evicted(slot) for slot in slots) > 0
    turn = iter(range(1 << 60))

    def insert_next() -> int:
        i = next(turn)
        return tree.insert(slots[i % HOLDERS], runs[i % 5000])

    assert benchmark(insert_next) == 256
