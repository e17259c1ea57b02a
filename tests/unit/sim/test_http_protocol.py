"""The HTTP side without sockets: any cut of the bytes, keep-alive, pipelining, slow readers, faults in writing."""

from __future__ import annotations

from typing import Any

import pytest

from router.clock import Clock, VirtualClock
from router.sim.faults import FaultKind
from router.sim.http_protocol import (
    KEEP_ALIVE_S,
    MAX_PIPELINED,
    MAX_UNSENT_BYTES,
    DateHeader,
    Exchange,
    HttpProtocol,
)


class FakeTransport:
    def __init__(self) -> None:
        self.written = b""
        self.closed = False
        self.reading = True
        self.high = 0

    def set_write_buffer_limits(self, high: int) -> None:
        self.high = high

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.written += data

    def close(self) -> None:
        self.closed = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


class Application:
    """Keeps exchanges for the test to answer."""

    def __init__(self) -> None:
        self.virtual = VirtualClock()
        self.clock: Clock = self.virtual
        self.connections: set[HttpProtocol] = set()
        self.max_body_bytes = 100
        self.draining = False
        self.exchanges: list[Exchange] = []
        self.at_once = False

    def wall_time(self) -> float:
        return 1796061812.0

    def handle(self, exchange: Exchange) -> None:
        self.exchanges.append(exchange)
        if self.at_once:
            exchange.respond(200, b"{}")


def connected() -> tuple[Application, HttpProtocol, FakeTransport]:
    application = Application()
    protocol = HttpProtocol(application, DateHeader(application.wall_time))
    transport = FakeTransport()
    protocol.connection_made(transport)  # type: ignore[arg-type]
    return application, protocol, transport


GET = b"GET /a?b=c HTTP/1.1\r\nHost: sim\r\n\r\n"
POST = b"POST /x HTTP/1.1\r\nHost: sim\r\nX-One: 1\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"POST /x HTTP/1.1\r\nHost: sim\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_any_cut_of_the_bytes_gives_the_same_requests(size: int) -> None:
    application, protocol, transport = connected()
    application.at_once = True
    data = GET + POST + CHUNKED
    for start in range(0, len(data), size):
        protocol.data_received(data[start : start + size])
    seen = [(entry.method, entry.path, entry.query, entry.body) for entry in application.exchanges]
    assert seen == [("GET", "/a", "b=c", b""), ("POST", "/x", "", b"hello"), ("POST", "/x", "", b"hello")]
    assert application.exchanges[1].headers["x-one"] == "1"
    assert (
        transport.written.count(b"HTTP/1.1 200 OK\r\ndate: Mon, 30 Nov 2026 18:03:32 GMT\r\nserver: uvicorn\r\n") == 3
    )


def test_an_idle_connection_is_closed_after_5_s() -> None:
    application, protocol, transport = connected()
    application.at_once = True
    application.virtual.advance(KEEP_ALIVE_S - 0.1)
    protocol.data_received(GET)
    application.virtual.advance(KEEP_ALIVE_S - 0.1)
    assert not transport.closed
    application.virtual.advance(0.2)
    assert transport.closed
    protocol.connection_lost(None)
    assert application.virtual.pending == 0
    assert application.connections == set()


def test_a_busy_connection_is_not_idle() -> None:
    application, protocol, transport = connected()
    protocol.data_received(GET)
    application.virtual.advance(100.0)
    assert not transport.closed
    application.exchanges[0].respond(200)
    application.virtual.advance(KEEP_ALIVE_S)
    assert transport.closed


def test_pipelined_requests_wait_in_order_and_reading_pauses_at_the_bound() -> None:
    application, protocol, transport = connected()
    protocol.data_received(GET * (MAX_PIPELINED + 2))
    assert len(application.exchanges) == 1
    assert not transport.reading
    answered = 0
    while answered < len(application.exchanges):
        application.exchanges[answered].respond(200, b"%d" % answered)
        answered += 1
    assert transport.reading
    assert answered == MAX_PIPELINED + 2
    assert transport.written.endswith(b"%d" % (answered - 1))


def test_a_thousand_answers_at_once_do_not_deepen_the_stack() -> None:
    application, protocol, transport = connected()
    application.at_once = True
    protocol.data_received(GET * 5000)
    assert transport.written.count(b"HTTP/1.1 200 OK") == 5000


def test_the_client_that_leaves_is_told_once_and_only_before_the_end() -> None:
    application, protocol, _ = connected()
    gone: list[str] = []
    protocol.data_received(GET)
    application.exchanges[0].on_gone = lambda: gone.append("first")
    application.exchanges[0].respond(200)
    protocol.data_received(GET)
    application.exchanges[1].on_gone = lambda: gone.append("second")
    protocol.connection_lost(None)
    protocol.connection_lost(None)
    assert gone == ["second"]


def test_a_client_that_does_not_read_makes_the_producer_wait() -> None:
    application, protocol, transport = connected()
    protocol.data_received(GET)
    exchange = application.exchanges[0]
    woken: list[bool] = []
    exchange.on_writable = lambda: woken.append(True)
    assert transport.high == MAX_UNSENT_BYTES
    protocol.pause_writing()
    assert not exchange.writable
    protocol.resume_writing()
    assert exchange.writable
    assert woken == [True]


def test_drip_writes_a_byte_at_a_time_and_bounds_what_waits() -> None:
    application, protocol, transport = connected()
    protocol.data_received(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
    exchange = application.exchanges[0]
    exchange.drip_s = 0.5
    exchange.start_stream()
    exchange.write_events([b"x" * MAX_UNSENT_BYTES])
    assert not exchange.writable
    exchange.write_events([b"data: y\n\n"], last=True)
    assert transport.written == b""
    application.virtual.advance(0.5)
    assert transport.written == b"H"
    application.virtual.advance(1.0)
    assert transport.written == b"HTT"
    assert not transport.closed
    application.virtual.advance(2.0 * MAX_UNSENT_BYTES)
    assert transport.closed
    assert transport.written.endswith(b"9\r\ndata: y\n\n\r\n0\r\n\r\n")


def test_one_event_is_one_chunk() -> None:
    application, protocol, transport = connected()
    protocol.data_received(GET)
    exchange = application.exchanges[0]
    exchange.start_stream()
    assert not exchange.write_events([b"data: 1\n\n", b"data: 2\n\n"])
    assert exchange.write_events([b"data: [DONE]\n\n"], last=True)
    body = transport.written.split(b"\r\n\r\n", 1)[1]
    assert body == b"9\r\ndata: 1\n\n\r\n9\r\ndata: 2\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def test_a_stall_after_chunks_is_exact_within_one_write() -> None:
    application, protocol, transport = connected()
    protocol.data_received(GET)
    exchange = application.exchanges[0]
    exchange.cut = (FaultKind.STALL_AFTER_CHUNKS, 2)
    exchange.start_stream()
    assert not exchange.write_events([b"data: 1\n\n", b"data: 2\n\n", b"data: 3\n\n"], last=True)
    assert not exchange.write_events([b"data: 4\n\n"])
    assert transport.written.count(b"data: ") == 2


def test_what_goes_wrong_in_an_answer_is_not_the_clients_fault() -> None:
    application, protocol, transport = connected()

    def broken(exchange: Any) -> None:
        raise RuntimeError("ours")

    application.handle = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="ours"):
        protocol.data_received(GET)
    assert transport.written == b""


def test_draining_closes_idle_connections_now_and_busy_ones_after_their_answer() -> None:
    application, protocol, transport = connected()
    protocol.data_received(GET)
    application.draining = True
    protocol.drain()
    assert not transport.closed
    application.exchanges[0].respond(200)
    assert transport.closed
    _, idle, other = connected()
    idle.drain()
    assert other.closed


def test_http_1_0_closes_after_its_answer() -> None:
    application, protocol, transport = connected()
    protocol.data_received(b"GET / HTTP/1.0\r\n\r\n")
    application.exchanges[0].respond(200)
    assert transport.closed
