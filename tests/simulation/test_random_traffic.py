"""Random schedules over the whole core; a failure is repeated by its seed, which stands in the test's name."""

from __future__ import annotations

from collections import Counter

import pytest

from router.strategies.registry import FACTORIES
from tests.simulation.random_traffic import FAULTS, Traffic

EXCHANGES = 300


@pytest.mark.parametrize("strategy", FACTORIES)
@pytest.mark.parametrize("seed", range(6))
def test_every_schedule_keeps_the_promises_and_leaves_nothing_behind(seed: int, strategy: str) -> None:
    traffic = Traffic(seed, strategy)
    traffic.run(EXCHANGES)
    assert traffic.world.begun >= EXCHANGES / 3
    assert traffic.whole_answers >= traffic.world.begun / 8, "too little went through for this to mean anything"


@pytest.mark.parametrize("strategy", ["prefixaware", "kvaware"])
@pytest.mark.parametrize("seed", range(300, 304))
def test_a_held_line_loses_and_forgets_nobody(seed: int, strategy: str) -> None:
    traffic = Traffic(seed, strategy, hold_batch_tokens=1)
    traffic.run(EXCHANGES)
    assert traffic.whole_answers >= traffic.world.begun / 8
    assert traffic.world.metrics.held, "nobody was held"


@pytest.mark.parametrize("strategy", FACTORIES)
@pytest.mark.parametrize("seed", range(100, 102))
def test_a_drain_in_mid_traffic_ends_everything_once(seed: int, strategy: str) -> None:
    traffic = Traffic(seed, strategy)
    traffic.run_into_a_drain(EXCHANGES, drain_s=1.0)
    assert traffic.world.begun > 10


def test_the_schedules_reach_every_fault_and_every_phase() -> None:
    faults: Counter[str] = Counter()
    phases: Counter[str] = Counter()
    endings: Counter[str] = Counter()
    retries: Counter[str] = Counter()
    for seed in range(200, 206):
        traffic = Traffic(seed, list(FACTORIES)[seed % len(FACTORIES)])
        traffic.run(EXCHANGES)
        faults.update(traffic.faults)
        retries.update(traffic.world.metrics.retries)
        for (ended_by, phase), count in traffic.world.metrics.ended.items():
            phases[phase] += count
            endings[ended_by] += count
    assert set(faults) == set(FAULTS)
    assert set(phases) >= {"read_head", "read_body", "queued", "connecting", "await_head", "streaming", "done"}
    assert set(endings) == {"client", "upstream", "gateway"}
    assert set(retries) >= {"connect", "upstream_lost", "busy", "error_event", "first_byte_timeout", "stale_connection"}


def test_one_seed_gives_one_history() -> None:
    def history() -> list[object]:
        traffic = Traffic(7, "prefixaware")
        traffic.run(60)
        return [
            (line.ended, line.status, line.backend, line.attempts, line.total_s) for line in traffic.world.access_lines
        ]

    assert history() == history()
