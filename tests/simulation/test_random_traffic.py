"""Random schedules over the whole core; a failure is repeated by its seed, which stands in the test's name."""

from __future__ import annotations

import pytest

from router.strategies.registry import FACTORIES
from tests.simulation.random_traffic import Traffic

EXCHANGES = 150
SEEDS = range(6)


@pytest.mark.parametrize("strategy", FACTORIES)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_schedule_keeps_the_promises_and_leaves_nothing_behind(seed: int, strategy: str) -> None:
    traffic = Traffic(seed, strategy)
    traffic.run(EXCHANGES)
    assert traffic.world.begun >= EXCHANGES / 3
    assert traffic.whole_answers >= traffic.world.begun / 8, "too little went through for this to mean anything"
