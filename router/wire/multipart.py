"""multipart/form-data bodies, read as far as routing needs (RFC 7578, RFC 2046 section 5.1)."""

from __future__ import annotations

import re
from dataclasses import dataclass

PARTS_LIMIT = 64
PART_HEAD_LIMIT_BYTES = 8192
BOUNDARY_LIMIT_BYTES = 200  # RFC 2046 says 70; some clients use more

# A parameter of a header: a token or a quoted string, in which a backslash escapes.
_PARAMETER = re.compile(
    rb';[ \t]*([!#$%&\'*+.^_`|~0-9A-Za-z-]+)[ \t]*=[ \t]*(?:"((?:[^"\\\r\n]|\\.)*)"|([^\s;",]+))[ \t]*'
)


class MultipartError(Exception):
    """The body is not what its content type says. The message never holds a byte of it."""


@dataclass(frozen=True, slots=True)
class Part:
    name: bytes
    value: bytes | memoryview
    is_file: bool  # it has a file name; its value is then a view into the body
    start: int  # of its value in the body


def is_multipart(content_type: bytes) -> bool:
    return content_type.split(b";", 1)[0].strip().lower() == b"multipart/form-data"


def boundary_of(content_type: bytes) -> bytes:
    """The boundary parameter of a content type; MultipartError where it is missing or no boundary."""
    boundary = _parameters(content_type).get(b"boundary", b"")
    if not 1 <= len(boundary) <= BOUNDARY_LIMIT_BYTES:
        raise MultipartError("the content type has no usable boundary")
    return boundary


def read_parts(body: bytes, boundary: bytes) -> list[Part]:
    """The parts of a body in order, at most the first PARTS_LIMIT; what follows those is not looked at.

    MultipartError for a body without its first or closing boundary, and for a part without a readable head or name.
    Linear in the body; files are not copied.
    """
    delimiter = b"\r\n--" + boundary
    parts: list[Part] = []
    if body.startswith(delimiter[2:]):
        at = len(delimiter) - 2
    else:
        at = body.find(delimiter)
        if at < 0:
            raise MultipartError("no boundary in the body")
        at += len(delimiter)
    view = memoryview(body)
    while not body.startswith(b"--", at):
        if len(parts) == PARTS_LIMIT:
            return parts
        at = _end_of_boundary_line(body, at)
        head_end = body.find(b"\r\n\r\n", at, at + PART_HEAD_LIMIT_BYTES + 4)
        if head_end < 0 or body.startswith(b"\r\n", at):
            raise MultipartError("a part has no head, or one beyond its limit")
        name, is_file = _read_head(body[at:head_end])
        value_start = head_end + 4
        value_end = body.find(delimiter, value_start)
        if value_end < 0:
            raise MultipartError("a part has no end")
        value = view[value_start:value_end]
        parts.append(Part(name, value if is_file else bytes(value), is_file, value_start))
        at = value_end + len(delimiter)
    return parts


def _end_of_boundary_line(body: bytes, at: int) -> int:
    end = body.find(b"\r\n", at, at + PART_HEAD_LIMIT_BYTES)
    if end < 0 or body[at:end].strip(b" \t"):
        raise MultipartError("a boundary is followed by something else")
    return end + 2


def _read_head(head: bytes) -> tuple[bytes, bool]:
    """Name of the part, and whether it is a file."""
    for line in head.split(b"\r\n"):
        header, colon, value = line.partition(b":")
        if colon and header.strip().lower() == b"content-disposition":
            kind, semicolon, rest = value.partition(b";")
            parameters = _parameters(semicolon + rest)
            if kind.strip().lower() == b"form-data" and b"name" in parameters:
                return parameters[b"name"], b"filename" in parameters or b"filename*" in parameters
    raise MultipartError("a part has no name")


def _parameters(header: bytes) -> dict[bytes, bytes]:
    """The parameters of a header value, keys in lower case, the first of equal ones."""
    found: dict[bytes, bytes] = {}
    at = header.find(b";")
    while at >= 0 and (match := _PARAMETER.match(header, at)):
        name, quoted, token = match.groups()
        value = token if quoted is None else re.sub(rb"\\(.)", rb"\1", quoted)
        found.setdefault(name.lower(), value)
        at = match.end()
    return found
