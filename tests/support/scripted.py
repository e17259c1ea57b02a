"""Scripted engines and clients: they speak HTTP in bytes, and each engine's answer carries a stamp that tells it apart.

The readers here are the slow and obvious kind on purpose: they share no code with the gateway.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field

from router.clock import Clock, TimerHandle
from tests.support.transports import VirtualTransport

ERROR_EVENT = b'\n\ndata: {"error":'


# -- reading messages -------------------------------------------------------------------------------------------------


def split_head(raw: bytes) -> tuple[bytes, dict[bytes, list[bytes]]]:
    """First line, and header values by lower-case name."""
    first, *lines = raw.removesuffix(b"\r\n\r\n").split(b"\r\n")
    headers: dict[bytes, list[bytes]] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        assert colon, f"a header line without a colon: {line!r}"
        assert name == name.strip(), f"space around a header name: {line!r}"
        headers.setdefault(name.lower(), []).append(value.strip())
    return first, headers


class MalformedMessage(AssertionError):
    """What arrived is not HTTP/1.1."""


class Dechunker:
    """Chunked framing off, one byte after the other."""

    def __init__(self) -> None:
        self.payload = bytearray()
        self.done = False
        self.rest = b""
        self._line = bytearray()
        self._left = 0
        self._state = "size"

    def feed(self, data: bytes) -> None:
        for at in range(len(data)):
            if self.done:
                self.rest += data[at:]
                return
            self._byte(data[at : at + 1])

    def _byte(self, byte: bytes) -> None:
        if self._state == "data":
            self.payload += byte
            self._left -= 1
            if not self._left:
                self._state = "data-end"
            return
        self._line += byte
        if not self._line.endswith(b"\r\n"):
            return
        line = bytes(self._line[:-2])
        self._line.clear()
        if self._state == "size":
            try:
                self._left = int(line.partition(b";")[0], 16)
            except ValueError:
                raise MalformedMessage(f"chunk size {line!r}") from None
            self._state = "data" if self._left else "trailer"
        elif self._state == "data-end":
            if line:
                raise MalformedMessage(f"chunk end {line!r}")
            self._state = "size"
        elif not line:
            self.done = True


@dataclass
class Response:
    """One response as a client reads it."""

    status: int = 0
    headers: dict[bytes, list[bytes]] = field(default_factory=dict)
    payload: bytes = b""
    complete: bool = False
    reset: bool = False
    interim: list[int] = field(default_factory=list)

    def header(self, name: bytes) -> bytes | None:
        values = self.headers.get(name)
        return values[0] if values else None

    @property
    def ours(self) -> bool:
        """An error that the gateway made itself."""
        return self.header(b"x-kvgate-error") is not None

    @property
    def cut(self) -> bool:
        """A stream that the gateway ended with an error event."""
        return ERROR_EVENT in self.payload

    def json(self) -> dict[str, object]:
        value = json.loads(self.payload)
        assert isinstance(value, dict)
        return value


class ResponseReader:
    """Responses out of a byte stream, in order. `methods`: of the requests sent, in order."""

    def __init__(self, methods: list[bytes]) -> None:
        self.responses: list[Response] = []
        self.raw = b""
        self._methods = methods
        self._buffer = b""
        self._current: Response | None = None
        self._interim: list[int] = []
        self._length: int | None = None
        self._dechunker: Dechunker | None = None
        self.tunnel = False

    def feed(self, data: bytes) -> None:
        self.raw += data
        self._buffer += data
        while self._buffer and self._step():
            pass

    def ended(self, reset: bool) -> None:
        """The connection is over."""
        current = self._current
        if current is None:
            return
        current.reset = reset
        if self._length is None and self._dechunker is None and not self.tunnel:
            current.complete = not reset
        self._current = None

    @property
    def open(self) -> Response | None:
        return self._current

    def _step(self) -> bool:
        if self._current is None:
            return self._head()
        current = self._current
        if self._dechunker is not None:
            self._dechunker.feed(self._buffer)
            current.payload = bytes(self._dechunker.payload)
            self._buffer = self._dechunker.rest
            if self._dechunker.done:
                self._end()
                return True
            return False
        take = len(self._buffer) if self._length is None else self._length - len(current.payload)
        current.payload += self._buffer[:take]
        self._buffer = self._buffer[take:]
        if self._length is not None and len(current.payload) == self._length:
            self._end()
            return True
        return False

    def _head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        first, headers = split_head(self._buffer[: end + 4])
        self._buffer = self._buffer[end + 4 :]
        version, status = first.split(b" ")[:2]
        if version != b"HTTP/1.1":
            raise MalformedMessage(f"status line {first!r}")
        code = int(status)
        if 100 <= code < 200 and code != 101:
            self._interim.append(code)
            return True
        at = len(self.responses)
        if at >= len(self._methods):
            raise MalformedMessage(f"an answer that nobody asked for: {first!r}")
        response = self._current = Response(code, headers, interim=self._interim)
        self._interim = []
        self.responses.append(response)
        self._dechunker = None
        self._length = None
        lengths, codings = headers.get(b"content-length", []), headers.get(b"transfer-encoding", [])
        if len(lengths) + len(codings) > 1:
            raise MalformedMessage("more than one framing")
        if len(headers.get(b"date", [])) != 1:
            raise MalformedMessage("not exactly one Date")
        if code == 101:
            self.tunnel = True
        elif self._methods[at] == b"HEAD" or code in (204, 304):
            self._length = 0
        elif codings:
            self._dechunker = Dechunker()
        elif lengths:
            self._length = int(lengths[0])
        if self._length == 0:
            self._end()
        return True

    def _end(self) -> None:
        assert self._current is not None
        self._current.complete = True
        self._current = None


# -- engines ----------------------------------------------------------------------------------------------------------


@dataclass
class Received:
    """One request as an engine reads it."""

    line: bytes
    headers: dict[bytes, list[bytes]]
    body: bytes = b""

    @property
    def method(self) -> bytes:
        return self.line.split(b" ")[0]

    def header(self, name: bytes) -> bytes | None:
        values = self.headers.get(name)
        return values[0] if values else None


class EngineConnection(asyncio.Protocol):
    """The engine's end: reads requests strictly, hands each to `on_request(self, received)`."""

    def __init__(self, on_request: Callable[[EngineConnection, Received], None]) -> None:
        self.transport: VirtualTransport | None = None
        self.received: list[Received] = []
        self.lost = False
        self.eof = False
        self.tunnel: bytearray | None = None
        self.on_lost: Callable[[], None] | None = None
        self._on_request = on_request
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, VirtualTransport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self.tunnel is not None:
            self.tunnel += data
            return
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        line, headers = split_head(self._buffer[: end + 4])
        assert b"transfer-encoding" not in headers, "requests are sent on with Content-Length"
        lengths = headers.get(b"content-length", [b"0"])
        assert len(lengths) == 1
        assert len(headers[b"host"]) == 1
        size = end + 4 + int(lengths[0])
        if len(self._buffer) < size:
            return
        received = Received(line, headers, self._buffer[end + 4 : size])
        self._buffer = self._buffer[size:]
        assert not self._buffer, "nothing may follow a request before its answer"
        self.received.append(received)
        self._on_request(self, received)

    def write(self, data: bytes) -> None:
        if self.transport is not None and not self.lost and not self.transport.is_closing():
            self.transport.write(data)

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def reset(self) -> None:
        if self.transport is not None:
            self.transport.reset()

    def eof_received(self) -> bool:
        self.eof = True
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if self.on_lost is not None:
            self.on_lost()


def chunked(pieces: list[bytes], *, last: bool = True) -> bytes:
    raw = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces if piece)
    return raw + b"0\r\n\r\n" if last else raw


def response_head(status: int, *lines: bytes, phrase: bytes = b"Whatever", version: bytes = b"HTTP/1.1") -> bytes:
    return b"".join(
        (b"%b %d %b\r\nserver: uvicorn\r\n" % (version, status, phrase), *(line + b"\r\n" for line in lines), b"\r\n")
    )


# -- clients ----------------------------------------------------------------------------------------------------------


def request(
    method: bytes = b"GET",
    target: bytes = b"/",
    *lines: bytes,
    body: bytes | None = None,
    chunks: list[bytes] | None = None,
    version: bytes = b"HTTP/1.1",
    host: bytes | None = b"gate",
) -> bytes:
    head = [b"%b %b %b" % (method, target, version)]
    if host is not None:
        head.append(b"Host: " + host)
    head.extend(lines)
    if body is not None:
        head.append(b"Content-Length: %d" % len(body))
    if chunks is not None:
        head.append(b"Transfer-Encoding: chunked")
        body = chunked(chunks)
    return b"\r\n".join(head) + b"\r\n\r\n" + (body or b"")


class Client(asyncio.Protocol):
    """A client's end: sends what it is told, reads answers."""

    def __init__(self) -> None:
        self.transport: VirtualTransport | None = None
        self.methods: list[bytes] = []
        self.reader = ResponseReader(self.methods)
        self.lost = False
        self.eof = False
        self.error: Exception | None = None
        self.on_data: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, VirtualTransport)
        self.transport = transport

    def send(self, raw: bytes, *methods: bytes) -> None:
        """`methods`: of the requests in `raw`; by default one, read from its first word."""
        self.methods.extend(methods or (raw.split(b" ", 1)[0],))
        self.push(raw)

    def push(self, raw: bytes) -> None:
        """Further bytes of a request that was begun."""
        assert self.transport is not None
        if not self.transport.is_closing():
            self.transport.write(raw)

    def data_received(self, data: bytes) -> None:
        self.reader.feed(data)
        if self.on_data is not None:
            self.on_data()

    def eof_received(self) -> bool:
        self.eof = True
        self.reader.ended(reset=False)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self.error = exc
        self.reader.ended(reset=True)  # after an end of the stream this changes nothing

    def close(self) -> None:
        assert self.transport is not None
        self.transport.close()

    def half_close(self) -> None:
        assert self.transport is not None
        self.transport.write_eof()

    def abort(self) -> None:
        assert self.transport is not None
        self.transport.reset()

    @property
    def responses(self) -> list[Response]:
        return self.reader.responses


class Timers:
    """The timers of one script, so that its end ends them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._handles: list[TimerHandle] = []

    def later(self, delay_s: float, callback: Callable[..., object], *args: object) -> None:
        self._handles.append(self._clock.call_later(delay_s, callback, *args))

    def cancel(self) -> None:
        for handle in self._handles:
            handle.cancel()
        self._handles.clear()
