"""Whatever a client sends: the simulated engine reads it or refuses it in its own words, and never breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from router.sim import answers, calls
from router.sim.calls import ApiError, Call, CallLimits
from router.sim.replies import ReplyContext, reply_for

LIMITS = CallLimits(max_model_len=200, default_output_tokens=20, block_size=16, auto_tool_choice=True, seed=0)

scalars = st.one_of(st.none(), st.booleans(), st.integers(-3, 300), st.floats(-2, 3), st.text(max_size=8))
words = st.sampled_from(
    [
        *("role", "content", "type", "text", "name", "function", "parameters", "tool_calls", "input_schema", "schema"),
        *(
            "enum",
            "anyOf",
            "const",
            "required",
            "minItems",
            "items",
            "minimum",
            "include_usage",
            "json_schema",
            "image_url",
            "tool_use",
            "tool_result",
            "id",
            "input",
            "properties",
            "enum",
        ),
    ]
)
kinds = st.sampled_from(
    [
        *("text", "image_url", "function", "auto", "required", "tool_use", "tool_result", "json_schema", "message"),
        *("object", "array", "string", "integer", "number", "boolean", "null"),
    ]
)
values = st.recursive(
    st.one_of(scalars, kinds),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=4)),
    max_leaves=12,
)
fields = st.sampled_from(
    [
        *("model", "messages", "prompt", "input", "system", "instructions", "max_tokens", "max_completion_tokens"),
        *("max_output_tokens", "stream", "stream_options", "n", "stop", "stop_sequences", "tools", "tool_choice"),
        *("logprobs", "top_logprobs", "temperature", "top_p", "cache_salt", "response_format", "text"),
        *("return_token_ids", "return_token_strs", "add_generation_prompt", "metadata"),
    ]
)
good_messages = st.just([{"role": "user", "content": "hello"}])
bodies = st.dictionaries(fields, st.one_of(values, good_messages), max_size=7)


def attempt(read: Callable[[], Any]) -> Any:
    """What it gives, or the refusal: an ApiError of the client's doing with a body that can be read."""
    try:
        return read()
    except ApiError as error:
        refusal = error
    assert 400 <= refusal.status < 500
    assert orjson.loads(refusal.body())["error"]["message"]
    return refusal


@given(body=bodies, reader=st.sampled_from(["chat", "completion", "responses", "messages"]))
@settings(max_examples=400, deadline=None)
def test_a_call_is_read_and_answered_or_refused(body: dict[str, Any], reader: str) -> None:
    body = orjson.loads(orjson.dumps(body))
    checks = {"chat": calls.check_chat, "completion": calls.check_completion}
    readers = {
        "chat": calls.read_chat,
        "completion": calls.read_completion,
        "responses": calls.read_responses,
        "messages": calls.read_messages,
    }

    def read() -> Call:
        if reader in checks:
            checks[reader](body)
        return readers[reader](body, "sim", None, LIMITS)

    call = attempt(read)
    if isinstance(call, ApiError):
        return
    reply = reply_for(call, ReplyContext("x", 0, "vllm", 16, details=True))
    events = reply.opening()
    for choice in call.choices:
        assert len(choice.prompt) + len(choice.answer) <= LIMITS.max_model_len
        for generated in range(1, len(choice.answer) + 1):
            choice.generated = generated
            choice.finish = choice.answer.finish if generated == len(choice.answer) else None
            events += reply.delta(choice)
    assert call.finished
    events += reply.closing()
    for event in events:
        assert event.endswith(b"\n\n")
        data = event.split(b"data: ", 1)[1]
        assert data == b"[DONE]\n\n" or orjson.loads(data)
    for choice in call.choices:
        choice.sent = 0
    assert orjson.loads(reply.body())


@given(body=bodies)
@settings(max_examples=150, deadline=None)
def test_tokenize_and_count_tokens_read_or_refuse(body: dict[str, Any]) -> None:
    attempt(lambda: calls.read_tokenize(body))
    attempt(lambda: calls.count_message_tokens(body))
    attempt(lambda: calls.read_prompts(body, LIMITS))


@given(
    messages=st.lists(st.dictionaries(words, values, max_size=4) | good_messages.map(lambda some: some[0]), max_size=3),
    tools=st.lists(st.dictionaries(words, values, max_size=3), max_size=2),
    choice=values,
    schema=values,
)
@settings(max_examples=300, deadline=None)
def test_odd_messages_tools_and_schemas(messages: list[Any], tools: list[Any], choice: Any, schema: Any) -> None:
    body = {
        "messages": messages,
        "tools": tools,
        "tool_choice": choice,
        "max_tokens": 20,
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
    }
    attempt(lambda: calls.read_chat(body, "sim", None, LIMITS))
    attempt(lambda: calls.read_messages(body, "sim", None, LIMITS))
    attempt(lambda: calls.read_responses({**body, "input": messages}, "sim", None, LIMITS))


schemas = st.fixed_dictionaries(
    {"type": st.sampled_from(["object", "array", "string", "integer", "number", "boolean", "null", "odd"])},
    optional=dict.fromkeys(("minimum", "minItems", "items", "properties", "required", "enum", "anyOf"), values),
)


@given(schema=values | schemas, seed=st.integers(0, 2**64 - 1))
@settings(max_examples=300, deadline=None)
def test_any_schema_gives_json(schema: Any, seed: int) -> None:
    orjson.loads(answers.json_for_schema(schema, seed))


@given(st.binary(max_size=60))
def test_any_bytes_are_an_object_or_refused(data: bytes) -> None:
    for media in ("application/json", "application/json; charset=utf-8", "text/plain", ""):
        assert isinstance(attempt(lambda: calls.read_body(media, data)), dict | ApiError)  # noqa: B023 - called at once
