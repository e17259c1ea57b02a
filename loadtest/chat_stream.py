"""A streamed answer as a client sees it: when its tokens came, and whether it is a whole answer. No I/O.

TTFT is the first text (or thought, or tool call) of the answer; one that shows no text at all counts by its first
choice. ITL are the gaps between two pieces of it. Times are the caller's, in seconds.
"""

from __future__ import annotations

import json
from typing import Any, Final

MAX_EVENT_BYTES: Final = 1 << 20
MAX_CODE_LENGTH: Final = 40  # of an error's code that becomes part of a name


class StreamFault(Exception):
    """It is no whole answer; the text says why, in a few words that are the same for the same fault."""


class ChatStream:
    """Takes the bytes of one stream, cut anywhere. `started_at` is the instant from which TTFT counts."""

    def __init__(self, started_at: float) -> None:
        self._started_at = started_at
        self._rest = b""
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._done = False
        self._finish: str | None = None
        self._first_choice_at: float | None = None
        self._first_text_at: float | None = None
        self._last_text_at = started_at
        self._pieces: list[str] = []
        self.gaps_s: list[float] = []
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.output_tokens: int | None = None

    @property
    def text(self) -> str:
        """What the assistant said, without thoughts and tool calls."""
        return "".join(self._pieces)

    @property
    def ttft_s(self) -> float | None:
        at = self._first_text_at if self._first_text_at is not None else self._first_choice_at
        return None if at is None else at - self._started_at

    def feed(self, data: bytes, now: float) -> None:
        """StreamFault at an error event, at what is no event stream of an OpenAI API, and at data after [DONE]."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise StreamFault("an event above 1 MiB")
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line:
                self._event(now)
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
                self._data_bytes += len(line)
                if self._data_bytes > MAX_EVENT_BYTES:
                    raise StreamFault("an event above 1 MiB")

    def end(self) -> None:
        """Its bytes are over. StreamFault if that was not the end of an answer."""
        if not self._done:
            raise StreamFault("a stream without [DONE]")
        if self._finish == "abort":
            raise StreamFault("aborted by the engine")
        if self.ttft_s is None:
            raise StreamFault("an empty stream")

    def _event(self, now: float) -> None:
        data, self._data, self._data_bytes = b"\n".join(self._data), [], 0
        if not data:
            return
        if self._done:
            raise StreamFault("data after [DONE]")
        if data == b"[DONE]":
            self._done = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise StreamFault("an event that is no JSON") from None
        if not isinstance(event, dict):
            raise StreamFault("an event that is no object")
        if "error" in event:
            raise StreamFault(f"an error event{_suffix(error_code(event))}")
        try:
            self._choices(event.get("choices") or [], now)
            self._usage(event.get("usage"))
        except (AttributeError, KeyError, TypeError):
            raise StreamFault("an event of unknown shape") from None

    def _choices(self, choices: list[dict[str, Any]], now: float) -> None:
        for choice in choices:
            if self._first_choice_at is None:
                self._first_choice_at = now
            self._finish = choice.get("finish_reason") or self._finish
            delta = choice.get("delta") or {}
            piece = delta.get("content") or choice.get("text") or ""
            if piece:
                self._pieces.append(piece)
            elif not (delta.get("reasoning_content") or delta.get("reasoning") or delta.get("tool_calls")):
                continue
            if self._first_text_at is None:
                self._first_text_at = now
            else:
                self.gaps_s.append(now - self._last_text_at)
            self._last_text_at = now

    def _usage(self, usage: dict[str, Any] | None) -> None:
        if not usage:
            return
        self.prompt_tokens = int(usage["prompt_tokens"])
        self.output_tokens = int(usage.get("completion_tokens") or 0)
        details = usage.get("prompt_tokens_details")
        if details:
            self.cached_tokens = int(details.get("cached_tokens") or 0)


def refusal(status: int, body: bytes) -> str:
    """A name for an answer that is no 200: its status, and its error code where it has one."""
    try:
        code = error_code(json.loads(body))
    except ValueError:
        code = ""
    return f"status {status}{_suffix(code)}"


def error_code(event: Any) -> str:
    """The code or type of an error object, "" without one. Only short plain words: it becomes part of a name."""
    error = event.get("error") if isinstance(event, dict) else None
    if not isinstance(error, dict):
        return ""
    for key in ("code", "type"):
        code = error.get(key)
        if isinstance(code, str) and len(code) <= MAX_CODE_LENGTH and code.isascii() and code.isprintable():
            return code
    return ""


def _suffix(code: str) -> str:
    return f" {code}" if code else ""
