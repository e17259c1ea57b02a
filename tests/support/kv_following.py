"""An intake that follows one engine, and a way to wait for what it should come to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import uvloop

from router.backends.backend import Backend
from router.backends.health import poll_session
from router.backends.registry import Registry
from router.clock import SystemClock
from router.kv_events import Applied, FeedState, FrameSink, IntakeSettings, KvEventIntake
from router.metrics import Metrics

TIMEOUT_S = 30.0


class _Watched:
    """The sink with an eye on each batch."""

    def __init__(self, sink: FrameSink, on_batch: Callable[[], object]) -> None:
        self._sink = sink
        self._on_batch = on_batch
        self.add_rank, self.clear, self.remove, self.blocks_of = sink.add_rank, sink.clear, sink.remove, sink.blocks_of

    def apply(self, rank: int, payload: bytes) -> Applied:
        try:
            return self._sink.apply(rank, payload)
        finally:
            self._on_batch()


class Following:
    """An intake with one backend; `until` waits for a condition, looked at after each batch and change of state."""

    def __init__(self, url: str, sink: FrameSink, settings: IntakeSettings, kv_events: str) -> None:
        clock = SystemClock(asyncio.get_running_loop())
        self.registry = Registry(clock)
        self.metrics = Metrics()
        self.states: list[tuple[FeedState, ...]] = []  # of its ranks, after each change
        self._changed = asyncio.Event()
        watched = _Watched(sink, self._changed.set)
        self.intake = KvEventIntake(
            self.registry, clock, poll_session, watched, settings, self.metrics, on_state=self._on_state
        )
        self.backend: Backend = self.registry.add("e", url, kv_events=kv_events)

    def _on_state(self, backend: Backend) -> None:
        self.states.append(tuple(state for _, state in self.intake.ranks_of(backend)))
        self._changed.set()

    def rank(self, number: int = 0) -> dict[str, Any]:
        """What `describe` tells of it; nothing while it is not known."""
        return next((told for told in self.intake.describe(self.backend) if told["rank"] == number), {})

    def state(self, number: int = 0) -> object:
        return self.rank(number).get("state")

    def index_rank(self, number: int = 0) -> int:
        return self.intake.ranks_of(self.backend)[number][0]

    async def until(self, condition: Callable[[], bool], within_s: float = TIMEOUT_S) -> None:
        async with asyncio.timeout(within_s):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def following(
    url: str, sink: FrameSink, settings: IntakeSettings | None = None, kv_events: str = "auto"
) -> AsyncIterator[Following]:
    rig = Following(url, sink, settings or IntakeSettings(retry_s=0.05), kv_events)
    await rig.intake.start()
    try:
        yield rig
    finally:
        await rig.intake.stop()
        rig.registry.close()


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """On the loop that serves."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test())
