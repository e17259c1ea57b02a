"""The backend with the least to do, by weight."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from router.backends.backend import Backend, EngineReport
from router.clock import Clock
from router.learning.recent_work import RecentWork
from router.learning.trust import Trust
from router.strategies.strategy import Choice, Need, Outcome, Reason, RoutingRequest


class LeastLoad:
    """Lowest (attempts in flight + share of the recent work) / weight.

    The share is between 0 and 1, so it only tells apart what the count in flight leaves equal: an idle fleet with
    serial traffic still spreads. What then still ties goes by the seeded generator.
    """

    needs: frozenset[Need] = frozenset()

    def __init__(self, clock: Clock, rng: Random) -> None:
        self._now = clock.now
        self._random = rng.random
        self._recent: RecentWork[Backend] = RecentWork()

    def choose(self, request: RoutingRequest, candidates: Sequence[Backend]) -> Choice | None:
        if not candidates:
            return None
        recent = self._recent.of
        total = 0.0
        for backend in candidates:
            total += recent(backend)
        unit = 1.0 / total if total > 0.0 else 0.0
        least, load, ties = candidates[0], float("inf"), 0
        for backend in candidates:
            its = (backend.in_flight + recent(backend) * unit) / backend.weight
            if its < load:
                least, load, ties = backend, its, 1
            elif its == load:
                ties += 1
                if self._random() * ties < 1.0:
                    least = backend
        return Choice(request, least, Reason.LEASTLOAD)

    def placed(self, choice: Choice) -> None:
        choice.placed_at = now = self._now()
        self._recent.add(choice.backend, 1.0, now)

    def forget(self, backend: Backend) -> None:
        self._recent.forget(backend)

    def first_byte(self, choice: Choice) -> None: ...

    def observe(self, choice: Choice, outcome: Outcome) -> None: ...

    def reported(self, backend: Backend, before: EngineReport, now: EngineReport) -> None: ...

    def joined(self, backend: Backend) -> None: ...

    def trust_of(self, backend: Backend) -> Trust | None:
        return None
