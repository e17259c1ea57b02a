from __future__ import annotations

import json
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.tokens.answers import Refused, Why
from router.tokens.question import CHAT_PATH, COMPLETIONS_PATH, ChatPrompt, GivenIds, TextPrompt, read_prompt

USER = {"role": "user", "content": "Hi"}
CALL = {"type": "function", "id": "c", "function": {"name": "f", "arguments": '{"b": 1, "a": "ü"}'}}


def chat(**fields):
    return read_prompt(CHAT_PATH, json.dumps({"messages": [USER], **fields}).encode())


def completion(**fields):
    return read_prompt(COMPLETIONS_PATH, json.dumps(fields).encode())


def refused(call, *arguments, **fields):
    with pytest.raises(Refused) as caught:
        call(*arguments, **fields)
    return caught.value.why


# -- completions


def test_token_ids_pass_through():
    assert completion(prompt=[1, 2, 2**32 - 1]) == GivenIds(array("I", [1, 2, 2**32 - 1]))


def test_the_first_prompt_of_a_list_counts():
    assert completion(prompt=["one", "two"]) == TextPrompt("one")
    assert completion(prompt=[[1, 2], [3]]) == GivenIds(array("I", [1, 2]))


def test_special_tokens_are_added_to_a_completion_unless_it_says_no():
    assert completion(prompt="x") == TextPrompt("x", add_special_tokens=True)
    assert completion(prompt="x", add_special_tokens=False) == TextPrompt("x", add_special_tokens=False)


@pytest.mark.parametrize("prompt", [None, [], [[]], [1, "a"], [1, True], [-1], [2**32], 5, [1.0]])
def test_a_prompt_that_is_none(prompt):
    assert refused(completion, prompt=prompt) is Why.SHAPE


# -- cache_salt


@pytest.mark.parametrize("ask", [chat, lambda **fields: completion(prompt="x", **fields)])
def test_a_salt_goes_with_the_prompt(ask):
    assert ask(cache_salt="ü tenant").salt == "ü tenant"
    assert ask().salt is None
    assert ask(cache_salt=None).salt is None
    for wrong in ("", 5, True, ["a"], {}):
        assert refused(ask, cache_salt=wrong) is Why.SHAPE


def test_given_ids_have_a_salt_too():
    assert completion(prompt=[1, 2], cache_salt="s") == GivenIds(array("I", [1, 2]), "s")


# -- chats


def test_an_empty_part_leaves_no_line_but_is_a_part():
    parts = [{"type": "text", "text": text} for text in ("", "a", "", "b", "")]
    for role in ("user", "system", "assistant", "tool"):
        prompt = chat(messages=[{"role": role, "content": [*parts, ""]}])
        (message,) = prompt.conversation(parts=False)
        assert message["content"] == "a\nb"
    (message,) = chat(messages=[{"role": "user", "content": parts}]).conversation(parts=True)
    assert [part["text"] for part in message["content"]] == ["", "a", "", "b", ""]


def test_string_templates_get_one_text_and_others_the_parts():
    message = {"role": "user", "content": [{"type": "text", "text": "a"}, "b", {"type": "text", "text": None}]}
    prompt = chat(messages=[message])
    assert prompt.conversation(parts=False) == [{"role": "user", "content": "a\nb"}]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert prompt.conversation(parts=True) == [{"role": "user", "content": parts}]


def test_what_a_client_added_to_a_part_stays_with_it():
    message = {"role": "user", "content": [{"cache_control": 1, "text": "a", "type": "text"}]}
    (rendered,) = chat(messages=[message]).conversation(parts=True)
    assert json.dumps(rendered["content"]) == '[{"type": "text", "text": "a", "cache_control": 1}]'


def test_tool_calls_come_in_the_order_of_the_schema_with_arguments_as_an_object():
    message = {"role": "assistant", "content": None, "tool_calls": [{**CALL, "index": 0}]}
    (rendered,) = chat(messages=[message]).conversation(parts=False)
    call = (
        '{"id": "c", "function": {"arguments": {"b": 1, "a": "\\u00fc"}, "name": "f"}, "type": "function", "index": 0}'
    )
    assert json.dumps(rendered["tool_calls"]) == f"[{call}]"
    assert rendered["content"] == ""


def test_conversations_of_one_prompt_share_nothing_that_a_rendering_changes():
    prompt = chat(messages=[{"role": "assistant", "content": "a", "tool_calls": [CALL]}])
    (first,), (second,) = prompt.conversation(parts=False), prompt.conversation(parts=False)
    first["tool_calls"][0]["function"]["arguments"]["b"] = 2
    assert second["tool_calls"][0]["function"]["arguments"]["b"] == 1


def test_reasoning_has_both_names():
    prompt = chat(messages=[{"role": "assistant", "content": "a", "reasoning_content": "because"}])
    (rendered,) = prompt.conversation(parts=False)
    assert rendered["reasoning"] == rendered["reasoning_content"] == "because"


def test_a_tools_answer_is_one_text_for_every_template():
    message = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": t} for t in "ab"]}
    for parts in (True, False):
        assert chat(messages=[message]).conversation(parts=parts) == [
            {"role": "tool", "content": "a\nb", "tool_call_id": "c"}
        ]


def test_tools_come_in_the_order_of_the_schema():
    tool = {"function": {"parameters": {"z": 1}, "strict": True, "name": "f", "odd": 1}, "type": "function"}
    (rendered,) = chat(tools=[tool]).tools
    assert json.dumps(rendered) == (
        '{"type": "function", "function": {"name": "f", "description": null, "parameters": {"z": 1}, "strict": true}}'
    )


def test_reasoning_effort_turns_thinking_on_unless_the_request_says_so_itself():
    assert chat(reasoning_effort="low").arguments == {"reasoning_effort": "low", "enable_thinking": True}
    assert chat(reasoning_effort="none").arguments["enable_thinking"] is False
    arguments = chat(reasoning_effort="low", chat_template_kwargs={"enable_thinking": False}).arguments
    assert arguments["enable_thinking"] is False


def test_invocations_are_what_their_body_is():
    body = json.dumps({"messages": [USER]}).encode()
    assert read_prompt("/invocations?x=1", body) == read_prompt(CHAT_PATH, body)
    assert read_prompt("/invocations", b'{"prompt": "x"}') == TextPrompt("x")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"messages": []}, Why.SHAPE),
        ({"messages": [{"content": "x"}]}, Why.SHAPE),
        ({"messages": [{"role": "user"}]}, Why.SHAPE),
        ({"messages": [{"role": "user", "content": 5}]}, Why.SHAPE),
        ({"messages": [{"role": "user", "content": [5]}]}, Why.SHAPE),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]}, Why.MEDIA),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}, Why.MEDIA),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "image_url": "u"}]}]}, Why.UNCERTAIN),
        ({"messages": [{"role": "user", "content": [{"type": ["text"], "text": "x"}]}]}, Why.MEDIA),
        ({"messages": [{"role": "system", "content": "x-anthropic-billing-header: 1\nYou"}]}, Why.UNCERTAIN),
        ({"messages": [{"role": "developer", "content": "x", "tools": []}]}, Why.UNCERTAIN),
        ({"messages": [{"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}]}, Why.UNCERTAIN),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f"}}]}]}, Why.UNCERTAIN),
        ({"tools": []}, Why.SHAPE),
        ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, Why.UNCERTAIN),
        ({"chat_template": "x"}, Why.UNCERTAIN),
        ({"chat_template_kwargs": {"messages": []}}, Why.UNCERTAIN),
        ({"chat_template_kwargs": 5}, Why.SHAPE),
        ({"documents": ["x"]}, Why.SHAPE),
        ({"continue_final_message": True}, Why.SHAPE),
        ({"add_generation_prompt": "yes"}, Why.SHAPE),
        ({"truncate_prompt_tokens": 5}, Why.UNCERTAIN),
    ],
)
def test_what_is_not_certain_is_refused(fields, why):
    assert refused(chat, **fields) is why


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        (CHAT_PATH, b"{", Why.SHAPE),
        (CHAT_PATH, b"[]", Why.SHAPE),
        ("/v1/responses", b"{}", Why.PATH),
        ("/v1/messages", b'{"messages": []}', Why.PATH),
        (COMPLETIONS_PATH, b'{"prompt": "x", "suffix": "y"}', Why.UNCERTAIN),
        (COMPLETIONS_PATH, b'{"prompt": "x", "prompt_embeds": "y"}', Why.MEDIA),
    ],
)
def test_a_body_of_another_kind_is_refused(path, body, why):
    assert refused(read_prompt, path, body) is why


def test_more_messages_than_anybody_has_are_refused():
    assert refused(chat, messages=[USER] * 20_001) is Why.TOO_BIG
    assert len(chat(messages=[USER] * 20_000).messages) == 20_000


words = st.sampled_from(
    [
        "messages",
        "role",
        "user",
        "system",
        "assistant",
        "tool",
        "content",
        "type",
        "text",
        "tools",
        "function",
        "name",
        "tool_calls",
        "arguments",
        "id",
        "prompt",
        "documents",
        "chat_template_kwargs",
        "{}",
        "refusal",
        "parameters",
    ]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**33) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=5),
    max_leaves=25,
)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    values,
    st.lists(st.dictionaries(words, values, max_size=5), max_size=3),
    st.sampled_from([CHAT_PATH, COMPLETIONS_PATH]),
)
def test_no_body_raises_anything_but_a_refusal(value, messages, path):
    """And what is not refused can be rendered in both forms."""
    messages = [{"role": "user", **message} for message in messages]
    for body in (value, {"messages": messages}, {"messages": messages, "tools": value, "prompt": value}):
        try:
            prompt = read_prompt(path, json.dumps(body).encode())
        except Refused:
            continue
        if isinstance(prompt, ChatPrompt):
            for parts in (True, False):
                assert len(prompt.conversation(parts=parts)) == len(messages)
