"""What an exchange notes for its spans, at times that it keeps anyway: ids when it and its attempts begin, and what
each attempt came to. Spans are made of it when it has ended, beside the request path (tracing.py)."""

from __future__ import annotations

import os
from typing import Protocol

from router.proxy.access_log import AccessLine
from router.strategies.strategy import Choice, End
from router.wire.http_head import RequestHead
from router.wire.trace_context import SpanContext, TraceParent


class AttemptSpan:
    """One attempt. Names and numbers only: what holds a prompt's hashes must not wait for a collector."""

    __slots__ = (
        "backend",
        "cached_tokens",
        "completion_tokens",
        "end",
        "ended_at",
        "failure",
        "first_byte_at",
        "host",
        "matched_tokens",
        "number",
        "port",
        "prompt_tokens",
        "reason",
        "span_id",
        "started_at",
        "status",
    )

    def __init__(self, span_id: bytes, number: int, choice: Choice, started_at: float) -> None:
        self.span_id = span_id
        self.number = number  # 1 is the first try
        self.backend = choice.backend.name
        self.host = choice.backend.host
        self.port = choice.backend.port
        self.reason: str = choice.reason.value
        self.matched_tokens = choice.matched_tokens  # predicted
        self.started_at = self.ended_at = started_at  # clock.now(), as all times here
        self.first_byte_at: float | None = None
        self.end: End | None = None
        self.status: int | None = None
        self.failure = ""  # as retries_total counts it; empty where nothing failed
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.completion_tokens: int | None = None


class Trace:
    """One exchange's place in a trace. `parent` is the client's span, None where the trace begins here."""

    __slots__ = ("attempts", "context", "ended_at", "failure", "parent", "sampled")

    def __init__(self, context: SpanContext, parent: SpanContext | None, sampled: bool) -> None:
        self.context = context
        self.parent = parent
        self.sampled = sampled
        self.attempts: list[AttemptSpan] = []
        self.failure = ""  # of the attempt under way
        self.ended_at = 0.0  # clock.now()

    def begin_attempt(self, choice: Choice, now: float) -> None:
        self.failure = ""
        if self.sampled:
            self.attempts.append(AttemptSpan(os.urandom(8).hex().encode(), len(self.attempts) + 1, choice, now))

    def traceparent(self) -> TraceParent | None:
        """What the engine is told: its parent is the attempt. None: what the client said passes on, as nothing is
        recorded here."""
        context = self.context
        if self.attempts:
            return TraceParent(
                SpanContext(context.trace_id, self.attempts[-1].span_id, context.flags), self.parent is None
            )
        return TraceParent(context, True) if self.parent is None else None

    def end_attempt(
        self,
        end: End,
        now: float,
        first_byte_at: float | None,
        status: int | None,
        prompt_tokens: int | None,
        cached_tokens: int | None,
        completion_tokens: int | None,
    ) -> None:
        if not self.attempts:
            return
        span = self.attempts[-1]
        span.end = end
        span.ended_at = now
        span.first_byte_at = first_byte_at
        span.status = status
        span.failure = self.failure
        span.prompt_tokens = prompt_tokens
        span.cached_tokens = cached_tokens
        span.completion_tokens = completion_tokens


class Tracer(Protocol):
    """Neither call waits for anything."""

    def begin(self, head: RequestHead | None) -> Trace:
        """A request began; None where its head could not be read."""
        ...

    def finish(self, trace: Trace, line: AccessLine, ended_at: float) -> None:
        """Its exchange ended as `line` says."""
        ...
