"""The simulated engine as a process: its parts put together, its port, its end, and the tests' side door (/sim/)."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from random import Random
from typing import Any
from urllib.parse import parse_qs

import orjson

from router.clock import Clock, SystemClock
from router.sim.adapters import Adapters
from router.sim.engine import SimEngine
from router.sim.faults import FaultKind, Faults
from router.sim.http_protocol import DateHeader, Exchange, HttpProtocol
from router.sim.inference import Inference
from router.sim.observations import Observations
from router.sim.routes import Routes
from router.sim.sim_config import SimConfig

BACKLOG = 2048
STOP_CHECK_S = 0.02
STOP_CHECKS = 50  # a client that does not read its answer is not waited for longer


class SimServer:
    """`wall_time` (Unix seconds) dates what clients see; durations come from the loop's clock."""

    def __init__(self, config: SimConfig, loop: asyncio.AbstractEventLoop, wall_time: Callable[[], float]) -> None:
        self.config = config
        self.clock: Clock = SystemClock(loop)
        self.connections: set[HttpProtocol] = set()
        self.max_body_bytes = config.max_body_bytes
        self.draining = False
        self.faults = Faults()
        self.wall_time = wall_time
        self.observations = Observations(self.clock, self._gauges)
        self._loop = loop
        self._date = DateHeader(wall_time)
        self._adapters = Adapters(config.served_model_names)
        identities = Random(f"{config.seed}/{wall_time()}")
        self._inference = Inference(
            config, self.clock, wall_time, self.faults, self._adapters, self.observations, identities
        )
        self.engine = SimEngine(
            config,
            self.clock,
            loop,
            wall_time,
            self._inference.deliver,
            lambda: self.faults.take(FaultKind.LOSE_KV_EVENTS) is not None,
        )
        self._inference.attach(self.engine)
        self._routes = Routes(
            config, self.clock, wall_time, self.faults, self._adapters, self.engine, self._inference, identities
        )
        self._server: asyncio.Server | None = None
        self._control: asyncio.Server | None = None
        self._port = config.port
        self._held: socket.socket | None = None  # bound to the port while it refuses, so that nobody else gets it
        self._opening_or_closing = asyncio.Lock()
        self._applying: asyncio.Task[None] | None = None  # the loop holds its tasks weakly

    async def start(self) -> int:
        """Listen; the port. OSError if it cannot be had."""
        await self._listen()
        if self.config.control_port is not None:
            self._control = await self._loop.create_server(self._connection, self.config.host, self.config.control_port)
        return self._port

    @property
    def control_port(self) -> int | None:
        if self._control is None:
            return None
        return int(self._control.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """As vLLM on SIGTERM: what is in flight ends as aborted, properly, and the listener is closed."""
        self.draining = True
        for server in (self._server, self._control):
            if server is not None:
                server.close()
        self._server = self._control = None
        self._release_port()
        self._inference.abort_all()
        self.observations.stop()
        for connection in list(self.connections):
            connection.drain()
        for _ in range(STOP_CHECKS):
            if not self.connections:
                break
            await asyncio.sleep(STOP_CHECK_S)
        for connection in list(self.connections):
            connection.reset()
        await asyncio.sleep(0)
        self.engine.close()

    def handle(self, exchange: Exchange) -> None:
        if exchange.path.startswith("/sim/"):
            self._handle_sim(exchange)
        else:
            self._routes.handle(exchange)

    def _connection(self) -> HttpProtocol:
        return HttpProtocol(self, self._date)

    async def _listen(self) -> None:
        self._server = await self._loop.create_server(self._connection, self.config.host, self._port, backlog=BACKLOG)
        self._port = int(self._server.sockets[0].getsockname()[1])

    # -- faults that are done once, not per request

    async def apply_faults(self, spared: Exchange | None = None) -> None:
        """Close or open the port, restart cold; `spared` is the exchange that asked. OSError if the port is lost."""
        async with self._opening_or_closing:  # a refusal that ends meanwhile would open it a second time
            await self._apply_faults(spared)

    async def _apply_faults(self, spared: Exchange | None) -> None:
        if self.faults.peek(FaultKind.COLD_RESTART):
            self.faults.set(FaultKind.COLD_RESTART, None)
            self.cold_restart(spared)
        refuse = self.faults.peek(FaultKind.REFUSE)
        if refuse is None and self._server is None and not self.draining:
            await self._listen()
            self._release_port()
        elif refuse is not None and self._server is not None:
            server, self._server = self._server, None
            for connection in list(self.connections):
                if not connection.serves(spared):
                    connection.reset()
            address, family = server.sockets[0].getsockname(), server.sockets[0].family
            server.close()
            await asyncio.sleep(0)  # uvloop closes the listening socket in the next iteration
            self._hold_port(family, address)
            if refuse is not True:
                self.clock.call_later(float(refuse), self._accept_again)

    def _hold_port(self, family: int, address: tuple[str, int]) -> None:
        """Else the system may give it to any outgoing connection. Whoever connects is still refused."""
        self._held = socket.socket(family)
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind(address)

    def _release_port(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.close()

    def _accept_again(self) -> None:
        self.faults.set(FaultKind.REFUSE, None)
        self._applying = self._loop.create_task(self.apply_faults())

    def cold_restart(self, spared: Exchange | None = None) -> None:
        """As if the process had been killed and started again, on the same ports."""
        for connection in list(self.connections):
            if not connection.serves(spared):
                connection.reset()
        self._inference.lose_all()
        self._adapters.loaded.clear()
        self.engine.restart()

    # -- the tests' side door

    def _handle_sim(self, exchange: Exchange) -> None:
        path, method = exchange.path, exchange.method
        try:
            if path == "/sim/fault" and method == "POST":
                self._set_fault(exchange)
            elif path == "/sim/stats" and method == "GET":
                wanted = parse_qs(exchange.query).get("request_id")
                known = self.observations.tries(wanted[0]) if wanted else self.observations.stats()
                exchange.respond(200, orjson.dumps(known))
            elif path == "/sim/wait" and method == "GET":
                # GET /sim/wait?aborted=1&requests=2&timeout_s=5
                query = parse_qs(exchange.query)
                timeout_s = float(query.pop("timeout_s", ["10"])[0])
                self.observations.wait(exchange, {name: int(given[0]) for name, given in query.items()}, timeout_s)
            else:
                exchange.respond(404, b'{"detail":"Not Found"}')
        except ValueError as error:
            exchange.respond(400, orjson.dumps({"error": str(error)}))

    def _set_fault(self, exchange: Exchange) -> None:
        try:
            body = orjson.loads(exchange.body)
        except orjson.JSONDecodeError:
            raise ValueError("the body is not JSON") from None
        if not isinstance(body, dict):
            raise ValueError('expected {"kind": ..., "value": ..., "count": ...}')
        if body.get("kind") == "clear":
            self.faults.clear()
        else:
            try:
                kind = FaultKind(str(body.get("kind")))
            except ValueError:
                kinds = ", ".join(fault.value for fault in FaultKind)
                raise ValueError(f"kind: expected clear or one of {kinds}") from None
            self.faults.set(kind, body.get("value", True), body.get("count"))
        # The answer comes when it is done: the port open or closed, the cache empty.
        self._applying = self._loop.create_task(self._apply_and_answer(exchange))

    async def _apply_and_answer(self, exchange: Exchange) -> None:
        try:
            await self.apply_faults(exchange)
        except OSError as error:
            exchange.respond(500, orjson.dumps({"error": str(error)}))
            return
        exchange.respond(200, orjson.dumps({"faults": self.faults.active()}))

    def _gauges(self) -> dict[str, Any]:
        model, publisher = self.engine.model, self.engine.publisher
        return {
            "running": len(model.running),
            "waiting": len(model.waiting),
            "open": self._inference.open_calls,
            "connections": len(self.connections),
            "preemptions": model.stats.preemptions,
            "steps": model.stats.steps,
            "cached_blocks": model.pool.cached_blocks,
            "free_blocks": model.pool.free_blocks,
            "kv_event_sequence": publisher.sequence if publisher is not None else None,
            "faults": self.faults.active(),
        }
