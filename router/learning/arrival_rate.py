"""How much comes: the arrivals per second and the prefill that they bring."""

from __future__ import annotations

from math import exp
from typing import Final

MEMORY_S: Final = 30.0
YOUNGEST_S: Final = 3.0  # a first arrival says little about the rate: it counts as one in this time
FORGOTTEN: Final = 0.05  # arrivals left in memory below which the next one starts afresh
CAP_UTILISATION: Final = 0.9


class ArrivalRate:
    """Exponentially forgetting sums of arrivals and work. They fade in silence too; reading changes nothing."""

    __slots__ = ("_at", "_count", "_since", "_work_s")

    def __init__(self) -> None:
        self._count = 0.0
        self._work_s = 0.0
        self._at = float("-inf")
        self._since = 0.0

    def arrived(self, now: float, work_s: float) -> None:
        fade = exp((self._at - now) / MEMORY_S)
        self._count *= fade
        self._work_s *= fade
        if self._count < FORGOTTEN:
            self._count = self._work_s = 0.0
            self._since = now
        self._count += 1.0
        self._work_s += work_s
        self._at = now

    def per_s(self, now: float) -> float:
        """Arrivals per second."""
        return self._count * self._per_unit(now)

    def mean_work_s(self) -> float:
        """Seconds of prefill of a usual arrival, 0 before the first."""
        return self._work_s / self._count if self._count else 0.0

    def pressure(self, now: float, engines: int) -> float:
        """Arrivals per second and engine over (1 - prefill utilisation): whom a delay hits, per second of it."""
        unit = self._per_unit(now) / engines
        utilisation = self._work_s * unit
        return self._count * unit / (1.0 - (utilisation if utilisation < CAP_UTILISATION else CAP_UTILISATION))

    def _per_unit(self, now: float) -> float:
        if not self._count:
            return 0.0
        age = now - self._since
        if age < YOUNGEST_S:
            age = YOUNGEST_S
        # The sum of a steady stream of one per second after `age` seconds is MEMORY_S x (1 - exp(-age / MEMORY_S)).
        return exp((self._at - now) / MEMORY_S) / (MEMORY_S * (1.0 - exp(-age / MEMORY_S)))
