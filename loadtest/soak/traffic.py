"""Random traffic with aborts, deaths and repeats against a gateway and simulated engines, and what it left behind.

Every choice comes from one seed. A client does one of three things with an answer: reads it whole, leaves after some
bytes, or leaves at once. Meanwhile engines fail in every way that they know. What a client saw is one of few outcomes;
anything else, half an answer that looks whole above all, raises SoakFailure.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.gateway_process import GatewayProcess
from tests.support.sim_process import SimProcess, http_request

CHAT = "/v1/chat/completions"
ANSWER_TIMEOUT_S = 60.0
FAULT_EVERY = 25  # requests from one fault of an engine to the next
# kind, value, for how many requests
FAULTS: tuple[tuple[str, Any, int | None], ...] = (
    ("reset", True, 3),
    ("reset-after-chunks", 2, 3),
    ("close-after-chunks", 3, 3),
    ("first-event-error", True, 3),
    ("status", 503, 3),
    ("status", 429, 3),
    ("status", 500, 3),
    ("keepalive-comments", 3, 5),
    ("trailing-bytes", 9, 3),
    ("stall-after-chunks", 2, 1),
    ("stall", True, 1),
    ("refuse", 0.2, None),
    ("cold-restart", True, None),
)
OWN_ERRORS = {429, 502, 503, 504}


class SoakFailure(Exception):
    """A client saw what it must never see."""


@dataclass
class Holdings:
    """What the gateway holds at a moment."""

    in_flight: int
    queue_depth: int
    open_exchanges: int
    connections: int
    upstream_connections: int
    open_files: int
    memory_bytes: int


def holdings(gateway: GatewayProcess) -> Holdings:
    figures = gateway.metrics()
    numbers = {
        name: int(figures.sum(name))
        for name in ("in_flight", "queue_depth", "open_exchanges", "connections", "upstream_connections")
    }
    return Holdings(**numbers, open_files=gateway.open_files(), memory_bytes=gateway.memory_bytes())


@dataclass
class Outcomes:
    """How the requests ended for their clients; `sent` of them reached the gateway whole."""

    sent: int = 0
    ended: Counter[str] = field(default_factory=Counter)


class Connection:
    """One keep-alive connection of an asyncio client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def read_head(self) -> tuple[int, dict[str, str]]:
        raw = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = raw.decode("latin-1").rstrip("\r\n").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        return int(first.split(" ")[1]), headers

    async def read_body(self, headers: dict[str, str]) -> tuple[bytes, bool]:
        """The body, and whether its end came."""
        if headers.get("transfer-encoding") != "chunked":
            length = int(headers["content-length"])
            try:
                return await self.reader.readexactly(length), True
            except asyncio.IncompleteReadError as error:
                return error.partial, False
        body = b""
        try:
            while size := int(await self.reader.readuntil(b"\r\n"), 16):
                body += (await self.reader.readexactly(size + 2))[:-2]
            await self.reader.readexactly(2)
        except (asyncio.IncompleteReadError, ConnectionResetError):
            return body, False
        return body, True

    def close(self) -> None:
        self.writer.transport.abort()


class Traffic:
    """`requests` requests from `clients` clients at once. `faults`: whether engines fail meanwhile."""

    def __init__(
        self, gateway: GatewayProcess, sims: Sequence[SimProcess], *, seed: int, clients: int = 16, faults: bool = True
    ) -> None:
        self._gateway = gateway
        self._sims = sims
        self._clients = clients
        self._faults = faults
        self._rng = random.Random(seed)
        self._left = 0
        self.outcomes = Outcomes()

    async def run(self, requests: int, progress: Callable[[int], None] = lambda left: None) -> None:
        self._left = requests
        async with asyncio.TaskGroup() as group:
            for _ in range(self._clients):
                group.create_task(self._client(progress))
        for sim in self._sims:
            await asyncio.to_thread(sim.fault, "clear")

    async def _client(self, progress: Callable[[int], None]) -> None:
        connection: Connection | None = None
        while self._left:
            self._left -= 1
            if self._faults and self._left % FAULT_EVERY == 0:
                await self._break_an_engine()
            if self._left % 1000 == 0:
                progress(self._left)
            if connection is None:
                connection = Connection(*await asyncio.open_connection(self._gateway.host, self._gateway.port))
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                kept = await self._request(connection)
            if not kept:
                connection.close()
                connection = None
        if connection is not None:
            connection.close()

    async def _break_an_engine(self) -> None:
        sim = self._rng.choice(self._sims)
        kind, value, count = self._rng.choice(FAULTS)
        await asyncio.to_thread(sim.fault, kind, value, count)

    def _body(self) -> dict[str, Any]:
        rng = self._rng
        conversation, turns = rng.randrange(24), rng.randrange(1, 6)
        messages = [{"role": "system", "content": f"system {conversation % 3} " * 40}]
        for turn in range(turns):
            messages.append({"role": "user", "content": f"conversation {conversation} turn {turn} " * 10})
        return {"messages": messages, "max_tokens": rng.choice((1, 4, 16)), "stream": rng.random() < 0.7}

    async def _request(self, connection: Connection) -> bool:
        """One request; whether its connection may carry another."""
        rng, ended = self._rng, self.outcomes.ended
        leave = rng.random()
        body = self._body()
        if leave < 0.2:
            body["max_tokens"] = 400
        connection.writer.write(http_request("POST", CHAT, body))
        await connection.writer.drain()
        self.outcomes.sent += 1
        if leave < 0.05:
            # A write is with the kernel when drain returns here: the gateway reads the request, then the end.
            ended["left at once"] += 1
            return False
        try:
            if leave < 0.2:
                await connection.reader.read(rng.choice((1, 300, 900)))
                ended["left in the answer"] += 1
                return False
            status, headers = await connection.read_head()
        except (asyncio.IncompleteReadError, ConnectionResetError) as error:
            raise SoakFailure(f"no answer at all: {error}") from error
        data, whole = await connection.read_body(headers)
        ended[self._judge(bool(body["stream"]), status, headers, data, whole)] += 1
        return whole and headers.get("connection") != "close"

    def _judge(self, stream: bool, status: int, headers: dict[str, str], data: bytes, whole: bool) -> str:
        if "x-kvgate-error" in headers:
            if status not in OWN_ERRORS or not whole:
                raise SoakFailure(f"{status} {data!r}")
            code = json.loads(data)["error"]["code"]
            return f"own {status} {code}"
        if status != 200:
            return f"engine's {status}"
        if not stream:
            if not whole:
                return "cut"
            json.loads(data)
            return "whole"
        done = data.endswith(b"data: [DONE]\n\n")
        if whole and not done:
            raise SoakFailure(f"half a stream with a proper end: {data[-200:]!r}")
        if whole:
            return "engine's error event" if b'data: {"error"' in data else "whole"
        if done:
            raise SoakFailure(f"a cut stream with [DONE]: {data[-200:]!r}")
        if b'data: {"error"' not in data:
            raise SoakFailure(f"a cut stream without an error event: {data[-200:]!r}")
        return "cut with an error event"
