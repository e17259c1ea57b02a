"""What one placement costs: choose, placed, first_byte and observe, over 8 backends and a 1 KB prompt."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from random import Random

import pytest

from native.block_hash import BlockHashes
from native.prefix_tree import PrefixTree
from router.backends.backend import EngineReport
from router.clock import VirtualClock
from router.strategies.registry import FACTORIES, Dependencies, build
from router.strategies.strategy import End, Outcome, RoutingRequest
from tests.support.fleet import BLOCK_BYTES, MODEL, backend

ROUND = 200  # requests, each with 512 bytes of a shared system prompt and 512 of its own


@pytest.mark.parametrize("name", sorted(FACTORIES))
def test_one_placement(name: str, benchmark: Callable[..., object]) -> None:
    clock = VirtualClock()
    strategy = build(name, None, Dependencies(clock, Random(1), PrefixTree(64 << 20), BLOCK_BYTES, 500_000))
    backends = tuple(backend(f"b{n}") for n in range(8))
    for joined in backends:
        joined.report = EngineReport(at=clock.now(), block_size_tokens=16, num_gpu_blocks=20_000)
        strategy.joined(joined)
    prompts = [BlockHashes.from_bytes(b"s" * 512 + Random(n).randbytes(512), BLOCK_BYTES) for n in range(ROUND)]
    keys = [b"session-%d" % n for n in range(ROUND)]
    outcome = Outcome(End.COMPLETE, clock.now(), 200, 256, 128, 50)
    turn = count()

    def place() -> None:
        which = next(turn) % ROUND
        request = RoutingRequest(MODEL, clock.now(), blocks=prompts[which], prefix_bytes=1024, session_key=keys[which])
        choice = strategy.choose(request, backends)
        assert choice is not None
        strategy.placed(choice)
        clock.advance(0.02)
        strategy.first_byte(choice)
        strategy.observe(choice, outcome)

    benchmark(place)
