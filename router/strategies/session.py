"""One session, one backend: rendezvous hashing with bounded load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log

import xxhash

from router.backends.backend import Backend, EngineReport
from router.learning.trust import Trust
from router.strategies.prefix_affinity import PrefixAffinity
from router.strategies.strategy import Choice, Explanation, Need, Outcome, Reason, RoutingRequest, Terms

LOAD_BOUND = 1.25  # of the mean load by weight
SLACK = 4.0  # attempts above the mean that are always allowed: at low traffic nobody spills
_UNIT = 2.0**-64


class Session:
    """Every backend draws a lot from the session's key and its own name; the highest serves.

    Weights scale the lots so that a backend wins its share of the keys. A lost backend moves its own sessions alone,
    a new one takes its share from all. A backend at its bound is passed over for the next lot until it is below again.
    Without a key, or with a body that cannot be read and no key, the placement by prefix decides, with its reason.
    """

    needs: frozenset[Need] = frozenset((Need.SESSION_KEY, Need.PREFIX_BLOCKS))

    def __init__(self, keyless: PrefixAffinity) -> None:
        self._keyless = keyless

    def choose(self, request: RoutingRequest, candidates: Sequence[Backend]) -> Choice | None:
        key = request.session_key
        if not key:
            return self._keyless.choose(request, candidates)
        if not candidates:
            return None
        return self._keyless.assign(request, self._winner(key, candidates), Reason.SESSION)

    def explain(self, request: RoutingRequest, candidates: Sequence[Backend]) -> Explanation:
        key = request.session_key
        if not key:
            return self._keyless.explain(request, candidates)
        told = Explanation("the highest lot, drawn from the session's key, of those below their bound of attempts")
        if candidates:
            winner = self._winner(key, candidates, told)
            for terms in told.candidates:
                terms.match_blocks, terms.matched_tokens = self._keyless.match_of(request, terms.backend)
            told.choice = self._keyless.assign(request, winner, Reason.SESSION)
        return told

    def match_of(self, request: RoutingRequest, backend: Backend) -> tuple[int, int]:
        return self._keyless.match_of(request, backend)

    def known_of(self, backend: Backend) -> Mapping[str, float | bool | str | None]:
        return self._keyless.known_of(backend)

    def _winner(self, key: bytes, candidates: Sequence[Backend], told: Explanation | None = None) -> Backend:
        seed = xxhash.xxh64_intdigest(key)
        load, weight = 1, 0.0  # the request itself is part of the load
        for backend in candidates:
            load += backend.in_flight
            weight += backend.weight
        mean = load / weight  # per unit of weight
        winner, highest = candidates[0], float("-inf")
        for backend in candidates:
            fair = mean * backend.weight
            bound = fair * LOAD_BOUND
            if bound < fair + SLACK:
                bound = fair + SLACK
            if told is not None:
                terms = Terms(backend)
                terms.terms = {"lot": _lot(backend, seed), "in_flight": backend.in_flight, "bound_in_flight": bound}
                told.candidates.append(terms)
            # The least loaded is always below its bound, so somebody wins.
            if backend.in_flight + 1 > bound:
                continue
            lot = _lot(backend, seed)
            if lot > highest:
                winner, highest = backend, lot
        return winner

    # What keyed requests leave behind in caches and queues, the placement of keyless ones has to know.
    def placed(self, choice: Choice) -> None:
        self._keyless.placed(choice)

    def first_byte(self, choice: Choice) -> None:
        self._keyless.first_byte(choice)

    def observe(self, choice: Choice, outcome: Outcome) -> None:
        self._keyless.observe(choice, outcome)

    def reported(self, backend: Backend, before: EngineReport, now: EngineReport) -> None:
        self._keyless.reported(backend, before, now)

    def joined(self, backend: Backend) -> None:
        self._keyless.joined(backend)

    def forget(self, backend: Backend) -> None:
        self._keyless.forget(backend)

    def trust_of(self, backend: Backend) -> Trust | None:
        return self._keyless.trust_of(backend)


def _lot(backend: Backend, seed: int) -> float:
    drawn = (xxhash.xxh64_intdigest(backend.name.encode(), seed) + 0.5) * _UNIT
    return -backend.weight / log(drawn) if drawn < 1.0 else float("inf")
