"""Any way of cutting the bytes gives the same end, payload and usage; and the end is where a second reader finds it."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from native.body_framing import BadFraming, BodyFramer, Framing
from tests.support.scripted import Dechunker

USAGES = st.sampled_from(
    [
        b'{"usage":{"prompt_tokens":5,"d":{"c":1}}}',
        b'"usage"',
        b'"usage":null',
        rb'\"usage\":{"a":1}',
        b'"usage" : {"b":"}"}',
    ]
)
PAYLOADS = st.lists(st.one_of(st.binary(max_size=30), USAGES), max_size=6)
CUTS = st.lists(st.integers(min_value=0, max_value=2000), max_size=30)
EXTENSIONS = st.sampled_from([b"", b";", b";a=b", b';q="x y"'])


def cut_up(raw: bytes, cuts: list[int]) -> list[bytes]:
    marks = sorted({min(cut, len(raw)) for cut in cuts} | {0, len(raw)})
    return [raw[a:b] for a, b in pairwise(marks)] or [b""]


def read(raw: bytes, pieces: list[bytes], framing: Framing, length: int) -> tuple[int, bytes, bytes | None, bool, str]:
    framer = BodyFramer(framing, length, True)
    out = bytearray()
    used, error = 0, ""
    try:
        for piece in pieces:
            used += framer.feed_into(piece, out)
    except BadFraming as e:
        return 0, b"", None, False, str(e)
    assert framer.payload_bytes == len(out)
    return used, bytes(out), framer.usage, framer.done, error


@given(PAYLOADS, EXTENSIONS, CUTS, st.binary(max_size=20))
def test_chunked_bodies_do_not_depend_on_how_they_are_cut(
    payloads: list[bytes], extension: bytes, cuts: list[int], after: bytes
) -> None:
    body = b"".join(b"%x%b\r\n%b\r\n" % (len(p), extension, p) for p in payloads if p) + b"0\r\n\r\n"
    raw = body + after
    whole = read(raw, [raw], Framing.CHUNKED, 0)
    assert whole[0] == len(body)
    assert whole[1] == b"".join(payloads)
    assert whole[3]
    assert read(raw, cut_up(raw, cuts), Framing.CHUNKED, 0) == whole


@given(PAYLOADS, CUTS, st.integers(min_value=0, max_value=100))
def test_bodies_with_a_length_do_not_depend_on_how_they_are_cut(
    payloads: list[bytes], cuts: list[int], length: int
) -> None:
    raw = b"".join(payloads)
    whole = read(raw, [raw], Framing.LENGTH, length)
    assert whole[0] == min(length, len(raw))
    assert read(raw, cut_up(raw, cuts), Framing.LENGTH, length) == whole


@given(PAYLOADS, CUTS)
def test_usage_does_not_depend_on_how_the_payload_is_cut(payloads: list[bytes], cuts: list[int]) -> None:
    raw = b"".join(payloads)
    whole = read(raw, [raw], Framing.UNTIL_CLOSE, 0)
    assert read(raw, cut_up(raw, cuts), Framing.UNTIL_CLOSE, 0) == whole


@given(
    st.lists(
        st.sampled_from([b"5", b"\r\n", b"hello", b"0", b"\r", b"\n", b";", b"a", b": ", b"x", b" "]), max_size=14
    ),
    CUTS,
)
def test_what_is_taken_is_what_a_plain_reader_takes_and_what_is_refused_is_refused_in_any_cut(
    parts: list[bytes], cuts: list[int]
) -> None:
    raw = b"".join(parts)
    whole = read(raw, [raw], Framing.CHUNKED, 0)
    assert read(raw, cut_up(raw, cuts), Framing.CHUNKED, 0) == whole
    used, payload, _, done, error = whole
    if not error:
        plain = Dechunker()
        plain.feed(raw)
        assert plain.done is done
        if done:
            assert bytes(plain.payload) == payload
            assert len(plain.rest) == len(raw) - used
