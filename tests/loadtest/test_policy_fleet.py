"""The bench's clockwork: arrivals, engines from event to event, and what they cached."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import orjson
import pytest

from loadtest.policy.fleet import Engine, Fleet, Job, Run
from loadtest.policy.peers import LeastLoaded
from loadtest.policy.workload import Workload, load_workload
from router.clock import VirtualClock
from router.sim.engine_model import EngineConfig

BLOCK = 16
CONFIG = EngineConfig(block_size=BLOCK, num_blocks=64, max_num_seqs=8, max_num_batched_tokens=64)


def trace(folder: Path, *lines: tuple[float, int, int, Sequence[int], int | None]) -> Path:
    path = folder / "small.jsonl"
    rows = [
        {"t_ms": at, "in": tokens, "out": out, "hash_ids": list(ids)} | ({} if s is None else {"s": s})
        for at, tokens, out, ids, s in lines
    ]
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return path


def load(path: Path, **options: object) -> Workload:
    return load_workload(
        path,
        **({"block_tokens": BLOCK, "arrivals": "open", "pool_tokens": 1000} | options),  # type: ignore[arg-type]
    )


class Recorder(LeastLoaded):
    """Everything to the engine that a list says; keeps when things happened."""

    def __init__(self, fleet: Fleet, engines: Sequence[int] = ()) -> None:
        super().__init__(fleet)
        self.engines = engines
        self.routed: list[float] = []
        self.first: dict[int, float] = {}
        self.ended: dict[int, float] = {}

    def choose(self, job: Job) -> int:
        self.routed.append(self.fleet.clock.now())
        return self.engines[job.number] if self.engines else super().choose(job)

    def first_token(self, job: Job) -> None:
        self.first[job.number] = self.fleet.clock.now()
        super().first_token(job)

    def finished(self, job: Job) -> None:
        self.ended[job.number] = self.fleet.clock.now()
        super().finished(job)


def fleet_of(count: int) -> Fleet:
    return Fleet([Engine(CONFIG) for _ in range(count)], VirtualClock(0.0), Random(1), BLOCK)


class NoLot(Random):
    def random(self) -> float:
        return 0.0


def test_times_and_tokens_are_those_of_the_model(tmp_path: Path) -> None:
    """One prompt of two chunks and three tokens; the second comes in the middle of its decode steps."""
    workload = load(trace(tmp_path, (0, 100, 50, range(7), None), (500, 32, 1, (90, 91), None)))
    fleet = fleet_of(1)
    policy = Recorder(fleet)
    Run(workload, fleet, policy, 0.5, NoLot()).measure()
    prefill = CONFIG.step_duration_s(64, 0) + CONFIG.step_duration_s(36, 0)
    assert policy.first[0] == pytest.approx(prefill)
    decode = CONFIG.step_duration_s(0, 1)
    steps_before = int((0.5 - prefill) / decode) + 1  # the one under way ends first
    assert policy.first[1] == pytest.approx(prefill + steps_before * decode + CONFIG.step_duration_s(32, 1))
    rest = 49 - steps_before - 1
    assert policy.ended[0] == pytest.approx(policy.first[1] + rest * decode)


def test_the_second_prompt_finds_the_first_ones_blocks(tmp_path: Path) -> None:
    shared = [(at, 100, 2, (*range(6), 50 + at), None) for at in range(0, 2000, 100)]
    workload = load(trace(tmp_path, *shared))
    assert workload.pooled_hit_ratio(None) == pytest.approx(0.96)
    assert workload.pooled_hit_ratio(3) == pytest.approx(0.48)  # three blocks keep the head of the six
    fleet = fleet_of(2)
    measured = Run(workload, fleet, Recorder(fleet, [0] * 20), 0.5, NoLot()).measure()
    assert measured.cached_tokens / measured.prompt_tokens == pytest.approx(0.96)
    assert fleet.engines[0].cached_blocks(workload.arrivals[0]) == 6
    assert fleet.engines[1].cached_blocks(workload.arrivals[0]) == 0
    fleet = fleet_of(2)
    measured = Run(workload, fleet, Recorder(fleet, [n % 2 for n in range(20)]), 0.5, NoLot()).measure()
    assert measured.busy_s[0] == pytest.approx(measured.busy_s[1], rel=0.1)


def test_a_turn_waits_for_the_answer_before_it(tmp_path: Path) -> None:
    path = trace(tmp_path, (0, 20, 200, (1, 2), 7), (100, 40, 1, (1, 2, 3), 7), (150, 20, 1, (8, 9), 8))
    workload = load(path, arrivals="session")
    assert [arrival.follows for arrival in workload.arrivals] == [-1, 0, -1]
    fleet = fleet_of(1)
    policy = Recorder(fleet)
    Run(workload, fleet, policy, 0.05, NoLot()).measure()
    assert policy.routed[-1] == pytest.approx(policy.ended[0])
    assert policy.ended[0] > 0.15


def test_copies_share_what_sessions_share_and_nothing_else(tmp_path: Path) -> None:
    lines = [(n * 10.0, 40, 1, (1, 2, 100 + n), n) for n in range(3)]
    workload = load(trace(tmp_path, *lines), arrivals="session", copies=2)
    heads = {arrival.ids[0] for arrival in workload.arrivals}
    tails = {arrival.ids[-1] for arrival in workload.arrivals}
    assert len(workload.arrivals) == 6
    assert heads == {1}
    assert tails == {2}  # the partly filled third block is never shared
    assert len({arrival.session for arrival in workload.arrivals}) == 6


def test_requests_too_large_for_the_pool_are_left_out(tmp_path: Path) -> None:
    path = trace(tmp_path, (0, 16, 1, (1,), None), (10, 960, 1, range(60), None))
    workload = load(path)
    assert (len(workload.arrivals), workload.left_out) == (1, 1)
    with pytest.raises(ValueError, match="no request fits"):
        load(path, pool_tokens=16)


def test_an_engine_that_joins_gets_nothing_before(tmp_path: Path) -> None:
    workload = load(trace(tmp_path, *((n * 100, 32, 20, (n * 2, n * 2 + 1), None) for n in range(20))))
    fleet = fleet_of(2)
    fleet.absent.add(1)
    policy = LeastLoaded(fleet)
    chosen: list[int] = []
    route = policy.route
    policy.route = lambda job: chosen.append(route(job)) or chosen[-1]  # type: ignore[func-returns-value, method-assign]
    Run(workload, fleet, policy, 0.01, NoLot(), join_at={1: 0.5}).measure()
    assert set(chosen[:10]) == {0}
    assert 1 in chosen[10:]
