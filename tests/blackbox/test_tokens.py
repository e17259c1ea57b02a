"""Tokens of engines that run: asked over HTTP, compared at the start, gone in the middle."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from router.backends.backend import Backend
from router.clock import SystemClock
from router.tokens.answers import Answer, NoTokens, TokenIds, Why
from router.tokens.tokens import Tokens, TokensSettings
from tests.support.sim_process import SimProcess, running_sim
from tests.support.tokenizer_folders import write_folder

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MODEL = "sim-8b"
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
PARTS = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [{"role": "user", "content": "Grüße, 世界!"}]}),
    (CHAT, {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PARTS}]}),
    (CHAT, {"messages": [{"role": "user", "content": "Find it"}], "tools": [TOOL]}),
    (COMPLETIONS, {"prompt": "Once upon a time"}),
]

Make = Callable[..., Tokens]


@pytest.fixture(scope="module")
def sim() -> Iterator[SimProcess]:
    with running_sim("--step-ms", "1", "--decode-ms", "1", "--enable-auto-tool-choice") as process:
        yield process


@pytest_asyncio.fixture
async def make() -> AsyncIterator[Make]:
    """Tokens that ask engines as a program with an HTTP client would."""
    loop = asyncio.get_running_loop()
    made: list[Tokens] = []
    async with aiohttp.ClientSession() as session:

        async def post(backend: Backend, path: str, body: bytes, time_limit_s: float) -> tuple[int, bytes]:
            headers = {"content-type": "application/json"}
            async with session.post(backend.url + path, data=body, headers=headers) as answer:
                return answer.status, await answer.read()

        def tokens(url: str, **settings: Any) -> Tokens:
            backend = Backend("sim", url, "127.0.0.1", 1)
            made.append(Tokens(TokensSettings(**settings), SystemClock(loop), loop, post, lambda model: [backend]))
            return made[-1]

        yield tokens
        for each in made:
            each.close()


async def settled(tokens: Tokens) -> dict[str, Any]:
    async with asyncio.timeout(20):
        while tokens.state(MODEL)["source"] in ("loading", "testing"):  # noqa: ASYNC110 - threads and the engine work
            await asyncio.sleep(0)
    return tokens.state(MODEL)


async def ask(tokens: Tokens, path: str, body: dict[str, Any], within_s: float = 20.0) -> Answer:
    answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    deadline = time.monotonic() + within_s
    question = tokens.ask(MODEL, path, json.dumps(body).encode(), deadline, answered.set_result)
    return question.answer or await answered


def prompt_of(sim: SimProcess, path: str, body: dict[str, Any]) -> list[int]:
    answer = sim.request("POST", path, {**body, "max_tokens": 1, "return_token_ids": True}).json()
    ids: list[int] = answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]
    return ids


@pytest.mark.asyncio
async def test_an_engines_ids_are_those_of_its_prompts(sim: SimProcess, make: Make) -> None:
    tokens = make(sim.url)
    tokens.learn(MODEL, "sim-8b")
    assert (await settled(tokens))["source"] == "engine"
    for path, body in BODIES:
        answer = await ask(tokens, path, body)
        assert isinstance(answer, TokenIds), answer
        assert answer.ids.tolist() == prompt_of(sim, path, body)
    assert tokens.answers == {"engine": len(BODIES)}
    assert tokens.wait.count == len(BODIES)


@pytest.mark.asyncio
async def test_another_models_folder_is_found_out_at_the_start(
    sim: SimProcess, make: Make, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = make(sim.url, folder=str(write_folder(tmp_path / "wrong")))
    tokens.learn(MODEL)
    state = await settled(tokens)
    assert (state["source"], state["check"]) == ("engine", "mismatch")
    assert "sample 'plain': token 0 is 1 here and " in state["detail"]
    assert "local tokenizing is off" in caplog.text
    path, body = BODIES[0]
    answer = await ask(tokens, path, body)
    assert isinstance(answer, TokenIds)
    assert answer.ids.tolist() == prompt_of(sim, path, body)


@pytest.mark.asyncio
async def test_an_engine_that_went_away_costs_its_deadline_at_most(make: Make) -> None:
    with running_sim() as engine:
        tokens = make(engine.url, tokenization="engine")
        tokens.learn(MODEL)
        assert isinstance(await ask(tokens, *BODIES[0]), TokenIds)
        engine.stop()
    refused = await ask(tokens, *BODIES[1])
    assert isinstance(refused, NoTokens)
    assert refused.why is Why.ENGINE
    assert "/tokenize failed" in refused.detail
    resting = await ask(tokens, *BODIES[1])
    assert isinstance(resting, NoTokens)
    assert "rests after failing" in resting.detail
    kept = await ask(tokens, *BODIES[0])
    assert isinstance(kept, TokenIds)
    assert kept.cached == len(kept.ids), "what it told before is still known"
