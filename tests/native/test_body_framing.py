"""The body framer by the letter of RFC 9112 section 7: ends to the byte, and every rule rejects."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from native.body_framing import BadFraming, BodyFramer, Framing

WHOLE = b"5\r\nhello\r\n1;ext=a\r\n!\r\n0\r\nTrailer: x\r\n\r\n"


def chunked() -> BodyFramer:
    return BodyFramer(Framing.CHUNKED)


def drip(framer: BodyFramer, raw: bytes) -> None:
    for at in range(len(raw)):
        framer.feed(raw[at : at + 1])


def test_chunked_ends_at_its_last_byte_and_not_later() -> None:
    framer = chunked()
    assert framer.feed(WHOLE + b"HTTP/1.1 200 OK") == len(WHOLE)
    assert framer.done
    assert framer.payload_bytes == 6


def test_nothing_is_taken_after_the_end() -> None:
    framer = chunked()
    framer.feed(WHOLE)
    assert framer.feed(b"more") == 0


def test_length_ends_at_its_last_byte_and_not_later() -> None:
    framer = BodyFramer(Framing.LENGTH, 4)
    assert framer.feed(b"ab") == 2
    assert not framer.done
    assert framer.feed(b"cdef") == 2
    assert framer.done


@pytest.mark.parametrize("framer", [BodyFramer(Framing.NONE), BodyFramer(Framing.LENGTH, 0)])
def test_a_body_of_nothing_is_done_before_it_begins(framer: BodyFramer) -> None:
    assert framer.done
    assert framer.feed(b"x") == 0


def test_until_close_takes_everything_and_is_never_done() -> None:
    framer = BodyFramer(Framing.UNTIL_CLOSE)
    assert framer.feed(b"0\r\n\r\n") == 5
    assert not framer.done
    assert framer.until_close


def test_payload_comes_without_its_framing() -> None:
    out = bytearray(b">")
    assert chunked().feed_into(WHOLE, out) == len(WHOLE)
    assert out == b">hello!"


def test_feeding_may_start_inside_of_a_piece() -> None:
    framer = chunked()
    assert framer.feed(b"skipped" + WHOLE, 7) == len(WHOLE)
    assert framer.done


@pytest.mark.parametrize("start", [-1, 4])
def test_a_start_outside_of_the_piece_is_refused(start: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        chunked().feed(b"abc", start)
    with pytest.raises(ValueError, match="outside"):
        chunked().feed_into(b"abc", bytearray(), start)


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"\r\n", id="no size"),
        pytest.param(b"zz\r\n", id="no hex"),
        pytest.param(b"0x5\r\nhello\r\n", id="0x"),
        pytest.param(b"+5\r\nhello\r\n", id="plus"),
        pytest.param(b"-5\r\nhello\r\n", id="minus"),
        pytest.param(b" 5\r\nhello\r\n", id="space before"),
        pytest.param(b"5 \r\nhello\r\n", id="space after"),
        pytest.param(b"5_0\r\n", id="underscore"),
        pytest.param(b"5\nhello\r\n", id="bare LF after the size"),
        pytest.param(b"5\rhello\r\n", id="bare CR after the size"),
        pytest.param(b"5;a\nhello\r\n", id="bare LF in an extension"),
        pytest.param(b"5;\x00\r\nhello\r\n", id="control byte in an extension"),
        pytest.param(b"5;\x7f\r\nhello\r\n", id="DEL in an extension"),
        pytest.param(b"1000000000000000\r\n", id="16 digits"),
        pytest.param(b"0000000000000005\r\nhello\r\n", id="16 digits of a small number"),
        pytest.param(b"5\r\nhello!\r\n", id="chunk longer than its size"),
        pytest.param(b"5\r\nhello\n", id="chunk ended by bare LF"),
        pytest.param(b"5\r\nhello\r\r\n", id="chunk ended by CR CR"),
        pytest.param(b"0\r\n\rx", id="last CR without LF"),
        pytest.param(b"0\r\n folded: x\r\n\r\n", id="folded trailer"),
        pytest.param(b"0\r\n: x\r\n\r\n", id="trailer without a name"),
        pytest.param(b"0\r\na: x\n\r\n", id="bare LF in a trailer"),
        pytest.param(b"0\r\na: \x00\r\n\r\n", id="control byte in a trailer"),
        pytest.param(b"0\r\n\n", id="bare LF for the last line"),
        pytest.param(b"5;" + b"e" * 5000 + b"\r\n", id="endless extension"),
        pytest.param(b"0\r\n" + b"t: x\r\n" * 4000 + b"\r\n", id="endless trailers"),
    ],
)
def test_a_breach_of_the_chunked_grammar_is_refused_however_it_is_cut(raw: bytes) -> None:
    with pytest.raises(BadFraming):
        chunked().feed(raw)
    with pytest.raises(BadFraming):
        drip(chunked(), raw)


def test_the_largest_size_and_the_longest_extension_pass() -> None:
    framer = chunked()
    assert framer.feed(b"fffffffffffffff\r\nabc") == 20
    assert chunked().feed(b"1;" + b"e" * 4095 + b"\r\nx\r\n") == 4095 + 7


def test_a_broken_body_stays_broken_and_offers_no_place_for_another_chunk() -> None:
    framer = chunked()
    framer.feed(b"5\r\nhel")
    with pytest.raises(BadFraming):
        framer.feed(b"lo\r\nzz\r\n")  # where the client saw no more than "hel"
    assert not framer.at_boundary()
    with pytest.raises(BadFraming):
        framer.feed(b"5\r\n")
    assert not framer.done


@pytest.mark.parametrize(
    ("raw", "boundary"),
    [
        (b"", True),
        (b"5", False),
        (b"5;", False),
        (b"5\r", False),
        (b"5\r\n", False),
        (b"5\r\nhel", False),
        (b"5\r\nhello", False),
        (b"5\r\nhello\r", False),
        (b"5\r\nhello\r\n", True),
        (b"0\r\n", False),
        (b"0\r\na: b\r\n", False),
        (b"0\r\n\r\n", False),
    ],
)
def test_only_between_chunks_is_there_a_place_for_another(raw: bytes, boundary: bool) -> None:
    framer = chunked()
    framer.feed(raw)
    assert framer.at_boundary() is boundary


@pytest.mark.parametrize("framing", [Framing.LENGTH, Framing.UNTIL_CLOSE])
def test_without_chunks_there_is_no_boundary(framing: Framing) -> None:
    assert not BodyFramer(framing, 5 if framing is Framing.LENGTH else 0).at_boundary()


@pytest.mark.parametrize(
    "make",
    [
        lambda: BodyFramer(7),
        lambda: BodyFramer(-1),
        lambda: BodyFramer(Framing.LENGTH, -1),
        lambda: BodyFramer(Framing.CHUNKED, 5),
    ],
)
def test_impossible_arguments_are_refused(make: Callable[[], BodyFramer]) -> None:
    with pytest.raises(ValueError):
        make()


# -- the usage object -------------------------------------------------------------------------------------------------


def usage_in(payload: bytes) -> bytes | None:
    framer = BodyFramer(Framing.UNTIL_CLOSE, 0, True)
    framer.feed(payload)
    return framer.usage


def test_the_last_usage_object_is_kept() -> None:
    stream = b'data: {"usage":null}\n\ndata: {"usage": {"a":1}}\n\ndata: {"usage" :\t{"a":{"b":2}}}\n\ndata: [DONE]\n\n'
    assert usage_in(stream) == b'{"a":{"b":2}}'


def test_a_quoted_usage_in_the_content_is_not_taken() -> None:
    assert usage_in(rb'{"content":"\"usage\": {\"prompt_tokens\": 9}"}') is None
    assert usage_in(b'{"finish":"usage","x":{"prompt_tokens":9}}') is None


def test_braces_and_quotes_inside_of_strings_do_not_end_it() -> None:
    assert usage_in(rb'{"usage":{"a":"}\"}{","b":1}}') == rb'{"a":"}\"}{","b":1}'


def test_a_usage_object_over_its_bound_is_dropped_and_the_search_goes_on() -> None:
    large = b'{"usage":{"a":"' + b"x" * 2000 + b'"}}'
    assert usage_in(large) is None
    assert usage_in(large + b'{"usage":{"b":1}}') == b'{"b":1}'


def test_usage_is_found_across_chunks() -> None:
    framer = BodyFramer(Framing.CHUNKED, 0, True)
    framer.feed(b'5\r\n{"usa\r\n6\r\nge":{"\r\n5\r\na":1}\r\n1\r\n}\r\n0\r\n\r\n')
    assert framer.usage == b'{"a":1}'


def test_nothing_is_looked_for_unasked() -> None:
    framer = BodyFramer(Framing.UNTIL_CLOSE)
    framer.feed(b'{"usage":{"a":1}}')
    assert framer.usage is None


# -- memory -----------------------------------------------------------------------------------------------------------


def test_no_reference_is_kept_or_lost() -> None:
    data, broken, out = b"5\r\nhello\r\n", b"zz\r\n", bytearray()
    before = [sys.getrefcount(thing) for thing in (data, broken, out)]
    for _ in range(200):
        chunked().feed(data)
        chunked().feed_into(data, out)
        with pytest.raises(BadFraming):
            chunked().feed(broken)
    assert [sys.getrefcount(thing) for thing in (data, broken, out)] == before


def test_the_usage_bytes_belong_to_the_framer_alone() -> None:
    framer = BodyFramer(Framing.UNTIL_CLOSE, 0, True)
    framer.feed(b'{"usage":{"a":1}}')
    usage = framer.usage
    framer.feed(b'{"usage":{"b":2}}')
    del framer
    assert usage == b'{"a":1}'
    assert sys.getrefcount(usage) == 2
