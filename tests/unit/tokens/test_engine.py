from __future__ import annotations

import asyncio
import json
from array import array

import pytest

from router.backends.backend import Backend
from router.clock import VirtualClock
from router.tokens.answers import Refused, Why
from router.tokens.engine import EngineTokenizer, NoTokenizeRoute, engine_question, read_answer
from router.tokens.question import CHAT_PATH, ChatPrompt, TextPrompt, read_prompt

pytestmark = pytest.mark.asyncio


class Engines:
    """Answers by the backend's name: (status, body), or an exception."""

    def __init__(self, *names, **options):
        self.backends = [Backend(name, f"http://{name}:1", name, 1) for name in names]
        self.answers = dict.fromkeys(names, (200, b'{"tokens": [1]}'))
        self.asked = []
        self.clock = VirtualClock()
        self.tokenizer = EngineTokenizer(self.post, lambda model: self.backends, self.clock, **options)

    async def post(self, backend, path, body, time_limit_s):
        self.asked.append(backend.name)
        answer = self.answers[backend.name]
        if isinstance(answer, asyncio.Event):
            await answer.wait()
            return 200, b"{}"
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def refused(self):
        with pytest.raises(Refused) as caught:
            await self.tokenizer.ask("m", b"{}")
        return caught.value.why


async def test_the_least_loaded_backend_by_weight_is_asked():
    engines = Engines("a", "b", "c")
    for backend, load, weight in zip(engines.backends, (4, 6, 3), (1.0, 2.0, 0.5), strict=True):
        backend.in_flight, backend.weight = load, weight
    assert await engines.tokenizer.ask("m", b"{}") == b'{"tokens": [1]}'
    assert engines.asked == ["b"]


@pytest.mark.parametrize("failure", [(500, b""), (503, b""), (429, b""), (401, b""), (307, b""), OSError("gone")])
async def test_a_backend_that_fails_rests_longer_each_time(failure):
    engines = Engines("a")
    engines.answers["a"] = failure
    for rest_s in (1, 2, 4, 8, 16, 32, 60, 60):
        assert await engines.refused() is Why.ENGINE
        asked = len(engines.asked)
        engines.clock.advance(rest_s - 0.01)
        assert await engines.refused() is Why.ENGINE
        assert len(engines.asked) == asked, "it rests"
        engines.clock.advance(0.02)
    engines.answers["a"] = (200, b"ok")
    assert await engines.tokenizer.ask("m", b"{}") == b"ok"
    engines.answers["a"] = failure
    await engines.refused()
    engines.clock.advance(1.01)
    engines.answers["a"] = (200, b"ok")
    assert await engines.tokenizer.ask("m", b"{}") == b"ok", "success had ended its record"


async def test_another_backend_answers_while_one_rests():
    engines = Engines("a", "b")
    engines.answers["a"] = (500, b"")
    assert await engines.refused() is Why.ENGINE
    await engines.tokenizer.ask("m", b"{}")
    await engines.tokenizer.ask("m", b"{}")
    assert engines.asked == ["a", "b", "b"]


async def test_engines_without_the_route_are_said_to_be_so():
    engines = Engines("a", "b")
    engines.answers["a"] = engines.answers["b"] = (404, b'{"detail":"Not Found"}')
    assert await engines.refused() is Why.ENGINE
    with pytest.raises(NoTokenizeRoute):
        await engines.tokenizer.ask("m", b"{}")
    with pytest.raises(NoTokenizeRoute):
        await engines.tokenizer.ask("m", b"{}")
    assert engines.asked == ["a", "b"]
    engines.tokenizer.forget_backend("b")
    engines.answers["b"] = (200, b"ok")
    assert await engines.tokenizer.ask("m", b"{}") == b"ok"


async def test_a_prompt_that_the_engine_refuses_is_no_fault_of_the_engine():
    engines = Engines("a")
    engines.answers["a"] = (400, b"")
    assert await engines.refused() is Why.SHAPE
    assert await engines.refused() is Why.SHAPE
    assert engines.tokenizer.failed == 0


async def test_an_unknown_model_is_not_a_missing_route():
    engines = Engines("a")
    engines.answers["a"] = (404, b'{"error":{"message":"The model `m` does not exist."}}')
    assert await engines.refused() is Why.ENGINE
    assert await engines.refused() is Why.ENGINE


async def test_open_questions_are_bounded():
    engines = Engines("a", limit=2, time_limit_s=60.0)
    gate = engines.answers["a"] = asyncio.Event()
    held = [asyncio.ensure_future(engines.tokenizer.ask("m", b"{}")) for _ in range(2)]
    await asyncio.sleep(0)  # both begin
    assert len(engines.asked) == 2
    assert await engines.refused() is Why.BUSY
    gate.set()
    assert await asyncio.gather(*held) == [b"{}", b"{}"]
    assert engines.tokenizer.open == 0


async def test_an_engine_that_does_not_answer_is_a_failure():
    engines = Engines("a", time_limit_s=0.001)
    engines.answers["a"] = asyncio.Event()
    assert await engines.refused() is Why.ENGINE
    assert (engines.tokenizer.open, engines.tokenizer.failed) == (0, 1)


async def test_no_backend():
    assert await Engines().refused() is Why.ENGINE


async def test_the_question_of_a_chat():
    body = {
        "messages": [{"role": "assistant", "content": "x", "reasoning_content": "y"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "reasoning_effort": "low",
        "add_generation_prompt": False,
    }
    prompt = read_prompt(CHAT_PATH, json.dumps(body).encode())
    assert isinstance(prompt, ChatPrompt)
    assert json.loads(engine_question("m", prompt)) == {
        "model": "m",
        "messages": [{"role": "assistant", "content": "x", "reasoning_content": "y", "reasoning": "y"}],
        "tools": [{"type": "function", "function": {"name": "f", "description": None, "parameters": None}}],
        "chat_template_kwargs": {"reasoning_effort": "low", "enable_thinking": True},
        "add_generation_prompt": False,
        "continue_final_message": False,
        "add_special_tokens": False,
    }


async def test_the_question_of_a_completion():
    assert json.loads(engine_question("m", TextPrompt("é"))) == {
        "model": "m",
        "prompt": "é",
        "add_special_tokens": True,
    }


async def test_ids_are_read():
    assert read_answer(b'{"count": 2, "max_model_len": 9, "tokens": [7, 4294967295]}') == array("I", [7, 2**32 - 1])


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{}", b'{"tokens": 5}', b'{"tokens": [true]}', b'{"tokens": [-1]}', b'{"tokens": [4294967296]}'],
)
async def test_an_answer_that_is_none(body):
    with pytest.raises(Refused) as caught:
        read_answer(body)
    assert caught.value.why is Why.ENGINE


async def test_an_answer_without_tokens_is_a_prompt_that_engines_refuse():
    with pytest.raises(Refused) as caught:
        read_answer(b'{"count": 0, "tokens": []}')
    assert caught.value.why is Why.SHAPE
