"""Whether a failed attempt may be repeated on another backend.

| failed                                   | inference, reads     | changes, unknown POSTs |
|------------------------------------------|----------------------|------------------------|
| before the request was sent              | yes, free            | yes, free              |
| after it, before a byte went downstream  | yes, from the budget | no                     |
| after a byte went downstream             | no                   | no                     |
"""

from __future__ import annotations

from typing import Final

from router.wire.paths import PathKind

BURST: Final = 200.0  # repeats that one death of a busy engine may need at once


class RetryBudget:
    """A share of requests that may be repeats, with a burst: each request earns `share`, each repeat costs one."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._burst = BURST if share > 0 else 0.0
        self._left = self._burst

    def earn(self) -> None:
        if self._left < self._burst:
            self._left = min(self._left + self._share, self._burst)

    def spend(self) -> bool:
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


def may_repeat(kind: PathKind, *, sent: bool, downstream_begun: bool) -> bool:
    """The table above, the budget apart. `sent`: any byte of the request may have reached the engine."""
    if downstream_begun:
        return False
    return not sent or kind is not PathKind.CHANGE
