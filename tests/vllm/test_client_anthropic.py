"""Anthropic's client works through the gateway as it does on an engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import anthropic
import pytest

from tests.vllm.engines import MODEL, Engine, ask

pytestmark = pytest.mark.vllm

MESSAGES: Any = [{"role": "user", "content": "What does os.path.join do? Größe, 路径, 🛣"}]
GREEDY = {"temperature": 0}
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture
def client(base_url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 12, "system": "Be brief. " * 30, "messages": MESSAGES, **fields}


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_plain_and_streamed_messages_are_the_engines_own(client: anthropic.Anthropic, engines: list[Engine]) -> None:
    direct = json.loads(ask(f"{engines[0].url}/v1/messages", "POST", asked(**GREEDY), timeout_s=60)[1])
    plain = client.messages.create(**asked(), extra_body=GREEDY)
    with client.messages.stream(**asked(), extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        whole = stream.get_final_message()
    assert text == text_of(whole) == text_of(plain) == direct["content"][0]["text"]
    assert whole.stop_reason == plain.stop_reason == direct["stop_reason"] == "max_tokens"
    assert whole.usage.output_tokens == plain.usage.output_tokens == 12


def test_the_second_of_two_equal_messages_is_read_from_the_cache(client: anthropic.Anthropic) -> None:
    first, second = (client.messages.create(**asked(max_tokens=1)) for _ in range(2))
    assert first.usage.cache_read_input_tokens == 0
    assert second.usage.cache_read_input_tokens >= 64
    assert second.usage.cache_read_input_tokens == first.usage.cache_creation_input_tokens


def test_tokens_are_counted_as_they_are_charged(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=MESSAGES)
    usage = client.messages.create(model=MODEL, max_tokens=1, messages=MESSAGES).usage
    assert counted.input_tokens == (
        usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    )


def test_streamed_tool_events_are_the_engines_own(client: anthropic.Anthropic, engines: list[Engine]) -> None:
    """Random weights fill in no useful arguments; the events pass as they are all the same."""
    fields: Any = {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "get_weather"}, "max_tokens": 40}
    body = asked(**fields, **GREEDY, stream=True)
    status, direct = ask(f"{engines[0].url}/v1/messages", "POST", body, timeout_s=60)
    assert status == 200
    told = [json.loads(line[6:]) for line in direct.splitlines() if line.startswith("data: ")]
    events = list(client.messages.create(**asked(**fields), extra_body=GREEDY, stream=True))
    # how many tokens come in one delta is a matter of time
    kinds = [kind for kind, _ in groupby(event.type for event in events)]
    assert kinds == [kind for kind, _ in groupby(event["type"] for event in told)]
    deltas = (event["delta"]["partial_json"] for event in told if event["type"] == "content_block_delta")
    assert "".join(event.delta.partial_json for event in events if event.type == "content_block_delta") == "".join(
        deltas
    )
    assert events[1].content_block.name == "get_weather"


def test_errors_are_of_the_right_class(client: anthropic.Anthropic, engines: list[Engine]) -> None:
    with pytest.raises(anthropic.NotFoundError, match="no-such-model"):
        client.messages.create(**asked(model="no-such-model"))
    body = asked(max_tokens=1_000_000)
    status, text = ask(f"{engines[0].url}/v1/messages", "POST", body)
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**body)
    assert caught.value.status_code == status == 400
    assert caught.value.body == json.loads(text)
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(**asked(), extra_body={"temperature": -1}, stream=True)
