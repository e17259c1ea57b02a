"""Clients that wait for their answers: how many a second a fleet gives them."""

from __future__ import annotations

import asyncio

from loadtest.replay.closed_loop import closed_loop, in_order
from loadtest.replay.trace import Trace, TraceRequest
from router.clock import VirtualClock


def trace(*sessions: str | None) -> Trace:
    requests = tuple(TraceRequest(float(at), 10, 1, (at,), session) for at, session in enumerate(sessions))
    return Trace("t", 16, requests)


def test_a_session_is_asked_in_its_order_and_without_one_each_stands_alone() -> None:
    order = in_order(trace("a", None, "a", "b", None))
    assert [[int(request.at_s) for request in session] for session in order] == [[0, 2], [1], [3], [4]]


def test_each_client_waits_for_its_answer_and_only_answers_count() -> None:
    clock = VirtualClock()
    waiting: list[asyncio.Future[None]] = []
    asked: list[int] = []

    async def ask(request: TraceRequest) -> bool:
        asked.append(int(request.at_s))
        answer = asyncio.get_running_loop().create_future()
        waiting.append(answer)
        await answer
        return int(request.at_s) != 3  # that one fails

    async def run() -> float:
        loop = asyncio.create_task(closed_loop(trace("a", "a", "b", "b"), ask, clock, clients=2, seconds=2.5))
        for _ in range(3):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert len(waiting) <= 2
            clock.advance(1.0)
            while waiting:
                waiting.pop().set_result(None)
        return await loop

    rate = asyncio.run(run())
    assert sorted(asked[:4]) == [0, 1, 2, 3]
    assert len(asked) == 6  # and the trace began anew
    assert rate == 5 / 3.0
