"""A websocket client on /v1/realtime through the gateway and two simulated engines."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import ExitStack
from random import Random
from socket import SHUT_RDWR
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from tests.support.client_fleet import MODEL, ClientFleet, client_fleet
from tests.support.gateway_process import next_id
from tests.support.sim_process import http_request

SECOND_BYTES = 32_000  # 16 kHz, 16 bits


@pytest.fixture(scope="module")
def fleet() -> Iterator[ClientFleet]:
    with client_fleet("--realtime") as fleet:
        yield fleet


def realtime(fleet: ClientFleet, request_id: str | None = None, path: str = "/v1/realtime") -> ClientConnection:
    url = fleet.gateway.url.replace("http://", "ws://") + path
    headers = {"X-Request-Id": request_id or next_id()}
    return connect(url, additional_headers=headers, open_timeout=20, close_timeout=20, proxy=None)


def tell(socket: ClientConnection, kind: str, **fields: Any) -> None:
    socket.send(json.dumps({"type": kind, **fields}))


def hear(socket: ClientConnection) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(socket.recv(timeout=20))
    return event


def say(socket: ClientConnection, audio: bytes) -> None:
    tell(socket, "input_audio_buffer.append", audio=base64.b64encode(audio).decode())


def transcription(socket: ClientConnection) -> tuple[list[str], dict[str, Any]]:
    """Its deltas, and what ended them."""
    deltas = []
    while (event := hear(socket))["type"] == "transcription.delta":
        deltas.append(event["delta"])
    return deltas, event


def transcribe(socket: ClientConnection, audio: bytes) -> tuple[list[str], dict[str, Any]]:
    tell(socket, "session.update", model=MODEL)
    tell(socket, "input_audio_buffer.commit")
    for at in range(0, len(audio), SECOND_BYTES // 2):
        say(socket, audio[at : at + SECOND_BYTES // 2])
    tell(socket, "input_audio_buffer.commit", final=True)
    return transcription(socket)


def noise(seconds: int, seed: int) -> bytes:
    return Random(seed).randbytes(seconds * SECOND_BYTES)


def test_a_transcription_and_a_second_one_on_the_same_websocket(fleet: ClientFleet) -> None:
    with realtime(fleet, request_id := next_id()) as socket:
        assert socket.response is not None
        backend = socket.response.headers["x-kvgate-backend"]
        assert backend in ("gpu-0", "gpu-1")
        created = hear(socket)
        assert created["type"] == "session.created"
        assert created["id"].startswith("sess-")
        deltas, done = transcribe(socket, noise(2, 1))
        assert done["type"] == "transcription.done"
        assert len(deltas) > 1
        assert "".join(deltas) == done["text"]
        assert done["usage"]["prompt_tokens"] == done["usage"]["completion_tokens"] == 25  # one for each 80 ms
        again, _ = transcribe(socket, noise(2, 1))
        assert "".join(again) == done["text"]
        other, _ = transcribe(socket, noise(1, 2))
        assert "".join(other) != done["text"]
        assert fleet.gateway.metric("in_flight", backend=backend) == 1
    line = fleet.gateway.access(request_id)
    assert (line["status"], line["backend"], line["path"]) == (101, backend, "/v1/realtime")
    assert line["ended"] in ("client@streaming", "upstream@streaming", "upstream@done")


def test_what_is_wrong_is_said_and_the_websocket_stays(fleet: ClientFleet) -> None:
    with realtime(fleet) as socket:
        hear(socket)
        socket.send("no json")
        assert hear(socket) == {"type": "error", "error": "Invalid JSON", "code": "invalid_json"}
        for kind, fields, code in (
            ("input_audio_buffer.commit", {}, "model_not_validated"),
            ("session.update", {}, "invalid_event"),
            ("session.update", {"model": "nobody"}, "model_not_found"),
            ("input_audio_buffer.append", {"audio": "%"}, "invalid_audio"),
            ("dance", {}, "unknown_event"),
        ):
            tell(socket, kind, **fields)
            event = hear(socket)
            assert (event["type"], event["code"]) == ("error", code)
        assert transcribe(socket, noise(1, 3))[1]["type"] == "transcription.done"


def test_a_large_message_and_small_ones_pass_as_they_are(fleet: ClientFleet) -> None:
    with realtime(fleet) as socket:
        hear(socket)
        tell(socket, "session.update", model=MODEL)
        tell(socket, "input_audio_buffer.commit")
        text = json.dumps({"type": "input_audio_buffer.append", "audio": base64.b64encode(noise(60, 4)).decode()})
        socket.send(text[at : at + 100_000] for at in range(0, len(text), 100_000))  # one message in 26 frames
        tell(socket, "input_audio_buffer.commit", final=True)
        deltas, done = transcription(socket)
        assert done["usage"]["prompt_tokens"] == 750
        assert "".join(deltas) == done["text"]
        assert socket.ping().wait(20)


def test_many_at_once_are_spread_over_both_engines_and_counted(fleet: ClientFleet) -> None:
    with ExitStack() as stack:
        sockets = [stack.enter_context(realtime(fleet)) for _ in range(8)]
        backends = {socket.response.headers["x-kvgate-backend"] for socket in sockets if socket.response is not None}
        assert backends == {"gpu-0", "gpu-1"}
        assert fleet.gateway.metric("in_flight") == 8
        texts = set()
        for at, socket in enumerate(sockets):
            hear(socket)
            texts.add(transcribe(socket, noise(1, 10 + at))[1]["text"])
        assert len(texts) == 8
    fleet.until_idle()


def test_one_who_leaves_in_the_middle_frees_the_engine(fleet: ClientFleet) -> None:
    aborted = sum(sim.stats()["aborted"] for sim in fleet.sims)
    # so slow that nobody could have heard the end
    fleet.fault("drip", 0.01, 1)
    with realtime(fleet) as socket:
        hear(socket)
        tell(socket, "session.update", model=MODEL)
        tell(socket, "input_audio_buffer.commit")
        say(socket, noise(80, 5))
        tell(socket, "input_audio_buffer.commit", final=True)
        hear(socket)
        socket.socket.shutdown(SHUT_RDWR)  # no close frame: its process is gone
    fleet.until_idle()
    fleet.gateway.until(lambda: sum(sim.stats()["aborted"] for sim in fleet.sims) > aborted, "the engine noticed")
    fleet.fault("drip", False)


def test_an_engine_that_dies_closes_the_websocket_and_does_not_pass_for_an_end(fleet: ClientFleet) -> None:
    fleet.fault("reset-after-chunks", 2, 1)
    with realtime(fleet) as socket:
        hear(socket)
        tell(socket, "session.update", model=MODEL)
        tell(socket, "input_audio_buffer.commit")
        say(socket, noise(2, 6))
        tell(socket, "input_audio_buffer.commit", final=True)
        with pytest.raises(ConnectionClosed) as closed:
            transcription(socket)
        assert closed.value.rcvd is None  # without a close frame: abnormal, 1006
    fleet.fault("reset-after-chunks", False)


def test_a_refusal_is_the_engine_s_own(fleet: ClientFleet) -> None:
    with pytest.raises(InvalidStatus) as refused:
        realtime(fleet, path="/v1/nothing").close()
    response = refused.value.response
    assert response.status_code == 403
    assert response.headers["x-kvgate-backend"] in ("gpu-0", "gpu-1")
    assert "x-kvgate-error" not in response.headers


def test_the_other_requests_of_the_fleet_go_on_beside_it(fleet: ClientFleet) -> None:
    with realtime(fleet) as socket:
        hear(socket)
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
        with fleet.gateway.connect() as client:
            for _ in range(3):
                client.send(http_request("POST", "/v1/chat/completions", body))
                assert client.read().json()["usage"]["completion_tokens"] == 3
        assert transcribe(socket, noise(1, 7))[1]["type"] == "transcription.done"
