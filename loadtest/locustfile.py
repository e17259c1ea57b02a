"""Chat traffic for locust: growing conversations over a few shared system prompts, each answer streamed and checked.

    locust -f loadtest/locustfile.py --host http://127.0.0.1:8080              # web UI: users and ramp are asked there
    locust -f loadtest/locustfile.py --host http://127.0.0.1:8080 --headless -u 50 -r 1 -t 3m

-r is the ramp: users that start in each second. loadtest/locust_steps.py adds a ramp in steps.

Each user holds one conversation after another as a chat client does: all that was said so far goes with each message,
x-session-id names the conversation. Entries beside the request's own (which is the whole answer): "chat" with TTFT (to
the first token), ITL (the mean gap between two pieces of an answer) and E2E, in milliseconds; a conversation's first
turn has an entry of its own, since no cache can know it. An answer that is no whole stream is a failure.
"""

from __future__ import annotations

import json
import time
import uuid
from argparse import ArgumentParser
from collections.abc import Callable
from random import Random
from typing import Any

import requests
from locust import HttpUser, events, task
from locust.exception import StopUser

from loadtest.chat_stream import ChatStream, StreamFault, refusal
from loadtest.replay.options import whole
from loadtest.replay.prompt_text import PromptText, TokenScale

CHAT = "/v1/chat/completions"
MAX_ERROR_BYTES = 65_536
TIMEOUT_S = (10.0, 600.0)  # to connect, and between two pieces of an answer
SYSTEM_PROMPTS = 6


@events.init_command_line_parser.add_listener
def add_flags(parser: ArgumentParser) -> None:
    chat = parser.add_argument_group("Chat")
    chat.add_argument("--chat-model", default="", help="Default: the first of /v1/models")
    chat.add_argument(
        "--chat-turns", type=whole(1, 100_000), default=6, help="Messages of the longest conversation; 1 to so many"
    )
    chat.add_argument(
        "--chat-system-words", type=whole(1, 100_000), default=400, help="Words of each of the 6 shared system prompts"
    )
    chat.add_argument(
        "--chat-message-words", type=whole(1, 100_000), default=120, help="Words of a message, half to one and a half"
    )
    chat.add_argument("--chat-max-tokens", type=whole(1, 100_000), default=48, help="Of an answer, half to so many")
    chat.add_argument("--chat-think-s", type=float, default=1.0, help="Mean pause before the next message")


class Conversation:
    """What was said so far. `random` decides about the rest."""

    def __init__(self, random: Random, options: Any) -> None:
        self._random = random
        self._options = options
        # The first prompts are liked more than the last ones, as in life.
        liked = random.choices(range(SYSTEM_PROMPTS), range(SYSTEM_PROMPTS, 0, -1))[0]
        system = some_words("system", liked, options.chat_system_words)
        self.session = f"locust-{uuid.UUID(int=random.getrandbits(128)).hex}"
        self.messages = [{"role": "system", "content": system}]
        self.turns_left = random.randint(1, options.chat_turns)
        self.begun = False

    def body(self, model: str) -> dict[str, Any]:
        """The next message, with all before it."""
        words = self._options.chat_message_words
        length = self._random.randint(max(words // 2, 1), max(words * 3 // 2, 1))
        self.messages.append({"role": "user", "content": some_words("message", self._random.getrandbits(63), length)})
        most = self._options.chat_max_tokens
        return {
            "model": model,
            "messages": self.messages,
            "max_tokens": self._random.randint(max(most // 2, 1), most),
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def answered(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})
        self.turns_left -= 1
        self.begun = True


def some_words(use: str, number: int, count: int) -> str:
    """The same words for the same arguments."""
    return PromptText(count, TokenScale(), use).prompt([number], count)


class ChatUser(HttpUser):
    """A person who chats."""

    random: Random
    model: str
    conversation: Conversation

    def wait_time(self) -> float:  # locust asks for it after each task
        mean = self.environment.parsed_options.chat_think_s
        return self.random.expovariate(1.0 / mean) if mean > 0 else 0.0

    def on_start(self) -> None:
        self.random = Random(uuid.uuid4().int)
        self.model = self.environment.parsed_options.chat_model or self._first_model()
        self.conversation = Conversation(self.random, self.environment.parsed_options)

    def _first_model(self) -> str:
        with self.client.get("/v1/models", catch_response=True) as response:
            try:
                return str(response.json()["data"][0]["id"])
            except (ValueError, KeyError, IndexError, TypeError):
                response.failure(f"no model in /v1/models, status {response.status_code}")
        raise StopUser

    @task
    def say(self) -> None:
        if not self.conversation.turns_left:
            self.conversation = Conversation(self.random, self.environment.parsed_options)
        conversation = self.conversation
        body = json.dumps(conversation.body(self.model))
        headers = {"content-type": "application/json", "x-session-id": conversation.session}
        started_at = time.perf_counter()
        stream = ChatStream(started_at)
        fault: str | None = None
        with self.client.post(
            CHAT, data=body, headers=headers, stream=True, timeout=TIMEOUT_S, catch_response=True
        ) as response:
            try:
                if response.status_code == 0:  # nothing came: locust knows why
                    fault = str(response.error)
                    response.failure(response.error or "no answer")
                elif response.status_code != 200:
                    fault = refusal(response.status_code, read_some(response.iter_content, MAX_ERROR_BYTES))
                else:
                    for data in response.iter_content(chunk_size=None):
                        stream.feed(data, time.perf_counter())
                    stream.end()
            except StreamFault as error:
                fault = str(error)
            except requests.RequestException as error:
                fault = f"the answer was cut: {type(error).__name__}"
            finally:
                # As it stands locust has the time to the head, which an engine may send before it has begun.
                e2e_s = time.perf_counter() - started_at
                response.request_meta["response_time"] = 1e3 * e2e_s
                response.request_meta["response_length"] = len(stream.text)
                if response.raw is not None:
                    response.close()
            if fault is None:
                response.success()
            elif response.status_code != 0:
                response.failure(fault)
        if fault is not None:
            # Half an answer is nothing to build on.
            conversation.turns_left = 0
            return
        turn = "later turns" if conversation.begun else "first turn"
        self._entry(f"TTFT, {turn}", stream.ttft_s or 0.0)
        if stream.gaps_s:
            self._entry("ITL", sum(stream.gaps_s) / len(stream.gaps_s))
        self._entry("E2E", e2e_s)
        conversation.answered(stream.text)

    def _entry(self, name: str, seconds: float) -> None:
        self.environment.events.request.fire(
            request_type="chat", name=name, response_time=1e3 * seconds, response_length=0, exception=None, context={}
        )


def read_some(iter_content: Callable[..., Any], limit_bytes: int) -> bytes:
    """The beginning of an error's body."""
    body = b""
    for data in iter_content(chunk_size=4096):
        body += data
        if len(body) >= limit_bytes:
            break
    return body
