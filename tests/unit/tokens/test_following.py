"""router/tokens/following.py: which models are followed, with which root, and how engines are asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from router.backends.backend import Backend, State
from router.backends.registry import Registry
from router.clock import VirtualClock
from router.tls import ClientContexts
from router.tokens import following
from router.tokens.following import FleetTokens
from router.tokens.tokens import TokensSettings

pytestmark = pytest.mark.asyncio


class Fleet:
    def __init__(self, url: str = "http://127.0.0.1:1", **settings: str) -> None:
        self.registry = Registry(VirtualClock())
        self.url = url
        self.settings = TokensSettings(**{"tokenization": "engine", **settings})
        self.followed: FleetTokens | None = None

    def add(self, name: str, *models: dict[str, object], up: bool = True, api_key: str | None = None) -> Backend:
        backend = self.registry.add(name, self.url, api_key=api_key)
        if models:
            self.registry.set_models(backend, list(models))
        if up:
            self.registry.set_state(backend, State.UP, "")
        return backend

    def follow(self) -> FleetTokens:
        self.followed = FleetTokens(
            self.registry,
            VirtualClock(),
            asyncio.get_running_loop(),
            aiohttp.ClientSession,
            ClientContexts(),
            self.settings,
        )
        return self.followed

    @property
    def roots(self) -> dict[str, tuple[str, str]]:
        assert self.followed is not None
        return {name: (model.root, model.base) for name, model in self.followed.tokens._models.items()}


@pytest_asyncio.fixture
async def fleet() -> AsyncIterator[Fleet]:
    made = Fleet()
    yield made
    if made.followed is not None:
        await made.followed.close()


async def test_models_are_followed_from_the_fleet_that_is_there(fleet: Fleet) -> None:
    fleet.add("a", {"id": "m", "root": "org/m"}, {"id": "plain"})
    fleet.follow()
    assert fleet.roots == {"m": ("org/m", "m"), "plain": ("plain", "plain")}


async def test_models_come_and_go_with_their_backends(fleet: Fleet) -> None:
    fleet.follow()
    a = fleet.add("a", {"id": "m", "root": "org/m"})
    fleet.add("b", {"id": "m", "root": "org/m"}, {"id": "n", "root": "org/n"})
    assert fleet.roots == {"m": ("org/m", "m"), "n": ("org/n", "n")}
    fleet.registry.remove("b")
    fleet.registry.reap()
    assert fleet.roots == {"m": ("org/m", "m")}
    fleet.registry.set_models(a, [{"id": "other", "root": "org/other"}])
    assert fleet.roots == {"other": ("org/other", "other")}


async def test_an_adapter_has_the_root_of_its_base_model(fleet: Fleet) -> None:
    fleet.add(
        "a", {"id": "m", "root": "/models/m"}, {"id": "lora", "root": "/adapters/lora", "parent": "m"}, {"id": "n"}
    )
    fleet.follow()
    assert fleet.roots["lora"] == ("/models/m", "m")


async def test_parents_in_a_circle_end(fleet: Fleet) -> None:
    fleet.add("a", {"id": "m", "root": "/m", "parent": "n"}, {"id": "n", "root": "/n", "parent": "m"})
    fleet.follow()
    assert set(fleet.roots) == {"m", "n"}


async def test_of_engines_that_differ_one_with_a_folder_counts(fleet: Fleet) -> None:
    fleet.add("a", {"id": "m", "root": "org/m"})
    fleet.add("b", {"id": "m", "root": "/models/m"})
    fleet.follow()
    assert fleet.roots == {"m": ("/models/m", "m")}


async def test_another_root_is_another_model(fleet: Fleet) -> None:
    a = fleet.add("a", {"id": "m", "root": "org/m"})
    fleet.follow()
    fleet.registry.set_models(a, [{"id": "m", "root": "org/m-v2"}])
    assert fleet.roots == {"m": ("org/m-v2", "m")}


async def test_an_alias_is_no_model_of_its_own(fleet: Fleet) -> None:
    fleet.registry.set_aliases({"gpt": "m"})
    fleet.add("a", {"id": "m"})
    fleet.follow()
    assert set(fleet.roots) == {"m"}


async def test_engines_that_come_up_and_that_leave_are_told_of(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    followed = fleet.follow()
    told: list[tuple[str, str]] = []
    for what in ("joined", "left"):
        monkeypatch.setattr(followed.tokens, what, lambda backend, what=what: told.append((what, backend.name)))
    a = fleet.add("a", {"id": "m"}, up=False)
    assert told == []
    fleet.registry.set_state(a, State.UP, "")
    fleet.registry.set_state(a, State.EJECTED, "silent")
    fleet.registry.set_state(a, State.TRIAL, "")
    fleet.registry.set_state(a, State.UP, "")
    assert told == [("joined", "a")], "an ejected engine is the one that it was"
    fleet.registry.set_state(a, State.DOWN, "dead")
    fleet.registry.set_state(a, State.UP, "")
    fleet.registry.remove("a")
    fleet.registry.reap()
    assert told == [("joined", "a"), ("joined", "a"), ("left", "a")]


async def test_nothing_is_followed_after_the_end(fleet: Fleet) -> None:
    followed = fleet.follow()
    await followed.close()
    fleet.add("a", {"id": "m"})
    assert fleet.roots == {}


# -- the engines are asked over HTTP


class Engine:
    """Answers POST /tokenize by `answer`."""

    def __init__(self) -> None:
        self.asked: list[web.Request] = []
        self.body = b'{"tokens":[1,2]}'
        self.status = 200
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        await request.read()
        self.asked.append(request)
        headers = {"Location": "/elsewhere"} if self.status == 307 else {}
        return web.Response(status=self.status, body=self.body, headers=headers)


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[Engine]:
    made = Engine()
    app = web.Application()
    app.router.add_post("/{path:.*}", made.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield made
    await runner.cleanup()


async def test_an_engine_is_asked_with_its_key_and_as_json(fleet: Fleet, engine: Engine) -> None:
    fleet.url = engine.url
    backend = fleet.add("a", {"id": "m"}, api_key="s3cret")
    followed = fleet.follow()
    assert await followed._post(backend, "/tokenize", b"{}", 1.0) == (200, engine.body)
    (asked,) = engine.asked
    assert (asked.path, asked.headers["Authorization"]) == ("/tokenize", "Bearer s3cret")
    assert asked.content_type == "application/json"


async def test_a_redirect_is_not_followed(fleet: Fleet, engine: Engine) -> None:
    fleet.url, engine.status = engine.url, 307
    backend = fleet.add("a", {"id": "m"}, api_key="s3cret")
    status, _ = await fleet.follow()._post(backend, "/tokenize", b"{}", 1.0)
    assert (status, len(engine.asked)) == (307, 1)


async def test_an_answer_is_read_up_to_its_bound(fleet: Fleet, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet.url = engine.url
    backend = fleet.add("a", {"id": "m"})
    followed = fleet.follow()
    monkeypatch.setattr(following, "ANSWER_LIMIT_BYTES", len(engine.body))
    assert (await followed._post(backend, "/tokenize", b"{}", 1.0))[1] == engine.body
    engine.body += b" "
    with pytest.raises(ValueError, match="more than"):
        await followed._post(backend, "/tokenize", b"{}", 1.0)
