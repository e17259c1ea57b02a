"""The one connection to the shared store: pipelined, bounded, made anew with back-off when it is lost.

Replies come in the order of the commands, so any number of questions share it. One that its asker gave up still has its
replies read, and they are remembered for the next. A server that owes an answer for too long is given up with all
that was asked: what it owes would only come in the way of what is asked later.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import cast

from router.clock import Clock, TimerHandle
from router.l2.resp import BadReply, Replies, Reply, ServerError, command
from router.l2.settings import L2Settings

logger = logging.getLogger(__name__)

Done = Callable[[list[Reply] | None], object]


class Phase(StrEnum):
    CONNECTING = "connecting"
    READY = "ready"
    AWAY = "away"
    CLOSED = "closed"


class _Asked:
    __slots__ = ("at", "done", "replies", "wanted")

    def __init__(self, at: float, wanted: int, done: Done) -> None:
        self.at = at
        self.wanted = wanted
        self.done = done
        self.replies: list[Reply] = []


class _Wire(asyncio.Protocol):
    """One TCP connection. What it has to say goes to its owner, as long as it is the owner's present one."""

    def __init__(self, owner: StoreConnection) -> None:
        self._owner = owner
        self._replies = Replies()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        try:
            replies = self._replies.feed(data)
        except BadReply as error:
            self._owner.lost(self, f"it does not speak RESP2: {error}")
            return
        self._owner.heard(self, replies)

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner.lost(self, "it closed the connection")


class StoreConnection:
    """From `start` to `close`. `ready` is called with each new connection."""

    def __init__(
        self, settings: L2Settings, clock: Clock, loop: asyncio.AbstractEventLoop, ready: Callable[[], object]
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._loop = loop
        self._ready = ready
        self._wire: _Wire | None = None
        self._asked: deque[_Asked] = deque()
        self._open_keys = 0
        self._task: asyncio.Task[None] | None = None
        self._retry: TimerHandle | None = None
        self._watch: TimerHandle | None = None
        self._retry_s = settings.first_retry_s
        self._said = False
        self.phase = Phase.CLOSED
        self.detail = ""
        self.failures = 0  # connections that failed or were lost

    @property
    def open_keys(self) -> int:
        return self._open_keys

    def waiting_s(self, now: float) -> float:
        """How long the oldest question has been waiting."""
        return now - self._asked[0].at if self._asked else 0.0

    def start(self) -> None:
        self.phase = Phase.CONNECTING
        self._task = self._loop.create_task(self._connect())

    def close(self) -> None:
        self.phase = Phase.CLOSED
        self._stop("closed")

    def ask(self, commands: bytes, replies: int, done: Done) -> bool:
        """`done` gets as many replies, or None where the connection was lost first. False, and never called: there is
        no connection, or too much is asked already."""
        wire = self._wire
        if self.phase is not Phase.READY or wire is None or self._open_keys + replies > self._settings.open_keys_limit:
            return False
        self._send(wire, commands, replies, done)
        return True

    def _send(self, wire: _Wire, commands: bytes, replies: int, done: Done) -> None:
        self._asked.append(_Asked(self._clock.now(), replies, done))
        self._open_keys += replies
        if self._watch is None:
            self._watch = self._clock.call_later(self._settings.stall_s, self._look_whether_stalled)
        wire.transport.write(commands)

    async def _connect(self) -> None:
        settings = self._settings
        host, port = settings.address
        try:
            context = settings.tls_context() if settings.tls else None
            async with asyncio.timeout(settings.connect_s):
                _, wire = await self._loop.create_connection(
                    lambda: _Wire(self), host, port, ssl=context, server_hostname=host if context else None
                )
        except TimeoutError:
            self._failed("no connection in time")
            return
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError; a certificate file may be no such
            self._failed(getattr(error, "strerror", None) or type(error).__name__)
            return
        finally:
            self._task = None
        if self.phase is Phase.CLOSED or wire.transport.is_closing():
            wire.transport.abort()
            if self.phase is not Phase.CLOSED:
                self._failed("it closed the connection")
            return
        self._wire = wire
        hello = []
        if settings.password is not None:
            user = (settings.user.encode(),) if settings.user else ()
            hello.append(command(b"AUTH", *user, settings.password.encode()))
        if settings.database:
            hello.append(command(b"SELECT", b"%d" % settings.database))
        hello.append(command(b"PING"))
        self._send(wire, b"".join(hello), len(hello), self._greeted)

    def _greeted(self, replies: list[Reply] | None) -> None:
        if replies is None or self._wire is None:
            return
        for reply in replies:
            if isinstance(reply, ServerError):
                self.lost(self._wire, f"it answers {reply.kind}")
                return
        self.phase, self.detail = Phase.READY, ""
        self._retry_s = self._settings.first_retry_s
        if self._said:
            self._said = False
            logger.warning("the shared KV store %s is back", self._settings.shown_url)
        self._ready()

    def heard(self, wire: _Wire, replies: list[Reply]) -> None:
        for reply in replies:
            if wire is not self._wire:
                return  # lost by what one of these led to
            if not self._asked:
                self.lost(wire, "it answers what was not asked")
                return
            asked = self._asked[0]
            asked.replies.append(reply)
            if len(asked.replies) == asked.wanted:
                self._asked.popleft()
                self._open_keys -= asked.wanted
                asked.done(asked.replies)

    def lost(self, wire: _Wire, why: str) -> None:
        if wire is self._wire and self.phase is not Phase.CLOSED:
            self._failed(why)

    def _look_whether_stalled(self) -> None:
        self._watch = None
        if not self._asked or self._wire is None:
            return
        left_s = self._settings.stall_s - self.waiting_s(self._clock.now())
        if left_s <= 0:
            self._failed(f"no answer for {self._settings.stall_s:g} s")
        else:
            self._watch = self._clock.call_later(left_s, self._look_whether_stalled)

    def _failed(self, why: str) -> None:
        """Once per outage with a line in the log; the next try comes with back-off."""
        self.failures += 1
        self.phase, self.detail = Phase.AWAY, why
        if not self._said:
            self._said = True
            logger.warning("the shared KV store %s is away: %s", self._settings.shown_url, why)
        self._retry = self._clock.call_later(self._retry_s, self._again)
        self._retry_s = min(self._retry_s * 2, self._settings.longest_retry_s)
        self._drop()

    def _again(self) -> None:
        self._retry = None
        self.start()

    def _stop(self, why: str) -> None:
        self.detail = why
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        self._drop()

    def _drop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.transport.abort()
        asked, self._asked = self._asked, deque()
        self._open_keys = 0
        for one in asked:
            one.done(None)
