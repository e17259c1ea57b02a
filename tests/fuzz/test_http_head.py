"""Invariant: whatever bytes come, a head is read or refused in its own terms, and never grows on its way through.

Seeded and bounded, so that it is a test; `KVGATE_FUZZ_ROUNDS` makes it longer.
"""

from __future__ import annotations

import os
from random import Random

import pytest

from router.errors import RouterError
from router.wire.http_head import BadResponse, parse_request_head, parse_response_head, render_request_head

ROUNDS = int(os.environ.get("KVGATE_FUZZ_ROUNDS", "3000"))
REQUESTS = [
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nContent-Type: a\r\n\r\n",
    b"GET http://h:1/a?b HTTP/1.1\r\nHost: h\r\nConnection: x, close\r\nX: y\r\n\r\n",
    b"PUT / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n",
    b"GET / HTTP/1.0\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
]
RESPONSES = [
    b"HTTP/1.1 200 OK\r\nDate: x\r\nContent-Length: 5\r\nContent-Type: text/event-stream\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close, X\r\nX: y\r\n\r\n",
    b"HTTP/1.0 404 Not Found\r\nServer: x\r\n\r\n",
]
SPICE = [b"\r", b"\n", b"\r\n", b"\x00", b" ", b"\t", b":", b",", b"\xff", b"0", b"chunked", b"Content-Length: 1\r\n"]


def refused_as_it_should_be(error: RouterError, raw: bytes) -> None:
    assert 400 <= error.status <= 505, raw


def mutate(rng: Random, raw: bytes) -> bytes:
    for _ in range(rng.randrange(1, 4)):
        at, what = rng.randrange(len(raw) + 1), rng.random()
        if what < 0.4:
            raw = raw[:at] + rng.choice(SPICE) + raw[at:]
        elif what < 0.6:
            raw = raw[:at] + raw[at + rng.randrange(1, 6) :]
        elif what < 0.8:
            raw = raw[:at] + bytes([rng.randrange(256)]) + raw[at + 1 :]
        else:
            raw = raw[:at] + raw[rng.randrange(len(raw) + 1) :]
    return raw.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"


@pytest.mark.parametrize("seed", range(4))
def test_mutated_requests(seed: int) -> None:
    rng = Random(seed)
    passed = 0
    for _ in range(ROUNDS // 4):
        raw = mutate(rng, rng.choice(REQUESTS))
        try:
            head = parse_request_head(raw)
        except RouterError as error:
            refused_as_it_should_be(error, raw)
            continue
        passed += 1
        sent = render_request_head(head, body_bytes=5, request_id=b"r", peer=b"p", default_host=b"d", api_key=None)
        assert sent.count(b"\r\n\r\n") == 1, raw
        assert b"\n" not in sent.replace(b"\r\n", b""), raw
        assert b"\r" not in sent.replace(b"\r\n", b""), raw
        assert sent.lower().count(b"\r\ncontent-length:") == 1, raw
        assert b"\r\ntransfer-encoding:" not in sent.lower(), raw
    assert passed > ROUNDS // 40, "nearly all was refused: the mutations are too wild to find anything"


@pytest.mark.parametrize("seed", range(4))
def test_mutated_responses(seed: int) -> None:
    rng = Random(seed)
    passed = 0
    for _ in range(ROUNDS // 4):
        raw = mutate(rng, rng.choice(RESPONSES))
        try:
            head = parse_response_head(raw, rng.random() < 0.2)
        except BadResponse:
            continue
        passed += 1
        assert 100 <= head.status <= 999, raw
        assert head.kept == b"" or head.kept.endswith(b"\r\n"), raw
        for line in head.kept.split(b"\r\n")[:-1]:
            assert line, raw
            assert b"\n" not in line, raw
            assert b"\r" not in line, raw
    assert passed > ROUNDS // 40
