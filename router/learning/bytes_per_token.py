"""How many bytes of a routing prefix make one token of a model's prompt."""

from __future__ import annotations

from collections import deque
from typing import Final

PRIOR: Final = 4.0  # English text in today's vocabularies
LOWEST, HIGHEST = 0.5, 32.0  # outside of it a sample says something about images or errors, not about text
MIN_TOKENS: Final = 32  # below it the chat template's own tokens outweigh the text
WINDOW: Final = 63
EVERY: Final = 8  # samples between two medians once there are some: a sort of the window costs about 5 us


class BytesPerToken:
    """The median of the last 63 answers' bytes per `usage.prompt_tokens`, 4.0 before the first.

    A median, because a prompt with an image has few bytes and many tokens.
    """

    __slots__ = ("_samples", "_seen", "ratio")

    def __init__(self) -> None:
        self.ratio = PRIOR
        self._samples: deque[float] = deque(maxlen=WINDOW)
        self._seen = 0

    def observe(self, prefix_bytes: int, prompt_tokens: int) -> bool:
        """True if the ratio changed. Small prompts and impossible figures teach nothing."""
        if prompt_tokens < MIN_TOKENS or prefix_bytes <= 0:
            return False
        sample = prefix_bytes / prompt_tokens
        if not LOWEST <= sample <= HIGHEST:
            return False
        self._samples.append(sample)
        self._seen += 1
        if self._seen > EVERY and self._seen % EVERY:
            return False
        before = self.ratio
        self.ratio = sorted(self._samples)[len(self._samples) // 2]
        return self.ratio != before
