"""What an engine still has to prefill for us, from our own bookkeeping: current where its metrics are seconds old."""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum, auto
from typing import Final


class Phase(Enum):
    """Where an entry stood when it left."""

    WAITING = auto()  # not yet at its first token
    DECODING = auto()


INFINITE: Final = float("inf")
_WAITING: Final = Phase.WAITING
_DECODING: Final = Phase.DECODING


class PrefillLedger:
    """The attempts open on one engine. Each goes in once and comes out once; what is not in is ignored.

    `pending_s`: seconds of prefill of those not yet at their first token. `kv_tokens`: KV tokens that all of them
    bring, `decoding_kv_tokens` those of the attempts past their first token. All are exactly zero when nothing is open.
    A silent attempt (an answer in one piece) does not show its first token: it counts as past it when the engine has
    had the time.
    """

    __slots__ = (
        "_decoding",
        "_oldest_s",
        "_oldest_silent",
        "_since",
        "_waiting",
        "decoding",
        "decoding_kv_tokens",
        "kv_tokens",
        "pending_s",
    )

    def __init__(self) -> None:
        self.pending_s = 0.0
        self.kv_tokens = 0
        self.decoding_kv_tokens = 0
        self.decoding = 0  # attempts past their first token
        # work, KV tokens, silent; in order of sending, which is the engine's order
        self._waiting: dict[Hashable, tuple[float, int, bool]] = {}
        self._decoding: dict[Hashable, int] = {}
        self._since = 0.0  # when the engine took the oldest of those waiting
        self._oldest_s = 0.0
        self._oldest_silent = False

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting) + len(self._decoding)

    def __contains__(self, attempt: Hashable) -> bool:
        return attempt in self._decoding or attempt in self._waiting

    def wait_s(self, now: float) -> float:
        """Seconds of prefill ahead of a new arrival. Those behind an oldest that shows its first token cannot have
        begun before that, however late it is."""
        worked = now - self._since
        if worked > self._oldest_s and not self._oldest_silent:
            worked = self._oldest_s
        wait = self.pending_s - worked
        return wait if wait > 0.0 else 0.0

    def falls_to_s(self, level_s: float, now: float) -> float:
        """Seconds until wait_s is down to `level_s`; infinite where that takes a first token. After advance(now)."""
        over_s = self.wait_s(now) - level_s
        rest_s = max(self._oldest_s - (now - self._since), 0.0)
        ahead_s = 0.0
        for at, (work_s, _, silent) in enumerate(self._waiting.values()):
            if at:
                rest_s = work_s
            if over_s <= rest_s:
                return ahead_s + max(over_s, 0.0)
            over_s -= rest_s
            ahead_s += rest_s
            if not silent:
                return INFINITE
        return ahead_s

    def late_s(self, now: float) -> float:
        """How much longer than twice its work the oldest attempt takes; below 0 while it does not."""
        return now - self._since - 2.0 * self._oldest_s if self._waiting else -1.0

    def sent(self, attempt: Hashable, work_s: float, kv_tokens: int, now: float, *, silent: bool = False) -> None:
        if attempt in self:
            raise ValueError("this attempt is in the ledger already")
        self.advance(now)
        first = not self._waiting
        self._waiting[attempt] = (work_s, kv_tokens, silent)
        self.pending_s += work_s
        self.kv_tokens += kv_tokens
        if first:
            self._take_oldest(now)

    def first_token(self, attempt: Hashable, now: float) -> bool:
        """False for an attempt that is not waiting."""
        entry = self._leave(attempt, now)
        if entry is None:
            return False
        self._decodes(attempt, entry[1])
        return True

    def ended(self, attempt: Hashable, now: float) -> Phase | None:
        """Where it stood, None for an attempt that is not in the ledger."""
        self.advance(now)
        decoded = self._decoding.pop(attempt, None)
        if decoded is not None:
            self.decoding_kv_tokens -= decoded
            self.kv_tokens -= decoded
            self.decoding -= 1
            return _DECODING
        entry = self._leave(attempt, now)
        if entry is None:
            return None
        self.kv_tokens -= entry[1]
        return _WAITING

    def advance(self, now: float) -> None:
        """Let silent attempts pass whose prefill must be over."""
        while self._oldest_silent and now - self._since >= self._oldest_s:
            attempt = next(iter(self._waiting))
            entry = self._leave(attempt, self._since + self._oldest_s)
            assert entry is not None
            self._decodes(attempt, entry[1])

    def _decodes(self, attempt: Hashable, kv_tokens: int) -> None:
        self._decoding[attempt] = kv_tokens
        self.decoding_kv_tokens += kv_tokens
        self.decoding += 1

    def _leave(self, attempt: Hashable, now: float) -> tuple[float, int, bool] | None:
        waiting = self._waiting
        entry = waiting.get(attempt)
        if entry is None:
            return None
        was_oldest = next(iter(waiting)) is attempt
        del waiting[attempt]
        self.pending_s -= entry[0]
        if was_oldest:
            self._take_oldest(now)
        return entry

    def _take_oldest(self, now: float) -> None:
        self._since = now
        if self._waiting:
            self._oldest_s, _, self._oldest_silent = next(iter(self._waiting.values()))
        else:
            self.pending_s = self._oldest_s = 0.0  # exactly: rounding must not add up over a lifetime
            self._oldest_silent = False
