"""Connections between asyncio Protocols on a virtual clock, with the manners of TCP that a proxy's faults hide in.

Bytes take time. What the receiver does not read fills a window, then the sender's buffer, then pauses the sender.
A close flushes, then sends FIN; a close with unread bytes, and bytes for an end that is closed, answer with RST; a RST
takes what was not read yet with it. abort() sends a FIN too, unless SO_LINGER asks for a RST (as under asyncio and
uvloop). An end that does not read notices neither FIN nor RST until it reads or writes.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from random import Random
from typing import Any

from router.clock import Clock

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
WINDOW_BYTES = 32768  # in flight and unread together, each way


class Network:
    """Makes links. `faults`: exceptions that left a protocol's callback; a test expects none."""

    def __init__(self, clock: Clock, rng: Random | None = None, latency_s: float = 0.001) -> None:
        self.clock = clock
        self.rng = rng  # with one, data arrives in pieces of random sizes
        self.latency_s = latency_s
        self.open: set[VirtualTransport] = set()
        self.faults: list[BaseException] = []

    def link(
        self, near: asyncio.Protocol, far: asyncio.Protocol, *, peername: tuple[str, int] = ("10.0.0.1", 1)
    ) -> tuple[VirtualTransport, VirtualTransport]:
        """Connect the two; `far` (the accepting side) is told first."""
        a, b = VirtualTransport(self, near, peername), VirtualTransport(self, far, peername)
        a.peer, b.peer = b, a
        self.open.update((a, b))
        far.connection_made(b)
        near.connection_made(a)
        return a, b


class VirtualTransport(asyncio.Transport):
    """One end of a link."""

    def __init__(self, network: Network, protocol: asyncio.Protocol, peername: tuple[str, int]) -> None:
        super().__init__({"peername": peername, "socket": self})
        self.network = network
        self.protocol = protocol
        self.peer: VirtualTransport
        self.written_final_bytes = 0  # all but 100 Continue
        self.on_write: Callable[[bytes], None] | None = None
        self.aborted = False
        self.resets = False  # SO_LINGER
        self.eof_written = False
        self.lost = False
        # outgoing
        self._out = bytearray()
        self._high, self._low = 65536, 16384
        self._writing_paused = False
        self._fin_wanted = False
        self._fin_sent = False
        self._on_wire = 0  # sent by us, not yet arrived
        # incoming
        self._unread = bytearray()
        self._fin_arrived = False
        self._fin_told = False
        self._reset_arrived = False
        self._reading = True
        self._closing = False
        self._delivery_due = False

    # -- the socket ---------------------------------------------------------------------------------------------------

    def setsockopt(self, level: int, option: int, value: bytes) -> None:
        if level == socket.SOL_SOCKET and option == socket.SO_LINGER:
            on, seconds = struct.unpack("ii", value)
            self.resets = bool(on) and seconds == 0

    # -- what protocols call ------------------------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not isinstance(data, bytes | bytearray | memoryview):
            raise TypeError("bytes are written")
        if self.eof_written:
            raise RuntimeError("write() after write_eof()")
        if self._closing or not data:
            return
        if data != CONTINUE:
            self.written_final_bytes += len(data)
        if self.on_write is not None:
            self.on_write(bytes(data))
        self._out += data
        if self._reset_arrived:
            self._later(self._lose, ConnectionResetError("reset"))
            return
        self._flush()
        if len(self._out) > self._high and not self._writing_paused:
            self._writing_paused = True
            self._call(self.protocol.pause_writing)

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if not self._closing and not self.eof_written:
            self.eof_written = True
            self._fin_wanted = True
            self._flush()

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._fin_wanted = True
        if self._fin_sent:  # by write_eof()
            self._later(self._lose, None)
        self._flush()

    def abort(self) -> None:
        if self.lost:
            return
        self.aborted = True
        self._closing = True
        self._out.clear()
        if self.resets or self._unread or self._delivery_due:
            self._send_reset()
        elif not self._fin_sent:  # to the peer it looks like close()
            self._fin_sent = True
            self.network.clock.call_later(self.network.latency_s, self.peer._fin_arrives)
        self._later(self._lose, None)

    def reset(self) -> None:
        """For scripts: abort() with a RST."""
        self.resets = True
        self.abort()

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        if self._closing or not self._reading:
            return
        self._reading = False

    def resume_reading(self) -> None:
        if self._closing or self._reading:
            return
        self._reading = True
        self._deliver_soon()

    def is_reading(self) -> bool:
        return self._reading and not self._closing

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = 65536 if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        return len(self._out)

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self.protocol

    # -- the wire -----------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        peer = self.peer
        if self._fin_sent or self._reset_arrived:
            return
        room = WINDOW_BYTES - self._on_wire - len(peer._unread)
        if self._out and room > 0:
            data = bytes(self._out[:room])
            del self._out[:room]
            self._on_wire += len(data)
            self.network.clock.call_later(self.network.latency_s, self._arrive, data)
            if self._writing_paused and len(self._out) <= self._low:
                self._writing_paused = False
                self._later(self._resume_protocol)
        if not self._out and self._fin_wanted:
            self._fin_sent = True
            self.network.clock.call_later(self.network.latency_s, peer._fin_arrives)
            if self._closing:
                if self._unread or self._delivery_due:
                    self._send_reset()
                self._later(self._lose, None)

    def _resume_protocol(self) -> None:
        if not self.lost:
            self._call(self.protocol.resume_writing)

    def _arrive(self, data: bytes) -> None:
        peer = self.peer
        self._on_wire -= len(data)
        if peer._reset_arrived:
            return
        if peer.lost or (peer._closing and peer._fin_sent):
            peer._send_reset()
            return
        if peer._closing:  # flushing what it wrote; nobody will read this
            peer._unread += data
            return
        peer._unread += data
        peer._deliver_soon()

    def _fin_arrives(self) -> None:
        if not self.lost:
            self._fin_arrived = True
            self._deliver_soon()

    def _send_reset(self) -> None:
        self.network.clock.call_later(self.network.latency_s, self.peer._reset_arrives)

    def _reset_arrives(self) -> None:
        if self.lost or self._reset_arrived:
            return
        self._reset_arrived = True
        self._unread.clear()
        if self._reading or self._out or self._closing:
            self._lose(None if self._closing else ConnectionResetError("reset by peer"))

    def _deliver_soon(self) -> None:
        if not self._delivery_due:
            self._delivery_due = True
            self._later(self._deliver)

    def _deliver(self) -> None:
        self._delivery_due = False
        if not self._reading or self._closing or self.lost:
            return
        if self._reset_arrived:
            self._lose(ConnectionResetError("reset by peer"))
            return
        if self._unread:
            rng = self.network.rng
            size = len(self._unread)
            if rng is not None and size > 1 and rng.random() < 0.3:
                size = rng.randrange(1, size)
            data = bytes(self._unread[:size])
            del self._unread[:size]
            self._call(self.protocol.data_received, data)
            if not self.peer.lost:
                self.peer._flush()
            if self._unread or self._fin_arrived:
                self._deliver_soon()
        elif self._fin_arrived and not self._fin_told:
            self._fin_told = True
            keep_open = self._call(self.protocol.eof_received)
            if not keep_open:
                self.close()

    def _lose(self, error: Exception | None) -> None:
        if self.lost:
            return
        self.lost = self._closing = True
        self._out.clear()
        self._unread.clear()
        self.network.open.discard(self)
        self._call(self.protocol.connection_lost, error)

    # -- calls --------------------------------------------------------------------------------------------------------

    def _later(self, callback: Callable[..., object], *args: Any) -> None:
        self.network.clock.call_later(0.0, callback, *args)

    def _call(self, callback: Callable[..., Any], *args: Any) -> Any:
        """As the event loop does: what escapes is reported, and ends the connection."""
        try:
            return callback(*args)
        except Exception as error:
            self.network.faults.append(error)
            if not self.lost:
                self.aborted = True
                self._closing = True
                self._send_reset()
                if callback != self.protocol.connection_lost:
                    self._later(self._lose, error)
        return None
