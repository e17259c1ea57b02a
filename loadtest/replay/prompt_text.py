"""Prompts for block ids: equal ids give equal text, so prompts share text exactly where the trace says so.

A block is a run of common English words of three letters, which most tokenizers take as one token each, and which the
simulated engine's takes as exactly one. The words come from a hash of the id and of a salt: another salt gives prompts
that share nothing with those of any run before, so that no cache knows them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_THREE_LETTERS: Final = (
    "act add age ago aid aim air all and any arm art ask bad bag bar bed bet big bit box boy bus but buy can car cat "
    "cup cut day did dog dry due ear eat egg end eye far few fit fix fly for fun gas get god got gun guy had has hat "
    "her hey him his hit hot how ice its job joy key kid law lay led leg let lie log lot low man map may men met mix "
    "mom net new nor not now off oil old one our out own pay per pop put ran raw red run sat saw say sea see set she "
    "sir sit six son sun ten the tie tip too top two try use war way"
)
# A byte of the hash is a word.
WORDS: Final = tuple(f"{word} " for word in _THREE_LETTERS.split()) * 2
SAMPLE_ID: Final = -1  # no trace has it


@dataclass(frozen=True, slots=True)
class TokenScale:
    """How an engine counts: tokens for a word, and what its chat template adds to a prompt."""

    tokens_per_word: float = 1.0
    template_tokens: int = 0


class PromptText:
    """The prompts of one trace with blocks of `block_tokens`, for an engine with this scale."""

    def __init__(self, block_tokens: int, scale: TokenScale, salt: str) -> None:
        self._block_tokens = block_tokens
        self._scale = scale
        self._words_exactly = block_tokens / scale.tokens_per_word
        self._salt = salt.encode()

    def prompt(self, block_ids: Sequence[int], tokens: int) -> str:
        """About `tokens` tokens with the chat template's; a partly filled block is the beginning of the full one."""
        blocks = [self._block(block_id, self._words(block_id)) for block_id in block_ids[:-1]]
        rest = tokens - self._block_tokens * (len(block_ids) - 1) - self._scale.template_tokens
        last = max(1, round(rest / self._scale.tokens_per_word))
        blocks.append(self._block(block_ids[-1], min(last, self._words(block_ids[-1]))))
        return "".join(blocks).rstrip()

    def sample(self, words: int) -> str:
        """Text of this many words, to see how an engine counts."""
        return self._block(SAMPLE_ID, words).rstrip()

    def _words(self, block_id: int) -> int:
        """Words of a full block: a whole number that depends on the id alone and is right on average."""
        exactly = self._words_exactly
        whole = math.floor(exactly)
        chance = int.from_bytes(self._hash(b"size", block_id, 4), "big") / 2**32
        return max(1, whole + (chance < exactly - whole))

    def _block(self, block_id: int, words: int) -> str:
        return "".join(map(WORDS.__getitem__, self._hash(b"text", block_id, words)))

    def _hash(self, use: bytes, block_id: int, length: int) -> bytes:
        return hashlib.shake_128(b"%b\0%b\0%d" % (use, self._salt, block_id)).digest(length)
