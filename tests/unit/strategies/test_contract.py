"""What every strategy promises, whatever it is."""

from __future__ import annotations

import gc
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from native.prefix_tree import PrefixTree
from router.backends.backend import Backend, EngineReport
from router.clock import VirtualClock
from router.strategies.kv_aware import KvAware
from router.strategies.prefix_affinity import PrefixAffinity
from router.strategies.registry import FACTORIES, Dependencies, build
from router.strategies.session import Session
from router.strategies.strategy import Choice, End, Outcome, Reason, Strategy
from tests.support.fleet import BLOCK_BYTES, backend, request, text_of

NAMES = sorted(FACTORIES)
TEXTS = [text_of(0, 100) + text_of(n, 200) for n in range(6)]


class Rig:
    def __init__(self, name: str, seed: int = 1, count: int = 4) -> None:
        self.clock = VirtualClock()
        self.tree = PrefixTree(16 << 20)
        self.strategy: Strategy = build(
            name, None, Dependencies(self.clock, Random(seed), self.tree, BLOCK_BYTES, 10_000)
        )
        self.backends = tuple(backend(f"b{i}", weight=1.0 + i % 2) for i in range(count))
        for joined in self.backends:
            self.strategy.joined(joined)

    @property
    def placement(self) -> PrefixAffinity | None:
        match self.strategy:
            case PrefixAffinity():
                return self.strategy
            case KvAware():
                return self.strategy._placement
            case Session():
                return self.strategy._keyless
        return None

    def take(self, text: bytes, candidates: tuple[Backend, ...], key: bytes | None = None) -> Choice:
        choice = self.strategy.choose(request(text, at=self.clock.now(), key=key), candidates)
        assert choice is not None
        self.strategy.placed(choice)
        choice.backend.in_flight += 1
        return choice

    def end(self, choice: Choice, end: End = End.COMPLETE) -> None:
        choice.backend.in_flight -= 1
        self.strategy.observe(choice, Outcome(end, self.clock.now(), 200, 300, 0, 10))


@pytest.fixture(params=NAMES)
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(request.param)


def test_no_candidates_no_choice(rig: Rig) -> None:
    for key in (None, b"k"):
        assert rig.strategy.choose(request(TEXTS[0], key=key), ()) is None
        assert rig.strategy.choose(request(TEXTS[0], key=key), []) is None


def test_never_picks_outside_the_candidates(rig: Rig) -> None:
    rng = Random(5)
    for step in range(200):
        candidates = tuple(rng.sample(rig.backends, rng.randint(1, len(rig.backends))))
        choice = rig.take(TEXTS[step % 6], candidates, key=b"k%d" % (step % 5) if step % 3 else None)
        assert choice.backend in candidates
        rig.clock.advance(0.05)
        if step % 2:
            rig.strategy.first_byte(choice)
        rig.end(choice)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_picks(name: str) -> None:
    def picks(seed: int) -> list[tuple[str, Reason, int]]:
        rig = Rig(name, seed)
        made = []
        for step in range(100):
            choice = rig.take(TEXTS[step % 6], rig.backends, key=b"k%d" % (step % 5) if step % 2 else None)
            made.append((choice.backend.name, choice.reason, choice.matched_tokens))
            rig.clock.advance(0.01)
            rig.strategy.first_byte(choice)
            rig.end(choice)
        return made

    assert picks(7) == picks(7)


def test_what_a_log_line_and_a_header_need_is_there(rig: Rig) -> None:
    for _ in range(3):
        choice = rig.take(TEXTS[1], rig.backends)
        assert type(choice.matched_tokens) is int
        assert 0 <= choice.matched_tokens <= max(choice.prompt_tokens - 1, 0)
        assert isinstance(choice.reason, Reason)
        rig.end(choice)


def test_a_vanished_backend_is_survived_and_nothing_of_it_stays(rig: Rig) -> None:
    choices = [rig.take(text, rig.backends, key=text[:2]) for text in TEXTS for _ in range(3)]
    for gone in rig.backends:
        rig.strategy.forget(gone)
        rig.strategy.forget(gone)  # told twice is told once
    for at, choice in enumerate(choices):
        if at % 2:
            rig.strategy.first_byte(choice)
        rig.strategy.reported(choice.backend, EngineReport(), EngineReport(at=1.0, running=3.0))
        rig.end(choice)
    assert len(rig.tree) == 0
    placement = rig.placement
    if placement is not None:
        assert not placement._engines
        assert len(placement._recent) == 0
    for held in gc.get_referents(rig.strategy):
        if isinstance(held, dict):
            assert not any(isinstance(key, Backend) for key in held)
    rig.tree.check()


def test_a_restarted_backend_serves_on_and_strangers_to_it_change_nothing(rig: Rig) -> None:
    only = rig.backends[:1]
    old = rig.take(TEXTS[0], only)
    rig.strategy.forget(only[0])
    new = rig.take(TEXTS[0], only)
    assert new.backend is only[0]
    assert new.matched_tokens == 0
    rig.strategy.first_byte(old)
    rig.end(old, End.FAILED)
    rig.end(new)
    placement = rig.placement
    if placement is not None:
        engine = placement.engine(only[0])
        assert engine is not None
        assert len(engine.ledger) == 0


def test_trust_is_told_where_it_is_kept(rig: Rig) -> None:
    choice = rig.take(TEXTS[0], rig.backends)
    rig.strategy.first_byte(choice)
    rig.end(choice)
    told = rig.strategy.trust_of(choice.backend)
    assert (told is not None) is isinstance(rig.strategy, KvAware)
    rig.strategy.forget(choice.backend)
    assert rig.strategy.trust_of(choice.backend) is None


def busy(rig: Rig) -> None:
    """Some traffic, so that every figure is another for each backend."""
    for step in range(12):
        choice = rig.take(TEXTS[step % 6], rig.backends, key=b"k%d" % (step % 3))
        rig.clock.advance(0.02)
        if step % 3:
            rig.strategy.first_byte(choice)
        if step % 2:
            rig.end(choice)


@pytest.mark.parametrize("key", [None, b"k", b"k7"])
def test_an_explanation_names_the_next_choice_and_does_not_change_it(rig: Rig, key: bytes | None) -> None:
    """Two rigs with one seed, and only one is asked for explanations: their choices stay the same."""
    name = next(name for name in NAMES if type(Rig(name).strategy) is type(rig.strategy))
    silent = Rig(name)
    busy(rig)
    busy(silent)
    for step in range(40):
        text = TEXTS[step % 6]
        candidates = rig.backends[step % 3 :]
        now = rig.clock.now()
        told = [rig.strategy.explain(request(text, at=now, key=key), candidates) for _ in range(3)]
        choice = rig.take(text, candidates, key)
        other = silent.take(text, silent.backends[step % 3 :], key)
        assert (choice.backend.name, choice.reason) == (other.backend.name, other.reason)
        for explanation in told:
            said = explanation.choice
            assert said is not None
            assert said.backend is choice.backend
            assert (said.reason, said.matched_tokens, said.match_blocks, said.prompt_tokens) == (
                choice.reason,
                choice.matched_tokens,
                choice.match_blocks,
                choice.prompt_tokens,
            )
            assert [terms.backend for terms in explanation.candidates] == list(candidates)
        for which, made in ((rig, choice), (silent, other)):
            which.clock.advance(0.01)
            if step % 2:
                which.end(made)


def test_an_explanation_of_no_candidates_is_empty(rig: Rig) -> None:
    for key in (None, b"k"):
        told = rig.strategy.explain(request(TEXTS[0], key=key), ())
        assert told.choice is None
        assert told.candidates == []
        assert told.decided_by


def test_the_match_of_a_backend_is_told_whether_it_is_a_candidate_or_not(rig: Rig) -> None:
    choice = rig.take(TEXTS[0], rig.backends[:1])
    blocks, tokens = rig.strategy.match_of(request(TEXTS[0]), choice.backend)
    assert rig.strategy.match_of(request(TEXTS[0]), rig.backends[1]) == (0, 0)
    if rig.placement is None:
        assert (blocks, tokens) == (0, 0)
        assert rig.strategy.known_of(choice.backend) == {}
    else:
        assert blocks == len(TEXTS[0]) // BLOCK_BYTES
        assert tokens > 0
        known = rig.strategy.known_of(choice.backend)
        assert known["index_blocks"] == blocks
        assert known["prefilling"] == 1
        assert known["kv_capacity_tokens"] is None
    rig.strategy.forget(choice.backend)
    assert rig.strategy.match_of(request(TEXTS[0]), choice.backend) == (0, 0)
    assert rig.strategy.known_of(choice.backend) == {}


def test_an_unreadable_body_goes_by_load(rig: Rig) -> None:
    busy, *free = rig.backends
    for _ in range(5):
        rig.take(TEXTS[0], (busy,))
    choice = rig.strategy.choose(request(readable=False), rig.backends)
    assert choice is not None
    assert choice.matched_tokens == 0
    if rig.placement is not None:
        assert choice.reason is Reason.SHAPE
        assert choice.backend in free


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["send", "first", "end", "fail", "cancel", "forget", "wait", "report"]),
        st.integers(0, 11),
    ),
    max_size=80,
)


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(NAMES), steps=STEPS)
def test_any_interleaving_leaves_the_books_at_zero(name: str, steps: list[tuple[str, int]]) -> None:
    rig = Rig(name, count=3)
    strategy = rig.strategy
    open_choices: list[Choice] = []
    ends = {"end": End.COMPLETE, "fail": End.FAILED, "cancel": End.CANCELLED}
    for what, which in steps:
        if what == "send":
            open_choices.append(rig.take(TEXTS[which % 6], rig.backends, key=b"k" if which % 2 else None))
        elif what == "forget":
            strategy.forget(rig.backends[which % 3])
        elif what == "wait":
            rig.clock.advance(which / 10)
        elif what == "report":
            told = rig.backends[which % 3]
            before, told.report = (
                told.report,
                EngineReport(
                    at=rig.clock.now(), running=which, kv_usage=which / 12, block_size_tokens=16, num_gpu_blocks=100
                ),
            )
            strategy.reported(told, before, told.report)
        elif open_choices:
            choice = open_choices[which % len(open_choices)]
            if what == "first":
                strategy.first_byte(choice)
            else:
                open_choices.remove(choice)
                rig.end(choice, ends[what])
        rig.tree.check()
    for choice in open_choices:
        rig.end(choice, End.CANCELLED)
    placement = rig.placement
    if placement is not None:
        for engine in placement._engines.values():
            ledger = engine.ledger
            assert (ledger.pending_s, ledger.kv_tokens, ledger.decoding_kv_tokens) == (0.0, 0, 0)
            assert (ledger.decoding, ledger.waiting, len(ledger)) == (0, 0, 0)
        assert len({other.slot for other in placement._engines}) == len(placement._engines)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    deps = Dependencies(VirtualClock(), Random(1), PrefixTree(16 << 20), BLOCK_BYTES, 10_000)
    with pytest.raises(ValueError, match=r"fastest.*prefixaware"):
        build("fastest", None, deps)
