"""An engine's KV events by hand: PUB and ROUTER sockets a rank, behind an HTTP port that tells where they are.

Replays answer by themselves, or when the test says so (`hold_replays`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import zmq
from aiohttp import web

END = b"\xff" * 8


class Rank:
    """`ring` is what a replay brings, `publish` adds to it. `modern`: replays name the topic, as from 0.27 on."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], port: int, topic: bytes, modern: bool) -> None:
        self.topic = topic
        self.ring: dict[int, bytes] = {}
        self.asked: asyncio.Queue[tuple[bytes, int]] = asyncio.Queue()  # (who, from which sequence on)
        self.subscribed = asyncio.Event()  # somebody is: what is sent from now on arrives
        self.hold_replays = False
        self._modern = modern
        self._pub = self._socket(context, zmq.XPUB)
        self._router = self._socket(context, zmq.ROUTER)
        self.port = port
        if port:
            self._pub.bind(f"tcp://127.0.0.1:{port}")
        else:
            self.port = self._pub.bind_to_random_port("tcp://127.0.0.1")
        self.replay_port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self._watched = {self._descriptor(self._pub): self._hear, self._descriptor(self._router): self._serve}
        for descriptor, read in self._watched.items():
            asyncio.get_running_loop().add_reader(descriptor, read)

    @staticmethod
    def _descriptor(socket: zmq.Socket[bytes]) -> int:
        return int(socket.getsockopt(zmq.FD))

    @staticmethod
    def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
        socket = context.socket(kind)
        socket.linger = 0
        socket.set_hwm(0)
        return socket

    def publish(self, sequence: int, payload: bytes) -> None:
        self.ring[sequence] = payload
        self.send(sequence, payload)

    def send(self, sequence: int, payload: bytes) -> None:
        """Live only."""
        self.send_parts(self.topic, sequence.to_bytes(8, "big"), payload)

    def send_parts(self, *parts: bytes) -> None:
        self._pub.send_multipart(parts)
        self._hear()  # sending may have swallowed the signal of something that came

    def _hear(self) -> None:
        while int(self._pub.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            subscribes = self._pub.recv(zmq.NOBLOCK).startswith(b"\1")
            self.subscribed.set() if subscribes else self.subscribed.clear()

    def answer(self, who: bytes, sequence: int) -> None:
        """One batch of the ring."""
        self._reply(who, self.topic, sequence.to_bytes(8, "big"), self.ring[sequence])

    def end(self, who: bytes) -> None:
        self._reply(who, b"", END, b"")

    def _reply(self, who: bytes, topic: bytes, *rest: bytes) -> None:
        self._router.send_multipart([who, b"", *([topic] if self._modern else []), *rest])

    def _serve(self) -> None:
        while int(self._router.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            who, empty, start = self._router.recv_multipart(zmq.NOBLOCK)
            assert empty == b""
            asked = int.from_bytes(start, "big")
            self.asked.put_nowait((who, asked))
            if not self.hold_replays:
                for sequence in sorted(self.ring):
                    if sequence >= asked:
                        self.answer(who, sequence)
                self.end(who)

    def close(self) -> None:
        for descriptor in self._watched:
            asyncio.get_running_loop().remove_reader(descriptor)
        self._pub.close()
        self._router.close()


class Publisher:
    """`tells`: as from 0.31 on; else it answers 404, and its ranks' ports follow each other."""

    def __init__(self, ranks: int, topic: bytes, modern: bool, replays: bool, tells: bool) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._replays = replays
        self._tells = tells
        self.ranks: list[Rank] = []
        while len(self.ranks) < ranks:
            try:
                port = 0 if tells or not self.ranks else self.ranks[-1].port + 1
                self.ranks.append(Rank(self._context, port, topic, modern))
            except zmq.ZMQError:  # somebody has the port beside that of the first
                self._close_ranks()
        self.told_ranks = ranks  # in /metrics
        self.completions: asyncio.Queue[dict[str, Any]] = asyncio.Queue()  # bodies of POST /v1/completions
        self.completion_status = 200
        self.completion_pause: asyncio.Event | None = None  # they are answered when it is set
        self._runner = web.AppRunner(self._application(), access_log=None)
        self.url = ""

    def _application(self) -> web.Application:
        async def sources(request: web.Request) -> web.Response:
            if not self._tells:
                return web.json_response({"detail": "Not Found"}, status=404)
            return web.json_response({str(number): self._entry(rank) for number, rank in enumerate(self.ranks)})

        async def metrics(request: web.Request) -> web.Response:
            name = 'vllm:num_requests_running{engine="%d",model_name="m"} 0.0\n'
            return web.Response(text="".join(name % number for number in range(self.told_ranks)))

        async def complete(request: web.Request) -> web.Response:
            self.completions.put_nowait(await request.json())
            if self.completion_pause is not None:
                await self.completion_pause.wait()
            return web.json_response({}, status=self.completion_status)

        app = web.Application()
        app.router.add_post("/v1/completions", complete)
        app.router.add_get("/kv_event_sources", sources)
        app.router.add_get("/metrics", metrics)
        return app

    def _entry(self, rank: Rank) -> dict[str, Any]:
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{rank.port}",
            "replay_endpoint": f"tcp://*:{rank.replay_port}" if self._replays else None,
            "topic": rank.topic.decode(),
        }

    async def start(self) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        await self._runner.cleanup()
        self._close_ranks()
        self._context.term()

    def _close_ranks(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.ranks.clear()


@asynccontextmanager
async def publishing(
    ranks: int = 1, *, topic: bytes = b"", modern: bool = True, replays: bool = True, tells: bool = True
) -> AsyncIterator[Publisher]:
    async with contextlib.AsyncExitStack() as stack:
        publisher = Publisher(ranks, topic, modern, replays, tells)
        stack.push_async_callback(publisher.stop)
        await publisher.start()
        yield publisher
