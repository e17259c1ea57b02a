"""Behaviour of `prefixaware`, most of it on a small simulated fleet."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from random import Random

import pytest

from router.backends.backend import EngineReport
from router.strategies import prefix_affinity
from router.strategies.prefix_affinity import PrefixAffinity
from router.strategies.strategy import End, Outcome, Reason, RoutingRequest
from tests.support.fleet import BLOCK_BYTES, BYTES_PER_TOKEN, Fleet, Job, request, text_of
from tests.unit.strategies.test_contract import Rig


def placement(fleet: Fleet) -> PrefixAffinity:
    assert isinstance(fleet.strategy, PrefixAffinity)
    return fleet.strategy


def conversations(
    fleet: Fleet, *, rate: float, seconds: float, seed: int = 3, systems: int = 6, turns: int = 6, output: int = 30
) -> list[Job]:
    """Open loop: turns that grow their conversation, over shared system prompts. The jobs, all ended."""
    rng = Random(seed)
    begun = len(fleet.jobs)
    for n in range(int(rate * seconds / turns)):
        at = rng.random() * seconds
        text = text_of(rng.randrange(systems), 1500)
        for turn in range(turns):
            text += text_of(1000 * (n + 1) + turn, 300)
            fleet.send_at(at, text, output)
            at += rng.expovariate(1 / 8)
    fleet.run(seconds + 100.0)
    fleet.drain()
    return fleet.jobs[begun:]


# ---- a prompt goes where its prefix is


def test_a_conversation_stays_where_its_history_is() -> None:
    fleet = Fleet()
    fleet.grow(4)
    text = b""
    turns = []
    for turn in range(12):
        text += text_of(turn, 400)
        turns.append(fleet.ask(text))
    assert len({job.backend for job in turns}) == 1
    assert [job.choice.reason for job in turns] == [Reason.LOAD] + [Reason.PREFIX] * 11
    for before, job in pairwise(turns):
        assert before.prompt_tokens - 32 <= job.choice.matched_tokens <= before.prompt_tokens
        assert job.hit_tokens == job.choice.matched_tokens


def test_a_full_match_still_computes_one_token() -> None:
    fleet = Fleet()
    fleet.grow(2)
    text = text_of(1, 1024)
    fleet.ask(text)
    again = fleet.ask(text)
    assert again.choice.matched_tokens == 1023
    assert again.choice.uncached_tokens == 1


def test_a_match_that_saves_nothing_decides_nothing() -> None:
    rig = Rig("prefixaware")
    tiny = text_of(1, 32)
    rig.end(rig.take(tiny, rig.backends))
    # The next one shares one block of 32 tokens out of 5,000: 3 ms of 500.
    choice = rig.take(tiny + text_of(2, 5000), rig.backends)
    assert choice.reason is Reason.LOAD
    rig.end(choice)
    by_name = Counter(rig.take(tiny + text_of(n, 50), rig.backends).backend.name for n in range(10, 40))
    assert len(by_name) == 4


def test_token_ids_in_the_body_are_exact() -> None:
    rig = Rig("prefixaware")
    text = text_of(1, 512)
    for matched in (0, 511):
        asked = request(text)
        asked.prompt_tokens = 512
        choice = rig.strategy.choose(asked, rig.backends)
        assert choice is not None
        assert (choice.prompt_tokens, choice.matched_tokens) == (512, matched)
        rig.strategy.placed(choice)
        choice.backend.in_flight += 1
        rig.strategy.first_byte(choice)
        rig.end(choice)


# ---- a miss goes to the least loaded; nobody takes all


def test_serial_misses_spread_over_an_idle_fleet() -> None:
    fleet = Fleet()
    fleet.grow(4)
    for n in range(40):
        fleet.ask(text_of(n, 2000))
    assert set(fleet.share().values()) == {10}


def test_a_burst_of_misses_spreads() -> None:
    fleet = Fleet()
    fleet.grow(4)
    for n in range(40):
        fleet.send(text_of(n, 2000))
    assert max(fleet.share().values()) <= 11
    fleet.drain()


def test_a_shared_system_prompt_spreads_under_strictly_serial_traffic() -> None:
    fleet = Fleet()
    fleet.grow(4)
    system = text_of(1, 2000)
    for n in range(80):
        fleet.ask(system + text_of(100 + n, 100))
    assert min(fleet.share().values()) >= 12
    # Four copies, and each but the first paid for by what the ones before it saved.
    copies = sum(job.hit_tokens == 0 for job in fleet.jobs)
    assert copies == 4


def test_identical_prompts_spread_too() -> None:
    fleet = Fleet()
    fleet.grow(3)
    for _ in range(60):
        fleet.ask(text_of(1, 1000))
    assert min(fleet.share().values()) >= 10


def test_a_prefix_asked_for_rarely_is_not_copied() -> None:
    fleet = Fleet()
    fleet.grow(4)
    system = text_of(1, 2000)
    for n in range(30):
        fleet.ask(system + text_of(100 + n, 100))
        fleet.run(900.0)
    assert len(fleet.share()) == 1


def test_a_long_conversation_is_not_copied_for_its_own_sake() -> None:
    fleet = Fleet()
    fleet.grow(4)
    text = text_of(1, 4000)
    for turn in range(60):
        text += text_of(100 + turn, 64)
        fleet.ask(text)
    assert len(fleet.share()) == 1


def test_siblings_follow_their_leader_until_waiting_costs_more() -> None:
    fleet = Fleet()
    fleet.grow(4)
    system = text_of(1, 4000)
    for n in range(12):  # arrivals are dense, so work has a price: 0.4 s of prefill for each that leaves
        fleet.ask(text_of(50 + n, 1000))
    leader = fleet.send(system + text_of(100, 50))
    fleet.run(0.2)
    assert fleet.send(system + text_of(101, 50)).backend is leader.backend  # half done: cheaper to wait for
    crowd = [fleet.send(system + text_of(200 + n, 1500)) for n in range(8)]  # each brings 0.15 s there
    assert crowd[0].backend is leader.backend
    assert any(job.backend is not leader.backend for job in crowd)
    fleet.drain()


def test_a_hot_prefix_on_one_engine_spreads_before_that_saturates() -> None:
    fleet = Fleet()
    fleet.grow(2)
    system = text_of(1, 3000)
    fleet.engines[fleet.backends[0]].warm(system)
    placement(fleet)._mirror.insert(fleet.backends[0].slot, request(system).blocks)  # type: ignore[arg-type]
    rng = Random(4)
    at = 0.0
    for n in range(91):
        fleet.send_at(at, system + text_of(100 + n, 200), 60)
        at += rng.expovariate(8.0)
    fleet.run(at + 10.0)
    fleet.drain()
    assert fleet.jobs[0].backend is fleet.backends[0]
    assert min(fleet.share().values()) >= 25
    assert max(job.ttft_s for job in fleet.jobs) < 0.7  # one 3,000-token prefill and a short wait


def test_a_hot_engine_does_not_drown_in_decodes() -> None:
    """Prefill alone sees no reason to leave it: each follower brings next to none."""
    fleet = Fleet()
    fleet.grow(2)
    text = text_of(1, 500)
    fleet.ask(text)
    for _ in range(60):
        fleet.send(text, 400)
        fleet.run(0.1)
    assert min(fleet.share().values()) >= 20


# ---- load


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_conversations_hit_more_and_wait_less_than_under_other_policies(seed: int) -> None:
    found = {}
    for name in ("prefixaware", "leastload", "roundrobin"):
        fleet = Fleet(name, seed=seed)
        fleet.grow(4, kv_tokens=60_000)
        jobs = conversations(fleet, rate=25, seconds=40, seed=seed)
        found[name] = fleet.mean_ttft_s(jobs), fleet.hit_ratio(jobs)
    for other in ("leastload", "roundrobin"):
        assert found["prefixaware"][0] < 0.75 * found[other][0]
        assert found["prefixaware"][1] > found[other][1] + 0.08


def test_heavy_skew_uses_the_whole_fleet() -> None:
    """Nine of ten requests share one prefix."""
    fleet = Fleet()
    fleet.grow(4)
    rng = Random(9)
    hot = text_of(1, 1000)
    for n in range(600):
        head = hot if rng.random() < 0.9 else text_of(7000 + n, 1000)
        fleet.send_at(n / 40, head + text_of(100 + n, 200), 20)
    fleet.run(60.0)
    fleet.drain()
    assert max(fleet.share().values()) < 2 * min(fleet.share().values())


def test_a_cold_engine_gets_its_share() -> None:
    fleet = Fleet()
    fleet.grow(3)
    conversations(fleet, rate=25, seconds=20)
    newcomer = fleet.add("new")
    jobs = conversations(fleet, rate=25, seconds=30, seed=4)
    share = fleet.share(jobs)[newcomer.name]
    assert 0.15 * len(jobs) < share < 0.45 * len(jobs)


def test_engines_of_two_speeds_share_by_speed() -> None:
    """Equal weights, so the difference has to be learned."""
    means = {}
    for name in ("prefixaware", "leastload"):
        fleet = Fleet(name)
        fleet.add("slow", tokens_per_s=3_000.0)
        fleet.add("fast", tokens_per_s=12_000.0)
        for n in range(20):
            fleet.ask(text_of(n, 1000))
        rng = Random(2)
        at = 0.0
        for n in range(200):
            fleet.send_at(at, text_of(100 + n, 1500), 20)
            at += rng.expovariate(4.0)
        fleet.run(at + 60.0)
        fleet.drain()
        jobs = fleet.jobs[20:]
        means[name] = fleet.mean_ttft_s(jobs)
        if name == "prefixaware":
            share = fleet.share(jobs)
            assert share["fast"] > 2 * share["slow"] > 0
    assert means["prefixaware"] < means["leastload"]


@pytest.mark.parametrize("tokens_per_s", [5_000.0, 20_000.0])
@pytest.mark.parametrize("usage", [True, False])
def test_a_misjudged_speed_is_learned_and_does_no_harm_until_then(tokens_per_s: float, usage: bool) -> None:
    """The prior is 10,000 tokens/s."""
    rate = 12 * tokens_per_s / 10_000
    found = {}
    for name in ("prefixaware", "roundrobin"):
        fleet = Fleet(name, usage=usage)
        fleet.grow(4, tokens_per_s=tokens_per_s, kv_tokens=60_000)
        jobs = conversations(fleet, rate=rate, seconds=40)
        found[name] = fleet.mean_ttft_s(jobs)
        if name == "prefixaware":
            for engine in placement(fleet)._engines.values():
                assert 0.6 < 1 / engine.seconds_per_token / tokens_per_s < 1.4
    assert found["prefixaware"] < 0.8 * found["roundrobin"]


@pytest.mark.parametrize(("age_s", "exports"), [(1.0, True), (5.0, True), (0.0, False)])
def test_stale_or_missing_metrics_cost_little(age_s: float, exports: bool) -> None:
    means = []
    for fleet in (Fleet(poll_s=0.25), Fleet(metrics_age_s=age_s, exports_metrics=exports)):
        fleet.grow(4, kv_tokens=60_000)
        means.append(fleet.mean_ttft_s(conversations(fleet, rate=25, seconds=40)))
    assert means[1] < 1.15 * means[0]


def test_answers_in_one_piece_are_placed_as_well() -> None:
    """Their first byte comes with their last: it tells neither when a prefill ended nor how fast it was."""
    means = []
    for stream in (True, False):
        fleet = Fleet(stream=stream)
        fleet.grow(4, kv_tokens=60_000, tokens_per_s=6_000.0)
        means.append(fleet.mean_ttft_s(conversations(fleet, rate=15, seconds=40)))
        for engine in placement(fleet)._engines.values():
            assert 0.6 < 1 / engine.seconds_per_token / 6_000 < 1.7
    assert means[1] < 1.15 * means[0]


# ---- the mirror


def test_a_failed_attempt_leaves_no_ghosts_but_what_was_there_before() -> None:
    for end in (End.FAILED, End.CANCELLED):
        rig = Rig("prefixaware", count=1)
        text = text_of(1, 320)
        first = rig.take(text, rig.backends)
        rig.strategy.first_byte(first)
        rig.end(first)
        longer = rig.take(text + text_of(2, 320), rig.backends)
        assert longer.match_blocks == 10
        assert rig.tree.blocks_of(rig.backends[0].slot) == 20
        rig.end(longer, end)
        assert rig.tree.blocks_of(rig.backends[0].slot) == 10


def test_what_was_prefilled_stays_though_the_client_left() -> None:
    rig = Rig("prefixaware", count=1)
    choice = rig.take(text_of(1, 320), rig.backends)
    rig.strategy.first_byte(choice)
    rig.end(choice, End.CANCELLED)
    assert rig.tree.blocks_of(rig.backends[0].slot) == 10


@pytest.mark.parametrize("answered", [False, True])
def test_a_refused_prompt_never_came(answered: bool) -> None:
    rig = Rig("prefixaware", count=1)
    choice = rig.take(text_of(1, 320), rig.backends)
    if answered:
        rig.strategy.first_byte(choice)  # of the error's body
    rig.strategy.observe(choice, Outcome(End.COMPLETE, rig.clock.now(), 400))
    assert rig.tree.blocks_of(rig.backends[0].slot) == 0


@pytest.mark.parametrize(("told", "pool_blocks"), [(200, 40), (None, 10)])
def test_a_prompt_that_the_engine_will_refuse_does_not_empty_its_mirror(told: int | None, pool_blocks: int) -> None:
    rig = Rig("prefixaware", count=1)
    only = rig.backends[0]
    only.models["m"]["max_model_len"] = told
    before, only.report = only.report, EngineReport(at=1.0, block_size_tokens=16, num_gpu_blocks=pool_blocks)
    rig.strategy.reported(only, before, only.report)
    kept = rig.take(text_of(1, 128), rig.backends)
    rig.strategy.first_byte(kept)
    held = rig.tree.blocks_of(only.slot)
    assert held == 4
    for n in range(5):
        refused = rig.take(text_of(10 + n, 640), rig.backends)
        rig.strategy.observe(refused, Outcome(End.COMPLETE, rig.clock.now(), 400))
    assert rig.tree.blocks_of(only.slot) == held
    assert rig.tree.match_one(only.slot, request(text_of(1, 128)).blocks) == 4  # type: ignore[arg-type]


def test_the_mirror_has_the_size_of_the_engines_pool() -> None:
    rig = Rig("prefixaware", count=1)
    only = rig.backends[0]
    before, only.report = only.report, EngineReport(at=1.0, block_size_tokens=16, num_gpu_blocks=40)  # 640 tokens
    rig.strategy.reported(only, before, only.report)
    for n in range(8):
        choice = rig.take(text_of(n, 160), rig.backends)
        rig.strategy.first_byte(choice)
        rig.end(choice)
        assert rig.tree.blocks_of(only.slot) <= 640 * 4.2 * 2 / BLOCK_BYTES
    engine = rig.placement.engine(only) if rig.placement else None
    assert engine is not None
    # Rig answers with 300 tokens for 640 bytes: the ratio fell to 2.1, and the mirror with it.
    assert engine.size.blocks == int(640 * (640 / 300) / BLOCK_BYTES)
    assert rig.tree.blocks_of(only.slot) <= engine.size.blocks


def test_an_engine_without_a_prefix_cache_promises_nothing() -> None:
    fleet = Fleet()
    fleet.add("off", caching=False)
    fleet.add("on")
    text = text_of(1, 2000)
    for backend in fleet.backends:
        fleet.strategy.placed(placement(fleet).assign(request(text), backend, Reason.LOAD))
    choice = fleet.strategy.choose(request(text), fleet.backends)
    assert choice is not None
    assert choice.backend.name == "on"
    alone = fleet.strategy.choose(request(text), fleet.backends[:1])
    assert alone is not None
    assert (alone.matched_tokens, alone.reason) == (0, Reason.LOAD)
    assert fleet.tree.blocks_of(fleet.backends[0].slot) == 0


def test_a_full_pool_is_a_wait() -> None:
    rig = Rig("prefixaware", count=2)
    full, free = rig.backends
    for told, usage in ((full, 1.0), (free, 0.0)):
        before, told.report = (
            told.report,
            EngineReport(
                at=1.0, running=20.0 if usage else 0.0, kv_usage=usage, block_size_tokens=16, num_gpu_blocks=1000
            ),
        )
        rig.strategy.reported(told, before, told.report)
    assert {rig.take(text_of(n, 100), rig.backends).backend for n in range(4)} == {free}


def test_cached_blocks_need_room_unless_others_hold_them() -> None:
    """A history of 700 tokens in a pool of 1,000, of which others hold 600: to use it is to hold it."""
    rig = Rig("prefixaware", count=1)
    rig.backends += (Rig("prefixaware", count=1).backends[0],)
    there, free = rig.backends
    history = text_of(1, 704)
    first = rig.take(history, (there,))
    rig.clock.advance(0.08)
    rig.strategy.first_byte(first)
    there.in_flight -= 1
    rig.strategy.observe(first, Outcome(End.COMPLETE, rig.clock.now(), 200))
    rig.strategy.joined(free)
    for told, usage in ((there, 0.6), (free, 0.0)):
        before, told.report = (
            told.report,
            EngineReport(at=1.0, kv_usage=usage, block_size_tokens=10, num_gpu_blocks=100, running=0.0),
        )
        rig.strategy.reported(told, before, told.report)
    asked = request(history)
    asked.max_tokens = 10
    alone = rig.strategy.choose(asked, rig.backends)
    assert alone is not None
    assert alone.backend is free
    assert rig.placement is not None
    assert alone.best_prefix is not None
    rig.placement._copies.served(alone.best_prefix, 0.07, 0.0, rig.clock.now())
    shared = rig.strategy.choose(asked, rig.backends)
    assert shared is not None
    assert shared.backend is there


def test_a_history_that_goes_while_its_request_waits_for_room_is_work_for_those_behind() -> None:
    """700 tokens cached in a pool of 1,000, of which others hold 600: to take it in, some must go."""
    rig = Rig("prefixaware", count=1)
    (only,) = rig.backends
    history = text_of(1, 704)
    first = rig.take(history, rig.backends)
    rig.clock.advance(0.08)
    rig.strategy.first_byte(first)
    rig.strategy.observe(first, Outcome(End.COMPLETE, rig.clock.now(), 200))
    work_s = {}
    for usage in (0.0, 0.6):
        before, only.report = (
            only.report,
            EngineReport(at=1.0, kv_usage=usage, block_size_tokens=10, num_gpu_blocks=100, running=0.0),
        )
        rig.strategy.reported(only, before, only.report)
        asked = request(history)
        asked.max_tokens = 10
        choice = rig.strategy.choose(asked, rig.backends)
        assert choice is not None
        assert choice.uncached_tokens == 1  # what is predicted is what is there now
        work_s[usage] = choice.uncached_s
    assert rig.placement is not None
    engine = rig.placement.engine(only)
    assert engine is not None
    missing = choice.prompt_tokens + 10 - engine.kv_budget
    assert missing > 0
    assert work_s[0.6] - work_s[0.0] == pytest.approx(missing * engine.left_token_s)


def test_requests_of_others_count_once_two_polls_agree() -> None:
    rig = Rig("prefixaware", count=2)
    busy, free = rig.backends
    busy.weight = free.weight = 1.0
    rig.strategy.forget(free)
    for _ in range(3):
        before, busy.report = busy.report, EngineReport(at=rig.clock.now(), running=60.0)
        rig.strategy.reported(busy, before, busy.report)
        rig.clock.advance(2.0)
    assert {rig.take(text_of(n, 10), rig.backends).backend for n in range(5)} == {free}


def test_models_are_learned_apart_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_affinity, "MAX_MODELS", 3)
    rig = Rig("prefixaware")
    for n in range(6):
        choice = rig.strategy.choose(RoutingRequest(f"m{n}", 0.0, prefix_bytes=1000), rig.backends)
        assert choice is not None
        rig.strategy.placed(choice)
        rig.strategy.observe(choice, Outcome(End.COMPLETE, 0.0, 200, prompt_tokens=500 if n else 125))
    assert rig.placement is not None
    assert list(rig.placement._models) == ["m0", "m1", "m2"]
    assert [m.text.ratio for m in rig.placement._models.values()] == [8.0, 2.0, 2.0]
    assert rig.placement._further_models.text.ratio == 2.0


def test_bytes_become_tokens_by_what_the_engine_counts() -> None:
    fleet = Fleet()
    fleet.grow(1)
    dense = text_of(1, 500)
    choice = fleet.strategy.choose(request(dense), fleet.backends)
    assert choice is not None
    assert choice.prompt_tokens == len(dense) // BYTES_PER_TOKEN
    fleet.strategy.placed(choice)
    fleet.strategy.observe(choice, Outcome(End.COMPLETE, 0.0, 200, prompt_tokens=1000))
    again = fleet.strategy.choose(request(dense), fleet.backends)
    assert again is not None
    assert again.prompt_tokens == 1000
