"""The held line: who is better kept here than sent into a queue that its engine already has.

An engine batches what waits: to send it less than one batch (vLLM's max_num_batched_tokens) of uncached work would
leave its steps empty, and what is beyond that only waits there, in the order of its arrival and committed to that
engine. Held here instead, requests go shortest first, each where it is best at that moment.
"""

from __future__ import annotations

from typing import Final

from router.backends.backend import Backend
from router.clock import Clock
from router.strategies.prefix_affinity import PrefixAffinity

USUAL_BATCH_TOKENS: Final = 2048  # vLLM's default, where chunked prefill is on
LATE_S: Final = 1.0  # so much longer than twice its estimate an oldest request makes an engine's work unknown


class HeldLine:
    """`batch_tokens`: of uncached work that each engine gets before further requests are held."""

    def __init__(self, clock: Clock, placement: PrefixAffinity, batch_tokens: int) -> None:
        if batch_tokens < 1:
            raise ValueError("batch_tokens must be at least 1")
        self._now = clock.now
        self._placement = placement
        self.batch_tokens = batch_tokens

    def over_s(self, backend: Backend) -> float:
        """Seconds until this engine may get more, by what is known now, if no first token tells it before; 0 where it
        may now. One whose oldest request is far later than it should be is not waited for."""
        engine = self._placement.engine(backend)
        if engine is None:
            return 0.0
        now = self._now()
        ledger = engine.ledger
        ledger.advance(now)
        batch_s = self.batch_tokens * engine.seconds_per_token
        if ledger.wait_s(now) <= batch_s:
            return 0.0
        until_late_s = LATE_S - ledger.late_s(now)
        return max(min(ledger.falls_to_s(batch_s, now), until_late_s), 0.0)
