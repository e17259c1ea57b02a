"""Exact counts of what a simulated engine saw, for tests: totals, tries by request id, and waiting for a count."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from router.clock import Clock
from router.sim.http_protocol import Exchange

MAX_RECORDS = 10_000  # request ids that are remembered
MAX_TRIES_PER_ID = 16
MAX_WAITERS = 64
MAX_WAIT_S = 60.0


@dataclass(slots=True)
class Counts:
    """What /sim/stats says. Calls unless named otherwise."""

    requests: int = 0  # inference calls that came in, whatever became of them
    accepted: int = 0  # given to the engine
    finished: int = 0  # answered to the end
    aborted: int = 0  # the client left first
    rejected: int = 0  # answered with an error
    stalled: int = 0  # a fault keeps them without an answer
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0


class Observations:
    """`gauges` gives what is read off the engine at the moment, by name."""

    def __init__(self, clock: Clock, gauges: Callable[[], dict[str, Any]]) -> None:
        self.counts = Counts()
        self._clock = clock
        self._gauges = gauges
        self._records: OrderedDict[str, list[dict[str, Any]]] = OrderedDict()
        self._waiters: list[tuple[dict[str, int], Exchange]] = []

    def note_request(self, exchange: Exchange) -> dict[str, Any]:
        """Count an inference request; its record, to be filled in as things happen to it."""
        self.counts.requests += 1
        request_id = exchange.headers.get("x-request-id", "")[:256]
        record: dict[str, Any] = {"path": exchange.path, "state": "read"}
        if request_id:
            tries = self._records.setdefault(request_id, [])
            if len(tries) < MAX_TRIES_PER_ID:
                tries.append(record)
            if len(self._records) > MAX_RECORDS:
                self._records.popitem(last=False)
        return record

    def tries(self, request_id: str) -> dict[str, Any]:
        """What is known of the requests with this x-request-id."""
        return {"request_id": request_id, "tries": self._records.get(request_id, [])}

    def stats(self) -> dict[str, Any]:
        return {**self._numbers(), "by_request_id": dict(self._records)}

    def wait(self, exchange: Exchange, wanted: dict[str, int], timeout_s: float) -> None:
        """Answer once each count is at least so high, 408 after the time. ValueError for a name that is no count."""
        known = self._numbers()
        for name in wanted:
            if type(known.get(name)) is not int:
                raise ValueError(f"{name}: not a count of /sim/stats")
        if len(self._waiters) >= MAX_WAITERS:
            raise ValueError(f"more than {MAX_WAITERS} wait already")
        waiter = (wanted, exchange)
        self._waiters.append(waiter)
        exchange.on_gone = lambda: self._waiters.remove(waiter)
        self._clock.call_later(min(timeout_s, MAX_WAIT_S), self._expired, waiter)
        self.changed()

    def changed(self) -> None:
        """A count moved: answer who waits for it."""
        if not self._waiters:
            return
        known = self._numbers()
        for waiter in list(self._waiters):
            wanted, exchange = waiter
            if all(known[name] >= least for name, least in wanted.items()):
                self._waiters.remove(waiter)
                exchange.respond(200, orjson.dumps({name: known[name] for name in wanted}))

    def stop(self) -> None:
        for _, exchange in self._waiters:
            exchange.respond(503, b'{"error":"stopping"}')
        self._waiters.clear()

    def _numbers(self) -> dict[str, Any]:
        return {**asdict(self.counts), **self._gauges()}

    def _expired(self, waiter: tuple[dict[str, int], Exchange]) -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)
            known = self._numbers()
            waiter[1].respond(408, orjson.dumps({name: known[name] for name in waiter[0]}))
