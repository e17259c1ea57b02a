"""An engine's connection alone: heads in pieces, bodies to the byte, and when it may serve again."""

from __future__ import annotations

import pytest

from router.backends.backend import Backend
from router.clock import VirtualClock
from router.net.upstream import Upstream
from router.wire.http_head import ResponseHead
from tests.support.scripted import Client
from tests.support.transports import Network

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"


class Events:
    """UpstreamEvents that remembers."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.head: ResponseHead | None = None
        self.body = b""
        self.why = ""

    def on_sent(self) -> None:
        self.log.append("sent")

    def on_response_head(self, head: ResponseHead) -> None:
        self.log.append("head")
        self.head = head

    def on_response_body(self, data: bytes) -> None:
        assert data
        self.body += data

    def on_response_end(self) -> None:
        self.log.append("end")

    def on_upstream_lost(self, why: str, any_byte: bool) -> None:
        self.log.append("lost after a byte" if any_byte else "lost")
        self.why = why

    def on_upstream_slow(self) -> None:
        self.log.append("slow")

    def on_upstream_ready(self) -> None:
        self.log.append("ready")


class Peer(Client):
    """It says what a test says, and does not read requests."""

    def data_received(self, data: bytes) -> None:
        pass


class Line:
    """A connection with its peer."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.network = Network(self.clock)
        self.released: list[bool] = []
        backend = Backend(name="b", url="http://b:1", host="b", port=1)
        self.upstream = Upstream(backend, 1000, lambda upstream, reusable: self.released.append(reusable))
        self.peer = Peer()
        self.network.link(self.upstream, self.peer)
        self.events = Events()

    def send(self, body: bytes = b"", *, to_head: bool = False) -> None:
        self.upstream.send(self.events, b"POST / HTTP/1.1\r\n\r\n", body, to_head=to_head)

    def say(self, *pieces: bytes) -> Events:
        for piece in pieces:
            self.peer.push(piece)
            self.run()
        return self.events

    def run(self) -> None:
        self.clock.advance(0.05)
        assert not self.network.faults, self.network.faults


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(OK)])
def test_an_answer_is_the_same_however_it_is_cut(size: int) -> None:
    line = Line()
    line.send()
    events = line.say(*[OK[at : at + size] for at in range(0, len(OK), size)])
    assert events.log == ["sent", "head", "end"]
    assert events.body == b"hello"
    assert line.released == [True]


def test_a_head_that_never_ends_is_bounded() -> None:
    line = Line()
    line.send()
    events = line.say(b"HTTP/1.1 200 OK\r\n", *[b"x: yyyyyyyyyyyyyyyyyy\r\n"] * 60)
    assert events.log == ["sent", "lost after a byte"]
    assert events.why == "the response head is too large"
    assert line.released == [False]


def test_a_head_at_the_bound_passes() -> None:
    line = Line()
    line.send()
    start, end = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nx: ", b"\r\n\r\n"
    events = line.say(start + b"y" * (1000 - len(start) - len(end)) + end)
    assert events.log == ["sent", "head", "end"]


def test_an_answer_before_the_request_was_taken_whole_passes_and_the_connection_is_not_used_again() -> None:
    line = Line()
    assert line.peer.transport is not None
    line.peer.transport.pause_reading()
    line.send(b"x" * 500_000)
    assert line.events.log == []
    events = line.say(OK)
    assert events.log == ["head", "end"]
    line.peer.transport.resume_reading()
    line.run()
    assert line.released == [False]
    assert line.peer.lost


def test_a_large_request_is_sent_when_the_engine_has_taken_it() -> None:
    line = Line()
    line.send(b"x" * 500_000)
    assert line.events.log == []
    line.run()
    assert line.events.log == ["sent"]


@pytest.mark.parametrize(
    ("said", "log"),
    [
        (b"", ["sent", "lost"]),
        (b"H", ["sent", "lost after a byte"]),
        (OK[:-1], ["sent", "head", "lost after a byte"]),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", ["sent", "head", "lost after a byte"]),
    ],
)
@pytest.mark.parametrize("how", ["close", "abort"])
def test_a_connection_that_ends_early_is_lost(said: bytes, log: list[str], how: str) -> None:
    line = Line()
    line.send()
    if said:
        line.say(said)
    getattr(line.peer, how)()
    line.run()
    assert line.events.log == log
    assert line.released == [False]


@pytest.mark.parametrize(("how", "last"), [("close", "end"), ("abort", "lost after a byte")])
def test_an_answer_until_close_ends_with_a_close_and_not_with_a_reset(how: str, last: str) -> None:
    line = Line()
    line.send()
    line.say(b"HTTP/1.1 200 OK\r\n\r\nhalf")
    getattr(line.peer, how)()
    line.run()
    assert line.events.log == ["sent", "head", last]


def test_after_its_discarding_a_connection_says_no_more() -> None:
    line = Line()
    line.send()
    line.upstream.discard()
    events = line.say(OK)
    assert events.log == ["sent"]
    assert line.released == [False]
    assert line.peer.lost
    assert not line.upstream.reusable


def test_two_requests_share_nothing() -> None:
    line = Line()
    line.send(to_head=True)
    line.say(b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n")
    line.events = Events()
    line.send()
    assert line.say(OK).body == b"hello"
    assert line.events.log == ["sent", "head", "end"]
    assert line.released == [True, True]


def test_what_comes_with_the_end_poisons_the_connection() -> None:
    line = Line()
    line.send()
    assert line.say(OK + OK).body == b"hello"
    assert line.released == [False]


def test_usage_is_watched_in_json_and_in_streams_of_200_alone() -> None:
    usage = b'{"usage":{"prompt_tokens":3}}'
    for status, kind, watched in ((200, b"application/json", True), (200, b"text/event-stream; x", True),
                                  (200, b"text/plain", False), (400, b"application/json", False)):  # fmt: skip
        line = Line()
        line.send()
        line.say(b"HTTP/1.1 %d X\r\ncontent-type: %b\r\ncontent-length: 29\r\n\r\n" % (status, kind) + usage)
        framer = line.upstream.framer
        assert framer is not None
        assert framer.usage == (b'{"prompt_tokens":3}' if watched else None)
