"""ZMQ sockets on the event loop, in slices: however many engines speak at once, a turn takes no longer than TURN_S.

Sockets are read on the loop, not in a thread: a frame costs some 5 us to receive beside the index's own work, while a
thread would add a hand-over per frame and fight for the GIL with the request path in slices of 5 ms. A ZMQ descriptor
only signals when an empty socket gets something, so one that was signalled stays in the queue until it is empty.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

import zmq

from router.clock import Clock, TimerHandle

TURN_S: Final = 0.0007
TURN_FRAMES: Final = 64
REST_S: Final = 0.001  # between turns while there is a backlog: events get about half of the loop at most


class Ready(Protocol):
    def receive_one(self) -> bool:
        """Handle one frame; False when there is none."""
        ...


class FramePump:
    """Gives each of those that have something one frame at a time, in turn."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        self._loop = loop
        self._clock = clock
        self._queue: deque[Ready] = deque()
        self._queued: set[Ready] = set()
        self._pending: TimerHandle | None = None
        self.longest_turn_s = 0.0

    def ready(self, source: Ready) -> None:
        if source in self._queued:
            return
        self._queued.add(source)
        self._queue.append(source)
        if self._pending is None:
            self._pending = self._loop.call_soon(self._turn)

    def drop(self, source: Ready) -> None:
        if source in self._queued:
            self._queued.discard(source)
            self._queue.remove(source)

    def close(self) -> None:
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None
        self._queue.clear()
        self._queued.clear()

    def _turn(self) -> None:
        self._pending = None
        begun = time.perf_counter()
        frames = 0
        elapsed = 0.0
        while self._queue and frames < TURN_FRAMES and elapsed < TURN_S:
            source = self._queue.popleft()
            self._queued.discard(source)
            if source.receive_one():
                if source not in self._queued:
                    self._queued.add(source)
                    self._queue.append(source)
                frames += 1
            elapsed = time.perf_counter() - begun
        self.longest_turn_s = max(self.longest_turn_s, elapsed)
        if self._queue and self._pending is None:
            self._pending = self._clock.call_later(REST_S, self._turn)


class FrameSocket:
    """A connected ZMQ socket whose messages go to `on_message`, at most `parts` parts each; more go to `on_fault`,
    and the rest is not read."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        pump: FramePump,
        socket: zmq.Socket[bytes],
        parts: int,
        on_message: Callable[[list[bytes]], object],
        on_fault: Callable[[str], object],
    ) -> None:
        self.socket = socket
        self._loop = loop
        self._pump = pump
        self._parts = parts
        self._on_message = on_message
        self._on_fault = on_fault
        self._closed = False
        descriptor = socket.getsockopt(zmq.FD)
        assert isinstance(descriptor, int)
        self._descriptor = descriptor
        loop.add_reader(descriptor, pump.ready, self)
        pump.ready(self)  # what came before the descriptor was watched

    def send(self, parts: list[bytes]) -> None:
        self.socket.send_multipart(parts, zmq.NOBLOCK)
        self._pump.ready(self)  # sending may have swallowed the signal of something that came

    def receive_one(self) -> bool:
        if self._closed:
            return False
        socket = self.socket
        try:
            message = [socket.recv(zmq.NOBLOCK)]
            while socket.getsockopt(zmq.RCVMORE):
                if len(message) == self._parts:
                    self._on_fault(f"a message of more than {self._parts} parts")
                    return False
                message.append(socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return False
        self._on_message(message)
        return True

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._descriptor)
            self._pump.drop(self)
            self.socket.close(0)
