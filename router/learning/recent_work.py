"""Who was given work lately: what tells idle backends apart, so that serial traffic still spreads."""

from __future__ import annotations

from collections.abc import Hashable
from math import exp
from typing import Final, Generic, TypeVar

MEMORY_S: Final = 60.0
REBASE: Final = 50.0  # exp of more would lose itself in a float's range

Key = TypeVar("Key", bound=Hashable)


class RecentWork(Generic[Key]):
    """Exponentially forgetting sums, in a unit that grows with time instead of shrinking sums: comparing costs no exp.

    A key lives from its first work to `forget`; the owner forgets what left the fleet.
    """

    __slots__ = ("_origin", "_sums")

    def __init__(self) -> None:
        self._sums: dict[Key, float] = {}
        self._origin = 0.0

    def __len__(self) -> int:
        return len(self._sums)

    def of(self, key: Key) -> float:
        """Comparable between keys at one moment; the unit means nothing."""
        return self._sums.get(key, 0.0)

    def add(self, key: Key, work: float, now: float) -> None:
        sums = self._sums
        age = (now - self._origin) / MEMORY_S
        if age > REBASE:
            fade = exp(-age)
            for other in sums:
                sums[other] *= fade
            self._origin = now
            age = 0.0
        sums[key] = sums.get(key, 0.0) + work * exp(age)

    def forget(self, key: Key) -> None:
        self._sums.pop(key, None)
