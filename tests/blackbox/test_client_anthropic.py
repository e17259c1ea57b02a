"""Anthropic's client against /v1/messages through the gateway and two simulated engines."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anthropic
import pytest
import pytest_asyncio

from tests.support.client_fleet import ENDLESS, MODEL, ClientFleet, client_fleet, full_gateway
from tests.support.gateway_process import next_id, running_gateway

SAY: Any = [{"role": "user", "content": "say something"}]
TOOLS: Any = [
    {
        "name": "weather",
        "description": "of a city",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
]


@pytest.fixture(scope="module")
def fleet() -> Iterator[ClientFleet]:
    with client_fleet() as fleet:
        yield fleet


@pytest.fixture
def client(fleet: ClientFleet) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=fleet.gateway.url, api_key="none", max_retries=0, timeout=20) as client:
        yield client


@pytest_asyncio.fixture
async def async_client(fleet: ClientFleet) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=fleet.gateway.url, api_key="none", max_retries=0, timeout=20
    ) as client:
        yield client


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_message(client: anthropic.Anthropic, fleet: ClientFleet) -> None:
    request_id = next_id()
    raw = client.messages.with_raw_response.create(
        model=MODEL, max_tokens=8, system="be brief", messages=SAY, extra_headers={"X-Request-Id": request_id}
    )
    answer = raw.parse()
    assert fleet.gateway.access(request_id)["backend"] == fleet.routed(raw.headers)
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", MODEL)
    assert answer.id == f"chatcmpl-{request_id}"
    assert text_of(answer)
    assert answer.stop_reason == "max_tokens"
    assert answer.usage.output_tokens == 8
    assert answer.usage.input_tokens > 0


def test_the_second_of_two_equal_messages_is_read_from_the_cache_that_has_it(
    client: anthropic.Anthropic, fleet: ClientFleet
) -> None:
    long: Any = [{"role": "user", "content": "a text that fills some blocks " * 40}]
    first, second = (
        client.messages.with_raw_response.create(model=MODEL, max_tokens=2, messages=long) for _ in range(2)
    )
    assert fleet.routed(first.headers) == fleet.routed(second.headers)
    assert second.headers["x-kvgate-reason"] == "prefix"
    assert first.parse().usage.cache_read_input_tokens == 0
    cached = second.parse().usage.cache_read_input_tokens
    assert cached is not None
    assert cached == first.parse().usage.cache_creation_input_tokens
    # what the gateway knows of it is what the engine says, but for the last block of its own that is not a full one
    assert 0 < int(second.headers["x-kvgate-matched"]) <= cached + 64


def test_the_gateway_counts_the_prompts_as_they_are(client: anthropic.Anthropic, fleet: ClientFleet) -> None:
    """In this API the tokens of a prompt are told in three parts."""

    def counted() -> tuple[float, float]:
        figures = fleet.gateway.metrics()
        return figures.sum("prompt_tokens_total"), figures.sum("matched_tokens_total", kind="reported")

    asked: Any = {"model": MODEL, "max_tokens": 3, "messages": [{"role": "user", "content": "count these " * 90}]}
    tokens = client.messages.count_tokens(model=MODEL, messages=asked["messages"]).input_tokens
    before = counted()
    client.messages.create(**asked)
    list(client.messages.create(**asked, stream=True))
    cached = client.messages.create(**asked).usage.cache_read_input_tokens
    assert cached
    fleet.until_idle()
    after = counted()
    assert (after[0] - before[0], after[1] - before[1]) == (3 * tokens, 2 * cached)


def test_a_streamed_message_is_the_plain_one(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": MODEL, "max_tokens": 20, "messages": SAY}
    plain = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        whole = stream.get_final_message()
    assert text == text_of(whole) == text_of(plain)
    assert whole.stop_reason == plain.stop_reason == "max_tokens"
    assert whole.usage.output_tokens == 20
    kinds = [event.type for event in client.messages.create(**asked, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


def test_a_stop_sequence_is_named(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(model=MODEL, max_tokens=400, messages=SAY, stop_sequences=["e"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "e")
    assert "e" not in text_of(answer)


def test_a_tool_is_called_and_its_result_taken(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": MODEL, "max_tokens": 200, "messages": SAY, "tools": TOOLS}
    answer = client.messages.create(**asked, tool_choice={"type": "tool", "name": "weather"})
    (call,) = answer.content
    assert call.type == "tool_use"
    assert (call.name, answer.stop_reason) == ("weather", "tool_use")
    assert isinstance(call.input["city"], str)
    asked["messages"] = [
        *SAY,
        {"role": "assistant", "content": [call.model_dump(exclude_none=True)]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]},
    ]
    assert text_of(client.messages.create(**asked, tool_choice={"type": "none"}))


def test_a_streamed_tool_call_is_put_together(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": MODEL, "max_tokens": 200, "messages": SAY, "tools": TOOLS, "tool_choice": {"type": "any"}}
    with client.messages.stream(**asked) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        (call,) = stream.get_final_message().content
    assert call.type == "tool_use"
    assert len(pieces) > 1
    assert isinstance(call.input["city"], str)


def test_tokens_are_counted_as_they_are_charged(client: anthropic.Anthropic, fleet: ClientFleet) -> None:
    raw = client.messages.with_raw_response.count_tokens(model=MODEL, messages=SAY, system="be brief")
    fleet.routed(raw.headers)
    answer = client.messages.create(model=MODEL, max_tokens=1, messages=SAY, system="be brief")
    usage = answer.usage
    assert raw.parse().input_tokens == (
        usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    )


def test_models(client: anthropic.Anthropic) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_errors_are_of_the_right_class(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="nobody", max_tokens=1, messages=SAY)
    assert missing.value.response.headers["x-kvgate-error"] == "1"
    assert missing.value.response.json()["error"]["code"] == "model_not_found"
    assert MODEL in str(missing.value)
    with pytest.raises(anthropic.BadRequestError) as bad:  # the engine's own, in Anthropic's shape
        client.messages.create(model=MODEL, max_tokens=1, messages=SAY, extra_body={"temperature": -1.0})
    assert "x-kvgate-error" not in bad.value.response.headers
    assert bad.value.response.json()["type"] == "error"
    assert bad.value.type == "BadRequestError"
    with pytest.raises(anthropic.BadRequestError):  # a stream is refused before it begins
        client.messages.create(model=MODEL, max_tokens=1, messages=[], stream=True)


def test_a_full_queue_is_a_rate_limit_and_its_time_to_wait_is_honoured(
    fleet: ClientFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: Any = {"model": MODEL, "max_tokens": 2, "messages": SAY}
    waits: list[float] = []
    with (
        full_gateway(fleet) as (gateway, free),
        anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0) as client,
    ):
        with pytest.raises(anthropic.RateLimitError) as refused:
            client.messages.create(**asked)
        assert refused.value.type == "rate_limit_error"
        assert int(refused.value.response.headers["retry-after"]) >= 1

        def wait(seconds: float) -> None:
            waits.append(seconds)
            free()

        with monkeypatch.context() as patch:
            patch.setattr(time, "sleep", wait)
            assert text_of(client.with_options(max_retries=1).messages.create(**asked))
    assert waits == [1]


def test_a_fleet_that_is_down_is_an_internal_server_error() -> None:
    with (
        running_gateway([]) as gateway,
        anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0) as client,
        pytest.raises(anthropic.InternalServerError) as refused,
    ):
        client.messages.create(model=MODEL, max_tokens=1, messages=SAY)
    assert refused.value.status_code == 503
    assert refused.value.response.json()["error"]["code"] == "no_backend"


@pytest.mark.parametrize("fault", ["reset-after-chunks", "close-after-chunks"])
def test_an_engine_that_dies_in_mid_stream_is_an_error_and_no_end(
    client: anthropic.Anthropic, fleet: ClientFleet, fault: str
) -> None:
    """Anthropic's clients pass over events without a name: ours must have one here."""
    fleet.fault(fault, 5, 1)
    seen = []
    with (
        client.messages.create(model=MODEL, max_tokens=ENDLESS, messages=SAY, stream=True) as stream,
        pytest.raises(anthropic.APIStatusError) as raised,
    ):
        seen.extend(stream)
    assert len(seen) == 5
    assert raised.value.type == "api_error"
    assert "broke off" in raised.value.message
    fleet.fault(fault, False)


def test_an_engine_that_fails_at_once_is_repaired_without_the_client_s_help(
    client: anthropic.Anthropic, fleet: ClientFleet
) -> None:
    fleet.sims[0].fault("first-event-error", True, 1)
    for _ in range(3):  # one of them meets it
        with client.messages.stream(model=MODEL, max_tokens=3, messages=SAY) as stream:
            assert "".join(stream.text_stream)
    fleet.sims[0].fault("first-event-error", False)


def test_a_stream_left_early_stops_in_the_engine(client: anthropic.Anthropic, fleet: ClientFleet) -> None:
    stream = client.messages.create(model=MODEL, max_tokens=ENDLESS, messages=SAY, stream=True)
    next(iter(stream))
    stream.close()
    fleet.until_idle()


@pytest.mark.asyncio
async def test_the_async_client(async_client: anthropic.AsyncAnthropic, fleet: ClientFleet) -> None:
    asked: Any = {"model": MODEL, "max_tokens": 12, "messages": SAY}
    plain = await async_client.messages.create(**asked)
    async with async_client.messages.stream(**asked) as stream:
        text = "".join([piece async for piece in stream.text_stream])
    assert text == text_of(plain)
    fleet.fault("reset-after-chunks", 4, 1)
    with pytest.raises(anthropic.APIStatusError):
        async for _ in await async_client.messages.create(**{**asked, "max_tokens": ENDLESS}, stream=True):
            pass
    fleet.fault("reset-after-chunks", False)
    with pytest.raises(anthropic.NotFoundError):
        await async_client.messages.create(**{**asked, "model": "nobody"})
