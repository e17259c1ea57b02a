"""What a replay asks its target before it begins: which model, how long prompts may be, and how tokens are counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import orjson

from loadtest.replay.bodies import read_body
from loadtest.replay.prompt_text import PromptText, TokenScale

ASK_TIMEOUT_S: Final = 20.0
MAX_ANSWER_BYTES: Final = 16 << 20
SAMPLE_WORDS: Final = (100, 1100)
SENSIBLE_TOKENS_PER_WORD: Final = (0.25, 8.0)
MAX_TEMPLATE_TOKENS: Final = 10_000


class TargetFailed(Exception):
    """The target cannot be replayed against; the text says why."""


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    max_tokens: int | None  # prompt and answer together; None where it is not told


async def find_model(session: aiohttp.ClientSession, url: str, wanted: str | None) -> Model:
    """The wanted model, or the only one; the first one of several, as clients that do not care would."""
    try:
        listed = await _ask(session, "GET", f"{url}/v1/models")
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise TargetFailed(f"{url}/v1/models: {error or type(error).__name__}") from None
    entries = listed.get("data") if isinstance(listed, dict) else None
    models: dict[str, int | None] = {}
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("id"), str):
            length = entry.get("max_model_len")
            models[entry["id"]] = length if isinstance(length, int) and length > 0 else None
    if not models:
        raise TargetFailed(f"{url}/v1/models: no model is served there")
    name = wanted or next(iter(models))
    if name not in models:
        raise TargetFailed(f"{url}/v1/models: {name!r} is none of {', '.join(list(models)[:10])}")
    return Model(name, models[name])


async def measure_scale(
    session: aiohttp.ClientSession, url: str, model: str, block_tokens: int
) -> tuple[TokenScale, str]:
    """How the engine counts, by its /tokenize, and in words how that is known. Without an answer that makes sense: one
    token a word."""
    text = PromptText(block_tokens, TokenScale(), "calibration")
    counts: list[int] = []
    try:
        for words in SAMPLE_WORDS:
            body = {"model": model, "messages": [{"role": "user", "content": text.sample(words)}]}
            answer = await _ask(session, "POST", f"{url}/tokenize", body)
            counts.append(int(answer["count"]))
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError) as error:
        return TokenScale(), f"not calibrated, /tokenize: {str(error)[:80] or type(error).__name__}"
    few, many = SAMPLE_WORDS
    per_word = (counts[1] - counts[0]) / (many - few)
    template = round(counts[0] - per_word * few)
    least, most = SENSIBLE_TOKENS_PER_WORD
    if not least <= per_word <= most or not 0 <= template <= MAX_TEMPLATE_TOKENS:
        return TokenScale(), f"not calibrated, /tokenize counts {counts[0]} and {counts[1]} for {few} and {many} words"
    return (
        TokenScale(per_word, template),
        f"calibrated: {per_word:.3f} tokens a word, {template} of the chat template",
    )


async def _ask(session: aiohttp.ClientSession, method: str, url: str, body: Any = None) -> Any:
    """The JSON of an answer. ValueError for another status, and for what is no JSON."""
    data = None if body is None else orjson.dumps(body)
    headers = {} if body is None else {"content-type": "application/json"}
    timeout = aiohttp.ClientTimeout(total=ASK_TIMEOUT_S)
    async with session.request(method, url, data=data, headers=headers, timeout=timeout) as response:
        content = await read_body(response, MAX_ANSWER_BYTES)
        if response.status != 200:
            raise ValueError(f"status {response.status}")
        return orjson.loads(content)
