"""Micro benchmarks of the KV index: pytest tests/benchmarks/test_kv_index.py

Beside Dynamo's RadixTree in one process, alternating, medians and ratios: PYTHONPATH=. python -m
tests.benchmarks.test_kv_index in an environment with `ai-dynamo-runtime` and `msgspec`, on the same Python as the
build. The tree is fed what it takes (JSON with ready hashes), the index what engines send (msgpack with token ids,
which it hashes itself): the index does the larger part of the work in its figures.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from native.block_hash import BlockHashes
from native.kv_index import KvIndex
from native.token_hash import block_hashes

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

SIZE = 16
HOLDERS = 8
AMPLE = 1 << 30


class Run:
    """Blocks that hang on one parent, as the engine publishes them and as the tree takes them."""

    def __init__(self, rng: random.Random, n: int, parent: int | None = None) -> None:
        self.names = [rng.getrandbits(63) for _ in range(n)]
        self.tokens = [rng.randrange(128_000) for _ in range(n * SIZE)]
        self.blocks = block_hashes(self.tokens, SIZE)
        event = {
            "type": "BlockStored",
            "block_hashes": self.names,
            "parent_block_hash": parent,
            "token_ids": self.tokens,
            "block_size": SIZE,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None] * n,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
        self.frame = msgspec.msgpack.encode([1.5, [event], 0])
        own = [block & (2**63 - 1) for block in self.blocks.tolist()]
        blocks = [{"block_hash": name, "tokens_hash": own} for name, own in zip(self.names, own, strict=True)]
        self.json = json.dumps({"event_id": 0, "data": {"stored": {"parent_hash": parent, "blocks": blocks}}}).encode()
        self.own = own


def runs(seed: int, count: int, n: int) -> list[Run]:
    rng = random.Random(seed)
    return [Run(rng, n) for _ in range(count)]


def decoding(seed: int, sequences: int, n: int) -> list[Run]:
    """Blocks one by one, each below the one before, as decoding fills them; the sequences take turns."""
    rng = random.Random(seed)
    last: list[int | None] = [None] * sequences
    made = []
    for i in range(sequences * n):
        made.append(Run(rng, 1, last[i % sequences]))
        last[i % sequences] = made[-1].names[0]
    return made


def filled(all_runs: list[Run], holders: int = 1) -> KvIndex:
    index = KvIndex(AMPLE)
    for rank in [index.add_rank() for _ in range(holders)]:
        for run in all_runs:
            index.apply(rank, run.frame)
    return index


def empty() -> tuple[tuple[KvIndex, int], dict[str, object]]:
    index = KvIndex(AMPLE)
    return (index, index.add_rank()), {}


def test_frames_of_256_blocks(benchmark: BenchmarkFixture) -> None:
    frames = [run.frame for run in runs(1, 400, 256)]

    def apply_all(index: KvIndex, rank: int) -> int:
        for frame in frames:
            index.apply(rank, frame)
        return len(index)

    assert benchmark.pedantic(apply_all, setup=empty, rounds=10) == 400 * 256


def test_frames_of_one_block(benchmark: BenchmarkFixture) -> None:
    frames = [run.frame for run in decoding(2, 64, 200)]

    def apply_all(index: KvIndex, rank: int) -> int:
        for frame in frames:
            index.apply(rank, frame)
        return len(index)

    assert benchmark.pedantic(apply_all, setup=empty, rounds=10) == 64 * 200


def test_match_2048_blocks_over_8_holders(benchmark: BenchmarkFixture) -> None:
    run = runs(3, 1, 2048)[0]
    index = filled([run], HOLDERS)
    assert benchmark(index.match, run.blocks, SIZE) == 2048
    assert index.matched_gpu[:HOLDERS].tolist() == [2048] * HOLDERS


def test_match_in_a_full_index_that_lies_in_no_order(benchmark: BenchmarkFixture) -> None:
    # 64 sequences that grew block by block, side by side: no block stands behind the one before it.
    rng = random.Random(4)
    tokens = [[rng.randrange(128_000) for _ in range(256 * SIZE)] for _ in range(64)]
    index = KvIndex(AMPLE)
    rank = index.add_rank()
    for i in range(256):
        for sequence in range(64):
            event = ["BlockStored", [sequence << 32 | i], (sequence << 32 | i - 1) if i else None]
            event += [tokens[sequence][i * SIZE : (i + 1) * SIZE], SIZE]
            index.apply(rank, msgspec.msgpack.encode([1.5, [event], 0]))
    asked = [block_hashes(each, SIZE) for each in tokens]

    def match_all() -> int:
        return sum(index.match(blocks, SIZE) for blocks in asked)

    assert benchmark(match_all) == 64 * 256


def test_a_frame_into_a_full_index(benchmark: BenchmarkFixture) -> None:
    # At the memory limit every run of 256 blocks evicts as many.
    frames = [run.frame for run in runs(5, 400, 256)]
    index = KvIndex(1 << 21)
    rank = index.add_rank()
    for frame in frames:
        index.apply(rank, frame)
    turn = iter(range(1 << 60))

    def apply_next() -> int:
        return index.apply(rank, frames[next(turn) % 400]).stored

    assert index.evicted(rank) > 0
    benchmark(apply_next)


def test_forgetting_a_rank_of_100_000_blocks_that_others_hold(benchmark: BenchmarkFixture) -> None:
    frames = [run.frame for run in runs(6, 400, 256)]

    def loaded() -> tuple[tuple[KvIndex], dict[str, object]]:
        index = KvIndex(AMPLE)
        for rank in (index.add_rank(), index.add_rank()):
            for frame in frames:
                index.apply(rank, frame)
        return (index,), {}

    def clear(index: KvIndex) -> int:
        index.clear_rank(0)
        index._purge()
        return len(index)

    assert benchmark.pedantic(clear, setup=loaded, rounds=5) == 400 * 256


# --- beside Dynamo ---


def seconds(call: Callable[[], object], times: int) -> float:
    begin = time.process_time()
    for _ in range(times):
        call()
    return (time.process_time() - begin) / times


def compare(name: str, unit: str, ours: Callable[[], float], theirs: Callable[[], float], rounds: int = 7) -> None:
    """Both give a time; alternating, so that a busy machine is busy for both."""
    pairs = [(ours(), theirs()) for _ in range(rounds)]
    ratios = sorted(b / a for a, b in pairs)
    a, b = (statistics.median(column) for column in zip(*pairs, strict=True))
    scale, digits = (1e6, 2) if unit == "us" else (1e9, 0)
    print(
        f"{name:34} {a * scale:9.{digits}f} {b * scale:9.{digits}f} {unit}"
        f"   {statistics.median(ratios):6.1f} times as fast ({ratios[0]:.1f} to {ratios[-1]:.1f})"
    )


def main() -> None:
    from dynamo._core import RadixTree  # type: ignore[import-not-found]

    print(f"{'':34} {'index':>9} {'RadixTree':>9}")
    large = runs(1, 200, 256)
    single = decoding(2, 64, 100)

    def ours_of(made: list[Run]) -> float:
        index = KvIndex(AMPLE)
        rank = index.add_rank()
        begin = time.process_time()
        for run in made:
            index.apply(rank, run.frame)
        return (time.process_time() - begin) / len(index)

    def theirs_of(made: list[Run]) -> float:
        tree = RadixTree()
        begin = time.process_time()
        for run in made:
            tree.apply_event(0, run.json)
        return (time.process_time() - begin) / sum(len(run.names) for run in made)

    compare("a block, in runs of 256", "ns", lambda: ours_of(large), lambda: theirs_of(large))
    compare("a block, in runs of 1", "ns", lambda: ours_of(single), lambda: theirs_of(single))

    long = runs(3, 1, 2048)[0]
    index = filled([*large, long], HOLDERS)
    tree: Any = RadixTree()
    for rank in range(HOLDERS):
        for run in [*large, long]:
            tree.apply_event(rank, run.json)
    for n in (256, 2048):
        blocks = BlockHashes.from_list(long.blocks.tolist()[:n])
        own = long.own[:n]
        assert index.match(blocks, SIZE) == n
        assert list(tree.find_matches(own).scores.values()) == [n] * HOLDERS
        compare(
            f"find {n} blocks, {HOLDERS} holders",
            "us",
            lambda blocks=blocks: seconds(lambda: index.match(blocks, SIZE), 300),  # type: ignore[misc]
            lambda own=own: seconds(lambda: tree.find_matches(own), 100),  # type: ignore[misc]
        )
    missing = runs(7, 1, 2048)[0]
    compare(
        "a miss of 2048 blocks",
        "us",
        lambda: seconds(lambda: index.match(missing.blocks, SIZE), 300),
        lambda: seconds(lambda: tree.find_matches(missing.own), 100),
    )
    print("\nbytes a block")
    more = runs(8, 400, 256)
    for holders, seeds in ((1, "one seed"), (8, "one seed"), (8, "a seed each")):
        index = KvIndex(AMPLE)
        before = KvIndex(1 << 20).memory_bytes()  # what is fixed, tables as good as none
        for rank in range(holders):
            index.add_rank()
            for run in more:
                index.apply(rank, run.frame if seeds == "one seed" else reseeded(run, rank))
        print(f"{holders} holders, {seeds:22} {(index.memory_bytes() - before) / index.block_count:9.1f}")


def reseeded(run: Run, seed: int) -> bytes:
    """The same blocks as another engine names them."""
    rng = random.Random(f"{seed} {run.names[0]}")
    names = [rng.getrandbits(64) for _ in run.names]
    return msgspec.msgpack.encode([1.5, [["BlockStored", names, None, run.tokens, SIZE]], 0])


if __name__ == "__main__":
    main()
