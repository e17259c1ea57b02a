"""Heads of HTTP messages: bytes in, values out.

A head is cut out of the stream at its CRLF CRLF and given to llhttp (strict) alone, which says whether it is valid;
native.head_lines then sorts its lines in one pass, and where the body ends is native.body_framing's to say. So every
byte offset is known, which httptools does not tell, and no Python object is made for a line that only passes.

What is hop-by-hop (RFC 9110 section 7.6.1) ends here, in both directions. All other header lines are kept as they came.
"""

from __future__ import annotations

import re
from typing import Any, Final

import httptools

from native.body_framing import Framing
from native.head_lines import HeadLines, drop_headers, find_header, sort_lines
from router.errors import RouterError, bad_request
from router.wire.trace_context import TraceParent

# Seen before a head is whole, it can only end in a refusal: why wait for the rest?
BARE_LF: Final = re.compile(rb"(?<!\r)\n")
HEAD_END: Final = b"\r\n\r\n"

_NONE: Final = Framing.NONE
_LENGTH: Final = Framing.LENGTH
_CHUNKED: Final = Framing.CHUNKED
_UNTIL_CLOSE: Final = Framing.UNTIL_CLOSE
_PLAIN_TEXT: Final = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_HOST: Final = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=:%\[\]-]+")
_TRACEPARENT_HEADER: Final = frozenset((b"traceparent",))
_TRACE_HEADERS: Final = frozenset((b"traceparent", b"tracestate"))  # a new trace has no state of the old one
_COMMON_OPTIONS: Final = frozenset(
    (b"close", b"keep-alive", b"upgrade", b"te")
)  # name no line that is not dropped anyway


class _Events:
    """llhttp's callbacks, as httptools looks them up: None is found faster than nothing, and costs as little later."""

    __slots__ = ("complete",)

    on_message_begin: Any = None
    on_url: Any = None
    on_status: Any = None
    on_header: Any = None
    on_body: Any = None
    on_message_complete: Any = None
    on_chunk_header: Any = None
    on_chunk_complete: Any = None

    def __init__(self) -> None:
        self.complete = False

    def on_headers_complete(self) -> None:
        self.complete = True


class _RequestEvents(_Events):
    __slots__ = ("target",)

    def __init__(self) -> None:
        self.complete = False
        self.target = b""

    def on_url(self, url: bytes) -> None:
        self.target += url


class _ResponseEvents(_Events):
    __slots__ = ("phrase",)

    def __init__(self) -> None:
        self.complete = False
        self.phrase = b""

    def on_status(self, phrase: bytes) -> None:
        self.phrase += phrase


class RequestHead:
    """One request's head. `kept`: the lines that pass on, hop-by-hop ones taken out."""

    __slots__ = (
        "content_length",
        "content_type",
        "expect",
        "forwarded_for",
        "framing",
        "host",
        "http_1_0",
        "keep_alive",
        "kept",
        "method",
        "path",
        "request_id",
        "target",
        "upgrade",
    )

    def __init__(self, method: bytes, target: bytes, lines: HeadLines) -> None:
        self.method = method
        self.target = target  # origin-form, once normalized
        self.path = target  # the target without its query
        self.http_1_0 = False
        self.keep_alive = True
        self.framing = _NONE
        self.content_length = 0
        self.upgrade: bytes | None = None  # the Upgrade value, where Connection lists it too
        self.kept = lines.kept
        self.host = lines.host
        self.expect = lines.expect
        self.request_id = lines.request_id
        self.forwarded_for = lines.forwarded_for
        self.content_type = lines.content_type or b""

    def header(self, name: bytes) -> bytes | None:
        """The first end-to-end header of this lower-case name."""
        return find_header(self.kept, name)

    def drop(self, names: frozenset[bytes]) -> None:
        """Keep the headers of these lower-case names back."""
        self.kept = drop_headers(self.kept, names)


class ResponseHead:
    """One response's head. `kept`: the lines that pass on; framing and connection are rendered anew."""

    __slots__ = (
        "content_length",
        "content_type",
        "event_stream",
        "framing",
        "has_date",
        "keep_alive",
        "kept",
        "phrase",
        "status",
        "upgrade",
    )

    def __init__(self, status: int, phrase: bytes, lines: HeadLines) -> None:
        self.status = status
        self.phrase = phrase
        self.kept = lines.kept
        self.framing = _UNTIL_CLOSE
        self.content_length: int | None = None  # as said, also where no body follows (HEAD, 304)
        self.content_type = lines.content_type or b""
        self.event_stream = self.content_type.startswith(b"text/event-stream")
        self.has_date = lines.date is not None
        self.keep_alive = True
        self.upgrade: bytes | None = None


class BadResponse(ValueError):
    """The engine's head breaks HTTP/1.1."""


def parse_request_head(raw: bytes) -> RequestHead:
    """The head in `raw`, which ends with its CRLF CRLF. Raises RouterError with the status that the fault deserves."""
    events = _RequestEvents()
    parser = httptools.HttpRequestParser(events)
    fault = ""
    try:
        parser.feed_data(raw)
    except httptools.HttpParserUpgrade:
        pass  # seen below; a body may still follow
    except httptools.HttpParserInvalidMethodError:
        raise bad_request("The request method is not known.", code="invalid_method")
    except httptools.HttpParserError as e:
        fault = str(e)
    try:
        lines = sort_lines(raw, True)
    except ValueError as e:
        raise _invalid(fault or str(e))
    coding = lines.transfer_encoding
    if fault and not (events.complete and coding is not None and lines.content_length < 0):
        raise _invalid(fault)
    if not events.complete:
        raise _invalid("it is no request")
    if coding is not None and coding != b"chunked":  # llhttp calls some of these a fault, others not
        raise RouterError(501, "transfer_encoding", "Of the transfer codings only `chunked` is spoken here.")
    head = RequestHead(parser.get_method(), events.target, lines)
    version = parser.get_http_version()
    if version == "1.0":
        head.http_1_0 = True
        head.keep_alive = False
        if coding is not None:
            raise _invalid("HTTP/1.0 has no transfer codings")
    elif version != "1.1":
        raise RouterError(505, "http_version", f"HTTP/{version} is not spoken here.")
    if head.method == b"CONNECT":
        raise RouterError(405, "method_not_allowed", "CONNECT is not offered.")
    if coding is not None:
        head.framing = _CHUNKED
    elif lines.content_length >= 0:
        head.framing = _LENGTH
        head.content_length = lines.content_length
    if lines.connection is not None:
        options = _options(lines.connection)
        if b"close" in options:
            head.keep_alive = False
        # Of all upgrades only websocket is passed on: to ignore the others is what RFC 9110 section 7.8 allows, and an
        # engine that takes an offer of h2c for more than that would lose the body.
        if b"upgrade" in options and lines.upgrade is not None and lines.upgrade.lower() == b"websocket":
            head.upgrade = lines.upgrade
        if not options <= _COMMON_OPTIONS:
            head.kept = drop_headers(head.kept, options)
    if lines.hosts > 1:
        raise _invalid("more than one Host")
    if head.host and not _HOST.fullmatch(head.host):
        raise _invalid("its Host is no host")
    _normalize_target(head)
    if head.host is None and not head.http_1_0:
        raise _invalid("Host is missing")
    return head


def _invalid(why: str) -> RouterError:
    return bad_request(f"The request head is not valid HTTP/1.1: {why}.", code="invalid_http")


def _options(connection: bytes) -> set[bytes]:
    return {option.strip() for option in connection.split(b",")}


def _normalize_target(head: RequestHead) -> None:
    target = head.target
    if not target.startswith(b"/") and not (target == b"*" and head.method == b"OPTIONS"):
        scheme, separator, rest = target.partition(b"://")
        if not separator or scheme.lower() not in (b"http", b"https"):
            raise _invalid("its target is neither a path nor an http URL")
        authority, slash, path = rest.partition(b"/")
        if not slash:
            authority, mark, query = rest.partition(b"?")
            path = mark + query
        if not authority or b"@" in authority or not _HOST.fullmatch(authority):
            raise _invalid("its target has no valid host")
        head.host = authority
        target = b"/" + path
    if b"#" in target:
        target = target.partition(b"#")[0] or b"/"
    head.target = target
    head.path = target.partition(b"?")[0] if b"?" in target else target


def parse_response_head(raw: bytes, to_head: bool) -> ResponseHead:
    """The head in `raw`, which ends with its CRLF CRLF. `to_head`: the answer to a HEAD request, which has no body.

    Raises BadResponse.
    """
    events = _ResponseEvents()
    parser = httptools.HttpResponseParser(events)
    try:
        parser.feed_data(raw)
    except httptools.HttpParserUpgrade:
        pass
    except httptools.HttpParserError as e:
        raise BadResponse(str(e)) from None
    if not events.complete:
        raise BadResponse("incomplete head")
    version = parser.get_http_version()
    if version not in ("1.1", "1.0"):
        raise BadResponse(f"HTTP/{version}")
    if events.phrase != b"OK" and not _PLAIN_TEXT.fullmatch(events.phrase):
        raise BadResponse("control bytes in the reason phrase")
    status = parser.get_status_code()
    if status < 100:
        raise BadResponse(f"status {status}")
    try:
        lines = sort_lines(raw, False)
    except ValueError as e:
        raise BadResponse(str(e)) from None
    head = ResponseHead(status, events.phrase, lines)
    head.keep_alive = version == "1.1"
    if lines.content_length >= 0:
        head.content_length = lines.content_length
        head.framing = _LENGTH
    if lines.transfer_encoding is not None:
        if lines.transfer_encoding != b"chunked":
            raise BadResponse("a transfer coding other than chunked")
        head.framing = _CHUNKED
    if lines.connection is not None:
        options = _options(lines.connection)
        if b"close" in options:
            head.keep_alive = False
        elif b"keep-alive" in options:
            head.keep_alive = True
        if b"upgrade" in options:
            head.upgrade = lines.upgrade
        if not options <= _COMMON_OPTIONS:
            head.kept = drop_headers(head.kept, options)
    if to_head or status < 200 or status == 204 or status == 304:
        head.framing = _NONE
    elif head.framing is _UNTIL_CLOSE:
        head.keep_alive = False
    return head


def render_request_head(
    head: RequestHead,
    *,
    body_bytes: int,
    request_id: bytes,
    peer: bytes,
    default_host: bytes,
    api_key: bytes | None,
    traceparent: TraceParent | None = None,
) -> bytes:
    """The head for an engine. `body_bytes`: the body's length; `peer`: the client's address; `api_key`: takes the
    place of the client's Authorization; `traceparent`: of the client's, which passes on untouched without it."""
    kept = head.kept
    if api_key is not None:
        kept = b"%bAuthorization: Bearer %b\r\n" % (drop_headers(kept, {b"authorization"}), api_key)
    if traceparent is not None:
        told = _TRACE_HEADERS if traceparent.new_trace else _TRACEPARENT_HEADER
        kept = b"%btraceparent: %b\r\n" % (drop_headers(kept, told), traceparent.value)
    if head.upgrade is not None:
        kept += b"Connection: Upgrade\r\nUpgrade: %b\r\n" % head.upgrade
    if body_bytes or head.framing is not _NONE:
        kept += b"Content-Length: %d\r\n" % body_bytes
    return b"%b %b HTTP/1.1\r\nHost: %b\r\n%bx-request-id: %b\r\nx-forwarded-for: %b\r\n\r\n" % (
        head.method,
        head.target,
        head.host or default_host,
        kept,
        request_id,
        peer if head.forwarded_for is None else head.forwarded_for + b", " + peer,
    )


def render_response_head(head: ResponseHead, *, ours: bytes, date: bytes, dechunk: bool, close: bool) -> bytes:
    """The head for a client. `ours`: our header lines; `date`: used where the engine sent none; `dechunk`: the body
    goes without its chunk framing (to an HTTP/1.0 client)."""
    if head.content_length is not None and head.status >= 200 and head.status != 204:
        framing = b"content-length: %d\r\n" % head.content_length
    elif head.framing is _CHUNKED and not dechunk:
        framing = b"transfer-encoding: chunked\r\n"
    else:
        framing = b""
    if not head.has_date:
        framing += b"date: %b\r\n" % date
    if head.upgrade is not None and head.status == 101:
        framing += b"connection: upgrade\r\nupgrade: %b\r\n" % head.upgrade
    elif close:
        framing += b"connection: close\r\n"
    return b"HTTP/1.1 %d %b\r\n%b%b%b\r\n" % (head.status, head.phrase, head.kept, framing, ours)


_PHRASES = {
    200: b"OK",
    400: b"Bad Request",
    401: b"Unauthorized",
    404: b"Not Found",
    405: b"Method Not Allowed",
    408: b"Request Timeout",
    413: b"Content Too Large",
    417: b"Expectation Failed",
    429: b"Too Many Requests",
    431: b"Request Header Fields Too Large",
    501: b"Not Implemented",
    502: b"Bad Gateway",
    503: b"Service Unavailable",
    504: b"Gateway Timeout",
    505: b"HTTP Version Not Supported",
}


def render_own_answer(
    status: int, body: bytes, *, content_type: bytes, date: bytes, ours: bytes, close: bool, without_body: bool
) -> bytes:
    """An answer of the gateway itself, whole. `without_body`: to a HEAD request."""
    head = b"HTTP/1.1 %d %b\r\ndate: %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n%b%b\r\n" % (
        status,
        _PHRASES.get(status, b"Status"),
        date,
        content_type,
        len(body),
        b"connection: close\r\n" if close else b"",
        ours,
    )
    return head if without_body else head + body
