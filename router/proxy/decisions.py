"""What was chosen lately, and why: for the dashboard, and for whoever reads one line a choice."""

from __future__ import annotations

import time
from collections import deque
from typing import Final

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
    """The last ones, in the order of their making."""

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept: deque[Decision] = deque(maxlen=KEPT)

    def add(self, request_id: bytes, attempt: int, load: int, took_s: float, choice: Choice) -> None:
        self._kept.append(Decision(time.time(), request_id, attempt, load, took_s, choice))

    def recent(self) -> list[Decision]:
        """Oldest first, at most KEPT."""
        return list(self._kept)
