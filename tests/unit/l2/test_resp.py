"""Commands to bytes and bytes to replies, however they are cut, and what no server should send."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.l2 import resp
from router.l2.resp import BadReply, Replies, Reply, ServerError, command, exists


def rendered(reply: Reply) -> bytes:
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, bytes):
        return b"$%d\r\n%s\r\n" % (len(reply), reply)
    assert isinstance(reply, list)
    return b"*%d\r\n%s" % (len(reply), b"".join(rendered(member) for member in reply))


leaves = st.integers(-(2**63), 2**63 - 1) | st.binary(max_size=40) | st.none()
replies = st.lists(leaves | st.lists(leaves | st.lists(leaves, max_size=3), max_size=4), max_size=6)


@given(replies, st.lists(st.integers(0, 400), max_size=12))
def test_any_way_of_cutting_the_bytes_gives_the_same_replies(expected: list[Reply], cuts: list[int]) -> None:
    wire = b"".join(rendered(reply) for reply in expected)
    reader, found, before = Replies(), [], 0
    for cut in [*sorted(cut for cut in cuts if cut < len(wire)), len(wire)]:
        found += reader.feed(wire[before:cut])
        before = cut
    assert found == expected


def test_bytes_one_by_one() -> None:
    wire = b"+OK\r\n-WRONGPASS no secret here\r\n:1\r\n$0\r\n\r\n*0\r\n*-1\r\n*2\r\n$1\r\n7\r\n*1\r\n:0\r\n"
    reader, found = Replies(), []
    for at in range(len(wire)):
        found += reader.feed(wire[at : at + 1])
    ok, error, *rest = found
    assert ok == b"OK"
    assert isinstance(error, ServerError)
    assert (error.kind, str(error)) == ("WRONGPASS", "WRONGPASS")
    assert rest == [1, b"", [], None, [b"7", [0]]]


def test_commands_are_what_the_server_reads_as_arrays_of_strings() -> None:
    assert command(b"AUTH", b"me", b"\xff\r\n") == b"*3\r\n$4\r\nAUTH\r\n$2\r\nme\r\n$3\r\n\xff\r\n\r\n"
    assert exists([b"a", b"bc"]) == command(b"EXISTS", b"a") + command(b"EXISTS", b"bc")
    assert Replies().feed(exists([b"a", b"bc"])) == [[b"EXISTS", b"a"], [b"EXISTS", b"bc"]]


@pytest.mark.parametrize(
    "wire",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        b"\r\n",
        b":\r\n",
        b":1.5\r\n",
        ":٣\r\n".encode(),
        b":12345678901234567890123\r\n",
        b"$x\r\n",
        b"$3\r\nabcd\r\n",
        b"$%d\r\n" % (resp.BULK_LIMIT + 1),
        b"*%d\r\n" % (resp.ARRAY_LIMIT + 1),
        b"*1\r\n" * (resp.DEPTH_LIMIT + 1),
        b"+" + b"x" * (resp.LINE_LIMIT + 1),
        b"+" + b"x" * (resp.LINE_LIMIT + 1) + b"\r\n",
    ],
)
def test_what_is_not_the_protocol_or_too_much_of_it_is_refused(wire: bytes) -> None:
    with pytest.raises(BadReply):
        Replies().feed(wire)


def test_the_largest_that_is_allowed_is_read() -> None:
    line, bulk = b"x" * (resp.LINE_LIMIT - 1), b"y" * resp.BULK_LIMIT
    nested = b"*1\r\n" * resp.DEPTH_LIMIT + b":1\r\n"
    assert Replies().feed(b"+" + line + b"\r\n$%d\r\n%s\r\n" % (len(bulk), bulk) + nested) == [line, bulk, [[[[1]]]]]


def test_an_array_that_is_only_announced_takes_no_memory() -> None:
    tracemalloc.start()
    try:
        Replies().feed(b"*%d\r\n" % resp.ARRAY_LIMIT)
        assert tracemalloc.get_traced_memory()[1] < 65_536
    finally:
        tracemalloc.stop()
