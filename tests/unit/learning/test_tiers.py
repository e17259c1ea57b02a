"""What is learned of the tiers behind an engine's own cache."""

from __future__ import annotations

from random import Random

import pytest

from router.learning import l2_rate, tier_cost
from router.learning.l2_rate import L2Rate
from router.learning.tier_cost import TierCost

# ---- the share of hits


def polled(rate: L2Rate, polls: int, queries: float, share: float, *, start: float = 0.0) -> float:
    """`polls` polls with so many tokens queried between each two; returns the last total."""
    for n in range(polls):
        rate.counted(start + n * queries, (start + n * queries) * share)
    return start + (polls - 1) * queries


def test_an_engine_that_does_not_tell_has_no_rate() -> None:
    rate = L2Rate()
    rate.counted(None, None)
    rate.counted(10_000.0, None)
    rate.counted(90_000.0, None)
    assert rate.rate is None


def test_the_totals_of_the_first_poll_are_the_past_of_others_and_teach_nothing() -> None:
    rate = L2Rate()
    rate.counted(1e9, 1e9)
    assert rate.rate is None
    rate.counted(1e9 + l2_rate.ENOUGH_TOKENS - 1, 1e9)
    assert rate.rate is None
    rate.counted(1e9 + 1.1 * l2_rate.ENOUGH_TOKENS, 1e9)
    assert rate.rate == 0.0


def test_the_rate_is_the_share_of_tokens_and_follows_a_change() -> None:
    rate = L2Rate()
    polled(rate, 50, 5000.0, 0.8)
    assert rate.rate == pytest.approx(0.8)
    total = 49 * 5000.0
    hits = total * 0.8
    for n in range(1, 200):
        rate.counted(total + n * 5000.0, hits + n * 500.0)
    assert rate.rate == pytest.approx(0.1, abs=0.01)


def test_hits_a_poll_late_are_not_lost_and_never_more_than_was_asked() -> None:
    rate = L2Rate()
    rate.counted(0.0, 0.0)
    rate.counted(10_000.0, 0.0)
    rate.counted(10_000.0, 6000.0)
    assert rate.rate == pytest.approx(0.6)
    rate.counted(10_000.0, 90_000.0)
    assert rate.rate == 1.0


@pytest.mark.parametrize("after", [(10.0, 5.0), (200_000.0, 5.0), (None, None)])
def test_a_restarted_engine_or_one_that_falls_silent_is_learned_anew(after: tuple[float | None, float | None]) -> None:
    rate = L2Rate()
    polled(rate, 20, 5000.0, 0.5)
    assert rate.rate is not None
    rate.counted(*after)
    assert rate.rate is None


def test_one_poll_of_any_size_leaves_a_share() -> None:
    rate = L2Rate()
    rate.counted(0.0, 0.0)
    rate.counted(1e15, 1e15)
    assert rate.rate == 1.0
    rate.counted(1e15 + 1e6, 1e15)
    assert rate.rate == 0.0


# ---- the cost of a token

SPEED, FIXED_S = 20_000.0, 0.02


def engine_costs() -> TierCost:
    cost = TierCost()
    cost.computing(SPEED, FIXED_S)
    return cost


def test_until_it_is_learned_a_tier_costs_a_share_of_computing() -> None:
    cost = engine_costs()
    assert (cost.cpu_s, cost.l2_s) == (pytest.approx(0.1 / SPEED), pytest.approx(0.2 / SPEED))
    assert not cost.cpu_learned
    assert not cost.l2_learned
    cost.computing(SPEED / 2, FIXED_S)
    assert cost.l2_s == pytest.approx(0.4 / SPEED)


def test_both_costs_are_found_from_mixed_noisy_samples_with_outliers() -> None:
    """A synthetic engine: host memory 1 us a token, the store 12 us, computing 50 us that we take for 55."""
    rng = Random(7)
    cost = TierCost()
    cost.computing(1 / 55e-6, FIXED_S)
    for n in range(400):
        fetched, computed = rng.randint(100, 20_000), rng.randint(16, 2000)
        few = rng.randint(0, fetched // 5)
        cpu, l2 = (fetched - few, few) if n % 2 else (few, fetched - few)
        seconds = FIXED_S + 1e-6 * cpu + 12e-6 * l2 + 50e-6 * computed
        seconds *= rng.uniform(0.95, 1.05)
        if rng.random() < 0.2:
            seconds += rng.uniform(0.5, 5.0)  # company that we did not see
        cost.observe(rng.randint(0, 5000), cpu, l2, computed, seconds)
    assert cost.cpu_learned
    assert cost.l2_learned
    assert cost.l2_s == pytest.approx(12e-6, rel=0.35)
    assert 0.0 <= cost.cpu_s < 4e-6


@pytest.mark.parametrize(
    "sample",
    [
        (5000, 0, 0, 100, 0.1),  # nothing fetched
        (0, 200, 0, 10, 0.1),  # too little
        (0, 2000, 0, 2001, 0.1),  # more computed than fetched
        (0, 1000, 1000, 10, 0.1),  # from both tiers alike
        (0, -1000, 3000, 10, 0.1),
        (-1, 3000, 0, 10, 0.1),
        (0, 3000, 0, 10, -0.1),
        (0, 3000, 0, 10, float("nan")),
        (0, 3000, 0, 10, float("inf")),
    ],
)
def test_samples_that_say_nothing_teach_nothing(sample: tuple[int, int, int, int, float]) -> None:
    cost = engine_costs()
    assert not any(cost.observe(*sample) for _ in range(10))
    assert not cost.cpu_learned
    assert not cost.l2_learned


@pytest.mark.parametrize(("seconds", "share"), [(100.0, 1.0), (0.0, 0.0)])
def test_a_token_costs_never_more_than_computing_it_and_never_less_than_nothing(seconds: float, share: float) -> None:
    cost = engine_costs()
    for _ in range(tier_cost.LEAST_SAMPLES):
        assert cost.observe(0, 4000, 0, 16, seconds)
        assert cost.observe(0, 0, 4000, 16, seconds)
    assert cost.cpu_s == pytest.approx(share / SPEED)
    assert cost.l2_s == pytest.approx(share / SPEED)


def test_a_change_is_followed_within_a_window_which_is_bounded_and_can_be_started_over() -> None:
    cost = engine_costs()
    for per_token in (4e-6, 20e-6):
        for _ in range(3 * tier_cost.WINDOW):
            cost.observe(0, 0, 8000, 16, FIXED_S + 16 / SPEED + 8000 * per_token)
        assert cost.l2_s == pytest.approx(per_token)
    assert len(cost._l2) == tier_cost.WINDOW
    cost.start_over()
    assert not cost.l2_learned
    assert cost.l2_s == pytest.approx(0.2 / SPEED)
