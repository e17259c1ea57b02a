"""Time, injected: `now()` for durations (monotonic seconds), `call_later()` for deadlines."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable
from typing import Any, Protocol


class TimerHandle(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    def now(self) -> float:
        """Monotonic seconds; the epoch means nothing."""
        ...

    def call_later(self, delay_s: float, callback: Callable[..., object], *args: Any) -> TimerHandle: ...


class SystemClock:
    """The system's monotonic clock with the event loop's timers. uvloop's own time() moves in steps of 1 ms and stands
    still within one round of the loop, which is too coarse for what is measured here."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.now = time.monotonic
        self.call_later = loop.call_later


class VirtualTimer:
    __slots__ = ("args", "at", "callback", "cancelled")

    def __init__(self, at: float, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.at = at
        self.callback = callback
        self.args = args
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class VirtualClock:
    """Time that moves only when told to, for tests. Timers due at one instant run in order of creation."""

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start
        self._order = 0
        self._timers: list[tuple[float, int, VirtualTimer]] = []

    def now(self) -> float:
        return self._now

    def call_later(self, delay_s: float, callback: Callable[..., object], *args: Any) -> VirtualTimer:
        timer = VirtualTimer(self._now + max(delay_s, 0.0), callback, args)
        self._order += 1
        heapq.heappush(self._timers, (timer.at, self._order, timer))
        return timer

    def next_due(self) -> float | None:
        """When the next live timer fires, None without one."""
        while self._timers and self._timers[0][2].cancelled:
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def advance(self, seconds: float) -> None:
        """Move on by `seconds`, running each timer at its own instant."""
        self.advance_to(self._now + seconds)

    def advance_to(self, when: float) -> None:
        while (due := self.next_due()) is not None and due <= when:
            timer = heapq.heappop(self._timers)[2]
            self._now = max(self._now, due)
            timer.callback(*timer.args)
        self._now = max(self._now, when)

    @property
    def pending(self) -> int:
        """Live timers, for tests that nothing was left behind."""
        return sum(not timer.cancelled for _, _, timer in self._timers)
