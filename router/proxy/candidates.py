"""Who of a pool may get a request now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from router.backends.backend import Backend, State
from router.backends.registry import Pool
from router.proxy.services import Services

_TRIAL: Final = State.TRIAL
_STARTING: Final = State.STARTING


def fit_candidates(services: Services, pool: Pool, tried: Sequence[Backend]) -> Sequence[Backend]:
    """Those of the pool that may get a request now which was at `tried` before; those that were too busy a moment ago
    only among themselves. Mostly the pool's own tuple."""
    candidates = pool.candidates
    cap = services.settings.max_in_flight_per_backend
    busy_until = services.passive_health.busy_until
    now = services.now() if busy_until else 0.0
    if not (tried or cap or pool.needs_filter or busy_until > now):
        return candidates
    fit = [
        b
        for b in candidates
        if b not in tried and not (cap and b.in_flight >= cap) and not (b.state is _TRIAL and b.trial_open)
    ]
    if busy_until > now:
        return [b for b in fit if b.busy_until <= now] or fit
    return fit


def why_unfit(services: Services, backend: Backend) -> str:
    """Why a backend of the pool is not among its fit candidates, for people."""
    if backend.deleted:
        return "being removed"
    if backend.draining:
        return "draining"
    if not backend.serving:
        return f"{backend.state.value}: {backend.why}" if backend.why else backend.state.value
    cap = services.settings.max_in_flight_per_backend
    if cap and backend.in_flight >= cap:
        return f"at its cap of {cap} in flight"
    if backend.state is _TRIAL and backend.trial_open:
        return "on trial with one request at a time, and that is under way"
    return "too busy a moment ago (429 or 503); others are asked first"


def worth_waiting(pool: Pool, tried: Sequence[Backend]) -> bool:
    """Somebody serves and has no room, or is just starting; a repeat does not wait for starters."""
    if any(b not in tried for b in pool.candidates):
        return True
    return not tried and any(b.state is _STARTING and not b.draining for b in pool.members)
