"""Idle engine connections: kept below the engine's own limit, youngest first, counted to the last one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop

from router.backends.backend import Backend
from router.clock import SystemClock, VirtualClock
from router.net.upstream import Upstream
from router.net.upstream_pool import IDLE_LIMIT, TcpConnector, UpstreamPool, describe
from router.tls import ClientContexts
from tests.support.scripted import Client
from tests.support.transports import Network

BACKEND = Backend(name="b", url="http://b:1", host="b", port=1)
OTHER = Backend(name="o", url="http://o:1", host="o", port=1)


class Pools:
    """A pool on a virtual clock, with connections that lead to a peer which says nothing."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.network = Network(self.clock)
        self.pool = UpstreamPool(self.clock, keepalive_s=4.0, max_head_bytes=65536)

    def idle(self, backend: Backend = BACKEND) -> tuple[Upstream, Client]:
        upstream, peer = self.pool.make(backend), Client()
        self.network.link(upstream, peer)
        self.pool._released(upstream, True)
        return upstream, peer

    def run(self, seconds: float) -> None:
        self.clock.advance(seconds)
        assert not self.network.faults


def test_the_connection_used_last_is_taken_first() -> None:
    pools = Pools()
    first, _ = pools.idle()
    second, _ = pools.idle()
    assert pools.pool.take(BACKEND) is second
    assert pools.pool.take(BACKEND) is first
    assert pools.pool.take(BACKEND) is None
    assert pools.pool.open == 2


def test_connections_are_closed_before_the_engine_would_do_it() -> None:
    pools = Pools()
    _, peer = pools.idle()
    pools.run(2.0)
    assert not peer.lost
    pools.run(1.99)
    assert peer.lost, "vLLM closes after 5 s; ours is gone within 4"
    assert pools.pool.open == 0
    assert pools.clock.pending == 0


def test_a_connection_is_not_taken_when_it_is_as_old_as_its_limit() -> None:
    pools = Pools()
    upstream, _ = pools.idle()
    upstream.idle_since -= 4.0
    assert pools.pool.take(BACKEND) is None
    pools.run(0.1)
    assert pools.pool.open == 0


def test_one_that_the_engine_closed_is_never_taken() -> None:
    pools = Pools()
    _, peer = pools.idle()
    peer.close()
    pools.run(0.01)
    assert pools.pool.take(BACKEND) is None
    assert pools.pool.open == 0
    assert pools.pool.idle_count(BACKEND) == 0


def test_an_idle_connection_on_which_the_engine_speaks_is_poisoned() -> None:
    pools = Pools()
    upstream, peer = pools.idle()
    peer.push(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
    pools.run(0.0011)
    assert pools.pool.take(BACKEND) is not upstream
    pools.run(0.1)
    assert peer.lost
    assert pools.pool.open == 0


def test_dropping_a_backend_closes_its_connections_and_no_other_s() -> None:
    pools = Pools()
    peers = [pools.idle()[1] for _ in range(3)]
    kept, _ = pools.idle(OTHER)
    pools.pool.drop(BACKEND)
    pools.run(0.1)
    assert all(peer.lost for peer in peers)
    assert pools.pool.take(OTHER) is kept
    assert pools.pool.open == 1


def test_a_thousand_idle_connections_are_kept_and_not_one_more_than_the_limit() -> None:
    pools = Pools()
    for _ in range(IDLE_LIMIT + 10):
        pools.idle()
    assert pools.pool.idle_count(BACKEND) == IDLE_LIMIT
    pools.run(0.1)
    assert pools.pool.open == IDLE_LIMIT
    pools.run(4.0)
    assert pools.pool.open == 0


def test_a_closed_pool_closes_what_comes_back() -> None:
    pools = Pools()
    pools.idle()
    pools.pool.close()
    _, late = pools.idle()
    pools.run(0.1)
    assert late.lost
    assert pools.pool.open == 0
    assert pools.clock.pending == 0


# -- the connector ----------------------------------------------------------------------------------------------------


class Told:
    """ConnectEvents that remembers."""

    def __init__(self) -> None:
        self.connected: Upstream | None = None
        self.failed: str | None = None
        self.ours = False

    def on_connected(self, upstream: Upstream) -> None:
        self.connected = upstream

    def on_connect_failed(self, why: str, *, ours: bool = False) -> None:
        self.failed = why
        self.ours = ours


class ScriptedLoop:
    """As much of an event loop as the connector uses; `dial` stands for the network."""

    def __init__(self, dial: Callable[[Upstream], Awaitable[None]]) -> None:
        self._dial = dial

    def create_task(self, coroutine: Any) -> asyncio.Task[Any]:
        return asyncio.get_running_loop().create_task(coroutine)

    async def create_connection(self, factory: Callable[[], Upstream], host: str, port: int) -> tuple[None, Upstream]:
        upstream = factory()
        await self._dial(upstream)
        return None, upstream


def connecting(dial: Callable[[Upstream, Pools], Awaitable[None]], *, cancel: bool = False) -> tuple[Told, Pools]:
    pools, told = Pools(), Told()

    async def play() -> None:
        loop: Any = ScriptedLoop(lambda upstream: dial(upstream, pools))
        attempt = TcpConnector(loop, pools.pool, ClientContexts()).connect(BACKEND, told)
        await asyncio.sleep(0)
        if cancel:
            attempt.cancel()
        for _ in range(6):
            await asyncio.sleep(0)

    asyncio.run(play())
    return told, pools


async def answer(upstream: Upstream, pools: Pools) -> None:
    pools.network.link(upstream, Client())


async def refuse(upstream: Upstream, pools: Pools) -> None:
    raise ConnectionRefusedError(111, "Connection refused")


async def hang(upstream: Upstream, pools: Pools) -> None:
    await asyncio.Event().wait()


async def answer_and_reset(upstream: Upstream, pools: Pools) -> None:
    peer = Client()
    pools.network.link(upstream, peer)
    peer.abort()
    pools.run(0.1)


async def answer_and_speak(upstream: Upstream, pools: Pools) -> None:
    peer = Client()
    pools.network.link(upstream, peer)
    peer.push(b"220 mail server\r\n")
    pools.run(0.1)


async def answer_then_hang(upstream: Upstream, pools: Pools) -> None:
    pools.network.link(upstream, Client())
    await asyncio.Event().wait()


def test_a_connection_that_comes_about_is_handed_over() -> None:
    told, pools = connecting(answer)
    assert told.connected is not None
    assert told.failed is None
    assert pools.pool.open == 1


def test_a_refused_connection_is_told_without_addresses_and_counts_no_more() -> None:
    told, pools = connecting(refuse)
    assert told.failed == "connection refused"
    assert pools.pool.open == 0


@pytest.mark.parametrize("dial", [answer_and_reset, answer_and_speak])
def test_a_connection_that_is_lost_before_it_is_handed_over_has_failed(dial: Any) -> None:
    told, pools = connecting(dial)
    assert told.connected is None
    assert told.failed == "the connection was closed at once"
    assert pools.pool.open == 0


@pytest.mark.parametrize("dial", [hang, answer_then_hang, answer])
def test_a_cancelled_attempt_tells_nothing_and_leaves_nothing(dial: Any) -> None:
    told, pools = connecting(dial, cancel=True)
    pools.run(0.1)
    assert told.connected is None
    assert told.failed is None
    assert pools.pool.open == 0


def test_errors_are_described_in_words_for_clients() -> None:
    assert describe(ConnectionRefusedError(111, "x")) == "connection refused"
    assert describe(OSError(113, "No route to host")) == "no route to host"
    assert describe(ValueError("10.0.0.7")) == "ValueError"


class _Told(asyncio.Protocol):
    """Passes on what a connection is told; `made` is called right after connection_made."""

    def __init__(self, upstream: asyncio.Protocol, made: Callable[[], object]) -> None:
        self._upstream = upstream
        self._made = made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._upstream.connection_made(transport)
        self._made()

    def connection_lost(self, exc: Exception | None) -> None:
        self._upstream.connection_lost(exc)


class _LoopOfTold(asyncio.AbstractEventLoop):
    """The two calls of a loop that a connector makes."""

    def __init__(self, loop: asyncio.AbstractEventLoop, made: Callable[[], object]) -> None:
        self._loop = loop
        self._made = made

    def create_task(self, coroutine: Any) -> Any:  # type: ignore[override]
        return self._loop.create_task(coroutine)

    async def create_connection(self, factory: Any, host: Any, port: Any) -> Any:  # type: ignore[override]
        upstream = factory()
        return await self._loop.create_connection(lambda: _Told(upstream, self._made), host, port)


class _NoEvents:
    def on_connected(self, upstream: Upstream) -> None:
        raise AssertionError("it was cancelled")

    def on_connect_failed(self, why: str) -> None:
        raise AssertionError("it was cancelled")


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run])
def test_a_connection_given_up_at_the_moment_it_is_made_is_counted_down(run: Callable[[Any], None]) -> None:
    """uvloop closes it then, and never tells its protocol that it is lost; asyncio does."""

    async def give_up() -> None:
        loop = asyncio.get_running_loop()
        pool = UpstreamPool(SystemClock(loop), keepalive_s=4.0, max_head_bytes=65536)
        gone = loop.create_future()

        class Engine(asyncio.Protocol):
            def connection_lost(self, exc: Exception | None) -> None:
                gone.set_result(None)

        server = await loop.create_server(Engine, "127.0.0.1", 0)
        try:
            port = server.sockets[0].getsockname()[1]
            backend = Backend(name="b", url="http://b:1", host="127.0.0.1", port=port)
            attempts = []

            def cancel() -> None:
                attempts[0].cancel()

            attempts.append(
                TcpConnector(_LoopOfTold(loop, cancel), pool, ClientContexts()).connect(backend, _NoEvents())
            )
            assert pool.open == 1
            await asyncio.wait_for(gone, 10)
            for _ in range(10):  # whatever the loop still has to tell
                await asyncio.sleep(0)
            assert pool.open == 0
        finally:
            server.close()
            await server.wait_closed()

    run(give_up())
