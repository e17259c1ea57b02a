"""One engine connection: a request out, its response in, again and again while both sides keep it.

The response head goes to llhttp, the body's end is found by native.body_framing, so bytes beyond the end are seen:
they are never relayed and end the connection (they would answer somebody else's request).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, cast

from native.body_framing import BadFraming, BodyFramer, Framing
from router.backends.backend import Backend
from router.wire.http_head import BARE_LF, HEAD_END, BadResponse, ResponseHead, parse_response_head

if TYPE_CHECKING:
    from router.net.exchange_api import UpstreamEvents


JOIN_LIMIT_BYTES: Final = 32768


class Upstream(asyncio.Protocol):
    """`released` is called when the connection is free again (reusable or not) or lost; the pool gives it."""

    def __init__(self, backend: Backend, max_head_bytes: int, released: Callable[[Upstream, bool], None]) -> None:
        self.backend = backend
        self.idle_since = 0.0
        self.framer: BodyFramer | None = None
        self._max_head_bytes = max_head_bytes
        self._released = released
        self._transport: asyncio.Transport | None = None
        self._events: UpstreamEvents | None = None
        self._to_head = False
        self._reading_head = True
        self._buffer = b""
        self._any_byte = False
        self._unsent = False
        self._reading_paused = False
        self._tunnel = False
        self._keep_alive = True
        self._lost = False
        self._told_lost = False

    @property
    def reusable(self) -> bool:
        return not self._lost and self._transport is not None and not self._transport.is_closing()

    # -- what an exchange asks ----------------------------------------------------------------------------------------

    def send(self, events: UpstreamEvents, head: bytes, body: bytes, *, to_head: bool) -> None:
        """One request. `to_head`: its method is HEAD. on_sent follows at once, or when a slow engine has taken it."""
        assert self._events is None
        assert self._transport is not None
        self._events = events
        self._to_head = to_head
        self._reading_head = True
        self._any_byte = False
        self._buffer = b""
        self.framer = None
        # One system call: a head that goes first by itself wakes the engine for nothing. A copy of a short body costs
        # less than a vectored write.
        if len(body) > JOIN_LIMIT_BYTES:
            self._transport.writelines((head, body))
        else:
            self._transport.write(head + body)
        if not self._unsent:  # else pause_writing was called: more than the kernel takes at once
            events.on_sent()

    def send_tunnel_data(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def pause_reading(self) -> None:
        if not self._reading_paused and self.reusable:
            self._reading_paused = True
            cast(asyncio.Transport, self._transport).pause_reading()

    def resume_reading(self) -> None:
        if self._reading_paused and self.reusable:
            self._reading_paused = False
            cast(asyncio.Transport, self._transport).resume_reading()

    def discard(self) -> None:
        """End the connection now; to vLLM that is the order to abort the generation. No event follows."""
        self._events = None
        self._lost = True
        if self._transport is None:
            return
        if self._tunnel and not self._unsent:  # what the client said last is still to be delivered
            self._transport.close()
        else:
            self._transport.abort()

    def never_connected(self) -> None:
        """No connection came of it, or one that was given up at the moment it was made: uvloop closes that one without
        a connection_lost."""
        self.discard()
        self._tell_lost()

    def _tell_lost(self) -> None:
        """To the pool, once."""
        if not self._told_lost:
            self._told_lost = True
            self._released(self, False)

    # -- the transport's calls ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=65536, low=0)

    def data_received(self, data: bytes) -> None:
        events = self._events
        try:
            self._receive(data)
        except Exception:
            if events is None:
                raise
            self.discard()
            events.on_broken()

    def _receive(self, data: bytes) -> None:
        events = self._events
        if events is None:  # an idle connection has nothing to say: it is poisoned
            self.discard()
            return
        self._any_byte = True
        if self._reading_head:
            rest = self._read_head(data)
            if rest is None or self._events is not events:  # no head yet, or the exchange ended at the sight of it
                return
            data = rest
        if self._tunnel:
            if data:
                events.on_response_body(data)
            return
        framer = self.framer
        assert framer is not None
        if data and not framer.done:
            try:
                used = framer.feed(data)
            except BadFraming as e:
                self._break(str(e))
                return
            if used < len(data):
                self._keep_alive = False
                events.on_response_body(data[:used])
            else:
                events.on_response_body(data)
            if self._events is None:  # the exchange was ended by what it was just told
                return
        elif data:
            self._keep_alive = False
        if framer.done:
            self._finish(events)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._transport = None
        events, self._events = self._events, None
        self._tell_lost()
        if events is None:
            return
        framer = self.framer
        ends_here = self._tunnel or (framer is not None and framer.until_close)
        try:
            if exc is None and ends_here:
                events.on_response_end()
            else:
                why = "the connection was reset" if exc is not None else "the connection was closed early"
                events.on_upstream_lost(why, self._any_byte)
        except Exception:
            events.on_broken()

    def pause_writing(self) -> None:
        self._unsent = True
        if self._tunnel and self._events is not None:
            self._events.on_upstream_slow()

    def resume_writing(self) -> None:
        self._unsent = False
        if self._events is None:
            return
        if self._tunnel:
            self._events.on_upstream_ready()
        else:
            self._events.on_sent()

    # -- reading a response -------------------------------------------------------------------------------------------

    def _read_head(self, data: bytes) -> bytes | None:
        """Body bytes behind the head, None while there is no head."""
        while True:
            scanned = len(self._buffer)
            buffer = self._buffer + data if scanned else data
            end = buffer.find(HEAD_END, max(scanned - 3, 0))
            size = end + 4 if end >= 0 else len(buffer)
            if size > self._max_head_bytes:
                self._break("the response head is too large")
                return None
            if end < 0:
                if BARE_LF.search(buffer, max(scanned - 1, 0)) is not None:
                    self._break("the response head has a bare LF")
                    return None
                self._buffer = buffer
                return None
            self._buffer = b""
            try:
                head = parse_response_head(buffer[:size], self._to_head)
            except BadResponse as e:
                self._break(f"the response head is not valid HTTP/1.1: {e}")
                return None
            data = buffer[size:]
            if head.status == 101 or head.status >= 200:
                break  # else an interim answer, which is between the engine and us
        self._begin_body(head)
        return data

    def _begin_body(self, head: ResponseHead) -> None:
        events = self._events
        assert events is not None
        self._reading_head = False
        self._keep_alive = head.keep_alive
        self._tunnel = head.status == 101
        watch = head.status == 200 and (head.event_stream or head.content_type.startswith(b"application/json"))
        length = head.content_length if head.framing is Framing.LENGTH else 0
        self.framer = BodyFramer(head.framing, length or 0, watch)
        events.on_response_head(head)

    def _finish(self, events: UpstreamEvents) -> None:
        self._events = None
        self.resume_reading()
        reusable = self._keep_alive and not self._unsent and self.reusable
        if not reusable:
            self.discard()
        else:
            self._released(self, True)
        events.on_response_end()

    def _break(self, why: str) -> None:
        events = self._events
        self.discard()
        if events is not None:
            events.on_upstream_lost(why, True)
