"""POST /explain: what it tells is what the data port does, and nothing comes of it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from router.backends.backend import State
from router.backends.in_flight import InFlight
from router.strategies.registry import FACTORIES
from tests.support.scripted import Response, response_head
from tests.support.scripted import request as client_request
from tests.support.world import Rules, World
from tests.unit.admin.rig import Admin, Answer, running

pytestmark = pytest.mark.asyncio

JSON = b"content-type: application/json"
LONG = "a prompt that is long enough for a few blocks of sixty-four bytes each, and then some more of it. " * 4
CANDIDATE_FIELDS = {
    "backend",
    "state",
    "eligible",
    "why_not",
    "weight",
    "in_flight",
    "load",
    "match_blocks",
    "match_tokens",
    "score_s",
    "terms",
    "chosen",
}


def chat(text: str = LONG, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **fields}


def serve(world: World) -> None:
    raw = response_head(200, JSON, b"content-length: 2") + b"{}"
    world.on_engine_requests(lambda connection, received: connection.write(raw))


def post(world: World, body: object, *lines: bytes) -> Response:
    client = world.client()
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    client.send(client_request(b"POST", b"/v1/chat/completions", JSON, *lines, body=raw))
    world.run(0.1)
    return client.responses[0]


async def explained(admin: Admin, body: object, **headers: str) -> dict[str, Any]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = await admin.ask("POST", "/explain", body, named)
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json()
    return found


def candidates(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {candidate["backend"]: candidate for candidate in found["candidates"]}


@pytest.mark.parametrize("strategy", sorted(FACTORIES))
async def test_what_it_says_is_what_is_done_next(strategy: str) -> None:
    async with running(strategy, backends=3) as admin:
        world = admin.world
        serve(world)
        for step in range(12):
            body = chat(f"{step % 4} {LONG}")
            line = f"someone-{step % 2}"
            for _ in range(3):  # asking changes nothing
                found = await explained(admin, body, x_session_id=line)
            answer = post(world, body, b"x-session-id: " + line.encode())
            choice = found["choice"]
            assert answer.header(b"x-kvgate-backend") == choice["backend"].encode()
            assert answer.header(b"x-kvgate-reason") == choice["reason"].encode()
            assert answer.header(b"x-kvgate-matched") == str(choice["match_tokens"]).encode()
            assert [c["backend"] for c in found["candidates"] if c["chosen"]] == [choice["backend"]]
        assert found["strategy"] == strategy
        assert found["model"] == "m"
        assert found["session_key_present"] is (True if strategy == "session" else None)
        for candidate in found["candidates"]:
            assert set(candidate) == CANDIDATE_FIELDS
            assert candidate["eligible"]
            assert candidate["terms"]
        priced = strategy in ("prefixaware", "kvaware")
        assert all((c["score_s"] is not None) is priced for c in found["candidates"])
        prompt = found["prompt"]
        if priced:
            assert prompt["blocks"] == prompt["bytes"] // prompt["block_bytes"]
            assert prompt["tokens"] == found["figures"]["prompt_tokens"]
            assert candidates(found)[choice["backend"]]["match_tokens"] == choice["match_tokens"] > 0
        world.rest()


async def test_nothing_is_sent_counted_or_kept() -> None:
    async with running("prefixaware", backends=2) as admin:
        world = admin.world
        decisions, version = dict(world.metrics.decisions), world.registry.version
        for _ in range(10):
            await explained(admin, chat())
        assert dict(world.metrics.decisions) == decisions
        assert world.services.decisions.recent() == []
        assert world.registry.version == version
        assert len(world.index) == 0
        assert not world.services.exchanges
        assert all(engine.accepted == 0 for engine in world.engines.values())
        assert world.access_lines == []
        world.rest()


async def test_a_session_key_counts_from_headers_and_from_the_body_and_is_not_shown() -> None:
    async with running("session", backends=3) as admin:
        by_header = await explained(admin, chat(), x_session_id="a-secret-session")
        by_body = await explained(admin, chat(user="a-secret-session"))
        without = await explained(admin, chat())
        assert (by_header["session_key_present"], without["session_key_present"]) == (True, False)
        assert by_header["choice"]["backend"] == by_body["choice"]["backend"]
        assert by_header["choice"]["reason"] == by_body["choice"]["reason"] == "session"
        assert without["choice"]["reason"] == "load"
        assert "a-secret-session" not in json.dumps([by_header, by_body])


async def test_those_that_may_not_be_chosen_say_why_and_what_they_hold() -> None:
    async with running(rules=Rules(strategy="prefixaware", max_in_flight_per_backend=2), backends=6) as admin:
        world = admin.world
        serve(world)
        backends = world.registry.backends
        busy, warm, dead, trial, throttled, free = backends
        for backend in backends:
            if backend is not warm:
                world.registry.drain(backend.name)
        post(world, chat())  # its prompt is cached there
        for backend in backends:
            world.registry.undrain(backend.name)
        world.registry.drain(warm.name)
        guards = [InFlight(busy), InFlight(busy)]
        world.registry.set_state(dead, State.DOWN, "cannot connect: Connection refused")
        world.registry.set_state(trial, State.TRIAL, "on trial")
        trial.trial_open = True
        throttled.busy_until = world.ejector.busy_until = world.clock.now() + 1.0
        found = await explained(admin, chat())
        told = candidates(found)
        why = {name: candidate["why_not"] for name, candidate in told.items()}
        assert why == {
            busy.name: "at its cap of 2 in flight",
            warm.name: "draining",
            dead.name: "down: cannot connect: Connection refused",
            trial.name: "on trial with one request at a time, and that is under way",
            throttled.name: "too busy a moment ago (429 or 503); others are asked first",
            free.name: "",
        }
        assert [name for name, candidate in told.items() if candidate["eligible"]] == [free.name]
        assert found["choice"]["backend"] == free.name
        assert told[warm.name]["match_tokens"] > 0  # what is lost by not having it
        assert told[warm.name]["state"] == "draining"
        assert told[free.name]["match_tokens"] == 0
        for guard in guards:
            guard.release()


async def test_only_backends_of_the_model_are_candidates() -> None:
    async with running("leastload", backends=0) as admin:
        admin.world.add_backend("a", models=("m",))
        admin.world.add_backend("b", models=("other",))
        assert list(candidates(await explained(admin, chat()))) == ["a"]
        answer = await admin.ask("POST", "/explain", {"model": "nobody's", "prompt": "x"})
        assert answer.error() == (404, "model_not_found")
        answer = await admin.ask("POST", "/explain", {"prompt": "x"})
        assert answer.error() == (400, "bad_request")
        assert (await admin.ask("POST", "/explain", b"{odd")).error() == (400, "invalid_json")
        found = await admin.ask("POST", "/explain?path=/v1/load_lora_adapter", {"lora_name": "x"})
        assert [c["backend"] for c in found.json()["candidates"]] == ["a", "b"]


async def test_where_nobody_serves_the_error_of_the_data_port_comes_with_the_reasons() -> None:
    async with running("prefixaware", backends=2) as admin:
        for backend in admin.registry.backends:
            admin.registry.set_state(backend, State.DOWN, "/health does not answer within 2 s")
        answer = await admin.ask("POST", "/explain", chat())
        assert answer.error() == (503, "no_backend")
        assert answer.headers["retry-after"] == "1"
        refused = post(admin.world, chat())
        assert refused.status == 503
        assert refused.json()["error"] == answer.json()["error"]
        found = answer.json()
        assert found["choice"] is None
        assert {c["why_not"] for c in found["candidates"]} == {"down: /health does not answer within 2 s"}
        admin.world.rest()


async def test_without_any_backend_it_is_503() -> None:
    async with running() as admin:
        assert (await admin.ask("POST", "/explain", chat())).error() == (503, "no_backend")


@pytest.mark.parametrize(
    ("rules", "loaded", "waits"),
    [
        (Rules(max_in_flight=1), True, "limits.max_in_flight"),
        (Rules(max_in_flight_per_backend=1), True, "nobody has room"),
        (Rules(), False, "starting"),
    ],
)
async def test_what_would_wait_says_for_what(rules: Rules, loaded: bool, waits: str) -> None:
    async with running(rules=replace(rules, strategy="prefixaware"), backends=0) as admin:
        world = admin.world
        world.add_backend("a")
        if loaded:
            world.on_engine_requests(lambda connection, received: None)
            client = world.client()
            client.send(client_request(b"POST", b"/v1/chat/completions", JSON, body=json.dumps(chat()).encode()))
            world.run(0.1)
        else:
            world.registry.set_state(world.backend("a"), State.STARTING, "no health check answered yet")
        found = await explained(admin, chat())
        assert waits in found["waits"]
        if not rules.max_in_flight:
            assert found["choice"] is None
        world.rest()


async def test_those_ahead_in_the_queue_are_told() -> None:
    async with running(rules=Rules(strategy="roundrobin", max_in_flight_per_backend=1), backends=1) as admin:
        world = admin.world
        world.on_engine_requests(lambda connection, received: None)
        for _ in range(3):
            client = world.client()
            client.send(client_request(b"POST", b"/v1/chat/completions", JSON, body=json.dumps(chat()).encode()))
        world.run(0.1)
        assert (await explained(admin, chat()))["waits"] == "2 that came before it wait"
        world.rest()


async def test_a_body_of_another_type_is_placed_as_the_data_port_would() -> None:
    async with running("prefixaware", backends=2) as admin:
        body = json.dumps(chat()).encode()
        found = await explained(admin, body, content_type="text/plain")
        assert found["prompt"]["readable"] is False
        assert found["choice"]["reason"] == "fallback-shape"
        form = (
            b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n'
            b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
            + b"s" * 500
            + b"\r\n--x--\r\n"
        )
        found = await explained(admin, form, content_type="multipart/form-data; boundary=x")
        assert (found["path"], found["model"]) == ("/v1/audio/transcriptions", "m")
        assert found["prompt"]["readable"] is True


async def test_token_ids_are_counted_exactly() -> None:
    async with running("prefixaware", backends=1) as admin:
        found = await explained(admin, {"model": "m", "prompt": list(range(300)), "max_tokens": 7, "stream": True})
        prompt = found["prompt"]
        assert (prompt["tokens"], prompt["tokens_exact"], prompt["max_tokens"], prompt["stream"]) == (
            300,
            True,
            7,
            True,
        )


@pytest.mark.parametrize(
    "path",
    ["v1/chat/completions", "/a%0d%0aX-Evil:%201", "/a%20b", "/%C3%BC", "", "http://x/", "*"],
)
async def test_a_path_that_the_data_port_could_not_get_is_400(path: str) -> None:
    async with running(backends=1) as admin:
        answer = await admin.ask("POST", f"/explain?path={path}", chat())
        assert answer.error() == (400, "bad_request")
        assert answer.json()["error"]["param"] == "path"


async def test_no_prompt_is_told_back() -> None:
    async with running(backends=1) as admin:
        answer = await admin.ask("POST", "/explain", chat("my innermost thoughts"), {"x-session-id": "me"})
        assert answer.status == 200
        assert b"innermost" not in answer.body


async def test_from_anywhere_and_without_a_token_as_it_changes_nothing() -> None:
    async with running(backends=1) as admin:
        answer: Answer = await admin.ask("POST", "/explain", chat(), {"host": "gateway.example"})
        assert answer.status == 200


async def test_its_bodies_may_be_as_large_as_the_data_ports_and_no_larger() -> None:
    async with running(backends=1, config={"limits": {"max_body_bytes": 2 * 1024 * 1024}}) as admin:
        at_limit = json.dumps(chat("x")).encode().ljust(2 * 1024 * 1024)
        assert (await admin.ask("POST", "/explain", at_limit)).status == 200
        assert (await admin.ask("POST", "/explain", at_limit + b" ")).error() == (413, "body_too_large")


async def test_only_so_many_at_once_and_each_gives_its_place_back() -> None:
    async with running(backends=1) as admin:
        admin.server._explanations = 4
        answer = await admin.ask("POST", "/explain", chat())
        assert answer.error() == (429, "too_many_explanations")
        assert answer.headers["retry-after"] == "1"
        admin.server._explanations = 3
        assert (await admin.ask("POST", "/explain", chat())).status == 200
        assert (await admin.ask("POST", "/explain", b"{odd")).status == 200  # one model: nobody needs its name
        assert (await admin.ask("POST", "/explain", {"model": "x"})).status == 404
        assert admin.server._explanations == 3
