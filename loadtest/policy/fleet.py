"""Engines on a virtual clock: from event to event, nothing sleeps.

Each engine is the model that `kvgate sim` runs (router/sim/engine_model.py). A stretch of equal decode steps is one
event; a request that arrives within it cuts it at the end of the step under way, as it would find the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import Any, Final, Protocol

from loadtest.policy.workload import Arrival, Workload
from router.clock import VirtualClock
from router.sim.block_pool import PoolEvent
from router.sim.engine_model import EngineConfig, EngineModel, EngineRequest

METRICS_AGE_S: Final = 0.25  # between two looks at the engines' metrics
ARRIVAL, STEP_END, SCRAPE = range(3)


class Job:
    """One request on its way. `mark` belongs to the policy."""

    __slots__ = ("arrival", "arrived_at", "engine", "mark", "number", "request", "uncached_tokens")

    def __init__(self, number: int, arrival: Arrival, arrived_at: float) -> None:
        self.number = number
        self.arrival = arrival
        self.arrived_at = arrived_at
        self.engine = -1
        self.uncached_tokens = arrival.prompt_tokens  # as the policy guessed at its choice
        self.mark: Any = None
        self.request: EngineRequest | None = None


class Engine:
    """One engine with what it is doing, and the sums that its metrics export."""

    __slots__ = (
        "began_at",
        "duration_s",
        "model",
        "open",
        "prefill_busy_s",
        "prefill_count",
        "prefill_seconds_sum",
        "steps",
        "version",
    )

    def __init__(self, config: EngineConfig, *, emit_events: bool = False) -> None:
        self.model = EngineModel(config, emit_events=emit_events)
        self.open = False  # a step is under way
        self.began_at = self.duration_s = 0.0
        self.steps = 1
        self.version = 0  # of the planned end: those of older versions mean nothing
        self.prefill_busy_s = 0.0
        self.prefill_seconds_sum = 0.0
        self.prefill_count = 0

    def cached_blocks(self, arrival: Arrival) -> int:
        """Blocks of the prompt that are in its cache now, as KV events would tell."""
        return self.model.pool.match_length(arrival.ids, len(arrival.ids))


class Policy(Protocol):
    """Who chooses. All times are the clock's; each job is told of once in each of these."""

    def route(self, job: Job) -> int | None:
        """The engine's number; may set job.uncached_tokens and job.mark. None: it is kept back, and given to
        fleet.start later."""
        ...

    def first_token(self, job: Job) -> None: ...

    def finished(self, job: Job) -> None: ...

    def scraped(self) -> None:
        """The engines' metrics were read just now."""
        ...

    def joined(self, engine: int) -> None:
        """This engine takes requests from now on; those that do from the start are not told of."""
        ...

    def told(self, engine: int, events: list[PoolEvent]) -> None:
        """What an engine publishes at the end of a step, where it publishes anything."""
        ...


class Fleet:
    """What a policy is made from: the engines, the clock and the generator. `absent`: engines that join later."""

    def __init__(self, engines: list[Engine], clock: VirtualClock, rng: Random, block_tokens: int) -> None:
        self.engines = engines
        self.clock = clock
        self.rng = rng
        self.block_tokens = block_tokens
        self.absent: set[int] = set()
        self.start: Callable[[Job, int], None]  # the run's: gives a job that was kept back to an engine


class Measured:
    """What came out of one run. Requests of the warming part are not in it; seconds, tokens."""

    __slots__ = (
        "busy_s",
        "cached_tokens",
        "ended_at",
        "itl_s",
        "kv_share",
        "last_arrival_s",
        "preemptions",
        "prompt_tokens",
        "ttft_s",
    )

    def __init__(self) -> None:
        self.ttft_s: list[float] = []
        self.itl_s: list[float] = []
        self.cached_tokens = 0
        self.prompt_tokens = 0
        self.busy_s: list[float] = []  # with steps that prefill, by engine
        self.preemptions = 0
        self.last_arrival_s = 0.0
        self.ended_at = 0.0
        self.kv_share = 0.0  # of the pools held, mean over the scrapes


class Run:
    """One workload through one policy.

    `join_at`: engine -> the share of the requests that have arrived when it joins, cold.
    """

    def __init__(
        self,
        workload: Workload,
        fleet: Fleet,
        policy: Policy,
        seconds_per_request: float,
        rng: Random,
        *,
        metrics_age_s: float = METRICS_AGE_S,
        join_at: dict[int, float] | None = None,
    ) -> None:
        self._workload = workload
        self._fleet = fleet
        self._policy = policy
        self._metrics_age_s = metrics_age_s
        self._heap: list[tuple[float, int, int, int, int]] = []
        self._pushed = 0
        self._times = workload.times(seconds_per_request, rng)
        span = workload.span_s
        self._scale = seconds_per_request * (len(workload.arrivals) - 1) / span if span else 1.0
        self._join_at = {int(share * len(workload.arrivals)): engine for engine, share in (join_at or {}).items()}
        self._followers: dict[int, int] = {}
        self._jobs: dict[str, Job] = {}
        self._kept_back = 0
        self._ending = -1  # the engine whose step is just being told of: it opens the next one itself
        fleet.start = self._start_kept

    def measure(self) -> Measured:
        fleet, policy, heap = self._fleet, self._policy, self._heap
        clock, engines = fleet.clock, fleet.engines
        arrivals = self._workload.arrivals
        for number, arrival in enumerate(arrivals):
            if arrival.follows >= 0:
                self._followers[arrival.follows] = number
            else:
                self._push(self._times[number], ARRIVAL, number, 0)
        self._push(0.0, SCRAPE, 0, 0)
        measured = Measured()
        to_come = len(arrivals)
        came = scrapes = 0
        while heap:
            due = clock.next_due()
            if due is not None and due < heap[0][0]:
                clock.advance_to(due)  # a policy's timer, which may start something
                continue
            at, _, kind, index, version = heappop(heap)
            clock.advance_to(at)
            if kind == STEP_END:
                engine = engines[index]
                if version == engine.version:
                    self._step_ended(engine, index, at, measured)
            elif kind == ARRIVAL:
                joining = self._join_at.get(came)
                if joining is not None:
                    fleet.absent.discard(joining)
                    policy.joined(joining)
                came += 1
                to_come -= 1
                measured.last_arrival_s = at
                self._arrived(index, at)
            else:
                scrapes += 1
                measured.kv_share += sum([engine.model.pool.usage for engine in engines]) / len(engines)
                policy.scraped()
                if to_come or self._jobs or self._kept_back:
                    self._push(at + self._metrics_age_s, SCRAPE, 0, 0)
        measured.ended_at = clock.now()
        measured.kv_share /= scrapes
        measured.busy_s = [engine.prefill_busy_s for engine in engines]
        measured.preemptions = sum(engine.model.stats.preemptions for engine in engines)
        return measured

    def _push(self, at: float, kind: int, index: int, version: int) -> None:
        self._pushed += 1
        heappush(self._heap, (at, self._pushed, kind, index, version))

    def _arrived(self, number: int, at: float) -> None:
        job = Job(number, self._workload.arrivals[number], at)
        index = self._policy.route(job)
        if index is None:
            self._kept_back += 1
        else:
            self._start(job, index, at)

    def _start_kept(self, job: Job, index: int) -> None:
        self._kept_back -= 1
        self._start(job, index, self._fleet.clock.now())

    def _start(self, job: Job, index: int, at: float) -> None:
        arrival = job.arrival
        job.engine = index
        job.request = request = EngineRequest(
            str(job.number), arrival.prompt_tokens, arrival.output_tokens, arrival.ids, arrived_at=at, payload=job
        )
        self._jobs[request.request_id] = job
        engine = self._fleet.engines[index]
        engine.model.submit(request)
        if index == self._ending:
            return
        if not engine.open:
            self._open_step(engine, index, at)
        elif engine.steps > 1:
            steps = int((at - engine.began_at) / engine.duration_s) + 1
            if steps < engine.steps:
                engine.steps = steps
                self._plan_end(engine, index)

    def _plan_end(self, engine: Engine, index: int) -> None:
        engine.version += 1
        self._push(engine.began_at + engine.steps * engine.duration_s, STEP_END, index, engine.version)

    def _open_step(self, engine: Engine, index: int, at: float) -> None:
        model = engine.model
        duration = model.schedule(at)
        if duration is None:
            engine.open = False
            return
        engine.open = True
        engine.began_at = at
        engine.duration_s = duration
        engine.steps = model.stretch()
        if model.plan_prefill_tokens:
            engine.prefill_busy_s += duration
        self._plan_end(engine, index)

    def _step_ended(self, engine: Engine, index: int, at: float, measured: Measured) -> None:
        policy = self._policy
        first_counted = self._workload.first_counted
        ended = engine.model.complete(at, engine.steps)
        self._ending = index
        events = engine.model.take_events()
        if events:
            policy.told(index, events)
        for request, new_tokens, finish in ended:
            if finish is None and request.generated != new_tokens:
                continue
            job: Job = request.payload
            if request.generated == new_tokens:
                engine.prefill_count += 1
                engine.prefill_seconds_sum += at - (request.scheduled_at or 0.0)
                if job.number >= first_counted:
                    measured.ttft_s.append(at - job.arrived_at)
                    measured.prompt_tokens += request.prompt_tokens
                    measured.cached_tokens += request.cached_tokens or 0
                policy.first_token(job)
            if finish is not None:
                if job.number >= first_counted and request.output_tokens > 1:
                    measured.itl_s.append((at - (request.first_token_at or at)) / (request.output_tokens - 1))
                del self._jobs[request.request_id]
                policy.finished(job)
                follower = self._followers.get(job.number)
                if follower is not None:
                    gap = self._workload.arrivals[follower].gap_s * self._scale
                    self._push(max(job.arrived_at + gap, at), ARRIVAL, follower, 0)
        self._ending = -1
        self._open_step(engine, index, at)
