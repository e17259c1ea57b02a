"""loadtest/policy/exact_mirror.py: a slot stands for an engine until its backend leaves."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

from loadtest.policy.exact_mirror import ExactMirror
from loadtest.policy.fleet import Engine, Fleet
from native.block_hash import BlockHashes
from router.clock import VirtualClock
from router.sim.engine_model import EngineConfig

BLOCKS = BlockHashes.from_list([1, 2, 3, 4])


def test_a_backend_that_left_matches_nothing_and_the_others_as_before() -> None:
    fleet = Fleet([Engine(EngineConfig()), Engine(EngineConfig())], VirtualClock(0.0), Random(1), 16)
    mirror = ExactMirror(fleet)
    slots = []
    for engine in range(2):
        mirror.joins = engine
        slots.append(mirror.add_backend())
    arrival: Any = SimpleNamespace(ids=(1, 2, 3, 4))
    mirror.current = arrival
    for slot in slots:
        mirror.insert(slot, BLOCKS)  # on its way, so it counts
    assert mirror.match(BLOCKS) == 4
    mirror.remove_backend(slots[0])
    assert mirror.match(BLOCKS) == 4
    assert list(mirror.matched) == [0, 4]
    mirror.remove_backend(slots[1])
    assert mirror.match(BLOCKS) == 0
