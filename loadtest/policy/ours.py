"""The strategies of router/strategies, through the protocol that the proxy drives them by, with the native index."""

from __future__ import annotations

from typing import Final

from loadtest.policy.events import Told
from loadtest.policy.exact_mirror import ExactMirror
from loadtest.policy.fleet import Fleet, Job
from loadtest.policy.workload import BYTES_PER_TOKEN
from router.backends.backend import Backend, EngineReport, State
from router.backends.registry import Pool, Registry
from router.clock import TimerHandle
from router.errors import RouterError
from router.index.prefix_index import build_index
from router.proxy.admission import Admission
from router.proxy.services import WAKE_LEAST_S
from router.sim.block_pool import PoolEvent
from router.strategies.held_line import HeldLine
from router.strategies.registry import FACTORIES, Dependencies, build, held_line
from router.strategies.strategy import Choice, End, Outcome, RoutingRequest

MODEL: Final = "model"
MEMORY_BYTES: Final = 1 << 30
ASSUMED_KV_TOKENS: Final = 500_000  # [index] assumed_kv_tokens
EXACT: Final = "prefixaware, exact"  # its placement on the engines' own caches instead of the mirror
LINE: Final = " +line"  # with the held line, one batch of the engines' to each
HELD: Final = tuple(name + LINE for name in ("prefixaware", "kvaware"))
TOLD: Final = ("kvaware", "kvaware" + LINE)  # they follow the engines' events
NAMES: Final = (*FACTORIES, EXACT, *HELD)
ENDLESS: Final = 1_000_000  # waiting requests: none is refused here


class Waiting:
    """A job in the gateway's queue: a Waiter, as an Exchange is one."""

    __slots__ = ("_job", "_ours", "_request", "held_for", "held_s", "pool", "queued_at")

    def __init__(self, ours: Ours, job: Job, request: RoutingRequest, pool: Pool) -> None:
        self._ours = ours
        self._job = job
        self._request = request
        self.pool = pool
        self.queued_at = job.arrived_at
        self.held_s: float | None = None
        self.held_for: Backend | None = None

    def try_place(self) -> bool:
        self.held_s = None
        choice = self._ours.choose(self._job, self._request)
        if self._ours.wait_for(choice.backend):
            self.held_s, self.held_for = choice.uncached_s, choice.backend
            return False
        self._ours.start(self._job, choice)
        return True

    def still_held(self) -> bool:
        return self.held_for is not None and self._ours.wait_for(self.held_for)

    def on_rejected(self, error: RouterError) -> None:
        raise AssertionError(f"no request is refused here: {error}")


class Ours:
    """`speed_error`: what the strategy takes for the prefill speed, times the true one; None: it learns for itself,
    from the default that the gateway starts with."""

    def __init__(self, name: str, fleet: Fleet, *, speed_error: float | None = None) -> None:
        self._fleet = fleet
        self._backends = [
            Backend(f"engine-{number}", f"http://127.0.0.1:{number + 1}", "127.0.0.1", number + 1, state=State.UP)
            for number in range(len(fleet.engines))
        ]
        self._number = {backend: number for number, backend in enumerate(self._backends)}
        self._exact = ExactMirror(fleet) if name == EXACT else None
        self._told = Told(fleet) if name in TOLD else None
        self._deps = Dependencies(
            clock=fleet.clock,
            rng=fleet.rng,
            mirror=self._exact or build_index("native", MEMORY_BYTES),
            block_bytes=fleet.block_tokens * BYTES_PER_TOKEN,
            assumed_kv_tokens=ASSUMED_KV_TOKENS,
            holdings=self._told.holdings if self._told is not None else None,
        )
        strategy_name = "prefixaware" if name == EXACT else name.removesuffix(LINE)
        self._strategy = build(strategy_name, None, self._deps)
        self._line: HeldLine | None = None
        if name in HELD:
            batch_tokens = fleet.engines[0].model.config.max_num_batched_tokens
            self._line = held_line(self._deps, self._strategy, batch_tokens)
        self._admission = Admission(0, ENDLESS)
        self._pool = Registry(fleet.clock).any_pool()
        self._wake: TimerHandle | None = None
        self._wake_at = 0.0
        self._routing: Job | None = None  # the run itself starts it if it is placed now
        self._speed_error = speed_error
        self._candidates: tuple[Backend, ...] = ()
        for number, backend in enumerate(self._backends):
            if number not in fleet.absent:
                self._join(number, backend)

    def _join(self, number: int, backend: Backend) -> None:
        self._report(number, backend)
        if self._exact is not None:
            self._exact.joins = number
        self._strategy.joined(backend)
        if self._told is not None:
            self._told.follow(number, backend)
        self._candidates = (*self._candidates, backend)

    def route(self, job: Job) -> int | None:
        arrival = job.arrival
        request = RoutingRequest(
            MODEL,
            self._fleet.clock.now(),
            blocks=arrival.blocks,
            prefix_bytes=arrival.prompt_tokens * BYTES_PER_TOKEN,
            session_key=arrival.session,
        )
        if self._told is not None:
            request.take_ids(self._told.ids_of(arrival), None)
        if self._line is None:
            return self._place(job, self.choose(job, request))
        waiter = Waiting(self, job, request, self._pool)
        self._routing = job
        self._admission.enter(waiter, job.arrived_at)
        self._routing = None
        return self._number[job.mark.backend] if job.mark is not None else None

    def choose(self, job: Job, request: RoutingRequest) -> Choice:
        if self._speed_error is not None:
            self._misjudge(self._speed_error)
        if self._exact is not None:
            self._exact.current = job.arrival
        choice = self._strategy.choose(request, self._candidates)
        assert choice is not None
        return choice

    def wait_for(self, backend: Backend) -> bool:
        """Whether the line holds back from this backend now; then it is looked at again in time."""
        assert self._line is not None
        over_s = self._line.over_s(backend)
        if over_s > 0.0:
            self._wake_in(max(over_s, WAKE_LEAST_S))
        return over_s > 0.0

    def start(self, job: Job, choice: Choice) -> None:
        number = self._place(job, choice)
        if self._routing is not job:
            self._fleet.start(job, number)

    def _place(self, job: Job, choice: Choice) -> int:
        choice.backend.in_flight += 1
        self._strategy.placed(choice)
        job.mark = choice
        job.uncached_tokens = choice.uncached_tokens
        return self._number[choice.backend]

    def _wake_in(self, delay_s: float) -> None:
        """As Services.wake_held."""
        clock = self._fleet.clock
        at = clock.now() + delay_s
        if self._wake is not None:
            if self._wake_at <= at:
                return
            self._wake.cancel()
        self._wake_at = at
        self._wake = clock.call_later(delay_s, self._look_again)

    def _look_again(self) -> None:
        self._wake = None
        self._admission.work_done(self._fleet.clock.now())

    def first_token(self, job: Job) -> None:
        if self._exact is not None:
            self._exact.arrived(job)
        self._strategy.first_byte(job.mark)
        self._admission.work_done(self._fleet.clock.now())

    def finished(self, job: Job) -> None:
        choice: Choice = job.mark
        choice.backend.in_flight -= 1
        cached = job.request.cached_tokens if job.request is not None else None
        outcome = Outcome(
            End.COMPLETE,
            self._fleet.clock.now(),
            status=200,
            prompt_tokens=job.arrival.prompt_tokens,
            cached_tokens=cached,
            completion_tokens=job.arrival.output_tokens,
        )
        self._strategy.observe(choice, outcome)
        self._admission.work_done(self._fleet.clock.now())

    def scraped(self) -> None:
        for backend in self._candidates:
            before = backend.report
            self._report(self._number[backend], backend)
            self._strategy.reported(backend, before, backend.report)

    def joined(self, engine: int) -> None:
        self._join(engine, self._backends[engine])
        self._admission.pump(self._fleet.clock.now())

    def told(self, engine: int, events: list[PoolEvent]) -> None:
        if self._told is not None:
            self._told.hear(engine, events)

    def _report(self, number: int, backend: Backend) -> None:
        """What the engine's /metrics would say now, through the names that vLLM exports."""
        engine = self._fleet.engines[number]
        model = engine.model
        stats, config = model.stats, model.config
        backend.report = EngineReport(
            at=self._fleet.clock.now(),
            running=float(len(model.running)),
            waiting=float(len(model.waiting)),
            kv_usage=model.pool.usage,
            prefix_queries=float(stats.prefix_queries),
            prefix_hits=float(stats.prefix_hits),
            prefill_seconds_sum=engine.prefill_seconds_sum,
            prefill_count=float(engine.prefill_count),
            block_size_tokens=config.block_size,
            num_gpu_blocks=config.num_blocks,
            prefix_caching=config.prefix_caching,
            prompt_tokens=float(stats.prompt_tokens),
        )

    def _misjudge(self, error: float) -> None:
        placement = self._deps.placement
        if placement is None:
            return
        for number, backend in enumerate(self._backends):
            state = placement.engine(backend)
            if state is not None:
                state.seconds_per_token = self._fleet.engines[number].model.config.prefill_token_s / error
                state.reckon()
