"""`kvaware`: matches count as far as the engines' reports bear them out."""

from __future__ import annotations

from collections import Counter

from router.backends.backend import Backend, EngineReport
from router.learning.trust import Trust
from router.strategies.kv_aware import KvAware
from router.strategies.strategy import Choice, End, Outcome, Reason
from tests.support.fleet import Fleet, Job, text_of
from tests.unit.strategies.test_contract import Rig

SYSTEM = text_of(1, 2000)


def kvaware(fleet: Fleet) -> KvAware:
    assert isinstance(fleet.strategy, KvAware)
    return fleet.strategy


def trust(fleet: Fleet, backend: Backend) -> Trust:
    found = kvaware(fleet).trust_of(backend)
    assert found is not None
    return found


class LyingEngine:
    """One backend of which each answer says `cached_tokens`, whatever was predicted."""

    def __init__(self) -> None:
        self.rig = Rig("kvaware", count=2)
        self.lying, self.honest = self.rig.backends
        assert isinstance(self.rig.strategy, KvAware)
        self.strategy = self.rig.strategy

    def turn(self, text: bytes, cached_tokens: int | None, only: Backend | None = None) -> Choice:
        choice = self.rig.take(text, (only or self.lying,))
        self.rig.clock.advance(0.5)
        self.strategy.first_byte(choice)
        choice.backend.in_flight -= 1
        tokens = len(text) // 4
        outcome = Outcome(End.COMPLETE, self.rig.clock.now(), 200, tokens, cached_tokens, 10)
        self.strategy.observe(choice, outcome)
        return choice

    @property
    def trust(self) -> Trust:
        found = self.strategy.trust_of(self.lying)
        assert found is not None
        return found


def test_where_reports_agree_it_chooses_as_prefixaware_does() -> None:
    made, reasons = [], []
    for name in ("prefixaware", "kvaware"):
        fleet = Fleet(name)
        fleet.grow(4)
        for n in range(60):
            fleet.send_at(n / 7, SYSTEM + text_of(10 + n % 9, 300 + 50 * (n // 9)))
        fleet.run(30.0)
        fleet.drain()
        made.append([(job.backend.name, job.choice.matched_tokens) for job in fleet.jobs])
        reasons.append({job.choice.reason for job in fleet.jobs})
    assert made[0] == made[1]
    assert reasons == [{Reason.PREFIX, Reason.LOAD}, {Reason.NO_EVENTS}]


def test_trust_falls_with_lower_reports_and_recovers() -> None:
    engine = LyingEngine()
    engine.turn(SYSTEM, 0)  # nothing was predicted: nothing to compare
    assert engine.trust.value == 1.0
    fallen = []
    for _ in range(8):
        engine.turn(SYSTEM, 700)
        fallen.append(engine.trust.value)
    assert fallen == sorted(fallen, reverse=True)
    assert engine.trust.lost
    risen = []
    for _ in range(6):
        engine.turn(SYSTEM, 1984)
        risen.append(engine.trust.value)
    assert risen == sorted(risen)
    assert not engine.trust.lost
    assert risen[-1] > 0.8


def test_an_untrusted_match_is_ignored_and_the_choice_says_so() -> None:
    engine = LyingEngine()
    for _ in range(8):
        engine.turn(SYSTEM, 600)
    engine.lying.in_flight = 1  # so that nothing but the match speaks for it
    choice = engine.rig.take(SYSTEM, engine.rig.backends)
    assert (choice.backend, choice.reason) == (engine.honest, Reason.UNTRUSTED)
    assert choice.matched_tokens == 0
    forced = engine.strategy.choose(choice.request, (engine.lying,))
    assert forced is not None
    assert (forced.matched_tokens, forced.reason) == (0, Reason.UNTRUSTED)
    elsewhere = engine.rig.take(text_of(9, 500), engine.rig.backends)
    assert elsewhere.reason is Reason.NO_EVENTS  # nobody's match was ignored for it


def test_a_doubtful_match_counts_in_part() -> None:
    engine = LyingEngine()
    engine.turn(SYSTEM, 0)
    engine.turn(SYSTEM, 900)
    choice = engine.rig.take(SYSTEM, (engine.lying,))
    assert not engine.trust.lost
    assert abs(choice.matched_tokens - 1984 * engine.trust.value) <= 16
    assert choice.match_blocks == 62


def test_higher_reports_are_no_reason_for_distrust() -> None:
    engine = LyingEngine()
    for n in range(10):
        engine.turn(text_of(n, 500), 480)
    assert engine.trust.value == 1.0


def test_a_release_that_leaves_zero_out_is_understood() -> None:
    engine = LyingEngine()
    engine.turn(SYSTEM, 1984)
    engine.turn(SYSTEM, 1984)
    for _ in range(2):
        engine.turn(SYSTEM, None)
    assert engine.trust.value < 0.7


def test_an_engine_that_reports_nothing_stays_neutral() -> None:
    fleet = Fleet("kvaware", usage=False, exports_metrics=False)
    fleet.grow(2)
    for n in range(20):
        fleet.ask(SYSTEM + text_of(100 + n, 100))
    assert {trust(fleet, backend).value for backend in fleet.backends} == {1.0}


def lose_the_cache(fleet: Fleet) -> list[Job]:
    fleet.grow(1)
    texts = [text_of(n, 1000) for n in range(12)]
    for text in texts:
        fleet.ask(text)
    fleet.run(10.0)
    fleet.engines[fleet.backends[0]].reset()
    jobs = [fleet.ask(text) for text in texts]
    fleet.run(10.0)
    jobs += [fleet.ask(text) for text in texts]
    fleet.run(10.0)
    return jobs


def test_ghosts_go_after_a_cache_reset() -> None:
    fleet = Fleet("kvaware")
    jobs = lose_the_cache(fleet)
    predicted = [job.choice.matched_tokens for job in jobs]
    assert predicted[0] == 992
    assert predicted[3:12] == [0] * 9  # three misses in a row cleared the mirror, and nobody is promised ghosts
    recovered = [(job.choice.matched_tokens, job.hit_tokens) for job in jobs[12:]]
    assert all(hit == 992 for _, hit in recovered)
    assert recovered[-1][0] > 900
    assert not trust(fleet, fleet.backends[0]).lost


def test_polled_counters_tell_where_answers_do_not() -> None:
    fleet = Fleet("kvaware", usage=False, poll_s=0.3)
    lose_the_cache(fleet)
    told = trust(fleet, fleet.backends[0])
    assert told.predicted_tokens > told.reported_tokens > 0
    assert fleet.jobs[12].choice.matched_tokens == 992
    assert fleet.jobs[23].choice.matched_tokens < 992
    assert 0.0 < told.value < 1.0


def test_polled_counters_that_agree_keep_trust() -> None:
    fleet = Fleet("kvaware", usage=False, poll_s=0.5)
    fleet.grow(2)
    for n in range(200):
        fleet.send_at(n / 12, SYSTEM + text_of(100 + n, 200), 20)
    fleet.run(30.0)
    fleet.drain()
    for backend in fleet.backends:
        told = trust(fleet, backend)
        assert told.predicted_tokens > 10_000
        assert told.value > 0.9


def test_hits_of_other_clients_are_not_taken_for_ours() -> None:
    rig = Rig("kvaware", count=1)
    only = rig.backends[0]
    assert isinstance(rig.strategy, KvAware)
    queries = 0.0
    for _ in range(10):
        choice = rig.take(SYSTEM, rig.backends)
        rig.clock.advance(0.5)
        rig.strategy.first_byte(choice)
        only.in_flight -= 1
        rig.strategy.observe(choice, Outcome(End.COMPLETE, rig.clock.now(), 200))
        queries += 50_000
        before, only.report = only.report, EngineReport(at=rig.clock.now(), prefix_queries=queries, prefix_hits=0.0)
        rig.strategy.reported(only, before, only.report)
    told = rig.strategy.trust_of(only)
    assert told is not None
    assert told.value == 1.0


def test_counters_that_start_again_are_no_report() -> None:
    rig = Rig("kvaware", count=1)
    only = rig.backends[0]
    assert isinstance(rig.strategy, KvAware)
    for _ in range(2):
        choice = rig.take(SYSTEM, rig.backends)
        rig.strategy.first_byte(choice)
        rig.end(choice)
    before = EngineReport(at=1.0, prefix_queries=9000.0, prefix_hits=8000.0)
    rig.strategy.reported(only, before, EngineReport(at=2.0, prefix_queries=10.0, prefix_hits=0.0))
    account = rig.strategy._accounts[only]
    assert (account.polled_hits, account.polled_mirror) == (0.0, 0)


def test_one_lying_engine_does_not_spoil_the_others() -> None:
    fleet = Fleet("kvaware")
    fleet.add("liar", caching=False)  # and does not say so
    fleet.grow(2)
    for backend in fleet.backends:
        backend.report.prefix_caching = None
        fleet.strategy.reported(backend, EngineReport(), backend.report)
    fleet.poll_s = 1e9
    reasons: Counter[Reason] = Counter()
    text = [text_of(n, 1000) for n in range(6)]
    for turn in range(15):
        for n in range(6):
            text[n] += text_of(1000 + 20 * n + turn, 200)
            reasons[fleet.ask(text[n]).choice.reason] += 1
    liar, *others = fleet.backends
    assert all(not trust(fleet, other).lost for other in others if kvaware(fleet).trust_of(other))
    late = fleet.jobs[-12:]
    assert all(job.backend is not liar for job in late)
    assert all(job.hit_tokens for job in late)
