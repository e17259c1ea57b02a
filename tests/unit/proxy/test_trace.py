"""What the engine is told of a trace, and what an exchange notes for its spans, in the whole core on virtual time."""

from __future__ import annotations

import pytest

from router.proxy.access_log import AccessLine
from router.proxy.trace import Trace
from router.strategies.strategy import End
from router.wire.http_head import RequestHead
from router.wire.trace_context import SpanContext, read_traceparent
from tests.support.scripted import Received, request
from tests.support.world import World
from tests.unit.proxy.test_exchange import BODY, DONE, EVENT, JSON, ask, only_answer, reset, stream, whole, world_of

TRACE, SPAN, OURS = b"4bf92f3577b34da6a3ce929d0e0e4736", b"00f067aa0ba902b7", b"a" * 16
PARENT = b"00-%b-%b-01" % (TRACE, SPAN)


class NotingTracer:
    """Believes every traceparent that is valid; `sampled` is the verdict on the others."""

    def __init__(self, sampled: bool = True) -> None:
        self.sampled = sampled
        self.begun: list[Trace] = []
        self.finished: list[tuple[Trace, AccessLine, float]] = []

    def begin(self, head: RequestHead | None) -> Trace:
        parent = read_traceparent(head.header(b"traceparent")) if head is not None else None
        if parent is None:
            trace = Trace(SpanContext(TRACE, OURS, int(self.sampled)), None, self.sampled)
        elif parent.flags:
            trace = Trace(SpanContext(parent.trace_id, OURS, parent.flags), parent, True)
        else:
            trace = Trace(parent, parent, False)
        self.begun.append(trace)
        return trace

    def finish(self, trace: Trace, line: AccessLine, ended_at: float) -> None:
        self.finished.append((trace, line, ended_at))


def chat(*headers: bytes) -> bytes:
    return request(b"POST", b"/v1/chat/completions", JSON, *headers, body=BODY)


def traced(world: World, tracer: NotingTracer) -> World:
    world.services.tracer = tracer
    return world


def received(world: World) -> list[Received]:
    return [each for engine in world.engines.values() for each in engine.received]


@pytest.mark.parametrize("value", [PARENT, b"00-%b-%b-00" % (TRACE, SPAN), b"nonsense", b"cc-x"])
def test_without_a_tracer_a_client_s_trace_passes_untouched(value: bytes) -> None:
    world = world_of(whole())
    ask(world, chat(b"TraceParent: " + value, b"tracestate: a=1", b"tracestate: b=2"))
    (seen,) = received(world)
    assert seen.headers[b"traceparent"] == [value]
    assert seen.headers[b"tracestate"] == [b"a=1", b"b=2"]


def test_without_a_tracer_no_trace_is_begun() -> None:
    world = world_of(whole())
    ask(world, chat())
    assert b"traceparent" not in received(world)[0].headers


def test_the_engine_s_parent_is_the_attempt() -> None:
    tracer = NotingTracer()
    world = traced(world_of(whole()), tracer)
    ask(world, chat(b"traceparent: " + PARENT, b"tracestate: a=1"))
    (seen,) = received(world)
    (attempt,) = tracer.begun[0].attempts
    assert seen.headers[b"traceparent"] == [b"00-%b-%b-01" % (TRACE, attempt.span_id)]
    assert seen.headers[b"tracestate"] == [b"a=1"]
    assert attempt.span_id not in (SPAN, OURS)


def test_a_client_that_is_not_sampled_passes_untouched() -> None:
    tracer = NotingTracer()
    world = traced(world_of(whole()), tracer)
    value = b"00-%b-%b-00" % (TRACE, SPAN)
    ask(world, chat(b"traceparent: " + value, b"tracestate: a=1"))
    (seen,) = received(world)
    assert seen.headers[b"traceparent"] == [value]
    assert seen.headers[b"tracestate"] == [b"a=1"]
    assert tracer.begun[0].attempts == []


@pytest.mark.parametrize("sampled", [True, False])
def test_a_new_trace_replaces_what_was_invalid_and_its_state(sampled: bool) -> None:
    tracer = NotingTracer(sampled)
    world = traced(world_of(whole()), tracer)
    ask(world, chat(b"traceparent: 00-zz-zz-01", b"Traceparent: " + PARENT[:-1], b"tracestate: a=1"))
    (seen,) = received(world)
    span_id = tracer.begun[0].attempts[0].span_id if sampled else OURS
    assert seen.headers[b"traceparent"] == [b"00-%b-%b-0%d" % (TRACE, span_id, sampled)]
    assert b"tracestate" not in seen.headers


def test_each_attempt_is_noted_with_what_became_of_it() -> None:
    tracer = NotingTracer()
    world = traced(world_of(reset, whole(503), stream(EVENT, DONE)), tracer)
    answer = only_answer(ask(world, chat()))
    assert answer.status == 200
    (finished,) = tracer.finished
    trace, line, ended_at = finished
    assert line is world.access_lines[-1]
    first, second, third = trace.attempts
    assert (first.failure, first.status, first.end, first.first_byte_at) == ("upstream_lost", None, End.FAILED, None)
    assert (second.failure, second.status, second.end) == ("busy", 503, End.COMPLETE)
    assert (third.failure, third.status, third.end) == ("", 200, End.COMPLETE)
    assert third.first_byte_at is not None
    times = [first.started_at, first.ended_at, second.started_at, second.ended_at, third.started_at]
    assert times == sorted(times)
    assert third.started_at <= third.first_byte_at <= third.ended_at <= ended_at
    assert [a.number for a in trace.attempts] == [1, 2, 3]
    assert [a.backend for a in trace.attempts] == ["e0", "e1", "e2"]
    assert [a.reason for a in trace.attempts] == ["roundrobin", "retry", "retry"]
    told = [seen.headers[b"traceparent"][0].split(b"-")[2] for seen in received(world)]
    assert told == [a.span_id for a in trace.attempts]


def test_an_exchange_is_finished_once_however_it_ends() -> None:
    tracer = NotingTracer()
    world = traced(world_of(lambda connection, request: None), tracer)
    client = ask(world, chat())
    client.abort()
    world.run(1.0)
    assert len(tracer.finished) == 1
    (attempt,) = tracer.finished[0][0].attempts
    assert (attempt.end, attempt.status) == (End.CANCELLED, None)
    ask(world, b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
    ask(world, b"BROKEN\r\n\r\n")
    assert len(tracer.finished) == len(tracer.begun) == 3
