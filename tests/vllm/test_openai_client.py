"""The official client works through the gateway as it does on an engine."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest

from tests.vllm.engines import MODEL, Engine, ask

pytestmark = pytest.mark.vllm

MESSAGES = [
    {"role": "system", "content": "You answer in few words. " * 20},
    {"role": "user", "content": "What does os.path.join do? Größe, 路径, 🛣"},
]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
# random weights call no function by themselves: the grammar makes them write this, and vLLM's parser must find it
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_models_are_listed_as_the_engines_list_them(client: openai.OpenAI, engines: list[Engine]) -> None:
    listed = [model.to_dict() for model in client.models.list()]
    own = json.loads(ask(f"{engines[0].url}/v1/models")[1])["data"]
    assert [model["id"] for model in listed] == [MODEL]
    assert listed[0].keys() >= own[0].keys()
    assert listed[0]["max_model_len"] == own[0]["max_model_len"]


def test_plain_answer_is_the_engines_own(client: openai.OpenAI, engines: list[Engine]) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=12, temperature=0)
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    direct = json.loads(ask(f"{engines[0].url}/v1/chat/completions", "POST", body, timeout_s=60)[1])
    assert answer.choices[0].message.content == direct["choices"][0]["message"]["content"]
    assert answer.choices[0].finish_reason == direct["choices"][0]["finish_reason"]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == direct["usage"]["prompt_tokens"]


def test_stream_brings_the_text_of_the_plain_answer_and_the_usage(client: openai.OpenAI) -> None:
    wanted = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    plain = client.chat.completions.create(**wanted)
    with client.chat.completions.create(**wanted, stream=True, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == plain.choices[0].message.content
    assert chunks[-1].usage == plain.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )


def test_second_request_with_the_same_prompt_reports_cached_tokens(client: openai.OpenAI) -> None:
    wanted = {"model": MODEL, "messages": MESSAGES, "max_tokens": 1, "temperature": 0}
    first, second = (client.chat.completions.create(**wanted) for _ in range(2))
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens >= 64


def test_tool_call_is_parsed(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        tools=[WEATHER],
        max_tokens=200,
        extra_body={"structured_outputs": {"choice": [CALL]}},
    )
    (call,) = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})


def test_streamed_tool_call_is_parsed(client: openai.OpenAI) -> None:
    with client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        tools=[WEATHER],
        max_tokens=200,
        stream=True,
        extra_body={"structured_outputs": {"choice": [CALL]}},
    ) as stream:
        parts = [call for chunk in stream for choice in chunk.choices for call in choice.delta.tool_calls or ()]
    assert "".join(part.function.name or "" for part in parts) == "get_weather"
    assert json.loads("".join(part.function.arguments or "" for part in parts)) == {"city": "Paris"}


def test_completions_and_responses_work(client: openai.OpenAI) -> None:
    completion = client.completions.create(model=MODEL, prompt="def join(", max_tokens=4, temperature=0)
    assert completion.usage.completion_tokens <= 4
    response = client.responses.create(model=MODEL, input="What does join do?", max_output_tokens=4)
    assert response.status in ("completed", "incomplete")


def test_streamed_responses_are_the_plain_ones(client: openai.OpenAI) -> None:
    wanted = {"model": MODEL, "input": "What does join do?", "max_output_tokens": 8, "temperature": 0}
    plain = client.responses.create(**wanted)
    events = list(client.responses.create(**wanted, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == plain.output_text == events[-1].response.output_text
    assert events[-1].response.usage.output_tokens == plain.usage.output_tokens == 8


@pytest.mark.asyncio
async def test_the_async_client_gets_what_the_other_gets(client: openai.OpenAI, base_url: str) -> None:
    wanted = {"model": MODEL, "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    text = client.chat.completions.create(**wanted).choices[0].message.content
    async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=60) as other:
        plain = await other.chat.completions.create(**wanted)
        stream = await other.chat.completions.create(**wanted, stream=True)
        streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert plain.choices[0].message.content == streamed == text


def test_a_model_that_generates_embeds_nothing(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.embeddings.create(model=MODEL, input="text")
    assert refused.value.response.json() == {"detail": "Not Found"}


def test_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such-model") as caught:
        client.chat.completions.create(model="no-such-model", messages=MESSAGES)
    assert caught.value.response.status_code == 404


def test_engines_own_errors_pass_unchanged(client: openai.OpenAI, engines: list[Engine]) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 1_000_000}
    status, text = ask(f"{engines[0].url}/v1/chat/completions", "POST", body)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**body)
    assert caught.value.response.status_code == status == 400
    assert json.loads(caught.value.response.content) == json.loads(text)


def test_streamed_request_with_a_fault_gets_a_status_not_a_stream(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=-1, stream=True)
