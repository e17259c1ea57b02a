from __future__ import annotations

from collections import Counter

from router.strategies import round_robin
from router.strategies.round_robin import RoundRobin
from tests.support.fleet import backend, request


def picks(strategy: RoundRobin, candidates: tuple, count: int, model: str = "m") -> str:
    chosen = [strategy.choose(request(model=model), candidates) for _ in range(count)]
    return "".join(choice.backend.name for choice in chosen if choice is not None)


def test_weights_are_kept_without_bunching() -> None:
    fleet = (backend("a", weight=5), backend("b"), backend("c"))
    # The sequence that nginx documents for weights 5, 1, 1.
    assert picks(RoundRobin(), fleet, 14) == "aabacaaaabacaa"


def test_models_rotate_apart() -> None:
    fleet = (backend("a"), backend("b"))
    strategy = RoundRobin()
    assert picks(strategy, fleet, 1, "m") + picks(strategy, fleet, 1, "n") + picks(strategy, fleet, 2, "m") == "aaba"


def test_backends_may_come_and_go() -> None:
    a, b, c = backend("a"), backend("b"), backend("c")
    strategy = RoundRobin()
    picks(strategy, (a, b), 3)
    assert Counter(picks(strategy, (a, b, c), 30)) == {"a": 10, "b": 10, "c": 10}
    strategy.forget(b)
    assert Counter(picks(strategy, (a, c), 10)) == {"a": 5, "c": 5}


def test_rotations_are_bounded_and_the_oldest_goes() -> None:
    fleet = (backend("a"), backend("b"))
    strategy = RoundRobin()
    for n in range(round_robin.MAX_MODELS + 1):
        picks(strategy, fleet, 1, f"m{n}")
    assert len(strategy._rotations) == round_robin.MAX_MODELS
    assert picks(strategy, fleet, 1, "m0") == "a"  # starts again
    assert picks(strategy, fleet, 1, "m2") == "b"  # goes on
