"""The gateway's real core in one thread on a virtual clock: every class of the request path, with scripted ends.

    clients (scripted.Client) -- Network -- Downstream, Exchange, Upstream -- Network -- engines (ScriptedEngine)

What app.py does with sockets and tasks is done here with links and timers; nothing else stands in for anything.
Watchers sit where a promise could be broken unseen; `check()` compares what the core counts with what they saw.
"""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

from router.backends.backend import Backend, EngineReport, State
from router.backends.ejection import SILENT, Ejector
from router.backends.registry import BackendAdded, BackendRemoved, FleetEvent, Registry, StateChanged
from router.clock import VirtualClock
from router.index.prefix_index import PrefixTree
from router.metrics import Metrics
from router.net.downstream import WRITE_HIGH_WATER_BYTES, Downstream, DownstreamLimits
from router.net.exchange_api import ConnectEvents
from router.net.upstream_pool import UpstreamPool
from router.proxy.access_log import AccessLine
from router.proxy.admission import Admission
from router.proxy.attempt import HELD_LIMIT_BYTES
from router.proxy.exchange import Exchange
from router.proxy.phases import Phase
from router.proxy.retry import RetryBudget
from router.proxy.services import ExchangeSettings, Services
from router.strategies.registry import Dependencies, build, held_line
from router.strategies.strategy import Choice, Explanation, Outcome, RoutingRequest, Strategy
from router.tokens.answers import Answer, NoTokens, Why
from router.tokens.tokens import Question
from router.wire.http_head import RequestHead
from router.wire.paths import PathKind, path_kind
from tests.support.scripted import Client, EngineConnection, Received
from tests.support.transports import WINDOW_BYTES, Network, VirtualTransport

MODEL = "m"
# a slow client costs the mark at which reading stops, and one piece or one held answer beyond it
WRITE_BOUND_BYTES = WRITE_HIGH_WATER_BYTES + HELD_LIMIT_BYTES + 2 * WINDOW_BYTES
REQUEST_ID = re.compile(rb"\r\nx-request-id: ([^\r]*)\r\n")


@dataclass(frozen=True)
class HealthSettings:
    connect_failures: int = 3
    failed_attempts: int = 5
    interval_s: float = 2.0
    unhealthy_after: int = 3
    silence_s: float = 2.0
    ejection_s: float = 1.0
    ejection_max_s: float = 8.0


@dataclass(frozen=True)
class Rules:
    """The configuration of one world; times in seconds."""

    strategy: str = "roundrobin"
    max_in_flight: int = 0
    max_in_flight_per_backend: int = 0
    max_queue: int = 100
    queue_timeout_s: float = 3.0
    connect_s: float = 0.5
    first_byte_s: float = 5.0
    idle_s: float = 3.0
    client_body_s: float = 2.0
    client_keepalive_s: float = 6.0
    upstream_keepalive_s: float = 4.0
    retry_attempts: int = 2
    retry_budget: float = 0.2
    max_header_bytes: int = 65536
    max_body_bytes: int = 1 << 20
    session_headers: tuple[bytes, ...] = (b"x-session-id",)
    metrics_on_data_port: bool = True
    hold_batch_tokens: int = 0  # of the held line; 0: none
    health: HealthSettings = HealthSettings()


Handler = Callable[[EngineConnection, Received], None]


class ScriptedEngine:
    """What listens at a backend's address. `accepts`: up | refuse | blackhole | reset (accepts, then cuts at once)."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.accepts = "up"
        self.alive = True  # what a health check would find
        self.models: list[str] | None = None  # what it would list; None: it does not answer

        self.handler: Handler | None = None
        self.connections: list[EngineConnection] = []
        self.received: list[Received] = []
        self.accepted = 0

    @property
    def open_connections(self) -> list[EngineConnection]:
        self.connections = [connection for connection in self.connections if not connection.lost]
        return self.connections

    def accept(self) -> EngineConnection:
        connection = EngineConnection(self._on_request)
        self.accepted += 1
        self.connections.append(connection)
        return connection

    def _on_request(self, connection: EngineConnection, received: Received) -> None:
        self.received.append(received)
        assert self.handler is not None
        self.handler(connection, received)

    def die(self) -> None:
        self.alive = False
        self.accepts = "refuse"
        for connection in self.open_connections:
            connection.reset()

    def restart(self) -> None:
        self.alive = True
        self.accepts = "up"


class ScriptedConnecting:
    """As net.upstream_pool._TaskConnecting: a gap between the connection and the telling of it included."""

    def __init__(self, world: World, backend: Backend, events: ConnectEvents) -> None:
        self._world = world
        self._events: ConnectEvents | None = events
        self._upstream = world.pool.make(backend)
        self._engine = world.engines[backend.name]
        world.clock.call_later(world.latency_s, self._arrive)

    def cancel(self) -> None:
        if self._events is not None:
            self._events = None
            self._upstream.never_connected()

    def _arrive(self) -> None:
        events = self._events
        if events is None:
            return
        if self._engine.accepts == "refuse":
            self._events = None
            self._upstream.never_connected()
            events.on_connect_failed("connection refused")
        elif self._engine.accepts != "blackhole":
            connection = self._engine.accept()
            near, _ = self._world.network.link(self._upstream, connection)
            near.on_write = partial(self._world.sent_upstream, self._engine.name)
            if self._engine.accepts == "reset":
                connection.reset()
            self._world.clock.call_later(self._world.connect_gap_s, self._tell)

    def _tell(self) -> None:
        events, self._events = self._events, None
        if events is None:
            return
        if self._upstream.reusable:
            events.on_connected(self._upstream)
        else:
            events.on_connect_failed("the connection was closed at once")


@dataclass(eq=False)
class Begun:
    """One exchange as the world saw it begin. Its classes are compiled, so they are watched from outside."""

    exchange: Exchange
    transport: VirtualTransport  # the gateway's end of the client's connection
    written: int  # bytes of answers sent to the client before
    changes: bool  # its request may change an engine
    sent_to: list[str] = field(default_factory=list)


class WatchedStrategy:
    """The real strategy; each choice is checked against the fleet as it is, and must end exactly once."""

    def __init__(self, world: World, real: Strategy) -> None:
        self._world = world
        self.real = real
        self.needs = real.needs
        self.patience_s = 1.0  # as long as tokens are waited for, where somebody counts them
        self.open: dict[Choice, bool] = {}  # placed and not ended -> whether its first byte came
        self.trials: dict[Backend, Choice] = {}  # the last one of each
        self.placed_count = 0
        self.outcomes: list[tuple[Choice, Outcome]] = []

    def choose(self, request: RoutingRequest, candidates: Sequence[Backend]) -> Choice | None:
        assert candidates, "a strategy is not asked to choose among none"
        choice = self.real.choose(request, candidates)
        assert choice is None or choice.backend in candidates
        return choice

    def placed(self, choice: Choice) -> None:
        backend, rules = choice.backend, self._world.rules
        assert backend.serving, f"new work for {backend} (draining: {backend.draining})"
        assert backend in self._world.registry
        cap = rules.max_in_flight_per_backend
        assert not cap or backend.in_flight <= cap, f"{backend} is over its cap of {cap}"
        if backend.state is State.TRIAL:
            assert self.trials.get(backend) not in self.open, f"{backend} is on trial and gets a second request"
            assert backend.trial_open
            self.trials[backend] = choice
        admission = self._world.admission
        assert not rules.max_in_flight or admission.in_flight <= rules.max_in_flight, "placed beyond the cap"
        self.open[choice] = False
        self.placed_count += 1
        self.real.placed(choice)

    def first_byte(self, choice: Choice) -> None:
        assert self.open[choice] is False, "the first byte of a choice came twice"
        self.open[choice] = True
        self.real.first_byte(choice)

    def observe(self, choice: Choice, outcome: Outcome) -> None:
        del self.open[choice]  # KeyError: it was not open
        self.outcomes.append((choice, outcome))
        self.real.observe(choice, outcome)

    def reported(self, backend: Backend, before: EngineReport, now: EngineReport) -> None:
        self.real.reported(backend, before, now)

    def joined(self, backend: Backend) -> None:
        self.real.joined(backend)

    def forget(self, backend: Backend) -> None:
        self.real.forget(backend)

    def explain(self, request: RoutingRequest, candidates: Sequence[Backend]) -> Explanation:
        return self.real.explain(request, candidates)

    def match_of(self, request: RoutingRequest, backend: Backend) -> tuple[int, int]:
        return self.real.match_of(request, backend)

    def known_of(self, backend: Backend) -> Mapping[str, float | bool | str | None]:
        return self.real.known_of(backend)

    def token_patience_s(self, request: RoutingRequest, candidates: Sequence[Backend]) -> float:
        return self.patience_s


class ScriptedTokens:
    """Who counts prompts: `at_once` is the answer to all; without it, questions wait in `open` for `answer`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.at_once: Answer | None = None
        self.open: list[Question] = []
        self.asked: list[tuple[str, str, bytes]] = []

    def ask(self, model: str, path: str, body: bytes, deadline: float, done: Callable[[Answer], None]) -> Question:
        self.asked.append((model, path, body))
        question = Question(self._world.clock.now(), done)
        question.answer = self.at_once
        if self.at_once is None:
            self.open.append(question)
            question.wait(self._world.clock.call_later(deadline - self._world.clock.now(), self._late, question))
            question.job = _Withdrawal(self, question)  # type: ignore[assignment]
        return question

    def answer(self, answer: Answer) -> None:
        """The oldest of those that wait."""
        question = self.open[0]
        question.cancel()
        question.done(answer)

    def _late(self, question: Question) -> None:
        question.cancel()
        question.done(NoTokens(Why.LATE))

    def states(self) -> dict[str, dict[str, object]]:
        return {}


@dataclass(eq=False)
class _Withdrawal:
    tokens: ScriptedTokens
    question: Question

    def cancel(self) -> None:
        self.tokens.open.remove(self.question)


class World:
    """One gateway, its fleet and its clients. Everything random comes from `seed`."""

    def __init__(self, rules: Rules = Rules(), *, backends: int = 2, seed: int = 0, chop: bool = False) -> None:
        self.rules = rules
        self.rng = Random(seed)
        self.clock = VirtualClock()
        self.latency_s = 0.001
        self.connect_gap_s = 0.0
        self.network = Network(self.clock, Random(seed) if chop else None, self.latency_s)
        self.engines: dict[str, ScriptedEngine] = {}
        self.clients: list[Client] = []
        self.begun = 0
        self._in_flight_at_change = self._depth_at_change = 0  # a lower cap sends nobody away
        self._backends_at_change: dict[Backend, int] = {}
        self.access_lines: list[AccessLine] = []
        self._begun: dict[bytes, Begun] = {}  # by request id
        self._transports: dict[Downstream, VirtualTransport] = {}
        self.metrics = Metrics()
        self.registry = Registry(self.clock)
        self.index = PrefixTree(16 << 20)
        parts = Dependencies(
            clock=self.clock,
            rng=Random(seed + 1),
            mirror=self.index,
            block_bytes=64,
            assumed_kv_tokens=4096,
        )
        real = build(rules.strategy, None, parts)
        self.strategy = WatchedStrategy(self, real)
        self.pool = UpstreamPool(self.clock, rules.upstream_keepalive_s, rules.max_header_bytes)
        self.ejector = Ejector(self.registry, self.clock, rules.health)
        self.admission = Admission(rules.max_in_flight, rules.max_queue)
        self.budget = RetryBudget(rules.retry_budget)
        self.services = Services(
            clock=self.clock,
            settings=ExchangeSettings(
                strategy_name=rules.strategy,
                block_bytes=64,
                session_headers=rules.session_headers,
                session_fields=("user",),
                session_cookie=b"",
                connect_s=rules.connect_s,
                first_byte_s=rules.first_byte_s,
                idle_s=rules.idle_s,
                queue_timeout_s=rules.queue_timeout_s,
                retry_attempts=rules.retry_attempts,
                max_in_flight_per_backend=rules.max_in_flight_per_backend,
                metrics_on_data_port=rules.metrics_on_data_port,
            ),
            registry=self.registry,
            strategy=self.strategy,
            admission=self.admission,
            budget=self.budget,
            pool=self.pool,
            connector=self,
            passive_health=self.ejector,
            check_engine=self.check_engine,
            metrics=self.metrics,
            access_log=self,
            scrape=lambda tell: tell(b"metrics\n"),
            version_body=b'{"version":"0"}',
            ask_models=self.ask_models,
        )
        if rules.hold_batch_tokens:
            self.services.line = held_line(parts, real, rules.hold_batch_tokens)
        self.registry.subscribe(self._on_fleet_event)  # after the ejector, as app.Gateway does
        self.ejector.on_silent = self._repeat_elsewhere
        self.connections: set[Downstream] = set()
        self._limits = DownstreamLimits(
            max_header_bytes=rules.max_header_bytes,
            max_body_bytes=rules.max_body_bytes,
            client_body_s=rules.client_body_s,
            client_keepalive_s=rules.client_keepalive_s,
        )
        for number in range(backends):
            self.add_backend(f"e{number}")

    # -- what the core is given ---------------------------------------------------------------------------------------

    def connect(self, backend: Backend, events: ConnectEvents) -> ScriptedConnecting:
        return ScriptedConnecting(self, backend, events)

    def open_exchange(self, downstream: Downstream, head: RequestHead | None) -> Exchange:
        self.begun += 1
        exchange = Exchange(self.services, downstream, head)
        transport = self._transports[downstream]
        changes = head is not None and path_kind(head.method, head.path) is PathKind.CHANGE
        self._begun[exchange._request_id] = Begun(exchange, transport, transport.written_final_bytes, changes)
        return exchange

    def write(self, line: AccessLine) -> None:
        """The access log: one line for each exchange that ended."""
        self.access_lines.append(line)

    def check_engine(self, backend: Backend, tell: Callable[[bool], None]) -> Callable[[], object]:
        return self.clock.call_later(0.05, lambda: tell(self.engines[backend.name].alive)).cancel

    def ask_models(self, backend: Backend, tell: Callable[[bool], None]) -> Callable[[], object]:
        """As check_engine; what the engine serves is `models` of its script."""

        def answer() -> None:
            models = self.engines[backend.name].models
            if models is not None:
                self.registry.set_models(backend, [{"id": model} for model in models])
            tell(models is not None)

        return self.clock.call_later(0.05, answer).cancel

    def sent_upstream(self, backend: str, data: bytes) -> None:
        """Bytes for an engine. A head tells by its x-request-id whose it is."""
        request_id = REQUEST_ID.search(data)
        if request_id is None:
            return
        begun = self._begun[request_id[1]]
        assert begun.transport.written_final_bytes == begun.written, (
            "sent to an engine after a byte of an answer went downstream"
        )
        before = begun.sent_to
        assert not before or not begun.changes, "sent twice what may change an engine"
        assert backend not in before[:-1], "sent again to a backend that had failed"
        before.append(backend)
        assert len(set(before)) <= 1 + self.rules.retry_attempts

    def _on_fleet_event(self, event: FleetEvent) -> None:
        """As app.Gateway does."""
        backend = event.backend
        if isinstance(event, BackendAdded):
            self.strategy.joined(backend)
        elif isinstance(event, BackendRemoved):
            self.strategy.forget(backend)
            self.pool.drop(backend)
            self.metrics.forget_backend(backend.name)
        elif isinstance(event, StateChanged) and event.after not in (State.UP, State.TRIAL):
            self.pool.drop(backend)
            if event.why == SILENT:
                self._repeat_elsewhere(backend)
        self.admission.pump(self.clock.now())

    def _repeat_elsewhere(self, backend: Backend) -> None:
        for exchange in list(self.services.exchanges):
            exchange.on_backend_silent(backend)

    # -- the fleet ----------------------------------------------------------------------------------------------------

    def add_backend(self, name: str, *, weight: float = 1.0, models: Sequence[str] = (MODEL,)) -> Backend:
        self.engines[name] = ScriptedEngine(self, name)
        backend = self.registry.add(name, f"http://{name}.test:8000", weight, models=models)
        self.registry.set_state(backend, State.UP, "")
        return backend

    def backend(self, name: str) -> Backend:
        backend = self.registry.get(name)
        assert backend is not None
        return backend

    def on_engine_requests(self, handler: Handler) -> None:
        """One script for all engines."""
        for engine in self.engines.values():
            engine.handler = handler

    def set_limits(self, max_in_flight: int, max_queue: int, max_in_flight_per_backend: int | None = None) -> None:
        """As a reload does: what runs and waits goes on, beyond lower caps too."""
        per_backend = self.rules.max_in_flight_per_backend
        if max_in_flight_per_backend is not None:
            per_backend = max_in_flight_per_backend
        self.rules = replace(
            self.rules,
            max_in_flight=max_in_flight,
            max_queue=max_queue,
            max_in_flight_per_backend=per_backend,
        )
        self._in_flight_at_change = self.admission.in_flight
        self._depth_at_change = self.admission.depth
        self._backends_at_change = {backend: backend.in_flight for backend in self.registry.backends}
        self.services.settings = replace(self.services.settings, max_in_flight_per_backend=per_backend)
        self.admission.set_limits(max_in_flight, max_queue)
        self.admission.pump(self.clock.now())

    # -- clients ------------------------------------------------------------------------------------------------------

    def client(self) -> Client:
        return self.add_client(Client())

    def add_client(self, client: Client) -> Client:
        self.clients.append(client)
        downstream = Downstream(self, self.clock, self._limits, self.connections)
        _, self._transports[downstream] = self.network.link(client, downstream)
        return client

    # -- time ---------------------------------------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        """Let time pass, checking after each instant at which something happens."""
        until = self.clock.now() + seconds
        while (due := self.clock.next_due()) is not None and due <= until:
            self.clock.advance_to(due)
            self.check()
        self.clock.advance_to(until)

    # -- promises -----------------------------------------------------------------------------------------------------

    @property
    def ended(self) -> int:
        return sum(self.metrics.ended.values())

    def check(self) -> None:
        """What must hold between any two events."""
        if self.network.faults:
            raise self.network.faults[0]
        s = self.services
        assert self.metrics.broken_exchanges == 0
        in_flight = sum(backend.in_flight for backend in self.registry.backends)
        assert in_flight == len(self.strategy.open), "in flight is not the number of open attempts"
        assert self.admission.in_flight == in_flight
        assert self.ended + len(s.exchanges) == self.begun, "an exchange ended twice, or not at all"
        assert len(self.access_lines) == self.ended
        rules = self.rules
        cap, total = rules.max_in_flight_per_backend, rules.max_in_flight
        assert not total or in_flight <= max(total, self._in_flight_at_change)
        self._in_flight_at_change = min(self._in_flight_at_change, in_flight)
        if cap:
            for backend in self.registry.backends:
                before = self._backends_at_change.get(backend, 0)
                assert backend.in_flight <= max(cap, before)
                self._backends_at_change[backend] = min(before, backend.in_flight)
        for transport in self.network.open:
            if isinstance(transport.protocol, Downstream):
                held = transport.get_write_buffer_size()
                assert held <= WRITE_BOUND_BYTES, f"{held} bytes are held for one slow client"
        # a repeat waits beyond the bound, and each had a place before
        assert self.admission.depth <= max(rules.max_queue, self._depth_at_change) + self.metrics_retries
        self._depth_at_change = min(self._depth_at_change, self.admission.depth)
        assert self.admission.depth == sum(self.admission.queued_by_model().values())
        assert not self.admission.holds or s._wake is not None, "somebody is held and nobody will look again"
        if self.admission.holds and not self.admission.full:
            for exchange in s.exchanges:
                if exchange.held_s is not None and exchange._phase is Phase.QUEUED:
                    backend = exchange.held_for
                    assert backend is not None
                    assert not backend.serving or backend.in_flight, "held for an idle backend"

    @property
    def metrics_retries(self) -> int:
        return sum(self.metrics.retries.values())

    def check_at_rest(self) -> None:
        """Clients gone, timers run out: nothing may be left of what happened."""
        self.check()
        s = self.services
        assert not s.exchanges
        assert not self.connections
        assert not self.network.open
        assert self.ended == self.begun
        assert all(backend.in_flight == 0 for backend in self.registry.backends)
        assert self.admission.in_flight == self.admission.depth == 0
        assert not self.admission.queued_by_model()
        assert not self.strategy.open
        assert len(self.strategy.outcomes) == self.strategy.placed_count
        assert self.pool.open == 0
        assert all(self.pool.idle_count(backend) == 0 for backend in self.registry.backends)
        assert not self.pool._idle
        assert self.pool._sweep is None
        assert not ledgers(self.strategy.real)
        assert self.clock.pending == 1, "only the ejector's periodic check is left"
        assert all(transport.lost for transport in self._transports.values())
        self._transports.clear()
        gc.collect(0)
        for begun in self._begun.values():
            if sys.getrefcount(begun.exchange) > 2:
                gc.collect()
            assert sys.getrefcount(begun.exchange) == 2, "something holds an exchange after its end"
        self._begun.clear()

    def rest(self, seconds: float = 40.0) -> None:
        """Everybody leaves; then nothing may be left."""
        for client in self.clients:
            if not client.lost:
                client.abort()
        self.run(seconds)
        self.check_at_rest()


def ledgers(strategy: object) -> dict[str, object]:
    """What a strategy still holds of attempts: empty when none is open."""
    placement = getattr(strategy, "_placement", None) or getattr(strategy, "_keyless", None) or strategy
    left: dict[str, object] = {}
    for backend, engine in getattr(placement, "_engines", {}).items():
        ledger = engine.ledger
        if len(ledger) or ledger.kv_tokens or ledger.pending_s or ledger.decoding:
            left[backend.name] = ledger
    return left
