"""What the simulated engine answers: made from the prompt's hash alone, so that equal prompts get equal answers.

An answer is a list of 4-byte pieces, one a token: words of a small vocabulary, or the text of a JSON document where
the request asks for a tool call or for a schema. It is ASCII, so a piece goes into JSON as it is once quotes and
backslashes are escaped.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import orjson

from router.sim.engine_model import Finish
from router.sim.tokenizer import PIECE_BYTES, tokenize_text

_THREE_LETTERS = (
    "the and for are but not you all any can had her was one our out day get has him his how man new now old see two "
    "way who did its let put say she too use map run set key top end low raw bit row net log hot try add big few far "
    "yet own per due sum max min ask air arm art bag bar bed box boy bus car cat cup cut dog dry ear eat egg eye fit "
    "fix fly fun gas hat hit ice ink job joy kid leg lie lot mix mud"
)
WORDS = tuple(f" {word}" for word in _THREE_LETTERS.split())
MAX_SCHEMA_DEPTH = 8
MAX_SCHEMA_FIELDS = 64


class Answer:
    """Pieces and their ids; `finish` is the reason when all of them are given, `stop` the string that ended it."""

    __slots__ = ("finish", "pieces", "stop", "tokens")

    def __init__(
        self, pieces: Sequence[str], tokens: array[int], finish: Finish = Finish.LENGTH, stop: str | None = None
    ) -> None:
        self.pieces = pieces
        self.tokens = tokens
        self.finish = finish
        self.stop = stop

    def __len__(self) -> int:
        return len(self.tokens)


def words(seed: int, count: int, finish: Finish, stops: Sequence[str] = ()) -> Answer:
    """`count` words; cut at the first of the stop strings that turns up."""
    pieces = Random(seed).choices(WORDS, k=count)
    stop = None
    if stops:
        text = "".join(pieces)
        found = [(text.find(candidate), candidate) for candidate in stops if candidate]
        hits = [hit for hit in found if hit[0] >= 0]
        if hits:
            at, stop = min(hits)
            # The tokens that make up the stop string were generated; its text is not shown.
            generated = (at + len(stop) - 1) // PIECE_BYTES + 1
            shown = text[:at]
            pieces = [shown[start : start + PIECE_BYTES] for start in range(0, generated * PIECE_BYTES, PIECE_BYTES)]
            return Answer(pieces, tokenize_text(text[: generated * PIECE_BYTES].encode()), Finish.STOP, stop)
    return Answer(pieces, tokenize_text("".join(pieces).encode()), finish, stop)


def document(text: str, limit: int) -> Answer:
    """A given text, cut at `limit` tokens."""
    tokens = tokenize_text(text.encode())
    finish = Finish.STOP
    if len(tokens) > limit:
        tokens = tokens[:limit]
        finish = Finish.LENGTH
    count = len(tokens)
    return Answer([text[at * PIECE_BYTES : (at + 1) * PIECE_BYTES] for at in range(count)], tokens, finish)


def json_for_schema(schema: Any, seed: int) -> str:
    """The text of a JSON value that fits a (simple) JSON schema."""
    return orjson.dumps(_value(schema, Random(seed), 0)).decode("ascii", "replace")


def _bound(schema: Mapping[str, Any], name: str, otherwise: float) -> float:
    value = schema.get(name)
    return value if isinstance(value, int | float) and abs(value) < 2**53 else otherwise


def _value(schema: Any, random: Random, depth: int) -> Any:
    if not isinstance(schema, Mapping) or depth > MAX_SCHEMA_DEPTH:
        return {}
    if "const" in schema:
        return schema["const"]
    options = schema.get("enum") or schema.get("anyOf") or schema.get("oneOf")
    if isinstance(options, list) and options:
        return options[0] if "enum" in schema else _value(options[0], random, depth + 1)
    kind = schema.get("type", "object")
    if isinstance(kind, list):
        kind = kind[0] if kind else "object"
    if kind == "string":
        return random.choice(WORDS).strip()
    if kind == "integer":
        return int(_bound(schema, "minimum", random.randrange(100)))
    if kind == "number":
        return float(_bound(schema, "minimum", random.randrange(100)))
    if kind == "boolean":
        return random.random() < 0.5
    if kind == "null":
        return None
    if kind == "array":
        count = max(1, min(int(_bound(schema, "minItems", 1)), MAX_SCHEMA_FIELDS))
        return [_value(schema.get("items"), random, depth + 1) for _ in range(count)]
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return {}
    required = schema.get("required")
    names = [name for name in properties if not isinstance(required, list) or name in required]
    return {name: _value(properties[name], random, depth + 1) for name in names[:MAX_SCHEMA_FIELDS]}
