"""The order of one rank's frames: each batch is applied exactly once, or the rank is forgotten and says so.

No I/O. `live` takes what the PUB socket brings, `replayed` and `replay_ended` what was asked of the replay socket;
`replay_from` says which replay is wanted (its owner watches it through `on_wanted`).

Sequences start at 0 with the engine's process, so a lower one than the last is another process. After a broken stream
a higher one may be too: a replay therefore starts AT the last batch that was applied, not after it, and goes on only if
that comes back byte for byte (it holds a time stamp, so no other process has the same).

While a replay runs, and until what came meanwhile is worked off, live frames are held, within bounds. One that is
dropped leaves a gap, which the next replay fills. A gap that no replay fills costs all knowledge of the rank: a removal
may be in it, and a block that is no longer there attracts requests to the wrong engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import Final, Protocol

import xxhash

from router.backends.backend import Backend
from router.clock import Clock, TimerHandle
from router.kv_events.settings import IntakeSettings
from router.metrics import Metrics

ATTEMPTS: Final = 4  # replays in a row that bring nothing new
NO_REPLAY: Final = (
    'no replay endpoint, so what was cached before is unknown until it is stored again: add "replay_endpoint": '
    '"tcp://*:5558" to --kv-events-config'
)


class FeedState(StrEnum):
    OFF = "off"
    CONNECTING = "connecting"
    REPLAYING = "replaying"
    LIVE = "live"
    INCOMPLETE = "incomplete"  # follows the engine, but lacks older blocks
    STALE = "stale"  # the stream broke: what is known may be out of date


class Applied(Protocol):
    """What one batch did to the index; counts of blocks, `cleared` and `unknown` of events."""

    @property
    def stored(self) -> int: ...
    @property
    def removed(self) -> int: ...
    @property
    def cleared(self) -> int: ...
    @property
    def unknown(self) -> int: ...
    @property
    def malformed(self) -> bool: ...


class FrameSink(Protocol):
    """Where batches go. A rank's number is the sink's own."""

    def add_rank(self, backend: Backend, number: int) -> int: ...
    def clear(self, rank: int) -> None: ...
    def apply(self, rank: int, payload: bytes) -> Applied: ...
    def remove(self, rank: int) -> None: ...
    def blocks_of(self, rank: int) -> int: ...


class HeldBytes:
    """Payload bytes that all feeds hold together."""

    __slots__ = ("limit", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0


class RankFeed:
    """One rank for as long as its engine has it, over any number of connections."""

    def __init__(
        self,
        backend: str,
        index_rank: int,
        sink: FrameSink,
        clock: Clock,
        settings: IntakeSettings,
        metrics: Metrics,
        held_bytes: HeldBytes,
        capacity_blocks: Callable[[], int | None],
        on_state: Callable[[], object] = lambda: None,
    ) -> None:
        self.backend = backend
        self.index_rank = index_rank
        self.state = FeedState.CONNECTING
        self.why = "not asked yet"
        self.sequence = -1  # of the last batch applied
        self.last_event_at = float("-inf")
        self.gaps = 0
        self.resyncs = 0
        self.malformed = 0
        self.dropped = 0
        self.malformed_in_a_row = 0
        self.replay_from: int | None = None  # a replay that is wanted and not begun
        self.on_wanted: Callable[[], object] = lambda: None
        self.on_work: Callable[[], object] = lambda: None  # held frames wait for `receive_one`
        self.rewrite: Callable[[bytes], bytes] | None = None
        self._sink = sink
        self._clock = clock
        self._settings = settings
        self._metrics = metrics
        self._held_bytes = held_bytes
        self._capacity_blocks = capacity_blocks
        self._on_state = on_state
        self._next: int | None = 0  # the sequence that must come now; None: any
        self._digest = 0  # of the last payload
        self._anew = True  # nothing is known from before the replay under way
        self._complete = True
        self._lack = ""  # why it is not
        self._stored_since = 0
        self._held: deque[tuple[int, bytes]] = deque()
        self._last_held = -1
        self._overflowed = False
        self._can_replay = False
        self._same_connection = False
        self._verifying = False  # the replay began at the last batch
        self._first = False
        self._progress = False
        self._attempts = 0
        self._draining = False
        self._gave_up = False
        self._stale_timer: TimerHandle | None = None

    # --- the stream

    def connected(self, can_replay: bool) -> None:
        """The subscription stands."""
        self._cancel_stale()
        self._drop_held()
        self._can_replay = can_replay
        self._same_connection = False
        self._attempts = 0
        if can_replay:
            self._ask()
            return
        self._forget()
        self._next, self._complete, self._lack = None, False, NO_REPLAY
        self._settle()

    def disconnected(self, why: str) -> None:
        """What is known is kept for a while: the connection alone may have failed."""
        self._drop_held()
        self.replay_from = None
        self._draining = False
        known = self.sequence >= 0
        self._enter(FeedState.STALE if known else FeedState.CONNECTING, why)
        if known and self._stale_timer is None:
            self._stale_timer = self._clock.call_later(self._settings.stale_limit_s, self._stale_expired)

    def forget(self, state: FeedState, why: str) -> None:
        """Another process, or no events any more."""
        self._cancel_stale()
        self._drop_held()
        self.replay_from = None
        self._draining = False
        self._forget()
        self._enter(state, why)

    def resync(self, why: str) -> None:
        """What is known is wrong: it is forgotten, and heard again from the beginning where there is a replay, unless
        that is under way."""
        if self.state is FeedState.STALE:
            self.forget(FeedState.CONNECTING, self.why)
        elif self.state is FeedState.REPLAYING:
            if not self._anew:  # it fills a gap in what is wrong
                self._another_process()
        elif self.state is FeedState.LIVE or self.state is FeedState.INCOMPLETE:
            if self._can_replay:
                self._another_process()
            else:
                self._clear_incomplete(why)
                self._settle()

    def live(self, sequence: int, payload: bytes) -> None:
        if self.state is FeedState.REPLAYING:
            self._hold(sequence, payload)
        elif self._next is None:
            if sequence == 0 and self.sequence < 0:
                self._complete, self._lack = True, ""  # its history begins here
                self._settle()
            self._apply(sequence, payload)
        elif sequence == self._next:
            self._apply(sequence, payload)
        elif sequence > self._next:
            if self._can_replay:
                self._ask()
                self._hold(sequence, payload)
            else:
                self._lose("batches were lost, and there is no replay endpoint to ask for them")
                self._apply(sequence, payload)
        elif sequence == self.sequence and xxhash.xxh3_64_intdigest(payload) == self._digest:
            return
        else:
            self._another_process()
            if self._can_replay:
                self._hold(sequence, payload)
            else:
                self._next, self._complete, self._lack = None, sequence == 0, NO_REPLAY
                self._apply(sequence, payload)
                self._settle()

    # --- the replay

    def replayed(self, sequence: int, payload: bytes) -> None:
        """A batch of the replay asked for last; `replay_from` may be set anew by it: then that replay is over."""
        if self.state is not FeedState.REPLAYING or self._draining or self.replay_from is not None:
            return
        if self._first:
            self._first = False
            if self._verifying:
                if sequence == self.sequence:
                    if xxhash.xxh3_64_intdigest(payload) != self._digest:
                        self._another_process()
                    else:
                        self._same_connection = True
                    return
                if sequence != self.sequence + 1 or not self._same_connection:
                    self._lose("the engine's replay buffer no longer held what was missed")
                    self._next = sequence
            elif sequence > 0:
                self._complete, self._lack = False, "the engine's replay buffer begins after its start"
                self._stored_since = 0
                self._next = sequence
        expected = self._next if self._next is not None else sequence
        if sequence < expected:
            return
        if sequence > expected:
            if self._progress:
                self._ask(again=True)
                return
            self._lose("the engine's replay has holes")
        self._progress = True
        self._apply(sequence, payload)

    def replay_ended(self) -> None:
        if self.state is not FeedState.REPLAYING or self._draining or self.replay_from is not None:
            return
        if self._first and self._verifying:
            self._another_process()  # it has nothing as late as what we have
            return
        self._same_connection = True
        self._begin_draining()

    def replay_failed(self, why: str) -> None:
        """It took too long, or could not be asked for."""
        if self.state is not FeedState.REPLAYING or self._draining:
            return
        self.replay_from = None
        if self._progress:
            self._ask(again=True)
            return
        self._lose(why)
        self._gave_up = True
        self._begin_draining()

    def receive_one(self) -> bool:
        """Apply one held frame; True while there may be more to do. For the pump, which spreads them over time."""
        if not self._draining:
            return False
        if not self._held:
            self._end_draining()
            return False
        sequence, payload = self._held[0]
        if self._next is None or sequence == self._next:
            self._take_held()
            self._apply(sequence, payload)
        elif sequence < self._next:
            self._take_held()
        elif self._gave_up or self._attempts >= ATTEMPTS:
            self._lose("batches were lost, and replays did not bring them")
        else:
            self._draining = False
            self._ask(again=True)
            return False
        return True

    # --- inside

    def _ask(self, again: bool = False) -> None:
        if self.sequence >= 0 or again:
            self.resyncs += 1
            self._metrics.kv_events[self.backend, "resync"] += 1
        self._attempts = 0 if self._progress else self._attempts + 1
        self._verifying = self.sequence >= 0
        self._first, self._progress, self._draining, self._gave_up = True, False, False, False
        self.replay_from = max(self.sequence, 0)
        self._enter(FeedState.REPLAYING, "asking for what was missed")
        self.on_wanted()

    def _another_process(self) -> None:
        self._forget()
        self._drop_held()
        self._progress = False
        if self._can_replay:
            self._ask(again=True)

    def _forget(self) -> None:
        """Empty, and that is all there is to know until the first batch."""
        self._sink.clear(self.index_rank)
        self._anew = True
        self.sequence, self._next, self._digest = -1, 0, 0
        self._complete, self._lack, self._stored_since = True, "", 0

    def _lose(self, why: str) -> None:
        self.gaps += 1
        self._metrics.kv_event_gaps += 1
        self._clear_incomplete(why)
        if self.state is FeedState.LIVE or self.state is FeedState.INCOMPLETE:
            self._settle()

    def _clear_incomplete(self, why: str) -> None:
        self._sink.clear(self.index_rank)
        self._anew = True
        self._next, self._complete, self._lack, self._stored_since = None, False, why, 0

    def _apply(self, sequence: int, payload: bytes) -> None:
        applied = self._sink.apply(self.index_rank, payload if self.rewrite is None else self.rewrite(payload))
        self.sequence, self._next = sequence, sequence + 1
        self._digest = xxhash.xxh3_64_intdigest(payload)
        self.last_event_at = self._clock.now()
        counts = self._metrics.kv_events
        for kind in ("stored", "removed", "cleared", "unknown"):
            number = int(getattr(applied, kind))
            if number:
                counts[self.backend, kind] += number
        if applied.malformed:
            self.count_malformed()
            self._lose("a batch was malformed")
            self._next = sequence + 1
            return
        self.malformed_in_a_row = 0
        if not self._complete:
            self._relearn(applied)

    def _relearn(self, applied: Applied) -> None:
        """Complete again after a clear, or when as many blocks were stored as the cache has: older ones are gone."""
        self._stored_since += applied.stored
        capacity = self._capacity_blocks()
        if applied.cleared or (capacity is not None and self._stored_since >= capacity):
            self._complete, self._lack = True, ""
            if self.state is FeedState.INCOMPLETE:
                self._settle()

    def count_malformed(self) -> None:
        self.malformed += 1
        self.malformed_in_a_row += 1
        self._metrics.kv_events[self.backend, "malformed_frame"] += 1

    def _hold(self, sequence: int, payload: bytes) -> None:
        if sequence <= self._last_held and self._held:
            self._another_process()
        held = self._held_bytes
        if len(self._held) >= self._settings.held_frames or held.used + len(payload) > held.limit:
            self._overflowed = True
            self.dropped += 1
            self._metrics.kv_events[self.backend, "dropped_frame"] += 1
            return
        held.used += len(payload)
        self._held.append((sequence, payload))
        self._last_held = sequence
        if self._draining:
            self.on_work()

    def _take_held(self) -> None:
        self._held_bytes.used -= len(self._held.popleft()[1])

    def _drop_held(self) -> None:
        while self._held:
            self._take_held()
        self._overflowed = False

    def _begin_draining(self) -> None:
        self._draining = True
        self.on_work()

    def _end_draining(self) -> None:
        self._draining = False
        if self._overflowed and self._attempts < ATTEMPTS and not self._gave_up:
            self._overflowed = False
            self._ask(again=True)
            return
        self._overflowed = False
        self._attempts = 0
        self._settle()

    def _settle(self) -> None:
        self._anew = False
        self._enter(FeedState.LIVE if self._complete else FeedState.INCOMPLETE, self._lack)

    def _enter(self, state: FeedState, why: str) -> None:
        changed = (self.state, self.why) != (state, why)
        self.state, self.why = state, why
        if changed:
            self._on_state()

    def _stale_expired(self) -> None:
        self._stale_timer = None
        self.forget(FeedState.CONNECTING, self.why)

    def _cancel_stale(self) -> None:
        if self._stale_timer is not None:
            self._stale_timer.cancel()
            self._stale_timer = None
