"""Active health against real sockets: engines that answer, fail, hang, lie, flood and come back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from router.backends.backend import Backend, EngineReport, State
from router.backends.health import MODELS_ROUNDS, HealthMonitor, poll_session
from router.backends.models import BODY_LIMIT_BYTES as MODELS_LIMIT_BYTES
from router.backends.registry import FleetEvent, ModelsChanged, Registry, StateChanged
from router.backends.vllm_metrics import BODY_LIMIT_BYTES as METRICS_LIMIT_BYTES
from router.clock import SystemClock

pytestmark = pytest.mark.asyncio

GUARD_S = 30.0  # ends a test that would hang; nothing is measured by it
LISTING = {"object": "list", "data": [{"id": "m", "object": "model", "root": "/w", "parent": None}]}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Settings:
    interval_s: float = 0.01
    timeout_s: float = GUARD_S
    unhealthy_after: int = 3
    healthy_after: int = 2


class Engine:
    """A scripted engine. Each path answers by its handler; requests are counted and kept."""

    def __init__(self) -> None:
        self.requests: dict[str, list[web.Request]] = {"/health": [], "/v1/models": [], "/metrics": []}
        self.handlers: dict[str, Handler] = {}
        self.running = 0
        self.started_at = 1.0
        self.health_script: list[int] = []
        self.script_done = asyncio.Event()
        self._server: TestServer | None = None

    async def start(self) -> str:
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        self._server = TestServer(app)
        await self._server.start_server()
        return f"http://127.0.0.1:{self._server.port}"

    async def stop(self) -> None:
        assert self._server is not None
        await self._server.close()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.setdefault(request.path, []).append(request)
        if request.path in self.handlers:
            return await self.handlers[request.path](request)
        if request.path == "/health":
            return web.Response(status=self._next_status())
        if request.path == "/v1/models":
            return web.json_response(LISTING)
        if request.path == "/metrics":
            text = f"vllm:num_requests_running {self.running}\nprocess_start_time_seconds {self.started_at}\n"
            return web.Response(text=text)
        return web.Response(status=404)

    def _next_status(self) -> int:
        """One of the script after the other; the last one for good."""
        if len(self.health_script) > 1:
            return self.health_script.pop(0)
        self.script_done.set()
        return self.health_script[0] if self.health_script else 200


class Watched:
    """A registry watched by a monitor, with everything it tells in queues."""

    def __init__(self, settings: Settings) -> None:
        clock = SystemClock(asyncio.get_running_loop())
        self.registry = Registry(clock)
        self.reports: asyncio.Queue[tuple[Backend, EngineReport, EngineReport]] = asyncio.Queue()
        self.restarts: list[Backend] = []
        self.states: list[tuple[str, State]] = []
        self.models_of: list[str] = []
        self._changed = asyncio.Event()
        self.registry.subscribe(self._note)
        self.monitor = HealthMonitor(
            self.registry,
            poll_session,
            clock,
            settings,
            lambda *report: self.reports.put_nowait(report),
            self.restarts.append,
        )

    def _note(self, event: FleetEvent) -> None:
        if isinstance(event, StateChanged):
            self.states.append((event.backend.name, event.after))
        if isinstance(event, ModelsChanged):
            self.models_of.append(event.backend.name)
        self._changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for changes of the fleet until one makes it hold."""
        async with asyncio.timeout(GUARD_S):
            while not holds():
                self._changed.clear()
                await self._changed.wait()

    async def report(self) -> tuple[Backend, EngineReport, EngineReport]:
        async with asyncio.timeout(GUARD_S):
            return await self.reports.get()

    async def reports_of(self, backend: Backend, count: int) -> None:
        while count:
            count -= (await self.report())[0] is backend


@asynccontextmanager
async def watching(settings: Settings | None = None, engines: int = 1) -> AsyncIterator[tuple[Watched, list[Engine]]]:
    """Engines e0, e1, ... started, registered, and watched; at the end no task may be left."""
    tasks_before = asyncio.all_tasks()
    watched = Watched(settings or Settings())
    started = [Engine() for _ in range(engines)]
    try:
        for number, engine in enumerate(started):
            watched.registry.add(f"e{number}", await engine.start())
        yield watched, started
    finally:
        await watched.monitor.stop()
        watched_tasks = {task for task in asyncio.all_tasks() - tasks_before if task.get_name().startswith("health")}
        for engine in started:
            await engine.stop()
    assert not watched_tasks


def only(watched: Watched) -> Backend:
    (backend,) = watched.registry.backends
    return backend


# --- the way up and down


async def test_a_healthy_engine_tells_its_models_before_it_serves() -> None:
    async with watching() as (watched, _):
        first_pool: list[int] = []

        def note(event: FleetEvent) -> None:
            if isinstance(event, StateChanged) and event.after is State.UP:
                pool = watched.registry.pool("m")
                first_pool.append(len(pool.candidates) if pool else 0)

        watched.registry.subscribe(note)
        await watched.monitor.start()
        await watched.until(lambda: only(watched).state is State.UP)
        assert first_pool == [1]
        assert only(watched).models["m"]["root"] == "/w"


async def test_only_failures_in_a_row_take_it_down() -> None:
    async with watching() as (watched, (engine,)):
        engine.health_script = [200, 503, 503, 200, 503, 503, 503]
        await watched.monitor.start()
        await watched.until(lambda: only(watched).state is State.DOWN)
        assert len(engine.requests["/health"]) == 7
        assert only(watched).why == "/health answers 503"


async def test_only_successes_in_a_row_bring_it_back_after_a_new_look_at_its_models() -> None:
    async with watching(engines=2) as (watched, (engine, _other)):
        engine.health_script = [200, 500, 500, 500, 200, 500, 200, 200]
        models_asked_at: list[int] = []

        async def models(request: web.Request) -> web.Response:
            models_asked_at.append(len(engine.requests["/health"]))
            return web.json_response(LISTING)

        engine.handlers["/v1/models"] = models
        await watched.monitor.start()
        await watched.until(
            lambda: [state for name, state in watched.states if name == "e0"] == [State.UP, State.DOWN, State.UP]
        )
        assert len(engine.requests["/health"]) == 8
        assert models_asked_at == [1, 8]


async def test_where_nobody_else_serves_one_good_check_brings_it_back() -> None:
    async with watching() as (watched, (engine,)):
        engine.health_script = [200, 500, 500, 500, 200]
        await watched.monitor.start()
        await watched.until(lambda: [state for _, state in watched.states] == [State.UP, State.DOWN, State.UP])
        assert len(engine.requests["/health"]) == 5


async def test_a_refused_connection_takes_it_down_and_its_return_brings_it_back() -> None:
    async with watching() as (watched, (engine,)):
        await watched.monitor.start()
        await watched.until(lambda: only(watched).state is State.UP)
        await engine.stop()
        await watched.until(lambda: only(watched).state is State.DOWN)
        assert only(watched).why.startswith("cannot connect: Connection refused")
        assert watched.registry.known_models() == ["m"]


async def test_an_engine_that_never_answered_stays_starting_and_says_why() -> None:
    async with watching() as (watched, (engine,)):
        engine.health_script = [503]
        await watched.monitor.start()
        async with asyncio.timeout(GUARD_S):
            await engine.script_done.wait()
        await watched.reports_of(only(watched), 6)
        assert only(watched).state is State.STARTING
        assert only(watched).why == "/health answers 503"


@pytest.mark.parametrize("status", [204, 302, 401, 404, 405])
async def test_any_status_below_500_is_a_sign_of_life(status: int) -> None:
    async with watching() as (watched, (engine,)):
        engine.health_script = [status]
        await watched.monitor.start()
        await watched.until(lambda: only(watched).state is State.UP)


async def test_a_redirect_is_not_followed() -> None:
    async with watching() as (watched, (engine,)):

        async def redirect(request: web.Request) -> web.Response:
            return web.Response(status=302, headers={"location": "/elsewhere"})

        engine.handlers["/health"] = redirect
        await watched.monitor.start()
        await watched.until(lambda: only(watched).state is State.UP)
        assert "/elsewhere" not in engine.requests


async def test_success_does_not_end_an_ejection() -> None:
    async with watching() as (watched, _):
        await watched.monitor.start()
        await watched.until(lambda: only(watched).state is State.UP)
        watched.registry.set_state(only(watched), State.EJECTED, "silent")
        await watched.reports_of(only(watched), 8)
        assert only(watched).state is State.EJECTED
        watched.registry.set_state(only(watched), State.TRIAL, "on trial")
        await watched.reports_of(only(watched), 8)
        assert only(watched).state is State.TRIAL


async def test_an_ejected_engine_that_is_dead_goes_down() -> None:
    async with watching() as (watched, (engine,)):
        await watched.monitor.start()
        await watched.until(lambda: only(watched).state is State.UP)
        watched.registry.set_state(only(watched), State.EJECTED, "silent")
        engine.health_script = [503]
        await watched.until(lambda: only(watched).state is State.DOWN)


async def test_the_key_goes_along_and_nowhere_else() -> None:
    async with watching(engines=2) as (watched, engines):
        watched.registry.remove("e0")
        assert engines[0]._server is not None
        keyed = watched.registry.add("keyed", f"http://127.0.0.1:{engines[0]._server.port}", api_key="sesame")
        await watched.monitor.start()
        await watched.until(lambda: all(b.state is State.UP for b in watched.registry.backends))
        await watched.reports_of(keyed, 1)
        for path in ("/health", "/v1/models", "/metrics"):
            assert {r.headers.get("authorization") for r in engines[0].requests[path]} == {"Bearer sesame"}
            assert {r.headers.get("authorization") for r in engines[1].requests[path]} <= {None}
        assert "sesame" not in repr(keyed)


# --- models


async def test_models_are_asked_for_again_every_tenth_round() -> None:
    async with watching() as (watched, (engine,)):
        await watched.monitor.start()
        await watched.until(lambda: only(watched).state is State.UP)
        engine.handlers["/v1/models"] = answer_json({"data": [{"id": "m"}, {"id": "lora", "parent": "m"}]})
        await watched.until(lambda: watched.registry.known_models() == ["lora", "m"])
        assert len(engine.requests["/health"]) == MODELS_ROUNDS + 1
        assert len(engine.requests["/v1/models"]) == 2


async def test_a_request_that_changed_the_models_has_them_asked_for_at_once_and_in_the_next_round() -> None:
    async with watching() as (watched, (engine,)):
        await watched.monitor.start()
        await watched.until(lambda: only(watched).state is State.UP)
        engine.handlers["/v1/models"] = answer_json({"data": []})
        rounds = len(engine.requests["/health"])
        assert await watched.monitor.ask_models_now(only(watched))
        assert watched.registry.known_models() == []
        assert len(engine.requests["/health"]) == rounds
        engine.handlers["/v1/models"] = answer_json({"data": [{"id": "late"}]})
        await watched.until(lambda: watched.registry.known_models() == ["late"])
        assert len(engine.requests["/health"]) < MODELS_ROUNDS


async def test_an_engine_that_does_not_tell_its_models_when_asked_keeps_those_it_had() -> None:
    async with watching() as (watched, (engine,)):
        await watched.monitor.start()
        await watched.until(lambda: only(watched).state is State.UP)
        engine.handlers["/v1/models"] = answer_json({}, status=500)
        assert not await watched.monitor.ask_models_now(only(watched))
        assert watched.registry.known_models() == ["m"]
        gone = watched.registry.remove("e0")
        assert not await watched.monitor.ask_models_now(gone)


async def test_one_bad_entry_costs_an_engine_no_other_model_and_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with watching() as (watched, (engine,)):
        engine.handlers["/v1/models"] = answer_json({"data": [{"id": "m"}, {"id": 7}, "odd"]})
        await watched.monitor.start()
        await watched.until(lambda: only(watched).state is State.UP)
        assert watched.registry.known_models() == ["m"]
        assert await watched.monitor.ask_models_now(only(watched))
        told = [record.getMessage() for record in caplog.records if "cannot be used" in record.getMessage()]
        assert told == [
            "backend e0 tells of models that cannot be used: an entry without a string `id` (2 of 3 left out)"
        ]


def answer_json(answer: Any, status: int = 200) -> Handler:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response(answer, status=status)

    return handler


async def flood(request: web.Request) -> web.StreamResponse:
    """Bytes without end, as fast as they are taken."""
    response = web.StreamResponse()
    await response.prepare(request)
    try:
        while True:
            await response.write(b"x" * 65536)
    except ConnectionError:
        return response


@pytest.mark.parametrize(
    "bad",
    [
        answer_json({"error": "Unauthorized"}, 401),
        answer_json({"data": [{"id": 7}]}),
        answer_json({"data": [{"id": "x" * MODELS_LIMIT_BYTES}]}),
        flood,
    ],
    ids=["status", "shape", "huge", "endless"],
)
async def test_a_bad_list_of_models_leaves_the_old_one_and_is_logged_once(
    bad: Handler, caplog: pytest.LogCaptureFixture
) -> None:
    async with watching() as (watched, (engine,)):
        await watched.monitor.start()
        await watched.until(lambda: only(watched).state is State.UP)
        engine.handlers["/v1/models"] = bad
        asked = len(engine.requests["/v1/models"])
        assert not await watched.monitor.ask_models_now(only(watched))
        while len(engine.requests["/v1/models"]) < asked + 4:
            await watched.report()
        assert watched.registry.known_models() == ["m"]
        assert only(watched).state is State.UP
    assert caplog.text.count("does not tell its models") == 1


async def test_an_engine_without_a_list_serves_all_the_same_and_is_asked_until_it_tells() -> None:
    async with watching() as (watched, (engine,)):
        engine.handlers["/v1/models"] = answer_json({"detail": "Not Found"}, 404)
        await watched.monitor.start()
        await watched.until(lambda: only(watched).state is State.UP)
        assert watched.registry.models_unknown
        del engine.handlers["/v1/models"]
        await watched.until(lambda: watched.registry.known_models() == ["m"])
        assert len(engine.requests["/health"]) < MODELS_ROUNDS


# --- reports


async def test_reports_come_every_round_with_the_one_before() -> None:
    async with watching() as (watched, (engine,)):
        engine.running = 3
        await watched.monitor.start()
        backend, before, first = await watched.report()
        assert backend is only(watched)
        assert before.at == float("-inf")
        assert first.running == 3
        _, before, second = await watched.report()
        assert before == first
        assert second.at > first.at
        assert watched.restarts == []


async def test_another_start_of_the_process_is_a_restart() -> None:
    async with watching() as (watched, (engine,)):
        await watched.monitor.start()
        await watched.report()
        engine.started_at = 2.0
        while not watched.restarts:
            _, before, _ = await watched.report()
        assert watched.restarts == [only(watched)]
        assert before.at == float("-inf")
        await watched.reports_of(only(watched), 3)
        assert len(watched.restarts) == 1


async def test_a_counter_that_went_backwards_is_a_restart() -> None:
    async with watching() as (watched, (engine,)):
        hits = iter([100.0, 200.0, 0.0, 0.0, 50.0])
        last = 50.0

        async def metrics(request: web.Request) -> web.Response:
            return web.Response(text=f"vllm:prefix_cache_hits_total {next(hits, last)}\n")

        engine.handlers["/metrics"] = metrics
        await watched.monitor.start()
        seen = []
        for _ in range(6):
            _, before, now = await watched.report()
            seen.append((before.prefix_hits, now.prefix_hits))
        assert seen[:5] == [(None, 100), (100, 200), (None, 0), (0, 0), (0, 50)]
        assert len(watched.restarts) == 1


async def test_a_metrics_page_of_something_else_is_no_report() -> None:
    async with watching() as (watched, (engine,)):
        engine.handlers["/metrics"] = answer_json({"hello": "world"})
        await watched.monitor.start()
        await watched.until(lambda: only(watched).state is State.UP)
        while len(engine.requests["/metrics"]) < 3:
            await asyncio.wait_for(asyncio.shield(engine.script_done.wait()), GUARD_S)
            await watched.monitor.check_now(only(watched))
        assert watched.reports.empty()
        assert only(watched).report.at == float("-inf")


@pytest.mark.parametrize("bad", [flood, answer_json({}, 500)], ids=["endless", "500"])
async def test_bad_metrics_leave_the_last_report_and_its_age(bad: Handler) -> None:
    async with watching(engines=2) as (watched, engines):
        first, second = watched.registry.backends
        await watched.monitor.start()
        await watched.reports_of(first, 1)
        engines[0].handlers["/metrics"] = bad
        polled = len(engines[0].requests["/metrics"])
        while len(engines[0].requests["/metrics"]) < polled + 3:
            await watched.reports_of(second, 1)
        assert first.report.at < second.report.at
        assert first.state is State.UP


async def test_metrics_up_to_the_limit_are_read() -> None:
    async with watching() as (watched, (engine,)):
        line = b"vllm:num_requests_running 5\n#"

        async def metrics(request: web.Request) -> web.Response:
            return web.Response(body=line + b" " * (METRICS_LIMIT_BYTES - len(line)))

        engine.handlers["/metrics"] = metrics
        await watched.monitor.start()
        assert (await watched.report())[2].running == 5


async def test_a_callback_that_raises_ends_neither_the_watch_nor_the_verdict(caplog: pytest.LogCaptureFixture) -> None:
    async with watching() as (watched, _):
        seen = asyncio.Event()
        count = 0

        def broken(*report: object) -> None:
            nonlocal count
            count += 1
            if count == 3:
                seen.set()
            raise RuntimeError("bug")

        watched.monitor._on_report = broken
        with caplog.at_level(logging.ERROR):
            await watched.monitor.start()
            async with asyncio.timeout(GUARD_S):
                await seen.wait()
            await watched.until(lambda: only(watched).state is State.UP)
    assert "a health round of e0 failed" in caplog.text


# --- one does not harm the others


async def hang(request: web.Request) -> web.Response:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


async def drip(request: web.Request) -> web.StreamResponse:
    """A head, one byte, and then nothing."""
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b"#")
    await asyncio.Event().wait()
    return response


@pytest.mark.parametrize("path", ["/metrics", "/v1/models"])
@pytest.mark.parametrize("slow", [hang, drip])
async def test_a_slow_side_question_delays_no_verdict_for_good(path: str, slow: Handler) -> None:
    async with watching(Settings(timeout_s=0.1)) as (watched, (engine,)):
        engine.handlers[path] = slow
        await watched.monitor.start()
        await watched.until(lambda: only(watched).state is State.UP)


async def test_a_hung_engine_goes_down_while_the_others_go_on() -> None:
    async with watching(Settings(timeout_s=0.2, unhealthy_after=2), engines=3) as (watched, engines):
        await watched.monitor.start()
        await watched.until(lambda: all(b.state is State.UP for b in watched.registry.backends))
        for path in ("/health", "/metrics", "/v1/models"):
            engines[1].handlers[path] = hang
        hung, healthy = watched.registry.backends[1:]
        await watched.until(lambda: hung.state is State.DOWN)
        assert hung.why == "/health does not answer within 0.2 s"
        await watched.reports_of(healthy, 2)
        assert len(engines[2].requests["/health"]) > len(engines[1].requests["/health"])


async def raw_server(answer: bytes | None, health: bytes | None = None) -> tuple[asyncio.Server, str]:
    """A server that sends these bytes to everyone and closes, others to /health; None: resets at once."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if answer is None:
            writer.transport.abort()
            return
        head = await reader.read(65536)
        writer.write(health if health is not None and head.startswith(b"GET /health ") else answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    "answer",
    [
        None,
        b"",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n",
        b"HTTP/1.1 999999 WHAT\r\n\r\n",
    ],
    ids=["reset", "closed", "not http", "huge head", "bad length", "bad status"],
)
async def test_what_does_not_speak_http_never_serves_and_harms_nobody(answer: bytes | None) -> None:
    server, url = await raw_server(answer)
    async with server, watching() as (watched, _):
        bad = watched.registry.add("bad", url)
        await watched.monitor.start()
        good = watched.registry.get("e0")
        assert good is not None
        await watched.reports_of(good, 5)
        assert good.state is State.UP
        assert bad.state is State.STARTING
        assert bad.why.startswith("/health ") or bad.why.startswith("cannot connect")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nvllm:num_requests_running 9\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 4\r\n\r\n\x1f\x8b\x08\x00",
    ],
    ids=["cut short", "bad chunk", "gzip"],
)
async def test_a_broken_body_is_neither_report_nor_models(answer: bytes) -> None:
    server, url = await raw_server(answer, b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
    async with server, watching() as (watched, _):
        bad = watched.registry.add("bad", url)
        await watched.monitor.start()
        await watched.until(lambda: bad.state is State.UP)
        good = watched.registry.get("e0")
        assert good is not None
        await watched.reports_of(good, 3)
        assert bad.report.at == float("-inf")
        assert bad.models == {}


# --- asking at once


async def test_check_now_finds_a_dead_engine_without_further_rounds() -> None:
    async with watching(Settings(interval_s=GUARD_S)) as (watched, (engine,)):
        await watched.monitor.start()
        await watched.until(lambda: only(watched).state is State.UP)
        assert await watched.monitor.check_now(only(watched))
        engine.health_script = [503]
        assert not await watched.monitor.check_now(only(watched))
        assert only(watched).state is State.DOWN


async def test_those_who_ask_at_once_share_one_request() -> None:
    async with watching(Settings(interval_s=GUARD_S)) as (watched, (engine,)):
        await watched.monitor.start()
        await watched.until(lambda: only(watched).state is State.UP)
        asked = len(engine.requests["/health"])
        impatient = asyncio.create_task(watched.monitor.check_now(only(watched)))
        others = [asyncio.create_task(watched.monitor.check_now(only(watched))) for _ in range(20)]
        await asyncio.sleep(0)
        impatient.cancel()
        assert await asyncio.gather(*others) == [True] * 20
        with pytest.raises(asyncio.CancelledError):
            await impatient
        assert len(engine.requests["/health"]) == asked + 1
        assert await watched.monitor.check_now(only(watched))
        assert len(engine.requests["/health"]) == asked + 2


async def test_a_check_of_a_backend_that_is_removed_meanwhile_is_answered() -> None:
    async with watching(Settings(interval_s=GUARD_S)) as (watched, (engine,)):
        await watched.monitor.start()
        await watched.until(lambda: only(watched).state is State.UP)
        backend = only(watched)
        arrived = asyncio.Event()

        async def hang_and_tell(request: web.Request) -> web.Response:
            arrived.set()
            return await hang(request)

        engine.handlers["/health"] = hang_and_tell
        check = asyncio.create_task(watched.monitor.check_now(backend))
        async with asyncio.timeout(GUARD_S):
            await arrived.wait()
            watched.registry.remove("e0")
            assert not await check
        assert not await watched.monitor.check_now(backend)


# --- coming and going


async def test_backends_are_followed_as_they_come_and_go() -> None:
    async with watching() as (watched, _):
        await watched.monitor.start()
        await watched.until(lambda: only(watched).state is State.UP)
        backend = only(watched)
        url = backend.url
        watched.registry.remove("e0")
        await watched.until(lambda: not watched.registry.backends)
        again = watched.registry.add("e0", url)
        await watched.until(lambda: again.state is State.UP)
        assert again is not backend


async def test_stop_in_the_middle_of_a_round_leaves_nothing() -> None:
    tasks_before = asyncio.all_tasks()
    async with watching(engines=2) as (watched, engines):
        arrived = asyncio.Event()

        async def hang_and_tell(request: web.Request) -> web.Response:
            arrived.set()
            return await hang(request)

        for path in ("/health", "/metrics"):
            engines[0].handlers[path] = hang_and_tell
        await watched.monitor.start()
        async with asyncio.timeout(GUARD_S):
            await arrived.wait()
        await watched.monitor.stop()
        names = {task.get_name() for task in asyncio.all_tasks() - tasks_before}
        assert not any(name.startswith(("health", "check")) for name in names)
        await watched.monitor.stop()


async def test_a_fleet_of_512_is_not_asked_all_at_once() -> None:
    """On the first delays themselves: what the clock is asked for, not what time passes."""
    delays: list[float] = []

    class Recorder(SystemClock):
        def __init__(self) -> None:
            super().__init__(asyncio.get_running_loop())
            real = self.call_later

            def call_later(delay_s: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
                delays.append(delay_s)
                return real(GUARD_S, callback, *args)

            self.call_later = call_later  # type: ignore[method-assign, assignment]

    clock = Recorder()
    registry = Registry(clock)
    for number in range(512):
        registry.add(f"b{number}", "http://127.0.0.1:9")
    monitor = HealthMonitor(
        registry, poll_session, clock, Settings(interval_s=2.0), lambda *report: None, lambda backend: None
    )
    await monitor.start()
    await asyncio.sleep(0)
    assert len(delays) == 512
    assert max(delays) <= 1.1
    busiest = max(sum(start <= delay < start + 0.1 for delay in delays) for start in (n / 10 for n in range(11)))
    assert busiest < 100
    await monitor.stop()
