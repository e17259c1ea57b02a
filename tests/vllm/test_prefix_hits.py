"""The engines' own counters: placing requests by prefix finds more in their caches than taking turns."""

from __future__ import annotations

import asyncio
import random

import aiohttp
import pytest

from tests.vllm.conftest import StartGateway
from tests.vllm.engines import Engine
from tests.vllm.load import Answer, ask_chat, noise_text

pytestmark = pytest.mark.vllm

CONVERSATIONS, TURNS, AT_ONCE = 9, 5, 3
WORDS_A_TURN = 150  # about 200 tokens, six blocks


async def converse(url: str, engines: list[Engine]) -> tuple[float, list[Answer]]:
    """Seeded conversations, some at a time, in an order that favours nobody. The hit ratio, by the engines, and the
    answers of all turns after the first."""
    before = [counters(engine) for engine in engines]
    slots = asyncio.Semaphore(AT_ONCE)
    order = random.Random(11)
    # the turns of different conversations mixed, those of each in order
    schedule = [number for number in range(CONVERSATIONS) for _ in range(TURNS)]
    order.shuffle(schedule)
    histories: list[list[dict[str, str]]] = [[] for _ in range(CONVERSATIONS)]
    turns = [asyncio.Lock() for _ in range(CONVERSATIONS)]
    later: list[Answer] = []
    system = {"role": "system", "content": noise_text("system", 100)}

    async def turn(session: aiohttp.ClientSession, number: int) -> None:
        async with turns[number], slots:
            history = histories[number]
            text = noise_text(("turn", number, len(history)), WORDS_A_TURN)
            history.append({"role": "user", "content": text})
            answer = await ask_chat(session, url, [system, *history], max_tokens=4)
            assert answer.complete, answer.fault
            if len(history) > 1:
                later.append(answer)
            history.append({"role": "assistant", "content": answer.text})

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(turn(session, number) for number in schedule))
    after = [counters(engine) for engine in engines]
    hits, queries = (sum(b[i] - a[i] for a, b in zip(before, after, strict=True)) for i in range(2))
    return hits / queries, later


def counters(engine: Engine) -> tuple[float, float]:
    return engine.metric("prefix_cache_hits_total"), engine.metric("prefix_cache_queries_total")


@pytest.mark.asyncio
async def test_prefixaware_finds_more_cached_than_roundrobin(
    engines: list[Engine], start_gateway: StartGateway, figures: list[str]
) -> None:
    ratios = {}
    answers = {}
    for strategy in ("roundrobin", "prefixaware"):
        for engine in engines:
            engine.reset_prefix_cache()
        with start_gateway(strategy) as gateway:
            ratios[strategy], answers[strategy] = await converse(gateway.url, engines)
        figures.append(f"hit ratio by the engines' counters, {strategy}: {ratios[strategy]:.3f}")

    assert {answer.reason for answer in answers["roundrobin"]} == {"roundrobin"}
    assert {answer.backend for answer in answers["prefixaware"]} == {engine.name for engine in engines}
    by_prefix = sum(answer.reason == "prefix" for answer in answers["prefixaware"])
    assert by_prefix > len(answers["prefixaware"]) / 2
    # 9 conversations of 5 turns, tails equal: at most 0.67 can be found; taking turns finds about half of the turns
    assert ratios["prefixaware"] > ratios["roundrobin"] + 0.05
