"""One run: a set-up under a policy, as a scenario has it, from one seed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Final

from loadtest.policy.fleet import METRICS_AGE_S, Engine, Fleet, Measured, Policy, Run
from loadtest.policy.ours import NAMES, TOLD, Ours
from loadtest.policy.peers import PEERS, Peer
from loadtest.policy.setups import RATES, SetUp
from loadtest.policy.workload import Workload
from router.clock import VirtualClock
from router.sim.engine_model import EngineRequest

REFERENCE: Final = "least ttft"
HOT_SHARE: Final = 0.05  # of the requests: a block in so many of them belongs to a hot prefix


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is unlike the plain set-up. `speed_error`: what policies that predict take for the prefill speed, times the
    true one (None: kvgate learns it, the peers know it). `slow_half`: the second half of the engines prefills and
    decodes at this part of the others' speed, which nobody is told. `join_at`: the last engine joins, cold, when this
    share of the requests has come. `hot_engine`: before the first request the prefixes that many share are in the
    cache of the first engine alone, by requests that every policy sent there."""

    name: str = "plain"
    metrics_age_s: float = METRICS_AGE_S
    speed_error: float | None = None
    slow_half: float = 1.0
    join_at: float | None = None
    hot_engine: bool = False


PLAIN: Final = Scenario()
SCENARIOS: Final = {
    scenario.name: scenario
    for scenario in (
        PLAIN,
        Scenario("prefill speed taken for twice", speed_error=2.0),
        Scenario("prefill speed taken for half", speed_error=0.5),
        Scenario("metrics 1 s old", metrics_age_s=1.0),
        Scenario("two speeds", slow_half=0.5),
        Scenario("cold engine joins", join_at=0.3),
        Scenario("hot prefix on one engine", hot_engine=True),
    )
}


@dataclass(frozen=True, slots=True)
class Figures:
    """What one run gave; times in seconds."""

    set_up: str
    scenario: str
    policy: str
    seed: int
    hit_ratio: float
    pooled_hit_ratio: float  # of one cache as large as all of them together
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    itl_mean_s: float
    imbalance: float  # the busiest engine's prefill time over the mean
    utilisation: float  # of the engines' time until the last arrival, with prefill in it
    kv_share: float
    preemptions: int
    requests_per_s: float
    tail_s: float = field(default=0.0)  # from the last arrival to the last token


def run(
    set_up: SetUp,
    policy_name: str,
    seed: int,
    workload: Workload,
    *,
    scenario: Scenario = PLAIN,
    rate: float | None = None,
) -> Figures:
    """`rate`: requests per second, the set-up's own unless given. KeyError for an unknown policy."""
    clock = VirtualClock(0.0)
    config = set_up.engine_config()
    events = policy_name in TOLD
    engines = [Engine(config, emit_events=events) for _ in range(set_up.engines)]
    if scenario.slow_half != 1.0:
        part = scenario.slow_half
        slow = replace(
            config,
            step_s=config.step_s / part,
            prefill_token_s=config.prefill_token_s / part,
            decode_s=config.decode_s / part,
            decode_seq_s=config.decode_seq_s / part,
        )
        engines[set_up.engines // 2 :] = [
            Engine(slow, emit_events=events) for _ in range(set_up.engines - set_up.engines // 2)
        ]
    fleet = Fleet(engines, clock, Random(f"{seed}/policy"), workload.block_tokens)
    join_at = None
    if scenario.join_at is not None:
        join_at = {set_up.engines - 1: scenario.join_at}
        fleet.absent.add(set_up.engines - 1)
    if scenario.hot_engine:
        warm_first_engine(engines[0], workload)
    policy = make_policy(policy_name, fleet, scenario)
    rate = rate or RATES[set_up.name]
    measured = Run(
        workload,
        fleet,
        policy,
        1.0 / rate,
        Random(f"{seed}/arrivals"),
        metrics_age_s=scenario.metrics_age_s,
        join_at=join_at,
    ).measure()
    return figures_of(measured, set_up.name, scenario.name, policy_name, seed, rate, _bound(workload, set_up))


@lru_cache(maxsize=4)
def _bound(workload: Workload, set_up: SetUp) -> float:
    return workload.pooled_hit_ratio(set_up.pooled_blocks)


def make_policy(name: str, fleet: Fleet, scenario: Scenario = PLAIN) -> Policy:
    if name in NAMES:
        return Ours(name, fleet, speed_error=scenario.speed_error)
    peer: Peer = PEERS[name](fleet)
    if scenario.speed_error is not None:
        peer.token_s /= scenario.speed_error
    return peer


def warm_first_engine(engine: Engine, workload: Workload) -> None:
    """Compute each hot prefix there once."""
    uses: dict[int, int] = {}
    for arrival in workload.arrivals:
        for block in arrival.ids:
            uses[block] = uses.get(block, 0) + 1
    least = HOT_SHARE * len(workload.arrivals)
    prefixes: dict[int, tuple[int, ...]] = {}
    for arrival in workload.arrivals:
        count = 0
        while count < len(arrival.ids) and uses[arrival.ids[count]] >= least:
            count += 1
        if count:
            prefixes[arrival.ids[count - 1]] = arrival.ids[:count]
    model, now = engine.model, 0.0
    for number, ids in enumerate(prefixes.values()):
        model.submit(EngineRequest(f"warm-{number}", len(ids) * workload.block_tokens, 1, ids))
        while model.has_work:
            duration, _ = model.step(now)
            now += duration


def figures_of(
    measured: Measured, set_up: str, scenario: str, policy: str, seed: int, rate: float, bound: float
) -> Figures:
    ttft = sorted(measured.ttft_s)
    busy = measured.busy_s
    return Figures(
        set_up=set_up,
        scenario=scenario,
        policy=policy,
        seed=seed,
        hit_ratio=measured.cached_tokens / measured.prompt_tokens,
        pooled_hit_ratio=bound,
        ttft_mean_s=sum(ttft) / len(ttft),
        ttft_p50_s=percentile(ttft, 0.5),
        ttft_p90_s=percentile(ttft, 0.9),
        ttft_p99_s=percentile(ttft, 0.99),
        itl_mean_s=sum(measured.itl_s) / len(measured.itl_s) if measured.itl_s else 0.0,
        imbalance=max(busy) * len(busy) / sum(busy),
        utilisation=sum(busy) / len(busy) / measured.last_arrival_s,
        kv_share=measured.kv_share,
        preemptions=measured.preemptions,
        requests_per_s=rate,
        tail_s=measured.ended_at - measured.last_arrival_s,
    )


def percentile(ordered: list[float], share: float) -> float:
    """Between the two nearest samples, in a sorted list."""
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def find_rate(set_up: SetUp, folder: Path) -> float:
    """Requests per second at which the reference policy keeps prefill (or the KV pools) busy for the wanted share of
    the time. By bisection, to 1.5 % of it; where the reference collapses (its mean TTFT above four usual prefills
    and half a second), that counts as too fast."""
    workload = set_up.workload(folder)
    wanted = set_up.load_percent / 100
    config = set_up.engine_config()
    hit = workload.pooled_hit_ratio(set_up.pooled_blocks)
    mean_tokens = sum(arrival.prompt_tokens for arrival in workload.arrivals) / len(workload.arrivals)
    work_s = mean_tokens * (1.0 - 0.95 * hit) * config.prefill_token_s * 1.1 + 2 * config.step_s
    rate = set_up.engines * wanted / work_s
    too_slow = too_fast = 0.0
    for _ in range(10):
        figures = run(set_up, REFERENCE, 0, workload, rate=rate)
        busy = max(figures.utilisation, figures.kv_share)
        if figures.ttft_mean_s > 4.0 * work_s + 0.5:
            busy = max(busy, 1.5 * wanted)
        if abs(busy / wanted - 1.0) < 0.015:
            break
        if busy > wanted:
            too_fast = rate
        else:
            too_slow = rate
        if too_fast and too_slow:
            if too_fast / too_slow < 1.02:
                return too_slow
            rate = (too_fast * too_slow) ** 0.5
        else:
            rate *= min(max(wanted / busy, 0.5), 2.0)
    return rate
