"""Streams: when tokens came, and each way in which a stream is no whole answer."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest import chat_stream
from loadtest.chat_stream import ChatStream, StreamFault, refusal


def event(data: Any) -> bytes:
    return b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n"


def delta(content: str | None = None, finish: str | None = None, **fields: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": content, **fields}, "finish_reason": finish}]})


USAGE = event(
    {
        "choices": [],
        "usage": {"prompt_tokens": 30, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 16}},
    }
)
DONE = event(b"[DONE]")
WHOLE = delta("", role="assistant") + delta("né") + delta(" two") + delta(" six", "length") + USAGE + DONE


def read(*parts: bytes) -> None:
    stream = ChatStream(0.0)
    for part in parts:
        stream.feed(part, 1.0)
    stream.end()


def fault(*parts: bytes) -> str:
    with pytest.raises(StreamFault) as caught:
        read(*parts)
    return str(caught.value)


def test_times_count_from_the_start_to_the_text():
    stream = ChatStream(10.0)
    for data, now in ((delta("", role="assistant"), 10.5), (delta("a"), 11.0), (delta("b"), 11.25), (DONE, 20.0)):
        stream.feed(data, now)
    stream.end()
    assert (stream.ttft_s, stream.gaps_s, stream.text) == (1.0, [0.25], "ab")


@given(st.lists(st.integers(0, len(WHOLE)), max_size=8), st.booleans())
def test_any_cut_of_the_bytes_gives_the_same_answer(cuts, carriage_returns):
    whole = b": keep-alive\n\n" + WHOLE
    if carriage_returns:
        whole = whole.replace(b"\n", b"\r\n")
    stream = ChatStream(0.0)
    edges = [0, *sorted(cuts), len(whole)]
    for start, end in pairwise(edges):
        stream.feed(whole[start:end], 1.0)
    stream.end()
    assert (stream.text, len(stream.gaps_s)) == ("né two six", 2)
    assert (stream.prompt_tokens, stream.cached_tokens, stream.output_tokens) == (30, 16, 3)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "tool_calls"])
def test_thoughts_and_tool_calls_are_tokens_but_not_said(field):
    stream = ChatStream(0.0)
    stream.feed(delta(None, **{field: "x" if field != "tool_calls" else [{}]}), 2.0)
    stream.feed(delta("said") + DONE, 3.0)
    stream.end()
    assert (stream.ttft_s, stream.gaps_s, stream.text) == (2.0, [1.0], "said")


def test_an_answer_without_visible_text_counts_by_its_first_choice():
    stream = ChatStream(0.0)
    stream.feed(delta("", role="assistant"), 4.0)
    stream.feed(delta("", "length") + DONE, 5.0)
    stream.end()
    assert stream.ttft_s == 4.0


def test_completions_streams_are_read_too():
    stream = ChatStream(0.0)
    stream.feed(event({"choices": [{"text": "a"}]}) + DONE, 1.0)
    stream.end()
    assert stream.text == "a"


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ((delta("a"),), "a stream without [DONE]"),
        ((), "a stream without [DONE]"),
        ((delta("a") + b"data: [DONE]\n",), "a stream without [DONE]"),
        ((DONE,), "an empty stream"),
        ((delta("a"), delta("", "abort"), DONE), "aborted by the engine"),
        ((delta("a"), event({"error": {"message": "secret", "code": 500, "type": "EngineDead"}})), "EngineDead"),
        ((event({"error": "Unauthorized"}),), "an error event"),
        ((event({"error": {"code": "x" * 41}}),), "an error event"),
        ((event({"error": {"code": "a\nb", "type": "T"}}),), "an error event T"),
        ((DONE, delta("a")), "data after [DONE]"),
        ((event(b"{"),), "an event that is no JSON"),
        ((event([1]),), "an event that is no object"),
        ((event({"choices": ["x"]}),), "an event of unknown shape"),
        ((event({"choices": [], "usage": {"x": 1}}),), "an event of unknown shape"),
    ],
)
def test_what_is_no_whole_answer_is_a_fault(parts, why):
    told = fault(*parts)
    assert told == why or (why == "EngineDead" and told == "an error event EngineDead")


def test_events_are_bounded(monkeypatch):
    monkeypatch.setattr(chat_stream, "MAX_EVENT_BYTES", 64)
    stream = ChatStream(0.0)
    stream.feed(b"data: " + b" " * 58, 0.0)
    assert fault(b"x" * 65) == "an event above 1 MiB"
    assert fault(*[b"data: " + b"x" * 20 + b"\n"] * 4) == "an event above 1 MiB"


@pytest.mark.parametrize(
    ("status", "body", "name"),
    [
        (429, b'{"error": {"code": "queue_full", "type": "x"}}', "status 429 queue_full"),
        (400, b'{"error": {"code": 400, "type": "BadRequestError"}}', "status 400 BadRequestError"),
        (404, b'{"detail": "Not Found"}', "status 404"),
        (502, b"<html>", "status 502"),
        (401, b'{"error": "Unauthorized"}', "status 401"),
        (500, b"[1]", "status 500"),
    ],
)
def test_a_refusal_is_named_by_status_and_code(status, body, name):
    assert refusal(status, body) == name
