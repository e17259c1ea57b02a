"""Who may start: the caps on requests in flight, and the queue of those who may not yet.

The cap is a true one: a place is taken with the choice of a backend and given back when that attempt ends, after its
last byte. The queue is first in, first out; a waiter whose model has no free backend does not hold up another model's.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from router.backends.registry import Pool
from router.errors import RouterError, queue_full


class Waiter(Protocol):
    pool: Pool

    def try_place(self) -> bool:
        """Start an attempt, or end for good; False: it has to wait."""

    def on_rejected(self, error: RouterError) -> None:
        """There is no place to wait."""


class Admission:
    """`max_in_flight` 0 means no cap; `max_queue` bounds those who wait, over all models. Repeats wait apart: each has
    its own backends to avoid, so none may hold up another, and they go first."""

    def __init__(self, max_in_flight: int, max_queue: int) -> None:
        self._max_in_flight = max_in_flight
        self._max_queue = max_queue
        self._queues: dict[Pool, OrderedDict[Waiter, int]] = {}
        self._repeats: dict[Waiter, None] = {}
        self._ticket = 0
        self._pumping = False
        self._pump_again = False
        self._closed = False
        self.in_flight = 0
        self.depth = 0

    def set_limits(self, max_in_flight: int, max_queue: int) -> None:
        """Other bounds; who is over one already stays. Call pump() when there may be more room."""
        self._max_in_flight = max_in_flight
        self._max_queue = max_queue

    @property
    def full(self) -> bool:
        return 0 < self._max_in_flight <= self.in_flight

    def enter(self, waiter: Waiter) -> None:
        """Place it now if nobody of its model waits already, else let it wait."""
        if waiter.pool not in self._queues and not self.full and not self._closed and waiter.try_place():
            return
        if self.depth >= self._max_queue:
            waiter.on_rejected(queue_full(self._retry_after_s()))
            return
        self._ticket += 1
        self._put(waiter, self._ticket)

    def queue_repeat(self, waiter: Waiter) -> None:
        """Let a repeat wait, to be called before its failed attempt gives its place back: so it is the first who may
        take it. It has waited its time, and the queue's bound does not refuse it."""
        self._repeats[waiter] = None
        self.depth += 1

    def leave(self, waiter: Waiter) -> None:
        """Wait no longer; nothing happens if it does not wait."""
        if waiter in self._repeats:
            del self._repeats[waiter]
            self.depth -= 1
            return
        queue = self._queues.get(waiter.pool)
        if queue is not None and queue.pop(waiter, None) is not None:
            self.depth -= 1
            if not queue:
                del self._queues[waiter.pool]

    def taken(self) -> None:
        self.in_flight += 1

    def released(self) -> None:
        """A place is free again."""
        self.in_flight -= 1
        if self.depth:
            self.pump()

    def pump(self) -> None:
        """Place whoever can be placed, oldest first. To be called too when backends come, go or recover."""
        if self._pumping:  # placing one may free another's place in the same call
            self._pump_again = True
            return
        self._pumping = True
        try:
            self._pump_again = True
            while self._pump_again and not self._closed:
                self._pump_again = False
                self._place_repeats()
                self._place_oldest_first()
        finally:
            self._pumping = False

    def close(self) -> None:
        """Place nobody any more."""
        self._closed = True

    def queued_by_model(self) -> dict[str, int]:
        queued: dict[str, int] = {}
        for pool, queue in self._queues.items():
            queued[pool.model] = queued.get(pool.model, 0) + len(queue)
        for waiter in self._repeats:
            queued[waiter.pool.model] = queued.get(waiter.pool.model, 0) + 1
        return queued

    def _put(self, waiter: Waiter, ticket: int, first: bool = False) -> None:
        queue = self._queues.setdefault(waiter.pool, OrderedDict())
        queue[waiter] = ticket
        queue.move_to_end(waiter, last=not first)
        self.depth += 1

    def _place_repeats(self) -> None:
        for waiter in list(self._repeats):
            if self.full:
                return
            if waiter in self._repeats:  # else it left while another was placed
                self.leave(waiter)
                if not waiter.try_place():
                    self.queue_repeat(waiter)

    def _place_oldest_first(self) -> None:
        blocked: set[Pool] = set()
        while not self.full:
            heads = [(next(iter(q.items())), pool) for pool, q in self._queues.items() if pool not in blocked]
            if not heads:
                return
            (waiter, ticket), pool = min(heads, key=lambda head: head[0][1])
            self.leave(waiter)
            if not waiter.try_place():
                self._put(waiter, ticket, first=True)
                blocked.add(pool)

    def _retry_after_s(self) -> int:
        """A queue of N behind M places empties in about N / M answers; a second for each is the least honest guess."""
        return max(1, min(60, self.depth // max(self.in_flight, 1)))
