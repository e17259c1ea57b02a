"""One try of an exchange on one backend: what it holds until its first body byte may go downstream."""

from __future__ import annotations

from native.body_framing import BodyFramer, Framing
from router.backends.in_flight import InFlight
from router.errors import RouterError
from router.net.exchange_api import Connecting
from router.net.upstream import Upstream
from router.strategies.strategy import Choice
from router.wire.http_head import ResponseHead

HELD_LIMIT_BYTES = 65536  # of a response whose fate is open; one that is longer is passed on


class HeldAnswer:
    """A response kept back: its head and all that came of its body, framing included."""

    __slots__ = ("backend_name", "complete", "head", "pieces", "reason", "size")

    def __init__(self, head: ResponseHead, backend_name: str, reason: str) -> None:
        self.head = head
        self.backend_name = backend_name
        self.reason = reason
        self.pieces: list[bytes] = []
        self.size = 0
        self.complete = False  # its end was seen

    def add(self, data: bytes) -> bool:
        """False when the bound is passed."""
        self.pieces.append(data)
        self.size += len(data)
        return self.size <= HELD_LIMIT_BYTES


class Attempt:
    __slots__ = (
        "choice",
        "connecting",
        "guard",
        "held",
        "judging",
        "peek",
        "reused",
        "sent",
        "started_at",
        "status",
        "upstream",
    )

    def __init__(self, choice: Choice, guard: InFlight, now: float) -> None:
        self.choice = choice
        self.guard = guard
        self.started_at = now
        self.connecting: Connecting | None = None
        self.upstream: Upstream | None = None  # ours from the connection to the response's end
        self.reused = False  # the connection had served before and may be dead
        self.sent = False  # some of the request may have reached the engine
        self.status: int | None = None
        self.held: HeldAnswer | None = None
        self.judging = False  # an answer that may be repeated elsewhere: wait for its end before passing it on
        self.peek: StreamPeek | None = None


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
