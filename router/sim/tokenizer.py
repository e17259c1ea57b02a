"""The simulated engine's tokenizer: deterministic, about 4 bytes a token, and prefix-stable.

A text is cut into pieces of 4 bytes (the last one may be shorter); a piece's id is its value as a little-endian
integer modulo a prime. So the tokens of a text's prefix are a prefix of its tokens, up to the last one, whatever the
text is; and an answer of the engine, made of 4-byte words, has the same ids when it comes back in the next turn.
Special tokens are never read out of text. Two pieces share an id with a chance of 1 in 131,071.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from enum import IntEnum

import xxhash

PIECE_BYTES = 4
TEXT_IDS = 131_071  # prime
TAIL_SHIFT = 7_919  # keeps a short last piece apart from the whole piece with the same value


class Special(IntEnum):
    """Ids above those of text."""

    MESSAGE_START = TEXT_IDS
    MESSAGE_END = TEXT_IDS + 1
    TOOL_CALL = TEXT_IDS + 2
    TOOL_CALL_END = TEXT_IDS + 3
    IMAGE = TEXT_IDS + 4


SPECIAL_TEXT = {
    Special.MESSAGE_START: b"<|im_start|>",
    Special.MESSAGE_END: b"<|im_end|>",
    Special.TOOL_CALL: b"<tool_call>",
    Special.TOOL_CALL_END: b"</tool_call>",
    Special.IMAGE: b"<|image|>",
}
VOCABULARY = TEXT_IDS + 16

Tokens = array  # of typecode "I": 4 bytes a token
Segment = bytes | Special


def tokenize_text(text: bytes) -> array[int]:
    """Ids of one stretch of text."""
    whole = len(text) - len(text) % PIECE_BYTES
    values = array("I")
    values.frombytes(text[:whole])
    tokens = array("I", [value % TEXT_IDS for value in values])
    if whole != len(text):
        tail = text[whole:]
        tokens.append((int.from_bytes(tail, "little") + TAIL_SHIFT * len(tail)) % TEXT_IDS)
    return tokens


def tokenize_segments(segments: Iterable[Segment]) -> array[int]:
    """Ids of a rendered chat: each stretch of text by itself, special tokens as they are."""
    tokens = array("I")
    for segment in segments:
        if isinstance(segment, Special):
            tokens.append(segment)
        elif segment:
            tokens.extend(tokenize_text(segment))
    return tokens


def block_hashes(tokens: Sequence[int], block_size: int, extra: bytes = b"") -> list[int]:
    """One chained 64-bit hash per full block; `extra` (cache_salt, adapter) makes a different chain."""
    data = memoryview(array("I", tokens)).cast("B")
    width = 4 * block_size
    digest = xxhash.xxh3_64_intdigest
    # vLLM's chain also starts from a constant of the process, not from nothing.
    parent = digest(b"kvgate-sim" + extra)
    hashes: list[int] = []
    for start in range(0, len(data) - width + 1, width):
        parent = digest(data[start : start + width], parent)
        hashes.append(parent)
    return hashes


class TokenTexts:
    """Pieces seen by /tokenize, for /detokenize: an id does not tell its text. The oldest go first."""

    def __init__(self, limit: int = 65_536) -> None:
        self._limit = limit
        self._texts: OrderedDict[int, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._texts)

    def learn(self, text: bytes) -> None:
        for position, token in enumerate(tokenize_text(text)):
            self._texts[token] = text[position * PIECE_BYTES : (position + 1) * PIECE_BYTES]
            self._texts.move_to_end(token)
            if len(self._texts) > self._limit:
                self._texts.popitem(last=False)

    def text_of(self, token: int) -> bytes:
        """The piece last seen with this id; a word of 4 bytes for one never seen."""
        if token >= TEXT_IDS:
            return SPECIAL_TEXT.get(Special(token), b"") if token in Special._value2member_map_ else b""
        return self._texts.get(token) or b"%04x" % (token % 65_536)

    def detokenize(self, tokens: Iterable[int]) -> str:
        return b"".join(map(self.text_of, tokens)).decode("utf-8", "replace")
