"""Smooth weighted round robin: each in its turn, by weight, without bunching."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from router.backends.backend import Backend, EngineReport
from router.learning.trust import Trust
from router.strategies.strategy import Choice, Explanation, Need, Outcome, Reason, RoutingRequest, Terms

MAX_MODELS = 1024  # rotations kept; the least recently started goes


class RoundRobin:
    """nginx's rotation, one per model: everybody gains its weight, the richest serves and pays what all gained.

    Deterministic: of equally rich backends the first candidate serves. A backend that is missing from the candidates
    for a while keeps its place; one that joins starts level.
    """

    needs: frozenset[Need] = frozenset()

    def __init__(self) -> None:
        self._rotations: dict[str, dict[Backend, float]] = {}

    def choose(self, request: RoutingRequest, candidates: Sequence[Backend]) -> Choice | None:
        if not candidates:
            return None
        rotation = self._rotations.get(request.model)
        if rotation is None:
            rotation = self._start(request.model)
        return Choice(request, _turn(rotation, candidates)[0], Reason.ROUNDROBIN)

    def explain(self, request: RoutingRequest, candidates: Sequence[Backend]) -> Explanation:
        told = Explanation("the highest credit; each turn gives everybody its weight and costs the chosen what all got")
        if candidates:
            rotation = dict(self._rotations.get(request.model, {}))
            richest, total = _turn(rotation, candidates)
            for backend in candidates:
                terms = Terms(backend)
                terms.terms["credit"] = rotation[backend] + (total if backend is richest else 0.0)
                terms.terms["weight"] = backend.weight
                told.candidates.append(terms)
            told.choice = Choice(request, richest, Reason.ROUNDROBIN)
        return told

    def _start(self, model: str) -> dict[Backend, float]:
        if len(self._rotations) >= MAX_MODELS:
            del self._rotations[next(iter(self._rotations))]
        rotation: dict[Backend, float] = {}
        self._rotations[model] = rotation
        return rotation

    def forget(self, backend: Backend) -> None:
        for rotation in self._rotations.values():
            rotation.pop(backend, None)
        self._rotations = {model: rotation for model, rotation in self._rotations.items() if rotation}

    def match_of(self, request: RoutingRequest, backend: Backend) -> tuple[int, int]:
        return 0, 0

    def known_of(self, backend: Backend) -> Mapping[str, float | bool | str | None]:
        return {}

    # The rotation needs to hear of nothing else.
    def placed(self, choice: Choice) -> None: ...

    def first_byte(self, choice: Choice) -> None: ...

    def observe(self, choice: Choice, outcome: Outcome) -> None: ...

    def reported(self, backend: Backend, before: EngineReport, now: EngineReport) -> None: ...

    def joined(self, backend: Backend) -> None: ...

    def trust_of(self, backend: Backend) -> Trust | None:
        return None


def _turn(rotation: dict[Backend, float], candidates: Sequence[Backend]) -> tuple[Backend, float]:
    """One turn on `rotation`: who serves, and what it pays."""
    total, richest, most = 0.0, candidates[0], float("-inf")
    for backend in candidates:
        credit = rotation.get(backend, 0.0) + backend.weight
        rotation[backend] = credit
        total += backend.weight
        if credit > most:
            richest, most = backend, credit
    rotation[richest] = most - total
    return richest, total
