"""The composition root: builds each object once, hands it on by constructor, starts and stops in order."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import platform
import random
import signal
import ssl
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import orjson
import uvloop

from router import __version__, tls
from router.admin import AdminServer
from router.backends.backend import Backend, EngineReport, State
from router.backends.ejection import SILENT, Ejector
from router.backends.health import HealthMonitor, poll_session
from router.backends.registry import BackendAdded, BackendRemoved, FleetEvent, Reconfigured, Registry, StateChanged
from router.build_info import request_path_compiled
from router.clock import SystemClock
from router.config import Config, ConfigError, TracingConfig
from router.control import Control
from router.dashboard.history import Recorder
from router.dashboard.live import Live
from router.dashboard.server import add_routes as add_dashboard
from router.engine_caches import EngineCaches
from router.index.prefix_index import PrefixTree
from router.kv_events.settings import IntakeSettings
from router.l2.l2 import L2
from router.l2.settings import L2Settings
from router.metrics import CONTENT_TYPE, Metrics
from router.metrics_exporter import BackendFigures, Exporter, Snapshot
from router.net.downstream import Downstream, DownstreamLimits
from router.net.upstream_pool import TcpConnector, UpstreamPool
from router.proxy.access_log import AccessLog
from router.proxy.admission import Admission
from router.proxy.api_keys import ApiKeys
from router.proxy.decisions import DecisionLines
from router.proxy.exchange import Exchange
from router.proxy.retry import RetryBudget
from router.proxy.services import ExchangeSettings, Services
from router.strategies.held_line import USUAL_BATCH_TOKENS
from router.strategies.kv_aware import KvAware
from router.strategies.registry import Dependencies, held_line
from router.strategies.registry import build as build_strategy
from router.strategies.strategy import Need
from router.systemd import Notifier
from router.tls import ClientContexts
from router.tokens.tokens import Tokens, TokensSettings
from router.tracing import OtlpTracer
from router.wire.http_head import RequestHead

logger = logging.getLogger("router")

LISTEN_BACKLOG = 4096
CHANGE_TOLD_S = 5.0


class Gateway:
    """One data port, one admin port, and everything behind them. `read` gives the configuration anew for a reload."""

    def __init__(
        self, config: Config, loop: asyncio.AbstractEventLoop, read: Callable[[], Config] | None = None
    ) -> None:
        self._config = config
        self._loop = loop
        clock = SystemClock(loop)
        self.metrics = Metrics()
        self.registry = Registry(clock)
        self.control = Control(config, read or (lambda: config), self.registry, self.metrics, self._apply)
        self.index = PrefixTree(config.index.memory_limit_bytes)
        self._tls: ssl.SSLContext | None = None
        self._client_tls = ClientContexts()
        self.caches = EngineCaches(
            self.registry,
            clock,
            self.metrics,
            poll_session,
            IntakeSettings(),
            _token_settings(config),
            self._client_tls,
            config.index.kv_memory_limit_bytes,
            config.routing.kvaware.relearn,
            self._use_tokens,
            L2Settings.of(config.kv_cache),
            self._use_l2,
        )
        self._strategy_parts = Dependencies(
            clock=clock,
            rng=random.Random(),
            mirror=self.index,
            block_bytes=config.index.block_bytes,
            assumed_kv_tokens=config.index.assumed_kv_tokens,
            holdings=self.caches.holdings,
            token_wait_share=config.routing.kvaware.token_wait_share,
            resync=self.caches.resync,
            level_changed=self.caches.level_changed,
            untold=self.caches.untold,
        )
        self.registry.set_aliases(config.models.aliases)
        pool = UpstreamPool(clock, config.timeouts.upstream_keepalive_s, config.limits.max_header_bytes)
        self.ejector = Ejector(self.registry, clock, config.health)
        self.ejector.on_silent = self._repeat_elsewhere
        self.health = HealthMonitor(
            self.registry,
            poll_session,
            clock,
            config.health,
            self._on_report,
            self._on_restart,
            contexts=self._client_tls,
        )
        self._lines = AccessLog(self.metrics, clock, sys.stdout.fileno(), json_lines=False)  # see _set_lines
        build = "compiled" if request_path_compiled() else "interpreted"
        self.exporter = Exporter(self.metrics, self._snapshot, __version__, build)
        self.services = Services(
            clock=clock,
            settings=_exchange_settings(config),
            registry=self.registry,
            strategy=build_strategy(config.routing.strategy, config.routing, self._strategy_parts),
            admission=Admission(config.limits.max_in_flight, config.limits.max_queue),
            budget=RetryBudget(config.retry.budget),
            pool=pool,
            connector=TcpConnector(loop, pool, self._client_tls),
            passive_health=self.ejector,
            check_engine=self._check_engine,
            metrics=self.metrics,
            access_log=None,  # see _set_lines
            scrape=self.exporter.scrape,
            tracer=self._make_tracer(config.tracing),
            version_body=orjson.dumps({"version": __version__}),
            ask_models=self._ask_models,
            api_keys=_api_keys(config),
        )
        self.registry.subscribe(self._on_fleet_event)
        self.recorder = Recorder(
            clock,
            self.registry,
            self.metrics,
            lambda: self.services.admission.depth,
            poll_interval_s=config.health.interval_s,
        )
        live = Live(
            self.recorder,
            self.registry,
            decisions=self.services.decisions.recent,
            hit_accounting=self._hit_accounting,
            about=self._about,
        )
        self.admin = AdminServer(
            config.admin.host,
            config.admin.port,
            self.services,
            self.control,
            render_metrics=self.exporter.text,
            metrics_content_type=CONTENT_TYPE,
            hit_accounting=self._hit_accounting,
            kv_events=self.caches.describe,
            version={"version": __version__, "request_path": build, "python": platform.python_version()},
            add_routes=lambda app: add_dashboard(app, live),
        )
        self._downstream_limits = _downstream_limits(config)
        self._told: dict[tuple[str, State], float] = {}  # when a backend's ejection and trial were last logged
        self.connections: set[Downstream] = set()
        self._server: asyncio.Server | None = None
        self._idle = asyncio.Event()
        self._set_lines(config)
        self._set_line(config)
        self.caches.use(self.services.strategy, _token_settings(config))

    # -- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> tuple[int, int]:
        """Listen. Returns the data port and the admin port. OSError: a port is taken."""
        self._loop.set_exception_handler(self._on_loop_exception)
        self.control.start()
        server = self._config.server
        if server.tls_cert is not None and server.tls_key is not None:
            self._tls = tls.server_context(server.tls_cert, server.tls_key)
        admin_port = await self.admin.start()
        try:
            self._server = await self._loop.create_server(
                self._make_downstream,
                server.host,
                server.port,
                backlog=LISTEN_BACKLOG,
                reuse_address=True,
                ssl=self._tls,
                ssl_handshake_timeout=self._config.timeouts.client_body_s if self._tls is not None else None,
            )
        except OSError:
            await self.admin.stop()
            raise
        await self.health.start()
        await self.caches.start()
        self.recorder.start()
        # What was made until here stays: the collector need not look at it again and again.
        gc.collect()
        gc.freeze()
        # Exchanges are freed by their reference counts; cycles are rare, so the collector need not look every 700
        # allocations (about four requests), which cost 5 % of a request here.
        gc.set_threshold(20_000, 20, 50)
        return self._server.sockets[0].getsockname()[1], admin_port

    async def drain(self, lame_duck: bool) -> None:
        """readyz says no. After the lame-duck moment, in which those who have not noticed yet are still served, no new
        connections and no further requests on the open ones; those under way have drain_s to end."""
        self.services.draining = True
        if lame_duck:
            await asyncio.sleep(self._config.timeouts.lame_duck_s)
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.drain()
        self.services.on_idle = self._idle.set
        if self.services.exchanges:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), self._config.timeouts.drain_s)
        self._end_exchanges()

    async def stop(self) -> None:
        self._end_exchanges()
        if self._server is not None:
            self._server.close()
        # what was written last leaves the process before its connections do
        for connection in list(self.connections):
            connection.drain()
        for _ in range(100):
            if not self.connections:
                break
            await asyncio.sleep(0.01)
        for connection in list(self.connections):
            connection.abort()
        self.recorder.stop()
        await self.caches.stop()
        await self.health.stop()
        self.ejector.stop()
        self.services.pool.close()
        await self.admin.stop()
        self.registry.close()
        await asyncio.sleep(0)
        self.exporter.close()
        self._lines.close()
        if isinstance(self.services.tracer, OtlpTracer):
            self.services.tracer.close()

    def _end_exchanges(self) -> None:
        self.services.admission.close()  # else each that ends would start the next
        for exchange in list(self.services.exchanges):
            exchange.on_shutdown()

    # -- a new configuration ------------------------------------------------------------------------------------------

    def _apply(self, new: Config) -> None:
        """Everything but the fleet, which Control changes. Exchanges under way go on with the limits of their phase."""
        old, self._config = self._config, new
        services = self.services
        services.settings = _exchange_settings(new)
        services.admission.set_limits(new.limits.max_in_flight, new.limits.max_queue)
        if new.retry.budget != old.retry.budget:
            services.budget = RetryBudget(new.retry.budget)
        services.pool.configure(new.timeouts.upstream_keepalive_s, new.limits.max_header_bytes)
        self._downstream_limits = _downstream_limits(new)
        self.health.configure(new.health)
        self.ejector.configure(new.health)
        self.recorder.poll_every(new.health.interval_s)
        self._strategy_parts.token_wait_share = new.routing.kvaware.token_wait_share
        if new.routing.strategy != old.routing.strategy:
            self._change_strategy(new)
        elif isinstance(services.strategy, KvAware):
            services.strategy.token_wait_share = new.routing.kvaware.token_wait_share
        self._set_line(new)
        self.caches.use(services.strategy, _token_settings(new))  # with no other key too: a folder may be mended
        if new.log != old.log:
            set_up_logging(new)
        self._set_lines(new)
        self._client_tls.renew()
        if self._tls is not None and new.server.tls_cert is not None and new.server.tls_key is not None:
            try:
                tls.load_pair(self._tls, new.server.tls_cert, new.server.tls_key)
            except (OSError, ValueError) as error:  # replaced since it was checked a moment ago
                logger.error("the old certificate stays: %s", tls.describe(error))
        self.registry.set_aliases(new.models.aliases)
        if new.auth != old.auth:
            services.api_keys = _api_keys(new)
        services.admission.pump(services.now())

    def _change_strategy(self, new: Config) -> None:
        """Two that both place by prefix share what is known of the caches; else it would age unseen, and is dropped."""
        old = self.services.strategy
        strategy = build_strategy(new.routing.strategy, new.routing, self._strategy_parts)
        if Need.PREFIX_BLOCKS not in old.needs & strategy.needs:
            for backend in self.registry.backends:
                old.forget(backend)
        for backend in self.registry.backends:
            strategy.joined(backend)
        self.services.use_strategy(strategy)

    def _set_line(self, config: Config) -> None:
        line = config.routing.line
        tokens = line.batch_tokens or (USUAL_BATCH_TOKENS if line.hold == "on" else 0)
        held = line.hold != "off" and tokens > 0
        self.services.line = held_line(self._strategy_parts, self.services.strategy, tokens) if held else None

    def _use_tokens(self, tokens: Tokens | None) -> None:
        self.services.tokens = tokens

    def _use_l2(self, l2: L2 | None) -> None:
        self.services.l2 = l2

    def _set_lines(self, config: Config) -> None:
        """Access and decision lines that are made from now on are as `[log]` says."""
        services, log = self.services, config.log
        production_stack = log.decisions == "production-stack"
        self._lines.json_lines = log.format == "json"
        services.access_log = self._lines if log.access else None
        services.decisions.lines = None
        if log.decisions != "off":
            services.decisions.lines = DecisionLines(
                self._lines.append,
                config.routing.strategy,
                json_lines=log.format == "json",
                production_stack=production_stack,
            )
        services.need_session = production_stack or Need.SESSION_KEY in services.strategy.needs

    def _make_tracer(self, tracing: TracingConfig) -> OtlpTracer | None:
        if tracing.otlp_endpoint is None:
            return None
        return OtlpTracer(
            self.metrics,
            SystemClock(self._loop).now,
            self._loop,
            endpoint=tracing.otlp_endpoint,
            headers=tracing.headers,
            sample_ratio=tracing.sample_ratio,
            service_name=tracing.service_name,
            version=__version__,
        )

    # -- what the parts tell each other -------------------------------------------------------------------------------

    def open_exchange(self, downstream: Downstream, head: RequestHead | None) -> Exchange:
        return Exchange(self.services, downstream, head)

    def _make_downstream(self) -> Downstream:
        limit = self._config.limits.max_connections
        connection = Downstream(self, self.services.clock, self._downstream_limits, self.connections)
        if limit and len(self.connections) >= limit:
            connection.abort()
        return connection

    def _on_fleet_event(self, event: FleetEvent) -> None:
        if isinstance(event, BackendAdded):
            self.services.strategy.joined(event.backend)
        elif isinstance(event, BackendRemoved):
            self.services.strategy.forget(event.backend)
            self.services.pool.drop(event.backend)
            if self.registry.get(event.backend.name) is None:  # else its successor has the name
                self.metrics.forget_backend(event.backend.name)
                for state in (State.EJECTED, State.TRIAL):
                    self._told.pop((event.backend.name, state), None)
        elif isinstance(event, Reconfigured):
            self.health.ask_models(event.backend)
        elif isinstance(event, StateChanged):
            backend = event.backend
            logger.log(
                self._level(event),
                "backend %s: %s -> %s%s",
                backend.name,
                event.before,
                event.after,
                f" ({event.why})" if event.why else "",
            )
            if event.after not in (State.UP, State.TRIAL):  # not its present state, which may be another already
                self.services.pool.drop(backend)
                if event.why == SILENT:
                    self._repeat_elsewhere(backend)
        self.services.admission.pump(self.services.now())

    def _level(self, event: StateChanged) -> int:
        """A fleet that fails as a whole goes from ejected to trial and back with every request: each of the two is told
        once in CHANGE_TOLD_S."""
        if event.after in (State.EJECTED, State.TRIAL):
            now = self.services.now()
            key = (event.backend.name, event.after)
            if now - self._told.get(key, float("-inf")) < CHANGE_TOLD_S:
                return logging.DEBUG
            self._told[key] = now
        return logging.INFO if event.after in (State.UP, State.TRIAL) else logging.WARNING

    def _repeat_elsewhere(self, backend: Backend) -> None:
        for exchange in list(self.services.exchanges):
            exchange.on_backend_silent(backend)

    def _on_report(self, backend: Backend, before: EngineReport, now: EngineReport) -> None:
        if now.shows_work_since(before):
            backend.progressed_at = self.services.now()
        self.services.strategy.reported(backend, before, now)

    def _on_restart(self, backend: Backend) -> None:
        logger.warning("backend %s is another process than before: its cache is taken for empty", backend.name)
        self.services.strategy.forget(backend)
        self.services.strategy.joined(backend)
        self.caches.restarted(backend)

    def _check_engine(self, backend: Backend, tell: Callable[[bool], None]) -> Callable[[], object]:
        return self._tell_result(self.health.check_now(backend), tell)

    def _ask_models(self, backend: Backend, tell: Callable[[bool], None]) -> Callable[[], object]:
        return self._tell_result(self.health.ask_models_now(backend), tell)

    def _tell_result(self, question: Coroutine[Any, Any, bool], tell: Callable[[bool], None]) -> Callable[[], object]:
        task = self._loop.create_task(question)

        def done(finished: asyncio.Task[bool]) -> None:
            if not finished.cancelled():
                tell(finished.exception() is None and finished.result())

        task.add_done_callback(done)
        return task.cancel

    def _on_loop_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """An exception that nobody caught is a fault of ours; the connection in whose callback it was is closed."""
        self.metrics.broken_exchanges += 1
        error = context.get("exception")
        logger.error("%s", context.get("message"), exc_info=error if isinstance(error, BaseException) else None)

    def _about(self) -> dict[str, object]:
        return {
            "version": __version__,
            "strategy": self._config.routing.strategy,
            "draining": self.services.draining,
        }

    def _hit_accounting(self, backend: Backend) -> dict[str, object]:
        figures: dict[str, object] = {
            "predicted_tokens": self.metrics.matched_predicted.get(backend.name, 0),
            "reported_tokens": self.metrics.matched_reported.get(backend.name, 0),
            "prompt_tokens": self.metrics.prompt_tokens.get(backend.name, 0),
        }
        trust = self.services.strategy.trust_of(backend)
        if trust is not None:
            figures |= {
                "predicted_tokens": trust.predicted_tokens,
                "reported_tokens": trust.reported_tokens,
                "trust": trust.value,
                "trusted": not trust.lost,
            }
        return figures

    def _snapshot(self) -> Snapshot:
        s = self.services
        in_flight: dict[str, int] = {}  # one that is leaving may share its name with its successor
        for b in self.registry.backends:
            in_flight[b.name] = in_flight.get(b.name, 0) + b.in_flight
        return Snapshot(
            backends=[
                BackendFigures(
                    name=b.name,
                    up=b.serving,
                    in_flight=in_flight[b.name],
                    running=b.report.running,
                    waiting=b.report.waiting,
                    kv_usage=b.report.kv_usage,
                    hit_ratio=_hit_ratio(b.report),
                    index_blocks=self.index.blocks_of(b.slot) if b.slot >= 0 else 0,
                    kv_blocks=self.caches.holdings.held_blocks(b),
                    models=b.models,
                )
                for b in self.registry.backends
                if self.registry.get(b.name) is b
            ],
            queue_depth=s.admission.depth,
            queued_by_model=s.admission.queued_by_model(),
            index_memory_bytes=self.index.memory_bytes() + self.caches.holdings.index.memory_bytes(),
            connections=len(self.connections),
            upstream_connections=s.pool.open,
            open_exchanges=len(s.exchanges),
            tokens=self.caches.token_figures(),
            l2=self.caches.l2_figures(),
        )


def _hit_ratio(report: EngineReport) -> float | None:
    if report.prefix_hits is None or not report.prefix_queries:
        return None
    return report.prefix_hits / report.prefix_queries


def _api_keys(config: Config) -> ApiKeys | None:
    return ApiKeys(config.auth.keys) if config.auth.keys is not None else None


def _exchange_settings(config: Config) -> ExchangeSettings:
    session = config.routing.session
    return ExchangeSettings(
        strategy_name=config.routing.strategy,
        block_bytes=config.index.block_bytes,
        session_headers=tuple(name.lower().encode() for name in session.headers),
        session_fields=session.body_fields,
        session_cookie=session.cookie.encode(),
        connect_s=config.timeouts.connect_s,
        first_byte_s=config.timeouts.first_byte_s,
        idle_s=config.timeouts.idle_s,
        queue_timeout_s=config.limits.queue_timeout_s,
        retry_attempts=config.retry.attempts,
        max_in_flight_per_backend=config.limits.max_in_flight_per_backend,
        metrics_on_data_port=config.server.metrics,
    )


def _token_settings(config: Config) -> TokensSettings:
    kvaware = config.routing.kvaware
    return TokensSettings(tokenization=kvaware.tokenization, folder=kvaware.tokenizer, folders=config.models.tokenizers)


def _downstream_limits(config: Config) -> DownstreamLimits:
    return DownstreamLimits(
        max_header_bytes=config.limits.max_header_bytes,
        max_body_bytes=config.limits.max_body_bytes,
        client_body_s=config.timeouts.client_body_s,
        client_keepalive_s=config.timeouts.client_keepalive_s,
    )


class JsonFormatter(logging.Formatter):
    """One JSON object a record, as the access lines have it."""

    def format(self, record: logging.LogRecord) -> str:
        told = {
            "time": record.created,
            "kind": "log",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            told["traceback"] = self.formatException(record.exc_info)
        return orjson.dumps(told).decode()


def set_up_logging(config: Config) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter()
        if config.log.format == "json"
        else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    logging.basicConfig(level=config.log.level.upper(), handlers=[handler], force=True)


def run(config: Config, read: Callable[[], Config]) -> int:
    """Serve until a signal says to stop; returns the exit code. `read` gives the configuration anew at a reload."""
    set_up_logging(config)
    try:
        return uvloop.run(_serve(config, read))
    except OSError as error:
        print(f"kvgate: {error.strerror or error}", file=sys.stderr)
        return 1


async def _serve(config: Config, read: Callable[[], Config]) -> int:
    loop = asyncio.get_running_loop()
    gateway = Gateway(config, loop, read)
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, signals.put_nowait, number)
    port, admin_port = await gateway.start()
    scheme = "http" if config.server.tls_cert is None else "https"
    print(f"listening on {scheme}://{_authority(config.server.host, port)}", flush=True)
    print(f"admin on http://{_authority(config.admin.host, admin_port)}", flush=True)
    notifier = Notifier(os.environ, os.getpid())
    notifier.ready(f"listening on port {port}")
    watchdog = loop.create_task(_tell_alive(notifier))
    reloads: set[asyncio.Task[None]] = set()
    while (number := await signals.get()) is signal.SIGHUP:
        # Beside this loop: a file system that hangs must not keep a later signal to stop from being heard.
        task = loop.create_task(_reload(gateway, notifier, port))
        reloads.add(task)
        task.add_done_callback(reloads.discard)
    logger.info("draining: %d requests under way", len(gateway.services.exchanges))
    notifier.stopping("draining")
    # Whoever sends an interrupt sits at a terminal: no load balancer is to notice anything first.
    drain = loop.create_task(gateway.drain(lame_duck=number is signal.SIGTERM))
    second = loop.create_task(_next_stop(signals))
    await asyncio.wait((drain, second), return_when=asyncio.FIRST_COMPLETED)
    ending = (drain, second, watchdog, *reloads)
    for task in ending:
        task.cancel()
    for ended in await asyncio.gather(*ending, return_exceptions=True):
        if isinstance(ended, Exception):
            logger.error("the end was not in order", exc_info=ended)
    await gateway.stop()
    notifier.close()
    return 0


async def _reload(gateway: Gateway, notifier: Notifier, port: int) -> None:
    notifier.reloading()
    try:
        await gateway.control.reload()
    except ConfigError:
        pass  # told already
    except Exception:
        logger.exception("the reload failed by a fault of the gateway")
    notifier.ready(f"listening on port {port}")


async def _next_stop(signals: asyncio.Queue[signal.Signals]) -> None:
    while await signals.get() is signal.SIGHUP:
        logger.warning("SIGHUP: no reload while draining")


async def _tell_alive(notifier: Notifier) -> None:
    """From the event loop, so that systemd restarts a gateway whose loop hangs."""
    while notifier.watchdog_s is not None:
        notifier.alive()
        await asyncio.sleep(notifier.watchdog_s)


def _authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
