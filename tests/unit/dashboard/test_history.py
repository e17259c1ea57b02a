"""The recorder on a virtual clock: what it counts, what it forgets, and that what it keeps is bounded."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from router.backends.backend import Backend, EngineReport, State
from router.backends.in_flight import InFlight
from router.backends.registry import Registry
from router.clock import VirtualClock
from router.dashboard import history
from router.dashboard.history import (
    BACKEND_COLUMNS,
    BACKEND_STEPS,
    KEPT_S,
    STEP_S,
    TOTAL_COLUMNS,
    TRACKED,
    WINDOW_S,
    Recorder,
    Ring,
    quantile,
)
from router.metrics import Metrics


class Fleet:
    def __init__(self, *names: str) -> None:
        self.clock = VirtualClock()
        self.registry = Registry(self.clock)
        self.metrics = Metrics()
        self.queued = 0
        self.backends = [self.add(name) for name in names]
        self.recorder = Recorder(self.clock, self.registry, self.metrics, lambda: self.queued)
        self.recorder.start()

    def add(self, name: str) -> Backend:
        backend = self.registry.add(name, f"http://{name}:8000", models=["m"])
        self.registry.set_state(backend, State.UP, "")
        return backend

    def report(self, backend: Backend, **figures: object) -> None:
        backend.report = replace(backend.report, at=self.clock.now(), **figures)

    def total(self, name: str, rows: int = KEPT_S) -> list[float]:
        return self.recorder.totals.last(name, rows)

    def of(self, backend: Backend, name: str, rows: int = BACKEND_STEPS) -> list[float]:
        return self.recorder.followed[backend].ring.last(name, rows)


def test_a_ring_gives_its_newest_rows_oldest_first_and_keeps_no_more_than_its_length() -> None:
    ring = Ring(("a", "b"), 3, "d")
    assert ring.last("a", 3) == []
    for at in range(5):
        ring.append((at, -at))
    assert ring.last("a", 10) == [2, 3, 4]
    assert ring.last("b", 2) == [-3, -4]
    assert ring.last("a", 1) == [4]
    assert ring.sum("a", 2) == 7
    assert ring.count == 5


def test_a_sum_leaves_out_what_is_not_known() -> None:
    ring = Ring(("a",), 3, "f")
    for value in (1.0, math.nan, 2.0):
        ring.append((value,))
    assert ring.sum("a", 3) == 3.0


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ([0, 0, 0, 0], 0.5, math.nan),
        ([4, 0, 0, 0], 0.5, 0.5),  # half of the first bucket
        ([0, 4, 0, 0], 0.5, 1.5),
        ([2, 2, 0, 0], 0.5, 1.0),
        ([2, 2, 0, 0], 0.75, 1.5),
        ([98, 0, 2, 0], 0.99, 3.0),  # half of the bucket from 2 to 4
        ([0, 0, 0, 7], 0.5, 4.0),  # beyond all bounds
        ([9, 0, 0, 1], 0.99, 4.0),
    ],
)
def test_quantiles_are_those_of_histogram_quantile(counts: list[int], share: float, expected: float) -> None:
    assert quantile((1.0, 2.0, 4.0), counts, share) == pytest.approx(expected, nan_ok=True)


def test_requests_are_sorted_by_what_became_of_them() -> None:
    fleet = Fleet("a")
    for code, count in ((200, 5), (404, 4), (429, 1), (503, 2), (499, 3), (500, 1), (502, 1)):
        fleet.metrics.codes[code] += count
    fleet.metrics.codes[200] += 1
    fleet.metrics.ended["upstream", "streaming"] += 1  # one of those with 200
    fleet.metrics.ended["client", "streaming"] += 1  # the client's doing
    fleet.clock.advance(1)
    fleet.clock.advance(1)
    assert fleet.total("requests") == [18, 0]
    assert fleet.total("failed") == [3, 0]
    assert fleet.total("refused") == [3, 0]
    assert fleet.total("invalid") == [4, 0]
    assert fleet.total("left") == [3, 0]


def test_what_was_counted_before_the_start_belongs_to_no_second() -> None:
    fleet = Fleet("a")
    fleet.recorder.stop()
    fleet.metrics.codes[200] += 1000
    fleet.recorder.start()
    fleet.clock.advance(1)
    assert fleet.total("requests") == [0]


def test_ttft_is_that_of_each_second_and_of_the_last_minute() -> None:
    fleet = Fleet("a")
    fleet.metrics.ttft.observe(0.2)
    fleet.clock.advance(1)
    fleet.clock.advance(1)
    fleet.metrics.ttft.observe(2.0)
    fleet.clock.advance(1)
    assert fleet.total("ttft_p50") == pytest.approx([0.175, math.nan, 1.75], nan_ok=True)  # middles of their buckets
    assert fleet.recorder.ttft.window(0.25) < 0.25 < 1.0 < fleet.recorder.ttft.window(0.99)
    fleet.clock.advance(WINDOW_S - 2)
    assert fleet.recorder.ttft.window(0.25) > 1.0  # the first one is over a minute old
    fleet.clock.advance(2)
    assert math.isnan(fleet.recorder.ttft.window(0.5))


def test_the_load_of_the_fleet_is_sampled_and_of_a_backend_the_peak_of_each_step() -> None:
    fleet = Fleet("a", "b")
    a, b = fleet.backends
    fleet.queued = 7
    guards = [InFlight(a), InFlight(a), InFlight(b)]
    fleet.clock.advance(1)
    guards[0].release()
    guards[2].release()
    fleet.clock.advance(2 * STEP_S - 1)
    assert fleet.total("in_flight") == [3] + [1] * (2 * STEP_S - 1)
    assert fleet.total("queued", 1) == [7]
    assert fleet.of(a, "in_flight") == [2, 1]
    assert fleet.of(b, "in_flight") == [1, 0]


def test_a_backends_step_has_its_own_counts_and_gauges() -> None:
    fleet = Fleet("a", "b")
    a, b = fleet.backends
    counts = fleet.metrics.by_backend["a"]
    counts.attempts, counts.failed, counts.ttft_count, counts.ttft_sum_s = 4, 1, 3, 0.75
    fleet.metrics.prompt_tokens["a"] += 100
    fleet.metrics.matched_predicted["a"] += 60
    fleet.report(a, running=3, waiting=None, kv_usage=0.5)
    fleet.clock.advance(STEP_S)
    counts.attempts += 1
    fleet.clock.advance(STEP_S)
    assert fleet.of(a, "attempts") == [4, 1]
    assert fleet.of(a, "failed") == [1, 0]
    assert fleet.of(a, "ttft_sum_s") == [0.75, 0]
    assert fleet.of(a, "ttft_count") == [3, 0]
    assert fleet.of(a, "prompt_tokens") == [100, 0]
    assert fleet.of(a, "predicted_tokens") == [60, 0]
    assert fleet.of(a, "running") == [3, 3]
    assert fleet.of(a, "kv_usage") == [0.5, 0.5]
    assert all(math.isnan(value) for value in fleet.of(a, "waiting"))  # it does not tell
    assert fleet.of(b, "attempts") == [0, 0]
    assert all(math.isnan(value) for value in fleet.of(b, "running"))  # it never reported: not 0
    assert fleet.total("prompt_tokens") == [100] + [0] * (2 * STEP_S - 1)
    assert fleet.total("predicted_tokens", 2 * STEP_S)[0] == 60


def test_an_engine_that_reports_no_more_has_no_figures_of_now() -> None:
    fleet = Fleet("a")
    (a,) = fleet.backends
    fleet.report(a, running=3)
    fleet.clock.advance(1)
    fleet.clock.advance(history.STALE_AFTER_S)
    followed = fleet.recorder.followed[a]
    assert followed.told(fleet.recorder.samples, fleet.recorder.stale_after)
    fleet.clock.advance(STEP_S)
    assert not followed.told(fleet.recorder.samples, fleet.recorder.stale_after)
    assert math.isnan(fleet.of(a, "running")[-1])
    fleet.report(a, running=4)
    fleet.clock.advance(STEP_S)
    assert fleet.of(a, "running")[-1] == 4


def test_seldom_asked_engines_are_not_stale_between_two_answers() -> None:
    fleet = Fleet("a")
    slow = Recorder(fleet.clock, fleet.registry, fleet.metrics, lambda: 0, poll_interval_s=60)
    assert slow.stale_after == 180
    slow.poll_every(2)  # as after a reload
    assert slow.stale_after == history.STALE_AFTER_S


def test_the_engines_own_counters_count_from_their_first_report_and_over_a_restart() -> None:
    fleet = Fleet("a")
    (a,) = fleet.backends
    fleet.clock.advance(1)
    fleet.report(a, prefix_queries=1_000_000.0, prefix_hits=900_000.0)
    fleet.clock.advance(1)
    fleet.report(a, prefix_queries=1_000_100.0, prefix_hits=900_060.0)
    fleet.clock.advance(1)
    fleet.report(a, prefix_queries=30.0, prefix_hits=0.0)  # another process
    fleet.clock.advance(1)
    fleet.report(a, prefix_queries=50.0, prefix_hits=10.0)
    fleet.clock.advance(1)
    assert fleet.total("queried_tokens") == [0, 0, 100, 0, 20]
    assert fleet.total("hit_tokens") == [0, 0, 60, 0, 10]
    assert fleet.of(a, "queried_tokens") == [120]
    assert fleet.of(a, "hit_tokens") == [70]


def test_a_state_is_dated_by_the_sample_that_first_saw_it() -> None:
    fleet = Fleet("a")
    (a,) = fleet.backends
    fleet.clock.advance(10)
    assert fleet.recorder.followed[a].changed_at == 0
    fleet.registry.set_state(a, State.DOWN, "refused")
    fleet.clock.advance(3)
    assert fleet.recorder.followed[a].changed_at == 11
    fleet.registry.drain("a")
    fleet.clock.advance(3)
    assert fleet.recorder.followed[a].changed_at == 14


def test_a_name_that_comes_back_is_another_backend_with_a_history_of_its_own() -> None:
    fleet = Fleet("a")
    (a,) = fleet.backends
    fleet.metrics.by_backend["a"].attempts = 5
    fleet.metrics.prompt_tokens["a"] = 500
    fleet.clock.advance(STEP_S)
    fleet.registry.remove("a")
    fleet.metrics.forget_backend("a")
    again = fleet.add("a")
    fleet.metrics.by_backend["a"].attempts = 2
    fleet.clock.advance(STEP_S)
    assert list(fleet.recorder.followed) == [again]
    assert fleet.recorder.followed[again].number == 2
    assert fleet.of(again, "attempts") == [2]
    assert a not in fleet.recorder.followed
    assert min(fleet.total("prompt_tokens")) == 0  # never less, though the sum fell


def test_seconds_in_which_the_loop_stood_still_are_gaps_and_rates_stay_true() -> None:
    fleet = Fleet("a")
    (a,) = fleet.backends
    fleet.clock.advance(1)
    fleet.metrics.codes[200] += 40
    # the loop is blocked: its timers run late
    late = fleet.clock._timers[0][2]
    late.cancel()
    fleet.clock.advance(10)
    late.callback()
    assert fleet.recorder.samples == 11
    assert [math.isnan(value) for value in fleet.total("requests")] == [False] + [True] * 9 + [False]
    assert fleet.total("requests", 1) == [4.0]
    assert fleet.recorder.followed[a].ring.count == fleet.recorder.steps == 2
    fleet.clock.advance(1)
    assert fleet.recorder.samples == 12


def test_a_stop_of_hours_fills_what_is_kept_and_no_more() -> None:
    fleet = Fleet("a")
    fleet.clock.advance(1)
    late = fleet.clock._timers[0][2]
    late.cancel()
    fleet.clock.advance(100_000)
    late.callback()
    assert fleet.recorder.samples == 1 + KEPT_S + 1


def test_nothing_runs_after_the_stop_and_two_starts_are_one() -> None:
    fleet = Fleet("a")
    fleet.recorder.start()
    assert fleet.clock.pending == 1
    fleet.recorder.stop()
    assert fleet.clock.pending == 0
    fleet.recorder.stop()


def test_ten_minutes_are_kept_and_not_a_second_more() -> None:
    fleet = Fleet("a")
    fleet.clock.advance(KEPT_S + 2 * STEP_S)
    assert {len(fleet.total(name, 10**6)) for name in TOTAL_COLUMNS} == {KEPT_S}
    assert {len(fleet.of(fleet.backends[0], name, 10**6)) for name in BACKEND_COLUMNS} == {BACKEND_STEPS}


def test_memory_is_bounded_by_the_backends_that_are_followed() -> None:
    fleet = Fleet(*(f"b{at}" for at in range(TRACKED + 3)))
    guards = [InFlight(fleet.backends[0]), InFlight(fleet.backends[-1])]
    fleet.clock.advance(STEP_S)
    assert len(fleet.recorder.followed) == TRACKED
    assert fleet.backends[-1] not in fleet.recorder.followed
    assert fleet.total("in_flight", 1) == [2]  # the total is of all
    full = fleet.recorder.memory_bytes()
    assert full == 8 * len(TOTAL_COLUMNS) * KEPT_S + 4 * len(BACKEND_COLUMNS) * BACKEND_STEPS * TRACKED < 6_100_000
    fleet.clock.advance(STEP_S)
    assert fleet.recorder.memory_bytes() == full
    fleet.registry.remove("b1")  # one goes, and there is room for one more
    fleet.clock.advance(1)
    assert len(fleet.recorder.followed) == TRACKED
    assert fleet.backends[TRACKED] in fleet.recorder.followed
    for guard in guards:
        guard.release()


def test_an_empty_fleet_is_sampled_too() -> None:
    fleet = Fleet()
    fleet.clock.advance(STEP_S)
    assert fleet.total("in_flight") == [0] * STEP_S
    assert fleet.recorder.followed == {}


def test_a_report_that_was_never_taken_has_no_figures() -> None:
    assert EngineReport().running == 0.0  # zeros that nobody measured
    fleet = Fleet("a")
    fleet.clock.advance(STEP_S)
    assert math.isnan(fleet.of(fleet.backends[0], "running")[0])
