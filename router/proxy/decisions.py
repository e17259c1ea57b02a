"""What was chosen lately, and why: for the dashboard, and for whoever reads one line a choice."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import orjson

from router.proxy.access_log import ID_LIMIT, plain, timestamp
from router.strategies.strategy import Choice

KEPT: Final = 200  # decisions that the dashboard can look back on


class Decision:
    """One backend chosen for one attempt. Nothing of the prompt."""

    __slots__ = (
        "at",
        "attempt",
        "backend",
        "load",
        "matched_tokens",
        "model",
        "prompt_tokens",
        "reason",
        "request_id",
        "took_s",
        "url",
    )

    def __init__(self, at: float, request_id: bytes, attempt: int, load: int, took_s: float, choice: Choice) -> None:
        self.at = at  # Unix seconds
        self.request_id = request_id
        self.attempt = attempt  # 1 is the first try
        self.load = load  # in flight on the backend before this one
        self.took_s = took_s  # from the request's last byte to the choice, queueing included
        self.model = choice.request.model
        self.backend = choice.backend.name
        self.url = choice.backend.url
        self.reason: str = choice.reason.value
        self.matched_tokens = choice.matched_tokens  # predicted
        self.prompt_tokens = choice.prompt_tokens  # estimated where the body does not say


class Decisions:
    """The last ones, in the order of their making. `lines` writes each of them down, where that is asked for."""

    __slots__ = ("_kept", "lines")

    def __init__(self) -> None:
        self._kept: deque[Decision] = deque(maxlen=KEPT)
        self.lines: DecisionLines | None = None

    def add(self, request_id: bytes, attempt: int, load: int, took_s: float, choice: Choice) -> None:
        decision = Decision(time.time(), request_id, attempt, load, took_s, choice)
        self._kept.append(decision)
        if self.lines is not None:
            self.lines.write(decision, choice.request.session_key)

    def recent(self) -> list[Decision]:
        """Oldest first, at most KEPT."""
        return list(self._kept)


class DecisionLines:
    """One line a decision, handed to `append`: as the access lines are, or with `production_stack` the one line that
    users of vLLM's production-stack look for. `json_lines`: an object each, in which that line is the `message`.

    No line holds anything of a prompt. A session key, which a client chooses, stands in the production-stack's alone.
    """

    __slots__ = ("_append", "_json_lines", "_production_stack", "_strategy")

    def __init__(
        self, append: Callable[[bytes], object], strategy: str, *, json_lines: bool, production_stack: bool
    ) -> None:
        self._append = append
        self._strategy = strategy
        self._json_lines = json_lines
        self._production_stack = production_stack

    def write(self, decision: Decision, session_key: bytes | None) -> None:
        if self._production_stack:
            message = _production_stack_message(decision, session_key)
            if self._json_lines:
                told = {"time": decision.at, "kind": "decision", "level": "info", "message": message.decode()}
                self._append(orjson.dumps(told) + b"\n")
            else:
                milliseconds = int(decision.at * 1000) % 1000
                self._append(b"[%b,%03d] INFO: %b\n" % (_local_time(int(decision.at)), milliseconds, message))
        elif self._json_lines:
            self._append(_json_line(decision, self._strategy))
        else:
            self._append(_text_line(decision, self._strategy))


def _text_line(decision: Decision, strategy: str) -> bytes:
    model = b" model=%b" % plain(decision.model.encode("utf-8", "replace")) if decision.model else b""
    took = max(0, int(decision.took_s * 1_000_000))
    return (
        b"%b decision id=%b attempt=%d strategy=%b reason=%b backend=%b%b matched=%d prompt_tokens=%d load=%d"
        b" took_s=%d.%06d\n"
    ) % (
        timestamp(int(decision.at)),
        plain(decision.request_id[:ID_LIMIT]),
        decision.attempt,
        strategy.encode(),
        decision.reason.encode(),
        decision.backend.encode(),
        model,
        decision.matched_tokens,
        decision.prompt_tokens,
        decision.load,
        took // 1_000_000,
        took % 1_000_000,
    )


def _json_line(decision: Decision, strategy: str) -> bytes:
    told: dict[str, Any] = {
        "time": decision.at,
        "kind": "decision",
        "id": plain(decision.request_id[:ID_LIMIT]).decode(),
        "attempt": decision.attempt,
        "strategy": strategy,
        "reason": decision.reason,
        "backend": decision.backend,
    }
    if decision.model:
        told["model"] = decision.model
    told["matched"] = decision.matched_tokens
    told["prompt_tokens"] = decision.prompt_tokens
    told["load"] = decision.load
    told["took_s"] = round(decision.took_s, 6)
    return orjson.dumps(told) + b"\n"


def _production_stack_message(decision: Decision, session_key: bytes | None) -> bytes:
    """As route_general_request() in its services/request_service/request.py logs it, to the space. Its process time
    begins with the request's head, ours with its last byte: a client that uploads slowly is no work of ours."""
    return b"Routing request %b with session id %b to %b at %b, process time = %b" % (
        plain(decision.request_id[:ID_LIMIT]),
        plain(session_key[:ID_LIMIT]) if session_key is not None else b"None",
        decision.url.encode(),
        str(decision.at).encode(),
        (b"%.4f" % decision.took_s),
    )


@lru_cache(maxsize=4)
def _local_time(second: int) -> bytes:
    """As Python's logging writes it there."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second)).encode()
