"""One client connection: bytes in, requests out, one exchange at a time and in order.

A connection lives through HEAD -> BODY -> BUSY -> HEAD ... until either side ends it. While an exchange is under way
reading goes on, because that is how a client that leaves is noticed; what it sends ahead (pipelining) waits in a
bounded buffer. As with vLLM, a half-close counts as leaving.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Final, cast

from native.body_framing import BadFraming, BodyFramer, Framing
from router.clock import Clock, TimerHandle
from router.errors import RouterError, Source, bad_request
from router.wire.http_head import BARE_LF, HEAD_END, RequestHead, parse_request_head

if TYPE_CHECKING:
    from router.net.exchange_api import DownstreamEvents, ExchangeFactory

PIPELINE_LIMIT_BYTES: Final = 65536  # sent ahead of its turn; beyond it reading pauses
WRITE_HIGH_WATER_BYTES: Final = 65536  # unsent to a slow client; beyond it reading from the engine pauses
TIMER_STEP_S: Final = 0.001  # the loop's timers are no finer
LINGER_S: Final = 2.0  # how long a refused client may still send before its connection is cut
FLUSH_S: Final = 30.0  # how long a closed connection may take to hand over its last bytes
LINGER_LIMIT_BYTES: Final = 16 * 1024 * 1024
RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER for no time at all


class _Stage(Enum):
    HEAD = auto()
    BODY = auto()
    BUSY = auto()  # an exchange has the whole request
    TUNNEL = auto()
    LINGER = auto()  # answered and closing; what still comes is thrown away
    CLOSED = auto()


# Names of this module: a Final costs nothing to look up, a member of an Enum does.
_HEAD: Final = _Stage.HEAD
_BODY: Final = _Stage.BODY
_BUSY: Final = _Stage.BUSY
_TUNNEL: Final = _Stage.TUNNEL
_LINGER: Final = _Stage.LINGER
_CLOSED: Final = _Stage.CLOSED
_NONE: Final = Framing.NONE
_LENGTH: Final = Framing.LENGTH
_CHUNKED: Final = Framing.CHUNKED


@dataclass(frozen=True, slots=True)
class DownstreamLimits:
    max_header_bytes: int
    max_body_bytes: int
    client_body_s: float  # a head once begun; a body between two pieces of it
    client_keepalive_s: float


class Downstream(asyncio.Protocol):
    """`connections` is the set of all open ones; a connection enters and leaves it by itself."""

    def __init__(
        self, factory: ExchangeFactory, clock: Clock, limits: DownstreamLimits, connections: set[Downstream]
    ) -> None:
        self._factory = factory
        self._clock = clock
        self._now = clock.now
        self._limits = limits
        self._connections = connections
        self._transport: asyncio.Transport | None = None
        self.peer = b"unknown"
        # the request being read
        self._stage: _Stage = _HEAD
        self._buffer = b""
        self._scanned = 0  # bytes of the buffer known to hold no end of a head
        self._head: RequestHead | None = None
        self._pieces: list[bytes] = []
        self._body_bytes = 0
        self._chunked_body = bytearray()
        self._framer: BodyFramer | None = None
        # the request being answered
        self._exchange: DownstreamEvents | None = None
        self._reading_paused = False
        self._writing_paused = False
        self._draining = False
        self._lingered_bytes = 0
        # one timer for all deadlines of the connection, moved lazily
        self.deadline: float | None = None
        self._timer: TimerHandle | None = None
        self._timer_at = 0.0

    # -- the transport's calls ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._stage is _CLOSED:  # refused before it began
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_WATER_BYTES)
        peer = self._transport.get_extra_info("peername")
        if isinstance(peer, tuple):
            self.peer = str(peer[0]).encode("ascii", "replace")
        self._connections.add(self)
        self.set_deadline(self._limits.client_keepalive_s)

    def data_received(self, data: bytes) -> None:
        stage = self._stage
        if stage is _HEAD:
            self._buffer = self._buffer + data if self._buffer else data
            if self._writing_paused:
                self._bound_pipeline()
            else:
                self._read_head()
        elif stage is _BODY:
            self._read_body(data)
        elif stage is _BUSY:
            self._buffer += data
            self._bound_pipeline()
        elif stage is _TUNNEL:
            assert self._exchange is not None
            self._exchange.on_tunnel_data(data)
        elif stage is _LINGER:
            self._lingered_bytes += len(data)
            if self._lingered_bytes > LINGER_LIMIT_BYTES:
                self.abort()

    def eof_received(self) -> bool:
        unanswered = self._exchange is not None
        self._leave()
        if unanswered:
            self.abort()  # it still reads: a proper end would pass off what it has of an answer as the whole
        else:
            self._close()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        self._connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._transport = None

    def pause_writing(self) -> None:
        self._writing_paused = True
        if self._exchange is not None:
            self._exchange.on_client_slow()

    def resume_writing(self) -> None:
        self._writing_paused = False
        if self._exchange is not None:
            self._exchange.on_client_ready()
        elif self._stage is _HEAD:
            self._next_request_soon()

    # -- reading a request --------------------------------------------------------------------------------------------

    def _read_head(self) -> None:
        buffer = self._buffer
        if buffer[:1] in (b"\r", b"\n"):  # a robust server skips empty lines before a request (RFC 9112 section 2.2)
            buffer = self._buffer = buffer.lstrip(b"\r\n")
            self._scanned = 0
        if not buffer:
            return
        end = buffer.find(HEAD_END, max(self._scanned - 3, 0))
        size = end + 4 if end >= 0 else len(buffer)
        if size > self._limits.max_header_bytes:
            self._refuse_head(
                RouterError(431, "headers_too_large", "The request head is too large.", source=Source.CLIENT)
            )
            return
        if end < 0 and BARE_LF.search(buffer, max(self._scanned - 1, 0)) is not None:
            self._refuse_head(bad_request("The request head has a bare LF.", code="invalid_http"))
            return
        if end < 0:
            if not self._scanned:
                self.set_deadline(self._limits.client_body_s)
            self._scanned = len(buffer)
            return
        self._scanned = 0
        self._buffer = buffer[size:] if size < len(buffer) else b""
        try:
            head = parse_request_head(buffer[:size] if size < len(buffer) else buffer)
        except RouterError as e:
            self._refuse_head(e)
            return
        self._head = head
        exchange = self._exchange = self._factory.open_exchange(self, head)
        if head.framing is _NONE or (head.framing is _LENGTH and head.content_length == 0):
            self._hand_over(exchange, b"")
            return
        refusal = exchange.refusal()
        if refusal is not None:
            exchange.on_refused(refusal)
            return
        if head.framing is _LENGTH and head.content_length > self._limits.max_body_bytes:
            exchange.on_refused(self._too_large())
            return
        if head.expect is not None:
            if head.expect != b"100-continue":
                exchange.on_refused(bad_request("The expectation is not known.", code="expectation", status=417))
                return
            if not self._buffer and not head.http_1_0:
                self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._stage = _BODY
        self._body_bytes = 0
        if head.framing is _CHUNKED:
            self._framer = BodyFramer(_CHUNKED)
        if not self._buffer:
            self.set_deadline(self._limits.client_body_s)
        else:
            data, self._buffer = self._buffer, b""
            self._read_body(data)

    def _read_body(self, data: bytes) -> None:
        exchange, head = self._exchange, self._head
        assert exchange is not None
        assert head is not None
        if self._framer is not None:
            try:
                used = self._framer.feed_into(data, self._chunked_body)
            except BadFraming as e:
                exchange.on_refused(bad_request(f"The chunked body is broken: {e}.", code="invalid_http"))
                return
            if len(self._chunked_body) > self._limits.max_body_bytes:
                exchange.on_refused(self._too_large())
                return
            if self._framer.done:
                self._buffer = data[used:]
                body = bytes(self._chunked_body)
                self._chunked_body = bytearray()
                self._framer = None
                self._hand_over(exchange, body)
            else:
                self.set_deadline(self._limits.client_body_s)
            return
        missing = head.content_length - self._body_bytes
        if len(data) < missing:
            self._pieces.append(data)
            self._body_bytes += len(data)
            self.set_deadline(self._limits.client_body_s)
            return
        if len(data) > missing:
            self._buffer = data[missing:]
            data = data[:missing]
        if self._pieces:
            self._pieces.append(data)
            data = b"".join(self._pieces)
            self._pieces = []
        self._hand_over(exchange, data)

    def _hand_over(self, exchange: DownstreamEvents, body: bytes) -> None:
        self._stage = _BUSY
        self.deadline = None
        self._bound_pipeline()
        exchange.on_request(body)

    def _refuse_head(self, error: RouterError) -> None:
        self._exchange = self._factory.open_exchange(self, None)
        self._exchange.on_refused(error)

    def _too_large(self) -> RouterError:
        limit = self._limits.max_body_bytes
        return bad_request(f"The body is over the limit of {limit} bytes.", code="body_too_large", status=413)

    # -- what an exchange asks ----------------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def exchange_done(self, keep_alive: bool) -> None:
        """The answer is written whole. Without `keep_alive` the connection closes once it is flushed."""
        request_read = self._stage in (_BUSY, _TUNNEL)
        self._exchange = None
        self._head = None
        if self._stage is _CLOSED or self._transport is None:
            return
        if not request_read:
            self._linger()
        elif not keep_alive or self._draining:
            self._close()
        else:
            self._stage = _HEAD
            self.set_deadline(self._limits.client_keepalive_s)
            if not self._writing_paused:  # else: no further answers for one who does not read those it has
                self._next_request_soon()

    def start_tunnel(self) -> bytes:
        """From now on bytes pass unread. Returns those that came early."""
        self._stage = _TUNNEL
        early, self._buffer = self._buffer, b""
        self._resume_reading()
        return early

    def pause_reading(self) -> None:
        self._pause_reading()

    def resume_reading(self) -> None:
        self._resume_reading()

    def close(self) -> None:
        """Flush, then end the connection; an unfinished body stays visibly unfinished where its framing tells."""
        self._exchange = None
        self._close()

    def abort(self) -> None:
        """Reset the connection at once, so that nobody takes what was sent for a whole answer."""
        self._exchange = None
        self._stage = _CLOSED
        if self._transport is None:
            return
        connection = self._transport.get_extra_info("socket")
        if connection is not None:
            # A transport's abort() alone ends it in order once all bytes are with the kernel: a body that ends with
            # its connection would then have had its end.
            with suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        self._transport.abort()

    def drain(self) -> None:
        """No further request on this connection: close it now if it is idle, else after its answer."""
        self._draining = True
        if self._stage is _HEAD and not self._buffer:
            self._close()

    # -- helpers of the above -----------------------------------------------------------------------------------------

    def _next_request_soon(self) -> None:
        self._resume_reading()
        if self._buffer:
            # not from inside of the exchange that just ended: pipelined requests must not nest
            self._clock.call_later(0.0, self._next_request)

    def _next_request(self) -> None:
        if self._stage is _HEAD and self._transport is not None and self._buffer and not self._writing_paused:
            self._read_head()

    def _bound_pipeline(self) -> None:
        if len(self._buffer) > PIPELINE_LIMIT_BYTES:
            self._pause_reading()

    def _leave(self) -> None:
        """The client is gone: whatever is under way has nobody to answer to."""
        exchange, self._exchange = self._exchange, None
        self._stage = _CLOSED
        self.deadline = None
        self._buffer = b""
        self._pieces = []
        self._chunked_body = bytearray()
        if exchange is not None:
            exchange.on_client_gone()

    def _close(self) -> None:
        self._stage = _CLOSED
        if self._transport is not None:
            self._transport.close()
            self.set_deadline(FLUSH_S)

    def _linger(self) -> None:
        """Closing with unread bytes would reset the connection and may take the answer with it: read on a little."""
        self._stage = _LINGER
        self._buffer = b""
        self._pieces = []
        self._chunked_body = bytearray()
        assert self._transport is not None
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._resume_reading()
        self.set_deadline(LINGER_S)

    def _pause_reading(self) -> None:
        if not self._reading_paused and self._transport is not None:
            self._reading_paused = True
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._reading_paused and self._transport is not None:
            self._reading_paused = False
            self._transport.resume_reading()

    def set_deadline(self, delay_s: float) -> None:
        """When the present state has lasted too long. An exchange sets its own while the request is its; a deadline
        that only moves on may be written to `deadline` (clock time), as the timer looks there when it fires."""
        deadline = self.deadline = self._now() + delay_s
        if self._timer is None or self._timer_at > deadline:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._clock.call_later(delay_s, self._on_timer)
            self._timer_at = deadline

    def _on_timer(self) -> None:
        self._timer = None
        deadline = self.deadline
        if deadline is None:
            return
        left = deadline - self._now()
        if left > 0:
            self._timer = self._clock.call_later(max(left, TIMER_STEP_S), self._on_timer)
            self._timer_at = deadline
            return
        self.deadline = None
        if self._stage is _HEAD and (self._writing_paused or not self._buffer):
            self._close()
        elif self._stage in (_BUSY, _TUNNEL):
            if self._exchange is not None:
                self._exchange.on_deadline()
        elif self._stage is _HEAD:
            self._refuse_head(_too_slow("head"))
        elif self._stage is _BODY:
            assert self._exchange is not None
            self._exchange.on_refused(_too_slow("body"))
        else:
            self.abort()


def _too_slow(part: str) -> RouterError:
    return RouterError(408, "request_timeout", f"The request {part} took too long.", source=Source.CLIENT)
