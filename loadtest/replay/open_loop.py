"""The schedule of a replay: each request at its instant, whatever became of those before.

A slow fleet is not spared: nothing here waits for an answer. What is due while `max_in_flight` requests are under way
is left out and counted, never sent later, since a load that waits for the fleet would flatter it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from router.clock import Clock, TimerHandle

LATE_S: Final = 0.05  # a request sent later than this after its instant is told: the client itself was too slow


def due_times(at_s: Sequence[float], speed: float, spread: bool) -> list[float]:
    """Seconds from the start for each arrival. `spread`: those that share an instant are spaced evenly up to the next
    one (the last ones as wide as those before), for traces with a coarse clock."""
    times = [at / speed for at in at_s]
    if not spread:
        return times
    spaced: list[float] = []
    gap_s = 0.0
    start = 0
    while start < len(times):
        end = start
        while end < len(times) and times[end] == times[start]:
            end += 1
        if end < len(times):
            gap_s = times[end] - times[start]
        spaced += (times[start] + gap_s * number / (end - start) for number in range(end - start))
        start = end
    return spaced


class OpenLoop:
    """Calls `send(number, due)` for each request at its time, `due` on the clock; `over()` when the last one is past.

    send starts the request and returns at once; ended() is to be called once for each that was sent.
    """

    def __init__(
        self,
        times: Sequence[float],
        clock: Clock,
        send: Callable[[int, float], None],
        over: Callable[[], None],
        *,
        max_in_flight: int,
    ) -> None:
        self._times = times
        self._clock = clock
        self._send = send
        self._over = over
        self._max_in_flight = max_in_flight
        self._next = 0
        self._timer: TimerHandle | None = None
        self.started_at = 0.0
        self.in_flight = 0
        self.sent = 0
        self.not_sent = 0  # due while max_in_flight were under way
        self.late = 0  # sent more than LATE_S after their instant
        self.latest_s = 0.0

    def start(self) -> None:
        self.started_at = self._clock.now()
        self._fire()

    def stop(self) -> None:
        """Send nothing more. over() is not called then."""
        self._next = len(self._times)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def ended(self) -> None:
        self.in_flight -= 1

    def _fire(self) -> None:
        self._timer = None
        while self._next < len(self._times):
            due = self.started_at + self._times[self._next]
            now = self._clock.now()
            if due > now:
                self._timer = self._clock.call_later(due - now, self._fire)
                return
            number = self._next
            self._next += 1
            if self.in_flight >= self._max_in_flight:
                self.not_sent += 1
                continue
            late_s = now - due
            self.late += late_s > LATE_S
            self.latest_s = max(self.latest_s, late_s)
            self.in_flight += 1
            self.sent += 1
            self._send(number, due)
        self._over()
