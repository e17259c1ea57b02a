"""Idle engine connections, and the opening of new ones.

vLLM closes a connection that was idle for 5 s; a request sent into that moment is lost. So a connection is dropped
before the engine does it, and the youngest idle one is used first.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections import deque
from typing import Final

from router.backends.backend import Backend
from router.clock import Clock, TimerHandle
from router.net.exchange_api import ConnectEvents
from router.net.upstream import Upstream
from router.tls import ClientContexts

IDLE_LIMIT: Final = 1024  # idle connections to one backend; a connection that comes free beyond it is closed


# What the system refuses to us, whoever the backend is.
OUR_LIMITS: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOMEM, errno.ENOBUFS))


class UpstreamPool:
    """Work for each call is constant: deques by backend, oldest on the left."""

    def __init__(self, clock: Clock, keepalive_s: float, max_head_bytes: int) -> None:
        self._clock = clock
        self._now = clock.now
        self._keepalive_s = keepalive_s
        self._max_head_bytes = max_head_bytes
        self._idle: dict[Backend, deque[Upstream]] = {}
        self._sweep: TimerHandle | None = None
        self._closed = False
        self.open = 0  # connections made and not yet lost

    def configure(self, keepalive_s: float, max_head_bytes: int) -> None:
        """Other limits, for connections made or freed from now on."""
        self._keepalive_s = keepalive_s
        self._max_head_bytes = max_head_bytes

    def make(self, backend: Backend) -> Upstream:
        """A protocol for a new connection; it counts as open until it is lost."""
        self.open += 1
        return Upstream(backend, self._max_head_bytes, self._released)

    def take(self, backend: Backend) -> Upstream | None:
        """The idle connection used last, if one is still good."""
        idle = self._idle.get(backend)
        while idle and not idle[-1].reusable:
            idle.pop()  # it is closing
        if not idle:
            return None
        upstream = idle.pop()
        if self._now() - upstream.idle_since < self._keepalive_s:
            return upstream
        idle.append(upstream)
        self.drop(backend)  # the youngest is too old: so are the others
        return None

    def drop(self, backend: Backend) -> None:
        """Close all idle connections to one backend."""
        for upstream in self._idle.pop(backend, ()):
            upstream.discard()

    def close(self) -> None:
        self._closed = True
        for backend in list(self._idle):
            self.drop(backend)
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None

    def idle_count(self, backend: Backend) -> int:
        return len(self._idle.get(backend, ()))

    def _released(self, upstream: Upstream, reusable: bool) -> None:
        if not reusable:
            self.open -= 1
            idle = self._idle.get(upstream.backend)
            if idle is not None and not upstream.reusable:
                try:
                    idle.remove(upstream)
                except ValueError:
                    return  # it was in use
                if not idle:
                    del self._idle[upstream.backend]
            return
        idle = self._idle.setdefault(upstream.backend, deque())
        if self._closed or len(idle) >= IDLE_LIMIT:
            upstream.discard()
            return
        upstream.idle_since = self._now()
        idle.append(upstream)
        if self._sweep is None:
            self._sweep = self._clock.call_later(self._keepalive_s / 4, self._drop_old)

    def _drop_old(self) -> None:
        self._sweep = None
        # one sweep period early, so that none outlives keepalive_s while it waits for the next sweep
        oldest = self._now() - self._keepalive_s * 0.75
        for backend in list(self._idle):
            idle = self._idle[backend]
            while idle and idle[0].idle_since <= oldest:
                idle.popleft().discard()
            if not idle:
                del self._idle[backend]
        if self._idle:
            self._sweep = self._clock.call_later(self._keepalive_s / 4, self._drop_old)


class _TaskConnecting:
    """One connection attempt; its outcome reaches `events` unless it was cancelled before."""

    __slots__ = ("_events", "_task", "_upstream")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, upstream: Upstream, events: ConnectEvents, contexts: ClientContexts
    ) -> None:
        self._events: ConnectEvents | None = events
        self._upstream = upstream
        backend = upstream.backend
        if backend.url.startswith("https:"):
            opening = _open_tls(loop, upstream, contexts)
        else:
            opening = loop.create_connection(lambda: upstream, backend.host, backend.port)
        self._task = loop.create_task(opening)
        self._task.add_done_callback(self._done)

    def cancel(self) -> None:
        self._events = None
        self._task.cancel()

    def _done(self, task: asyncio.Task[tuple[asyncio.Transport, Upstream]]) -> None:
        events, self._events = self._events, None
        upstream = self._upstream
        if task.cancelled():
            upstream.never_connected()
            if events is not None:
                events.on_connect_failed("cancelled")
        elif (error := task.exception()) is not None:
            upstream.never_connected()
            if events is not None:
                events.on_connect_failed(describe(error), ours=isinstance(error, OSError) and error.errno in OUR_LIMITS)
        elif events is None:
            upstream.discard()
        elif not upstream.reusable:  # accepted and closed before this task woke up
            events.on_connect_failed("the connection was closed at once")
        else:
            events.on_connected(upstream)


async def _open_tls(
    loop: asyncio.AbstractEventLoop, upstream: Upstream, contexts: ClientContexts
) -> tuple[asyncio.Transport, Upstream]:
    """Within the task, so that a CA file that is gone by now fails like a connection."""
    backend = upstream.backend
    context = contexts.of(backend.tls_ca, backend.tls_verify)
    return await loop.create_connection(lambda: upstream, backend.host, backend.port, ssl=context)


class TcpConnector:
    """Connects to the host and port of a backend's URL, with TLS where that says https."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pool: UpstreamPool, contexts: ClientContexts) -> None:
        self._loop = loop
        self._pool = pool
        self._contexts = contexts

    def connect(self, backend: Backend, events: ConnectEvents) -> _TaskConnecting:
        return _TaskConnecting(self._loop, self._pool.make(backend), events, self._contexts)


def describe(error: BaseException) -> str:
    """An error in words that fit a client's message: no address, no errno."""
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted ({error.verify_message.lower()})"
    if isinstance(error, ssl.SSLError):
        return "the TLS handshake failed"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return type(error).__name__
