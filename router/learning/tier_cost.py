"""What a token costs an engine that it has not to compute, but has to fetch: from its host memory, or from the store
that it shares with others."""

from __future__ import annotations

from collections import deque
from typing import Final

from router.learning.prefill_speed import PRIOR_FIXED_S, PRIOR_TOKENS_PER_S

CPU_SHARE: Final = 0.1  # of computing a token, until it is learned
L2_SHARE: Final = 0.2
LEAST_TOKENS: Final = 256  # fetched, from which a sample says something
OTHER_SHARE: Final = 0.25  # of the fetched tokens, that the other tier may have had
WINDOW: Final = 31
LEAST_SAMPLES: Final = 3


class TierCost:
    """One engine's seconds per token fetched, from requests that had it for themselves until their first token.

    Of such a request's time, what computing its other tokens takes is known (`computing`); the rest was fetching. It
    teaches only where more tokens were fetched than computed, since the speed of computing is known to a fifth or so,
    and only about the tier that most came from. The middle of a window is taken, so a third of odd samples does no
    harm. A token never costs more than to compute it (an engine that loads more slowly than that is better off
    computing) nor less than nothing.
    """

    __slots__ = ("_cpu", "_fixed_s", "_l2", "_token_s")

    def __init__(self) -> None:
        self._token_s = 1.0 / PRIOR_TOKENS_PER_S
        self._fixed_s = PRIOR_FIXED_S
        self._cpu: deque[float] = deque(maxlen=WINDOW)
        self._l2: deque[float] = deque(maxlen=WINDOW)

    @property
    def cpu_s(self) -> float:
        return self._cost_s(self._cpu, CPU_SHARE)

    @property
    def l2_s(self) -> float:
        return self._cost_s(self._l2, L2_SHARE)

    @property
    def cpu_learned(self) -> bool:
        return len(self._cpu) >= LEAST_SAMPLES

    @property
    def l2_learned(self) -> bool:
        return len(self._l2) >= LEAST_SAMPLES

    def _cost_s(self, samples: deque[float], share: float) -> float:
        if len(samples) < LEAST_SAMPLES:
            return share * self._token_s
        return min(max(sorted(samples)[len(samples) // 2], 0.0), self._token_s)

    def computing(self, tokens_per_s: float, fixed_s: float) -> None:
        """The engine's prefill as it is known now (PrefillSpeed), above 0 tokens per second."""
        self._token_s = 1.0 / tokens_per_s
        self._fixed_s = fixed_s

    def observe(self, gpu_tokens: int, cpu_tokens: int, l2_tokens: int, computed_tokens: int, seconds: float) -> bool:
        """A quiet request's prompt by where its tokens came from, and its seconds to the first token. Those of the GPU
        cost nothing. True if it taught something."""
        fetched = cpu_tokens + l2_tokens
        if min(gpu_tokens, cpu_tokens, l2_tokens, computed_tokens) < 0 or not 0.0 <= seconds < float("inf"):
            return False
        if fetched < LEAST_TOKENS or computed_tokens > fetched:
            return False
        if min(cpu_tokens, l2_tokens) > OTHER_SHARE * fetched:
            return False
        left_s = seconds - self._fixed_s - computed_tokens * self._token_s
        if cpu_tokens > l2_tokens:
            self._cpu.append((left_s - l2_tokens * self.l2_s) / cpu_tokens)
        else:
            self._l2.append((left_s - cpu_tokens * self.cpu_s) / l2_tokens)
        return True

    def start_over(self) -> None:
        """Another engine process: perhaps with other memory behind it."""
        self._cpu.clear()
        self._l2.clear()
