"""What each strategy tells of its choices: the figures that it compared."""

from __future__ import annotations

from random import Random

import pytest

from native.prefix_tree import PrefixTree
from router.backends.backend import Backend
from router.clock import VirtualClock
from router.strategies.kv_aware import KvAware
from router.strategies.prefix_affinity import PrefixAffinity
from router.strategies.registry import Dependencies, build
from router.strategies.strategy import Reason, Strategy, Terms
from tests.support.fleet import BLOCK_BYTES, Fleet, backend, request, text_of

SHARED = text_of(0, 2000)


def strategy_of(name: str) -> Strategy:
    return build(name, None, Dependencies(VirtualClock(), Random(3), PrefixTree(16 << 20), BLOCK_BYTES, 200_000))


def least(terms: list[Terms]) -> float:
    return min(t.score_s for t in terms if t.score_s is not None)


@pytest.mark.parametrize("name", ["prefixaware", "kvaware"])
def test_prices_are_the_sum_of_their_terms_and_the_chosen_is_near_the_least(name: str) -> None:
    fleet = Fleet(strategy_name=name)
    fleet.grow(4)
    for step in range(60):
        fleet.send(SHARED + text_of(step % 7, 300))
        if step % 4 == 0:
            fleet.run(0.2)
        told = fleet.strategy.explain(request(SHARED + text_of(step % 7, 300), at=fleet.clock.now()), fleet.backends)
        assert told.choice is not None
        assert told.terms["prompt_tokens"] == told.choice.prompt_tokens
        for terms in told.candidates:
            assert terms.score_s is not None
            parts = [value for part, value in terms.terms.items() if part.endswith("_s")]
            assert sum(parts) == pytest.approx(terms.score_s)
            assert terms.terms["near_least"] == (terms.score_s <= least(told.candidates) * 1.02 + 0.002)
        (chosen,) = [t for t in told.candidates if t.backend is told.choice.backend]
        assert chosen.terms["near_least"]
        assert (chosen.match_blocks, chosen.matched_tokens) == (told.choice.match_blocks, told.choice.matched_tokens)
        assert chosen.terms["prefill_s"] == pytest.approx(told.choice.uncached_s, rel=1e-3)
    assert any(t.matched_tokens for t in told.candidates)
    assert any(t.terms["wait_s"] for t in told.candidates)


def test_a_paid_copy_shows_as_a_term_that_lowers_the_price() -> None:
    """Serial traffic on one shared prefix pays for its second copy by and by."""
    fleet = Fleet(strategy_name="prefixaware")
    fleet.grow(2)
    for step in range(40):
        text = SHARED + text_of(step + 1, 20)
        told = fleet.strategy.explain(request(text, at=fleet.clock.now()), fleet.backends)
        paid = [t for t in told.candidates if t.terms["copy_is_paid"]]
        for terms in told.candidates:
            assert (terms.terms["paid_copy_s"] < 0.0) == (terms in paid)
        if paid:
            assert told.terms["paid_for_copies_s"] > 0.0
            assert fleet.ask(text).backend is told.choice.backend  # type: ignore[union-attr]
            return
        fleet.ask(text)
    pytest.fail("no copy was ever paid for")


def test_kvaware_tells_its_trust_and_the_same_reason() -> None:
    strategy = strategy_of("kvaware")
    assert isinstance(strategy, KvAware)
    liar, other = backend("liar"), backend("other")
    for joined in (liar, other):
        strategy.joined(joined)
    placed = strategy.choose(request(SHARED), (liar,))
    assert placed is not None
    strategy.placed(placed)
    for _ in range(12):
        engine = strategy._placement.engine(liar)
        assert engine is not None
        strategy._compare_mirror(engine, strategy._account(liar), 2000, 600, 1)
    told = strategy.explain(request(SHARED), (liar, other))
    choice = strategy.choose(request(SHARED), (liar, other))
    assert told.choice is not None
    assert choice is not None
    assert told.choice.reason is choice.reason is Reason.UNTRUSTED
    first, second = told.candidates
    assert (first.terms["trusted"], second.terms["trusted"]) == (False, True)
    assert 0.0 < first.terms["trust"] < 0.5
    assert second.terms["trust"] == 1.0
    assert first.match_blocks > 0
    assert first.matched_tokens == 0


def test_roundrobin_tells_credits_and_keeps_its_turn() -> None:
    strategy = strategy_of("roundrobin")
    heavy, light = backend("heavy", weight=2.0), backend("light")
    for _ in range(9):
        told = strategy.explain(request(), (heavy, light))
        assert [strategy.explain(request(), (heavy, light)).choice.backend for _ in range(5)] == [  # type: ignore[union-attr]
            told.choice.backend  # type: ignore[union-attr]
        ] * 5
        choice = strategy.choose(request(), (heavy, light))
        assert choice is not None
        best = max(told.candidates, key=lambda terms: terms.terms["credit"])
        assert best.backend is choice.backend
        assert sum(terms.terms["credit"] for terms in told.candidates) == pytest.approx(3.0)


def test_roundrobin_starts_no_rotation_for_an_explanation() -> None:
    strategy = strategy_of("roundrobin")
    strategy.explain(request(model="unseen"), (backend(),))
    assert strategy._rotations == {}  # type: ignore[attr-defined]


def test_leastload_tells_the_load_that_it_compares() -> None:
    strategy = strategy_of("leastload")
    busy, free = backend("busy", weight=2.0), backend("free")
    busy.in_flight = 5
    told = strategy.explain(request(), (busy, free))
    assert told.choice is not None
    assert told.choice.backend is free
    first, second = told.candidates
    assert (first.terms["load"], second.terms["load"]) == (2.5, 0.0)
    assert first.score_s is None


def test_session_tells_lots_and_bounds_and_a_winner_over_its_bound_is_passed_over() -> None:
    strategy = strategy_of("session")
    fleet = tuple(backend(f"b{at}") for at in range(3))
    keyed = request(SHARED, key=b"someone")
    told = strategy.explain(keyed, fleet)
    assert told.choice is not None
    winner = told.choice.backend
    assert max(told.candidates, key=lambda terms: terms.terms["lot"]).backend is winner
    winner.in_flight = 50
    again = strategy.explain(keyed, fleet)
    assert again.choice is not None
    assert again.choice.backend is not winner
    (over,) = [terms for terms in again.candidates if terms.backend is winner]
    assert over.terms["in_flight"] + 1 > over.terms["bound_in_flight"]
    lots = {terms.backend: terms.terms["lot"] for terms in again.candidates if terms.backend is not winner}
    assert max(lots, key=lots.__getitem__) is again.choice.backend


def test_session_without_a_key_is_explained_by_prices() -> None:
    strategy = strategy_of("session")
    told = strategy.explain(request(SHARED), (backend(),))
    assert [terms.score_s is not None for terms in told.candidates] == [True]


def test_explaining_touches_neither_mirror_nor_learning() -> None:
    strategy = strategy_of("prefixaware")
    assert isinstance(strategy, PrefixAffinity)
    fleet: tuple[Backend, ...] = tuple(backend(f"b{at}") for at in range(3))
    for joined in fleet:
        strategy.joined(joined)
    drawn = strategy._rng.getstate()
    for _ in range(20):
        strategy.explain(request(SHARED), fleet)
    assert strategy._rng.getstate() == drawn
    assert len(strategy.mirror) == 0  # type: ignore[arg-type]
    assert not strategy._models
    assert len(strategy._recent) == 0
    assert len(strategy._copies) == 0
    assert all(len(strategy.engine(b).ledger) == 0 for b in fleet)  # type: ignore[union-attr]
