"""Traces: what exchanges noted becomes spans, and goes to a collector over OTLP/HTTP, in a thread of its own.

The loop only appends to a bounded queue. A collector that is slow, dead or hostile costs spans, which are counted, and
nothing else. Names of attributes are those of OpenTelemetry's semantic conventions (HTTP 1.x, GenAI), ours begin with
`kvgate.`. No span holds a body, a header or a query. docs/tracing.md is for operators.

Needs the extra kvgate[otel], which is imported when a tracer is made and at no other time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

from router.metrics import Metrics
from router.proxy.access_log import ID_LIMIT, PATH_LIMIT, AccessLine, plain
from router.proxy.trace import AttemptSpan, Trace
from router.strategies.strategy import End
from router.wire.http_head import RequestHead
from router.wire.paths import PathKind, path_kind
from router.wire.trace_context import SAMPLED, SpanContext, read_traceparent

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

logger = logging.getLogger(__name__)

QUEUE_LIMIT: Final = 8192  # exchanges that ended and are not exported; some 2 KB each
BATCH: Final = 128  # exchanges in one request to the collector
EXPORT_INTERVAL_S: Final = 1.0
EXPORT_TIMEOUT_S: Final = 5.0  # of one batch, repeats included
SWITCH_INTERVAL_S: Final = 0.0005  # how long the exporting thread may keep the loop waiting; Python's own is 5 ms

_METHODS: Final = frozenset(
    (b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"CONNECT", b"OPTIONS", b"TRACE", b"PATCH", b"QUERY")
)
_OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}


class OtlpTracer:
    """Implements proxy.trace.Tracer. `endpoint` is the collector's: /v1/traces is added to one without a path.
    `headers` as OTEL_EXPORTER_OTLP_HEADERS has them: name=value, percent-encoded, with commas between. ImportError:
    the extra is not installed."""

    def __init__(
        self,
        metrics: Metrics,
        clock_now: Callable[[], float],
        loop: asyncio.AbstractEventLoop,
        *,
        endpoint: str,
        headers: str | None,
        sample_ratio: float,
        service_name: str,
        version: str,
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._metrics = metrics
        self._now = clock_now
        self._loop = loop
        self._random_bytes = random_bytes
        # of the trace id's lower half, as OpenTelemetry's TraceIdRatioBased has it: all services of one ratio agree
        self._sampled_below = round(sample_ratio * 2**64)
        self._queue: deque[tuple[Trace, AccessLine, int]] = deque()
        self._wake = Event()
        self._stop_at: float | None = None
        self._failing = False
        self._render = SpanRenderer(service_name, version)
        self._export, self._shutdown = _otlp_exporter(endpoint, headers)
        self._thread = Thread(target=self._run, name="spans", daemon=True)
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        self._thread.start()

    # -- on the loop --------------------------------------------------------------------------------------------------

    def begin(self, head: RequestHead | None) -> Trace:
        parent = None
        if head is not None:
            value = head.header(b"traceparent")
            if value is not None and (b"\n" + head.kept.lower()).count(b"\ntraceparent:") == 1:  # two are no parent
                parent = read_traceparent(value)
        if parent is not None:
            if not parent.flags & SAMPLED:
                return Trace(parent, parent, False)
            span_id = self._random_bytes(8).hex().encode()
            return Trace(SpanContext(parent.trace_id, span_id, parent.flags), parent, True)
        ids = self._random_bytes(24)
        sampled = int.from_bytes(ids[8:16], "big") < self._sampled_below
        text = ids.hex().encode()
        return Trace(SpanContext(text[:32], text[32:], SAMPLED if sampled else 0), None, sampled)

    def finish(self, trace: Trace, line: AccessLine, ended_at: float) -> None:
        if not trace.sampled:
            return
        if len(self._queue) >= QUEUE_LIMIT or self._stop_at is not None:
            self._metrics.spans_dropped += 1 + len(trace.attempts)
            return
        # what the clock's zero is in Unix time: now, less what has passed since
        zero_ns = time.time_ns() - round(self._now() * 1e9)
        trace.ended_at = ended_at
        self._queue.append((trace, line, zero_ns))
        if len(self._queue) == BATCH:
            self._wake.set()

    def close(self, timeout_s: float = 2.0) -> None:
        """Export what is left, for so long; the rest is dropped. Blocks."""
        self._stop_at = time.monotonic() + timeout_s
        self._wake.set()
        self._thread.join(timeout_s)
        self._shutdown()  # wakes a thread that waits for its next try
        left = sum(1 + len(trace.attempts) for trace, _, _ in self._queue)
        if left:
            self._metrics.spans_dropped += left
            logger.warning("%d spans were dropped at the end: the collector did not take them in time", left)

    # -- in the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            self._wake.wait(EXPORT_INTERVAL_S)
            self._wake.clear()
            while self._queue:
                stop_at = self._stop_at
                if stop_at is not None and time.monotonic() >= stop_at:
                    return
                self._export_batch()
            if self._stop_at is not None:
                return

    def _export_batch(self) -> None:
        spans: list[ReadableSpan] = []
        batch = [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]
        lost = sum(1 + len(trace.attempts) for trace, _, _ in batch)
        try:
            for trace, line, zero_ns in batch:
                spans += self._render(trace, line, zero_ns)
                time.sleep(0)  # the loop goes first
            if self._export(spans):
                lost = 0
        except Exception:
            logger.exception("spans could not be exported")
        if lost:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._count_dropped, lost)
        if bool(lost) is not self._failing:
            self._failing = bool(lost)
            if lost:
                logger.warning("the collector of traces does not take spans; they are dropped and counted")
            else:
                logger.info("the collector of traces takes spans again")

    def _count_dropped(self, spans: int) -> None:
        self._metrics.spans_dropped += spans


def _otlp_exporter(
    endpoint: str, headers: str | None
) -> tuple[Callable[[list[ReadableSpan]], bool], Callable[[], object]]:
    """What exports a batch (False: it was not taken) and what ends that."""
    import requests
    from opentelemetry.exporter.otlp.proto.http import Compression
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import SpanExportResult

    # It tells of each failure; we tell when failing begins and ends, and count.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    session = requests.Session()
    session.trust_env = False  # no proxy and no password file that our configuration does not name
    exporter = OTLPSpanExporter(
        endpoint=traces_url(endpoint),
        headers=read_headers(headers),
        timeout=EXPORT_TIMEOUT_S,
        compression=Compression.NoCompression,
        session=session,
    )

    def export(spans: list[ReadableSpan]) -> bool:
        return exporter.export(spans) is SpanExportResult.SUCCESS

    return export, exporter.shutdown


def traces_url(endpoint: str) -> str:
    """As OTEL_EXPORTER_OTLP_ENDPOINT is read: a base, unless it names the path of traces itself."""
    if urlsplit(endpoint).path.endswith("/v1/traces"):
        return endpoint
    return endpoint.rstrip("/") + "/v1/traces"


def read_headers(text: str | None) -> dict[str, str]:
    found = {}
    for pair in (text or "").split(","):
        name, equals, value = pair.partition("=")
        if equals and name.strip():
            found[name.strip().lower()] = unquote(value.strip())
    return found


class SpanRenderer:
    """From one exchange's notes to its spans: a server span, and a client span for each attempt."""

    def __init__(self, service_name: str, version: str) -> None:
        from opentelemetry import trace as api
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._api = api
        self._span = ReadableSpan
        self._resource = Resource({"service.name": service_name, "service.version": version})
        self._scope = InstrumentationScope("kvgate", version)

    def __call__(self, trace: Trace, line: AccessLine, zero_ns: int) -> list[ReadableSpan]:
        """`zero_ns`: the clock's zero in Unix time."""
        api = self._api
        context = self._context(trace.context)
        parent = self._context(trace.parent, is_remote=True) if trace.parent is not None else None
        path = plain(line.path[:PATH_LIMIT]).decode()
        known = path_kind(line.method, line.path) is PathKind.INFERENCE
        method = line.method.decode("ascii", "replace") if line.method in _METHODS else "_OTHER"
        name = f"{method} {path}" if known else ("HTTP" if method == "_OTHER" else method)
        model: dict[str, Any] = {}
        if known:
            if path in _OPERATIONS:
                model["gen_ai.operation.name"] = _OPERATIONS[path]
            if line.model:
                model["gen_ai.request.model"] = line.model.encode("utf-8", "replace").decode()
        spans = [
            self._make(
                name,
                api.SpanKind.SERVER,
                context,
                parent,
                {
                    "http.request.method": method,
                    "url.path": path,
                    "http.response.status_code": line.status,
                    "client.address": plain(line.client).decode(),
                    **model,
                    **_served(line),
                },
                _server_error(line),
                zero_ns + round((trace.ended_at - line.total_s) * 1e9),
                zero_ns + round(trace.ended_at * 1e9),
            )
        ]
        for attempt in trace.attempts:
            spans.append(
                self._make(
                    name,
                    api.SpanKind.CLIENT,
                    self._context(SpanContext(trace.context.trace_id, attempt.span_id, trace.context.flags)),
                    context,
                    {"http.request.method": method, "url.path": path, **model, **_attempted(attempt)},
                    _attempt_error(attempt),
                    zero_ns + round(attempt.started_at * 1e9),
                    zero_ns + round(attempt.ended_at * 1e9),
                )
            )
        return spans

    def _context(self, context: SpanContext, is_remote: bool = False) -> Any:
        return self._api.SpanContext(
            int(context.trace_id, 16), int(context.span_id, 16), is_remote, self._api.TraceFlags(context.flags)
        )

    def _make(
        self,
        name: str,
        kind: Any,
        context: Any,
        parent: Any,
        attributes: Mapping[str, Any],
        error: str,
        start_ns: int,
        end_ns: int,
    ) -> ReadableSpan:
        status = self._api.Status(self._api.StatusCode.ERROR if error else self._api.StatusCode.UNSET)
        return self._span(
            name=name,
            context=context,
            parent=parent,
            resource=self._resource,
            attributes={**attributes, "error.type": error} if error else attributes,
            kind=kind,
            status=status,
            start_time=start_ns,
            end_time=end_ns,
            instrumentation_scope=self._scope,
        )


def _served(line: AccessLine) -> dict[str, Any]:
    """What ours says of the exchange."""
    told: dict[str, Any] = {
        "kvgate.request_id": plain(line.id[:ID_LIMIT]).decode(),
        "kvgate.ended": line.ended,
        "kvgate.attempts": line.attempts,
        "kvgate.queue_s": line.queue_s,
    }
    if line.backend:
        told |= {"kvgate.backend": line.backend, "kvgate.reason": line.reason}
        told["kvgate.matched_tokens"] = line.matched or 0
    if line.ttft_s is not None:
        told["kvgate.ttft_s"] = line.ttft_s
    return told


def _attempted(attempt: AttemptSpan) -> dict[str, Any]:
    told: dict[str, Any] = {
        "server.address": attempt.host,
        "server.port": attempt.port,
        "kvgate.backend": attempt.backend,
        "kvgate.reason": attempt.reason,
        "kvgate.matched_tokens": attempt.matched_tokens,
    }
    if attempt.number > 1:
        told["http.request.resend_count"] = attempt.number - 1
    if attempt.status is not None:
        told["http.response.status_code"] = attempt.status
    if attempt.first_byte_at is not None:
        told["kvgate.ttft_s"] = attempt.first_byte_at - attempt.started_at
    for name, tokens in (
        ("gen_ai.usage.input_tokens", attempt.prompt_tokens),
        ("gen_ai.usage.cache_read.input_tokens", attempt.cached_tokens),
        ("gen_ai.usage.output_tokens", attempt.completion_tokens),
    ):
        if tokens is not None:
            told[name] = tokens
    return told


def _server_error(line: AccessLine) -> str:
    """Of a server the client's faults are no errors; an answer cut short is one, whatever its status was."""
    if line.status >= 500:
        return str(line.status)
    if line.ended.endswith("@streaming"):
        return "client_gone" if line.ended.startswith("client") else "cut_short"
    return "client_gone" if line.status == 499 else ""


def _attempt_error(attempt: AttemptSpan) -> str:
    """A status of 400 and more is an error of a client span; else what retries_total would call it."""
    if attempt.status is not None and attempt.status >= 400:
        return str(attempt.status)
    if attempt.failure:
        return attempt.failure
    if attempt.end is End.FAILED:
        return "broken_off"
    return "cancelled" if attempt.end is not End.COMPLETE else ""
