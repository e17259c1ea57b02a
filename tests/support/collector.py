"""A collector of traces: takes OTLP over HTTP on a free port, and keeps each span as it came."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

WAIT_S = 20.0  # for what has to happen; only a test that fails waits so long


@dataclass
class CollectedSpan:
    name: str
    kind: str  # server | client
    trace_id: str
    span_id: str
    parent_id: str  # empty: the root
    start_ns: int
    end_ns: int
    error: bool
    attributes: dict[str, str | int | float]
    resource: dict[str, str | int | float]


@dataclass
class Collector:
    """`status` is what it answers; it answers nothing while `gate` is not set."""

    url: str = ""
    status: int = 200
    spans: list[CollectedSpan] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    changed: threading.Condition = field(default_factory=threading.Condition)

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.read()
        with self.changed:
            self.paths.append(request.path)
            self.headers.append({name.lower(): value for name, value in request.headers.items()})
            self.changed.notify_all()
        await self.gate.wait()
        if self.status == 200:
            found = read_spans(body)
            with self.changed:
                self.spans += found
                self.changed.notify_all()
        return web.Response(
            status=self.status,
            body=ExportTraceServiceResponse().SerializeToString(),
            content_type="application/x-protobuf",
        )

    def wait(self, count: int) -> list[CollectedSpan]:
        """At least so many spans. Not for the collector's own loop."""
        with self.changed:
            self.changed.wait_for(lambda: len(self.spans) >= count, WAIT_S)
            assert len(self.spans) >= count, self.spans
            return list(self.spans)

    def wait_asked(self, count: int = 1) -> None:
        with self.changed:
            self.changed.wait_for(lambda: len(self.paths) >= count, WAIT_S)
            assert len(self.paths) >= count


def read_spans(body: bytes) -> list[CollectedSpan]:
    request = ExportTraceServiceRequest()
    request.ParseFromString(body)
    return [
        CollectedSpan(
            span.name,
            {Span.SPAN_KIND_SERVER: "server", Span.SPAN_KIND_CLIENT: "client"}[span.kind],
            span.trace_id.hex(),
            span.span_id.hex(),
            span.parent_span_id.hex(),
            span.start_time_unix_nano,
            span.end_time_unix_nano,
            span.status.code == Status.STATUS_CODE_ERROR,
            {item.key: _value(item.value) for item in span.attributes},
            {item.key: _value(item.value) for item in resource_spans.resource.attributes},
        )
        for resource_spans in request.resource_spans
        for scope_spans in resource_spans.scope_spans
        for span in scope_spans.spans
    ]


def _value(value: object) -> str | int | float:
    return getattr(value, value.WhichOneof("value"))  # type: ignore[attr-defined, no-any-return]


@asynccontextmanager
async def serving_collector() -> AsyncIterator[Collector]:
    """On the running loop."""
    collector = Collector()
    collector.gate.set()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", collector.handle)
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    collector.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield collector
    finally:
        collector.gate.set()
        await runner.cleanup()


@contextmanager
def running_collector() -> Iterator[Collector]:
    """On a loop in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    context = serving_collector()
    try:
        yield asyncio.run_coroutine_threadsafe(context.__aenter__(), loop).result(WAIT_S)
    finally:
        asyncio.run_coroutine_threadsafe(context.__aexit__(None, None, None), loop).result(WAIT_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
