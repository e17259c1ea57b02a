"""The official client through the gateway and two simulated engines: it finds nothing odd, and errors are what it
raises for them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from typing import Any

import openai
import pytest
import pytest_asyncio

from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.sim_process import SimProcess, running_sim

MODEL = "sim-8b"
FAST = ("--step-ms", "1", "--decode-ms", "0", "--decode-ms-per-seq", "0")
FLAGS = (*FAST, "--enable-prompt-tokens-details", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
SAY: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "say something"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


@pytest.fixture(scope="module")
def sims() -> Iterator[list[SimProcess]]:
    with ExitStack() as stack:
        yield [stack.enter_context(running_sim(*FLAGS)) for _ in range(2)]


@pytest.fixture(scope="module")
def gateway(sims: list[SimProcess]) -> Iterator[GatewayProcess]:
    with running_gateway([sim.url for sim in sims]) as gateway:
        yield gateway


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


def test_a_chat(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=SAY, max_tokens=8)
    answer = raw.parse()
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert raw.headers["x-kvgate-backend"] in ("gpu-0", "gpu-1")
    assert raw.headers["x-kvgate-reason"] in ("load", "prefix")
    assert raw.headers["x-request-id"]


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


def test_a_streamed_chat_left_early_stops_in_the_engine(
    client: openai.OpenAI, gateway: GatewayProcess, sims: list[SimProcess]
) -> None:
    stream = client.chat.completions.create(model=MODEL, messages=SAY, max_tokens=100_000, stream=True)
    next(iter(stream))
    stream.close()
    gateway.until_metric("in_flight", 0)
    gateway.until(lambda: sum(sim.stats()["running"] for sim in sims) == 0, "nothing runs")


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
    names, arguments = "", ""
    for event in stream:
        for call in event.choices[0].delta.tool_calls or [] if event.choices else []:
            assert call.function is not None
            names += call.function.name or ""
            arguments += call.function.arguments or ""
    assert names == "weather"
    assert arguments.startswith("{")


def test_responses(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input="say something", max_output_tokens=6)
    assert answer.output_text


def test_errors_are_of_the_right_class(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nobody", messages=SAY)
    assert missing.value.code == "model_not_found"
    assert MODEL in missing.value.message
    with pytest.raises(openai.BadRequestError) as bad:  # the engine's own
        client.chat.completions.create(model=MODEL, messages=SAY, temperature=-1.0)
    assert "x-kvgate-error" not in bad.value.response.headers


def test_a_full_queue_is_a_rate_limit_with_a_time_to_wait(sims: list[SimProcess]) -> None:
    sims[0].fault("stall", True, 1)
    stalled = sims[0].stats()["stalled"]
    with (
        running_gateway([sims[0].url], limits={"max_in_flight": 1, "max_queue": 0}) as gateway,
        gateway.send("POST", "/v1/chat/completions", {"messages": SAY}),
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
    ):
        sims[0].wait(stalled=stalled + 1)
        with pytest.raises(openai.RateLimitError) as refused:
            client.chat.completions.create(model=MODEL, messages=SAY)
        assert refused.value.code == "queue_full"
        assert int(refused.value.response.headers["retry-after"]) >= 1


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
    import asyncio

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
