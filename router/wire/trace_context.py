"""W3C trace context: https://www.w3.org/TR/trace-context/. Bytes in, values out; ids are lower-case hexadecimal."""

from __future__ import annotations

import re
from typing import Final

_TRACEPARENT: Final = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
SAMPLED: Final = 1
_KNOWN_FLAGS: Final = 3  # sampled, random trace id


class SpanContext:
    """One span as its children name it."""

    __slots__ = ("flags", "span_id", "trace_id")

    def __init__(self, trace_id: bytes, span_id: bytes, flags: int) -> None:
        self.trace_id = trace_id
        self.span_id = span_id
        self.flags = flags


class TraceParent:
    """The line for an engine. `new_trace`: it was begun here, and a client's tracestate belongs to another one."""

    __slots__ = ("new_trace", "value")

    def __init__(self, context: SpanContext, new_trace: bool) -> None:
        self.value = b"00-%b-%b-%02x" % (context.trace_id, context.span_id, context.flags)
        self.new_trace = new_trace


def read_traceparent(value: bytes | None) -> SpanContext | None:
    """None for no value, and for what the specification calls invalid: then a new trace begins."""
    if value is None:
        return None
    found = _TRACEPARENT.fullmatch(value)
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == b"ff" or (version == b"00" and more is not None):
        return None
    if trace_id == b"0" * 32 or span_id == b"0" * 16:
        return None
    return SpanContext(trace_id, span_id, int(flags, 16) & _KNOWN_FLAGS)
