"""The load of the demo: conversations made from a seed, and clients that hold them with whatever answers at a URL.

Open loop where it matters: when a conversation starts is fixed beforehand, so a slow fleet is not spared. Within one, a
person reads the answer, thinks, and sends everything said so far with the next message, as chat clients do. The engines
answer from the prompt alone, so every strategy meets the same tokens.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

import aiohttp
import orjson

from router.clock import Clock
from router.sim.answers import WORDS
from router.sim.tokenizer import PIECE_BYTES

SYSTEM_PROMPTS: Final = 6
SYSTEM_TOKENS: Final = (160, 320)  # least and most, here and below
MESSAGE_TOKENS: Final = (200, 600)  # a question with the passage that it is about
ANSWER_TOKENS: Final = (8, 20)
THINK_S: Final = (0.1, 0.3)  # people take longer: the demo is a chat in quick motion
STARTS_PER_S: Final = 12.0
TEMPLATE_TOKENS: Final = 12  # what the chat template adds to a message and its answer
REQUEST_TIMEOUT_S: Final = 30.0
MAX_EVENT_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Turn:
    message: str
    answer_tokens: int
    think_s: float  # before it is sent, from the end of the answer before


@dataclass(frozen=True, slots=True)
class Conversation:
    name: str
    system: str
    starts_at_s: float
    turns: tuple[Turn, ...]

    @property
    def own_tokens(self) -> int:
        """Tokens at its end, its system prompt apart."""
        return sum(tokens_of(turn.message) + turn.answer_tokens + TEMPLATE_TOKENS for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked for, the same for each strategy."""

    systems: tuple[str, ...]
    conversations: tuple[Conversation, ...]

    @property
    def requests(self) -> int:
        return sum(len(conversation.turns) for conversation in self.conversations)

    @property
    def distinct_tokens(self) -> int:
        """KV that would hold all of it once, prompts and answers."""
        return sum(map(tokens_of, self.systems)) + sum(c.own_tokens for c in self.conversations)

    @property
    def longest_tokens(self) -> int:
        return max(tokens_of(c.system) + c.own_tokens for c in self.conversations)


def tokens_of(text: str) -> int:
    """As the simulated engines count."""
    return -(-len(text) // PIECE_BYTES)


def make_plan(seed: int, conversations: int, turns: int) -> Plan:
    """Conversations that start at random over time; system prompts are liked unequally, as in life."""
    random = Random(seed)
    systems = tuple(_text(random, SYSTEM_TOKENS) for _ in range(SYSTEM_PROMPTS))
    liking = range(SYSTEM_PROMPTS, 0, -1)
    made: list[Conversation] = []
    start_s = 0.0
    for number in range(conversations):
        made.append(
            Conversation(
                name=f"conversation-{number}",
                system=random.choices(systems, liking)[0],
                starts_at_s=start_s,
                turns=tuple(
                    Turn(
                        message=_text(random, MESSAGE_TOKENS),
                        answer_tokens=random.randint(*ANSWER_TOKENS),
                        think_s=random.uniform(*THINK_S) if turn else 0.0,
                    )
                    for turn in range(turns)
                ),
            )
        )
        start_s += random.expovariate(STARTS_PER_S)
    return Plan(systems, tuple(made))


def _text(random: Random, tokens: tuple[int, int]) -> str:
    return "".join(random.choices(WORDS, k=random.randint(*tokens)))


@dataclass(slots=True)
class Tally:
    """What the clients saw. `ttfts` in seconds, from the instant at which a request was due."""

    ttfts: list[float] = field(default_factory=list)
    answered: int = 0
    skipped: int = 0  # turns that were not sent: the one before them failed
    errors: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    by_backend: Counter[str] = field(default_factory=Counter)

    @property
    def cached_share(self) -> float:
        """Of the prompt tokens of the answers so far, by their usage."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def failed(self) -> int:
        return self.errors.total()

    @property
    def done(self) -> int:
        return self.answered + self.failed + self.skipped


class BadAnswer(Exception):
    """An answer that is no whole stream; the text says why, in a few words."""


async def hold_conversations(plan: Plan, url: str, model: str, clock: Clock, tally: Tally) -> None:
    """All of them, each as a client of its own; `tally` grows meanwhile. Failures are counted there, never raised."""
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    started = clock.now()
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session, asyncio.TaskGroup() as all_:
        for conversation in plan.conversations:
            due = started + conversation.starts_at_s
            all_.create_task(_hold(conversation, session, model, clock, due, tally))


async def _hold(
    conversation: Conversation, session: aiohttp.ClientSession, model: str, clock: Clock, due: float, tally: Tally
) -> None:
    messages = [{"role": "system", "content": conversation.system}]
    for number, turn in enumerate(conversation.turns):
        due += turn.think_s
        await asyncio.sleep(due - clock.now())
        messages.append({"role": "user", "content": turn.message})
        body = {
            "model": model,
            "messages": messages,
            "max_tokens": turn.answer_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            answer = await _ask(session, conversation.name, orjson.dumps(body), clock, due, tally)
        except (aiohttp.ClientError, TimeoutError, ValueError, BadAnswer) as error:
            tally.errors[str(error) if isinstance(error, BadAnswer) else type(error).__name__] += 1
            tally.skipped += len(conversation.turns) - number - 1
            return
        tally.answered += 1
        messages.append({"role": "assistant", "content": answer})
        due = clock.now()


async def _ask(session: aiohttp.ClientSession, name: str, body: bytes, clock: Clock, due: float, tally: Tally) -> str:
    """One streamed request; its answer's text."""
    headers = {"content-type": "application/json", "x-session-id": name}
    async with session.post(
        "/v1/chat/completions", data=body, headers=headers, read_bufsize=MAX_EVENT_BYTES
    ) as response:
        if response.status != 200:
            raise BadAnswer(f"status {response.status}")
        text: list[str] = []
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                break
            event = orjson.loads(line[6:])
            if "error" in event:
                raise BadAnswer("an error within the stream")
            piece = _content_of(event)
            if piece:
                if not text:
                    tally.ttfts.append(clock.now() - due)
                text.append(piece)
            if event.get("usage"):
                _count_usage(event["usage"], tally)
        else:
            raise BadAnswer("a stream without its end")
        tally.by_backend[response.headers.get("x-kvgate-backend", "?")] += 1
        return "".join(text)


def _content_of(event: dict[str, Any]) -> str:
    choices = event.get("choices")
    return (choices[0]["delta"].get("content") or "") if choices else ""


def _count_usage(usage: dict[str, Any], tally: Tally) -> None:
    tally.prompt_tokens += usage["prompt_tokens"]
    tally.cached_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
