"""What the index's block size costs and loses: the figures of docs/decisions/0001-block-size.md.

    python -m tests.benchmarks.test_index_block_size [TRACE.jsonl.gz ...]

prints them; a trace has one request a line, {"in": tokens, "hash_ids": [one id a block, naming its prefix too]}. Under
pytest (with pytest-benchmark) the same placement is one benchmark for each block and prompt size.
"""

from __future__ import annotations

import gzip
import json
import random
import statistics
import sys
import time
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from native.block_hash import BlockHashes
from native.prefix_tree import PrefixTree

BLOCK_BYTES = (64, 128, 256, 512)
PROMPT_BYTES = (4_000, 40_000, 400_000)
ENGINE_BLOCK_TOKENS = 16
BYTES_PER_TOKEN = 4.2  # English chat; code and other languages have 2.5 to 4


class Placement:
    """Eight backends that share a system prompt; each request is one more turn of a conversation, then its placement:
    hash, match over all, insert at one. A tenth of each prompt is new, the rest was sent before."""

    def __init__(self, block_bytes: int, prompt_bytes: int) -> None:
        rng = random.Random(7)
        self.block_bytes = block_bytes
        self.tree = PrefixTree(1 << 28)
        self.slots = [self.tree.add_backend() for _ in range(8)]
        system = rng.randbytes(prompt_bytes // 4)
        self.prompts = []
        for i in range(40):
            old = system + rng.randbytes(prompt_bytes * 9 // 10 - len(system))
            self.tree.insert(self.slots[i % 8], BlockHashes.from_bytes(old, block_bytes))
            self.prompts.append(old + rng.randbytes(prompt_bytes - len(old)))
        self.turn = 0

    def place(self) -> None:
        i = self.turn % 40
        self.turn += 1
        blocks = BlockHashes.from_bytes(self.prompts[i], self.block_bytes)
        self.tree.match(blocks)
        self.tree.insert(self.slots[i % 8], blocks)

    def bytes_per_kb(self) -> float:
        """Memory of the index for each 1,000 bytes of prompt that it knows (shared ones counted once)."""
        known = len({h for prompt in self.prompts for h in BlockHashes.from_bytes(prompt, self.block_bytes).tolist()})
        empty = PrefixTree(1 << 28).memory_bytes()
        return (self.tree.memory_bytes() - empty) / (known * self.block_bytes / 1000)


@pytest.mark.parametrize("block_bytes", BLOCK_BYTES)
@pytest.mark.parametrize("prompt_bytes", PROMPT_BYTES)
def test_place_a_prompt(benchmark: BenchmarkFixture, block_bytes: int, prompt_bytes: int) -> None:
    placement = Placement(block_bytes, prompt_bytes)
    benchmark.pedantic(placement.place, rounds=5, iterations=40)
    assert len(placement.tree) > 0


def seconds_to_place(block_bytes: int, prompt_bytes: int) -> tuple[float, float, float]:
    """(hash alone, all of it, index bytes per 1,000 prompt bytes); seconds are medians of 200 calls."""
    placements = [Placement(block_bytes, prompt_bytes) for _ in range(5)]
    hashing, whole = [], []
    for placement in placements:
        for prompt in placement.prompts:
            began = time.perf_counter()
            placement.place()
            placed = time.perf_counter()
            BlockHashes.from_bytes(prompt, block_bytes)
            whole.append(placed - began)
            hashing.append(time.perf_counter() - placed)
    return statistics.median(hashing), statistics.median(whole), placements[0].bytes_per_kb()


def shared_tokens(path: Path) -> list[tuple[int, float]]:
    """For each request (prompt tokens, tokens shared with any request before it, as an endless cache would). Where two
    prompts part inside a block of the trace, the place in it is drawn evenly."""
    rng = random.Random(8)
    seen: set[int] = set()
    requests = []
    with gzip.open(path, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    block_tokens = max(16, min(-(-row["in"] // len(row["hash_ids"])) for row in rows if len(row["hash_ids"]) > 8))
    for row in rows:
        ids = row["hash_ids"]
        shared = next((i for i, block in enumerate(ids) if block not in seen), len(ids))
        seen.update(ids)
        requests.append((row["in"], min(row["in"], (shared + rng.random()) * block_tokens) if shared else 0.0))
    return requests


def kept_share(requests: list[tuple[int, float]], block_bytes: int) -> float:
    """The part of the engine's hits, in its 16-token blocks, that an index of such blocks would have foreseen."""
    engine = index = 0.0
    for _, shared in requests:
        hit = shared // ENGINE_BLOCK_TOKENS * ENGINE_BLOCK_TOKENS
        engine += hit
        index += min(hit, shared * BYTES_PER_TOKEN // block_bytes * block_bytes / BYTES_PER_TOKEN)
    return index / engine


def main() -> None:
    print("block | prompt | hash us | hash+match+insert us | index bytes per 1,000 prompt bytes")
    for block_bytes in BLOCK_BYTES:
        for prompt_bytes in PROMPT_BYTES:
            hashing, whole, memory = seconds_to_place(block_bytes, prompt_bytes)
            print(f"{block_bytes} | {prompt_bytes} | {hashing * 1e6:.1f} | {whole * 1e6:.1f} | {memory:.0f}")
    for argument in sys.argv[1:]:
        requests = shared_tokens(Path(argument))
        shares = " | ".join(f"{kept_share(requests, block_bytes):.4f}" for block_bytes in BLOCK_BYTES)
        hits = [shared for _, shared in requests if shared]
        print(f"{Path(argument).name} | mean shared {sum(hits) / len(hits):.0f} tokens | {shares}")


if __name__ == "__main__":
    main()
