"""What an engine still has to prefill for us, from our own bookkeeping: current where its metrics are seconds old."""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum, auto


class Phase(Enum):
    """Where an entry stood when it left."""

    WAITING = auto()  # not yet at its first token
    DECODING = auto()


class PrefillLedger:
    """The attempts open on one engine. Each goes in once and comes out once; what is not in is ignored.

    `pending_s`: seconds of prefill of those not yet at their first token. `kv_tokens`: KV tokens that all of them
    bring, `decoding_kv_tokens` those of the attempts past their first token. All are exactly zero when nothing is open.
    """

    __slots__ = (
        "_decoding",
        "_oldest_s",
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
        self._waiting: dict[Hashable, tuple[float, int]] = {}  # in order of sending, which is the engine's order
        self._decoding: dict[Hashable, int] = {}
        self._since = 0.0  # when the engine took the oldest of those waiting
        self._oldest_s = 0.0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting) + len(self._decoding)

    def wait_s(self, now: float) -> float:
        """Seconds of prefill ahead of a new arrival. Those behind the oldest cannot have begun, however late it is."""
        worked = now - self._since
        return self.pending_s - (worked if worked < self._oldest_s else self._oldest_s)

    def sent(self, attempt: Hashable, work_s: float, kv_tokens: int, now: float) -> None:
        waiting = self._waiting
        if attempt in waiting or attempt in self._decoding:
            raise ValueError("this attempt is in the ledger already")
        if not waiting:
            self._since = now
            self._oldest_s = work_s
        waiting[attempt] = (work_s, kv_tokens)
        self.pending_s += work_s
        self.kv_tokens += kv_tokens

    def first_token(self, attempt: Hashable, now: float) -> bool:
        """False for an attempt that is not waiting."""
        kv_tokens = self._left_waiting(attempt, now)
        if kv_tokens is None:
            return False
        self._decoding[attempt] = kv_tokens
        self.decoding_kv_tokens += kv_tokens
        self.decoding += 1
        return True

    def ended(self, attempt: Hashable, now: float) -> Phase | None:
        """Where it stood, None for an attempt that is not in the ledger."""
        decoded = self._decoding.pop(attempt, None)
        if decoded is not None:
            self.decoding_kv_tokens -= decoded
            self.kv_tokens -= decoded
            self.decoding -= 1
            return Phase.DECODING
        kv_tokens = self._left_waiting(attempt, now)
        if kv_tokens is None:
            return None
        self.kv_tokens -= kv_tokens
        return Phase.WAITING

    def _left_waiting(self, attempt: Hashable, now: float) -> int | None:
        waiting = self._waiting
        entry = waiting.get(attempt)
        if entry is None:
            return None
        was_oldest = next(iter(waiting)) is attempt
        del waiting[attempt]
        if not waiting:
            self.pending_s = self._oldest_s = 0.0  # exactly: rounding must not add up over a lifetime
        else:
            self.pending_s -= entry[0]
            if was_oldest:
                self._since = now
                self._oldest_s = next(iter(waiting.values()))[0]
        return entry[1]
