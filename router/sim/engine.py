"""The engine in real time: the model on the loop's clock, with its metrics and its KV events.

A step opens, its duration passes, its tokens go out, the next one opens. Steps follow the ideal times (a late wake-up
shortens the next wait), and with nothing to do nothing runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import xxhash

from router.clock import Clock, TimerHandle
from router.sim.engine_metrics import EngineMetrics
from router.sim.engine_model import EngineModel, Output
from router.sim.kv_publisher import KVPublisher
from router.sim.sim_config import SimConfig

VERSION = "0.32.0"
MAX_LAG_S = 0.1  # steps later than this do not try to catch up


class SimEngine:
    """`deliver` gets what each step brought, before its KV events are published."""

    def __init__(
        self,
        config: SimConfig,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        wall_time: Callable[[], float],
        deliver: Callable[[Sequence[Output]], None],
        lose_events: Callable[[], bool] = lambda: False,
    ) -> None:
        self.config = config
        self.sleep_level = 0  # 0: awake
        self.publisher: KVPublisher | None = None
        if config.kv_events is not None:
            self.publisher = KVPublisher(
                config.kv_events,
                config.engine.block_size,
                loop,
                wall_time,
                lambda request: request.payload,
                lose_events,
            )
        self._clock = clock
        self._loop = loop
        self._wall_time = wall_time
        self._deliver = deliver
        self._step_timer: TimerHandle | None = None
        self._step_ends_at = 0.0
        self._step_wanted = False
        self._begin_life()

    def _begin_life(self) -> None:
        """What a start of the process sets to nothing."""
        config = self.config
        self.model = EngineModel(config.engine, emit_events=self.publisher is not None)
        self.created = self._wall_time()
        self.fingerprint = f"vllm-{VERSION}-{xxhash.xxh3_64_hexdigest(repr(config.engine).encode())[:8]}"
        name = config.served_model_names[0]
        self.metrics = EngineMetrics(self.model, name, config.max_model_len, self.created, config.metrics_names)

    def wake(self) -> None:
        """There is work: open a step at this iteration's end, so that requests read together batch together."""
        if self._step_timer is None and not self._step_wanted and not self.sleep_level:
            self._step_wanted = True
            self._step_ends_at = self._clock.now()
            self._loop.call_soon(self._open_step)

    def sleep(self, level: int) -> None:
        """No further step, an empty cache. The caller has aborted what was in flight."""
        self.model.reset_prefix_cache()
        self.sleep_level = self.metrics.sleep_level = max(1, level)

    def wake_up(self) -> None:
        self.sleep_level = self.metrics.sleep_level = 0
        if self.model.has_work:
            self.wake()

    def restart(self) -> None:
        """A new process: empty cache, counters and sequence at 0, and nothing said about it."""
        self._stop_steps()
        self.sleep_level = 0
        if self.publisher is not None:
            self.publisher.restart()
        self._begin_life()

    def close(self) -> None:
        self._stop_steps()
        if self.publisher is not None:
            self.publisher.close()
            self.publisher = None

    def _stop_steps(self) -> None:
        if self._step_timer is not None:
            self._step_timer.cancel()
            self._step_timer = None

    def _open_step(self) -> None:
        self._step_wanted = False
        if self._step_timer is not None or self.sleep_level:
            return
        now = self._clock.now()
        begin = self._step_ends_at if now - self._step_ends_at < MAX_LAG_S else now
        before = self.model.stats.step_tokens
        duration = self.model.schedule(begin)
        if duration is None:
            return
        self.metrics.step(self.model.stats.step_tokens - before)
        self._step_ends_at = begin + duration
        self._step_timer = self._clock.call_later(max(0.0, self._step_ends_at - now), self._close_step)

    def _close_step(self) -> None:
        self._step_timer = None
        end = self._step_ends_at
        outputs = self.model.complete(end)
        for request, _, finish in outputs:
            if request.first_token_at == end:
                self.metrics.first_token(end - request.arrived_at)
            if finish is not None:
                self.metrics.finished(request, finish)
        self._deliver(outputs)
        if self.publisher is not None:
            self.publisher.publish(self.model.take_events())
        self._open_step()
