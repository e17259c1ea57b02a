"""The data port's wire: what a client sends reaches the engine, and what the engine answers reaches the client, byte by
byte but for what the gateway adds and what ends at each hop."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.blackbox.raw_engine import MODEL, RawEngine, raw_engine
from tests.support.gateway_process import WAIT_S, GatewayProcess, next_id, running_gateway
from tests.support.sim_process import Connection, http_request

CHAT = "/v1/chat/completions"
BODY = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hé"}]}).encode()
SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def engine() -> Iterator[RawEngine]:
    with raw_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def gateway(engine: RawEngine) -> Iterator[GatewayProcess]:
    with running_gateway([engine.url], routing={"strategy": "roundrobin"}) as gateway:
        yield gateway


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def test_a_request_passes_with_its_bytes_and_what_the_gateway_adds(gateway: GatewayProcess, engine: RawEngine) -> None:
    lines = [
        f"POST {CHAT}?a=%20b&c HTTP/1.1",
        "Host: api.example",
        "Content-Type: application/json",
        f"Content-Length: {len(BODY)}",
        "X-Custom:  kept as it came ",
        "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "Authorization: Bearer client-key",
        "X-Forwarded-For: 10.1.2.3",
        "X-Request-Id: from-client",
        "Connection: keep-alive, X-Hop",
        "X-Hop: only for the gateway",
        "Keep-Alive: timeout=5",
        "Proxy-Authorization: secret",
        "TE: trailers",
    ]
    with gateway.connect() as client:
        client.send("\r\n".join([*lines, "", ""]).encode() + BODY)
        received = engine.take()
        assert received.line == f"POST {CHAT}?a=%20b&c HTTP/1.1"
        assert received.body == BODY
        assert received.rest == b""
        assert received.header("host") == ["api.example"]
        assert received.header("x-custom") == ["kept as it came"]
        assert received.header("traceparent") == [lines[5].partition(": ")[2]]
        assert received.header("authorization") == ["Bearer client-key"]
        assert received.header("x-forwarded-for") == ["10.1.2.3, 127.0.0.1"]
        assert received.header("x-request-id") == ["from-client"]
        assert received.header("content-length") == [str(len(BODY))]
        for name in ("x-hop", "keep-alive", "proxy-authorization", "te", "transfer-encoding"):
            assert received.header(name) == [], name
        received.send(
            b"HTTP/1.1 200 Fine\r\nDate: Thu, 01 Jan 2026 00:00:00 GMT\r\nContent-Type: text/plain\r\n"
            b"Set-Cookie: a=1\r\nSet-Cookie: b=2\r\nX-Engine: yes\r\nKeep-Alive: timeout=5\r\n"
            b"Connection: x-hop\r\nX-Hop: 1\r\nContent-Length: 5\r\n\r\nhello"
        )
        received.next_request()
        answer = client.read()
    assert answer.raw.startswith(b"HTTP/1.1 200 Fine\r\n")
    assert answer.body == b"hello"
    assert answer.raw.lower().count(b"\r\ndate:") == 1
    assert answer.headers["date"] == "Thu, 01 Jan 2026 00:00:00 GMT"
    assert b"\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\nX-Engine: yes\r\n" in answer.raw
    assert "keep-alive" not in answer.headers
    assert "x-hop" not in answer.headers
    assert answer.headers["x-request-id"] == "from-client"
    assert answer.headers["x-kvgate-backend"] == "gpu-0"
    assert answer.headers["x-kvgate-reason"] == "roundrobin"
    assert answer.headers["x-kvgate-matched"] == "0"
    assert "x-kvgate-error" not in answer.headers


def test_an_answer_without_date_gets_one_and_interim_answers_stay_between_us(
    gateway: GatewayProcess, engine: RawEngine
) -> None:
    with gateway.send("POST", "/invocations", BODY) as client:
        received = engine.take()
        assert received.line == "POST /invocations HTTP/1.1"
        received.send(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n")
        received.answer(b"final")
        answer = client.read()
    assert answer.raw.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.raw.count(b"HTTP/1.1") == 1
    assert answer.raw.lower().count(b"\r\ndate: ") == 1
    assert answer.body == b"final"


def test_a_body_is_read_however_slowly_it_drips(gateway: GatewayProcess, engine: RawEngine) -> None:
    with gateway.connect() as client:
        for byte in http_request("POST", CHAT, BODY):
            client.send(bytes((byte,)))
        received = engine.take()
        assert received.body == BODY
        for byte in SSE_HEAD + chunk(b"data: 1\n\n") + b"0\r\n\r\n":
            received.send(bytes((byte,)))
        received.next_request()
        assert client.read().body == b"data: 1\n\n"


def test_a_request_without_id_gets_one_and_the_answer_names_it(gateway: GatewayProcess, engine: RawEngine) -> None:
    with gateway.send("POST", CHAT, BODY) as client:
        received = engine.take()
        (given,) = received.header("x-request-id")
        assert received.header("x-forwarded-for") == ["127.0.0.1"]
        assert received.header("traceparent") == []
        received.answer()
        assert client.read().headers["x-request-id"] == given


def test_a_chunked_request_goes_on_with_a_length_and_without_trailers(
    gateway: GatewayProcess, engine: RawEngine
) -> None:
    with gateway.connect() as client:
        client.send(f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        client.send(chunk(BODY[:7]) + b"5;name=value\r\n" + BODY[7:12] + b"\r\n" + chunk(BODY[12:]))
        client.send(b"0\r\nX-Trailer: dropped\r\n\r\n")
        received = engine.take()
        assert received.body == BODY
        assert received.header("content-length") == [str(len(BODY))]
        assert received.header("transfer-encoding") == received.header("x-trailer") == []
        received.answer()
        assert client.read().status == 200


def test_expect_is_answered_before_the_body_is_sent(gateway: GatewayProcess, engine: RawEngine) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(BODY)}\r\nExpect: 100-continue\r\n\r\n"
    with gateway.connect() as client:
        client.send(head.encode())
        assert client.read_until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(BODY)
        received = engine.take()
        assert received.header("expect") == []
        received.answer(b"done")
        assert client.read().body == b"done"


@pytest.mark.parametrize("method", ["GET", "DELETE", "PUT", "PATCH", "OPTIONS", "PROPFIND", "REPORT"])
def test_any_method_and_path_pass(gateway: GatewayProcess, engine: RawEngine, method: str) -> None:
    body = None if method in ("GET", "OPTIONS") else b"\x00\xff"
    with gateway.send(method, "/nobody/knows/%2e%2e//?x=1", body) as client:
        received = engine.take()
        assert received.line == f"{method} /nobody/knows/%2e%2e//?x=1 HTTP/1.1"
        assert received.body == (body or b"")
        received.answer(b'{"detail":"Not Found"}', status="404 Not Found")
        answer = client.read()
    assert (answer.status, answer.body) == (404, b'{"detail":"Not Found"}')
    assert answer.headers["x-kvgate-backend"] == "gpu-0"


def test_options_of_the_whole_server_pass(gateway: GatewayProcess, engine: RawEngine) -> None:
    with gateway.send("OPTIONS", "*") as client:
        received = engine.take()
        assert received.line == "OPTIONS * HTTP/1.1"
        received.answer()
        assert client.read().status == 200


def test_an_absolute_target_becomes_a_path_and_its_host(gateway: GatewayProcess, engine: RawEngine) -> None:
    with gateway.connect() as client:
        client.send(b"GET http://other.example:81/a/b?c=d HTTP/1.1\r\nHost: ignored\r\n\r\n")
        received = engine.take()
        assert received.line == "GET /a/b?c=d HTTP/1.1"
        assert received.header("host") == ["other.example:81"]
        received.answer()
        assert client.read().status == 200


def test_a_multipart_body_passes_untouched(gateway: GatewayProcess, engine: RawEngine) -> None:
    body = (
        b'--XX\r\nContent-Disposition: form-data; name="model"\r\n\r\nraw-8b\r\n'
        b'--XX\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n'
        b"Content-Type: audio/wav\r\n\r\n" + bytes(range(256)) * 40 + b"\r\n--XX--\r\n"
    )
    headers = {"Content-Type": "multipart/form-data; boundary=XX"}
    with gateway.send("POST", "/v1/audio/transcriptions", body, headers) as client:
        received = engine.take()
        assert received.body == body
        assert received.header("content-type") == [headers["Content-Type"]]
        received.answer(b'{"text":"hi"}')
        assert client.read().json() == {"text": "hi"}


def test_the_answer_to_head_ends_at_its_head(gateway: GatewayProcess, engine: RawEngine) -> None:
    with gateway.send("HEAD", "/some/file") as client:
        received = engine.take()
        assert received.line == "HEAD /some/file HTTP/1.1"
        received.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1234\r\n\r\n")
        received.next_request()
        answer = client.read(head_only=True)
        assert answer.headers["content-length"] == "1234"
        client.send(http_request("GET", "/next"))  # the same two connections carry the next request
        again = engine.take()
        assert again.connection is received.connection
        again.answer(b"next")
        assert client.read().body == b"next"


@pytest.mark.parametrize("status", ["204 No Content", "304 Not Modified"])
def test_an_answer_without_body_ends_at_its_head(gateway: GatewayProcess, engine: RawEngine, status: str) -> None:
    with gateway.send("GET", "/empty") as client:
        received = engine.take()
        received.send(f"HTTP/1.1 {status}\r\nETag: x\r\n\r\n".encode())
        received.next_request()
        answer = client.read(head_only=True)
        assert answer.raw.startswith(f"HTTP/1.1 {status}\r\n".encode())
        assert "transfer-encoding" not in answer.headers
        client.send(http_request("GET", "/next"))
        engine.take().answer(b"next")
        assert client.read().body == b"next"


def test_a_stream_passes_chunk_by_chunk_with_its_framing(gateway: GatewayProcess, engine: RawEngine) -> None:
    first, second = b'data: {"a":1}\n\n', b"data: [DONE]\n\n"
    with gateway.send("POST", CHAT, BODY) as client:
        received = engine.take()
        received.send(SSE_HEAD + chunk(first))
        head = client.read_until(b"\r\n\r\n")
        assert b"transfer-encoding: chunked" in head.lower()
        assert client.read_exactly(len(chunk(first))) == chunk(first)  # at once, not when the stream ends
        received.send(chunk(second) + b"0\r\n\r\n")
        received.next_request()
        assert client.read_exactly(len(chunk(second)) + 5) == chunk(second) + b"0\r\n\r\n"


def test_an_old_client_gets_a_stream_without_chunks_and_a_close(gateway: GatewayProcess, engine: RawEngine) -> None:
    with gateway.connect() as client:
        client.send(f"POST {CHAT} HTTP/1.0\r\nContent-Length: {len(BODY)}\r\n\r\n".encode() + BODY)
        received = engine.take()
        assert received.line == f"POST {CHAT} HTTP/1.1"
        assert received.header("host") == [f"127.0.0.1:{engine.port}"]
        received.send(SSE_HEAD + chunk(b"data: 1\n\n") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        received.next_request()
        head = client.read_until(b"\r\n\r\n")
        assert b"transfer-encoding" not in head.lower()
        assert b"\r\nconnection: close\r\n" in head.lower()
        assert client.closed()
        assert client.rest == b"data: 1\n\ndata: [DONE]\n\n"


def test_an_answer_that_ends_with_its_connection_passes_so(gateway: GatewayProcess, engine: RawEngine) -> None:
    with gateway.send("GET", "/old") as client:
        received = engine.take()
        received.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nall of it")
        received.close()
        head = client.read_until(b"\r\n\r\n")
        assert b"\r\nconnection: close\r\n" in head.lower()
        assert client.closed()
        assert client.rest == b"all of it"


def test_pipelined_requests_are_answered_in_order(gateway: GatewayProcess, engine: RawEngine) -> None:
    with gateway.connect() as client:
        client.send(http_request("POST", CHAT, BODY) + http_request("GET", "/livez") + http_request("GET", "/third"))
        engine.take().answer(b"first")
        assert client.read().body == b"first"
        assert client.read().json() == {"status": "ok"}
        engine.take().answer(b"third")
        assert client.read().body == b"third"


def test_a_client_that_asks_to_close_is_closed(gateway: GatewayProcess, engine: RawEngine) -> None:
    with gateway.send("GET", "/x", headers={"Connection": "close"}) as client:
        received = engine.take()
        assert received.header("connection") == []
        received.answer(b"bye")
        answer = client.read()
        assert answer.headers["connection"] == "close"
        assert client.closed()


def test_an_engine_connection_is_used_again(gateway: GatewayProcess, engine: RawEngine) -> None:
    with gateway.send("GET", "/one") as client:
        first = engine.take()
        first.answer()
        client.read()
    with gateway.send("GET", "/two") as client:
        second = engine.take()
        second.answer()
        client.read()
    assert second.connection is first.connection


def test_bytes_behind_an_answer_are_never_relayed(gateway: GatewayProcess, engine: RawEngine) -> None:
    with gateway.send("GET", "/one") as client:
        poisoned = engine.take()
        poisoned.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")
        assert client.read().body == b"ok"
        poisoned.wait_closed()
        client.send(http_request("GET", "/two"))
        engine.take().answer(b"good")
        assert client.read().body == b"good"


def test_a_websocket_is_tunnelled_both_ways(gateway: GatewayProcess, engine: RawEngine) -> None:
    headers = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        "X-Request-Id": (request_id := next_id()),
    }
    with gateway.send("GET", "/v1/realtime?model=raw-8b", headers=headers) as client:
        received = engine.take()
        assert received.header("upgrade") == ["websocket"]
        assert received.header("connection") == ["Upgrade"]
        received.send(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n\x81\x02hi"
        )
        head = client.read_until(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101 ")
        assert b"\r\nupgrade: websocket\r\n" in head.lower()
        assert b"\r\nx-kvgate-backend: gpu-0\r\n" in head
        assert client.read_exactly(4) == b"\x81\x02hi"
        client.send(b"\x00\r\n\r\nGET / HTTP/1.1\r\n")  # no HTTP any more
        assert received.receive(21) == b"\x00\r\n\r\nGET / HTTP/1.1\r\n"
        assert gateway.metric("in_flight", backend="gpu-0") == 1
    received.wait_closed()
    assert gateway.access(request_id)["ended"] == "client@streaming"
    assert gateway.metric("in_flight", backend="gpu-0") == 0


def test_a_refused_upgrade_is_an_ordinary_answer(gateway: GatewayProcess, engine: RawEngine) -> None:
    headers = {"Connection": "Upgrade", "Upgrade": "websocket"}
    with gateway.send("GET", "/v1/realtime", headers=headers) as client:
        engine.take().answer(b"no", status="403 Forbidden")
        assert client.read().status == 403
        client.send(http_request("GET", "/livez"))
        assert client.read().status == 200


def test_large_bodies_pass_whole(gateway: GatewayProcess, engine: RawEngine) -> None:
    sent = json.dumps({"model": MODEL, "prompt": "x" * 3_000_000}).encode()
    back = bytes(range(256)) * 16_384
    with gateway.send("POST", "/v1/completions", sent) as client:
        received = engine.take()
        assert received.body == sent
        received.answer(back)
        assert client.read().body == back


def test_a_slow_client_holds_the_engine_back(gateway: GatewayProcess, engine: RawEngine) -> None:
    """Memory per stream is bounded: the engine's writes come to a stop long before all is sent, and go on later."""
    total = 64 << 20
    with gateway.send("GET", "/big") as client:
        received = engine.take()
        received.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total)
        received.connection.setblocking(False)
        sent, block = 0, b"\x55" * 65_536
        seen = -1
        while sent < total and seen != sent:
            seen = sent
            try:
                while sent < total:
                    sent += received.connection.send(block[: total - sent])
            except BlockingIOError:
                gateway.metrics()  # it had its turn: what it reads it has read
        assert sent < total
        assert gateway.memory_bytes() < 200 << 20
        received.connection.setblocking(True)
        with ThreadPoolExecutor() as threads:
            counted = threads.submit(_count_body, client, total)
            received.connection.sendall(b"\x55" * (total - sent))
            received.next_request()
            assert counted.result(WAIT_S) == total


def _count_body(client: Connection, total: int) -> int:
    client.read_until(b"\r\n\r\n")
    count = len(client.rest)
    while count < total and (data := client.socket.recv(1 << 20)):
        count += len(data)
    return count
