"""litellm as a library through the gateway and two simulated engines. It is too big for every test run: these run with
`make test-clients` alone."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.client_fleet import ENDLESS, MODEL, ClientFleet, client_fleet, full_gateway
from tests.support.gateway_process import running_gateway
from tests.support.litellm_library import close_what_it_left, litellm

# its own and its dependencies' deprecations are not ours to mend
pytestmark = pytest.mark.filterwarnings("ignore")

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
PROVIDERS = ["openai", "hosted_vllm"]


@pytest.fixture(scope="module")
def fleet() -> Iterator[ClientFleet]:
    with client_fleet() as fleet:
        yield fleet
    close_what_it_left()


def asked(url: str, provider: str = "openai", model: str = MODEL, **fields: Any) -> dict[str, Any]:
    known = {"api_base": f"{url}/v1", "api_key": "none", "messages": SAY, "max_retries": 0, "timeout": 20}
    return {"model": f"{provider}/{model}", **known, **fields}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_completion_and_its_stream(fleet: ClientFleet, provider: str) -> None:
    plain = litellm.completion(**asked(fleet.gateway.url, provider, max_tokens=9))
    assert plain.id.startswith("chatcmpl-")
    assert plain.choices[0].finish_reason == "length"
    assert plain.usage.completion_tokens == 9
    headers = plain._hidden_params["additional_headers"]
    fleet.routed({name.removeprefix("llm_provider-"): value for name, value in headers.items()})
    usage = {"include_usage": True}
    stream = litellm.completion(**asked(fleet.gateway.url, provider, max_tokens=9, stream=True, stream_options=usage))
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == (
        plain.choices[0].message.content
    )
    assert chunks[-1].usage.completion_tokens == 9
    assert chunks[-1].usage.prompt_tokens == plain.usage.prompt_tokens


@pytest.mark.asyncio
async def test_async_completions(fleet: ClientFleet) -> None:
    plain = await litellm.acompletion(**asked(fleet.gateway.url, max_tokens=7))
    stream = await litellm.acompletion(**asked(fleet.gateway.url, max_tokens=7, stream=True))
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == plain.choices[0].message.content
    with pytest.raises(litellm.NotFoundError):
        await litellm.acompletion(**asked(fleet.gateway.url, model="nobody"))


def test_tools_plain_and_streamed(fleet: ClientFleet) -> None:
    wanted: Any = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    answer = litellm.completion(**asked(fleet.gateway.url, **wanted))
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"
    arguments = json.loads(call.function.arguments)
    assert isinstance(arguments["city"], str)
    chunks = list(litellm.completion(**asked(fleet.gateway.url, stream=True, **wanted)))
    rebuilt = litellm.stream_chunk_builder(chunks, messages=SAY)
    (call,) = rebuilt.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == arguments


def test_text_completions_and_responses(fleet: ClientFleet) -> None:
    url = fleet.gateway.url
    text = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", prompt="once", api_base=f"{url}/v1", api_key="none", max_tokens=4
    )
    assert text.choices[0].text
    answer = litellm.responses(
        model=f"openai/{MODEL}", input="hello", api_base=f"{url}/v1", api_key="none", max_output_tokens=20
    )
    assert answer.usage.output_tokens == 20
    assert answer.output[0].content[0].text


def test_anthropic_s_api(fleet: ClientFleet) -> None:
    answer = litellm.completion(
        model=f"anthropic/{MODEL}", api_base=fleet.gateway.url, api_key="none", messages=SAY, max_tokens=5
    )
    assert answer.usage.completion_tokens == 5
    assert answer.choices[0].message.content


def test_embeddings() -> None:
    with client_fleet("--runner", "pooling", "--served-model-name", "embed-1") as fleet:
        for provider in PROVIDERS:
            answer = litellm.embedding(
                model=f"{provider}/embed-1", input=["one", "two"], api_base=f"{fleet.gateway.url}/v1", api_key="none"
            )
            first, second = (one["embedding"] for one in answer.data)
            assert len(first) == len(second) > 1
            assert first != second
            assert answer.usage.prompt_tokens > 0


def test_errors_are_of_the_right_class(fleet: ClientFleet) -> None:
    with pytest.raises(litellm.NotFoundError) as missing:
        litellm.completion(**asked(fleet.gateway.url, model="nobody"))
    assert MODEL in str(missing.value)
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**asked(fleet.gateway.url, temperature=-1.0))
    with running_gateway([]) as gateway, pytest.raises((litellm.InternalServerError, litellm.ServiceUnavailableError)):
        litellm.completion(**asked(gateway.url))


def test_a_full_queue_is_a_rate_limit_that_is_repeated_in_time(
    fleet: ClientFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    with full_gateway(fleet) as (gateway, free):
        with pytest.raises(litellm.RateLimitError) as refused:
            litellm.completion(**asked(gateway.url))
        assert int(refused.value.response.headers["retry-after"]) >= 1

        def wait(seconds: float) -> None:
            waits.append(seconds)
            free()

        with monkeypatch.context() as patch:
            patch.setattr(time, "sleep", wait)
            answer = litellm.completion(**asked(gateway.url, max_retries=1, max_tokens=2))
        assert answer.choices[0].message.content
    assert waits == [1]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_an_engine_that_dies_in_mid_stream_is_an_error_and_no_end(fleet: ClientFleet, provider: str) -> None:
    fleet.fault("reset-after-chunks", 6, 1)
    stream = litellm.completion(**asked(fleet.gateway.url, provider, max_tokens=ENDLESS, stream=True))
    seen: list[Any] = []
    with pytest.raises(litellm.exceptions.MidStreamFallbackError) as raised:
        seen.extend(stream)
    assert isinstance(raised.value, openai.APIError)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in seen)
    assert text == raised.value.generated_content != ""
    assert "broke off" in str(raised.value)
    fleet.fault("reset-after-chunks", False)
