"""Passive health: what the traffic itself shows of a backend, faster than any poll and where polls see nothing.

Three signs take a backend out. Connections that fail several times in a row. Attempts that fail several times in a row
before their first byte, or end in a 5xx, while another serves its models: an engine that fails at once looks idle and
would draw the traffic. And silence: attempts in flight and no byte for long while others of its pool answer (a hung
engine answers /health with 200 and shows an empty queue in /metrics; nothing but our own view tells). It comes back
through a trial: one request whose first byte readmits it.

The engine's own 4xx, 429 and 503 are never a sign of its death. After a 429 or 503 others are asked first for a moment,
longer each time in a row.

States: UP -> EJECTED -> TRIAL -> UP, or TRIAL -> EJECTED again for twice as long. STARTING and DOWN belong to the
active checks (health.py), and a success of those does not end an ejection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Final, Protocol

from router.backends.backend import Backend, State
from router.backends.registry import BackendRemoved, FleetEvent, Registry, StateChanged
from router.clock import Clock, TimerHandle

SILENT: Final = "silent"
ATTEMPTS_FAIL: Final = "attempts fail"
CONNECTIONS_FAIL: Final = "connections fail"
TRIAL_FAILED: Final = "its trial failed"
ON_TRIAL: Final = "on trial"


_UP: Final = State.UP
_TRIAL: Final = State.TRIAL


BUSY_S: Final = 0.25  # how long others are asked first after one answer 429 or 503; doubles with each in a row
BUSY_MAX_S: Final = 4.0


class EjectionSettings(Protocol):
    """The keys of `[health]` that this needs; times in seconds."""

    @property
    def connect_failures(self) -> int: ...
    @property
    def failed_attempts(self) -> int: ...
    @property
    def interval_s(self) -> float: ...
    @property
    def unhealthy_after(self) -> int: ...
    @property
    def silence_s(self) -> float: ...
    @property
    def ejection_s(self) -> float: ...
    @property
    def ejection_max_s(self) -> float: ...


@dataclass(slots=True)
class _Record:
    """What is remembered of one backend that was ejected, for as long as it belongs to the fleet."""

    in_a_row: int = 0  # ejections without a calm time between
    returned_at: float = float("-inf")
    until: float = 0.0
    timer: TimerHandle | None = None


class Ejector:
    """The proxy reports attempts to it; it tells the registry. Runs from its construction until `stop`."""

    def __init__(self, registry: Registry, clock: Clock, settings: EjectionSettings) -> None:
        self._registry = registry
        self._clock = clock
        self._now = clock.now
        self._records: dict[Backend, _Record] = {}
        self.configure(settings)
        self._check_timer = clock.call_later(self._check_interval_s, self._check_silence_again)
        self._unsubscribe = registry.subscribe(self._fleet_changed)
        self.busy_until = 0.0  # the latest of all backends: before it somebody is to be asked last
        # Called with a backend that is down and owes bytes: what waits for its first byte there may go elsewhere.
        self.on_silent: Callable[[Backend], object] | None = None

    def configure(self, settings: EjectionSettings) -> None:
        """Other settings; an ejection under way keeps the end that it was given."""
        self._settings = settings
        self._check_interval_s = max(min(settings.silence_s / 4, 1.0), 0.01)

    # --- what the proxy reports

    def started(self, backend: Backend) -> None:
        """An attempt on it begins, and its InFlight exists. Silence counts from the start of a busy time: were it
        counted from the latest attempt, steady traffic to a hung engine would keep it in rotation for ever."""
        if backend.in_flight <= 1:
            backend.waiting_since = self._now()

    def connect_failed(self, backend: Backend) -> None:
        """No connection came about: refused, unreachable, or not within connect_s."""
        backend.connect_failures += 1
        enough = backend.connect_failures >= self._settings.connect_failures
        if backend.state is _TRIAL or (backend.state is _UP and enough):
            self._eject(backend, CONNECTIONS_FAIL)

    def attempt_failed(self, backend: Backend) -> None:
        """An attempt ended before its first byte by the backend's doing: reset, closed, or timed out."""
        backend.failures += 1
        if backend.state is _TRIAL:
            self._eject(backend, TRIAL_FAILED)
        elif (
            backend.state is _UP
            and backend.failures >= self._settings.failed_attempts
            and self._another_serves(backend)
        ):
            self._eject(backend, ATTEMPTS_FAIL)

    def answered(self, backend: Backend, status: int) -> None:
        """The first byte of an answer arrived."""
        backend.last_byte_at = now = self._now()
        backend.connect_failures = 0
        if status == 429 or status == 503:
            wait_s = min(BUSY_S * 2 ** min(backend.busy_in_a_row, 10), BUSY_MAX_S)
            backend.busy_in_a_row += 1
            backend.busy_until = now + wait_s
            self.busy_until = max(self.busy_until, backend.busy_until)
        elif status >= 500 and status not in (501, 505):
            self.attempt_failed(backend)
            return
        else:
            backend.failures = backend.busy_in_a_row = 0
        if backend.state is _TRIAL:
            self._registry.set_state(backend, State.UP, "")

    def _another_serves(self, backend: Backend) -> bool:
        """More of its pool are well than are out: then it is this engine, and not what the clients send, which would
        take one engine after the other."""
        well = out = 0
        for other in self._registry.backends:
            if other is backend or backend.models.keys().isdisjoint(other.models):
                continue
            if other.state is _UP and not other.draining and other.failures < self._settings.failed_attempts:
                well += 1
            elif other.state in (State.EJECTED, State.TRIAL):
                out += 1
        return well > out

    # --- silence

    def check_silence(self) -> None:
        """Eject those that owe us bytes for longer than silence_s; let go of what waits on those that are down and
        owe bytes for as long as it takes to be found down. Runs by itself; O(backends), where one is silent
        O(backends) more for it."""
        settings = self._settings
        now = self._now()
        heard_after = now - settings.silence_s
        down_heard_after = now - settings.interval_s * settings.unhealthy_after
        for backend in self._registry.backends:
            if backend.in_flight == 0:
                continue
            heard_at = max(backend.last_byte_at, backend.waiting_since, backend.progressed_at)
            if backend.state is State.DOWN:
                if heard_at < down_heard_after and self.on_silent is not None:
                    self.on_silent(backend)
            elif (
                (backend.state is _UP or (backend.state is _TRIAL and backend.trial_open))
                and heard_at < heard_after
                and self._another_answers(backend, heard_after)
            ):
                self._eject(backend, SILENT)

    def _check_silence_again(self) -> None:
        self._check_timer = self._clock.call_later(self._check_interval_s, self._check_silence_again)
        self.check_silence()

    def _another_answers(self, backend: Backend, heard_after: float) -> bool:
        """Where nobody else could take its work, a long prefill is better waited for than cut off."""
        return any(
            other is not backend
            and other.serving
            and other.last_byte_at >= heard_after
            and (not backend.models or not backend.models.keys().isdisjoint(other.models))
            for other in self._registry.backends
        )

    # --- out and in again

    def _eject(self, backend: Backend, why: str) -> None:
        if backend not in self._registry:
            return
        now = self._now()
        settings = self._settings
        record = self._records.setdefault(backend, _Record())
        if backend.state is _UP and now - record.returned_at > settings.ejection_max_s:
            record.in_a_row = 0
        # An exponent past 30 adds nothing but overflow.
        duration_s = min(settings.ejection_s * 2 ** min(record.in_a_row, 30), settings.ejection_max_s)
        record.in_a_row += 1
        record.until = now + duration_s
        if record.timer is not None:
            record.timer.cancel()
        record.timer = self._clock.call_later(duration_s, self._put_on_trial, backend)
        self._registry.set_state(backend, State.EJECTED, why)

    def _put_on_trial(self, backend: Backend) -> None:
        record = self._records[backend]
        if record.timer is not None:
            record.timer.cancel()
            record.timer = None
        if backend.state is State.EJECTED:
            self._registry.set_state(backend, State.TRIAL, ON_TRIAL)

    def _fleet_changed(self, event: FleetEvent) -> None:
        backend = event.backend
        record = self._records.get(backend)
        if record is not None:
            if isinstance(event, BackendRemoved):
                if record.timer is not None:
                    record.timer.cancel()
                del self._records[backend]
            elif isinstance(event, StateChanged):
                if backend.state is not State.EJECTED and record.timer is not None:
                    record.timer.cancel()
                    record.timer = None
                if event.after is State.UP:
                    record.returned_at = self._now()
                    backend.connect_failures = backend.failures = 0
        if self._records:
            self._rescue()

    def _rescue(self) -> None:
        """A fleet never locks itself out: where a model has no backend left that may serve, those that were found down
        and have answered their last health check serve at once, else those of its ejected ones that failed the fewest
        times go on trial."""
        for backend in self._registry.backends:
            if (
                backend.state is State.DOWN
                and backend.check_ok
                and not backend.draining
                and not self._registry.others_serve(backend)
            ):
                self._registry.set_state(backend, State.UP, "")
        ejected = [b for b in self._records if b.state is State.EJECTED and not b.draining]
        if not ejected:
            return
        served: set[str] = set()
        anything_serves = False
        for backend in self._registry.backends:
            if backend.serving:
                anything_serves = True
                served.update(backend.models)

        def failures(backend: Backend) -> tuple[bool, int]:
            return (not backend.check_ok, self._records[backend].in_a_row)

        for _, equals in groupby(sorted(ejected, key=failures), key=failures):
            needed = [b for b in equals if not (anything_serves and b.models.keys() <= served)]
            for backend in needed:
                self._put_on_trial(backend)
                served.update(backend.models)
                anything_serves = True

    def stop(self) -> None:
        """End all timers; nothing is pending afterwards."""
        self._unsubscribe()
        self._check_timer.cancel()
        for record in self._records.values():
            if record.timer is not None:
                record.timer.cancel()
        self._records.clear()
