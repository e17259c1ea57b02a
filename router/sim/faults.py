"""Ways in which a simulated engine misbehaves, for tests of whoever talks to it.

A fault is on until it is cleared, or for `count` more requests. Faults never touch the /sim/ paths.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any


class FaultKind(StrEnum):
    """The comment names the value; `true` where there is nothing to choose."""

    REFUSE = "refuse"  # true: the port is closed and every connection is cut; seconds: for so long
    RESET = "reset"  # true: the connection is reset when an inference request has arrived
    STALL = "stall"  # true: an inference request is accepted and never answered; /health stays 200
    STALL_AFTER_HEAD = "stall-after-head"  # true: its head comes, nothing more
    STALL_AFTER_CHUNKS = "stall-after-chunks"  # events of the stream that still come
    RESET_AFTER_CHUNKS = "reset-after-chunks"  # events before the connection is reset (RST)
    CLOSE_AFTER_CHUNKS = "close-after-chunks"  # events before it is closed in order (FIN), without an end
    DIE_AFTER_CHUNKS = "die-after-chunks"  # events before the process is gone
    DRIP = "drip"  # seconds between two bytes of an answer
    STATUS = "status"  # 400, 429, 500 or 503: inference requests get it
    FIRST_EVENT_ERROR = "first-event-error"  # true: the first event of a stream is an error, then [DONE]
    KEEPALIVE_COMMENTS = "keepalive-comments"  # SSE comments before the first event
    TRAILING_BYTES = "trailing-bytes"  # bytes after the end of an answer
    CACHED_TOKENS = "cached-tokens"  # what usage reports, whatever the truth is
    SLOW_METRICS = "slow-metrics"  # seconds that /metrics takes
    BAD_MODELS = "bad-models"  # garbage, empty, error or hang
    UNHEALTHY = "unhealthy"  # true: /health is 503
    ENGINE_DEAD = "engine-dead"  # true: as after the death of the engine core: 500, streams end with an error
    LOSE_KV_EVENTS = "lose-kv-events"  # true: a batch of KV events is not sent, only kept for replay; once per count
    COLD_RESTART = "cold-restart"  # true: once; empty cache, counters and KV event sequence from 0, no event about it


BAD_MODELS = ("garbage", "empty", "error", "hang")
_FLAGS = {
    FaultKind.RESET,
    FaultKind.STALL,
    FaultKind.STALL_AFTER_HEAD,
    FaultKind.FIRST_EVENT_ERROR,
    FaultKind.UNHEALTHY,
    FaultKind.ENGINE_DEAD,
    FaultKind.COLD_RESTART,
    FaultKind.LOSE_KV_EVENTS,
}
_SECONDS = {FaultKind.DRIP, FaultKind.SLOW_METRICS}
CUTS = (
    FaultKind.STALL_AFTER_CHUNKS,
    FaultKind.RESET_AFTER_CHUNKS,
    FaultKind.CLOSE_AFTER_CHUNKS,
    FaultKind.DIE_AFTER_CHUNKS,
)
MAX_TRAILING_BYTES = 65_536
STATUSES = (400, 429, 500, 503)


def parse_value(kind: FaultKind, value: Any) -> Any:
    """The value as the fault needs it, None for off. ValueError says what was expected."""
    if value is None or value is False:
        return None
    if isinstance(value, str) and kind is not FaultKind.BAD_MODELS:
        try:
            value = True if value.lower() == "true" else float(value) if "." in value else int(value)
        except ValueError:
            raise ValueError(f"{kind}: {value!r} is not a number") from None
    if kind is FaultKind.BAD_MODELS:
        if value not in BAD_MODELS:
            raise ValueError(f"{kind}: expected one of {', '.join(BAD_MODELS)}")
        return value
    if kind in _FLAGS:
        if value is not True:
            raise ValueError(f"{kind}: expected true or false")
        return True
    if kind is FaultKind.REFUSE:
        if value is not True and (not isinstance(value, int | float) or value <= 0):
            raise ValueError(f"{kind}: expected true or seconds above 0")
        return value
    if value is True or not isinstance(value, int | float) or value < 0:
        raise ValueError(f"{kind}: expected a number of 0 or more")
    if kind in _SECONDS:
        return float(value)
    if not isinstance(value, int):
        raise ValueError(f"{kind}: expected a whole number")
    if kind is FaultKind.STATUS and value not in STATUSES:
        raise ValueError(f"{kind}: expected one of {', '.join(map(str, STATUSES))}")
    if kind is FaultKind.TRAILING_BYTES and value > MAX_TRAILING_BYTES:
        raise ValueError(f"{kind}: expected at most {MAX_TRAILING_BYTES}")
    return value


class Faults:
    """The faults that are on."""

    def __init__(self) -> None:
        self._values: dict[FaultKind, Any] = {}
        self._left: dict[FaultKind, int] = {}

    def set(self, kind: FaultKind, value: Any, count: int | None = None) -> None:
        """Switch on, for `count` requests if given; off with None or False. ValueError for a bad value."""
        value = parse_value(kind, value)
        if count is not None and (type(count) is not int or count < 1):
            raise ValueError("count: expected a whole number of 1 or more")
        self._values.pop(kind, None)
        self._left.pop(kind, None)
        if value is None:
            return
        self._values[kind] = value
        if count is not None:
            self._left[kind] = count

    def clear(self) -> None:
        self._values.clear()
        self._left.clear()

    def peek(self, kind: FaultKind) -> Any:
        """Its value, None if it is off."""
        return self._values.get(kind)

    def take(self, kind: FaultKind) -> Any:
        """Its value for one request, None if it is off; uses up one of its count."""
        value = self._values.get(kind)
        if value is not None and kind in self._left:
            self._left[kind] -= 1
            if not self._left[kind]:
                del self._values[kind], self._left[kind]
        return value

    def active(self) -> dict[str, Any]:
        return {kind.value: value for kind, value in self._values.items()}
