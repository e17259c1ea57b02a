"""How one engine is known: by its events, by the mirror, or by its load alone; as far as its reports bear them out."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from router.learning.trust import Trust

AGAIN_S: Final = 600.0  # a fall within so many seconds after a resync is not cured by another
NEVER: Final = float("-inf")


class Level(StrEnum):
    """What a choice may go by."""

    EVENTS = "events"
    MIRROR = "mirror"
    LOAD = "load"


_EVENTS: Final = Level.EVENTS
_MIRROR: Final = Level.MIRROR
_LOAD: Final = Level.LOAD


class Standing:
    """Two trusts, each compared with every report whether it was gone by or not: so one that fell can rise again.

    When the trust in events falls, the first cure is to hear them all again; the next fall within ten minutes leaves
    the engine to the mirror until the events are right again. Where the mirror is wrong too, load alone is left.
    """

    __slots__ = ("events", "level", "mirror", "resynced_at", "resyncs")

    def __init__(self) -> None:
        self.events = Trust()
        self.mirror = Trust()
        self.level = _MIRROR  # as it was last told
        self.resynced_at = NEVER
        self.resyncs = 0

    def compare_events(self, predicted: int, reported: int, now: float, *, allowance: int, answers: int = 1) -> bool:
        """True where the events are to be heard again. More than predicted contradicts events as less does: nothing is
        in an engine that they do not tell."""
        events = self.events
        was_lost = events.lost
        events.compare(predicted, reported, allowance=allowance, answers=answers, both_ways=True)
        if was_lost or not events.lost or now - self.resynced_at < AGAIN_S:
            return False
        self.resynced_at = now
        self.resyncs += 1
        events.start_over()
        return True

    def level_where(self, told: bool) -> Level:
        """What to go by; `told`: its events are complete and up to date."""
        if told and not self.events.lost:
            return _EVENTS
        return _LOAD if self.mirror.lost else _MIRROR
