"""What a question to the shared store ends with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from router.clock import TimerHandle


class Why(StrEnum):
    """Where an answer comes from; from `OFF` on, why there is none."""

    STORE = "store"  # asked just now
    REMEMBERED = "remembered"  # asked a moment ago
    SHORT = "short"  # less than a chunk: nothing of it can be there
    OFF = "off"  # the model is not followed
    AWAY = "away"  # no connection
    SLOW = "slow"  # earlier questions are late already
    LATE = "late"  # this one came to be
    BUSY = "busy"  # too many keys are asked for
    LEARNING = "learning"  # how the store names this model's chunks is not known yet
    ADAPTER = "adapter"  # its names do not tell adapters apart
    SALT = "salt"  # its names do not tell salts apart, or cannot hold this one


KNOWN: Final = frozenset((Why.STORE, Why.REMEMBERED, Why.SHORT))


@dataclass(frozen=True, slots=True)
class L2Answer:
    """`tokens`: how many leading tokens of the prompt the store holds, in whole chunks, perhaps the last one too (an
    engine computes at least one token itself). None: unknown, which is not 0."""

    tokens: int | None
    why: Why

    @property
    def known(self) -> bool:
        return self.tokens is not None


class Lookup:
    """One request that waits for its answer. `answer` is set if it was known at once: `done` is then never called."""

    __slots__ = ("_timer", "answer", "asked_at", "done")

    def __init__(self, asked_at: float, done: Callable[[L2Answer], None]) -> None:
        self.asked_at = asked_at
        self.done: Callable[[L2Answer], None] | None = done
        self.answer: L2Answer | None = None
        self._timer: TimerHandle | None = None

    @property
    def open(self) -> bool:
        return self.done is not None

    def wait(self, timer: TimerHandle) -> None:
        self._timer = timer

    def cancel(self) -> None:
        """The client left: `done` is not called any more. Harmless when it was answered."""
        self.done = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
