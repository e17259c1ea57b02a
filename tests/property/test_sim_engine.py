"""Whatever is asked of the simulated engine: no block is lost, no step is too large, nobody is overtaken."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from router.sim.block_pool import BlockPool, Cleared, PoolEvent, Removed, Stored
from router.sim.engine_model import EngineConfig, EngineModel, EngineRequest

BLOCK = 4
# Steps last whole hundredths of a millisecond: an arrival at the very end of one belongs to either, by rounding.
OFF_THE_GRID_S = 1.7e-6


class PoolMirror:
    """What a router that only sees the events believes is cached: references per hash."""

    def __init__(self) -> None:
        self.copies: dict[int, int] = {}

    def apply(self, events: list[PoolEvent]) -> None:
        for event in events:
            if isinstance(event, Stored):
                for value in event.hashes:
                    self.copies[value] = self.copies.get(value, 0) + 1
            elif isinstance(event, Removed):
                self.copies[event.hash] -= 1
                if not self.copies[event.hash]:
                    del self.copies[event.hash]
            else:
                assert isinstance(event, Cleared)
                self.copies.clear()


class EngineMachine(RuleBasedStateMachine):
    """Requests of a few prompt families come, leave and finish in a pool that is too small."""

    def __init__(self) -> None:
        super().__init__()
        self.config = EngineConfig(block_size=BLOCK, num_blocks=24, max_num_seqs=3, max_num_batched_tokens=16)
        self.model = EngineModel(self.config, emit_events=True)
        self.mirror = PoolMirror()
        self.now = 0.0
        self.submitted = 0
        self.order: list[EngineRequest] = []
        self.done: dict[str, int] = {}

    requests = Bundle("requests")

    @rule(
        target=requests,
        family=st.integers(0, 2),
        prompt=st.integers(1, 60),
        output=st.integers(1, 12),
        known=st.integers(0, 20),
    )
    def submit(self, family: int, prompt: int, output: int, known: int) -> EngineRequest:
        self.submitted += 1
        hashes = [family * 1000 + position for position in range(min(known, (prompt + output) // BLOCK))]
        request = EngineRequest(f"r{self.submitted}", prompt, output, hashes, arrived_at=self.now)
        self.model.submit(request)
        self.order.append(request)
        return request

    @rule(request=requests)
    def abort(self, request: EngineRequest) -> None:
        if self.model.abort(request.request_id) is not None:
            self.order.remove(request)

    @rule(ahead_s=st.one_of(st.none(), st.floats(0.0, 0.2)))
    def step(self, ahead_s: float | None) -> None:
        before = self.model.stats.step_tokens, self.model.stats.steps
        duration, outputs = self.model.step(self.now, None if ahead_s is None else self.now + ahead_s)
        tokens = self.model.stats.step_tokens - before[0]
        steps = self.model.stats.steps - before[1]
        assert tokens <= steps * self.config.max_num_batched_tokens
        assert (duration > 0) == (steps > 0)
        self.now += duration
        for request, count, finish in outputs:
            self.done[request.request_id] = self.done.get(request.request_id, 0) + count
            if finish is not None:
                assert self.done[request.request_id] == request.output_tokens
        self.mirror.apply(self.model.take_events())

    @precondition(lambda self: not self.model.has_work)
    @rule()
    def reset(self) -> None:
        assert self.model.reset_prefix_cache()
        self.mirror.apply(self.model.take_events())

    @invariant()
    def nothing_is_lost(self) -> None:
        self.model.check()
        self.mirror.apply(self.model.take_events())
        assert sum(self.mirror.copies.values()) == self.model.pool.cached_blocks

    @invariant()
    def first_come_first_served(self) -> None:
        admitted = [request.scheduled_at is not None for request in self.order]
        assert admitted == sorted(admitted, reverse=True)

    def teardown(self) -> None:
        for _ in range(10_000):
            if not self.model.has_work:
                break
            self.step(None)
        assert not self.model.has_work, "it never ends"
        assert self.model.pool.usage == 0.0
        assert all(request.generated == request.output_tokens for request in self.order)


EngineMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestEngineMachine = EngineMachine.TestCase


@given(
    sizes=st.lists(st.tuples(st.integers(1, 100), st.integers(1, 60)), min_size=1, max_size=6),
    gaps=st.lists(st.floats(0.001, 0.5), min_size=6, max_size=6),
    blocks=st.integers(42, 120),
)
@settings(max_examples=60, deadline=None)
def test_stretches_give_what_single_steps_give(sizes: list[tuple[int, int]], gaps: list[float], blocks: int) -> None:
    def run(stretch: bool) -> list[tuple[float | None, float | None, int]]:
        model = EngineModel(EngineConfig(block_size=BLOCK, num_blocks=blocks, max_num_seqs=3))
        arrivals: list[EngineRequest] = []
        at = 0.0
        for number, (prompt, output) in enumerate(sizes):
            at += gaps[number] + OFF_THE_GRID_S
            hashes = [number * 1000 + position for position in range((prompt + output) // BLOCK)]
            arrivals.append(EngineRequest(str(number), prompt, output, hashes, arrived_at=at))
        pending = list(arrivals)
        now = 0.0
        while pending or model.has_work:
            if not model.has_work:
                now = max(now, pending[0].arrived_at)
            while pending and pending[0].arrived_at <= now:
                model.submit(pending.pop(0))
            until = (pending[0].arrived_at if pending else float("inf")) if stretch else None
            # An endless horizon is a number too large for a count of steps.
            duration, _ = model.step(now, None if until is None else min(until, now + 1e6))
            now += duration
        model.check()
        return [(entry.first_token_at, entry.finished_at, entry.preemptions) for entry in arrivals]

    single, stretched = run(False), run(True)
    for one, other in zip(single, stretched, strict=True):
        assert one[2] == other[2]
        for left, right in zip(one[:2], other[:2], strict=True):
            assert left is not None
            assert right is not None
            assert abs(left - right) < 1e-6


@given(
    operations=st.lists(st.tuples(st.sampled_from("ahrs"), st.integers(0, 9), st.integers(1, 4)), max_size=60),
)
@settings(max_examples=150, deadline=None)
def test_pool_invariants_hold_after_any_operations(operations: list[tuple[str, int, int]]) -> None:
    pool = BlockPool(9, BLOCK, emit_events=True)
    mirror = PoolMirror()
    owners: list[list[int]] = []
    for kind, key, count in operations:
        if kind == "a" and count <= pool.free_blocks:
            blocks = pool.allocate(count)
            pool.store(None, blocks, [key * 10 + position for position in range(count)], 0, count)
            owners.append(blocks)
        elif kind == "h":
            found = pool.match([key * 10 + position for position in range(count)], count)
            pool.hold(found)
            owners.append(found)
        elif kind == "r" and owners:
            pool.release(owners.pop(key % len(owners)))
        elif kind == "s":
            assert pool.reset() == (not any(owners))
        pool.check()
        mirror.apply(pool.take_events())
        assert sum(mirror.copies.values()) == pool.cached_blocks
        assert pool.usable_blocks - pool.free_blocks == len({block for owner in owners for block in owner})
