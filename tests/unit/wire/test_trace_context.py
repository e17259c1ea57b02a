"""What of a client's traceparent is believed, as the W3C specification says."""

from __future__ import annotations

import pytest

from router.wire.trace_context import SpanContext, TraceParent, read_traceparent

TRACE, SPAN = b"4bf92f3577b34da6a3ce929d0e0e4736", b"00f067aa0ba902b7"


@pytest.mark.parametrize(("flags", "kept"), [(b"00", 0), (b"01", 1), (b"03", 3), (b"ff", 3), (b"fe", 2)])
def test_a_valid_one_is_read_and_unknown_flags_are_dropped(flags: bytes, kept: int) -> None:
    found = read_traceparent(b"00-%b-%b-%b" % (TRACE, SPAN, flags))
    assert found is not None
    assert (found.trace_id, found.span_id, found.flags) == (TRACE, SPAN, kept)


def test_a_later_version_may_have_more_behind() -> None:
    for value in (b"cc-%b-%b-01" % (TRACE, SPAN), b"cc-%b-%b-01-what-comes" % (TRACE, SPAN)):
        found = read_traceparent(value)
        assert found is not None
        assert found.trace_id == TRACE


HOSTILE = [
    b"",
    b"00",
    b"00-%b-%b" % (TRACE, SPAN),
    b"00-%b-%b-01-more" % (TRACE, SPAN),
    b"00-%b-%b-01\n" % (TRACE, SPAN),
    b" 00-%b-%b-01" % (TRACE, SPAN),
    b"ff-%b-%b-01" % (TRACE, SPAN),
    b"cc-%b-%b-01x" % (TRACE, SPAN),
    b"00-%b-%b-01" % (TRACE.upper(), SPAN),
    b"00-%b-%b-01" % (b"0" * 32, SPAN),
    b"00-%b-%b-01" % (TRACE, b"0" * 16),
    b"00-%b-%b-0g" % (TRACE, SPAN),
    b"00-%b-%b-1" % (TRACE, SPAN),
    b"00-%b0-%b-01" % (TRACE, SPAN),
    b"00_%b_%b_01" % (TRACE, SPAN),
    b"\xff" * 55,
    b"0" * 60_000,
    b"00-%b-%b-01, 00-%b-%b-01" % (TRACE, SPAN, TRACE, SPAN),
]


@pytest.mark.parametrize("value", HOSTILE, ids=range(len(HOSTILE)))
def test_an_invalid_one_counts_as_none(value: bytes) -> None:
    assert read_traceparent(value) is None


def test_no_header_is_no_parent() -> None:
    assert read_traceparent(None) is None


def test_what_is_rendered_is_read_back() -> None:
    value = TraceParent(SpanContext(TRACE, SPAN, 1), False).value
    assert value == b"00-%b-%b-01" % (TRACE, SPAN)
    found = read_traceparent(value)
    assert found is not None
    assert (found.trace_id, found.span_id, found.flags) == (TRACE, SPAN, 1)
