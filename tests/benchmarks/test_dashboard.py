"""What the dashboard costs on the event loop: a sample each second, and an answer each second while a page is open."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router.backends.in_flight import InFlight
from router.dashboard.history import STEP_S
from router.dashboard.live import Question
from tests.unit.dashboard.test_live import Told


def busy(count: int) -> Told:
    fleet = Told(*(f"gpu-{at}" for at in range(count)))
    for backend in fleet.backends:
        counts = fleet.metrics.by_backend[backend.name]
        counts.attempts, counts.ttft_count, counts.ttft_sum_s = 100, 100, 5.0
        fleet.metrics.prompt_tokens[backend.name] = 100_000
        fleet.metrics.matched_predicted[backend.name] = 70_000
    fleet.recorder.stop()
    for _ in range(700):
        fleet.recorder.sample()
    return fleet


def work(fleet: Told) -> None:
    """A second of traffic: every figure of every backend changes."""
    fleet.metrics.codes[200] += 100
    for backend in fleet.backends:
        fleet.metrics.ttft.observe(0.1)
        report = backend.report
        queries = (report.prefix_queries or 0.0) + 1000.0
        backend.report = replace(
            report, at=1000.0, running=queries % 7, prefix_queries=queries, prefix_hits=queries / 2
        )


@pytest.mark.parametrize("count", [4, 64, 512, 1024])
def test_sample(benchmark, count):
    """Every fifth ends a step of each backend: the mean holds its share of that, the maximum all of it."""
    fleet = busy(count)
    guards = [InFlight(backend) for backend in fleet.backends]
    benchmark.pedantic(fleet.recorder.sample, setup=lambda: work(fleet), rounds=20 * STEP_S)
    for guard in guards:
        guard.release()


@pytest.mark.parametrize("count", [4, 64, 512, 1024])
def test_answer_where_everything_changed(benchmark, count):
    fleet = busy(count)
    boot = fleet.ask()["boot"]

    def a_second() -> tuple[tuple[Question], dict[str, object]]:
        work(fleet)
        fleet.recorder.sample()
        samples = fleet.recorder.samples
        return (Question(boot, samples - 1, 0, (1, 2, 3), 1, fleet.recorder.steps),), {}

    benchmark.pedantic(fleet.live.answer, setup=a_second, rounds=50)


@pytest.mark.parametrize("count", [64, 512])
def test_first_answer(benchmark, count):
    fleet = busy(count)
    fleet.ask()
    body = benchmark(fleet.live.answer, Question())
    benchmark.extra_info["bytes"] = len(body)
