"""An engine killed in mid-load costs nobody an answer that had not begun; what had begun is never passed off as whole.

Two ways to die: the API server (connections break, then are refused), and the EngineCore behind it (a plain request
gets a 500, a stream an error event, then connections are refused).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp
import pytest

from tests.vllm.conftest import StartGateway
from tests.vllm.engines import Engine, eventually
from tests.vllm.gateway import Gateway
from tests.vllm.load import Answer, ask_chat, noise_text

pytestmark = pytest.mark.vllm

CLIENTS, REQUESTS_A_CLIENT = 12, 4
WORDS = 250  # about 330 tokens, never cached: a third of a second of prefill
TOKENS = 24


async def closed_loop(url: str, kill: Callable[[], None], may_kill: Callable[[], bool]) -> list[Answer]:
    """Clients that ask one request after another, half of them streaming; the engine is killed in the middle."""
    answers: list[Answer] = []

    async def client(session: aiohttp.ClientSession, number: int) -> None:
        for turn in range(REQUESTS_A_CLIENT):
            messages = [{"role": "user", "content": noise_text(("death", number, turn), WORDS)}]
            answers.append(await ask_chat(session, url, messages, max_tokens=TOKENS, stream=number % 2 == 0))

    async def killer() -> None:
        ready = lambda: len(answers) >= CLIENTS // 2 and may_kill()  # noqa: E731
        await asyncio.to_thread(eventually, ready, 60, "the engine to kill is in the middle of its work")
        kill()

    timeout = aiohttp.ClientTimeout(total=180)
    async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as tasks:
        tasks.create_task(killer())
        for number in range(CLIENTS):
            tasks.create_task(client(session, number))
    return answers


@pytest.mark.asyncio
@pytest.mark.parametrize("dies", ["api_server", "engine_core"])
async def test_engine_killed_in_mid_load_loses_no_request_that_had_not_begun(
    dies: str, engines: list[Engine], start_gateway: StartGateway, figures: list[str]
) -> None:
    victim, survivor = engines
    kill = victim.kill_api_server if dies == "api_server" else victim.kill_engine_core
    with start_gateway("prefixaware") as gateway:
        # four of at most six requests there: at least one does not stream, so its answer has not begun
        answers = await closed_loop(gateway.url, kill, lambda: gateway.in_flight(victim) >= 4)
        assert_nothing_lost(answers)
        retries = gateway.metric("retries_total")
        assert retries > 0, "nothing was in the engine when it died: the test shows nothing"
        assert_only_survivor_serves(gateway, victim, survivor)
    cut = sum(not answer.complete for answer in answers)
    figures.append(
        f"SIGKILL of the {dies.replace('_', ' ')}: {len(answers)} requests, 0 lost, {retries:.0f} repeated elsewhere, "
        f"{cut} streams cut in the middle and told so"
    )


def assert_nothing_lost(answers: list[Answer]) -> None:
    assert len(answers) == CLIENTS * REQUESTS_A_CLIENT
    assert [answer for answer in answers if answer.lost] == []
    silent_halves = [answer for answer in answers if not answer.complete and not answer.fault]
    assert silent_halves == []


def assert_only_survivor_serves(gateway: Gateway, victim: Engine, survivor: Engine) -> None:
    eventually(lambda: gateway.metric("backend_up", backend=victim.name) == 0, 15, "the dead engine is out of rotation")
    assert gateway.metric("backend_up", backend=survivor.name) == 1
    eventually(lambda: gateway.metric("in_flight") == 0, 5, "nothing is in flight any more")
