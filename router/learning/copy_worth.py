"""When a further copy of a hot prefix has earned its price.

Each choice by itself sends a prompt where its prefix is warm, so nobody would ever pay for the second copy, and the one
engine that has it would take all. It is the question of renting or buying skis, per prefix: every request that is
served from a copy pays in what further copies are worth, and once the sum reaches the prefill that a copy costs, the
next request may make one. What is paid in is (1) the wait that another engine would have spared it, so a prefix spreads
at the pace at which its engine fills up, before it saturates; and (2) an eighth of what a cheap copy saves it, so a
system prompt spreads under strictly serial traffic too, at a price bounded by that part of what caching saves.

A prefix is known by the block at which a prompt's longest match ends. Conversations that share a system prompt end
their first match at the same block; the turns of one conversation end each at another one, so its history is never
spread for its own sake.
"""

from __future__ import annotations

from collections import OrderedDict
from math import exp
from typing import Final

LIMIT: Final = 4096  # prefixes remembered
MEMORY_S: Final = 300.0
SHARE: Final = 0.125  # of the prefill saved, paid in at each use
CHEAP_S: Final = 0.25  # copies dearer than this earn that share more slowly: one request pays for them with its TTFT
CAP: Final = 4.0  # an account holds at most the prefill of so many copies


class CopyAccounts:
    """Seconds paid in per prefix, fading over 300 s; the least recently used of more than 4,096 prefixes go."""

    __slots__ = ("_accounts", "_limit")

    def __init__(self, limit: int = LIMIT) -> None:
        if limit < 1:
            raise ValueError("limit must be at least 1")
        self._limit = limit
        # prefix -> seconds, as of; least recently used first. A plain dict would search its holes for the first.
        self._accounts: OrderedDict[int, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._accounts)

    def __contains__(self, prefix: int) -> bool:
        """Whether the prefix was used before."""
        return prefix in self._accounts

    def balance_s(self, prefix: int, now: float) -> float:
        entry = self._accounts.get(prefix)
        if entry is None:
            return 0.0
        return entry[0] * exp((entry[1] - now) / MEMORY_S)

    def served(self, prefix: int, saved_s: float, spared_s: float, now: float) -> None:
        """A copy served: it saved `saved_s` of prefill; a copy elsewhere would have spared `spared_s` of wait."""
        share = SHARE if saved_s <= CHEAP_S else SHARE * CHEAP_S / saved_s
        self._put(prefix, min(self.balance_s(prefix, now) + share * saved_s + spared_s, CAP * saved_s), now)

    def copied(self, prefix: int, price_s: float, now: float) -> None:
        """A request made a further copy, for whatever reason."""
        if prefix in self._accounts:
            self._put(prefix, max(self.balance_s(prefix, now) - price_s, 0.0), now)

    def _put(self, prefix: int, seconds: float, now: float) -> None:
        accounts = self._accounts
        accounts[prefix] = (seconds, now)
        accounts.move_to_end(prefix)
        if len(accounts) > self._limit:
            accounts.popitem(last=False)
