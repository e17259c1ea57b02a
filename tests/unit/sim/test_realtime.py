"""One websocket of /v1/realtime without a connection: bounds, refusals and ends."""

from __future__ import annotations

import base64
import json
from array import array
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from websockets.frames import Frame
from websockets.frames import Opcode as Foreign

from router.sim import calls, realtime
from router.sim.adapters import Adapters
from router.sim.calls import ApiError, CallLimits
from router.sim.realtime import RealtimeSession

LIMITS = CallLimits(max_model_len=64, default_output_tokens=16, block_size=16, auto_tool_choice=False, seed=0)


class FakeExchange:
    """What a session uses of an exchange."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.ended: bytes | None = None
        self.on_gone: Callable[[], None] | None = None
        self.receive: Callable[[bytes], None] = lambda _: None

    @property
    def done(self) -> bool:
        return self.ended is not None

    def accept_websocket(self, on_data: Callable[[bytes], None]) -> None:
        self.receive = on_data

    def write_events(self, events: list[bytes]) -> None:
        self.sent += events

    def end_tunnel(self, data: bytes) -> None:
        self.ended = data

    def last(self) -> dict[str, Any]:
        event: dict[str, Any] = json.loads(self.sent[-1][self.sent[-1].index(b"{") :])
        return event

    def tell(self, kind: str, **fields: Any) -> None:
        self.frame(Foreign.TEXT, json.dumps({"type": kind, **fields}).encode())

    def frame(self, opcode: Foreign, payload: bytes) -> None:
        self.receive(Frame(opcode, payload).serialize(mask=True, extensions=[]))

    def say(self, audio: bytes) -> None:
        self.tell("input_audio_buffer.append", audio=base64.b64encode(audio).decode())


class FakeInference:
    """Keeps what it is to transcribe; refuses what the engine would."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self.on_end: Callable[[], None] = lambda: None

    def transcribe(self, exchange: Any, audio: bytes, model: str, on_end: Callable[[], None]) -> bool:
        calls.read_audio(audio, model, LIMITS)
        self.heard.append(audio)
        self.on_end = on_end
        return True


@pytest.fixture
def inference() -> FakeInference:
    return FakeInference()


@pytest.fixture
def exchange(inference: FakeInference) -> FakeExchange:
    exchange = FakeExchange()
    session = RealtimeSession(exchange, inference, Adapters(("sim",)), Random(0), lambda: 5.0)  # type: ignore[arg-type]
    session.begin()
    assert exchange.last()["type"] == "session.created"
    exchange.tell("session.update", model="sim")
    exchange.tell("input_audio_buffer.commit")
    return exchange


def test_audio_beyond_its_bound_is_refused_and_what_came_before_is_kept(
    exchange: FakeExchange, inference: FakeInference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(realtime, "MAX_AUDIO_BYTES", 10)
    exchange.say(b"12345678")
    exchange.say(b"abcd")
    assert exchange.last()["code"] == "invalid_audio"
    exchange.say(b"90")
    exchange.tell("input_audio_buffer.commit", final=True)
    assert inference.heard == [b"1234567890"]


def test_a_second_utterance_waits_for_the_end_of_the_first(exchange: FakeExchange, inference: FakeInference) -> None:
    for text in (b"first.", b"second"):
        exchange.tell("input_audio_buffer.commit")
        exchange.say(text)
        exchange.tell("input_audio_buffer.commit", final=True)
    assert inference.heard == [b"first."]
    inference.on_end()
    exchange.tell("input_audio_buffer.commit", final=True)
    assert inference.heard == [b"first.", b"second"]


def test_audio_that_the_model_cannot_hold_is_refused_in_words(exchange: FakeExchange, inference: FakeInference) -> None:
    exchange.say(bytes(40 * calls.AUDIO_TOKEN_BYTES))
    exchange.tell("input_audio_buffer.commit", final=True)
    assert exchange.last()["code"] == "processing_error"
    assert "maximum context length" in exchange.last()["error"]
    exchange.tell("input_audio_buffer.commit")
    exchange.say(b"less")
    exchange.tell("input_audio_buffer.commit", final=True)
    assert inference.heard == [b"less"]


@pytest.mark.parametrize(
    ("opcode", "payload", "code"),
    [
        pytest.param(Foreign.CLOSE, (1000).to_bytes(2), 1000, id="the client's own close"),
        pytest.param(Foreign.CLOSE, b"", 1000, id="a close without a code"),
        pytest.param(Foreign.BINARY, b"sound", 1003, id="binary"),
        pytest.param(Foreign.CONT, b"of nothing", 1002, id="a broken protocol"),
    ],
)
def test_ends_are_said_and_free_what_is_under_way(
    exchange: FakeExchange, opcode: Foreign, payload: bytes, code: int
) -> None:
    gone: list[bool] = []
    exchange.on_gone = lambda: gone.append(True)
    exchange.frame(opcode, payload)
    assert exchange.ended == b"\x88\x02" + code.to_bytes(2)
    assert gone == [True]


def test_a_ping_is_answered_with_its_own_words(exchange: FakeExchange) -> None:
    exchange.frame(Foreign.PING, b"there?")
    assert exchange.sent[-1] == b"\x8a\x06there?"


def test_equal_audio_has_equal_words_and_one_for_each_80_ms() -> None:
    audio = Random(1).randbytes(5 * calls.AUDIO_TOKEN_BYTES - 100)
    first, second = (calls.read_audio(audio, "sim", LIMITS) for _ in range(2))
    other = calls.read_audio(audio[::-1], "sim", LIMITS)
    assert len(first.prompts[0]) == len(first.choices[0].answer) == 5
    assert first.choices[0].answer.pieces == second.choices[0].answer.pieces != other.choices[0].answer.pieces
    assert isinstance(first.prompts[0], array)
    with pytest.raises(ApiError):
        calls.read_audio(bytes(32 * calls.AUDIO_TOKEN_BYTES), "sim", LIMITS)
