"""Traces out of logs of requests: shared beginnings become shared ids, and no text stays."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loadtest.replay.from_log import LogError, convert, main
from loadtest.replay.trace import load_trace

SYSTEM = {"role": "system", "content": "You know secret things. " * 20}


def logged(time: Any, *said: Any, entry: dict[str, Any] | None = None, **body: Any) -> dict[str, Any]:
    messages = [SYSTEM, *({"role": "user", "content": text} for text in said)]
    return {"time": time, "body": {"messages": messages, **body}, **(entry or {})}


def converted(*entries: Any) -> list[dict[str, Any]]:
    return convert(json.dumps(entry).encode() for entry in entries)


def shared(first: list[int], second: list[int]) -> int:
    return sum(one == other for one, other in zip(first, second, strict=False))


def test_a_log_becomes_a_trace_that_replays_without_its_text(tmp_path, capsys):
    log = tmp_path / "log.jsonl"
    entries = [
        logged(11.5, "first question", "and more " * 50, user="jo", max_tokens=7),
        logged(10.0, "first question", user="jo", entry={"output_tokens": 33}),
        logged("1970-01-01T00:00:12Z", "another", entry={"usage": {"completion_tokens": 4}}),
    ]
    log.write_text("\n".join(map(json.dumps, entries)))
    for name in ("trace.jsonl", "trace.jsonl.gz"):
        assert main([str(log), str(tmp_path / name)]) == 0
        trace = load_trace(tmp_path / name)
        first, second, third = trace.requests
        assert [one.at_s for one in trace.requests] == [0.0, 1.5, 2.0]
        assert [one.output_tokens for one in trace.requests] == [33, 7, 4]
        assert [one.session for one in trace.requests] == ["0", "0", None]
        # 480 characters are said to all, and the beginning of the conversation to the first two.
        assert shared(first.block_ids, third.block_ids) == 480 // 64
        assert shared(first.block_ids, second.block_ids) >= shared(first.block_ids, third.block_ids)
        assert second.block_ids != first.block_ids
    text = (tmp_path / "trace.jsonl").read_text()
    assert "secret" not in text
    assert "jo" not in text
    assert "3 requests" in capsys.readouterr().out


def test_equal_text_after_different_beginnings_has_different_ids():
    same = "x" * 640
    one, other = converted(logged(0, "a" * 64 + same), logged(1, "b" * 64 + same))
    last = shared(one["hash_ids"], other["hash_ids"])
    assert not set(one["hash_ids"][last:]) & set(other["hash_ids"][last:])


def test_tools_parts_and_completions_are_read():
    tools, parts, completion = converted(
        logged(0, "hi", tools=[{"type": "function"}]),
        logged(1, [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {}}]),
        {"time": 2, "body": {"prompt": "x" * 65, "max_completion_tokens": 3}},
    )
    assert tools["hash_ids"][0] != parts["hash_ids"][0]
    assert (completion["in"], completion["out"], len(completion["hash_ids"])) == (17, 3, 2)
    assert tools["out"] == 128


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (b"{", "line 2: "),
        (b"[]", 'expected an object with "body"'),
        (b'{"time": 1, "body": {}}', "neither"),
        (b'{"time": 1, "body": {"prompt": ""}}', "the prompt is empty"),
        (b'{"time": 1, "body": {"prompt": [1, 2]}}', "neither"),
        (b'{"time": 1, "body": {"messages": [1]}}', "a message is not an object"),
        (b'{"body": {"prompt": "x"}}', '"time" is neither'),
        (b'{"time": true, "body": {"prompt": "x"}}', '"time" is neither'),
        (b'{"time": "noon", "body": {"prompt": "x"}}', "noon"),
    ],
)
def test_a_line_that_is_no_request_is_named(bad, why):
    with pytest.raises(LogError, match="line 2: ") as caught:
        convert([json.dumps(logged(0, "x")).encode(), bad])
    assert why in str(caught.value)


def test_a_log_that_cannot_be_read_ends_with_2(tmp_path, capsys):
    assert main([str(tmp_path / "none"), str(tmp_path / "trace")]) == 2
    (tmp_path / "log").write_text("{}\n")
    assert main([str(tmp_path / "log"), str(tmp_path / "trace")]) == 2
    assert "line 1" in capsys.readouterr().err
    assert not (tmp_path / "trace").exists()
