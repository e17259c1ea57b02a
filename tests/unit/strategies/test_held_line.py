"""When an engine has a batch of work ahead, and until when."""

from __future__ import annotations

import pytest

from router.backends.backend import Backend, State
from router.strategies.held_line import LATE_S, HeldLine
from router.strategies.prefix_affinity import PrefixAffinity
from router.strategies.strategy import Choice, End, Outcome, RoutingRequest
from tests.support.fleet import BYTES_PER_TOKEN
from tests.unit.strategies.test_contract import Rig

BATCH_TOKENS = 2048
JUST_AFTER_S = 1e-6


class Desk:
    """`prefixaware` on a clock that is moved by hand; seconds of work are those of its own reckoning."""

    def __init__(self) -> None:
        self.rig = Rig("prefixaware")
        placement = self.rig.strategy
        assert isinstance(placement, PrefixAffinity)
        self.placement = placement
        self.backend = self.rig.backends[0]
        self.line = HeldLine(self.rig.clock, placement, BATCH_TOKENS)
        self.prompts = 0

    def send(self, tokens: int, *, stream: bool = True) -> Choice:
        self.prompts += 1
        request = RoutingRequest(
            "m", self.rig.clock.now(), prefix_bytes=int(tokens * BYTES_PER_TOKEN), prompt_tokens=tokens, stream=stream
        )
        choice = self.placement.choose(request, (self.backend,))
        assert choice is not None
        self.placement.placed(choice)
        return choice

    def over_s(self) -> float:
        return self.line.over_s(self.backend)

    def pass_(self, seconds: float) -> None:
        self.rig.clock.advance(seconds)


def test_an_engine_gets_one_batch_and_what_it_takes_with_it() -> None:
    desk = Desk()
    assert desk.over_s() == 0.0
    desk.send(BATCH_TOKENS // 2)
    assert desk.over_s() == 0.0
    desk.send(BATCH_TOKENS)
    assert desk.over_s() > 0.0


def test_what_is_told_is_when_it_may_get_more_if_its_oldest_keeps_to_its_time() -> None:
    desk = Desk()
    desk.send(20_000)
    over_s = desk.over_s()
    desk.pass_(over_s - JUST_AFTER_S)
    assert desk.over_s() == pytest.approx(JUST_AFTER_S, abs=1e-9)
    desk.pass_(2 * JUST_AFTER_S)
    assert desk.over_s() == 0.0


def test_answers_in_one_piece_pass_by_time_alone() -> None:
    desk = Desk()
    for _ in range(3):
        desk.send(10_000, stream=False)
    work_s = desk.send(10_000, stream=False).uncached_s
    over_s = desk.over_s()
    assert over_s > 2.0 * work_s
    woken = 0
    while (over_s := desk.over_s()) > 0.0:
        desk.pass_(over_s + JUST_AFTER_S)
        woken += 1
    assert woken <= 3, "that was polling"


def test_where_only_a_first_token_can_tell_it_is_looked_at_again_when_that_is_late() -> None:
    desk = Desk()
    first = desk.send(1_000)
    desk.send(1_000)
    desk.send(10_000)
    over_s = desk.over_s()
    assert over_s == pytest.approx(2.0 * first.uncached_s + LATE_S)
    desk.pass_(over_s / 2.0)
    assert desk.over_s() == pytest.approx(over_s / 2.0)
    desk.pass_(over_s / 2.0 + JUST_AFTER_S)
    assert desk.over_s() == 0.0, "nobody waits for an engine that is silent"


def test_a_first_token_or_an_end_frees_it() -> None:
    desk = Desk()
    first, second = desk.send(10_000), desk.send(10_000)
    desk.pass_(first.uncached_s)
    before_s = desk.over_s()
    desk.placement.first_byte(first)
    assert 0.0 < desk.over_s() < before_s
    desk.placement.observe(second, Outcome(End.CANCELLED, desk.rig.clock.now()))
    assert desk.over_s() == 0.0


def test_nobody_waits_for_an_engine_that_left() -> None:
    desk = Desk()
    desk.send(20_000)
    stranger = Backend("stranger", "http://s.test:1", "s.test", 1, state=State.UP)
    assert desk.line.over_s(stranger) == 0.0
    desk.placement.forget(desk.backend)
    assert desk.over_s() == 0.0


def test_a_batch_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_tokens"):
        HeldLine(Rig("prefixaware").clock, Desk().placement, 0)
