"""A client that leaves frees its place at once, whatever it was waiting for, and the engine is told by a closed
connection."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.blackbox.raw_engine import MODEL, RawEngine, raw_engine
from tests.support.gateway_process import GatewayProcess, next_id, running_gateway
from tests.support.sim_process import Connection, SimProcess, http_request, running_sim

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def engine() -> Iterator[RawEngine]:
    with raw_engine(keep_alive=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def gateway(engine: RawEngine) -> Iterator[GatewayProcess]:
    """With room for one request: a place that is not given back shows at once."""
    with running_gateway([engine.url], limits={"max_in_flight": 1}) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def sim() -> Iterator[SimProcess]:
    with running_sim("--step-ms", "2", "--max-num-seqs", "1", "--sim-control-port", "0") as sim:
        yield sim


@pytest.fixture(scope="module")
def sim_gateway(sim: SimProcess) -> Iterator[GatewayProcess]:
    with running_gateway([sim.url]) as gateway:
        yield gateway


def close(client: Connection) -> None:
    client.socket.close()


def half_close(client: Connection) -> None:
    client.socket.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("leave", [close, half_close])
@pytest.mark.parametrize(
    ("said", "phase", "status"),
    [
        (b"", "await_head", 499),
        (SSE_HEAD, "await_head", 499),  # a head is not yet an answer: vLLM sends it before it prefills
        (SSE_HEAD + b"9\r\ndata: 1\n\n\r\n", "streaming", 200),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", "streaming", 200),
    ],
)
def test_leaving_closes_the_engine_s_connection_and_frees_the_place(
    gateway: GatewayProcess, engine: RawEngine, leave: Any, said: bytes, phase: str, status: int
) -> None:
    with gateway.send("POST", CHAT, BODY, {"X-Request-Id": (request_id := next_id())}) as client:
        received = engine.take()
        if said:
            received.send(said)
        if phase == "streaming":
            client.read_until(b"\r\n\r\n")
            client.read_exactly(4)
        leave(client)
        received.wait_closed()
    line = gateway.access(request_id)
    assert (line["ended"], line["status"]) == (f"client@{phase}", status)
    assert gateway.metric("in_flight") == 0
    with gateway.send("POST", CHAT, BODY) as after:  # the one place there is
        engine.take().answer()
        assert after.read().status == 200


def test_leaving_the_queue_leaves_no_trace(gateway: GatewayProcess, engine: RawEngine) -> None:
    with gateway.send("POST", CHAT, BODY) as first:
        received = engine.take()
        with gateway.send("POST", CHAT, BODY, {"X-Request-Id": (queued := next_id())}):
            gateway.until_metric("queue_depth", 1)
        line = gateway.access(queued)
        assert (line["ended"], line["status"], line["attempts"]) == ("client@queued", 499, 0)
        assert "backend" not in line
        assert gateway.metric("queue_depth") == 0
        received.answer()
        assert first.read().status == 200
    assert engine.waiting() == 0
    assert gateway.metric("in_flight") == 0


def test_leaving_in_the_request_is_counted_as_such(gateway: GatewayProcess, engine: RawEngine) -> None:
    request_id = next_id()
    with gateway.connect() as client:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nX-Request-Id: {request_id}\r\nContent-Length: 10\r\n"
        client.send(head.encode() + b"Expect: 100-continue\r\n\r\n")
        client.read_until(b"100 Continue\r\n\r\n")
    assert gateway.access(request_id)["ended"] == "client@read_body"
    assert engine.waiting() == 0


def test_a_client_that_leaves_stops_its_request_in_the_engine(sim: SimProcess, sim_gateway: GatewayProcess) -> None:
    for stream in (True, False):
        before = sim.stats()
        body = {"messages": [{"role": "user", "content": "long"}], "max_tokens": 100_000, "stream": stream}
        with sim_gateway.send("POST", CHAT, body, {"X-Request-Id": (request_id := next_id())}) as client:
            if stream:
                client.read_until(b"data: ")
            else:
                sim.wait(accepted=before["accepted"] + 1)
        sim.wait(aborted=before["aborted"] + 1)
        assert sim.stats()["running"] == 0
        assert sim_gateway.access(request_id)["ended"] == ("client@streaming" if stream else "client@await_head")
    assert sim_gateway.metric("in_flight") == 0


def test_a_client_that_leaves_stops_its_request_in_the_engine_s_queue(
    sim: SimProcess, sim_gateway: GatewayProcess
) -> None:
    before = sim.stats()
    body = {"messages": [{"role": "user", "content": "long"}], "max_tokens": 100_000, "stream": True}
    with sim_gateway.send("POST", CHAT, body) as running:
        running.read_until(b"data: ")
        with sim_gateway.send("POST", CHAT, body):
            sim.wait(waiting=1)
        sim.wait(aborted=before["aborted"] + 1)
        assert sim.stats()["running"] == 1
    sim.wait(aborted=before["aborted"] + 2)
    sim_gateway.until_metric("in_flight", 0)


def test_a_client_that_leaves_a_hung_engine_frees_its_place(sim: SimProcess, sim_gateway: GatewayProcess) -> None:
    for fault, count in (("stall", "stalled"), ("stall-after-head", "accepted")):
        before = sim.stats()
        sim.fault(fault, True, 1)
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        with sim_gateway.send("POST", CHAT, body, {"X-Request-Id": (request_id := next_id())}):
            sim.wait(**{count: before[count] + 1})
        sim.wait(aborted=before["aborted"] + 1)
        assert sim_gateway.access(request_id)["ended"] == "client@await_head"


def test_a_client_that_leaves_takes_its_pipelined_requests_along(gateway: GatewayProcess, engine: RawEngine) -> None:
    with gateway.connect() as client:
        client.send(http_request("POST", CHAT, BODY) * 3)
        received = engine.take()
    received.wait_closed()
    gateway.until_metric("connections", 0)
    assert engine.waiting() == 0
    assert gateway.metric("in_flight") == gateway.metric("queue_depth") == 0


def test_an_idle_client_is_closed_in_its_time(engine: RawEngine) -> None:
    with running_gateway([engine.url], timeouts={"client_keepalive_s": 0.2}) as gateway:
        with gateway.connect() as silent:
            assert silent.closed()
        with gateway.send("GET", "/livez") as client:
            assert client.read().status == 200
            assert client.closed()
