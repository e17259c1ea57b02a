"""Render and parse are inverse; no head that we accept can be read as two; an unknown head never ends in a crash."""

from __future__ import annotations

from contextlib import suppress

import httptools
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from native.body_framing import Framing
from router.errors import RouterError
from router.wire.http_head import (
    BadResponse,
    parse_request_head,
    parse_response_head,
    render_request_head,
    render_response_head,
)
from tests.support.scripted import split_head

TOKEN = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789!#$%&'*+-.^_`|~"
RESERVED = {
    b"host", b"content-length", b"transfer-encoding", b"connection", b"keep-alive", b"te", b"trailer", b"upgrade",
    b"proxy-connection", b"proxy-authenticate", b"proxy-authorization", b"http2-settings", b"expect", b"date",
    b"x-request-id", b"x-forwarded-for", b"content-type",
}  # fmt: skip
NAMES = st.text(TOKEN, min_size=1, max_size=12).map(str.encode).filter(lambda n: n.lower() not in RESERVED)
VALUES = st.binary(max_size=20).map(lambda v: bytes(b for b in v if b >= 32 and b != 127).strip())
HEADERS = st.lists(st.tuples(NAMES, VALUES), max_size=8)
TARGETS = st.text("abcXYZ019-._~!$&'()*+,;=:@%/?", max_size=20).map(lambda t: b"/" + t.encode())


def lines(headers: list[tuple[bytes, bytes]]) -> bytes:
    return b"".join(b"%b: %b\r\n" % header for header in headers)


@given(TARGETS, HEADERS, st.one_of(st.none(), st.integers(min_value=0, max_value=10**18 - 1)))
def test_a_request_head_reaches_the_engine_as_it_came(
    target: bytes, headers: list[tuple[bytes, bytes]], length: int | None
) -> None:
    framing = b"" if length is None else b"Content-Length: %d\r\n" % length
    head = parse_request_head(b"POST " + target + b" HTTP/1.1\r\nHost: h\r\n" + lines(headers) + framing + b"\r\n")
    raw = render_request_head(head, body_bytes=length or 0, request_id=b"r", peer=b"p", default_host=b"d", api_key=None)
    line, sent = split_head(raw)
    assert line == b"POST " + target + b" HTTP/1.1"
    expected: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        expected.setdefault(name.lower(), []).append(value)
    ours = {b"host", b"content-length", b"x-request-id", b"x-forwarded-for"}
    assert {name: values for name, values in sent.items() if name not in ours} == expected
    again = parse_request_head(raw)
    assert (again.target, again.framing, again.content_length) == (head.target, head.framing, head.content_length)


@given(HEADERS, st.integers(min_value=200, max_value=599), st.sampled_from(["length", "chunked", "close"]))
def test_a_response_head_reaches_the_client_as_it_came(
    headers: list[tuple[bytes, bytes]], status: int, ending: str
) -> None:
    framing = {"length": b"Content-Length: 7\r\n", "chunked": b"Transfer-Encoding: chunked\r\n", "close": b""}[ending]
    kept = [header for header in headers if not header[0].lower().startswith(b"x-kvgate")]
    head = parse_response_head(b"HTTP/1.1 %d Fine\r\n" % status + lines(kept) + framing + b"\r\n", False)
    raw = render_response_head(head, ours=b"", date=b"d", dechunk=False, close=False)
    line, sent = split_head(raw)
    assert line == b"HTTP/1.1 %d Fine" % status
    for name, _ in kept:
        assert sent[name.lower()] == [value for other, value in kept if other.lower() == name.lower()]
    again = parse_response_head(raw, False)
    assert (again.status, again.framing, again.content_length) == (head.status, head.framing, head.content_length)


def refused_as_it_should_be(error: RouterError, raw: bytes) -> None:
    assert 400 <= error.status <= 505, raw


class HeaderEvents:
    def __init__(self) -> None:
        self.headers: dict[bytes, list[bytes]] = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.setdefault(name.lower(), []).append(value.strip())


def seen_by_llhttp(raw: bytes, *, request: bool) -> dict[bytes, list[bytes]]:
    """The headers as llhttp tells them: what was found valid must be what is passed on."""
    events = HeaderEvents()
    parser = httptools.HttpRequestParser(events) if request else httptools.HttpResponseParser(events)
    with suppress(httptools.HttpParserUpgrade, httptools.HttpParserError):  # 501 is our verdict, not llhttp's
        parser.feed_data(raw)
    return events.headers


def passed_on(seen: dict[bytes, list[bytes]], sent: dict[bytes, list[bytes]]) -> None:
    named = {option.strip() for value in seen.get(b"connection", []) for option in value.lower().split(b",")}
    for name, values in seen.items():
        if name not in RESERVED and name not in named:
            assert sent.get(name) == values, name
    for name in sent:
        assert name in seen or name in RESERVED, name


PARTS = (
    b"X: y\r\n|Connection: x\r\n|A:\tb \r\n|GET |POST |/ |http://h/ |HTTP/1.1|HTTP/1.0|\r\n|\n|\r|Host: h\r\n|"
    b"Content-Length: 5\r\n|Content-Length: 6\r\n|Transfer-Encoding: chunked\r\n|Transfer-Encoding:|"
    b" |\t|:|\x00|\xff|5|chunked|HTTP/1.1 200 OK\r\n|,"
).split(b"|")
FRAGMENTS = st.lists(st.sampled_from(PARTS), max_size=12)


@given(st.sampled_from([b"", b"POST / HTTP/1.1\r\nHost: h\r\n"]), FRAGMENTS)
def test_any_request_head_is_read_one_way_or_refused_with_a_status(start: bytes, parts: list[bytes]) -> None:
    raw = (start + b"".join(parts)).partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    try:
        head = parse_request_head(raw)
    except RouterError as error:
        refused_as_it_should_be(error, raw)
        return
    lengths = raw.lower().count(b"\r\ncontent-length:")
    codings = raw.lower().count(b"\r\ntransfer-encoding:")
    assert lengths + codings <= 1, "two framings passed"
    assert b"\n" not in raw.replace(b"\r\n", b"")
    assert (head.framing is Framing.CHUNKED) == bool(codings)
    sent = render_request_head(head, body_bytes=3, request_id=b"r", peer=b"p", default_host=b"d", api_key=None)
    assert sent.count(b"\r\n\r\n") == 1
    passed_on(seen_by_llhttp(raw, request=True), split_head(sent)[1])


@given(FRAGMENTS, st.booleans())
@example([b"http://h/ ", b"Content-Length: 5\r\n", b"Content-Length: 5\r\n"], False)  # the first is a value of `http`
def test_any_response_head_is_read_one_way_or_broken(parts: list[bytes], to_head: bool) -> None:
    raw = (b"HTTP/1.1 200 OK\r\n" + b"".join(parts)).partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    try:
        head = parse_response_head(raw, to_head)
    except BadResponse:
        return
    assert raw.lower().count(b"\r\ncontent-length:") + raw.lower().count(b"\r\ntransfer-encoding:") <= 1
    assert b"\n" not in raw.replace(b"\r\n", b"")
    sent = render_response_head(head, ours=b"", date=b"d", dechunk=False, close=False)
    passed_on(seen_by_llhttp(raw, request=False), split_head(sent)[1])


def test_the_test_of_heads_sees_two_framings() -> None:
    with pytest.raises(RouterError):
        parse_request_head(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n")
