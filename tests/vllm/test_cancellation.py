"""A client that leaves frees the engine within a second, wherever its request was."""

from __future__ import annotations

import json
import socket

import pytest

from tests.vllm.engines import MODEL, Engine, eventually
from tests.vllm.load import noise_text

pytestmark = pytest.mark.vllm

LONG_WORDS = 2300


def send(base_url: str, prompt: str, *, stream: bool, max_tokens: int = 3000) -> socket.socket:
    """A completion that would go on for a minute, on a socket of its own."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": stream}
    content = json.dumps(body).encode()
    host, _, port = base_url.removeprefix("http://").rpartition(":")
    client = socket.create_connection((host, int(port)), timeout=60)
    client.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: engine\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(content), content)
    )
    return client


def busy(engines: list[Engine]) -> float:
    return sum(engine.busy() for engine in engines)


def generated_tokens(engines: list[Engine]) -> float:
    return sum(engine.metric("generation_tokens_total") for engine in engines)


def assert_stops(engines: list[Engine], figures: list[str], what: str) -> None:
    seconds = eventually(lambda: busy(engines) == 0, 1.0, f"the engine stops: {what}")
    figures.append(f"{what}: the engine is idle {seconds:.2f} s after the client left")


def test_client_gone_from_a_plain_request(base_url: str, engines: list[Engine], figures: list[str]) -> None:
    with send(base_url, "def join(", stream=False):
        eventually(lambda: sum(e.metric("num_requests_running") for e in engines) == 1, 10, "the request runs")
    assert_stops(engines, figures, "cancelled, not streamed")


def test_client_gone_from_a_stream(base_url: str, engines: list[Engine], figures: list[str]) -> None:
    with send(base_url, "def join(", stream=True) as client:
        seen = b""
        while seen.count(b"data: ") < 3:
            part = client.recv(65536)
            assert part, seen
            seen += part
        assert busy(engines) == 1
    assert_stops(engines, figures, "cancelled in mid-stream")


def test_client_gone_before_the_first_byte_of_a_stream(
    base_url: str, engines: list[Engine], figures: list[str]
) -> None:
    generated = generated_tokens(engines)
    # about 3,000 tokens, 3 s of prefill in steps of 128: the engine counts it as running from the end of the first
    with send(base_url, noise_text("long", LONG_WORDS), stream=True, max_tokens=500):
        eventually(lambda: busy(engines) == 1, 10, "the request is being prefilled")
    assert_stops(engines, figures, "cancelled in prefill")
    assert generated_tokens(engines) == generated, "it was past its prefill"
