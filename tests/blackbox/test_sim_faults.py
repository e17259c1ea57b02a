"""Each fault switch does what it says, and only that."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.sim_process import Connection, Response, SimProcess, http_request, running_sim

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
STREAM: dict[str, Any] = {**BODY, "stream": True}
ARGUMENTS = (
    *("--step-ms", "1", "--decode-ms", "1", "--decode-ms-per-seq", "0", "--enable-prompt-tokens-details"),
    *("--sim-control-port", "0"),
)


@pytest.fixture(scope="module")
def engine() -> Iterator[SimProcess]:
    with running_sim(*ARGUMENTS) as process:
        yield process


@pytest.fixture
def sim(engine: SimProcess) -> Iterator[SimProcess]:
    yield engine
    engine.fault("clear")


def stream(sim: SimProcess) -> tuple[Connection, Response]:
    connection = sim.connect()
    connection.send(http_request("POST", CHAT, STREAM))
    return connection, connection.read()


def works(sim: SimProcess) -> bool:
    response = sim.request("POST", CHAT, STREAM)
    return response.whole and response.events()[-1] == "[DONE]"


def test_a_counted_fault_is_over_after_its_count(sim: SimProcess) -> None:
    sim.fault("status", 429, 2)
    assert [sim.request("POST", CHAT, BODY).status for _ in range(3)] == [429, 429, 200]


@pytest.mark.parametrize("status", [400, 429, 500, 503])
def test_status(sim: SimProcess, status: int) -> None:
    sim.fault("status", status)
    response = sim.request("POST", CHAT, BODY)
    assert response.status == response.json()["error"]["code"] == status
    assert sim.request("GET", "/health").status == 200


def test_stall_keeps_the_request_and_stays_healthy(sim: SimProcess) -> None:
    sim.fault("stall", True, 1)
    before = sim.stats()
    with sim.connect() as connection:
        connection.send(http_request("POST", CHAT, BODY))
        sim.wait(stalled=1)
        assert sim.request("GET", "/health").status == 200
        assert sim.stats()["running"] == 0
        assert works(sim)
    sim.wait(aborted=before["aborted"] + 1)
    assert sim.stats()["stalled"] == 0


@pytest.mark.parametrize("body", [BODY, STREAM])
def test_stall_after_head(sim: SimProcess, body: dict[str, Any]) -> None:
    sim.fault("stall-after-head", True, 1)
    before = sim.stats()["accepted"]
    with sim.connect() as connection:
        connection.send(http_request("POST", CHAT, body))
        assert connection.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 200 OK")
        sim.wait(accepted=before + 1)
        assert works(sim)
        assert connection.rest == b""


def test_stall_after_chunks_sends_exactly_so_many(sim: SimProcess) -> None:
    sim.fault("stall-after-chunks", 3, 1)
    finished = sim.stats()["generated_tokens"]
    with sim.connect() as connection:
        connection.send(http_request("POST", CHAT, STREAM))
        connection.read_until(b"\r\n\r\n")
        sim.wait(generated_tokens=finished + 8)
        for _ in range(3):
            size = int(connection.read_until(b"\r\n"), 16)
            assert connection.read_exactly(size + 2).startswith(b"data: ")
        assert works(sim)
        assert connection.rest == b""


@pytest.mark.parametrize(("kind", "clean"), [("reset-after-chunks", False), ("close-after-chunks", True)])
@pytest.mark.parametrize("chunks", [0, 1, 4])
def test_cut_after_chunks(sim: SimProcess, kind: str, clean: bool, chunks: int) -> None:
    sim.fault(kind, chunks, 1)
    connection, response = stream(sim)
    with connection:
        assert response.status == 200
        assert len(response.chunks) == chunks
        assert not response.whole
        assert connection.closed() or not clean
    assert works(sim)


def test_a_plain_answer_is_cut_in_its_middle(sim: SimProcess) -> None:
    sim.fault("close-after-chunks", 1, 1)
    with sim.connect() as connection:
        connection.send(http_request("POST", CHAT, BODY))
        with pytest.raises(EOFError) as cut:
            connection.read()
    assert b'{"id"' in cut.value.args[0]


def test_reset_before_any_byte(sim: SimProcess) -> None:
    sim.fault("reset", True, 1)
    with sim.connect() as connection:
        connection.send(http_request("POST", CHAT, BODY))
        assert not connection.closed()
        assert connection.rest == b""


def test_die_after_chunks() -> None:
    with running_sim(*ARGUMENTS, "--fault", "die-after-chunks=2") as sim:
        connection, response = stream(sim)
        with connection:
            assert len(response.chunks) == 2
            assert not response.whole
        assert sim.process.wait(timeout=10) == 1


def test_drip_is_the_same_answer_a_byte_at_a_time(sim: SimProcess) -> None:
    sim.fault("drip", 0.0, 1)
    body = {**BODY, "max_tokens": 1, "stream": True}
    with sim.connect() as connection:
        connection.send(http_request("POST", CHAT, body))
        dripped = connection.read()
    assert dripped.whole
    plain = sim.request("POST", CHAT, body)
    assert [event if event == "[DONE]" else event["choices"] for event in dripped.events()] == [
        event if event == "[DONE]" else event["choices"] for event in plain.events()
    ]


def test_the_first_event_is_an_error(sim: SimProcess) -> None:
    sim.fault("first-event-error", True, 1)
    events = sim.request("POST", CHAT, STREAM).events()
    assert events[0]["error"]["code"] == 500
    assert events[1:] == ["[DONE]"]
    assert sim.stats()["running"] == 0


def test_comments_before_the_first_event(sim: SimProcess) -> None:
    sim.fault("keepalive-comments", 3, 1)
    response = sim.request("POST", CHAT, STREAM)
    assert response.chunks[:3] == [b": keep-alive\n\n"] * 3
    assert response.events()[-1] == "[DONE]"


def test_trailing_bytes(sim: SimProcess) -> None:
    sim.fault("trailing-bytes", 5, 1)
    with sim.connect() as connection:
        connection.send(http_request("POST", CHAT, BODY))
        assert connection.read().status == 200
        assert connection.read_exactly(5) == b"\0" * 5


def test_cached_tokens_lie(sim: SimProcess) -> None:
    sim.fault("cached-tokens", 777, 1)
    details = sim.request("POST", CHAT, BODY).json()["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == 777
    assert sim.request("POST", CHAT, BODY).json()["usage"]["prompt_tokens_details"]["cached_tokens"] < 777


def test_slow_metrics_do_not_delay_anything_else(sim: SimProcess) -> None:
    sim.fault("slow-metrics", 30.0, 1)
    with sim.connect() as connection:
        connection.send(http_request("GET", "/metrics"))
        assert works(sim)
        assert sim.request("GET", "/metrics").status == 200


@pytest.mark.parametrize(("value", "status"), [("garbage", 200), ("empty", 200), ("error", 500)])
def test_bad_models(sim: SimProcess, value: str, status: int) -> None:
    sim.fault("bad-models", value, 1)
    response = sim.request("GET", "/v1/models")
    assert response.status == status
    assert b"sim-8b" not in response.body
    assert b"sim-8b" in sim.request("GET", "/v1/models").body


def test_unhealthy_and_dead(sim: SimProcess) -> None:
    sim.fault("unhealthy")
    assert sim.request("GET", "/health").status == 503
    assert works(sim)
    sim.fault("unhealthy", False)
    sim.fault("engine-dead")
    assert sim.request("GET", "/health").status == 503
    response = sim.request("POST", CHAT, BODY)
    assert response.json()["error"]["type"] == "InternalServerError"


def test_refuse_and_accept_again(sim: SimProcess) -> None:
    with sim.connect() as idle:
        idle.send(http_request("GET", "/version"))
        idle.read()
        sim.fault("refuse")
        assert not idle.closed()
        with pytest.raises(ConnectionRefusedError):
            sim.connect()
    sim.fault("refuse", False)
    assert works(sim)


def test_nobody_else_gets_the_port_meanwhile(sim: SimProcess) -> None:
    sim.fault("refuse")
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((sim.host, sim.port))
    for _ in range(3):
        sim.fault("refuse", False)
        sim.fault("refuse", 0.01)
        sim.fault("status", 400, 1)  # while it opens again by itself
        sim.fault("status", None)
    sim.fault("refuse", False)
    assert works(sim)


def test_cold_restart_empties_cache_and_counters(sim: SimProcess) -> None:
    body = {"messages": [{"role": "user", "content": "some words " * 60}], "max_tokens": 1}
    for _ in range(2):
        last = sim.request("POST", CHAT, body)
    assert last.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert sim.stats()["kv_event_sequence"] > 0
    sim.fault("cold-restart")
    assert sim.stats()["kv_event_sequence"] == 0
    assert sim.request("POST", CHAT, body).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_unknown_kinds_and_values_are_refused(sim: SimProcess) -> None:
    for body in ({"kind": "nope"}, {"kind": "status", "value": 418}, {"kind": "drip", "value": -1}, []):
        assert sim.request("POST", "/sim/fault", body).status == 400
    assert sim.stats()["faults"] == {}
