"""The admin port, asked over its own socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from router.admin import AdminServer
from router.backends.backend import Backend, EngineReport, State
from router.backends.in_flight import InFlight
from router.backends.registry import Registry
from router.clock import VirtualClock

pytestmark = pytest.mark.asyncio

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Admin:
    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.registry = Registry(self.clock)
        self.metrics = b"kvgate_up 1\n"
        self.broken = False
        self.server = AdminServer(
            "127.0.0.1",
            0,
            self.registry,
            render_metrics=self._render,
            metrics_content_type=METRICS_TYPE,
            hit_accounting=self._account,
            clock=self.clock,
        )
        self.port = 0

    def _render(self) -> bytes:
        if self.broken:
            raise RuntimeError("a bug with a secret in it")
        return self.metrics

    def _account(self, backend: Backend) -> Mapping[str, object]:
        return {"predicted_tokens": 10, "reported_tokens": 8, "trust": 0.9}

    async def ask(self, path: str, method: str = "GET") -> tuple[int, Mapping[str, str], bytes]:
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, f"http://127.0.0.1:{self.port}{path}") as response,
        ):
            return response.status, response.headers, await response.read()

    async def json(self, path: str, method: str = "GET") -> tuple[int, Any]:
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, f"http://127.0.0.1:{self.port}{path}") as response,
        ):
            assert response.content_type == "application/json"
            return response.status, await response.json()


@asynccontextmanager
async def running() -> AsyncIterator[Admin]:
    admin = Admin()
    admin.port = await admin.server.start()
    try:
        yield admin
    finally:
        await admin.server.stop()


async def test_health_is_200_while_a_backend_can_serve() -> None:
    async with running() as admin:
        backend = admin.registry.add("a", "http://a")
        status, headers, _ = await admin.ask("/health")
        assert status == 503
        assert headers["retry-after"] == "1"
        assert headers["x-kvgate-error"] == "1"
        admin.registry.set_state(backend, State.UP, "")
        assert await admin.json("/health") == (200, {"status": "ok"})
        admin.registry.drain("a")
        status, answer = await admin.json("/health")
        assert status == 503
        assert answer["error"]["code"] == "no_backend"


async def test_metrics_are_the_rendered_bytes_with_their_type() -> None:
    async with running() as admin:
        status, headers, body = await admin.ask("/metrics")
        assert (status, body) == (200, b"kvgate_up 1\n")
        assert headers["content-type"] == METRICS_TYPE


async def test_the_listing_of_a_backend_that_never_answered() -> None:
    async with running() as admin:
        admin.registry.add("a", "http://a", 0.5, api_key="sesame")
        status, answer = await admin.json("/backends")
        assert status == 200
        assert answer == {
            "backends": [
                {
                    "name": "a",
                    "url": "http://a:80",
                    "weight": 0.5,
                    "state": "starting",
                    "serving": False,
                    "why": "no health check answered yet",
                    "draining": False,
                    "models": [],
                    "in_flight": 0,
                    "report": None,
                    "hits": {"predicted_tokens": 10, "reported_tokens": 8, "trust": 0.9},
                    "kv_events": "off",
                }
            ]
        }


async def test_the_listing_shows_load_models_and_a_report_with_its_age() -> None:
    async with running() as admin:
        backend = admin.registry.add("a", "http://a", models=["m", "lora"])
        admin.registry.set_state(backend, State.UP, "")
        guard = InFlight(backend)
        backend.report = EngineReport(
            at=admin.clock.now(), running=2, waiting=None, kv_usage=0.5, block_size_tokens=16, num_gpu_blocks=10
        )
        admin.clock.advance(1.5)
        _, answer = await admin.json("/backends")
        (listed,) = answer["backends"]
        guard.release()
        assert (listed["serving"], listed["why"], listed["in_flight"]) == (True, "", 1)
        assert listed["models"] == ["m", "lora"]
        report = listed["report"]
        assert (report["age_s"], report["running"], report["waiting"], report["kv_usage"]) == (1.5, 2, None, 0.5)
        assert report["kv_capacity_tokens"] == 160


async def test_a_draining_backend_says_so() -> None:
    async with running() as admin:
        backend = admin.registry.add("a", "http://a")
        admin.registry.set_state(backend, State.UP, "")
        admin.registry.drain("a")
        assert (await admin.json("/backends"))[1]["backends"][0]["why"] == "draining"
        guard = InFlight(backend)
        admin.registry.remove("a")
        assert (await admin.json("/backends"))[1]["backends"][0]["why"] == "being removed"
        guard.release()
        admin.registry.reap()
        assert (await admin.json("/backends"))[1] == {"backends": []}


async def test_no_key_is_ever_shown() -> None:
    async with running() as admin:
        admin.registry.add("a", "http://a", api_key="sesame")
        for path in ("/backends", "/metrics", "/health"):
            assert b"sesame" not in (await admin.ask(path))[2]


async def test_an_unknown_path_is_a_json_404() -> None:
    async with running() as admin:
        status, answer = await admin.json("/nope")
        assert status == 404
        assert answer["error"]["code"] == "not_found"
        assert set(answer["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", ["/health", "/metrics", "/backends"])
async def test_another_method_is_a_json_405_that_names_the_right_ones(path: str) -> None:
    async with running() as admin:
        status, answer = await admin.json(path, "DELETE")
        assert status == 405
        assert answer["error"]["code"] == "method_not_allowed"
        _, headers, _ = await admin.ask(path, "DELETE")
        assert "GET" in headers["allow"]
        assert headers["x-kvgate-error"] == "1"


async def test_a_fault_of_ours_is_a_json_500_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as admin:
        admin.broken = True
        status, _, body = await admin.ask("/metrics")
        assert status == 500
        assert b"internal_error" in body
        assert b"secret" not in body
        assert "the admin port failed on /metrics" in caplog.text
        admin.broken = False
        assert (await admin.ask("/metrics"))[0] == 200


async def test_a_taken_port_is_an_os_error_and_leaves_nothing() -> None:
    async with running() as admin:
        other = Admin()
        other.server._port = admin.port
        with pytest.raises(OSError, match="in use"):
            await other.server.start()
        await other.server.stop()


async def test_stop_frees_the_port_at_once() -> None:
    async with running() as admin:
        await admin.server.stop()
        with pytest.raises(OSError, match="Connect call failed"):
            await asyncio.open_connection("127.0.0.1", admin.port)
        await admin.server.stop()
