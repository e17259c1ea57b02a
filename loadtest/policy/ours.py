"""The strategies of router/strategies, through the protocol that the proxy drives them by, with the native index."""

from __future__ import annotations

from typing import Final

from loadtest.policy.events import Told
from loadtest.policy.exact_mirror import ExactMirror
from loadtest.policy.fleet import Fleet, Job
from loadtest.policy.workload import BYTES_PER_TOKEN
from router.backends.backend import Backend, EngineReport, State
from router.index.prefix_index import build_index
from router.sim.block_pool import PoolEvent
from router.strategies.registry import FACTORIES, Dependencies, build
from router.strategies.strategy import Choice, End, Outcome, RoutingRequest

MODEL: Final = "model"
MEMORY_BYTES: Final = 1 << 30
ASSUMED_KV_TOKENS: Final = 500_000  # [index] assumed_kv_tokens
EXACT: Final = "prefixaware, exact"  # its placement on the engines' own caches instead of the mirror
TOLD: Final = ("kvaware",)  # they follow the engines' events
NAMES: Final = (*FACTORIES, EXACT)


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
        self._strategy = build("prefixaware" if name == EXACT else name, None, self._deps)
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

    def route(self, job: Job) -> int:
        arrival = job.arrival
        if self._speed_error is not None:
            self._misjudge(self._speed_error)
        request = RoutingRequest(
            MODEL,
            self._fleet.clock.now(),
            blocks=arrival.blocks,
            prefix_bytes=arrival.prompt_tokens * BYTES_PER_TOKEN,
            session_key=arrival.session,
        )
        if self._exact is not None:
            self._exact.current = arrival
        if self._told is not None:
            request.take_ids(self._told.ids_of(arrival), None)
        choice = self._strategy.choose(request, self._candidates)
        assert choice is not None
        choice.backend.in_flight += 1
        self._strategy.placed(choice)
        job.mark = choice
        job.uncached_tokens = choice.uncached_tokens
        return self._number[choice.backend]

    def first_token(self, job: Job) -> None:
        if self._exact is not None:
            self._exact.arrived(job)
        self._strategy.first_byte(job.mark)

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

    def scraped(self) -> None:
        for backend in self._candidates:
            before = backend.report
            self._report(self._number[backend], backend)
            self._strategy.reported(backend, before, backend.report)

    def joined(self, engine: int) -> None:
        self._join(engine, self._backends[engine])

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
