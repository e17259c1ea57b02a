"""An answer that breaks off: no client may take half of it for the whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import openai
import pytest

from tests.blackbox.raw_engine import MODEL, RawEngine, raw_engine
from tests.support.gateway_process import GatewayProcess, next_id, running_gateway
from tests.support.sim_process import Connection, SimProcess, running_sim

CHAT = "/v1/chat/completions"
STREAM = {"messages": [{"role": "user", "content": "tell me"}], "stream": True, "max_tokens": 40}
FAST = ("--step-ms", "1", "--decode-ms", "1", "--decode-ms-per-seq", "0")
SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@pytest.fixture
def sims() -> Iterator[list[SimProcess]]:
    with ExitStack() as stack:
        yield [stack.enter_context(running_sim(*FAST, "--sim-control-port", "0")) for _ in range(2)]


@pytest.fixture
def gateway(sims: list[SimProcess]) -> Iterator[GatewayProcess]:
    with running_gateway([sim.url for sim in sims]) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def engine() -> Iterator[RawEngine]:
    with raw_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def raw_gateway(engine: RawEngine) -> Iterator[GatewayProcess]:
    with running_gateway([engine.url], timeouts={"idle_s": 0.3}) as gateway:
        yield gateway


@pytest.mark.parametrize("fault", ["reset-after-chunks", "close-after-chunks", "die-after-chunks"])
def test_a_death_in_mid_stream_is_an_error_event_and_a_cut(
    sims: list[SimProcess], gateway: GatewayProcess, fault: str
) -> None:
    for sim in sims:
        sim.fault(fault, 3, 1)
    with gateway.send("POST", CHAT, STREAM, {"X-Request-Id": (request_id := next_id())}) as client:
        answer = client.read()
        assert not answer.whole  # its chunked body has no end
        assert client.rest == b""
    events = answer.events()
    assert len(events) == 4  # the three that came, and ours
    assert all("choices" in event for event in events[:-1])
    error = events[-1]["error"]
    assert (error["code"], error["type"], set(error)) == (
        "upstream_error",
        "server_error",
        {"message", "type", "param", "code"},
    )
    assert "[DONE]" not in events
    line = gateway.access(request_id)
    assert (line["status"], line["ended"], line["attempts"]) == (200, "upstream@streaming", 1)
    assert gateway.metric("in_flight") == 0


def test_the_openai_client_sees_an_exception_and_not_an_end(sims: list[SimProcess], gateway: GatewayProcess) -> None:
    for sim in sims:
        sim.fault("reset-after-chunks", 4, 1)
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(
            model="sim-8b", messages=[{"role": "user", "content": "tell me"}], stream=True, max_tokens=40
        )
        seen = []
        with pytest.raises(openai.APIError) as raised:
            seen.extend(stream)
        stream.close()
    assert len(seen) == 4
    assert raised.value.code == "upstream_error"


def read_to_end(client: Connection) -> tuple[bytes, bool]:
    """All that comes after the head; whether the connection was closed in order."""
    client.read_until(b"\r\n\r\n")
    in_order = client.closed()
    return client.rest, in_order


def test_no_error_event_is_written_into_a_chunk_that_is_not_complete(
    raw_gateway: GatewayProcess, engine: RawEngine
) -> None:
    with raw_gateway.send("POST", CHAT, {**STREAM, "model": MODEL}) as client:
        received = engine.take()
        whole = chunk(b"data: 1\n\n")
        received.send(SSE_HEAD + whole + b"20\r\ndata: cut h")
        client.read_until(b"data: 1\n\n\r\n20\r\ndata: cut h")
        received.reset()
        client.closed()
        assert client.rest == b""


def test_a_body_with_a_length_ends_short_and_not_in_json(raw_gateway: GatewayProcess, engine: RawEngine) -> None:
    with raw_gateway.send("POST", CHAT, {"model": MODEL}, {"X-Request-Id": (request_id := next_id())}) as client:
        received = engine.take()
        received.send(b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"half":')
        received.reset()
        rest, _ = read_to_end(client)
    assert rest == b'{"half":'
    assert raw_gateway.access(request_id)["ended"] == "upstream@streaming"


def test_a_body_that_ends_with_its_connection_is_reset_where_it_broke(
    raw_gateway: GatewayProcess, engine: RawEngine
) -> None:
    """A proper close would be the proper end of such a body."""
    with raw_gateway.send("GET", "/old") as client:
        received = engine.take()
        received.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nhalf")
        client.read_until(b"half")
        received.reset()
        assert not client.closed()
        assert client.rest == b""


def test_an_old_client_is_told_too(raw_gateway: GatewayProcess, engine: RawEngine) -> None:
    with raw_gateway.connect() as client:
        client.send(b"POST /v1/completions HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}")
        received = engine.take()
        received.send(SSE_HEAD + chunk(b"data: 1\n\n"))
        client.read_until(b"data: 1\n\n")
        received.close()
        client.closed()
        assert b'data: {"error":' in client.rest
        assert b"[DONE]" not in client.rest


def test_a_stream_that_stands_still_is_cut_with_its_reason(raw_gateway: GatewayProcess, engine: RawEngine) -> None:
    with raw_gateway.send("POST", CHAT, STREAM, {"X-Request-Id": (request_id := next_id())}) as client:
        received = engine.take()
        received.send(SSE_HEAD + chunk(b"data: 1\n\n"))
        answer = client.read()
        received.wait_closed()
    assert not answer.whole
    assert b'"upstream_timeout"' in answer.body
    assert raw_gateway.access(request_id)["ended"] == "gateway@streaming"


def test_what_an_engine_ends_itself_passes_as_it_is(raw_gateway: GatewayProcess, engine: RawEngine) -> None:
    last = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"abort"}]}\n\n'
    late_error = b'data: {"error":{"message":"its own","code":500}}\n\n'
    body = chunk(b"data: 1\n\n") + chunk(last) + chunk(late_error) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    with raw_gateway.send("POST", CHAT, STREAM, {"X-Request-Id": (request_id := next_id())}) as client:
        received = engine.take()
        received.send(SSE_HEAD + body)
        received.next_request()
        answer = client.read()
    assert answer.whole
    assert answer.raw.endswith(body)
    assert raw_gateway.access(request_id)["ended"] == "upstream@done"
