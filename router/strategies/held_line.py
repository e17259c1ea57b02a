"""The held line: who is better kept here than sent into a queue that its engine already has.

An engine batches what waits: to send it less than one batch (vLLM's max_num_batched_tokens) of uncached work would
leave its steps empty, and what is beyond that only waits there, in the order of its arrival and committed to that
engine. Held here instead, requests go shortest first, each where it is best at that moment.
"""

from __future__ import annotations

from typing import Final

from router.clock import Clock
from router.strategies.prefix_affinity import PrefixAffinity
from router.strategies.strategy import Choice

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

    def over_s(self, choice: Choice) -> float:
        """Seconds until the chosen engine has less than a batch of our work ahead, by what is known now; 0 where the
        request is to be sent. One whose oldest request is far later than it should be is not waited for."""
        engine = self._placement.engine(choice.backend)
        if engine is None:
            return 0.0
        now = self._now()
        ledger = engine.ledger
        ledger.advance(now)
        if ledger.late_s(now) > LATE_S:
            return 0.0
        return max(ledger.wait_s(now) - self.batch_tokens * engine.seconds_per_token, 0.0)
