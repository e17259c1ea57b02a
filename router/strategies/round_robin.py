"""Smooth weighted round robin: each in its turn, by weight, without bunching."""

from __future__ import annotations

from collections.abc import Sequence

from router.backends.backend import Backend, EngineReport
from router.learning.trust import Trust
from router.strategies.strategy import Choice, Need, Outcome, Reason, RoutingRequest

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
        total, richest, most = 0.0, candidates[0], float("-inf")
        for backend in candidates:
            credit = rotation.get(backend, 0.0) + backend.weight
            rotation[backend] = credit
            total += backend.weight
            if credit > most:
                richest, most = backend, credit
        rotation[richest] = most - total
        return Choice(request, richest, Reason.ROUNDROBIN)

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

    # The rotation needs to hear of nothing else.
    def placed(self, choice: Choice) -> None: ...

    def first_byte(self, choice: Choice) -> None: ...

    def observe(self, choice: Choice, outcome: Outcome) -> None: ...

    def reported(self, backend: Backend, before: EngineReport, now: EngineReport) -> None: ...

    def joined(self, backend: Backend) -> None: ...

    def trust_of(self, backend: Backend) -> Trust | None:
        return None
