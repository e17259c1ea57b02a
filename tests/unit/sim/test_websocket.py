"""The simulated engine's frames against those of a foreign implementation, and what it refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.client import ClientProtocol
from websockets.frames import Frame
from websockets.frames import Opcode as Foreign
from websockets.uri import parse_uri

from router.sim import websocket
from router.sim.websocket import FrameReader, Opcode, ProtocolError, accept_key, close_frame, frame

KINDS = {Opcode.TEXT: Foreign.TEXT, Opcode.BINARY: Foreign.BINARY, Opcode.PING: Foreign.PING, Opcode.PONG: Foreign.PONG}


def client_bytes(opcode: Foreign, payload: bytes, *, final: bool = True) -> bytes:
    """A frame as clients send it: masked."""
    return Frame(opcode, payload, fin=final).serialize(mask=True, extensions=[])


def test_the_key_is_that_of_the_rfc() -> None:
    assert accept_key("dGhlIHNhbXBsZSBub25jZQ==") == "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="


@given(
    messages=st.lists(st.tuples(st.sampled_from([Opcode.TEXT, Opcode.BINARY, Opcode.PING]), st.binary(max_size=125))),
    long=st.sampled_from([0, 126, 65_535, 65_536, 70_000]),
    parts=st.integers(1, 4),
    cut=st.integers(1, 400),
)
def test_any_cut_of_what_a_client_sends_gives_its_messages(
    messages: list[tuple[Opcode, bytes]], long: int, parts: int, cut: int
) -> None:
    payload = bytes(at % 251 for at in range(long))
    size = max(1, -(-long // parts))
    pieces = [payload[at : at + size] for at in range(0, long, size)] or [b""]
    sent = b"".join(client_bytes(KINDS[kind], data) for kind, data in messages)
    for at, piece in enumerate(pieces):
        kind = Foreign.BINARY if at == 0 else Foreign.CONT
        sent += client_bytes(kind, piece, final=at == len(pieces) - 1)
        sent += client_bytes(Foreign.PONG, b"between")  # a control frame may come inside of a message
    reader, found = FrameReader(), []
    for at in range(0, len(sent), cut * max(1, len(sent) // 2000)):
        found += reader.feed(sent[at : at + cut * max(1, len(sent) // 2000)])
    assert [one for one in found if one != (Opcode.PONG, b"between")] == [*messages, (Opcode.BINARY, payload)]


@given(payload=st.one_of(st.binary(max_size=300), st.sampled_from([b"x" * 65_535, b"x" * 65_536])))
def test_a_foreign_client_reads_our_frames(payload: bytes) -> None:
    client = ClientProtocol(parse_uri("ws://engine/"))
    request = client.connect()
    client.send_request(request)
    key = accept_key(request.headers["Sec-WebSocket-Key"])
    client.receive_data(
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Accept: " + key.encode() + b"\r\n\r\n" + frame(Opcode.BINARY, payload) + close_frame(1001)
    )
    _, message, close = client.events_received()
    assert isinstance(message, Frame)
    assert (message.opcode, bytes(message.data)) == (Foreign.BINARY, payload)
    assert isinstance(close, Frame)
    assert (close.opcode, bytes(close.data)) == (Foreign.CLOSE, (1001).to_bytes(2))


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        pytest.param(b"\x81\x01x", 1002, id="no mask"),
        pytest.param(b"\xc1\x81\0\0\0\0x", 1002, id="an extension"),
        pytest.param(b"\x83\x81\0\0\0\0x", 1002, id="an unknown kind"),
        pytest.param(b"\x80\x81\0\0\0\0x", 1002, id="a continuation of nothing"),
        pytest.param(b"\x01\x81\0\0\0\0x\x81\x81\0\0\0\0x", 1002, id="a message inside of a message"),
        pytest.param(b"\x89\xfe\0\x80\0\0\0\0", 1002, id="a long ping"),
        pytest.param(b"\x09\x80\0\0\0\0", 1002, id="a ping in parts"),
        pytest.param(b"\x82\xff\x7f\xff\xff\xff\xff\xff\xff\xff", 1009, id="a huge frame"),
    ],
)
def test_what_no_client_may_send(sent: bytes, code: int) -> None:
    with pytest.raises(ProtocolError) as refused:
        FrameReader().feed(sent)
    assert refused.value.code == code


def test_a_message_has_its_bound_however_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "MAX_MESSAGE_BYTES", 10)
    whole = client_bytes(Foreign.TEXT, b"12345", final=False)
    assert FrameReader().feed(whole + client_bytes(Foreign.CONT, b"67890")) == [(Opcode.TEXT, b"1234567890")]
    with pytest.raises(ProtocolError) as refused:
        FrameReader().feed(whole + client_bytes(Foreign.CONT, b"678901"))
    assert refused.value.code == 1009
