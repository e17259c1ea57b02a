"""Spans as a collector gets them, and a collector that does not take them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from router import config as configuration
from router.backends.backend import Backend
from router.config import ConfigError, parse
from router.metrics import Metrics
from router.proxy.access_log import AccessLine
from router.proxy.trace import Trace
from router.strategies.strategy import Choice, End, Reason, RoutingRequest
from router.tracing import BATCH, QUEUE_LIMIT, OtlpTracer, read_headers, traces_url
from router.wire.http_head import RequestHead, parse_request_head
from tests.support.collector import Collector, serving_collector

TRACE, SPAN = b"4bf92f3577b34da6a3ce929d0e0e4736", b"00f067aa0ba902b7"
LINE = AccessLine(
    client=b"10.0.0.1",
    method=b"POST",
    path=b"/v1/chat/completions",
    status=200,
    ended="upstream@done",
    model="m",
    backend="e0",
    reason="prefix",
    matched=128,
    load=3,
    attempts=1,
    queue_s=0.25,
    ttft_s=0.5,
    total_s=2.0,
    bytes_out=999,
    id=b"abc",
)
CHOICE = Choice(
    RoutingRequest("m", 0.0), Backend("e0", "http://10.0.0.7:8000", "10.0.0.7", 8000), Reason.PREFIX, matched_tokens=128
)


def head(*lines: bytes) -> RequestHead:
    return parse_request_head(b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\n" + b"".join(lines) + b"\r\n")


class Numbers:
    """Random bytes that are numbers in order, so that none is given twice."""

    def __init__(self) -> None:
        self._next = count(1)

    def __call__(self, size: int) -> bytes:
        return b"".join(next(self._next).to_bytes(8, "big") for _ in range(size // 8))


def make(
    metrics: Metrics, endpoint: str, *, sample_ratio: float = 1.0, random_bytes: Any = None, headers: str | None = None
) -> OtlpTracer:
    return OtlpTracer(
        metrics,
        lambda: 1000.0,
        asyncio.get_running_loop(),
        endpoint=endpoint,
        headers=headers,
        sample_ratio=sample_ratio,
        service_name="gate",
        version="1.2",
        random_bytes=random_bytes or Numbers(),
    )


@asynccontextmanager
async def tracing(**how: Any) -> AsyncIterator[tuple[Collector, OtlpTracer, Callable[[], Any], Metrics]]:
    """A collector, a tracer that exports to it, and what ends the tracer, all spans being out."""
    metrics = Metrics()
    async with serving_collector() as collector:
        tracer = make(metrics, collector.url, **how)

        async def close(timeout_s: float = 10.0) -> None:
            await asyncio.to_thread(tracer.close, timeout_s)
            await asyncio.sleep(0)  # what the thread left for the loop

        try:
            yield collector, tracer, close, metrics
        finally:
            if tracer._thread.is_alive():
                collector.gate.set()
                await close()


def attempted(trace: Trace, end: End = End.COMPLETE, status: int | None = 200, failure: str = "") -> None:
    trace.begin_attempt(CHOICE, 998.5)
    trace.failure = failure
    trace.end_attempt(end, 1000.0, 998.75 if status == 200 else None, status, 50, 32, 7)


@pytest.mark.asyncio
async def test_an_exchange_is_a_server_span_and_each_attempt_a_client_span_below_it() -> None:
    async with tracing() as (collector, tracer, close, metrics):
        trace = tracer.begin(head(b"traceparent: 00-%b-%b-01\r\n" % (TRACE, SPAN)))
        attempted(trace, End.FAILED, None, "connect")
        attempted(trace)
        tracer.finish(trace, replace(LINE, attempts=2), 1000.0)
        await close()
        server, first, second = collector.spans
        assert metrics.spans_dropped == 0
    assert [span.kind for span in (server, first, second)] == ["server", "client", "client"]
    assert {span.trace_id for span in (server, first, second)} == {TRACE.decode()}
    assert server.parent_id == SPAN.decode()
    assert first.parent_id == second.parent_id == server.span_id
    assert len({SPAN.decode(), server.span_id, first.span_id, second.span_id}) == 4
    assert second.span_id == trace.attempts[1].span_id.decode()
    assert server.end_ns - server.start_ns == 2_000_000_000
    assert second.end_ns == server.end_ns
    assert second.start_ns - server.start_ns == 500_000_000
    assert server.resource == {"service.name": "gate", "service.version": "1.2"}
    assert {span.name for span in (server, first, second)} == {"POST /v1/chat/completions"}
    assert server.attributes == {
        "http.request.method": "POST",
        "url.path": "/v1/chat/completions",
        "http.response.status_code": 200,
        "client.address": "10.0.0.1",
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "kvgate.request_id": "abc",
        "kvgate.ended": "upstream@done",
        "kvgate.attempts": 2,
        "kvgate.queue_s": 0.25,
        "kvgate.ttft_s": 0.5,
        "kvgate.backend": "e0",
        "kvgate.reason": "prefix",
        "kvgate.matched_tokens": 128,
    }
    assert (server.error, first.error, second.error) == (False, True, False)
    assert first.attributes["error.type"] == "connect"
    assert second.attributes == {
        "http.request.method": "POST",
        "url.path": "/v1/chat/completions",
        "http.response.status_code": 200,
        "http.request.resend_count": 1,
        "server.address": "10.0.0.7",
        "server.port": 8000,
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "gen_ai.usage.input_tokens": 50,
        "gen_ai.usage.cache_read.input_tokens": 32,
        "gen_ai.usage.output_tokens": 7,
        "kvgate.backend": "e0",
        "kvgate.reason": "prefix",
        "kvgate.matched_tokens": 128,
        "kvgate.ttft_s": 0.25,
    }


@pytest.mark.asyncio
async def test_errors_are_told_by_their_kind_and_clients_make_no_names() -> None:
    lines = [
        replace(LINE, status=503, backend="", matched=None, ttft_s=None, ended="gateway@queued"),
        replace(LINE, status=404),
        replace(LINE, status=499, ended="client@await_head"),
        replace(LINE, ended="upstream@streaming"),
        replace(LINE, path=b"/made/up\n" + b"x" * 5000, method=b"PROPFIND", id=b"\xff" * 5000, model="\ud800"),
        replace(LINE, path=b"/made/up", method=b"GET", model=""),
    ]
    async with tracing() as (collector, tracer, close, metrics):
        for line in lines:
            tracer.finish(tracer.begin(head()), line, 1000.0)
        trace = tracer.begin(None)
        attempted(trace, End.COMPLETE, 429)
        attempted(trace, End.CANCELLED, None)
        attempted(trace, End.FAILED, 200)
        tracer.finish(trace, replace(LINE, model="\ud800"), 1000.0)
        await close()
        *spans, _, busy, cancelled, broken = collector.spans
        assert metrics.spans_dropped == 0
    told = [span.attributes.get("error.type") for span in spans]
    assert told == ["503", None, "client_gone", "cut_short", None, None]
    assert [span.error for span in spans] == [True, False, True, True, False, False]
    assert [span.name for span in spans[3:]] == ["POST /v1/chat/completions", "HTTP", "GET"]
    assert spans[4].attributes["http.request.method"] == "_OTHER"
    assert len(str(spans[4].attributes["url.path"])) == 256
    assert len(str(spans[4].attributes["kvgate.request_id"])) == 128
    assert "gen_ai.request.model" not in spans[4].attributes
    told = [span.attributes["error.type"] for span in (busy, cancelled, broken)]
    assert told == ["429", "cancelled", "broken_off"]


@pytest.mark.asyncio
async def test_a_client_s_flag_decides_for_its_trace_and_the_ratio_for_others() -> None:
    async with tracing(sample_ratio=0.0) as (collector, tracer, close, _):
        sampled = tracer.begin(head(b"traceparent: 00-%b-%b-01\r\n" % (TRACE, SPAN)))
        ours = tracer.begin(head())
        assert (sampled.sampled, ours.sampled, ours.context.flags) == (True, False, 0)
        tracer.finish(sampled, LINE, 1000.0)
        tracer.finish(ours, LINE, 1000.0)
        await close()
        assert [span.trace_id for span in collector.spans] == [TRACE.decode()]
    async with tracing(sample_ratio=1.0) as (collector, tracer, close, _):
        refused = tracer.begin(head(b"traceparent: 00-%b-%b-00\r\n" % (TRACE, SPAN)))
        assert not refused.sampled
        tracer.finish(refused, LINE, 1000.0)
        await close()
        assert collector.spans == []


@pytest.mark.asyncio
async def test_the_ratio_is_that_of_the_trace_ids_lower_half() -> None:
    given = iter([b"\xff" * 8 + b"\x3f" + b"\xff" * 7 + b"\x01" * 8, b"\x01" * 8 + b"\x40" + b"\x00" * 7 + b"\x01" * 8])
    async with tracing(sample_ratio=0.25, random_bytes=lambda size: next(given)) as (_, tracer, close, _metrics):
        assert [tracer.begin(head()).sampled for _ in range(2)] == [True, False]
        await close()


HOSTILE = [
    b"traceparent: nonsense\r\n",
    b"traceparent: 00-%b-%b-01\r\ntraceparent: 00-%b-%b-01\r\n" % (TRACE, SPAN, TRACE, SPAN),
    b"x: y\r\nTraceparent: 00-%b-%b-01\r\nTRACEPARENT: z\r\n" % (TRACE, SPAN),
    b"traceparent: 00-%b-%b-01\r\n" % (b"0" * 32, SPAN),
    b"traceparent: 00-%b-%b-01\r\n" % (TRACE.upper(), SPAN),
    b"traceparent: %b\r\n" % (b"f" * 30_000),
    b"traceparent:\r\n",
]


@pytest.mark.asyncio
async def test_hostile_parents_begin_a_new_trace() -> None:
    async with tracing() as (collector, tracer, close, _):
        for lines in HOSTILE:
            trace = tracer.begin(head(lines))
            assert trace.parent is None
            assert trace.sampled
            told = trace.traceparent()
            assert told is not None
            assert told.new_trace
            tracer.finish(trace, LINE, 1000.0)
        await close()
        assert all(span.parent_id == "" and span.trace_id != TRACE.decode() for span in collector.spans)
        assert len({span.trace_id for span in collector.spans}) == len(HOSTILE)


@pytest.mark.asyncio
async def test_batches_go_out_by_themselves_with_the_headers_that_were_given() -> None:
    async with tracing(headers="Authorization=Bearer%20x, X-Team = a") as (collector, tracer, _close, metrics):
        for _ in range(BATCH):  # a full batch does not wait for its time
            trace = tracer.begin(head())
            attempted(trace)
            tracer.finish(trace, LINE, 1000.0)
        await asyncio.to_thread(collector.wait, 2 * BATCH)
        assert metrics.spans_dropped == 0
    assert set(collector.paths) == {"/v1/traces"}
    assert collector.headers[0]["authorization"] == "Bearer x"
    assert collector.headers[0]["x-team"] == "a"


@pytest.mark.asyncio
async def test_spans_that_a_collector_refuses_are_counted_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async with tracing() as (collector, tracer, close, metrics):
        collector.status = 400
        with caplog.at_level(logging.INFO):
            for at in range(2 * BATCH):
                trace = tracer.begin(head())
                attempted(trace)
                tracer.finish(trace, LINE, 1000.0)
                if at == BATCH:
                    await asyncio.to_thread(collector.wait_asked)
            await close()
        assert metrics.spans_dropped == 4 * BATCH
        assert collector.spans == []
        assert len([record for record in caplog.records if "does not take spans" in record.message]) == 1


@pytest.mark.asyncio
async def test_a_dead_collector_costs_spans_alone(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    async with serving_collector() as gone:
        pass
    tracer = make(metrics, gone.url)
    with caplog.at_level(logging.CRITICAL):
        tracer.finish(tracer.begin(head()), LINE, 1000.0)
        await asyncio.to_thread(tracer.close, 0.3)
        await asyncio.to_thread(tracer._thread.join)  # it gives up when told that all is over
        await asyncio.sleep(0)
    assert metrics.spans_dropped == 1


@pytest.mark.asyncio
async def test_a_collector_that_hangs_fills_the_queue_to_its_bound_and_no_further(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with tracing() as (collector, tracer, close, metrics):
        collector.gate.clear()
        tracer.finish(tracer.begin(head()), LINE, 1000.0)
        await asyncio.to_thread(collector.wait_asked)  # the thread waits for it now
        for _ in range(QUEUE_LIMIT + 5):
            tracer.finish(tracer.begin(head()), LINE, 1000.0)
        assert len(tracer._queue) == QUEUE_LIMIT
        assert metrics.spans_dropped == 5
        with caplog.at_level(logging.CRITICAL):
            await close(0.05)  # bounded, though nothing can go out
        assert metrics.spans_dropped >= QUEUE_LIMIT + 5
        tracer.finish(tracer.begin(head()), LINE, 1000.0)  # after the end: counted, not kept
        assert metrics.spans_dropped >= QUEUE_LIMIT + 6
        collector.gate.set()
        await asyncio.to_thread(tracer._thread.join)


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("http://c:4318/", "http://c:4318/v1/traces"),
        ("https://c/otlp", "https://c/otlp/v1/traces"),
        ("http://c:4318/v1/traces", "http://c:4318/v1/traces"),
    ],
)
def test_the_endpoint_is_a_base_unless_it_names_the_path(endpoint: str, url: str) -> None:
    assert traces_url(endpoint) == url


def test_headers_are_read_as_opentelemetry_does() -> None:
    assert read_headers(None) == {}
    assert read_headers("A=1,b = x%2Cy ,,nothing,=no, c=a=b") == {"a": "1", "b": "x,y", "c": "a=b"}


def test_without_the_extra_an_endpoint_is_a_fault_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    text = b'[tracing]\notlp_endpoint = "http://127.0.0.1:4318"\n'
    assert parse(text).tracing.otlp_endpoint is not None

    def find_spec(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(configuration.importlib.util, "find_spec", find_spec)
    with pytest.raises(ConfigError) as error:
        parse(text)
    assert "tracing.otlp_endpoint" in str(error.value)
    assert "kvgate[otel]" in str(error.value)
    assert parse(b"").tracing.otlp_endpoint is None
