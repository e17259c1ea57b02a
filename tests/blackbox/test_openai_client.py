"""The official client through the gateway and two simulated engines: it finds nothing odd, and errors are what it
raises for them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from tests.support.client_fleet import ENDLESS, MODEL, ClientFleet, client_fleet, full_gateway
from tests.support.gateway_process import GatewayProcess, next_id, running_gateway
from tests.support.sim_process import SimProcess

EMBEDDER = "embed-1"
SAY: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "say something"}]
WEATHER: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
RESPONSES_TOOLS: Any = [{"type": "function", "name": "weather", "parameters": WEATHER}]


@pytest.fixture(scope="module")
def fleet() -> Iterator[ClientFleet]:
    with client_fleet() as fleet:
        yield fleet


@pytest.fixture(scope="module")
def sims(fleet: ClientFleet) -> list[SimProcess]:
    return fleet.sims


@pytest.fixture(scope="module")
def gateway(fleet: ClientFleet) -> GatewayProcess:
    return fleet.gateway


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


@pytest_asyncio.fixture
async def async_client(gateway: GatewayProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.list().data[0].owned_by == "vllm"


def test_a_chat(client: openai.OpenAI, fleet: ClientFleet) -> None:
    request_id = next_id()
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=SAY, max_tokens=8, extra_headers={"X-Request-Id": request_id}
    )
    answer = raw.parse()
    assert (answer.id, answer.model, answer.object) == (f"chatcmpl-{request_id}", MODEL, "chat.completion")
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8
    assert raw.headers["x-request-id"] == request_id
    assert fleet.gateway.access(request_id)["backend"] == fleet.routed(raw.headers)


def test_a_streamed_chat_is_the_plain_one(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(model=MODEL, messages=SAY, max_tokens=20)
    stream = client.chat.completions.create(
        model=MODEL, messages=SAY, max_tokens=20, stream=True, stream_options={"include_usage": True}
    )
    text, usage = "", None
    for event in stream:
        text += (event.choices[0].delta.content or "") if event.choices else ""
        usage = event.usage or usage
    assert text == plain.choices[0].message.content
    assert usage is not None
    assert usage.prompt_tokens == plain.usage.prompt_tokens  # type: ignore[union-attr]


def test_a_streamed_chat_left_early_stops_in_the_engine(client: openai.OpenAI, fleet: ClientFleet) -> None:
    stream = client.chat.completions.create(model=MODEL, messages=SAY, max_tokens=ENDLESS, stream=True)
    next(iter(stream))
    stream.close()
    fleet.until_idle()
    assert sum(sim.stats()["aborted"] for sim in fleet.sims) > 0


def test_a_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="once upon a time", max_tokens=5)
    assert answer.choices[0].text
    streamed = client.completions.create(model=MODEL, prompt="once upon a time", max_tokens=5, stream=True)
    assert "".join(event.choices[0].text for event in streamed) == answer.choices[0].text


def test_a_completion_of_several_prompts_and_of_tokens(client: openai.OpenAI) -> None:
    several = client.completions.create(model=MODEL, prompt=["one", "two"], max_tokens=2)
    assert [choice.index for choice in several.choices] == [0, 1]
    assert client.completions.create(model=MODEL, prompt=[1, 2, 3], max_tokens=2).usage.prompt_tokens == 3  # type: ignore[union-attr]


def test_tools(client: openai.OpenAI) -> None:
    wanted: Any = {"type": "function", "function": {"name": "weather"}}
    answer = client.chat.completions.create(model=MODEL, messages=SAY, tools=TOOLS, tool_choice=wanted)
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "weather"
    assert isinstance(json.loads(call.function.arguments)["city"], str)
    result: Any = [
        *SAY,
        answer.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    after = client.chat.completions.create(model=MODEL, messages=result, tools=TOOLS, tool_choice="none", max_tokens=4)
    assert after.choices[0].message.content


def test_streamed_tools(client: openai.OpenAI) -> None:
    wanted: Any = {"type": "function", "function": {"name": "weather"}}
    stream = client.chat.completions.create(model=MODEL, messages=SAY, tools=TOOLS, tool_choice=wanted, stream=True)
    identities, names, arguments, finish = [], "", "", None
    for event in stream:
        finish = event.choices[0].finish_reason or finish
        for call in event.choices[0].delta.tool_calls or []:
            assert call.function is not None
            assert call.index == 0
            identities += [call.id] if call.id else []
            names += call.function.name or ""
            arguments += call.function.arguments or ""
    assert names == "weather"
    assert len(identities) == 1
    assert isinstance(json.loads(arguments)["city"], str)
    assert finish == "stop"


def test_a_tool_that_must_be_called_through_the_client_s_own_stream_reader(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=SAY, tools=TOOLS, tool_choice="required") as stream:
        kinds = {event.type for event in stream}
        answer = stream.get_final_completion()
    assert {"chunk", "tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    (call,) = answer.choices[0].message.tool_calls or []
    assert answer.choices[0].finish_reason == "tool_calls"
    assert isinstance(json.loads(call.function.arguments)["city"], str)


def test_a_json_schema_is_kept(client: openai.OpenAI) -> None:
    shape: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER}}
    answer = client.chat.completions.create(model=MODEL, messages=SAY, response_format=shape)
    assert isinstance(json.loads(answer.choices[0].message.content or "")["city"], str)


def test_responses(client: openai.OpenAI, fleet: ClientFleet) -> None:
    raw = client.responses.with_raw_response.create(
        model=MODEL, input="say something", instructions="be brief", max_output_tokens=6
    )
    answer = raw.parse()
    fleet.routed(raw.headers)
    assert answer.id.startswith("resp_")
    assert answer.output_text
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")  # type: ignore[union-attr]
    assert answer.usage is not None
    assert answer.usage.output_tokens == 6
    assert answer.usage.total_tokens == answer.usage.input_tokens + 6


def test_streamed_responses_are_the_plain_ones(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "input": SAY, "max_output_tokens": 9}
    plain = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == plain.output_text == events[-1].response.output_text  # type: ignore[union-attr]
    assert events[-1].response.usage.output_tokens == 9  # type: ignore[union-attr]


def test_responses_call_tools_plain_and_streamed(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "input": "weather?", "tools": RESPONSES_TOOLS, "tool_choice": "required"}
    (call,) = client.responses.create(**asked).output
    assert call.type == "function_call"
    assert (call.name, call.status) == ("weather", "completed")
    events = list(client.responses.create(**asked, stream=True))
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == call.arguments
    assert isinstance(json.loads(call.arguments)["city"], str)
    result: Any = [
        {"role": "user", "content": "weather?"},
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
    ]
    assert client.responses.create(model=MODEL, input=result, max_output_tokens=3).output_text


def test_embeddings() -> None:
    with (
        client_fleet("--runner", "pooling", "--served-model-name", EMBEDDER) as fleet,
        openai.OpenAI(base_url=f"{fleet.gateway.url}/v1", api_key="none", max_retries=0) as client,
    ):
        raw = client.embeddings.with_raw_response.create(model=EMBEDDER, input=["one text", "another"])
        answer = raw.parse()
        fleet.routed(raw.headers)
        assert (answer.model, [one.index for one in answer.data]) == (EMBEDDER, [0, 1])
        first, second = (one.embedding for one in answer.data)
        assert len(first) == len(second) > 1
        assert first != second
        assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
        again = client.embeddings.create(model=EMBEDDER, input="one text", encoding_format="float")
        assert again.data[0].embedding == pytest.approx(first)
        with pytest.raises(openai.NotFoundError) as missing:
            client.embeddings.create(model="nobody", input="text")
        assert missing.value.code == "model_not_found"


def test_errors_are_of_the_right_class(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nobody", messages=SAY)
    assert (missing.value.code, missing.value.type, missing.value.param) == (
        "model_not_found",
        "invalid_request_error",
        "model",
    )
    assert MODEL in missing.value.message
    assert missing.value.request_id
    with pytest.raises(openai.BadRequestError) as bad:  # the engine's own
        client.chat.completions.create(model=MODEL, messages=SAY, temperature=-1.0)
    assert (bad.value.type, bad.value.param) == ("BadRequestError", "temperature")
    assert "x-kvgate-error" not in bad.value.response.headers
    with pytest.raises(openai.BadRequestError):  # a stream is refused before it begins
        client.responses.create(model=MODEL, input="hello", temperature=-1.0, stream=True)
    with pytest.raises(openai.NotFoundError) as unknown:  # nobody's path: an engine says so
        client.fine_tuning.jobs.list()
    assert unknown.value.response.json() == {"detail": "Not Found"}


def test_a_full_queue_is_a_rate_limit_with_a_time_to_wait(fleet: ClientFleet) -> None:
    with (
        full_gateway(fleet) as (gateway, _),
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
    ):
        with pytest.raises(openai.RateLimitError) as refused:
            client.chat.completions.create(model=MODEL, messages=SAY)
        assert (refused.value.code, refused.value.type) == ("queue_full", "rate_limit_error")
        assert int(refused.value.response.headers["retry-after"]) >= 1


def test_the_time_to_wait_is_honoured_and_enough(fleet: ClientFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    with (
        full_gateway(fleet) as (gateway, free),
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=1) as client,
    ):

        def wait(seconds: float) -> None:
            waits.append(seconds)
            free()

        with monkeypatch.context() as patch:
            patch.setattr(time, "sleep", wait)
            raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=SAY, max_tokens=2)
        assert raw.parse().choices[0].message.content
        assert raw.retries_taken == 1
        assert gateway.metric("requests_total", code="429") == 1
    assert waits == [1]


def test_a_fleet_that_is_down_is_an_internal_server_error() -> None:
    with (
        running_gateway([]) as gateway,
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.InternalServerError) as refused,
    ):
        client.chat.completions.create(model=MODEL, messages=SAY)
    assert (refused.value.status_code, refused.value.code) == (503, "no_backend")


def test_engines_that_fail_are_repaired_without_the_client_s_help(
    client: openai.OpenAI, sims: list[SimProcess]
) -> None:
    """max_retries is 0: whatever succeeds here, the gateway repeated."""
    for fault, value in (("reset", True), ("status", 503), ("first-event-error", True)):
        sims[0].fault(fault, value, 1)
        for _ in range(3):  # one of them meets it
            stream = client.chat.completions.create(model=MODEL, messages=SAY, max_tokens=3, stream=True)
            assert "".join((event.choices[0].delta.content or "") for event in stream if event.choices)
        sims[0].fault(fault, False)


@pytest.mark.asyncio
async def test_the_async_client(async_client: openai.AsyncOpenAI) -> None:
    plain = await async_client.chat.completions.create(model=MODEL, messages=SAY, max_tokens=12)
    stream = await async_client.chat.completions.create(model=MODEL, messages=SAY, max_tokens=12, stream=True)
    text = "".join([(event.choices[0].delta.content or "") async for event in stream if event.choices])
    assert text == plain.choices[0].message.content


@pytest.mark.asyncio
async def test_many_async_clients_at_once(async_client: openai.AsyncOpenAI, gateway: GatewayProcess) -> None:
    async def ask(at: int) -> str | None:
        messages: Any = [*SAY, {"role": "user", "content": f"number {at}"}]
        answer = await async_client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4)
        return answer.choices[0].message.content

    answers = await asyncio.gather(*(ask(at) for at in range(60)))
    assert all(answers)
    assert gateway.metric("in_flight") == 0


@pytest.mark.asyncio
async def test_async_errors_are_of_the_right_class(async_client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        await async_client.chat.completions.create(model="nobody", messages=SAY)


@pytest.mark.asyncio
async def test_async_responses_and_tools(async_client: openai.AsyncOpenAI) -> None:
    stream = await async_client.responses.create(model=MODEL, input="hello", max_output_tokens=7, stream=True)
    last = [event async for event in stream][-1]
    assert last.type == "response.completed"
    assert last.response.usage.output_tokens == 7  # type: ignore[union-attr]
    answer = await async_client.chat.completions.create(
        model=MODEL, messages=SAY, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "weather"}}
    )
    assert [call.function.name for call in answer.choices[0].message.tool_calls or []] == ["weather"]


def _chunks(client: openai.OpenAI) -> Any:
    return client.chat.completions.create(model=MODEL, messages=SAY, max_tokens=ENDLESS, stream=True)


def _response_events(client: openai.OpenAI) -> Any:
    return client.responses.create(model=MODEL, input="hello", max_output_tokens=ENDLESS, stream=True)


@pytest.mark.parametrize("fault", ["reset-after-chunks", "close-after-chunks"])
@pytest.mark.parametrize("ask", [_chunks, _response_events])
def test_an_engine_that_dies_in_mid_stream_is_an_error_and_no_end(
    client: openai.OpenAI, fleet: ClientFleet, fault: str, ask: Any
) -> None:
    fleet.fault(fault, 6, 1)
    seen = []
    with ask(client) as stream, pytest.raises(openai.APIError) as raised:
        seen.extend(stream)
    assert len(seen) == 6
    assert (raised.value.code, raised.value.type) == ("upstream_error", "server_error")
    assert "broke off" in raised.value.message
    fleet.fault(fault, False)


@pytest.mark.asyncio
async def test_an_engine_that_dies_in_mid_stream_is_an_error_for_the_async_client_too(
    async_client: openai.AsyncOpenAI, fleet: ClientFleet
) -> None:
    fleet.fault("reset-after-chunks", 3, 1)
    stream = await async_client.chat.completions.create(model=MODEL, messages=SAY, max_tokens=ENDLESS, stream=True)
    seen: list[Any] = []

    async def read() -> None:
        async for event in stream:
            seen.append(event)

    with pytest.raises(openai.APIError) as raised:
        await read()
    await stream.close()
    assert len(seen) == 3
    assert raised.value.code == "upstream_error"
    fleet.fault("reset-after-chunks", False)


def test_an_engine_that_dies_in_a_plain_answer_is_a_connection_error(client: openai.OpenAI, fleet: ClientFleet) -> None:
    fleet.fault("close-after-chunks", 1, 1)
    with pytest.raises((openai.APIConnectionError, openai.APIStatusError)) as raised:
        client.chat.completions.create(model=MODEL, messages=SAY, max_tokens=50)
    assert isinstance(raised.value, openai.APIConnectionError) or raised.value.status_code == 502
    fleet.fault("close-after-chunks", False)
