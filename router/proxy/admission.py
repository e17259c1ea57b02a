"""Who may start: the caps on requests in flight, and the queue of those who may not yet.

The cap is a true one: a place is taken with the choice of a backend and given back when that attempt ends, after its
last byte. The queue is first in, first out; a waiter whose model has no free backend does not hold up another model's,
and a model with many waiters does not keep another from waiting: where the queue is full, the youngest of the longest
line makes room for a model with a shorter one.

The held line: one that could be placed, but whose best backend has a batch of work ahead already, is held here instead
of there (strategies/held_line.py). It holds up nobody, and of those held the one with the least work goes first, less a
quarter of the time that it has waited, so that nobody starves.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from heapq import heapify, heappop, heappush
from typing import Final, Protocol

from router.backends.backend import Backend
from router.backends.registry import Pool
from router.errors import RouterError, queue_full

RETRY_AFTER_MAX_S: Final = 60
HELD_TRIES: Final = 8  # held ones of a model that are chosen for in vain at each chance: the first of their order
AGEING: Final = 0.25  # seconds of work that a second of waiting makes up for
MEMORY: Final = 128.0  # places given back, or waiters placed, after which what was measured before counts half


class Waiter(Protocol):
    pool: Pool
    queued_at: float  # clock.now() when it came
    held_s: float | None  # written by try_place: the work for which it is held back from a busy backend; else None
    held_for: Backend | None  # that backend

    def try_place(self) -> bool:
        """Start an attempt, or end for good; False: it has to wait, perhaps for another `pool` than before. Starts
        nothing while the admission is full."""

    def still_held(self) -> bool:
        """Whether `held_for` is there and as busy as before. Cheap: nothing is chosen."""

    def on_rejected(self, error: RouterError) -> None:
        """There is no place to wait."""


class _Line:
    """Those who wait for one pool, by their tickets, and how fast they were placed since somebody waits."""

    __slots__ = ("placed", "since", "waiters")

    def __init__(self, now: float) -> None:
        self.waiters: OrderedDict[Waiter, int] = OrderedDict()
        self.since = now
        self.placed = 0.0

    def count_placed(self, now: float) -> None:
        self.placed += 1.0
        if self.placed >= MEMORY:
            self.placed /= 2.0
            self.since = now - (now - self.since) / 2.0

    def put(self, waiter: Waiter, ticket: int) -> None:
        """In the order of tickets: mostly at the end, or for one that could not be placed at the front again."""
        waiters = self.waiters
        youngest = next(reversed(waiters.values())) if waiters else -1
        oldest = next(iter(waiters.values())) if waiters else -1
        waiters[waiter] = ticket
        if ticket < oldest:
            waiters.move_to_end(waiter, last=False)
        elif ticket < youngest:
            self.waiters = OrderedDict(sorted(waiters.items(), key=_ticket))


def _ticket(item: tuple[Waiter, int]) -> int:
    return item[1]


def _ticket_of_held(entry: tuple[float, int, Waiter]) -> int:
    return entry[1]


class _Held:
    """Those of one pool that are held back. Waiting makes up for work at the same rate for all of them, so their order
    does not change with time."""

    __slots__ = ("entries", "order")

    def __init__(self) -> None:
        self.entries: dict[Waiter, tuple[float, int, Waiter]] = {}
        self.order: list[tuple[float, int, Waiter]] = []  # work less what waiting makes up for, ticket

    def put(self, waiter: Waiter, ticket: int) -> None:
        entry = ((waiter.held_s or 0.0) + AGEING * waiter.queued_at, ticket, waiter)
        self.entries[waiter] = entry
        insort(self.order, entry)

    def remove(self, waiter: Waiter) -> bool:
        entry = self.entries.pop(waiter, None)
        if entry is None:
            return False
        del self.order[bisect_left(self.order, entry)]
        return True


class Admission:
    """`max_in_flight` 0 means no cap; `max_queue` bounds those who wait, over all models. Repeats wait apart: each has
    its own backends to avoid, so none may hold up another, and they go first.

    Times are the caller's, clock.now().
    """

    def __init__(self, max_in_flight: int, max_queue: int) -> None:
        self._max_in_flight = max_in_flight
        self._max_queue = max_queue
        self._lines: dict[Pool, _Line] = {}
        self._repeats: dict[Waiter, None] = {}
        self._held: dict[Pool, _Held] = {}
        self._ticket = 0
        self._pumping = False
        self._pump_again = False
        self._fleet_changed = False  # since those were last asked whose model nobody serves
        self._closed = False
        # how long a place is held: the time spent in flight, over all attempts, and how many of them ended
        self._held_s = 0.0
        self._ended = 0.0
        self._counted_at = 0.0
        self.in_flight = 0
        self.depth = 0

    def set_limits(self, max_in_flight: int, max_queue: int) -> None:
        """Other bounds, pump() to follow. Nobody who runs or waits is sent away: where there are more than the new ones
        allow, no further one comes in until there are fewer."""
        self._max_in_flight = max_in_flight
        self._max_queue = max_queue

    @property
    def full(self) -> bool:
        return 0 < self._max_in_flight <= self.in_flight

    def enter(self, waiter: Waiter, now: float) -> None:
        """Place it now if nobody of its model waits already, else let it wait."""
        pool = waiter.pool
        # One whose model nobody serves takes no place: it is told at once, be there a free one or not.
        may_try = pool not in self._lines and not self._closed and (not self.full or not pool.candidates)
        if may_try and waiter.try_place():
            return
        if self.depth >= self._max_queue and not self._make_room(waiter.pool, now):
            waiter.on_rejected(queue_full(self.retry_after_s(waiter.pool, now)))
            return
        self._ticket += 1
        if waiter.held_s is not None:
            self._hold(waiter, self._ticket)
        else:
            self._put(waiter, self._ticket, now)

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
        held = self._held.get(waiter.pool)
        if held is not None and held.remove(waiter):
            self.depth -= 1
            if not held.order:
                del self._held[waiter.pool]
            return
        line = self._lines.get(waiter.pool)
        if line is not None and line.waiters.pop(waiter, None) is not None:
            self.depth -= 1
            if not line.waiters:
                del self._lines[waiter.pool]

    def taken(self, now: float) -> None:
        self._count(now)
        self.in_flight += 1

    def released(self, now: float) -> None:
        """A place is free again."""
        self._count(now)
        self.in_flight -= 1
        self._ended += 1.0
        if self._ended >= MEMORY:
            self._ended /= 2.0
            self._held_s /= 2.0
        if self.depth:
            self._place(now)

    @property
    def holds(self) -> bool:
        """Whether somebody is held back from a busy backend."""
        return bool(self._held)

    def work_done(self, now: float) -> None:
        """A backend has less work ahead than before: perhaps room for one that is held."""
        if self._held:
            self._place(now)

    def pump(self, now: float) -> None:
        """Place whoever can be placed, oldest first; tell those who have nothing left to wait for. To be called when
        backends come, go or recover, and after other limits."""
        self._fleet_changed = True
        self._place(now)

    def _place(self, now: float) -> None:
        if self._pumping:  # placing one may free another's place in the same call
            self._pump_again = True
            return
        self._pumping = True
        try:
            self._pump_again = True
            while self._pump_again and not self._closed:
                self._pump_again = False
                self._place_repeats()
                fleet_changed, self._fleet_changed = self._fleet_changed, False
                self._place_oldest_first(now, fleet_changed)
                self._place_held(now)
        finally:
            self._pumping = False

    def close(self) -> None:
        """Place nobody any more."""
        self._closed = True

    def queued_by_model(self) -> dict[str, int]:
        queued: dict[str, int] = {}
        for pool, line in self._lines.items():
            queued[pool.model] = queued.get(pool.model, 0) + len(line.waiters)
        for pool, held in self._held.items():
            queued[pool.model] = queued.get(pool.model, 0) + len(held.order)
        for waiter in self._repeats:
            queued[waiter.pool.model] = queued.get(waiter.pool.model, 0) + 1
        return queued

    def retry_after_s(self, pool: Pool, now: float) -> int:
        """When those who wait before a newcomer should have been placed: their number by the rate at which this line
        was served since somebody waits in it. Before the first of it was placed, and where there is no queue, the rate
        follows from how long places are held; a line that stands still since t seconds will do so for t more."""
        line = self._lines.get(pool)
        if line is not None and line.placed:
            seconds = len(line.waiters) * (now - line.since) / line.placed
        else:
            self._count(now)
            waiting = max(len(line.waiters) if line is not None else self.depth, 1)
            seconds = waiting * self._held_s / (max(self._ended, 1.0) * max(self.in_flight, 1))
            if line is not None:
                seconds = max(seconds, now - line.since)
        return min(int(seconds) + 1, RETRY_AFTER_MAX_S)

    # --- the line

    def _count(self, now: float) -> None:
        self._held_s += self.in_flight * (now - self._counted_at)
        self._counted_at = now

    def _put(self, waiter: Waiter, ticket: int, now: float) -> None:
        line = self._lines.get(waiter.pool)
        if line is None:
            line = self._lines[waiter.pool] = _Line(now)
        line.put(waiter, ticket)
        self.depth += 1

    def _waiting(self, pool: Pool) -> int:
        line, held = self._lines.get(pool), self._held.get(pool)
        return (len(line.waiters) if line is not None else 0) + (len(held.order) if held is not None else 0)

    def _hold(self, waiter: Waiter, ticket: int) -> None:
        held = self._held.get(waiter.pool)
        if held is None:
            held = self._held[waiter.pool] = _Held()
        held.put(waiter, ticket)
        self.depth += 1

    def _place_held(self, now: float) -> None:
        """In their order, each model's apart. A choice is made for those whose backend has time again, and for the
        first few others, for whom another backend may have; it costs, so a bounded number is made in vain."""
        for pool in list(self._held):
            held = self._held.get(pool)
            if held is None:
                continue
            in_vain = 0
            busy: dict[Backend | None, bool] = {}
            for _, ticket, waiter in held.order.copy():
                if self._closed:
                    return
                if waiter not in held.entries:
                    continue  # it left while another was placed
                full = self.full and bool(pool.candidates)
                if full or in_vain >= HELD_TRIES:
                    still = busy.get(waiter.held_for)
                    if still is None:
                        still = busy[waiter.held_for] = waiter.still_held()
                    if still or (in_vain >= 2 * HELD_TRIES and not full):
                        continue
                self.leave(waiter)
                if full:  # what it waits for now is a place, like the others
                    self._put(waiter, ticket, now)
                elif waiter.try_place():
                    busy.clear()
                elif waiter.held_s is not None:
                    in_vain += 1
                    self._hold(waiter, ticket)
                    held = self._held.get(pool, held)
                else:  # its backends have no room at all now
                    self._put(waiter, ticket, now)

    def _make_room(self, pool: Pool, now: float) -> bool:
        """Send the youngest of the longest line away, unless this pool's own is about as long."""
        if not self._max_queue or self.depth > self._max_queue:  # repeats, or a bound that was lowered
            return False
        length, longest = self._waiting(pool) + 1, None
        for other in (*self._lines, *self._held):
            if self._waiting(other) > length:
                length, longest = self._waiting(other), other
        if longest is None and pool.model:
            # Those whose model nobody has told yet have a line each: however many, they give way to a known one.
            longest = next((other for other in reversed(self._lines) if other.awaited), None)
        if longest is None:
            return False
        waiter = self._youngest(longest)
        error = queue_full(self.retry_after_s(longest, now))
        self.leave(waiter)
        waiter.on_rejected(error)
        return True

    def _youngest(self, pool: Pool) -> Waiter:
        line, held = self._lines.get(pool), self._held.get(pool)
        last = next(reversed(line.waiters.items())) if line is not None and line.waiters else None
        if held is not None:
            _, ticket, waiter = max(held.order, key=_ticket_of_held)
            if last is None or ticket > last[1]:
                return waiter
        assert last is not None
        return last[0]

    def _place_repeats(self) -> None:
        for waiter in list(self._repeats):
            if self.full:
                return
            if waiter in self._repeats:  # else it left while another was placed
                self.leave(waiter)
                if not waiter.try_place():
                    self.queue_repeat(waiter)

    def _place_oldest_first(self, now: float, fleet_changed: bool) -> None:
        """Those whose model nobody serves are asked where the fleet has changed, be all places taken or not: they take
        none, and perhaps have nothing left to wait for. Costs one try a line, and one for each that is placed."""
        heads = [
            (next(iter(line.waiters.values())), pool)
            for pool, line in self._lines.items()
            if line.waiters and (fleet_changed or pool.candidates)
        ]
        heapify(heads)
        while heads:
            ticket, pool = heappop(heads)
            if self.full and pool.candidates:
                if not fleet_changed:
                    return
                continue
            line = self._lines.get(pool)
            if line is None or not line.waiters:
                continue
            waiter, first = next(iter(line.waiters.items()))
            if first != ticket:  # the head of the line left while another was placed
                heappush(heads, (first, pool))
                continue
            del line.waiters[waiter]
            self.depth -= 1
            go_on = waiter.try_place()
            if go_on:
                line.count_placed(now)
            elif waiter.held_s is not None:
                go_on = True
                self._hold(waiter, ticket)
            else:
                go_on = waiter.pool is not pool
                self._put(waiter, ticket, now)
                self._pump_again |= go_on  # its turn may be now, in the line that it has moved to
            if not line.waiters:
                if self._lines.get(pool) is line:
                    del self._lines[pool]
            elif go_on:
                heappush(heads, (next(iter(line.waiters.values())), pool))
