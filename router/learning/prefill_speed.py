"""How fast an engine prefills: tokens per second, and a fixed cost per request."""

from __future__ import annotations

from collections import deque
from typing import Final

PRIOR_TOKENS_PER_S: Final = 10_000.0
PRIOR_FIXED_S: Final = 0.010
LOWEST_TOKENS_PER_S, HIGHEST_TOKENS_PER_S = 10.0, 2_000_000.0  # no engine is slower or faster
LARGE_TOKENS: Final = 256  # uncached, from which a quiet sample says something about the speed
SMALL_TOKENS: Final = 64  # uncached, up to which it says something about the fixed cost
MAX_FIXED_S: Final = 0.25
WINDOW: Final = 31
BUSY_TOKENS, BUSY_REQUESTS = 4096, 4  # a busy stretch long enough to count
BUSY_BIAS: Final = 2.0  # how much slower a busy stretch looks, for the decode steps in it (1.7 to 2.9 on a real engine)
REPORTED_TOKENS, REPORTED_REQUESTS = 4096, 4
MAX_OVERLAP: Final = 0.7  # prefill seconds per second, above which the engine's own sums count batched prefills twice
FASTER: Final = 1.25  # how far the engine's own figure must be above ours to win


def _middle(samples: deque[float]) -> float:
    return sorted(samples)[len(samples) // 2]


class PrefillSpeed:
    """One engine's speed, from the best of three sources.

    Quiet samples: the time to first token of a large uncached prompt on an engine with nothing else to do; their
    median. The engine's own `vllm:request_prefill_time_seconds` against the tokens it computed, where it exports them
    and prefills did not overlap: it stands in while quiet samples lack, and corrects them upwards (a slow quiet sample
    may have had company that we did not see; a fast one cannot be helped). Last, the throughput of a stretch without a
    gap: a lower bound, so it corrects a prior that is far off, and gives way to both others.
    A fit of both parameters at once put all on the fixed cost; hence the small quiet prompts for that.
    """

    __slots__ = (
        "_busy",
        "_busy_requests",
        "_busy_since",
        "_busy_tokens",
        "_prior",
        "_quiet",
        "_reported",
        "_reported_requests",
        "_reported_s",
        "_reported_tokens",
        "_small",
        "_stretch_elapsed_s",
        "_stretch_requests",
        "_stretch_s",
        "_stretch_tokens",
        "_stretch_whole",
        "fixed_s",
        "learned",
        "tokens_per_s",
    )

    def __init__(self, prior_tokens_per_s: float = PRIOR_TOKENS_PER_S) -> None:
        self.tokens_per_s = self._prior = prior_tokens_per_s
        self.fixed_s = PRIOR_FIXED_S
        self.learned = False
        self._quiet: deque[float] = deque(maxlen=WINDOW)
        self._small: deque[float] = deque(maxlen=WINDOW)
        self._reported: deque[float] = deque(maxlen=WINDOW)
        self._busy: deque[float] = deque(maxlen=WINDOW)
        self._busy_since = 0.0
        self._busy_tokens = self._busy_requests = 0
        self._reported_tokens = self._reported_s = self._reported_requests = 0.0
        self._stretch_tokens = self._stretch_s = self._stretch_requests = self._stretch_elapsed_s = 0.0
        self._stretch_whole = False  # it began at a settled poll

    def quiet(self, uncached_tokens: int, seconds: float) -> bool:
        """A request that had the engine for itself until its first token. True if an estimate may have changed."""
        if uncached_tokens <= SMALL_TOKENS:
            self._small.append(seconds - uncached_tokens / self.tokens_per_s)
            self.fixed_s = min(max(_middle(self._small), 0.0), MAX_FIXED_S)
            return True
        if uncached_tokens < LARGE_TOKENS:
            return False
        # The fixed cost is never taken for the greater part: it may have been learned under other circumstances.
        took_s = max(seconds - self.fixed_s, seconds / 2.0)
        if took_s * HIGHEST_TOKENS_PER_S < uncached_tokens:
            return False
        self._quiet.append(uncached_tokens / took_s)
        return self._estimate()

    def busy_began(self, now: float) -> None:
        self._busy_since = now
        self._busy_tokens = self._busy_requests = 0

    def busy_prefilled(self, uncached_tokens: int, now: float, *, idle: bool) -> bool:
        """A prefill ended in a stretch without a gap; `idle`: it was the last one waiting."""
        self._busy_tokens += uncached_tokens
        self._busy_requests += 1
        changed = False
        if self._busy_tokens >= BUSY_TOKENS and self._busy_requests >= BUSY_REQUESTS:
            took = now - self._busy_since
            if took > 0.0:
                self._busy.append(self._busy_tokens / took)
                changed = self._estimate()
            self.busy_began(now)
        elif idle:
            self.busy_began(now)
        return changed

    def reported(
        self, tokens: float, seconds: float, requests: float, elapsed_s: float, *, settled: bool = True
    ) -> bool:
        """What the engine counted between two polls: computed prompt tokens, prefill seconds, requests prefilled.

        `settled`: no prefill was under way at the second poll. The engine counts tokens when a prefill starts and
        seconds when it ends, so sums belong together only from one settled poll to the next.
        """
        if requests < 0 or tokens < 0 or seconds < 0 or elapsed_s <= 0:
            self._stretch_whole = False
        self._stretch_tokens += tokens
        self._stretch_s += seconds
        self._stretch_requests += requests
        self._stretch_elapsed_s += elapsed_s
        if not settled:
            return False
        if self._stretch_whole and 0.0 < self._stretch_s <= MAX_OVERLAP * self._stretch_elapsed_s:
            self._reported_tokens += self._stretch_tokens
            self._reported_s += self._stretch_s
            self._reported_requests += self._stretch_requests
        self._stretch_whole = True
        self._stretch_tokens = self._stretch_s = self._stretch_requests = self._stretch_elapsed_s = 0.0
        if self._reported_tokens < REPORTED_TOKENS or self._reported_requests < REPORTED_REQUESTS:
            return False
        net_s = max(self._reported_s - self.fixed_s * self._reported_requests, self._reported_s / 2.0)
        self._reported.append(self._reported_tokens / net_s)
        self._reported_tokens = self._reported_s = self._reported_requests = 0.0
        return self._estimate()

    def _estimate(self) -> bool:
        reported = _middle(self._reported) if self._reported else None
        if self._quiet:
            speed = _middle(self._quiet)
            if reported is not None and reported > FASTER * speed:
                speed = reported
        elif reported is not None:
            speed = reported
        elif len(self._busy) >= 2:
            seen = _middle(self._busy)
            speed = max(min(self._prior, BUSY_BIAS * seen), seen)
        else:
            return False
        before = self.tokens_per_s
        self.tokens_per_s = min(max(speed, LOWEST_TOKENS_PER_S), HIGHEST_TOKENS_PER_S)
        self.learned = True
        return self.tokens_per_s != before
