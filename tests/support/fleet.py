"""A small fleet on a virtual clock, for tests of strategies: engines that batch, cache and decode in steps like vLLM.

Everything happens in one thread at instants of the clock, so a run is a function of its seed. The engines are truth;
what a strategy learns of them is what a gateway would: first bytes, ends, usage, and polled figures of some age.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from native.block_hash import BlockHashes
from native.prefix_tree import PrefixTree
from router.backends.backend import Backend, EngineReport, State
from router.backends.in_flight import InFlight
from router.clock import VirtualClock
from router.strategies.registry import Dependencies, build
from router.strategies.strategy import Choice, End, Outcome, RoutingRequest, Strategy

BLOCK_BYTES = 128
BYTES_PER_TOKEN = 4
BLOCK_TOKENS = BLOCK_BYTES // BYTES_PER_TOKEN
MODEL = "m"


def backend(name: str = "b0", *, weight: float = 1.0) -> Backend:
    return Backend(name, f"http://{name}:8000", name, 8000, weight=weight, state=State.UP, why="", models={MODEL: {}})


def text_of(seed: int, tokens: int) -> bytes:
    """Text that shares nothing with that of another seed."""
    return Random(seed).randbytes(tokens * BYTES_PER_TOKEN)


def request(
    text: bytes = b"",
    *,
    at: float = 0.0,
    model: str = MODEL,
    key: bytes | None = None,
    readable: bool = True,
    stream: bool = True,
) -> RoutingRequest:
    blocks = BlockHashes.from_bytes(text, BLOCK_BYTES) if readable else None
    size = len(text) if readable else 0
    return RoutingRequest(
        model, at, blocks=blocks, prefix_bytes=size, session_key=key, readable=readable, stream=stream
    )


@dataclass(eq=False)
class Job:
    """One request on one engine."""

    choice: Choice
    guard: InFlight
    prompt_tokens: int
    output_tokens: int
    arrived_at: float
    hit_tokens: int | None = None  # None until its prefill starts
    prefill_left: int = 0
    output_left: int = 0
    new_tokens: int = 0  # KV that it holds beyond what it found
    first_at: float | None = None
    done_at: float | None = None

    @property
    def backend(self) -> Backend:
        return self.choice.backend

    @property
    def ttft_s(self) -> float:
        assert self.first_at is not None
        return self.first_at - self.arrived_at


class SimulatedEngine:
    """Steps: each takes every decoding request (one token each) and fills up with waiting prefills, first come first
    served, chunked. Step time = step_s + prefill tokens / speed + decode_s x decoding. Blocks that nobody uses stay
    cached, the least recently used leave first, a prompt's tail before its head."""

    def __init__(
        self,
        clock: VirtualClock,
        on_first: Callable[[Job], None],
        on_end: Callable[[Job], None],
        *,
        tokens_per_s: float = 10_000.0,
        kv_tokens: int = 200_000,
        step_s: float = 0.010,
        decode_s: float = 0.000_25,
        batch_tokens: int = 2048,
        caching: bool = True,
    ) -> None:
        self.clock = clock
        self.tokens_per_s = tokens_per_s
        self.kv_tokens = kv_tokens
        self.step_s = step_s
        self.decode_s = decode_s
        self.batch_tokens = batch_tokens
        self.caching = caching
        self.waiting: deque[Job] = deque()
        self.decoding: list[Job] = []
        self.queries = self.hits = 0
        self.prefill_s = 0.0
        self.prefills = 0
        self.busy_s = 0.0
        self._on_first, self._on_end = on_first, on_end
        self._cache: OrderedDict[int, None] = OrderedDict()
        self._stepping = False

    def submit(self, job: Job) -> None:
        self.waiting.append(job)
        self._wake()

    def reset(self) -> None:
        """The cache is lost, the requests go on."""
        self._cache.clear()

    def warm(self, text: bytes) -> None:
        self._remember(BlockHashes.from_bytes(text, BLOCK_BYTES))

    @property
    def held_tokens(self) -> int:
        return sum(job.prompt_tokens for job in self.decoding)

    def _wake(self) -> None:
        if not self._stepping and (self.waiting or self.decoding):
            self._stepping = True
            self._step()

    def _step(self) -> None:
        budget = self.batch_tokens - len(self.decoding)
        prefilled: list[Job] = []
        tokens = job_left = 0
        held = self.held_tokens
        for job in self.waiting:
            if job.hit_tokens is None:
                if held + job.prompt_tokens > self.kv_tokens and (self.decoding or prefilled):
                    break
                self._start(job)
            held += job.prompt_tokens
            part = min(job.prefill_left, budget)
            job.prefill_left -= part
            budget -= part
            tokens += part
            job_left = job.prefill_left
            if job_left:
                break
            prefilled.append(job)
        took = self.step_s + tokens / self.tokens_per_s + self.decode_s * len(self.decoding)
        self.busy_s += took
        self.prefill_s += took * (len(prefilled) + (job_left > 0)) if tokens else 0.0
        self.clock.call_later(took, self._stepped, prefilled)

    def _start(self, job: Job) -> None:
        hit = 0
        if self.caching:
            for block in job.choice.request.blocks or ():
                if block not in self._cache:
                    break
                hit += 1
        job.hit_tokens = min(hit * BLOCK_TOKENS, job.prompt_tokens - 1)
        job.prefill_left = job.prompt_tokens - job.hit_tokens
        self.queries += job.prompt_tokens
        self.hits += job.hit_tokens
        self._remember(job.choice.request.blocks)  # as vLLM: who is scheduled after it finds its blocks

    def _stepped(self, prefilled: list[Job]) -> None:
        done = []
        for job in self.decoding:
            job.output_left -= 1
            if job.output_left <= 0:
                done.append(job)
        for job in prefilled:
            self.waiting.popleft()
            self.prefills += 1
            job.first_at = self.clock.now()
            job.output_left = job.output_tokens - 1
            self.decoding.append(job)
            self._on_first(job)
            if job.output_left <= 0:
                done.append(job)
        for job in done:
            self.decoding.remove(job)
            self._on_end(job)
        self._stepping = False
        self._wake()

    def _remember(self, blocks: BlockHashes | None) -> None:
        for block in reversed(blocks.tolist() if blocks is not None else []):
            self._cache.pop(block, None)
            self._cache[block] = None
        while len(self._cache) > self.kv_tokens // BLOCK_TOKENS:
            self._cache.popitem(last=False)


@dataclass
class Fleet:
    """Engines behind one strategy. `usage`: answers tell cached_tokens. `metrics_age_s`: how old a polled figure is.
    `stream`: False for answers in one piece, whose first byte is their last."""

    strategy_name: str = "prefixaware"
    seed: int = 1
    usage: bool = True
    poll_s: float = 2.0
    metrics_age_s: float = 0.0
    exports_metrics: bool = True
    stream: bool = True
    jobs: list[Job] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock = VirtualClock()
        self.tree = PrefixTree(64 << 20)
        deps = Dependencies(self.clock, Random(self.seed), self.tree, BLOCK_BYTES, 200_000)
        self.strategy: Strategy = build(self.strategy_name, None, deps)
        self.engines: dict[Backend, SimulatedEngine] = {}
        self.backends: tuple[Backend, ...] = ()

    def add(self, name: str, *, weight: float = 1.0, **engine: object) -> Backend:
        joined = backend(name, weight=weight)
        self.engines[joined] = SimulatedEngine(self.clock, self._first, self._end, **engine)  # type: ignore[arg-type]
        self.backends = (*self.backends, joined)
        if self.exports_metrics:
            joined.report = self._report(joined)
        self.strategy.joined(joined)
        self.clock.call_later(self.poll_s, self._poll, joined)
        return joined

    def grow(self, count: int, **engine: object) -> tuple[Backend, ...]:
        for _ in range(count):
            self.add(f"b{len(self.backends)}", **engine)
        return self.backends

    def remove(self, gone: Backend) -> None:
        self.backends = tuple(other for other in self.backends if other is not gone)
        del self.engines[gone]
        self.strategy.forget(gone)

    # ---- requests

    def send(self, text: bytes, output_tokens: int = 20, *, key: bytes | None = None) -> Job:
        now = self.clock.now()
        choice = self.strategy.choose(request(text, at=now, key=key, stream=self.stream), self.backends)
        assert choice is not None
        self.strategy.placed(choice)
        tokens = max(len(text) // BYTES_PER_TOKEN, 1)
        job = Job(choice, InFlight(choice.backend), tokens, output_tokens, now)
        self.jobs.append(job)
        self.engines[choice.backend].submit(job)
        return job

    def ask(self, text: bytes, output_tokens: int = 20, *, key: bytes | None = None) -> Job:
        """Strictly serial: sends and waits for the end."""
        job = self.send(text, output_tokens, key=key)
        self.finish(job)
        return job

    def send_at(self, delay_s: float, text: bytes, output_tokens: int = 20) -> None:
        self.clock.call_later(delay_s, self.send, text, output_tokens)

    def finish(self, *jobs: Job, limit_s: float = 10_000.0) -> None:
        until = self.clock.now() + limit_s
        while any(job.done_at is None for job in jobs):
            due = self.clock.next_due()
            assert due is not None
            assert due < until, "the fleet does not get done"
            self.clock.advance_to(due)

    def run(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def drain(self) -> None:
        self.finish(*self.jobs)

    # ---- what happened

    def share(self, jobs: Sequence[Job] | None = None) -> Counter[str]:
        """Requests by backend."""
        return Counter(job.backend.name for job in (self.jobs if jobs is None else jobs))

    def mean_ttft_s(self, jobs: Sequence[Job] | None = None) -> float:
        of = self.jobs if jobs is None else jobs
        return sum(job.ttft_s for job in of) / len(of)

    def hit_ratio(self, jobs: Sequence[Job] | None = None) -> float:
        of = self.jobs if jobs is None else jobs
        return sum(job.hit_tokens or 0 for job in of) / sum(job.prompt_tokens for job in of)

    # ---- inside

    def _first(self, job: Job) -> None:
        if self.stream:
            self.strategy.first_byte(job.choice)

    def _end(self, job: Job) -> None:
        job.done_at = self.clock.now()
        job.guard.release()
        if not self.stream:
            self.strategy.first_byte(job.choice)
        cached = job.hit_tokens if self.usage else None
        self.strategy.observe(
            job.choice, Outcome(End.COMPLETE, job.done_at, 200, job.prompt_tokens, cached, job.output_tokens)
        )

    def _report(self, of: Backend) -> EngineReport:
        engine = self.engines[of]
        started = sum(job.hit_tokens is not None for job in engine.waiting)
        return EngineReport(
            at=self.clock.now(),
            running=len(engine.decoding) + started,
            waiting=len(engine.waiting) - started,
            kv_usage=min(engine.held_tokens / engine.kv_tokens, 1.0),
            prefix_queries=engine.queries,
            prefix_hits=engine.hits,
            prefill_seconds_sum=engine.prefill_s,
            prefill_count=engine.prefills,
            block_size_tokens=BLOCK_TOKENS,
            num_gpu_blocks=engine.kv_tokens // BLOCK_TOKENS,
            prefix_caching=engine.caching,
        )

    def _poll(self, of: Backend) -> None:
        if of not in self.engines:
            return
        if self.exports_metrics:
            self.clock.call_later(self.metrics_age_s, self._polled, of, self._report(of))
        self.clock.call_later(self.poll_s, self._poll, of)

    def _polled(self, of: Backend, report: EngineReport) -> None:
        if of in self.engines:
            before, of.report = of.report, report
            self.strategy.reported(of, before, report)
