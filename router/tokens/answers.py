"""What comes back: token ids, or one of a few words for why there are none."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

EMPTY: Final = "a prompt without tokens, which engines refuse"


class Why(StrEnum):
    """Why there are no token ids. Each is a metric label, and none tells anything of a prompt."""

    OFF = "off"  # no way to tokenize for this model: Tokens.state() says why
    STARTING = "starting"  # the tokenizer is being read, or its self-test has not ended
    SHAPE = "shape"  # a body that we cannot read, or that the engine will refuse
    PATH = "path"  # a path whose prompt only the engine can build
    MEDIA = "media"  # pictures, sound, files, embeddings
    UNCERTAIN = "uncertain"  # engines differ, or the prompt is changed after its rendering: a guess could be wrong
    TEMPLATE = "template"  # the template refused it
    TOO_BIG = "too-big"
    BUSY = "busy"  # a queue is full
    LATE = "late"  # not within the deadline
    ENGINE = "engine-failed"  # /tokenize failed, or rests after failing


@dataclass(frozen=True, slots=True)
class TokenIds:
    """`ids` are the whole prompt: 4-byte unsigned items in the machine's order. `source`: given | local | engine.
    `salt`: the request's cache_salt."""

    ids: array[int]
    source: str
    cached: int = 0  # how many of them came from the cache
    salt: str | None = None


@dataclass(frozen=True, slots=True)
class NoTokens:
    """`detail` is a sentence of ours for people; it never quotes a request."""

    why: Why
    detail: str = ""


Answer = TokenIds | NoTokens


class Refused(Exception):
    """No ids for this request, and that is no fault: it becomes a NoTokens."""

    def __init__(self, why: Why, detail: str) -> None:
        super().__init__(detail)
        self.why = why
        self.detail = detail

    def answer(self) -> NoTokens:
        return NoTokens(self.why, self.detail)
