"""One try of an exchange on one backend: what it holds until its first body byte may go downstream."""

from __future__ import annotations

from typing import Final

from native.body_framing import BodyFramer, Framing
from router.backends.in_flight import InFlight
from router.errors import RouterError
from router.net.exchange_api import Connecting
from router.net.upstream import Upstream
from router.strategies.strategy import Choice, Strategy
from router.wire.http_head import ResponseHead

HELD_LIMIT_BYTES: Final = 65536  # of a response whose fate is open; one that is longer is passed on


class HeldAnswer:
    """An engine's whole answer, kept in case no repeat brings a better one."""

    __slots__ = ("choice", "head", "pieces")

    def __init__(self, head: ResponseHead, choice: Choice, pieces: list[bytes]) -> None:
        self.head = head
        self.choice = choice
        self.pieces = pieces  # of its body, framing included


class Attempt:
    __slots__ = (
        "choice",
        "connecting",
        "guard",
        "head",
        "held",
        "held_bytes",
        "judging",
        "peek",
        "reused",
        "sent",
        "status",
        "strategy",
        "trial",
        "upstream",
    )

    def __init__(self, choice: Choice, guard: InFlight, strategy: Strategy) -> None:
        self.choice = choice
        self.strategy = strategy  # the one that chose, also where a reload has put another in its place
        self.guard = guard
        self.connecting: Connecting | None = None
        self.upstream: Upstream | None = None  # ours from the connection to the response's end
        self.reused = False  # the connection had served before and may be dead
        self.sent = False  # some of the request may have reached the engine
        self.status: int | None = None
        self.trial = False  # the one that its backend's trial hangs on
        self.head: ResponseHead | None = None
        self.held: list[bytes] | None = None  # body pieces kept back, framing included
        self.held_bytes = 0
        self.judging = False  # an answer that may be repeated elsewhere: wait for its end before passing it on
        self.peek: StreamPeek | None = None

    def hold(self, data: bytes) -> bool:
        """Keep a piece back. False when the bound is passed."""
        if self.held is None:
            self.held = []
        self.held.append(data)
        self.held_bytes += len(data)
        return self.held_bytes <= HELD_LIMIT_BYTES


class StreamPeek:
    """The beginning of a stream without its framing, until its first event is known."""

    __slots__ = ("framer", "payload")

    def __init__(self, head: ResponseHead) -> None:
        length = head.content_length if head.framing is Framing.LENGTH else 0
        self.framer = BodyFramer(head.framing, length or 0)
        self.payload = bytearray()


class LastFailure:
    """What the client gets if no repeat succeeds: an engine's own answer where there was one, else an error of ours."""

    __slots__ = ("answer", "error")

    def __init__(self, error: RouterError, answer: HeldAnswer | None = None) -> None:
        self.error = error
        self.answer = answer
