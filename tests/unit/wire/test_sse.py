"""What the beginning of a stream says, however it is cut."""

from __future__ import annotations

import pytest

from router.wire.sse import First, first_event

DATA = [
    b'data: {"id":"x"}\n\n',
    b'data:{"id":"x"}\n\n',
    b"data: [DONE]\n\n",
    b"data: error\n\n",
    b'data: {"choices":[],"error":"in the middle"}\n\n',
    b'data: {"errors":[]}\n\n',
    b"event: message_start\ndata: {}\n\n",
    b'event: response.created\ndata: {"type":"response.created"}\n\n',
    b': ping\n\n: ping\r\n\r\ndata: {"id":"x"}\n\n',
    b'id: 1\nretry: 5\ndata: {"id":"x"}\n\n',
    b"\r\n\r\ndata: 1\r\n\r\n",
    b"no field at all\n",
    b'{"error": "JSON instead of events"}\n',
    b'datum: {"error": 1}\n\n',
]
ERRORS = [
    b'data: {"error":{"message":"x"}}\n\n',
    b'data: {"error": "x"}\n\n',
    b'data:{ "error" : {"message":"x"}}\n\n',
    b'data: {"object":"error","message":"x"}\n\n',
    b'data: {"type": "error", "error": {}}\n\n',
    b"event: error\ndata: {}\n\n",
    b"event:error\r\ndata: {}\r\n\r\n",
    b': ping\n\nid: 7\ndata: {"error": {}}\n\n',
]
NOTHING = [
    b"",
    b": ping\n\n",
    b"\n\n",
    b"id: 1\n",
    b"retry: 10\n",
    b": ping",
    b"id: 1",
    b"retry: 1",
    b"event: mess",
    b"data",
    b"d",
]


@pytest.mark.parametrize("stream", DATA)
def test_an_event_is_data(stream: bytes) -> None:
    assert first_event(stream) is First.DATA


@pytest.mark.parametrize("stream", ERRORS)
def test_an_error_first_is_seen(stream: bytes) -> None:
    assert first_event(stream) is First.ERROR


@pytest.mark.parametrize("stream", NOTHING)
def test_comments_and_beginnings_say_nothing_yet(stream: bytes) -> None:
    assert first_event(stream) is First.NOTHING


@pytest.mark.parametrize("stream", [*DATA, *ERRORS])
def test_the_verdict_never_changes_with_further_bytes(stream: bytes) -> None:
    verdicts = [first_event(stream[:size]) for size in range(len(stream) + 1)]
    known = [verdict for verdict in verdicts if verdict is not First.NOTHING]
    assert set(known) == {first_event(stream)}
    assert First.NOTHING not in verdicts[verdicts.index(known[0]) :]


def test_a_long_line_is_judged_before_its_end() -> None:
    assert first_event(b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk"') is First.DATA


def test_an_error_after_the_first_event_is_none_of_this() -> None:
    assert first_event(b'data: {"id":1}\n\ndata: {"error":{}}\n\n') is First.DATA
