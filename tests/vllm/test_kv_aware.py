"""kvaware on real engines: what it predicts is what they report, and it stays so whatever happens to their caches."""

from __future__ import annotations

import http.client
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.vllm.conftest import StartGateway
from tests.vllm.engines import BLOCK_TOKENS, MODEL, Engine, ask, eventually
from tests.vllm.gateway import Gateway
from tests.vllm.load import noise_text

pytestmark = pytest.mark.vllm

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": noise_text(name, 12),
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    }
    for name in ("read_file", "list_folder")
]
RECOVERY = 20  # requests within which predictions are right again


@dataclass
class Seen:
    """One answer: what was predicted, and what the engine reports."""

    backend: str
    reason: str
    predicted: int
    reported: int

    @property
    def right(self) -> bool:
        return abs(self.predicted - self.reported) <= BLOCK_TOKENS


class Conversation:
    """A chat of an agent: its turns bring text, content parts, tool calls and their answers."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.rng = random.Random(number)
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": noise_text("system", 60)}]

    def next_turn(self) -> dict[str, Any]:
        turn = len(self.messages)
        text = noise_text((self.number, turn), 30 + self.rng.randrange(40))
        kind = self.rng.randrange(3)
        if kind == 0:
            self.messages.append({"role": "user", "content": text})
        elif kind == 1:
            parts = [{"type": "text", "text": text}, {"type": "text", "text": f"part {turn}"}]
            self.messages.append({"role": "user", "content": parts})
        else:
            call = {"name": "read_file", "arguments": json.dumps({"path": f"/{self.number}/{turn}"})}
            calls = [{"id": f"call_{turn}", "type": "function", "function": call}]
            self.messages.append({"role": "user", "content": f"Read {turn}."})
            self.messages.append({"role": "assistant", "content": None, "tool_calls": calls})
            self.messages.append({"role": "tool", "tool_call_id": f"call_{turn}", "content": text})
        return {"model": MODEL, "messages": self.messages, "tools": TOOLS, "temperature": 0, "max_tokens": 4}


def send(gateway: Gateway, body: dict[str, Any]) -> tuple[Seen, str]:
    host = gateway.url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=60)
    try:
        connection.request(
            "POST",
            "/v1/chat/completions",
            json.dumps(body | {"ignore_eos": True}),
            {"Content-Type": "application/json"},
        )
        answer = connection.getresponse()
        content = json.loads(answer.read())
        assert answer.status == 200, content
        details = content["usage"]["prompt_tokens_details"]
        seen = Seen(
            answer.headers["x-kvgate-backend"],
            answer.headers["x-kvgate-reason"],
            int(answer.headers["x-kvgate-matched"]),
            details["cached_tokens"] if details else 0,
        )
        return seen, content["choices"][0]["message"]["content"] or ""
    finally:
        connection.close()


class Load:
    """Conversations that go on one after another, in a seeded order."""

    def __init__(self, count: int) -> None:
        self.conversations = [Conversation(number) for number in range(count)]
        self.rng = random.Random(count)

    def run(self, gateway: Gateway, requests: int) -> list[Seen]:
        seen = []
        for _ in range(requests):
            conversation = self.rng.choice(self.conversations)
            answer, text = send(gateway, conversation.next_turn())
            conversation.messages.append({"role": "assistant", "content": text})
            seen.append(answer)
        return seen


def told(gateway: Gateway) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(ask(f"{gateway.admin_url}/backends")[1])["backends"]
    return found


def follow_all(gateway: Gateway) -> None:
    def all_live() -> bool:
        return all(backend["kv_events"]["state"] == "live" for backend in told(gateway))

    eventually(all_live, 60, "the KV events of all engines are followed")


def share_right(seen: list[Seen]) -> float:
    return sum(answer.right for answer in seen) / len(seen)


def tokenization(kind: str, engines: list[Engine]) -> str:
    if kind == "engine":
        return '[routing.kvaware]\ntokenization = "engine"\ntoken_wait_share = 1.0\n'
    folder = json.dumps(str(engines[0].model_folder))
    return f'[routing.kvaware]\ntokenization = "local"\ntokenizer = {folder}\ntoken_wait_share = 1.0\n'


@pytest.fixture(params=["local", "engine"])
def gateway(request: pytest.FixtureRequest, engines: list[Engine], start_gateway: StartGateway) -> Iterator[Gateway]:
    with start_gateway("kvaware", tokenization(request.param, engines)) as started:
        follow_all(started)
        eventually(lambda: token_source(started) == request.param, 60, "the tokenizer is ready")
        yield started


def token_source(gateway: Gateway) -> str:
    return str(json.loads(ask(f"{gateway.admin_url}/backends")[1])["tokens"][MODEL]["source"])


def test_predictions_are_what_engines_report(
    gateway: Gateway, engines: list[Engine], figures: list[str], request: pytest.FixtureRequest
) -> None:
    seen = Load(20).run(gateway, 200)
    figures.append(
        f"{request.node.callspec.id}: 200 chats, {share_right(seen):.1%} predicted within a block of what was reported;"
        f" {sum(a.reported for a in seen)} cached tokens, {sum(a.predicted for a in seen)} predicted;"
        f" reasons {dict(Counter(a.reason for a in seen))}, by engine {dict(Counter(a.backend for a in seen))}"
    )
    assert share_right(seen) >= 0.95
    # a busy machine may answer /tokenize later than a request waits for it
    unknown = sum(answer.reason == "fallback-no-tokens" for answer in seen)
    assert unknown <= (10 if token_source(gateway) == "engine" else 0)
    assert {answer.reason for answer in seen} <= {"kv", "load", "fallback-no-tokens"}
    for backend in told(gateway):
        assert backend["learned"]["placed_by"] == "events"
        assert backend["hits"]["trusted"]


def recovered(seen: list[Seen]) -> bool:
    """Right again within so many requests: all that come after them are."""
    return share_right(seen[RECOVERY:]) >= 0.95


def ghosts(seen: list[Seen]) -> list[Seen]:
    """Choices for a match that was not there."""
    return [answer for answer in seen if answer.reason == "kv" and answer.predicted > answer.reported + BLOCK_TOKENS]


def test_a_reset_cache_is_noticed(engines: list[Engine], start_gateway: StartGateway, figures: list[str]) -> None:
    load = Load(10)
    with start_gateway("kvaware", tokenization("local", engines)) as gateway:
        follow_all(gateway)
        load.run(gateway, 30)
        for engine in engines:
            engine.reset_prefix_cache()
        after = load.run(gateway, RECOVERY + 20)
        figures.append(
            f"after /reset_prefix_cache: {sum(not a.right for a in after)} of {len(after)} wrong: {after[:3]}"
        )
        assert recovered(after)
        assert len(ghosts(after)) <= len(engines)  # the clear comes with the next request's batch
        assert all(backend["learned"]["placed_by"] == "events" for backend in told(gateway))


def test_a_killed_engine_that_comes_back_is_empty(
    engines: list[Engine], start_gateway: StartGateway, figures: list[str]
) -> None:
    load = Load(10)
    with start_gateway("kvaware", tokenization("local", engines)) as gateway:
        follow_all(gateway)
        before = load.run(gateway, 30)
        assert {answer.backend for answer in before} == {engine.name for engine in engines}
        engines[0].kill_engine_core()
        engines[0].kill_api_server()
        engines[0].stop()  # whatever is left of it
        between = load.run(gateway, 10)
        engines[0].start()
        engines[0].wait_until_up()
        eventually(lambda: gateway.metric("backend_up") == 2, 30, "the engine is back in rotation")
        follow_all(gateway)
        after = load.run(gateway, RECOVERY + 20)
        figures.append(
            f"one engine killed: {sum(not a.right for a in between)} of {len(between)} wrong while it was away,"
            f" {sum(not a.right for a in after)} of {len(after)} after it came back, {len(ghosts(after))} ghosts"
        )
        assert {answer.backend for answer in between} == {engines[1].name}
        assert recovered(after)
        assert not ghosts(after)


def test_a_gateway_that_starts_late_hears_what_it_missed(
    engines: list[Engine], start_gateway: StartGateway, figures: list[str]
) -> None:
    load = Load(10)
    settings = tokenization("local", engines)
    with start_gateway("kvaware", settings) as gateway:
        follow_all(gateway)
        load.run(gateway, 30)
    with start_gateway("kvaware", settings) as gateway:
        follow_all(gateway)
        eventually(lambda: token_source(gateway) == "local", 60, "the tokenizer is ready")
        after = load.run(gateway, RECOVERY + 20)
    figures.append(f"after a restart of kvgate: {sum(not a.right for a in after)} of {len(after)} wrong")
    assert share_right(after) >= 0.95
    assert not ghosts(after)


def test_another_salt_predicts_nothing_and_the_engine_agrees(
    engines: list[Engine], start_gateway: StartGateway
) -> None:
    for engine in engines:  # an engine tells of a reset with its next request
        body = {"model": MODEL, "prompt": [7] * 64, "max_tokens": 1}
        assert ask(f"{engine.url}/v1/completions", "POST", body)[0] == 200
    with start_gateway("kvaware", tokenization("local", engines)) as gateway:
        follow_all(gateway)
        eventually(lambda: token_source(gateway) == "local", 60, "the tokenizer is ready")
        body = Conversation(1).next_turn()
        body["messages"] = [*body["messages"], {"role": "user", "content": noise_text("a long one", 300)}]
        answers = [send(gateway, body | salt)[0] for salt in ({}, {}, {"cache_salt": "a"}, {"cache_salt": "a"})]
    predicted = [answer.predicted for answer in answers]
    assert predicted == [answer.reported for answer in answers]
    assert predicted[0] == predicted[2] == 0
    assert predicted[1] == predicted[3] > 300
