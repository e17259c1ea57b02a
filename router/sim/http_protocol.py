"""HTTP/1.1 as uvicorn speaks it under vLLM: header order and case, chunked framing, keep-alive of 5 s.

One Exchange at a time per connection; further requests wait in order. A client that closes, or half-closes, is gone:
uvicorn does not tell the two apart. Answers that the client does not read stay with their producer (`writable`).
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from email.utils import formatdate
from http import HTTPStatus
from typing import Protocol, cast

import httptools

from router.clock import Clock, TimerHandle
from router.sim.faults import FaultKind
from router.sim.websocket import accept_key

KEEP_ALIVE_S = 5.0
MAX_HEADER_BYTES = 65_536
MAX_PIPELINED = 16
MAX_UNSENT_BYTES = 262_144  # before a producer is told to wait

JSON_TYPE = "application/json"
STREAM_TYPE = "text/event-stream; charset=utf-8"
_REASONS = {status.value: status.phrase for status in HTTPStatus}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"


class Application(Protocol):
    """What the protocol needs of the server behind it. `connections` is the set of open ones."""

    clock: Clock
    connections: set[HttpProtocol]
    max_body_bytes: int
    draining: bool

    def handle(self, exchange: Exchange) -> None:
        """Answer it, now or later."""
        ...

    def wall_time(self) -> float: ...


class DateHeader:
    """The date line, made once a second."""

    def __init__(self, wall_time: Callable[[], float]) -> None:
        self._wall_time = wall_time
        self._second = -1
        self._text = ""

    def __call__(self) -> str:
        second = int(self._wall_time())
        if second != self._second:
            self._second = second
            self._text = formatdate(second, usegmt=True)
        return self._text


class Exchange:
    """One request and its answer.

    Producers set `on_gone` (the client left; called at most once, never after the end) and `on_writable` (the client
    reads again). `cut` is (fault, events left before it strikes).
    """

    __slots__ = (
        "_chunked",
        "_protocol",
        "body",
        "cut",
        "done",
        "drip_s",
        "early",
        "headers",
        "keep_alive",
        "method",
        "on_gone",
        "on_writable",
        "path",
        "query",
        "response_id",
        "started",
        "status",
        "stuck",
        "trailing_bytes",
        "tunnel",
        "vary",
    )

    def __init__(self, protocol: HttpProtocol, method: str, path: str, query: str, headers: dict[str, str]) -> None:
        self._protocol = protocol
        self.method = method
        self.path = path
        self.query = query
        self.headers = headers
        self.body = b""
        self.keep_alive = True
        self.started = False
        self.done = False
        self.stuck = False
        self.status = 0
        self.vary = True
        self.response_id: str | None = None  # for the x-request-id header of the answer
        self.cut: tuple[FaultKind, int] | None = None
        self.drip_s: float | None = None
        self.trailing_bytes = 0
        self.early = b""  # what came behind a request to upgrade
        self.tunnel = False
        self.on_gone: Callable[[], None] | None = None
        self.on_writable: Callable[[], None] | None = None
        self._chunked = False

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "")

    @property
    def websocket_key(self) -> str | None:
        """Of a request to become a websocket; None for any other."""
        options = [option.strip().lower() for option in self.headers.get("connection", "").split(",")]
        if self.method != "GET" or "upgrade" not in options or self.headers.get("upgrade", "").lower() != "websocket":
            return None
        return self.headers.get("sec-websocket-key", "")

    @property
    def writable(self) -> bool:
        return self._protocol.writable

    def accept_websocket(self, on_data: Callable[[bytes], None]) -> None:
        """From here on the connection's bytes go to `on_data`, and events as they are to the client."""
        self.started = self.tunnel = True
        self.status = 101
        key = accept_key(self.websocket_key or "")
        self._protocol.write(
            f"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Accept: {key}\r\ndate: {self._protocol.date()}\r\nserver: uvicorn\r\n\r\n".encode()
        )
        early, self.early = self.early, b""
        self._protocol.begin_tunnel(on_data)
        if early:
            on_data(early)

    def refuse_websocket(self) -> None:
        """In the bytes of uvicorn, whose websockets are answered by another library than its requests."""
        self.started = True
        self.status = 403
        self.keep_alive = False
        self._protocol.write(
            f"HTTP/1.1 403 Forbidden\r\nDate: {self._protocol.date()}\r\nConnection: close\r\nContent-Length: 0\r\n"
            "Content-Type: text/plain; charset=utf-8\r\n\r\n".encode()
        )
        self._end()

    def end_tunnel(self, data: bytes) -> None:
        """A last word, then the end of the connection."""
        if not self.done:
            self._protocol.write(data)
            self.done = True
            self._protocol.close()

    def respond(
        self,
        status: int,
        body: bytes = b"",
        content_type: str | None = JSON_TYPE,
        headers: Sequence[tuple[str, str]] = (),
    ) -> None:
        """The whole answer."""
        lines = [f"{name}: {value}\r\n" for name, value in headers]
        lines.append(f"content-length: {len(body)}\r\n")
        if content_type is not None and (body or status != 200):
            lines.append(f"content-type: {content_type}\r\n")
        head = self._head(status, lines, "")
        if self.cut is not None:
            # There are no events to count: the answer is cut in the middle of its body.
            self._protocol.write(head + body[: len(body) // 2])
            self._strike(self.cut[0])
            return
        self._protocol.write(head if self.method == "HEAD" else head + body)
        self._end()

    def start_stream(self) -> None:
        """The head of a stream of events."""
        self._chunked = True
        self._protocol.write(self._head(200, [f"content-type: {STREAM_TYPE}\r\n"], "transfer-encoding: chunked\r\n"))
        if self.cut is not None and self.cut[1] == 0:
            self._strike(self.cut[0])

    def start_body(self, length: int) -> None:
        """The head of an answer whose body never comes (a fault)."""
        lines = [f"content-length: {length}\r\n", f"content-type: {JSON_TYPE}\r\n"]
        self._protocol.write(self._head(200, lines, ""))

    def write_events(self, events: Sequence[bytes], *, last: bool = False) -> bool:
        """Each event as one chunk, all in one write; with `last` the stream ends. True once it is whole."""
        if self.done or self.stuck:
            return False
        strike: FaultKind | None = None
        if self.cut is not None:
            kind, left = self.cut
            if len(events) >= left:
                events, strike = events[:left], kind
            self.cut = (kind, left - len(events))
        if self.tunnel:
            data = b"".join(events)
        else:
            data = b"".join([b"%x\r\n%b\r\n" % (len(event), event) for event in events])
            if last and strike is None:
                data += _LAST_CHUNK
        self._protocol.write(data)
        if strike is not None:
            self._strike(strike)
        elif last:
            if not self.tunnel:
                self._end()
            return True
        return False

    def stall(self) -> None:
        """Never answer (again)."""
        self.stuck = True

    def reset(self) -> None:
        self._protocol.reset()

    def gone(self) -> None:
        """The connection is lost."""
        if self.done:
            return
        self.done = True
        if self.on_gone is not None:
            self.on_gone()

    def _head(self, status: int, lines: Sequence[str], framing: str) -> bytes:
        self.started = True
        self.status = status
        vary = "vary: Origin\r\n" if self.vary else ""
        request_id = f"x-request-id: {self.response_id}\r\n" if self.response_id is not None else ""
        close = "" if self.keep_alive or "connection" not in self.headers else "connection: close\r\n"
        return (
            f"HTTP/1.1 {status} {_REASONS.get(status, 'Unknown')}\r\ndate: {self._protocol.date()}\r\n"
            f"server: uvicorn\r\n{''.join(lines)}{vary}{request_id}{framing}{close}\r\n"
        ).encode("latin-1")

    def _end(self) -> None:
        self.done = True
        if self.trailing_bytes:
            self._protocol.write(b"\0" * self.trailing_bytes)
        self._protocol.exchange_ended(self)

    def _strike(self, kind: FaultKind) -> None:
        if kind is FaultKind.STALL_AFTER_CHUNKS:
            self.stuck = True
        elif kind is FaultKind.RESET_AFTER_CHUNKS:
            self._protocol.reset()
        elif kind is FaultKind.CLOSE_AFTER_CHUNKS:
            self.stuck = True
            self._protocol.close()
        else:
            # uvloop writes at the end of the iteration; what was promised must be on the wire before the end.
            asyncio.get_running_loop().call_later(0.01, os._exit, 1)
            self.stuck = True


class HttpProtocol(asyncio.Protocol):
    """One connection."""

    __slots__ = (
        "_answering",
        "_application",
        "_closing",
        "_current",
        "_drip",
        "_drip_timer",
        "_expect_continue",
        "_header_bytes",
        "_headers",
        "_idle_timer",
        "_parser",
        "_paused",
        "_queue",
        "_reading_paused",
        "_refused",
        "_request",
        "_request_body",
        "_transport",
        "_tunnel",
        "_url",
        "date",
    )

    def __init__(self, application: Application, date: DateHeader) -> None:
        self._application = application
        self.date = date
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._closing = False
        self._answering = False
        self._paused = False
        self._reading_paused = False
        self._idle_timer: TimerHandle | None = None
        self._drip = bytearray()
        self._drip_timer: TimerHandle | None = None
        self._tunnel: Callable[[bytes], None] | None = None
        # the request being read
        self._url = b""
        self._headers: dict[str, str] = {}
        self._header_bytes = 0
        self._request: Exchange | None = None
        self._request_body: list[bytes] = []
        self._refused = 0
        # read requests: the one being answered, and those behind it
        self._current: Exchange | None = None
        self._queue: deque[Exchange] = deque()

    # -- the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not registered as asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)
        self._application.connections.add(self)
        self._wait_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        self._application.connections.discard(self)
        self._stop_timers()
        self._transport = self._tunnel = None
        current, self._current = self._current, None
        self._queue.clear()
        if current is not None:
            current.gone()

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        if self._tunnel is not None:
            self._tunnel(data)
            return
        self._stop_idle()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # Only a websocket upgrades; any other request is answered as it stands, and what follows it is not read.
            if self._queue:
                self._queue[-1].keep_alive = False
                self._queue[-1].early = data[upgrade.args[0] :]
        except httptools.HttpParserError:
            self._bad_request()
        # Outside of the parser, which would make a 400 of what goes wrong in an answer.
        self._next()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._tell_writable()

    # -- the parser's callbacks

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = {}
        self._header_bytes = 0
        self._request_body = []
        self._refused = 0

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._count_header(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header(len(name) + len(value))
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        method = self._parser.get_method().decode("ascii")
        path, _, query = self._url.partition(b"?")
        request = Exchange(self, method, path.decode("latin-1"), query.decode("latin-1"), self._headers)
        request.keep_alive = self._parser.should_keep_alive() and not self._application.draining
        self._request = request
        if self._headers.get("expect", "").lower() == "100-continue":
            self.write(_CONTINUE)

    def on_body(self, body: bytes) -> None:
        self._request_body.append(body)
        self._refused += len(body)
        if self._refused > self._application.max_body_bytes:
            self._answer_and_close(413, b"Request body is too large.")

    def on_message_complete(self) -> None:
        request, self._request = self._request, None
        if request is None or self._closing:
            return
        request.body = b"".join(self._request_body)
        self._request_body = []
        self._queue.append(request)
        if len(self._queue) >= MAX_PIPELINED and not self._reading_paused and self._transport is not None:
            self._reading_paused = True
            self._transport.pause_reading()

    # -- what exchanges and the server use

    def serves(self, exchange: Exchange | None) -> bool:
        """Whether this is the exchange being answered here."""
        return exchange is not None and self._current is exchange

    @property
    def writable(self) -> bool:
        return not self._paused and len(self._drip) < MAX_UNSENT_BYTES

    def write(self, data: bytes) -> None:
        transport = self._transport
        if transport is None or self._closing or not data:
            return
        delay_s = self._current.drip_s if self._current is not None else None
        if delay_s is None and not self._drip:
            transport.write(data)
            return
        self._drip += data
        if self._drip_timer is None:
            self._drip_timer = self._application.clock.call_later(delay_s or 0.0, self._drip_one, delay_s or 0.0)

    def begin_tunnel(self, on_data: Callable[[bytes], None]) -> None:
        self._tunnel = on_data

    def exchange_ended(self, exchange: Exchange) -> None:
        """Its answer is written: next request, or wait, or close."""
        self._current = None
        if not exchange.keep_alive or self._application.draining:
            self.close()
        elif not self._queue:
            self._wait_idle()
        else:
            self._next()

    def close(self) -> None:
        """Close after what is written has gone out."""
        if self._transport is not None and not self._closing:
            self._closing = True
            if not self._drip:
                self._transport.close()

    def reset(self) -> None:
        """RST instead of FIN, after what is written has been handed to the kernel."""
        transport = self._transport
        if transport is None:
            return
        self._closing = True
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        # uvloop hands writes over at the end of the iteration: abort() here would swallow them.
        asyncio.get_running_loop().call_soon(self._abort)

    def drain(self) -> None:
        """Idle: close now; busy: after the answer, which a tunnel never has."""
        if self._current is None or self._current.tunnel:
            self.close()

    # -- inner parts

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _next(self) -> None:
        """Answer what was read, in order; an answer that is complete at once does not deepen the stack."""
        if self._answering:
            return
        self._answering = True
        try:
            while self._current is None and self._queue and not self._closing and self._transport is not None:
                self._current = self._queue.popleft()
                if self._reading_paused and len(self._queue) < MAX_PIPELINED:
                    self._reading_paused = False
                    self._transport.resume_reading()
                self._stop_idle()
                self._application.handle(self._current)
        finally:
            self._answering = False

    def _count_header(self, count: int) -> None:
        self._header_bytes += count
        if self._header_bytes > MAX_HEADER_BYTES:
            self._answer_and_close(431, b"Request head is too large.")

    def _bad_request(self) -> None:
        if not self._closing:
            self._answer_and_close(400, b"Invalid HTTP request received.")

    def _answer_and_close(self, status: int, text: bytes) -> None:
        if self._closing:
            return
        head = (
            f"HTTP/1.1 {status} {_REASONS[status]}\r\ndate: {self.date()}\r\nserver: uvicorn\r\n"
            f"content-type: text/plain; charset=utf-8\r\ncontent-length: {len(text)}\r\nconnection: close\r\n\r\n"
        )
        self.write(head.encode() + text)
        self._request = None
        self.close()

    def _wait_idle(self) -> None:
        self._stop_idle()
        self._idle_timer = self._application.clock.call_later(KEEP_ALIVE_S, self.close)

    def _stop_idle(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    def _stop_timers(self) -> None:
        self._stop_idle()
        if self._drip_timer is not None:
            self._drip_timer.cancel()
            self._drip_timer = None

    def _drip_one(self, delay_s: float) -> None:
        self._drip_timer = None
        transport = self._transport
        if transport is None:
            return
        transport.write(bytes(self._drip[:1]))
        del self._drip[:1]
        if self._drip:
            self._drip_timer = self._application.clock.call_later(delay_s, self._drip_one, delay_s)
        elif self._closing:
            transport.close()
        else:
            self._tell_writable()

    def _tell_writable(self) -> None:
        current = self._current
        if current is not None and current.on_writable is not None and self.writable:
            current.on_writable()
