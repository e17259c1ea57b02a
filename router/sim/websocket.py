"""WebSocket (RFC 6455), as much of it as one simulated endpoint needs: the handshake's key, frames in, frames out."""

from __future__ import annotations

import base64
import hashlib
from enum import IntEnum
from typing import Any

import orjson

MAX_MESSAGE_BYTES = 16 * 2**20  # uvicorn's ws_max_size
MAX_CONTROL_BYTES = 125
_GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


class Opcode(IntEnum):
    CONTINUATION = 0
    TEXT = 1
    BINARY = 2
    CLOSE = 8
    PING = 9
    PONG = 10


class ProtocolError(Exception):
    """The client broke the protocol; `code` is for the close frame."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


def accept_key(key: str) -> str:
    """Sec-WebSocket-Accept for a Sec-WebSocket-Key."""
    return base64.b64encode(hashlib.sha1((key + _GUID).encode("latin-1", "replace")).digest()).decode()


def frame(opcode: Opcode, payload: bytes) -> bytes:
    """One whole message, unmasked, as servers send it."""
    size = len(payload)
    if size < 126:
        head = bytes((0x80 | opcode, size))
    elif size < 65_536:
        head = bytes((0x80 | opcode, 126)) + size.to_bytes(2)
    else:
        head = bytes((0x80 | opcode, 127)) + size.to_bytes(8)
    return head + payload


def json_message(value: dict[str, Any]) -> bytes:
    return frame(Opcode.TEXT, orjson.dumps(value))


def close_frame(code: int) -> bytes:
    return frame(Opcode.CLOSE, code.to_bytes(2))


def _unmask(payload: bytes, key: bytes) -> bytes:
    size = len(payload)
    mask = (key * (size // 4 + 1))[:size]
    return (int.from_bytes(payload) ^ int.from_bytes(mask)).to_bytes(size)


class FrameReader:
    """Bytes in, whole messages and control frames out. Holds one message of at most MAX_MESSAGE_BYTES."""

    __slots__ = ("_data", "_kind", "_parts", "_size")

    def __init__(self) -> None:
        self._data = bytearray()
        self._kind: Opcode | None = None  # of the message whose parts are gathered
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> list[tuple[Opcode, bytes]]:
        """ProtocolError for what no client may send."""
        self._data += data
        found: list[tuple[Opcode, bytes]] = []
        while (read := self._frame()) is not None:
            final, opcode, payload = read
            if opcode >= Opcode.CLOSE:
                found.append((opcode, payload))
                continue
            if (opcode is Opcode.CONTINUATION) == (self._kind is None):
                raise ProtocolError(1002, "a continuation of nothing, or a new message inside of another")
            if self._kind is None:
                self._kind = opcode
            self._parts.append(payload)
            self._size += len(payload)
            if final:
                found.append((self._kind, b"".join(self._parts)))
                self._kind, self._parts, self._size = None, [], 0
        return found

    def _frame(self) -> tuple[bool, Opcode, bytes] | None:
        """The next frame if it is there: whether it is the last of its message, its kind, its payload."""
        data = self._data
        if len(data) < 2:
            return None
        first, second = data[0], data[1]
        try:
            opcode = Opcode(first & 0x0F)
        except ValueError:
            raise ProtocolError(1002, "an unknown opcode") from None
        size, at = second & 0x7F, 2
        if first & 0x70 or not second & 0x80:
            raise ProtocolError(1002, "an extension that was not agreed on, or a frame without a mask")
        if opcode >= Opcode.CLOSE and (size > MAX_CONTROL_BYTES or not first & 0x80):
            raise ProtocolError(1002, "a control frame that is long or in parts")
        if size > 125:
            width = 2 if size == 126 else 8
            if len(data) < at + width:
                return None
            size = int.from_bytes(data[at : at + width])
            at += width
        if self._size + size > MAX_MESSAGE_BYTES:
            raise ProtocolError(1009, "a message that is too long")
        if len(data) < at + 4 + size:
            return None
        key = bytes(data[at : at + 4])
        payload = _unmask(bytes(data[at + 4 : at + 4 + size]), key)
        del data[: at + 4 + size]
        return bool(first & 0x80), opcode, payload
