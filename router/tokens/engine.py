"""The engine's own tokenizer: POST /tokenize to the least loaded backend of the model."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import orjson

from router.backends.backend import Backend
from router.clock import Clock
from router.tokens.answers import EMPTY, Refused, Why
from router.tokens.question import ChatPrompt, TextPrompt

TOKENIZE_PATH: Final = "/tokenize"
ANSWER_LIMIT_BYTES: Final = 16 * 1024 * 1024  # a million ids take 8 MB
FIRST_REST_S: Final = 1.0
LONGEST_REST_S: Final = 60.0
RESTS_LIMIT: Final = 4_096
MISSING_REST_S: Final = 600.0  # an engine without /tokenize gets it with its next version

# backend, path, JSON body, time limit in seconds -> status, body. May raise; the time limit is kept by both sides.
Post = Callable[[Backend, str, bytes, float], Awaitable[tuple[int, bytes]]]


def engine_question(model: str, prompt: ChatPrompt | TextPrompt) -> bytes:
    """The body of /tokenize that gives the ids of this prompt."""
    if isinstance(prompt, TextPrompt):
        return _dump({"model": model, "prompt": prompt.text, "add_special_tokens": prompt.add_special_tokens})
    question: dict[str, Any] = {
        "model": model,
        "messages": prompt.messages,
        "add_generation_prompt": prompt.add_generation_prompt and not prompt.continue_final_message,
        "continue_final_message": prompt.continue_final_message,
        "add_special_tokens": prompt.add_special_tokens,
    }
    if prompt.tools is not None:
        question["tools"] = prompt.tools
    if prompt.arguments:
        question["chat_template_kwargs"] = prompt.arguments
    return _dump(question)


def _dump(question: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(question)
    except orjson.JSONEncodeError:  # it reads deeper nesting than it writes
        raise Refused(Why.SHAPE, "a body that is nested too deeply") from None


def read_answer(body: bytes) -> array[int]:
    """The ids in an engine's answer. Refused where it is not one."""
    if len(body) > ANSWER_LIMIT_BYTES:
        raise Refused(Why.TOO_BIG, "the engine's answer is too long")
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        answer = None
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise Refused(Why.ENGINE, "the engine's answer to /tokenize holds no token ids")
    if not tokens:
        raise Refused(Why.SHAPE, EMPTY)
    try:
        return array("I", tokens)
    except OverflowError:
        raise Refused(Why.ENGINE, "the engine's answer to /tokenize holds an id out of range") from None


class NoTokenizeRoute(Exception):
    """No backend of the model answers /tokenize."""


class _Rest:
    __slots__ = ("length_s", "missing", "until")

    def __init__(self, until: float, length_s: float, missing: bool) -> None:
        self.until = until
        self.length_s = length_s
        self.missing = missing


class EngineTokenizer:
    """At most `limit` questions are open at a time; a backend that fails rests, longer each time."""

    def __init__(
        self,
        post: Post,
        backends_of: Callable[[str], Sequence[Backend]],
        clock: Clock,
        *,
        time_limit_s: float = 1.0,
        limit: int = 8,
    ) -> None:
        self._post = post
        self._backends_of = backends_of
        self._clock = clock
        self._time_limit_s = time_limit_s
        self._limit = limit
        self._rests: dict[str, _Rest] = {}
        self.open = 0
        self.failed = 0

    async def ask(self, model: str, question: bytes, only: Backend | None = None) -> bytes:
        """The body of a 200. Refused where there is none, NoTokenizeRoute where there never will be. `only`: this
        backend is asked, whatever its load."""
        backend = self._least_loaded(model) if only is None else only
        if self.open >= self._limit:
            raise Refused(Why.BUSY, "too many questions to the engines' /tokenize are open")
        self.open += 1
        try:
            async with asyncio.timeout(self._time_limit_s):
                status, body = await self._post(backend, TOKENIZE_PATH, question, self._time_limit_s)
        except TimeoutError:
            self._failed(backend)
            raise Refused(Why.ENGINE, f"/tokenize took more than {self._time_limit_s:g} s") from None
        except Exception as error:  # whatever the caller's client raises: the engine could not be asked
            self._failed(backend)
            raise Refused(Why.ENGINE, f"/tokenize failed: {type(error).__name__}") from None
        finally:
            self.open -= 1
        if status in (405, 501) or (status == 404 and b'"error"' not in body):  # with an error it is about the model
            self._rest(backend, MISSING_REST_S, missing=True)
            self._least_loaded(model)  # NoTokenizeRoute, if that was the last one
            raise Refused(Why.ENGINE, "the engine has no /tokenize")
        if status in (401, 403, 404, 429) or (status != 200 and not 400 <= status < 500):
            self._failed(backend)
            raise Refused(Why.ENGINE, f"/tokenize answered {status}")
        self._rests.pop(backend.name, None)
        if status != 200:
            raise Refused(Why.SHAPE, "the engine refuses this prompt")
        return body

    def _least_loaded(self, model: str) -> Backend:
        backends = self._backends_of(model)
        now = self._clock.now()
        awake = []
        for backend in backends:
            rest = self._rests.get(backend.name)
            if rest is None or rest.until <= now:
                awake.append(backend)
        if awake:
            return min(awake, key=lambda backend: backend.in_flight / backend.weight)
        if backends and all(self._rests[backend.name].missing for backend in backends):
            raise NoTokenizeRoute
        raise Refused(Why.ENGINE, "no backend to ask" if not backends else "every backend rests after failing")

    def _failed(self, backend: Backend) -> None:
        self.failed += 1
        rest = self._rests.get(backend.name)
        length_s = FIRST_REST_S if rest is None or rest.missing else min(rest.length_s * 2, LONGEST_REST_S)
        self._rest(backend, length_s, missing=False)

    def _rest(self, backend: Backend, length_s: float, *, missing: bool) -> None:
        if len(self._rests) >= RESTS_LIMIT:  # names that came and went and that nobody told us to forget
            del self._rests[min(self._rests, key=lambda name: self._rests[name].until)]
        self._rests[backend.name] = _Rest(self._clock.now() + length_s, length_s, missing)

    def forget_backend(self, name: str) -> None:
        """Removed, or restarted with another version: what was learned of it is void."""
        self._rests.pop(name, None)
