"""The backend with the least to do, by weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from router.backends.backend import Backend, EngineReport
from router.clock import Clock
from router.learning.recent_work import RecentWork
from router.learning.trust import Trust
from router.strategies.strategy import Choice, Explanation, Need, Outcome, Reason, RoutingRequest, Terms


class LeastLoad:
    """Lowest (attempts in flight + share of the recent work) / weight.

    The share is between 0 and 1, so it only tells apart what the count in flight leaves equal: an idle fleet with
    serial traffic still spreads. What then still ties goes by the seeded generator.
    """

    needs: frozenset[Need] = frozenset()

    def __init__(self, clock: Clock, rng: Random) -> None:
        self._now = clock.now
        self._rng = rng
        self._random = rng.random
        self._recent: RecentWork[Backend] = RecentWork()

    def choose(self, request: RoutingRequest, candidates: Sequence[Backend]) -> Choice | None:
        return self._least(request, candidates, None)

    def explain(self, request: RoutingRequest, candidates: Sequence[Backend]) -> Explanation:
        told = Explanation("the lowest load; equal ones by lot")
        drawn = self._rng.getstate()
        try:
            told.choice = self._least(request, candidates, told)
        finally:
            self._rng.setstate(drawn)
        return told

    def _least(self, request: RoutingRequest, candidates: Sequence[Backend], told: Explanation | None) -> Choice | None:
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
            if told is not None:
                terms = Terms(backend)
                terms.terms = {
                    "load": its,
                    "in_flight": backend.in_flight,
                    "recent_share": recent(backend) * unit,
                    "weight": backend.weight,
                }
                told.candidates.append(terms)
            if its < load:
                least, load, ties = backend, its, 1
            elif its == load:
                ties += 1
                if self._random() * ties < 1.0:
                    least = backend
        return Choice(request, least, Reason.LEASTLOAD)

    def match_of(self, request: RoutingRequest, backend: Backend) -> tuple[int, int]:
        return 0, 0

    def known_of(self, backend: Backend) -> Mapping[str, float | bool | str | None]:
        return {}

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
