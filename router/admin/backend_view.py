"""GET /backends: what a person needs to know of each backend to understand a choice. docs/admin.md lists the fields."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from router.backends.backend import Backend, State
from router.backends.cures import CACHING_OFF, EVENTS_CONTRADICTED, NO_CACHED_TOKENS, SAME_BLOCK_SIZE
from router.backends.registry import BackendAdded, BackendRemoved, FleetEvent, StateChanged
from router.proxy.services import Services

PAUSE_EVERY: Final = 32  # backends: half a millisecond, in which no request moves


@dataclass(slots=True)
class _Known:
    """When it came into its state, and what took it out of rotation last. Times by the clock."""

    since: float
    last_error: str = ""
    last_error_at: float = 0.0


class BackendView:
    """Follows the fleet from its construction to `close`. `hit_accounting` gives the figures under `hits`, `kv_events`
    what is under that."""

    def __init__(
        self,
        services: Services,
        hit_accounting: Callable[[Backend], Mapping[str, object]],
        kv_events: Callable[[Backend], Mapping[str, object]],
    ) -> None:
        self._services = services
        self._hit_accounting = hit_accounting
        self._kv_events = kv_events
        self._known = {backend: _Known(services.clock.now()) for backend in services.registry.backends}
        self.close = services.registry.subscribe(self._fleet_changed)

    def _fleet_changed(self, event: FleetEvent) -> None:
        if isinstance(event, BackendAdded):
            self._known[event.backend] = _Known(self._services.clock.now())
        elif isinstance(event, BackendRemoved):
            self._known.pop(event.backend, None)
        elif isinstance(event, StateChanged):
            known = self._known.get(event.backend)
            if known is None:
                return
            known.since = self._services.clock.now()
            if event.after in (State.DOWN, State.EJECTED):
                known.last_error, known.last_error_at = event.why, known.since

    async def all(self) -> dict[str, Any]:
        services = self._services
        queued = services.admission.queued_by_model()
        backends = []
        for at, backend in enumerate(services.registry.backends, 1):
            backends.append(self._describe(backend, queued))
            if at % PAUSE_EVERY == 0:
                await asyncio.sleep(0)
        return {
            "strategy": services.settings.strategy_name,
            "draining": services.draining,
            "in_flight": services.admission.in_flight,
            "queue_depth": services.admission.depth,
            "tokens": services.tokens.states() if services.tokens is not None else {},
            "l2": services.l2.state() if services.l2 is not None else None,
            "backends": backends,
        }

    def one(self, backend: Backend) -> dict[str, Any]:
        return self._describe(backend, self._services.admission.queued_by_model())

    def _describe(self, backend: Backend, queued: Mapping[str, int]) -> dict[str, Any]:
        now = self._services.clock.now()
        known = self._known.get(backend) or _Known(now)  # it has left the fleet
        learned = dict(self._services.strategy.known_of(backend))
        events = dict(self._kv_events(backend))
        index = None
        if "index_blocks" in learned:
            index = {"blocks": learned.pop("index_blocks"), "capacity_blocks": learned.pop("index_capacity_blocks")}
        return {
            "name": backend.name,
            "url": backend.url,
            "weight": backend.weight,
            "models": list(backend.models),
            "models_configured": backend.configured_models is not None,
            "api_key_set": backend.api_key is not None,
            "state": backend.state,
            "state_age_s": round(now - known.since, 3),
            "serving": backend.serving,
            "why": _why(backend),
            "draining": backend.draining,
            "deleted": backend.deleted,
            "last_error": _last_error(backend, known, now),
            "health": {
                "check_ok": backend.check_ok,
                "connect_failures": backend.connect_failures,
                "failed_attempts": backend.failures,
                "busy_answers": backend.busy_in_a_row,
                "asked_last_for_s": round(max(backend.busy_until - now, 0.0), 3),
                "last_byte_age_s": _age_s(backend.last_byte_at, now),
                "trial_open": backend.trial_open,
            },
            "in_flight": backend.in_flight,
            "queue_depth": sum(waiting for model, waiting in queued.items() if not model or model in backend.models),
            "report": _describe_report(backend, now),
            "hits": dict(self._hit_accounting(backend)),
            "learned": learned,
            "index": index,
            "kv_events": events,
            "lacks": self._lacks(backend, learned, events),
        }

    def _lacks(self, backend: Backend, learned: Mapping[str, object], events: Mapping[str, object]) -> list[str]:
        """Preconditions of placing by its cache that it does not meet, each with what cures it."""
        lacks = []
        if backend.report.prefix_caching is False:
            lacks.append(CACHING_OFF)
        if learned.get("reports_cached_tokens") is False:
            lacks.append(NO_CACHED_TOKENS)
        if events.get("state") == "live" and learned.get("placed_by") in ("mirror", "load"):
            lacks.append(EVENTS_CONTRADICTED)
        other = self._of_another_block_size(backend)
        if other is not None:
            size, its = backend.report.block_size_tokens, other.report.block_size_tokens
            lacks.append(
                (f"block size {size} tokens, while {other.name} has {its} for the same model", SAME_BLOCK_SIZE)
            )
        return [f"{problem}; {cure}" for problem, cure in lacks]

    def _of_another_block_size(self, backend: Backend) -> Backend | None:
        """The first of those that serve one of its models in blocks of another size; only the later one is told so."""
        size = backend.report.block_size_tokens
        for other in self._services.registry.backends:
            if other is backend or size is None:
                return None
            its = other.report.block_size_tokens
            if its is not None and its != size and not other.models.keys().isdisjoint(backend.models):
                return other
        return None


def _why(backend: Backend) -> str:
    if backend.why:
        return backend.why
    if backend.draining:
        return "being removed" if backend.deleted else "draining"
    return ""


def _last_error(backend: Backend, known: _Known, now: float) -> dict[str, object] | None:
    """What the last failed check or ejection was, kept after it came back. None: nothing failed yet."""
    if backend.state in (State.DOWN, State.EJECTED) and backend.why:
        return {"why": backend.why, "age_s": round(now - known.last_error_at, 3)}
    if not known.last_error:
        return None
    return {"why": known.last_error, "age_s": round(now - known.last_error_at, 3)}


def _describe_report(backend: Backend, now: float) -> dict[str, Any] | None:
    """What the engine last said of itself, and how many seconds ago; None if it never did."""
    report = backend.report
    age_s = _age_s(report.at, now)
    if age_s is None:
        return None
    figures = asdict(report)
    del figures["at"]
    return {"age_s": age_s, **figures, "kv_capacity_tokens": report.kv_capacity_tokens}


def _age_s(at: float, now: float) -> float | None:
    return None if at == float("-inf") else round(now - at, 3)
