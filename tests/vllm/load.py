"""Requests to a chat model, many at a time, each with a record of how far its answer came."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

import aiohttp

from tests.vllm.engines import MODEL

NOISE = (
    "path join file server answer cache block token request model engine prefix session retry stream "
    "queue value number string object module function class return error default argument sequence "
)


def noise_text(seed: object, words: int) -> str:
    """Words that this seed alone gives: about 1.3 tokens each."""
    return " ".join(random.Random(repr(seed)).choices(NOISE.split(), k=words))


@dataclass
class Answer:
    """What a client saw of one request."""

    status: int = 0  # 0: no head came
    began: bool = False  # a first piece of the answer itself came, not of an error
    complete: bool = False
    fault: str = ""  # what told the client that the answer is not whole; empty for a whole one
    text: str = ""
    reason: str = ""
    backend: str = ""

    @property
    def lost(self) -> bool:
        """It failed though nothing of its answer had reached the client."""
        return not self.complete and not self.began


async def ask_chat(session: aiohttp.ClientSession, url: str, messages: list[dict[str, str]], **fields: Any) -> Answer:
    """Send one chat completion of exactly `max_tokens` and read its answer, whatever happens to it."""
    body = {"model": MODEL, "messages": messages, "temperature": 0, "ignore_eos": True} | fields
    if body.get("stream"):
        body["stream_options"] = {"include_usage": True}
    answer = Answer()
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            answer.status = response.status
            answer.reason = response.headers.get("x-kvgate-reason", "")
            answer.backend = response.headers.get("x-kvgate-backend", "")
            if response.status != 200:
                answer.fault = await response.text()
            elif body.get("stream"):
                await _read_stream(response, answer, body["max_tokens"])
            else:
                content = b""
                async for part, _ in response.content.iter_chunks():
                    answer.began = True
                    content += part
                _read_whole(content, answer, body["max_tokens"])
    except (aiohttp.ClientError, TimeoutError) as error:
        answer.complete = False
        answer.fault = answer.fault or f"{type(error).__name__}: {error}"
    return answer


def _read_whole(content: bytes, answer: Answer, tokens: int) -> None:
    parsed = json.loads(content)
    answer.text = parsed["choices"][0]["message"]["content"] or ""
    if parsed["usage"]["completion_tokens"] == tokens:
        answer.complete = True
    else:  # an engine that is told to stop ends its requests with finish_reason "abort"
        answer.fault = parsed["choices"][0]["finish_reason"]


async def _read_stream(response: aiohttp.ClientResponse, answer: Answer, tokens: int) -> None:
    counted = done = False
    async for line in response.content:
        if not line.startswith(b"data: "):
            continue
        data = line[len(b"data: ") :].strip()
        if data == b"[DONE]":
            done = True
            continue
        event = json.loads(data)
        if "error" in event:
            answer.fault = json.dumps(event["error"])
            continue
        answer.began = True
        answer.text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        if event.get("usage"):
            counted = event["usage"]["completion_tokens"] == tokens
    answer.complete = counted and done and not answer.fault
