"""Heads by the letter: what passes, what is normalised, what is refused. Smuggling begins where two readers differ."""

from __future__ import annotations

import pytest

from native.body_framing import Framing
from router.errors import RouterError
from router.wire.http_head import (
    BadResponse,
    RequestHead,
    ResponseHead,
    parse_request_head,
    parse_response_head,
    render_own_answer,
    render_request_head,
    render_response_head,
)
from tests.support.scripted import split_head

HOST = b"Host: gate\r\n"


def read(*lines: bytes, start: bytes = b"POST /v1/x HTTP/1.1", host: bytes = HOST) -> RequestHead:
    return parse_request_head(start + b"\r\n" + host + b"".join(line + b"\r\n" for line in lines) + b"\r\n")


def answer(*lines: bytes, start: bytes = b"HTTP/1.1 200 OK", to_head: bool = False) -> ResponseHead:
    return parse_response_head(start + b"\r\n" + b"".join(line + b"\r\n" for line in lines) + b"\r\n", to_head)


def refused(raw: bytes) -> int:
    with pytest.raises(RouterError) as caught:
        parse_request_head(raw)
    return caught.value.status


def to_engine(head: RequestHead, *, body_bytes: int = 0, api_key: bytes | None = None) -> dict[bytes, list[bytes]]:
    raw = render_request_head(
        head, body_bytes=body_bytes, request_id=b"id1", peer=b"10.1.1.1", default_host=b"engine:1", api_key=api_key
    )
    return split_head(raw)[1]


def to_client(head: ResponseHead, *, dechunk: bool = False, close: bool = False) -> dict[bytes, list[bytes]]:
    raw = render_response_head(head, ours=b"x-kvgate-backend: b\r\n", date=b"today", dechunk=dechunk, close=close)
    return split_head(raw)[1]


# -- requests that are refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        pytest.param(b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", 400, id="length and coding"),
        pytest.param(b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n", 400, id="coding and length"),
        pytest.param(b"Content-Length: 5\r\nContent-Length: 5\r\n", 400, id="one length twice"),
        pytest.param(b"Content-Length: 5\r\nContent-Length: 6\r\n", 400, id="two lengths"),
        pytest.param(b"Content-Length: 5, 5\r\n", 400, id="a list of lengths"),
        pytest.param(b"Content-Length: +5\r\n", 400, id="signed length"),
        pytest.param(b"Content-Length: -5\r\n", 400, id="negative length"),
        pytest.param(b"Content-Length: 0x5\r\n", 400, id="hex length"),
        pytest.param(b"Content-Length: 5_0\r\n", 400, id="length as Python writes it"),
        pytest.param(b"Content-Length: 5 0\r\n", 400, id="length with a gap"),
        pytest.param(b"Content-Length: \r\n", 400, id="empty length"),
        pytest.param(b"Content-Length: 99999999999999999999999\r\n", 400, id="length over 64 bits"),
        pytest.param(b"Transfer-Encoding: gzip\r\n", 501, id="another coding"),
        pytest.param(b"Transfer-Encoding: gzip, chunked\r\n", 501, id="another coding first"),
        pytest.param(b"Transfer-Encoding: chunked, gzip\r\n", 400, id="chunked not last"),
        pytest.param(b"Transfer-Encoding: chunked, chunked\r\n", 400, id="chunked twice"),
        pytest.param(b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", 400, id="chunked in two lines"),
        pytest.param(
            b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n", 400, id="identity after chunked"
        ),
        pytest.param(b"Transfer-Encoding: xchunked\r\n", 501, id="nearly chunked"),
        pytest.param(b'Transfer-Encoding: "chunked"\r\n', 501, id="quoted chunked"),
        pytest.param(b"Transfer-Encoding: chunked;q=1\r\n", 501, id="chunked with a parameter"),
        pytest.param(b"Transfer-Encoding: \x0bchunked\r\n", 400, id="vertical tab before chunked"),
        pytest.param(b"Transfer-Encoding : chunked\r\n", 400, id="space before the colon"),
        pytest.param(b"Transfer\x00Encoding: chunked\r\n", 400, id="NUL in a name"),
        pytest.param(b" X: y\r\n", 400, id="folded first line"),
        pytest.param(b"X: y\r\n z\r\n", 400, id="folded with a space"),
        pytest.param(b"X: y\r\n\tz\r\n", 400, id="folded with a tab"),
        pytest.param(b"X: y\nZ: a\r\n", 400, id="bare LF"),
        pytest.param(b"X: y\rZ: a\r\n", 400, id="bare CR"),
        pytest.param(b"X: y\x00\r\n", 400, id="NUL in a value"),
        pytest.param(b"X: y\x01z\r\n", 400, id="control byte in a value"),
        pytest.param(b"X: y\x7f\r\n", 400, id="DEL in a value"),
        pytest.param(b"X y: z\r\n", 400, id="space in a name"),
        pytest.param(b"X\x80: z\r\n", 400, id="high byte in a name"),
        pytest.param(b"X(: z\r\n", 400, id="delimiter in a name"),
        pytest.param(b": z\r\n", 400, id="empty name"),
        pytest.param(b"no colon\r\n", 400, id="no colon"),
        pytest.param(b"Host: other\r\n", 400, id="a second Host"),
    ],
)
def test_a_request_that_two_readers_could_read_differently_is_refused(lines: bytes, status: int) -> None:
    assert refused(b"POST /v1/x HTTP/1.1\r\n" + HOST + lines + b"\r\n") == status


@pytest.mark.parametrize(
    ("start", "status"),
    [
        pytest.param(b"CONNECT host:443 HTTP/1.1", 405, id="CONNECT"),
        pytest.param(b"BREW /pot HTTP/1.1", 400, id="a method nobody knows"),
        pytest.param(b"get / HTTP/1.1", 400, id="a method in lower case"),
        pytest.param(b"GET / HTTP/2.0", 505, id="HTTP/2.0"),
        pytest.param(b"GET / HTTP/0.9", 505, id="HTTP/0.9"),
        pytest.param(b"GET / HTTP/1.9", 400, id="HTTP/1.9"),
        pytest.param(b"GET /", 400, id="no version"),
        pytest.param(b"GET / http/1.1", 400, id="version in lower case"),
        pytest.param(b"GET / HTTPS/1.1", 400, id="another protocol"),
        pytest.param(b"GET  / HTTP/1.1 x", 400, id="a fourth word"),
        pytest.param(b"GET /a b HTTP/1.1", 400, id="a space in the target"),
        pytest.param(b"GET /\x01 HTTP/1.1", 400, id="a control byte in the target"),
        pytest.param(b"GET nowhere HTTP/1.1", 400, id="a target without a slash"),
        pytest.param(b"GET ftp://h/ HTTP/1.1", 400, id="another scheme"),
        pytest.param(b"GET http:///x HTTP/1.1", 400, id="no authority"),
        pytest.param(b"GET http://u:p@h/ HTTP/1.1", 400, id="user information"),
        pytest.param(b"GET http://h^/ HTTP/1.1", 400, id="a bad authority"),
        pytest.param(b"GET * HTTP/1.1", 400, id="* for another method than OPTIONS"),
        pytest.param(b"SETUP rtsp://h/ RTSP/1.0", 400, id="RTSP"),
    ],
)
def test_an_odd_request_line_is_refused(start: bytes, status: int) -> None:
    assert refused(start + b"\r\n" + HOST + b"\r\n") in ((status, 505) if status == 400 else (status,))


def test_the_preface_of_http_2_is_refused() -> None:
    assert refused(b"PRI * HTTP/2.0\r\n\r\n") in (400, 505)


@pytest.mark.parametrize("host", [b"", b"Host: a b\r\n", b"Host: a/b\r\n", b"Host: a?b\r\n", b'Host: "a"\r\n'])
def test_a_host_that_is_missing_or_no_host_is_refused(host: bytes) -> None:
    assert refused(b"GET / HTTP/1.1\r\n" + host + b"\r\n") == 400


def test_a_coding_in_http_1_0_is_refused() -> None:
    assert refused(b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n") == 400


# -- requests that pass -----------------------------------------------------------------------------------------------


def test_lengths_and_codings_are_read() -> None:
    assert read().framing is Framing.NONE
    head = read(b"content-length: 17")
    assert (head.framing, head.content_length) == (Framing.LENGTH, 17)
    assert read(b"transfer-encoding: Chunked ").framing is Framing.CHUNKED


@pytest.mark.parametrize("target", [b"/", b"/a?b=c", b"/%2e%2e/x", b"//x", b"/a;b", b"/a?b?c", b"/a?http://x"])
def test_the_target_goes_on_as_it_came(target: bytes) -> None:
    head = read(start=b"GET " + target + b" HTTP/1.1")
    assert head.target == target
    assert head.path == target.split(b"?")[0]


@pytest.mark.parametrize(
    ("absolute", "target", "host"),
    [
        (b"http://other:81/a?b=c", b"/a?b=c", b"other:81"),
        (b"HTTPS://other", b"/", b"other"),
        (b"http://other?q=1", b"/?q=1", b"other"),
        (b"http://[::1]:80/x", b"/x", b"[::1]:80"),
    ],
)
def test_absolute_form_becomes_origin_form_with_its_host(absolute: bytes, target: bytes, host: bytes) -> None:
    head = read(start=b"GET " + absolute + b" HTTP/1.1")
    assert (head.target, head.host) == (target, host)
    assert to_engine(head)[b"host"] == [host]


def test_options_may_ask_the_server_itself() -> None:
    assert read(start=b"OPTIONS * HTTP/1.1").target == b"*"


def test_http_1_0_closes_and_needs_no_host() -> None:
    head = parse_request_head(b"GET / HTTP/1.0\r\n\r\n")
    assert head.http_1_0
    assert not head.keep_alive
    assert to_engine(head)[b"host"] == [b"engine:1"]
    assert not parse_request_head(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n").keep_alive


def test_connection_close_ends_keep_alive() -> None:
    assert read().keep_alive
    assert not read(b"Connection: foo, Close").keep_alive
    assert not read(b"Connection: foo", b"Connection: close").keep_alive


def test_hop_by_hop_headers_and_those_that_connection_names_end_here() -> None:
    head = read(
        b"Connection: X-Private, keep-alive",
        b"X-Private: 1",
        b"Keep-Alive: timeout=5",
        b"Proxy-Connection: keep-alive",
        b"Proxy-Authorization: secret",
        b"TE: trailers",
        b"Trailer: x",
        b"Upgrade: h2c",
        b"HTTP2-Settings: x",
        b"X-Public: 2",
    )
    sent = to_engine(head)
    assert set(sent) == {b"host", b"x-public", b"x-request-id", b"x-forwarded-for"}


def test_connection_cannot_take_the_framing_or_our_headers_away() -> None:
    head = read(b"Connection: content-length, host, x-request-id, x-forwarded-for", b"Content-Length: 5")
    sent = to_engine(head, body_bytes=5)
    assert sent[b"content-length"] == [b"5"]
    assert b"host" in sent
    assert b"x-forwarded-for" in sent


def test_end_to_end_headers_go_on_as_they_came() -> None:
    raw = render_request_head(
        read(b"X-MiXed: CaSe", b"X-Twice: 1", b"X-Twice: 2", b"X-High: \xe4", b"Accept:"),
        body_bytes=0,
        request_id=b"r",
        peer=b"p",
        default_host=b"d",
        api_key=None,
    )
    for line in (b"X-MiXed: CaSe", b"X-Twice: 1\r\nX-Twice: 2", b"X-High: \xe4", b"Accept:"):
        assert b"\r\n" + line + b"\r\n" in raw


def test_chunked_requests_are_sent_on_with_their_length() -> None:
    sent = to_engine(read(b"Transfer-Encoding: chunked"), body_bytes=12)
    assert sent[b"content-length"] == [b"12"]
    assert b"transfer-encoding" not in sent


def test_an_empty_body_keeps_its_length_and_no_body_gets_none() -> None:
    assert to_engine(read(b"Content-Length: 0"))[b"content-length"] == [b"0"]
    assert b"content-length" not in to_engine(read())


def test_the_peer_is_appended_to_x_forwarded_for() -> None:
    assert to_engine(read())[b"x-forwarded-for"] == [b"10.1.1.1"]
    assert to_engine(read(b"X-Forwarded-For: a", b"x-forwarded-for: b"))[b"x-forwarded-for"] == [b"a, b, 10.1.1.1"]


def test_x_request_id_is_kept_once() -> None:
    head = read(b"X-Request-ID: mine", b"X-Request-ID: other")
    assert head.request_id == b"mine"
    assert to_engine(head)[b"x-request-id"] == [b"id1"]
    assert not read(b"X-Request-ID: ").request_id


def test_traceparent_goes_on() -> None:
    assert to_engine(read(b"traceparent: 00-x"))[b"traceparent"] == [b"00-x"]


def test_expect_is_answered_here_and_not_sent_on() -> None:
    head = read(b"Expect: 100-Continue")
    assert head.expect == b"100-continue"
    assert b"expect" not in to_engine(head)


def test_an_engine_s_key_takes_the_place_of_the_client_s() -> None:
    assert to_engine(read(b"Authorization: Bearer mine"), api_key=b"k")[b"authorization"] == [b"Bearer k"]
    assert to_engine(read(b"Authorization: Bearer mine"))[b"authorization"] == [b"Bearer mine"]


def test_upgrade_counts_only_if_connection_names_it() -> None:
    assert read(b"Upgrade: websocket").upgrade is None
    head = read(b"Connection: Upgrade", b"Upgrade: websocket")
    assert head.upgrade == b"websocket"
    sent = to_engine(head)
    assert (sent[b"connection"], sent[b"upgrade"]) == ([b"Upgrade"], [b"websocket"])


def test_a_header_is_found_by_its_lower_case_name() -> None:
    head = read(b"Content-Type:   application/json ", b"content-type: other")
    assert head.header(b"content-type") == b"application/json"
    assert head.header(b"cookie") is None


# -- responses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(
            b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", id="length, coding"
        ),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n", id="coding, length"
        ),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", id="two lengths"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\n", id="one length twice"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 5, 5\r\n\r\n", id="a list of lengths"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", id="negative length"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 5_0\r\n\r\n", id="length as Python writes it"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: \r\n\r\n", id="empty length"),
        pytest.param(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n", id="another coding"),
        pytest.param(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", id="another coding first"),
        pytest.param(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked, identity\r\n\r\n", id="chunked not last"),
        pytest.param(b"HTTP/1.1 200 OK\r\nTransfer-Encoding : chunked\r\n\r\n", id="space before the colon"),
        pytest.param(b"HTTP/1.1 200 OK\r\nX: y\r\n z\r\n\r\n", id="folded"),
        pytest.param(b"HTTP/1.1 200 OK\r\nX: y\nZ: a\r\n\r\n", id="bare LF"),
        pytest.param(b"HTTP/1.1 200 OK\nX: y\r\n\r\n", id="bare LF after the status line"),
        pytest.param(b"HTTP/1.1 200 OK\r\nX: y\rZ: a\r\n\r\n", id="bare CR"),
        pytest.param(b"HTTP/1.1 200 O\rK\r\n\r\n", id="bare CR in the phrase"),
        pytest.param(b"HTTP/1.1 200 O\x00K\r\n\r\n", id="NUL in the phrase"),
        pytest.param(b"HTTP/1.1 200 O\x1bK\r\n\r\n", id="control byte in the phrase"),
        pytest.param(b"HTTP/1.1 200 OK\r\nX: \x00\r\n\r\n", id="NUL in a value"),
        pytest.param(b"HTTP/1.1 200 OK\r\nX: \x7f\r\n\r\n", id="DEL in a value"),
        pytest.param(b"HTTP/1.1 200 OK\r\nX\x01: y\r\n\r\n", id="control byte in a name"),
        pytest.param(b"HTTP/1.1 200 OK\r\n: y\r\n\r\n", id="empty name"),
        pytest.param(b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n", id="no colon"),
        pytest.param(b"HTTP/2.0 200 OK\r\n\r\n", id="HTTP/2.0"),
        pytest.param(b"HTTP/0.9 200 OK\r\n\r\n", id="HTTP/0.9"),
        pytest.param(b"HTTP/1.1 20 OK\r\n\r\n", id="two digits"),
        pytest.param(b"HTTP/1.1 2000 OK\r\n\r\n", id="four digits"),
        pytest.param(b"HTTP/1.1 099 OK\r\n\r\n", id="under 100"),
        pytest.param(b"HTTP/1.1 +20 OK\r\n\r\n", id="a sign"),
        pytest.param(b"ICY 200 OK\r\n\r\n", id="another protocol"),
        pytest.param(b"\r\n\r\n", id="nothing"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", id="a request"),
    ],
)
def test_a_response_that_two_readers_could_read_differently_is_broken(raw: bytes) -> None:
    with pytest.raises(BadResponse):
        parse_response_head(raw, False)


def test_how_a_body_ends_is_read_from_the_head() -> None:
    assert answer(b"Content-Length: 5").framing is Framing.LENGTH
    assert answer(b"Transfer-Encoding: CHUNKED").framing is Framing.CHUNKED
    assert answer().framing is Framing.UNTIL_CLOSE
    assert not answer().keep_alive


@pytest.mark.parametrize("start", [b"HTTP/1.1 204 No Content", b"HTTP/1.1 304 Not Modified"])
@pytest.mark.parametrize("line", [b"Content-Length: 5", b"Transfer-Encoding: chunked", b"X: y"])
def test_204_and_304_have_no_body_whatever_they_say(start: bytes, line: bytes) -> None:
    head = answer(line, start=start)
    assert head.framing is Framing.NONE
    assert head.keep_alive


def test_the_answer_to_head_keeps_its_length_and_has_no_body() -> None:
    head = answer(b"Content-Length: 500", to_head=True)
    assert (head.framing, head.content_length) == (Framing.NONE, 500)
    assert to_client(head)[b"content-length"] == [b"500"]
    assert answer(b"Transfer-Encoding: chunked", to_head=True).framing is Framing.NONE


def test_204_never_tells_a_length_and_304_may() -> None:
    assert b"content-length" not in to_client(answer(b"Content-Length: 5", start=b"HTTP/1.1 204 X"))
    assert to_client(answer(b"Content-Length: 5", start=b"HTTP/1.1 304 X"))[b"content-length"] == [b"5"]


@pytest.mark.parametrize(
    ("start", "line", "kept"),
    [
        (b"HTTP/1.1 200 OK", b"X: y", True),
        (b"HTTP/1.1 200 OK", b"Connection: close", False),
        (b"HTTP/1.1 200 OK", b"Connection: x, CLOSE", False),
        (b"HTTP/1.0 200 OK", b"X: y", False),
        (b"HTTP/1.0 200 OK", b"Connection: keep-alive", True),
        (b"HTTP/1.0 200 OK", b"Connection: keep-alive, close", False),
    ],
)
def test_whether_an_engine_s_connection_may_serve_again(start: bytes, line: bytes, kept: bool) -> None:
    assert answer(b"Content-Length: 0", line, start=start).keep_alive is kept


def test_exactly_one_date_goes_out() -> None:
    assert to_client(answer(b"Date: then"))[b"date"] == [b"then"]
    assert to_client(answer(b"Date: then", b"date: later"))[b"date"] == [b"then"]
    assert to_client(answer())[b"date"] == [b"today"]


def test_hop_by_hop_headers_of_a_response_end_here() -> None:
    head = answer(
        b"Connection: X-Private",
        b"X-Private: 1",
        b"Keep-Alive: timeout=5",
        b"Proxy-Authenticate: Basic",
        b"Trailer: x",
        b"Upgrade: h2c",
        b"X-Public: 2",
        b"Content-Length: 0",
    )
    assert set(to_client(head)) == {b"date", b"x-public", b"content-length", b"x-kvgate-backend"}


def test_an_engine_cannot_speak_in_our_name() -> None:
    head = answer(b"x-kvgate-backend: forged", b"x-kvgate-error: 1", b"x-request-id: forged", b"Content-Length: 0")
    assert to_client(head)[b"x-kvgate-backend"] == [b"b"]
    assert b"x-kvgate-error" not in to_client(head)
    assert b"x-request-id" not in to_client(head)


def test_status_and_phrase_go_on_as_they_came() -> None:
    head = answer(b"Content-Length: 0", start=b"HTTP/1.1 418 I'm a teapot")
    raw = render_response_head(head, ours=b"", date=b"d", dechunk=False, close=False)
    assert raw.startswith(b"HTTP/1.1 418 I'm a teapot\r\n")


def test_chunked_stays_chunked_except_for_http_1_0() -> None:
    head = answer(b"Transfer-Encoding: chunked")
    assert to_client(head)[b"transfer-encoding"] == [b"chunked"]
    assert b"transfer-encoding" not in to_client(head, dechunk=True)


def test_a_close_is_told() -> None:
    assert to_client(answer(), close=True)[b"connection"] == [b"close"]
    assert b"connection" not in to_client(answer(b"Content-Length: 0"))


def test_the_answer_to_an_upgrade_keeps_its_upgrade() -> None:
    head = answer(b"Connection: upgrade", b"Upgrade: websocket", start=b"HTTP/1.1 101 Switching Protocols")
    sent = to_client(head)
    assert (sent[b"connection"], sent[b"upgrade"]) == ([b"upgrade"], [b"websocket"])


# -- answers of our own -----------------------------------------------------------------------------------------------


def test_an_answer_of_ours_is_whole() -> None:
    raw = render_own_answer(
        404, b"{}", content_type=b"application/json", date=b"d", ours=b"x: 1\r\n", close=True, without_body=False
    )
    head, _, body = raw.partition(b"\r\n\r\n")
    line, headers = split_head(head + b"\r\n\r\n")
    assert line == b"HTTP/1.1 404 Not Found"
    assert headers[b"content-length"] == [b"2"]
    assert headers[b"connection"] == [b"close"]
    assert body == b"{}"


def test_to_head_our_answers_have_a_length_and_no_body() -> None:
    raw = render_own_answer(200, b"{}", content_type=b"t", date=b"d", ours=b"", close=False, without_body=True)
    assert raw.endswith(b"\r\n\r\n")
    assert b"content-length: 2\r\n" in raw
