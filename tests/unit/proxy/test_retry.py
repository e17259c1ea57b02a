"""The retry table and its budget; the table of phases."""

from __future__ import annotations

import pytest

from router.proxy.phases import MOVES, Phase
from router.proxy.retry import BURST, RetryBudget, may_repeat
from router.wire.paths import PathKind


@pytest.mark.parametrize("kind", PathKind)
def test_nothing_is_repeated_after_a_byte_went_downstream(kind: PathKind) -> None:
    assert not may_repeat(kind, sent=False, downstream_begun=True)
    assert not may_repeat(kind, sent=True, downstream_begun=True)


@pytest.mark.parametrize("kind", PathKind)
def test_anything_may_be_repeated_that_was_never_sent(kind: PathKind) -> None:
    assert may_repeat(kind, sent=False, downstream_begun=False)


def test_once_sent_only_what_changes_nothing_may_be_repeated() -> None:
    assert may_repeat(PathKind.INFERENCE, sent=True, downstream_begun=False)
    assert may_repeat(PathKind.READ, sent=True, downstream_begun=False)
    assert not may_repeat(PathKind.CHANGE, sent=True, downstream_begun=False)


def spend_all(budget: RetryBudget) -> int:
    count = 0
    while budget.spend():
        count += 1
    return count


def test_a_burst_is_allowed_and_then_a_share_of_the_requests() -> None:
    budget = RetryBudget(0.2)
    assert spend_all(budget) == BURST
    for _ in range(50):
        budget.earn()
    assert spend_all(budget) in (9, 10)


def test_savings_are_bounded() -> None:
    budget = RetryBudget(1.0)
    for _ in range(5000):
        budget.earn()
    assert spend_all(budget) == BURST


def test_a_share_of_nothing_allows_nothing() -> None:
    budget = RetryBudget(0.0)
    for _ in range(100):
        budget.earn()
    assert not budget.spend()


def test_every_phase_may_end_and_the_end_is_the_end() -> None:
    assert set(MOVES) == set(Phase)
    for phase, moves in MOVES.items():
        assert (Phase.DONE in moves) is (phase is not Phase.DONE)
    assert not MOVES[Phase.DONE]


def test_after_the_first_byte_there_is_no_way_back() -> None:
    assert MOVES[Phase.STREAMING] == {Phase.DONE}


def test_nothing_is_queued_twice_without_an_attempt_between() -> None:
    assert {phase for phase, moves in MOVES.items() if Phase.QUEUED in moves} == {
        Phase.READ_BODY,
        Phase.CONNECTING,
        Phase.SENDING,
        Phase.AWAIT_HEAD,
    }
