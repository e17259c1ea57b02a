"""Token ids made here are those of a real engine: of its /tokenize and of the prompts that it then computes."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from router.backends.backend import Backend
from router.clock import SystemClock
from router.tokens.answers import Answer, TokenIds
from router.tokens.engine import engine_question
from router.tokens.local import LocalTokenizer
from router.tokens.model_folder import ModelFolder, read_model_folder
from router.tokens.question import ChatPrompt, read_prompt
from router.tokens.segment_cache import SegmentCache
from router.tokens.tokens import Tokens, TokensSettings
from tests.vllm.engines import MODEL, Engine, ask
from tests.vllm.load import noise_text

pytestmark = pytest.mark.vllm

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

TOOL = {
    "type": "function",
    "function": {
        "parameters": {"type": "object", "properties": {"z": {"default": 1.50}, "a": {"enum": ["ü<&>"]}}},
        "strict": True,
        "name": "find",
    },
}
CALL = {
    "index": 0,
    "type": "function",
    "id": "call_1",
    "function": {
        "name": "find",
        "arguments": '{"z": 1e3, "a": "\\u00fc \\ud83d\\ude00", "n": 12345678901234567890123}',
    },
}
TOOL_TURNS: list[dict[str, Any]] = [
    {"role": "system", "content": [{"type": "text", "text": " Use the <|im_end|> tools. "}]},
    {"role": "user", "content": "Find it\n\n"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": t} for t in ("one", "two")]},
    {"role": "assistant", "content": "", "tool_calls": [], "reasoning_content": "\nhm\n"},
]
PARTS = [
    {"type": "text", "text": "One.", "cache_control": {"type": "ephemeral"}},
    "Two.",
    {"text": " 3", "type": "text", "more": 1},
]
HELLO = {"role": "user", "content": "Hello", "name": "joe"}
OPEN = {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "Well, the "}]}
CHATS: dict[str, dict[str, Any]] = {
    "plain": {"messages": [HELLO]},
    "tools": {"messages": TOOL_TURNS, "tools": [TOOL]},
    "parts": {"messages": [{"role": "user", "content": PARTS}]},
    "unicode": {"messages": [{"role": "user", "content": "Grüße 世界 Привет 👩‍🚀 \u0000 \ufeff\u2028 e\u0301 ﬁ"}]},
    "documents": {"messages": [HELLO], "documents": [{"title": "t", "text": "x"}], "reasoning_effort": "low"},
    "arguments": {"messages": [HELLO], "chat_template_kwargs": {"enable_thinking": False}, "add_special_tokens": True},
    "no generation prompt": {"messages": [HELLO], "add_generation_prompt": False},
    "continued": {"messages": [HELLO, OPEN], "add_generation_prompt": False, "continue_final_message": True},
}
TEMPLATES: dict[str, str | None] = {
    "the model's own": None,
    "all of a message": """{% for m in messages %}<|im_start|>{{ m | tojson }}
{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson(indent=2) }}{% endif %}<|im_end|>
{% endfor %}{{ tools | tojson }}{{ documents | tojson }}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    "all of a part": """{% for m in messages %}<|im_start|>{{ m.role }}
    {%- for part in m.content %}{{ part | tojson }}{{ part.text }}{% endfor %}{{ m.content | tojson }}<|im_end|>
{% endfor %}{{ enable_thinking }}{{ reasoning_effort ~ '/' ~ 3 ~ eos_token }}""",
    "a macro": """{% macro show(it) %}{% if it is string %}{{ it }}{% else %}{% for c in it %}[{{ c.text }}]{% endfor %}
{% endif %}{% endmacro %}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}{% set ns = namespace(n=0) %}
{%- for m in rest %}{% set ns.n = ns.n + loop.index0 %}
    {% if m.role == 'assistant' %}{% generation %}{{ show(m.content) }}<|im_end|>{% endgeneration %}
    {% else %}{{ m.role | upper }}: {{ show(m.content) | indent(2) }} {{ m.name }}{% endif %}
{%- if loop.index0 > 8 %}{% break %}{% endif %}{% endfor %}
{{- strftime_now('%Y') }}{{ '%05d' % ns.n }}{{ '=' * 20 }}{{ rest | map(attribute='role') | list }}""",
}


@pytest.fixture(scope="module")
def folder(vllm_environment: Path) -> ModelFolder:
    return read_model_folder(str(vllm_environment / "kvgate-model"))


def prompt_of(engine: Engine, path: str, body: dict[str, Any]) -> list[int]:
    """The ids that the engine computed for this request."""
    request = {"model": MODEL, "max_tokens": 1, "return_token_ids": True, **body}
    status, text = ask(f"{engine.url}{path}", "POST", request, timeout_s=60)
    assert status == 200, text
    answer = json.loads(text)
    ids = answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]
    assert isinstance(ids, list)
    return ids


@pytest.mark.parametrize("template", TEMPLATES)
def test_chats_have_the_engines_ids(engines: list[Engine], folder: ModelFolder, template: str) -> None:
    source = TEMPLATES[template]
    used = folder if source is None else dataclasses.replace(folder, templates={"default": source})
    given = {} if source is None else {"chat_template": source}
    local = LocalTokenizer(used, SegmentCache(1 << 20))
    for name, body in CHATS.items():
        prompt = read_prompt(CHAT, json.dumps(body).encode())
        assert isinstance(prompt, ChatPrompt)
        ids = local.tokenize(prompt).ids.tolist()
        assert ids == prompt_of(engines[0], CHAT, body | given), name
        question = json.loads(engine_question(MODEL, prompt)) | given
        status, text = ask(f"{engines[0].url}/tokenize", "POST", question)
        assert (status, json.loads(text)["tokens"]) == (200, ids), name


@pytest.mark.parametrize("prompt", ["Once upon a time,\n\n", ["first <|im_end|> ", "second"], [5, 6, 7]])
def test_completions_have_the_engines_ids(engines: list[Engine], folder: ModelFolder, prompt: Any) -> None:
    body = {"prompt": prompt}
    local = LocalTokenizer(folder, SegmentCache(1 << 20))
    ids = local.tokenize(read_prompt(COMPLETIONS, json.dumps(body).encode())).ids.tolist()
    assert ids == prompt_of(engines[0], COMPLETIONS, body)


@pytest_asyncio.fixture
async def tokens(engines: list[Engine], folder: ModelFolder) -> AsyncIterator[Tokens]:
    loop = asyncio.get_running_loop()
    backend = Backend("engine", engines[0].url, "127.0.0.1", 1)
    async with aiohttp.ClientSession() as session:

        async def post(asked: Backend, path: str, body: bytes, time_limit_s: float) -> tuple[int, bytes]:
            headers = {"content-type": "application/json"}
            async with session.post(asked.url + path, data=body, headers=headers) as answer:
                return answer.status, await answer.read()

        settings = TokensSettings(folder=str(folder.path), engine_time_limit_s=30.0)
        made = Tokens(settings, SystemClock(loop), loop, post, lambda model: [backend])
        yield made
        made.close()


async def ids_from(tokens: Tokens, body: dict[str, Any]) -> TokenIds:
    answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    question = tokens.ask(MODEL, CHAT, json.dumps(body).encode(), time.monotonic() + 60, answered.set_result)
    answer = question.answer or await answered
    assert isinstance(answer, TokenIds), answer
    return answer


@pytest.mark.asyncio
async def test_a_verified_folder_follows_long_conversations(
    engines: list[Engine], tokens: Tokens, figures: list[str]
) -> None:
    tokens.learn(MODEL)
    async with asyncio.timeout(60):
        while (state := tokens.state(MODEL))["source"] in ("loading", "testing"):  # noqa: ASYNC110 - threads work on it
            await asyncio.sleep(0)
    assert (state["source"], state["check"]) == ("local", "verified"), state
    history: list[dict[str, Any]] = [{"role": "system", "content": noise_text("system", 150)}, *TOOL_TURNS[1:]]
    found = whole = 0
    for turn in range(8):
        history.append({"role": "user", "content": [{"type": "text", "text": noise_text(("turn", turn), 120)}]})
        body = {"messages": history, "tools": [TOOL]}
        answer = await ids_from(tokens, body)
        real = await asyncio.to_thread(prompt_of, engines[0], CHAT, body)
        assert answer.ids.tolist() == real
        if turn:
            found += answer.cached
            whole += len(real)
        history.append({"role": "assistant", "content": noise_text(("answer", turn), 60)})
    figures.append(f"tokens: {found / whole:.0%} of the ids of growing conversations came from the cache")
    assert found > 0.7 * whole
