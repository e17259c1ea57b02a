"""An admin port over the real core on a virtual clock, asked over its own socket."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import aiohttp
from yarl import URL

from router.admin import AdminServer
from router.backends.backend import Backend
from router.backends.registry import Registry
from router.config import Config, ConfigError, parse, parse_backend
from tests.support.world import Rules, World

KV_EVENTS = {
    "state": "off",
    "why": "KV events are read where the strategy is kvaware",
    "blocks": 0,
    "block_tokens": None,
    "ranks": [],
}
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        assert self.headers["content-type"] == "application/json"
        return json.loads(self.body)

    def error(self) -> tuple[int, str]:
        """Status and code of an error, whose shape is checked."""
        assert self.headers["x-kvgate-error"] == "1"
        error = self.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return self.status, error["code"]

    @property
    def message(self) -> str:
        return str(self.json()["error"]["message"])


class ScriptedControl:
    """The fleet of the world, changed as router/control.py does it; but reloads come out as they are told."""

    def __init__(self, registry: Registry, config: Config) -> None:
        self.config = config
        self.outcome: Sequence[object] | ConfigError = ()
        self.remove = registry.remove
        self.drain = registry.drain
        self.undrain = registry.undrain
        self._registry = registry

    def add(self, spec: Mapping[str, Any]) -> Backend:
        wanted = parse_backend(spec)
        return self._registry.add(wanted.name, wanted.url, wanted.weight, wanted.api_key, wanted.models)

    async def reload(self) -> Sequence[object]:
        if isinstance(self.outcome, ConfigError):
            raise self.outcome
        return self.outcome


class Admin:
    def __init__(self, world: World, config: Config) -> None:
        self.world = world
        self.registry = world.registry
        self.clock = world.clock
        self.control = ScriptedControl(world.registry, config)
        self.metrics = b"kvgate_up 1\n"
        self.broken = False
        self.server = AdminServer(
            "127.0.0.1",
            0,
            world.services,
            self.control,
            render_metrics=self._render,
            metrics_content_type=METRICS_TYPE,
            hit_accounting=self._account,
            kv_events=lambda backend: KV_EVENTS,
            version={"version": "1.2.3"},
        )
        self.port = 0

    async def _render(self) -> bytes:
        if self.broken:
            raise RuntimeError("a bug with a secret in it")
        return self.metrics

    def _account(self, backend: Backend) -> Mapping[str, object]:
        return {"predicted_tokens": 10, "reported_tokens": 8, "trust": 0.9}

    async def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """`path` goes out as it stands; a body that is not bytes becomes JSON."""
        url = URL(f"http://127.0.0.1:{self.port}{path}", encoded=True)
        sent = {"content-type": "application/json", **(headers or {})}
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        data = None if raw is None else BytesIO(raw)
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, url, data=data, headers=sent) as response,
        ):
            return Answer(response.status, response.headers, await response.read())


@asynccontextmanager
async def running(
    strategy: str = "prefixaware",
    *,
    backends: int = 0,
    rules: Rules | None = None,
    config: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> AsyncIterator[Admin]:
    world = World(rules or Rules(strategy=strategy), backends=backends)
    admin = Admin(world, parse(config or {}, environ=environ or {}))
    admin.port = await admin.server.start()
    try:
        yield admin
    finally:
        await admin.server.stop()
