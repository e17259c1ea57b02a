from __future__ import annotations

from collections import Counter
from random import Random

from router.clock import VirtualClock
from router.strategies.least_load import LeastLoad
from tests.support.fleet import backend, request


def test_the_least_in_flight_by_weight_serves() -> None:
    a, b = backend("a"), backend("b", weight=4.0)
    a.in_flight, b.in_flight = 2, 5
    choice = LeastLoad(VirtualClock(), Random(1)).choose(request(), (a, b))
    assert choice is not None
    assert choice.backend is b


def test_serial_traffic_on_an_idle_fleet_spreads_by_weight() -> None:
    clock = VirtualClock()
    strategy = LeastLoad(clock, Random(1))
    fleet = (backend("a"), backend("b"), backend("c", weight=2.0))
    share: Counter[str] = Counter()
    for _ in range(200):
        choice = strategy.choose(request(), fleet)
        assert choice is not None
        strategy.placed(choice)
        share[choice.backend.name] += 1
        clock.advance(3.0)
    assert abs(share["c"] - 100) <= 10
    assert abs(share["a"] - share["b"]) <= 5


def test_recent_work_never_outweighs_an_attempt_in_flight() -> None:
    clock = VirtualClock()
    strategy = LeastLoad(clock, Random(1))
    used, fresh = backend("used"), backend("fresh")
    for _ in range(50):
        choice = strategy.choose(request(), (used,))
        assert choice is not None
        strategy.placed(choice)
    fresh.in_flight = 2
    choice = strategy.choose(request(), (used, fresh))
    assert choice is not None
    assert choice.backend is used


def test_ties_go_by_the_generator() -> None:
    fleet = tuple(backend(f"b{i}") for i in range(4))
    first = Counter()
    for seed in range(200):
        choice = LeastLoad(VirtualClock(), Random(seed)).choose(request(), fleet)
        assert choice is not None
        first[choice.backend.name] += 1
    assert min(first.values()) > 25
