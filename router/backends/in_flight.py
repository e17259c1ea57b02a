"""The one way in which load is counted."""

from __future__ import annotations

from router.backends.backend import Backend


class InFlight:
    """One unit of load on one backend: created with the choice, released exactly once, whoever gets there first."""

    __slots__ = ("_backend",)

    def __init__(self, backend: Backend) -> None:
        self._backend: Backend | None = backend
        backend.in_flight += 1

    def release(self) -> bool:
        """True for the call that released it."""
        backend, self._backend = self._backend, None
        if backend is None:
            return False
        backend.in_flight -= 1
        return True
