"""Where a text may be cut so that the ids of the parts, one after the other, are the ids of the whole.

A tokenizer first takes out the added tokens that stand for themselves ("normalized": false), leftmost and longest
first, and then works on each stretch between them alone: normalizer, pre-tokenizer and model never see beyond. So a
text may be cut BEFORE such a token:
- what is matched left of it is matched in the left part as well, and what is matched from it on in the right part;
- the right part begins with the token, so no stretch becomes the first of a text that was not (some pre-tokenizers
  put a space before the first one only).
A token that swallows the spaces left of it ("lstrip") is no place to cut, and tokens that match whole words only
("single_word") look at their neighbours: with one of these, nothing is cut.

tests/unit/tokens/test_seams.py checks it against real tokenizers, and local.py while it runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

MIN_SEGMENT_CHARS: Final = 256  # shorter ones cost more to keep than to tokenize again
MAX_SEAM_TOKENS: Final = 8_192


class Seams:
    """The cuts for one tokenizer; `why_not` tells why there are none."""

    def __init__(self, tokenizer: Mapping[str, Any]) -> None:
        self.why_not = ""
        self._pattern: re.Pattern[str] | None = None
        self._no_cut: frozenset[str] = frozenset()
        added = [token for token in tokenizer.get("added_tokens") or () if token.get("content")]
        if any(token.get("single_word") for token in added):
            self.why_not = "the tokenizer has added tokens that match whole words only"
            return
        matched = [token for token in added if not token.get("normalized")]
        no_cut = frozenset(token["content"] for token in matched if token.get("lstrip"))
        if not matched or len(no_cut) == len(matched):
            self.why_not = "the tokenizer has no added tokens that stand for themselves"
            return
        if len(matched) > MAX_SEAM_TOKENS:
            self.why_not = f"the tokenizer has more than {MAX_SEAM_TOKENS} added tokens"
            return
        self._no_cut = no_cut
        longest_first = sorted((token["content"] for token in matched), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))

    def cut(self, text: str) -> list[str]:
        """The parts, at least one; joined they are `text`. Cuts of one text are cuts of each that it begins."""
        if self._pattern is None:
            return [text]
        parts = []
        start = 0
        for match in self._pattern.finditer(text):
            at = match.start()
            if at - start >= MIN_SEGMENT_CHARS and match.group() not in self._no_cut:
                parts.append(text[start:at])
                start = at
        parts.append(text[start:])
        return parts
