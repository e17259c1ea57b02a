"""Heads of HTTP messages: bytes in, values out.

A head is cut out of the stream at its CRLF CRLF and given to llhttp (strict) alone; where the body ends is
native.body_framing's to say. So every byte offset is known, which httptools does not tell.

What is hop-by-hop (RFC 9110 section 7.6.1) ends here, in both directions. All other header lines are kept as they came.
"""

from __future__ import annotations

import re

import httptools

from native.body_framing import Framing
from router.errors import RouterError, bad_request

HEAD_END = b"\r\n\r\n"

# Header lines that never pass, whatever Connection says; those with a meaning for us are read on the way.
_HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
    )
)
_REQUEST_SPECIAL = _HOP_BY_HOP | {b"host", b"content-length", b"expect", b"x-request-id", b"x-forwarded-for"}
_RESPONSE_SPECIAL = _HOP_BY_HOP | {
    b"content-length",
    b"content-type",
    b"date",
    b"x-request-id",
    b"x-kvgate-backend",
    b"x-kvgate-reason",
    b"x-kvgate-matched",
    b"x-kvgate-error",
}
_PLAIN_TEXT = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_HOST = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=:%\[\]-]+")


class _HeadParser:
    """What llhttp's callbacks have in common for requests and responses."""

    __slots__ = ("complete", "kept", "lines", "special")

    def __init__(self, special: frozenset[bytes]) -> None:
        self.special = special
        self.kept: list[tuple[bytes, bytes]] = []  # (lower-case name, line with its CRLF)
        self.lines: list[tuple[bytes, bytes]] = []  # special ones: (lower-case name, value)
        self.complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        lower = name.lower()
        if lower in self.special:
            self.lines.append((lower, value.strip()))
        else:
            self.kept.append((lower, b"%b: %b\r\n" % (name, value)))

    def on_headers_complete(self) -> None:
        self.complete = True


class _RequestParser(_HeadParser):
    __slots__ = ("target",)

    def __init__(self) -> None:
        super().__init__(_REQUEST_SPECIAL)
        self.target = b""

    def on_url(self, url: bytes) -> None:
        self.target += url


class _ResponseParser(_HeadParser):
    __slots__ = ("phrase",)

    def __init__(self) -> None:
        super().__init__(_RESPONSE_SPECIAL)
        self.phrase = b""

    def on_status(self, phrase: bytes) -> None:
        self.phrase += phrase


class RequestHead:
    """One request's head, with everything hop-by-hop already taken out of `kept`."""

    __slots__ = (
        "content_length",
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

    def __init__(self) -> None:
        self.method = b""
        self.target = b""  # origin-form
        self.path = b""  # the target without its query
        self.http_1_0 = False
        self.host: bytes | None = None
        self.kept: list[tuple[bytes, bytes]] = []
        self.framing = Framing.NONE
        self.content_length = 0
        self.keep_alive = True
        self.expect: bytes | None = None
        self.upgrade: bytes | None = None  # the Upgrade value, where Connection lists it too
        self.request_id: bytes | None = None
        self.forwarded_for: bytes | None = None

    def header(self, name: bytes) -> bytes | None:
        """The first end-to-end header of this lower-case name."""
        for lower, line in self.kept:
            if lower == name:
                return line[len(name) + 1 : -2].strip()
        return None


class ResponseHead:
    """One response's head. `content_type` and `date` stand apart because they are looked at."""

    __slots__ = (
        "content_length",
        "content_type",
        "date",
        "framing",
        "keep_alive",
        "kept",
        "phrase",
        "status",
        "upgrade",
    )

    def __init__(self, status: int) -> None:
        self.status = status
        self.phrase = b""
        self.kept: list[tuple[bytes, bytes]] = []
        self.framing = Framing.UNTIL_CLOSE
        self.content_length: int | None = None  # as said, also where no body follows (HEAD, 304)
        self.content_type = b""
        self.date: bytes | None = None
        self.keep_alive = True
        self.upgrade: bytes | None = None

    @property
    def event_stream(self) -> bool:
        return self.content_type.startswith(b"text/event-stream")


class BadResponse(ValueError):
    """The engine's head breaks HTTP/1.1."""


def parse_request_head(raw: bytes) -> RequestHead:
    """The head in `raw`, which ends with its CRLF CRLF. Raises RouterError with the status that the fault deserves."""
    seen = _RequestParser()
    parser = httptools.HttpRequestParser(seen)
    try:
        parser.feed_data(raw)
    except httptools.HttpParserUpgrade:
        pass  # seen below; a body may still follow
    except httptools.HttpParserInvalidMethodError:
        raise bad_request("The request method is not known.", code="invalid_method")
    except httptools.HttpParserError as e:
        if not any(name == b"transfer-encoding" for name, _ in seen.lines) or any(
            name == b"content-length" for name, _ in seen.lines
        ):
            raise bad_request(f"The request head is not valid HTTP/1.1: {e}", code="invalid_http")
        # llhttp refuses codings of which the last is not chunked; which status that is, is decided below
    head = RequestHead()
    head.method = parser.get_method()
    head.target = seen.target
    _read_request_lines(head, seen)
    if not seen.complete:
        raise bad_request("The request head is not valid HTTP/1.1.", code="invalid_http")
    version = parser.get_http_version()
    if version == "1.0":
        head.http_1_0 = True
        head.keep_alive = False
        if head.framing is Framing.CHUNKED:
            raise bad_request("Transfer-Encoding in an HTTP/1.0 request.", code="invalid_http")
    elif version != "1.1":
        raise RouterError(505, "http_version", f"HTTP/{version} is not spoken here.")
    if head.method == b"CONNECT":
        raise RouterError(405, "method_not_allowed", "CONNECT is not offered.")
    _normalize_target(head)
    if head.host is None and not head.http_1_0:
        raise bad_request("The Host header is missing.", code="invalid_http")
    return head


def _read_request_lines(head: RequestHead, seen: _RequestParser) -> None:
    head.kept = seen.kept
    connection = b""
    upgrade = None
    coding = None
    for name, value in seen.lines:
        if name == b"host":
            if head.host is not None:
                raise bad_request("More than one Host header.", code="invalid_http")
            if value and not _HOST.fullmatch(value):
                raise bad_request("The Host header is not a host.", code="invalid_http")
            head.host = value
        elif name == b"content-length":
            head.content_length = int(value)  # llhttp saw to it that it is one number, once, without a coding
            head.framing = Framing.LENGTH
        elif name == b"connection":
            connection = connection + b"," + value.lower() if connection else value.lower()
        elif name == b"transfer-encoding":
            coding = value.lower() if coding is None else coding + b", " + value.lower()
        elif name == b"x-request-id":
            head.request_id = head.request_id or value
        elif name == b"x-forwarded-for":
            head.forwarded_for = value if head.forwarded_for is None else head.forwarded_for + b", " + value
        elif name == b"expect":
            head.expect = value.lower()
        elif name == b"upgrade":
            upgrade = value
    if coding is not None:
        if coding != b"chunked":
            raise RouterError(501, "transfer_encoding", "Of the transfer codings only `chunked` is spoken here.")
        head.framing = Framing.CHUNKED
    if connection:
        options = {option.strip() for option in connection.split(b",")}
        if b"close" in options:
            head.keep_alive = False
        if b"upgrade" in options:
            head.upgrade = upgrade
        head.kept = _without(head.kept, options)


def _normalize_target(head: RequestHead) -> None:
    target = head.target
    if not target.startswith(b"/") and target != b"*":
        scheme, separator, rest = target.partition(b"://")
        if not separator or scheme.lower() not in (b"http", b"https"):
            raise bad_request("The request target is neither a path nor an http URL.", code="invalid_http")
        authority, slash, path = rest.partition(b"/")
        if not slash:
            authority, mark, query = rest.partition(b"?")
            path = mark + query
        if not authority or b"@" in authority or not _HOST.fullmatch(authority):
            raise bad_request("The request target has no valid host.", code="invalid_http")
        head.host = authority
        target = b"/" + path
    target = target.partition(b"#")[0] or b"/"
    head.target = target
    head.path = target.partition(b"?")[0]


def parse_response_head(raw: bytes, to_head: bool) -> ResponseHead:
    """The head in `raw`, which ends with its CRLF CRLF. `to_head`: the answer to a HEAD request, which has no body.

    Raises BadResponse.
    """
    seen = _ResponseParser()
    parser = httptools.HttpResponseParser(seen)
    try:
        parser.feed_data(raw)
    except httptools.HttpParserUpgrade:
        pass
    except httptools.HttpParserError as e:
        raise BadResponse(str(e)) from None
    if not seen.complete:
        raise BadResponse("incomplete head")
    version = parser.get_http_version()
    if version not in ("1.1", "1.0"):
        raise BadResponse(f"HTTP/{version}")
    if not _PLAIN_TEXT.fullmatch(seen.phrase):
        raise BadResponse("control bytes in the reason phrase")
    head = ResponseHead(parser.get_status_code())
    head.phrase = seen.phrase
    head.kept = seen.kept
    head.keep_alive = version == "1.1"
    connection = b""
    upgrade = coding = None
    for name, value in seen.lines:
        if name == b"content-length":
            head.content_length = int(value)
            head.framing = Framing.LENGTH
        elif name == b"content-type":
            head.content_type = value
        elif name == b"transfer-encoding":
            coding = value.lower() if coding is None else coding + b", " + value.lower()
        elif name == b"date":
            head.date = head.date or value
        elif name == b"connection":
            connection = connection + b"," + value.lower() if connection else value.lower()
        elif name == b"upgrade":
            upgrade = value
    if coding is not None:
        if coding != b"chunked":
            raise BadResponse("a transfer coding other than chunked")
        head.framing = Framing.CHUNKED
    if connection:
        options = {option.strip() for option in connection.split(b",")}
        if b"close" in options:
            head.keep_alive = False
        elif b"keep-alive" in options:
            head.keep_alive = True
        if b"upgrade" in options:
            head.upgrade = upgrade
        head.kept = _without(head.kept, options)
    if to_head or head.status in (204, 304) or head.status < 200:
        if head.framing is not Framing.LENGTH and head.framing is not Framing.CHUNKED:
            head.content_length = None
        head.framing = Framing.NONE
    elif head.framing is Framing.UNTIL_CLOSE:
        head.keep_alive = False
    return head


def _without(kept: list[tuple[bytes, bytes]], options: set[bytes]) -> list[tuple[bytes, bytes]]:
    """`kept` without the headers that Connection names as hop-by-hop."""
    if options <= {b"close", b"keep-alive", b"upgrade", b"te"}:
        return kept
    return [line for line in kept if line[0] not in options]


def render_request_head(
    head: RequestHead,
    *,
    body_bytes: int,
    request_id: bytes,
    peer: bytes,
    default_host: bytes,
    api_key: bytes | None,
) -> bytes:
    """The head for an engine. `body_bytes`: the body's length; `peer`: the client's address."""
    parts = [head.method, b" ", head.target, b" HTTP/1.1\r\nHost: ", head.host or default_host, b"\r\n"]
    if api_key is None:
        parts.extend([line for _, line in head.kept])
    else:
        parts.extend([line for name, line in head.kept if name != b"authorization"])
        parts.append(b"Authorization: Bearer %b\r\n" % api_key)
    if head.upgrade is not None:
        parts.append(b"Connection: Upgrade\r\nUpgrade: %b\r\n" % head.upgrade)
    if head.framing is not Framing.NONE or body_bytes:
        parts.append(b"Content-Length: %d\r\n" % body_bytes)
    forwarded = peer if head.forwarded_for is None else head.forwarded_for + b", " + peer
    parts.append(b"x-request-id: %b\r\nx-forwarded-for: %b\r\n\r\n" % (request_id, forwarded))
    return b"".join(parts)


def render_response_head(head: ResponseHead, *, ours: bytes, date: bytes, dechunk: bool, close: bool) -> bytes:
    """The head for a client. `ours`: our header lines; `date`: used where the engine sent none; `dechunk`: the body
    goes without its chunk framing (to an HTTP/1.0 client)."""
    parts = [b"HTTP/1.1 %d %b\r\n" % (head.status, head.phrase)]
    parts.append(b"date: %b\r\n" % (head.date or date))
    parts.extend([line for _, line in head.kept])
    if head.content_type:
        parts.append(b"content-type: %b\r\n" % head.content_type)
    if head.content_length is not None and head.status >= 200 and head.status != 204:
        parts.append(b"content-length: %d\r\n" % head.content_length)
    elif head.framing is Framing.CHUNKED and not dechunk:
        parts.append(b"transfer-encoding: chunked\r\n")
    if head.upgrade is not None and head.status == 101:
        parts.append(b"connection: upgrade\r\nupgrade: %b\r\n" % head.upgrade)
    elif close:
        parts.append(b"connection: close\r\n")
    parts.append(ours)
    parts.append(b"\r\n")
    return b"".join(parts)


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
