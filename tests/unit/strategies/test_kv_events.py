"""`kvaware` where engines tell what they hold: matches by tier, joined with what is on its way; and doubt."""

from __future__ import annotations

from array import array
from random import Random
from typing import Any

import pytest

from native.block_hash import BlockHashes
from native.kv_index import MIN_MEMORY_LIMIT_BYTES
from native.prefix_tree import PrefixTree
from router.backends.backend import Backend, EngineReport
from router.clock import VirtualClock
from router.index.kv_holdings import KvHoldings
from router.learning.standing import AGAIN_S, Level
from router.strategies.kv_aware import PATIENCE_LIMIT_S, KvAware
from router.strategies.registry import Dependencies, build
from router.strategies.strategy import Choice, End, Outcome, Reason, RoutingRequest
from tests.support.fleet import BLOCK_BYTES, BYTES_PER_TOKEN, MODEL, backend
from tests.support.kv_frames import CLEARED, batch, removed, stored

SIZE = 16
PROMPT = list(range(1, 801))
OTHER = list(range(5001, 5801))


class World:
    """Engines that tell their blocks, each by one rank; `mirror` of what is sent to them as well."""

    def __init__(self, count: int = 2, ranks: int = 1, memory_limit_bytes: int = 16 << 20) -> None:
        self.clock = VirtualClock()
        self.holdings = KvHoldings(memory_limit_bytes)
        self.resynced: list[Backend] = []
        self.levels: list[tuple[str, Level, Level]] = []
        deps = Dependencies(
            self.clock,
            Random(1),
            PrefixTree(16 << 20),
            BLOCK_BYTES,
            100_000,
            holdings=self.holdings,
            resync=self.resynced.append,
            level_changed=lambda b, before, after: self.levels.append((b.name, before, after)),
        )
        strategy = build("kvaware", None, deps)
        assert isinstance(strategy, KvAware)
        self.strategy = strategy
        self.backends = tuple(backend(f"b{n}") for n in range(count))
        self.ranks: dict[Backend, list[int]] = {}
        for each in self.backends:
            each.report.block_size_tokens = SIZE
            self.strategy.joined(each)
            self.follow(each, ranks)

    def follow(self, each: Backend, ranks: int = 1) -> None:
        self.ranks[each] = [self.holdings.add_rank(each, number) for number in range(ranks)]
        self.holdings.set_followed(each, True, complete=True)
        self.strategy.knowledge_changed(each)

    def unfollow(self, each: Backend) -> None:
        self.holdings.set_followed(each, False, complete=False)
        self.strategy.knowledge_changed(each)

    def tell(self, each: Backend, *events: dict[str, Any], rank: int = 0) -> None:
        assert not self.holdings.apply(self.ranks[each][rank], batch(*events)).malformed

    def ask(self, tokens: list[int] | None, salt: str | None = None, model: str = MODEL) -> RoutingRequest:
        text = array("I", tokens or PROMPT).tobytes()
        asked = RoutingRequest(
            model, self.clock.now(), blocks=BlockHashes.from_bytes(text, BLOCK_BYTES), prefix_bytes=len(text)
        )
        if tokens is not None:
            asked.take_ids(array("I", tokens), salt)
        return asked

    def choose(self, tokens: list[int] | None, *candidates: Backend, **more: Any) -> Choice:
        choice = self.strategy.choose(self.ask(tokens, **more), candidates or self.backends)
        assert choice is not None
        return choice

    def place(self, tokens: list[int] | None, *candidates: Backend, **more: Any) -> Choice:
        choice = self.choose(tokens, *candidates, **more)
        self.strategy.placed(choice)
        choice.backend.in_flight += 1
        return choice

    def answer(self, choice: Choice, cached: int | None, end: End = End.COMPLETE) -> None:
        self.clock.advance(0.2)
        self.strategy.first_byte(choice)
        choice.backend.in_flight -= 1
        tokens = choice.prompt_tokens if end is End.COMPLETE else None
        self.strategy.observe(choice, Outcome(end, self.clock.now(), 200, tokens, cached, 4))


def test_the_engine_that_tells_of_the_prefix_gets_it_with_the_tokens_that_it_will_report() -> None:
    world = World()
    first, second = world.backends
    world.tell(second, stored(PROMPT, SIZE))
    choice = world.choose(PROMPT)
    # 800 tokens are 50 whole blocks; the last token is always computed, so the last block is no hit
    assert (choice.backend, choice.reason, choice.matched_tokens) == (second, Reason.KV, 784)
    assert (choice.prompt_tokens, choice.kv_tokens) == (800, 784)
    assert world.choose([*PROMPT, 7], first, second).matched_tokens == 800
    assert world.choose(PROMPT[:400]).matched_tokens == 384
    assert world.choose([9, *PROMPT]).matched_tokens == 0
    assert world.choose(OTHER).reason is Reason.LOAD
    world.tell(second, removed(PROMPT[:320]))
    assert world.choose(PROMPT).matched_tokens == 304
    world.tell(second, CLEARED)
    assert (world.choose(PROMPT).matched_tokens, world.choose(PROMPT).reason) == (0, Reason.LOAD)


def test_salt_and_adapter_keep_prompts_apart() -> None:
    world = World(1)
    (engine,) = world.backends
    engine.models = {MODEL: {}, "lora": {"id": "lora", "parent": MODEL}}
    world.tell(engine, stored(PROMPT, SIZE, salt="a"), stored(OTHER, SIZE, lora="lora"))
    assert world.choose(PROMPT, salt="a").matched_tokens == 784
    assert world.choose(PROMPT, salt="b").matched_tokens == 0
    assert world.choose(PROMPT).matched_tokens == 0
    assert world.choose(OTHER, model="lora").matched_tokens == 784
    assert world.choose(OTHER).matched_tokens == 0


def test_what_is_on_its_way_counts_until_its_attempt_ends_and_not_longer() -> None:
    world = World()
    first = world.place(PROMPT)
    sibling = world.choose([*PROMPT, *OTHER], first.backend)
    assert (sibling.matched_tokens, sibling.reason) == (800, Reason.KV)
    world.answer(first, None, End.FAILED)  # and no event told of it
    assert world.choose([*PROMPT, *OTHER], first.backend).matched_tokens == 0
    assert len(world.holdings.sent) == 0


def test_blocks_in_cpu_memory_are_a_hit_that_is_dearer_than_one_on_the_gpu() -> None:
    world = World(3)
    gpu, cpu, storage = world.backends
    for each, medium in ((gpu, "GPU"), (cpu, "CPU"), (storage, "STORAGE")):
        world.tell(each, stored(PROMPT, SIZE, medium=medium))
    costs = [world.choose(PROMPT, each) for each in world.backends]
    assert [choice.matched_tokens for choice in costs] == [784] * 3
    assert costs[0].uncached_s < costs[1].uncached_s < costs[2].uncached_s < world.choose(OTHER, gpu).uncached_s
    assert world.choose(PROMPT).backend is gpu
    told = world.strategy.explain(world.ask(PROMPT), world.backends)
    assert [terms.terms["event_tokens_in_cpu_memory"] for terms in told.candidates] == [0, 784, 0]
    assert [terms.terms["event_tokens_in_storage"] for terms in told.candidates] == [0, 0, 784]


def test_of_several_ranks_the_mean_is_expected() -> None:
    world = World(1, ranks=2)
    (engine,) = world.backends
    world.tell(engine, stored(PROMPT, SIZE), rank=1)
    assert world.choose(PROMPT).matched_tokens == 49 // 2 * SIZE
    world.tell(engine, stored(PROMPT, SIZE), rank=0)
    assert world.choose(PROMPT).matched_tokens == 784


def test_each_degraded_mode_has_its_reason() -> None:
    world = World()
    first, second = world.backends
    world.tell(first, stored(PROMPT, SIZE))
    assert world.choose(None).reason is Reason.NO_TOKENS
    unreadable = RoutingRequest(MODEL, 0.0, readable=False)
    choice = world.strategy.choose(unreadable, world.backends)
    assert choice is not None
    assert choice.reason is Reason.SHAPE
    world.unfollow(first)
    # The mirror knows nothing of it, and the other engine has told that it does not hold it.
    assert world.choose(PROMPT).reason is Reason.LOAD
    world.answer(world.place(PROMPT, first), None)
    assert (world.choose(PROMPT).backend, world.choose(PROMPT).reason) == (first, Reason.PREFIX)
    world.unfollow(second)
    assert world.choose(PROMPT).reason is Reason.NO_EVENTS
    assert world.choose(None).reason is Reason.NO_EVENTS


def contradict(world: World, engine: Backend, times: int, salt: str = "") -> None:
    """Answers without any hit where the events promised one."""
    for number in range(times):
        tokens = [*PROMPT, 9000 + number]
        world.answer(world.place(tokens, engine), 0)


def test_reports_that_contradict_the_events_are_cured_by_hearing_them_again_and_then_by_the_mirror() -> None:
    world = World()
    liar, honest = world.backends
    world.tell(liar, stored(PROMPT, SIZE))
    assert world.choose(PROMPT, liar).reason is Reason.KV
    contradict(world, liar, 4)
    assert world.resynced == [liar]
    assert [level for name, _, level in world.levels if name == liar.name] == [Level.EVENTS]
    assert world.choose(PROMPT, liar).matched_tokens == 784  # heard again, and believed again
    contradict(world, liar, 4)
    assert world.resynced == [liar]
    assert [level for name, _, level in world.levels if name == liar.name][-1] is Level.LOAD  # the mirror was wrong too
    ignored = world.choose(PROMPT)
    assert (ignored.backend, ignored.reason, ignored.matched_tokens) == (honest, Reason.UNTRUSTED, 0)
    assert world.strategy.known_of(liar)["placed_by"] == "load"
    # It goes on being compared, and so comes back.
    for number in range(4):
        tokens = [*PROMPT, 9100 + number]
        choice = world.place(tokens, liar)
        assert choice.kv_tokens == 800
        world.answer(choice, 800)
    assert world.levels[-1] == (liar.name, Level.LOAD, Level.EVENTS) or world.levels[-1][2] is Level.EVENTS
    assert world.choose(PROMPT).reason is Reason.KV


def test_more_than_the_events_tell_contradicts_them_as_well() -> None:
    world = World()
    engine, _ = world.backends
    for number in range(5):
        choice = world.place([*OTHER, number], engine)  # it never tells what it stores
        world.answer(choice, 0 if number == 0 else 784)
    assert world.resynced == [engine]


def test_a_fall_long_after_the_last_is_cured_by_hearing_again() -> None:
    world = World()
    engine, _ = world.backends
    world.tell(engine, stored(PROMPT, SIZE))
    contradict(world, engine, 4)
    world.clock.advance(AGAIN_S + 1.0)
    contradict(world, engine, 4)
    assert world.resynced == [engine, engine]


def test_a_block_more_or_less_is_no_contradiction() -> None:
    world = World()
    engine, _ = world.backends
    world.tell(engine, stored(PROMPT, SIZE))
    for number in range(30):
        world.answer(world.place([*PROMPT, number], engine), 800 - SIZE if number % 2 else 800 + SIZE)
    assert world.resynced == []
    trust = world.strategy.trust_of(engine)
    assert trust is not None
    assert trust.value == 1.0


def test_an_engine_that_restarts_is_unknown_and_attempts_of_before_change_nothing() -> None:
    world = World()
    engine, _ = world.backends
    world.tell(engine, stored(PROMPT, SIZE))
    before = world.place(PROMPT, engine)
    world.strategy.forget(engine)
    world.strategy.joined(engine)
    world.holdings.clear(world.ranks[engine][0])
    assert len(world.holdings.sent) == 0
    assert world.choose(PROMPT, engine).matched_tokens == 0
    world.answer(before, None, End.FAILED)
    after = world.place(PROMPT, engine)
    assert len(world.holdings.sent) == 1
    world.answer(after, 0)
    assert len(world.holdings.sent) == 0
    trust = world.strategy.trust_of(engine)
    assert trust is not None
    assert trust.value == 1.0


def test_a_request_waits_for_tokens_where_events_could_use_them_and_no_longer_than_a_hit_would_save() -> None:
    world = World()
    engine, _ = world.backends
    asked = world.ask(None)
    # 800 tokens at 10,000 a second, of which a quarter
    assert world.strategy.token_patience_s(asked, world.backends) == pytest.approx(0.02, rel=0.1)
    long = world.ask(None)
    long.prefix_bytes = 4_000_000 * BYTES_PER_TOKEN
    assert world.strategy.token_patience_s(long, world.backends) == PATIENCE_LIMIT_S
    assert world.strategy.token_patience_s(RoutingRequest(MODEL, 0.0, readable=False), world.backends) == 0.0
    world.unfollow(engine)
    assert world.strategy.token_patience_s(asked, (engine,)) == 0.0
    assert world.strategy.token_patience_s(asked, world.backends) > 0.0


def test_an_index_out_of_memory_leaves_its_engine_to_the_mirror() -> None:
    world = World(1, memory_limit_bytes=MIN_MEMORY_LIMIT_BYTES)
    (engine,) = world.backends
    number = 0
    while not world.holdings.out_of_memory(engine):
        world.tell(engine, stored([number * 100_000 + token for token in range(1600)], SIZE))
        number += 1
        assert number < 5000
    assert world.strategy.known_of(engine)["placed_by"] == "mirror"
    assert world.choose(PROMPT).reason is Reason.LOAD  # what it told is there, and this prompt was not told
    world.holdings.clear(world.ranks[engine][0])
    world.tell(engine, stored(PROMPT, SIZE))
    assert world.choose(PROMPT).reason is Reason.KV


def test_engines_of_two_block_sizes_are_asked_each_in_its_own() -> None:
    world = World()
    first, second = world.backends
    world.tell(first, stored(PROMPT[:320], 16))
    world.tell(second, stored(PROMPT, 64))
    told = world.strategy.explain(world.ask(PROMPT), world.backends)
    assert [terms.terms["event_tokens"] for terms in told.candidates] == [320, 768]
    assert told.choice is not None
    assert told.choice.backend is second
    assert world.strategy.match_of(world.ask(PROMPT), second) == (12, 768)


def test_a_rank_that_goes_leaves_nothing_behind() -> None:
    world = World(1, ranks=2)
    (engine,) = world.backends
    for rank in (0, 1):
        world.tell(engine, stored(PROMPT, SIZE), rank=rank)
    world.holdings.remove(world.ranks[engine][0])
    assert world.holdings.held_blocks(engine) == 50
    world.holdings.remove(world.ranks[engine][1])
    assert world.holdings.held_blocks(engine) == 0
    assert world.holdings.told(engine) is None
    assert len(world.holdings.index) == 0
    world.follow(engine)
    assert world.choose(PROMPT).matched_tokens == 0


def test_a_copy_is_paid_for_by_what_events_tell() -> None:
    """A system prompt that one engine holds: conversations that begin with it spread before they all queue there."""
    world = World()
    warm, cold = world.backends
    world.tell(warm, stored(PROMPT, SIZE))
    placed = [world.place([*PROMPT, *range(20_000 + 500 * n, 20_400 + 500 * n)]) for n in range(12)]
    assert {choice.backend for choice in placed} == {warm, cold}
    assert placed[0].backend is warm


def test_what_a_store_of_all_engines_has_is_cheaper_than_computing_and_decides_nothing() -> None:
    world = World()
    asked = world.ask(OTHER)
    asked.shared_tokens = 512
    alone = world.choose(OTHER)
    shared = world.strategy.choose(asked, world.backends)
    assert shared is not None
    assert (shared.matched_tokens, shared.far_tokens, shared.reason) == (512, 512, Reason.LOAD)
    assert shared.uncached_tokens == 288
    assert shared.uncached_s < alone.uncached_s
    world.strategy.placed(shared)
    world.answer(shared, 512)
    trust = world.strategy.trust_of(shared.backend)
    assert trust is not None
    assert (trust.predicted_tokens, trust.reported_tokens, trust.value) == (512, 512, 1.0)
    # an engine that holds more itself is better than the store
    world.tell(world.backends[1], stored(PROMPT, SIZE))
    asked = world.ask(PROMPT)
    asked.shared_tokens = 512
    own = world.strategy.choose(asked, world.backends)
    assert own is not None
    assert (own.backend, own.matched_tokens, own.far_tokens, own.reason) == (world.backends[1], 784, 0, Reason.KV)


def test_quiet_answers_teach_what_loading_from_cpu_memory_costs() -> None:
    world = World(1)
    (engine,) = world.backends
    world.tell(engine, stored(PROMPT, SIZE, medium="CPU"))
    known = world.strategy.known_of(engine)
    assert known["cpu_token_s"] == pytest.approx(0.1 / known["prefill_tokens_per_s"])
    for number in range(5):
        choice = world.place([*PROMPT, number], engine)
        assert (choice.matched_tokens, choice.cpu_tokens) == (800, 800)
        world.answer(choice, 800)  # 0.2 s later: as slow as computing is the most that is believed
    assert world.strategy.known_of(engine)["cpu_token_s"] == pytest.approx(1.0 / known["prefill_tokens_per_s"])


def test_the_share_of_a_store_that_cannot_be_asked_makes_prefill_cheaper() -> None:
    world = World(1)
    (engine,) = world.backends
    before = world.choose(OTHER).uncached_s
    for asked_tokens in (0.0, 100_000.0):
        last, engine.report = (
            engine.report,
            EngineReport(
                at=world.clock.now(),
                block_size_tokens=SIZE,
                external_queries=asked_tokens,
                external_hits=asked_tokens / 2,
            ),
        )
        world.strategy.reported(engine, last, engine.report)
    assert world.strategy.known_of(engine)["shared_hit_rate"] == pytest.approx(0.5)
    assert world.choose(OTHER).uncached_s < 0.7 * before


def test_an_engine_that_tells_not_all_holds_at_least_what_it_tells() -> None:
    world = World()
    first, second = world.backends
    for each in world.backends:
        world.holdings.set_followed(each, True, complete=False)
    assert world.strategy.token_patience_s(world.ask(None), world.backends) > 0.0
    world.tell(first, stored(PROMPT, SIZE))
    told = world.choose(PROMPT)
    assert (told.backend, told.matched_tokens, told.reason, told.kv_tokens) == (first, 784, Reason.KV, None)
    # what the mirror knows beyond it counts as before
    world.answer(world.place(OTHER, second), 0)
    mirrored = world.choose(OTHER)
    assert (mirrored.backend, mirrored.reason) == (second, Reason.PREFIX)
    assert world.strategy.known_of(first)["placed_by"] == "mirror"


def test_counters_of_gpu_hits_do_not_contradict_blocks_in_cpu_memory() -> None:
    """An engine whose answers do not say what was cached, so its counters are compared: they leave other tiers out."""
    world = World(1)
    (engine,) = world.backends
    world.tell(engine, stored(PROMPT, SIZE, medium="CPU"))
    engine.report = EngineReport(at=world.clock.now(), block_size_tokens=SIZE, prefix_queries=0.0, prefix_hits=0.0)
    for number in range(1, 12):
        choice = world.place([*PROMPT, number], engine)
        assert choice.cpu_tokens == 800
        world.answer(choice, None)
        before, engine.report = (
            engine.report,
            EngineReport(at=world.clock.now(), block_size_tokens=SIZE, prefix_queries=801.0 * number, prefix_hits=0.0),
        )
        world.strategy.reported(engine, before, engine.report)
    assert world.resynced == []
    assert world.choose(PROMPT).reason is Reason.KV
