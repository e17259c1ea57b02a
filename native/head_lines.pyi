"""The header lines of a head that llhttp has found valid, sorted in one pass: what passes on, and what is read here."""

from typing import final

@final
class HeadLines:
    """`kept` is one run of bytes: the lines that pass on, as they came, each with its CRLF.

    Left out of it, in both directions: connection, keep-alive, proxy-connection, proxy-authenticate,
    proxy-authorization, te, trailer, transfer-encoding, upgrade, http2-settings, content-length, x-request-id; of a
    request also host, expect and x-forwarded-for; of a response also x-kvgate-*. The values of those that are read are
    the attributes below, without white space around them; None where the head has no such line. Repeated lines of a
    list-valued header are joined by ", ".
    """

    kept: bytes
    content_length: int  # -1: none
    connection: bytes | None  # lower case
    transfer_encoding: bytes | None  # lower case
    upgrade: bytes | None
    host: bytes | None
    hosts: int  # how many host lines
    expect: bytes | None  # lower case
    request_id: bytes | None  # the first
    forwarded_for: bytes | None
    content_type: bytes | None  # stays in `kept` too
    date: bytes | None  # stays in `kept` too, the first alone

def sort_lines(head: bytes, of_request: bool) -> HeadLines:
    """`head` runs from its start line to its empty line. Costs about 0.1 us a line.

    ValueError for what llhttp would have refused: a line without a colon or CRLF, a length that is no number.
    """

def find_header(kept: bytes, name: bytes) -> bytes | None:
    """The value of the first line of this name (given in lower case) in a `kept`."""

def drop_headers(kept: bytes, names: frozenset[bytes] | set[bytes]) -> bytes:
    """`kept` without the lines of these names (given in lower case)."""
