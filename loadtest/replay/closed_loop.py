"""How many requests a second a fleet can answer: clients that wait for each answer, until the time is over."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from loadtest.replay.trace import Trace, TraceRequest
from router.clock import Clock


def in_order(trace: Trace) -> deque[deque[TraceRequest]]:
    """The trace's sessions, each with its requests; those without one are sessions of their own."""
    sessions: dict[object, deque[TraceRequest]] = {}
    for number, request in enumerate(trace.requests):
        sessions.setdefault(number if request.session is None else request.session, deque()).append(request)
    return deque(sessions.values())


async def closed_loop(
    trace: Trace, ask: Callable[[TraceRequest], Awaitable[bool]], clock: Clock, *, clients: int, seconds: float
) -> float:
    """Answers a second. Each client takes a session and asks its requests one after another, then the next session;
    the trace begins anew when all are taken. `ask`: whether it was answered."""
    sessions = in_order(trace)
    began = clock.now()
    answered = 0

    async def client() -> None:
        nonlocal answered
        while clock.now() - began < seconds:
            if not sessions:
                sessions.extend(in_order(trace))
            for request in sessions.popleft():
                if clock.now() - began >= seconds:
                    return
                if await ask(request):  # not added to what was read before the wait
                    answered += 1

    await asyncio.gather(*(client() for _ in range(clients)))
    return answered / (clock.now() - began)
