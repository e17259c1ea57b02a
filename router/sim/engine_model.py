"""vLLM's scheduler and cache as a pure object: no I/O, no clock, no randomness.

A step is what one forward pass of the engine does. It takes every running decode (one token each) and fills the rest
of `max_num_batched_tokens` with prefills, first come first served, cut into chunks where they do not fit. It lasts

    step_s + prefill_token_s x prefill tokens + (decode_s + decode_seq_s x decodes, where there are any)

and the first token of a request comes at the end of the step that ends its prefill. A request is admitted when a seat
(`max_num_seqs`) is free and its whole prompt fits into the pool; where a running request finds no block, the request
admitted last gives its blocks back and is computed again later (preemption). Cached blocks of a prompt are skipped,
but never its last token.

Real time drives it with `schedule` and `complete`, and may abort in between; a simulation on virtual time calls
`step`, which takes a stretch of equal decode steps at once when told until when nothing will arrive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from router.sim.block_pool import BlockPool, PoolEvent


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes in blocks, tokens and requests, times in seconds. The defaults stand for an 8B model on one GPU."""

    block_size: int = 16
    num_blocks: int = 28_672  # 458,752 tokens
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    prefix_caching: bool = True
    step_s: float = 0.008
    prefill_token_s: float = 1.0 / 10_000.0
    decode_s: float = 0.004
    decode_seq_s: float = 0.000_25

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2, got {self.num_blocks}")
        for name in ("step_s", "prefill_token_s", "decode_s", "decode_seq_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.step_s + min(self.prefill_token_s, self.decode_s + self.decode_seq_s) <= 0:
            raise ValueError("a step must take time")

    def step_duration_s(self, prefill_tokens: int, decodes: int) -> float:
        duration = self.step_s + self.prefill_token_s * prefill_tokens
        return duration + self.decode_s + self.decode_seq_s * decodes if decodes else duration

    @property
    def capacity_tokens(self) -> int:
        """What one request alone can hold."""
        return (self.num_blocks - 1) * self.block_size


class Finish(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class EngineRequest:
    """One sequence. `output_tokens` is how many it will produce; the engine never decides that itself.

    `block_hashes` name the full blocks of prompt and answer as far as they are known; blocks beyond are never shared.
    `payload` belongs to the caller. Times are the caller's `now`.
    """

    __slots__ = (
        "arrived_at",
        "block_hashes",
        "blocks",
        "cached_tokens",
        "computed",
        "finish",
        "finished_at",
        "first_token_at",
        "generated",
        "named_blocks",
        "output_tokens",
        "payload",
        "preemptions",
        "prompt_tokens",
        "refused_at",
        "request_id",
        "running",
        "scheduled_at",
    )

    def __init__(
        self,
        request_id: str,
        prompt_tokens: int,
        output_tokens: int,
        block_hashes: Sequence[int] = (),
        *,
        arrived_at: float = 0.0,
        finish: Finish = Finish.LENGTH,
        payload: Any = None,
    ) -> None:
        if prompt_tokens < 1 or output_tokens < 1:
            raise ValueError(f"{request_id}: {prompt_tokens} prompt and {output_tokens} output tokens, 1 is the least")
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.block_hashes = block_hashes
        self.arrived_at = arrived_at
        self.finish = finish
        self.payload = payload
        self.blocks: list[int] = []
        self.named_blocks = 0  # of `blocks`, how many have been given their hash
        self.computed = 0  # tokens whose KV is in the pool, those of the step under way excluded
        self.generated = 0
        self.cached_tokens: int | None = None  # prompt tokens found at the first admission; None before it
        self.preemptions = 0
        self.running = False
        self.refused_at = -1  # the pool's `changes` when it last did not fit: no need to look again before they grow
        self.scheduled_at: float | None = None
        self.first_token_at: float | None = None
        self.finished_at: float | None = None

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.generated

    def __repr__(self) -> str:
        return f"<EngineRequest {self.request_id} {self.computed}/{self.prompt_tokens}+{self.generated}>"


class Output(NamedTuple):
    """What a step brought one request."""

    request: EngineRequest
    new_tokens: int
    finish: Finish | None  # set with the last token


@dataclass(slots=True)
class EngineStats:
    """Totals since the start; tokens unless named otherwise."""

    submitted_requests: int = 0
    aborted_requests: int = 0
    finished_requests: int = 0
    preemptions: int = 0
    steps: int = 0
    step_tokens: int = 0
    prefix_queries: int = 0  # each prompt once, at its first admission
    prefix_hits: int = 0
    prompt_tokens: int = 0  # of requests whose prefill ended
    computed_prompt_tokens: int = 0  # the same without the cached ones
    generation_tokens: int = 0


class EngineModel:
    def __init__(self, config: EngineConfig, *, emit_events: bool = False) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks, config.block_size, emit_events=emit_events)
        self.stats = EngineStats()
        self.running: list[EngineRequest] = []  # in the order of admission
        self.waiting: deque[EngineRequest] = deque()
        self._by_id: dict[str, EngineRequest] = {}
        self.plan_prefill_tokens = 0  # of the step opened last
        self._plan: list[tuple[EngineRequest, int]] = []
        self._step_open = False
        self._plan_uniform = False

    # -- requests

    def submit(self, request: EngineRequest) -> None:
        """Queue it. ValueError for an id in use, or for one that could never fit."""
        if request.request_id in self._by_id:
            raise ValueError(f"request {request.request_id} is already here")
        if request.prompt_tokens + request.output_tokens > self.config.capacity_tokens:
            raise ValueError(f"request {request.request_id} is larger than the whole pool")
        self._by_id[request.request_id] = request
        self.waiting.append(request)
        self.stats.submitted_requests += 1

    def abort(self, request_id: str) -> EngineRequest | None:
        """Stop it now and free its blocks; its open step, if any, brings it nothing. None if it is not here."""
        request = self._by_id.pop(request_id, None)
        if request is None:
            return None
        if request.running:
            self.running.remove(request)
            self._release(request)
        else:
            self.waiting.remove(request)
        request.finish = Finish.ABORT
        self.stats.aborted_requests += 1
        return request

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def requests(self) -> list[EngineRequest]:
        """All that are not finished, oldest first."""
        return list(self._by_id.values())

    def take_events(self) -> list[PoolEvent]:
        return self.pool.take_events()

    # -- steps

    def schedule(self, now: float) -> float | None:
        """Open a step at `now` and return its duration in seconds; None when there is nothing to do."""
        if self._step_open:
            raise RuntimeError("the step before is not complete")
        budget = self.config.max_num_batched_tokens
        plan: list[tuple[EngineRequest, int]] = []
        prefill_tokens = decodes = 0
        preempted = False
        running = self.running
        position = 0
        while position < len(running) and budget:
            request = running[position]
            missing = request.tokens - request.computed
            count = missing if missing < budget else budget
            while not self._grow(request, count):
                # Whoever came last goes first; it is never in the plan yet, for the plan is made in that order.
                victim = running.pop()
                self._preempt(victim)
                preempted = True
                if victim is request:
                    break
            if not request.running:
                break
            plan.append((request, count))
            budget -= count
            if request.computed >= request.prompt_tokens and count == 1:
                decodes += 1
            else:
                prefill_tokens += count
            position += 1
        admitted = False
        if not preempted:
            while self.waiting and budget and len(running) < self.config.max_num_seqs:
                count = self._admit(self.waiting[0], budget, now)
                if not count:
                    break
                admitted = True
                request = self.waiting.popleft()
                running.append(request)
                plan.append((request, count))
                budget -= count
                prefill_tokens += count
        if not plan:
            return None
        self._plan = plan
        self.plan_prefill_tokens = prefill_tokens
        self._plan_uniform = not (admitted or preempted or prefill_tokens) and len(plan) == len(running)
        self._step_open = True
        self.stats.steps += 1
        self.stats.step_tokens += prefill_tokens + decodes
        return self.config.step_duration_s(prefill_tokens, decodes)

    def complete(self, now: float, steps: int = 1) -> list[Output]:
        """Close the open step, with those like it that follow (`steps`, at most `stretch()`); `now` is their end."""
        if not self._step_open:
            raise RuntimeError("no step is open")
        if steps > 1:
            return self._complete_stretch(now, steps)
        self._step_open = False
        outputs: list[Output] = []
        finished = False
        for request, count in self._plan:
            if not request.running:
                continue  # aborted meanwhile
            request.computed += count
            if request.computed < request.tokens:
                continue  # more chunks to come
            outputs.append(self._generate(request, 1, now))
            finished = finished or outputs[-1].finish is not None
        self._plan = []
        if finished:
            self.running = [request for request in self.running if request.running]
        return outputs

    def step(self, now: float, until: float | None = None) -> tuple[float, list[Output]]:
        """One whole step from `now`: its duration and what it brought, (0.0, []) when idle.

        With `until` (nothing arrives before it) equal decode steps that start before it are taken at once; then the
        duration is the sum and `new_tokens` may be above 1. The result is that of single steps.
        """
        duration = self.schedule(now)
        if duration is None:
            return 0.0, []
        steps = 1
        if until is not None and self._plan_uniform:
            steps = self._equal_steps(max(1, int((until - now) / duration - 1e-9) + 1))
        return duration * steps, self.complete(now + duration * steps, steps)

    def stretch(self) -> int:
        """How many steps like the open one follow each other if nothing arrives, itself included. 1 unless it is of
        decodes alone. `complete` may be told to take fewer of them."""
        return self._equal_steps(None) if self._plan_uniform else 1

    def reset_prefix_cache(self) -> bool:
        """False while requests hold blocks."""
        return self.pool.reset()

    def check(self) -> None:
        """The pool's invariants, and that exactly the running requests hold its blocks."""
        self.pool.check()
        held = len({block for request in self.running for block in request.blocks})
        assert held == self.pool.usable_blocks - self.pool.free_blocks, "blocks leaked"
        assert len(self.running) <= self.config.max_num_seqs
        assert len(self._by_id) == len(self.running) + len(self.waiting)
        for request in self.waiting:
            assert not request.blocks, f"{request} waits with blocks"

    # -- inner parts

    def _admit(self, request: EngineRequest, budget: int, now: float) -> int:
        """Give a waiting request its first blocks: the tokens of its first chunk, 0 if it does not fit."""
        pool, block_size = self.pool, self.config.block_size
        if request.refused_at == pool.changes:
            return 0
        found: list[int] = []
        if self.config.prefix_caching:
            found = pool.match(request.block_hashes, (request.tokens - 1) // block_size)
        # All of the prompt must fit, not the first chunk alone: else half-computed prompts would evict each other.
        wanted = -(-request.tokens // block_size) - len(found)
        if wanted + pool.unheld(found) > pool.free_blocks:
            request.refused_at = pool.changes
            return 0
        pool.hold(found)
        request.blocks = found
        request.named_blocks = len(found)
        request.computed = len(found) * block_size
        request.running = True
        count = min(request.tokens - request.computed, budget)
        if not self._grow(request, count):
            raise RuntimeError(f"{request} was admitted without room")
        if request.cached_tokens is None:
            request.cached_tokens = request.computed
            request.scheduled_at = now
            self.stats.prefix_queries += request.prompt_tokens
            self.stats.prefix_hits += request.computed
        return count

    def _grow(self, request: EngineRequest, count: int) -> bool:
        """Blocks for `count` more tokens, and names for those that they fill. False if the pool is short."""
        block_size = self.config.block_size
        total = request.computed + count
        missing = -(-total // block_size) - len(request.blocks)
        if missing > 0:
            if missing > self.pool.free_blocks:
                return False
            request.blocks.extend(self.pool.allocate(missing))
        full = total // block_size
        if full > request.named_blocks and self.config.prefix_caching:
            end = min(full, len(request.block_hashes))
            self.pool.store(request, request.blocks, request.block_hashes, request.named_blocks, end)
            request.named_blocks = full
        return True

    def _generate(self, request: EngineRequest, count: int, now: float) -> Output:
        stats = self.stats
        if request.first_token_at is None:
            request.first_token_at = now
            stats.prompt_tokens += request.prompt_tokens
            stats.computed_prompt_tokens += request.prompt_tokens - (request.cached_tokens or 0)
        request.generated += count
        stats.generation_tokens += count
        if request.generated < request.output_tokens:
            return Output(request, count, None)
        request.finished_at = now
        stats.finished_requests += 1
        del self._by_id[request.request_id]
        self._release(request)
        return Output(request, count, request.finish)

    def _complete_stretch(self, end: float, steps: int) -> list[Output]:
        if not self._plan_uniform:
            raise RuntimeError("this step stands alone")
        self._step_open = False
        outputs: list[Output] = []
        finished = False
        for request, _ in self._plan:
            request.computed += 1
            self._grow(request, steps - 1)
            request.computed += steps - 1
            outputs.append(self._generate(request, steps, end))
            finished = finished or outputs[-1].finish is not None
        self.stats.steps += steps - 1
        self.stats.step_tokens += (steps - 1) * len(self._plan)
        self._plan = []
        if finished:
            self.running = [request for request in self.running if request.running]
        return outputs

    def _equal_steps(self, limit: int | None) -> int:
        """How many steps like the planned one follow each other: until one ends a request, or blocks run short."""
        steps = min([request.output_tokens - request.generated for request, _ in self._plan])
        if limit is not None and limit < steps:
            steps = limit
        block_size, free = self.config.block_size, self.pool.free_blocks
        if self.waiting:  # a block that fills now may be one that the first in line shares, and then it fits
            steps = min(steps, *[block_size - request.computed % block_size for request, _ in self._plan])
        while steps > 1:
            wanted = 0
            for request, _ in self._plan:
                more = -(-(request.computed + steps) // block_size) - len(request.blocks)
                if more > 0:
                    wanted += more
            if wanted <= free:
                break
            steps //= 2
        return steps

    def _preempt(self, request: EngineRequest) -> None:
        self._release(request)
        request.computed = 0
        request.preemptions += 1
        self.stats.preemptions += 1
        self.waiting.appendleft(request)

    def _release(self, request: EngineRequest) -> None:
        self.pool.release(request.blocks)
        request.blocks = []
        request.named_blocks = 0
        request.running = False
