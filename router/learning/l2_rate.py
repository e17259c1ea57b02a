"""How much of what an engine does not hold itself it finds in the store behind it, where that cannot be asked."""

from __future__ import annotations

from typing import Final

ENOUGH_TOKENS: Final = 4096.0  # queried, from which a share says something
MEMORY_TOKENS: Final = 200_000.0  # queried; what was seen so many tokens ago counts a third


class L2Rate:
    """One engine's share of hits, 0 to 1, from its counters `vllm:external_prefix_cache_queries` and `_hits`.

    Both count tokens: those that its own cache lacked, and those of them that came from outside. `rate` is None where
    the engine does not export them, or has not asked enough yet. Tokens weigh alike, so one long prompt counts as much
    as many short ones; a counter that went back is another engine process, whose store may be another too.
    """

    __slots__ = ("_hit_tokens", "_last_hits", "_last_queries", "_tokens")

    def __init__(self) -> None:
        self._last_queries = -1.0  # below 0: none yet
        self._last_hits = 0.0
        self._tokens = 0.0
        self._hit_tokens = 0.0

    @property
    def rate(self) -> float | None:
        if self._tokens < ENOUGH_TOKENS:
            return None
        return self._hit_tokens / self._tokens

    def counted(self, queries: float | None, hits: float | None) -> None:
        """The totals of a poll, in tokens; None where the engine does not tell."""
        if queries is None or hits is None:
            self._start_over()
            self._last_queries = -1.0
            return
        if queries < self._last_queries or hits < self._last_hits:
            self._start_over()
        elif self._last_queries >= 0.0:
            asked = queries - self._last_queries
            fade = max(1.0 - asked / MEMORY_TOKENS, 0.0)
            self._tokens = self._tokens * fade + asked
            # Hits may be counted a poll after their query.
            self._hit_tokens = min(self._hit_tokens * fade + hits - self._last_hits, self._tokens)
        self._last_queries = queries
        self._last_hits = hits

    def _start_over(self) -> None:
        self._tokens = self._hit_tokens = 0.0
