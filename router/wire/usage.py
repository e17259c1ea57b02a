"""The `usage` object of an answer: what the engine says it computed and what it had cached."""

from __future__ import annotations

from typing import Any, NamedTuple

import orjson


class Usage(NamedTuple):
    """Tokens; None where the engine does not say."""

    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None


NO_USAGE = Usage(None, None, None)


def read_usage(raw: bytes | None) -> Usage:
    """From the JSON of one usage object: of chat and completions (`prompt_tokens`), responses and messages
    (`input_tokens`). In that of messages the prompt is in three parts: read from the cache, written into it, neither.

    Anything else than plausible counts reads as None.
    """
    if raw is None:
        return NO_USAGE
    try:
        usage = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return NO_USAGE
    prompt = _count(usage.get("prompt_tokens"))
    details = usage.get("prompt_tokens_details")
    if prompt is None:
        prompt = _count(usage.get("input_tokens"))
        details = usage.get("input_tokens_details")
    cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else None
    if cached is None and prompt is not None:
        cached = _count(usage.get("cache_read_input_tokens"))
        prompt += (cached or 0) + (_count(usage.get("cache_creation_input_tokens")) or 0)
    if cached is not None and (prompt is None or cached > prompt):
        cached = None
    completion = _count(usage.get("completion_tokens"))
    if completion is None:
        completion = _count(usage.get("output_tokens"))
    return Usage(prompt, cached, completion)


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 40 else None
