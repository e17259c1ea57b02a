"""Do our ids equal the engine's? A few chats, asked of both before a model's own tokenizer is trusted."""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import orjson

from router.tokens.answers import Refused, Why
from router.tokens.engine import NoTokenizeRoute
from router.tokens.question import CHAT_PATH, COMPLETIONS_PATH, ChatPrompt, TextPrompt, read_prompt

_TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "find_city",
        "description": "Find a city & its <region>.",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
}
_CALL: Final[dict[str, Any]] = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "find_city", "arguments": '{"name": "Zürich", "limit": 3}'},
}
_SAMPLES: Final[tuple[tuple[str, str, dict[str, Any]], ...]] = (
    ("plain", CHAT_PATH, {"messages": [{"role": "user", "content": "How far is the moon?"}]}),
    (
        "system",
        CHAT_PATH,
        {
            "messages": [
                {"role": "system", "content": "  You answer briefly.\n"},
                {"role": "user", "content": "How far is the moon? "},
                {"role": "assistant", "content": "About 384,400 km.\n"},
                {"role": "user", "content": "\tAnd the sun?"},
            ]
        },
    ),
    (
        "tools",
        CHAT_PATH,
        {
            "messages": [
                {"role": "user", "content": "Where is Zürich?"},
                {"role": "assistant", "content": None, "tool_calls": [_CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": '{"country": "CH"}'},
            ],
            "tools": [_TOOL],
        },
    ),
    (
        "content parts",
        CHAT_PATH,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": part} for part in ("One.", "", "Two.")]}]},
    ),
    (
        "reasoning",
        CHAT_PATH,
        {
            "messages": [
                {"role": "user", "content": "Where is Zürich?"},
                {"role": "assistant", "content": "", "reasoning_content": "\nA tool.\n", "tool_calls": [_CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": "CH"},
            ],
            "tools": [_TOOL],
        },
    ),
    (
        "non-ASCII",
        CHAT_PATH,
        {
            "messages": [
                {"role": "user", "content": "Grüße, 世界! Привет \u00a0\u200d👩‍🚀 e\u0301 ﬁ 1234567 \r\n\n\n\tx"}
            ]
        },
    ),
    ("completion", COMPLETIONS_PATH, {"prompt": "Once upon a time, there were 12 dwarves.\n\n"}),
)
SAMPLES: Final = tuple((name, path, orjson.dumps(body)) for name, path, body in _SAMPLES)


class State(StrEnum):
    VERIFIED = "verified"
    MISMATCH = "mismatch"
    UNVERIFIED = "unverified"  # the engine has no /tokenize, or answers none of the samples
    PENDING = "pending"  # it could not be asked now


@dataclass(frozen=True, slots=True)
class Verdict:
    """`chats_only`: chats agree and completions do not, as where an engine adds a first token by its configuration."""

    state: State
    detail: str = ""
    chats_only: bool = False


Tokenize = Callable[[ChatPrompt | TextPrompt], Awaitable["array[int]"]]


async def compare(ours: Tokenize, engines: Tokenize) -> Verdict:
    """Both raise Refused where there are no ids. What only we refuse costs nothing but a hit; what only the engine
    refuses, or reads differently, is a mismatch."""
    compared = 0
    for name, path, body in SAMPLES:
        prompt = read_prompt(path, body)
        assert isinstance(prompt, ChatPrompt | TextPrompt)
        try:
            mine = await ours(prompt)
        except Refused as refused:
            if refused.why in (Why.BUSY, Why.LATE):
                return Verdict(State.PENDING, refused.detail)
            continue
        try:
            theirs = await engines(prompt)
        except NoTokenizeRoute:
            return Verdict(State.UNVERIFIED, "the engines have no /tokenize to compare with")
        except Refused as refused:
            if refused.why is Why.SHAPE:
                return Verdict(State.MISMATCH, f"sample '{name}': the engine refuses what is rendered here")
            return Verdict(State.PENDING, refused.detail)
        if mine != theirs:
            difference = f"sample '{name}': {_difference(mine, theirs)}"
            if path == COMPLETIONS_PATH and compared:  # these are compared after the chats
                return Verdict(State.VERIFIED, f"chats only; {difference}", chats_only=True)
            return Verdict(State.MISMATCH, difference)
        compared += 1
    if not compared:
        return Verdict(State.UNVERIFIED, "none of the samples can be rendered")
    return Verdict(State.VERIFIED, f"{compared} of {len(SAMPLES)} samples equal the engine's ids")


def _difference(mine: array[int], theirs: array[int]) -> str:
    for at, (here, there) in enumerate(zip(mine, theirs, strict=False)):
        if here != there:
            return f"token {at} is {here} here and {there} in the engine"
    return f"{len(mine)} tokens here and {len(theirs)} in the engine, equal until there"
