"""Reading a request's body, beside orjson.loads of the same bytes in the same run."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from native.body_scan import OK, scan_json
from router.wire.openai_request import read_request

WORDS = [
    "the",
    "quick",
    "file",
    "names",
    "return\nlist",
    "of",
    "brown",
    '"quoted"',
    "system",
    "function",
    "value",
    "is",
]


def text(length: int, generator: random.Random) -> str:
    return " ".join(generator.choice(WORDS) for _ in range(length // 4 + 1))[:length]


def chat(length: int, *, parts: bool = False) -> bytes:
    """A conversation of messages of 2 kB; one word in twelve is quoted, one holds a line break, as in code."""
    generator = random.Random(1)
    turns = []
    for start in range(0, length, 2000):
        content: Any = text(min(2000, length - start), generator)
        if parts:
            content = [{"type": "text", "text": content}]
        turns.append({"role": "user" if len(turns) % 2 else "assistant", "content": content})
    return json.dumps({"model": "meta-llama/Llama-3.1-8B-Instruct", "messages": turns, "stream": True}).encode()


def token_ids(count: int) -> bytes:
    generator = random.Random(1)
    return json.dumps({"model": "m", "prompt": [generator.randrange(128_000) for _ in range(count)]}).encode()


def image() -> bytes:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 5_000_000}}
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": [part]}]}).encode()


BODIES = {
    "chat 1 kB": chat(900),
    "chat 32 kB": chat(31_000),
    "chat 400 kB": chat(385_000),
    "chat 400 kB in parts": chat(383_000, parts=True),
    "ids 400 kB": token_ids(57_000),
    "image 5 MB": image(),
}


def scan(body: bytes) -> Any:
    return scan_json(body, 256, (b"user",))


def count(body: bytes) -> Any:
    return scan_json(body, 256, (b"user",), False)


def read(body: bytes) -> Any:
    return read_request(b"application/json", b"/v1/chat/completions", body, 256, ("user",), True)


@pytest.mark.parametrize("reader", [scan, count, read, orjson.loads], ids=["scan", "count", "read_request", "orjson"])
@pytest.mark.parametrize("name", BODIES)
def test_read_a_body(benchmark: Any, name: str, reader: Callable[[bytes], Any]) -> None:
    assert scan_json(BODIES[name], 256).status == OK
    benchmark.group = name
    benchmark(reader, BODIES[name])
