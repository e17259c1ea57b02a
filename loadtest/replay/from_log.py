"""python -m loadtest.replay.from_log LOG TRACE: a trace out of a log of your requests, without their text.

LOG has one JSON object a line: "body" is the request's body (chat or completions), "time" when it came (Unix seconds or
ISO 8601). Optional: "output_tokens" (else usage.completion_tokens, else the body's max_tokens, else 128) and "session"
(else the body's session_id, user or prompt_cache_key).

TRACE has numbers only: lengths, times, and for each block of the prompt a number that is the same wherever the prompt
is the same up to there. Tokens are counted as a quarter of the characters. It is gzipped where its name ends in .gz.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import orjson

CHARACTERS_A_TOKEN: Final = 4
BLOCK_TOKENS: Final = 16
DEFAULT_OUTPUT_TOKENS: Final = 128
SESSION_FIELDS: Final = ("session_id", "user", "prompt_cache_key")


class LogError(ValueError):
    """A line that is no request; the text names its number and what was expected."""


def prompt_of(body: dict[str, Any]) -> str:
    """One text for the body's prompt, in the order in which engines build theirs: two bodies share the beginning of it
    as they share that of their prompts. ValueError for a body without one."""
    if isinstance(body.get("prompt"), str):
        return str(body["prompt"])
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError('"body" has neither "messages" nor a "prompt" that is a string')
    parts = [json.dumps(body["tools"])] if body.get("tools") else []
    for message in messages:
        if not isinstance(message, dict):
            raise ValueError("a message is not an object")
        parts.append(f"\0{message.get('role')}\0{_text(message.get('content'))}")
        if message.get("tool_calls"):
            parts.append(json.dumps(message["tool_calls"]))
    return "".join(parts)


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return "" if content is None else json.dumps(content)
    return "\n".join(
        part["text"] if isinstance(part, dict) and isinstance(part.get("text"), str) else json.dumps(part)
        for part in content
    )


def chain(text: str, width: int) -> Iterator[bytes]:
    """A hash for each `width` characters, of them and all before them."""
    hashed = hashlib.blake2b(digest_size=16)
    for start in range(0, len(text), width):
        hashed.update(text[start : start + width].encode("utf-8", "surrogatepass"))
        yield hashed.digest()


def convert(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """The trace's lines, sorted by time. LogError at the first line that is no request."""
    found: list[tuple[float, str, int, str | None]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(_parse(orjson.loads(line)))
        except (ValueError, OverflowError) as error:
            raise LogError(f"line {number}: {error}") from None
    found.sort(key=lambda request: request[0])
    ids: dict[bytes, int] = {}
    sessions: dict[str, int] = {}
    trace: list[dict[str, Any]] = []
    for at_s, text, output_tokens, session in found:
        blocks = [ids.setdefault(key, len(ids)) for key in chain(text, BLOCK_TOKENS * CHARACTERS_A_TOKEN)]
        entry: dict[str, Any] = {
            "t_ms": round(1000 * (at_s - found[0][0])),
            "in": math.ceil(len(text) / CHARACTERS_A_TOKEN),
            "out": output_tokens,
            "hash_ids": blocks,
        }
        if session is not None:
            entry["s"] = sessions.setdefault(session, len(sessions))
        trace.append(entry)
    return trace


def _parse(entry: Any) -> tuple[float, str, int, str | None]:
    body = entry.get("body") if isinstance(entry, dict) else None
    if not isinstance(body, dict):
        raise ValueError('expected an object with "body", an object')
    text = prompt_of(body)
    if not text:
        raise ValueError("the prompt is empty")
    usage = entry.get("usage") if isinstance(entry.get("usage"), dict) else {}
    told = (
        entry.get("output_tokens"),
        usage.get("completion_tokens"),
        body.get("max_completion_tokens"),
        body.get("max_tokens"),
    )
    outputs = (value for value in told if isinstance(value, int) and not isinstance(value, bool) and value >= 1)
    session = next((str(value) for value in (entry.get("session"), *map(body.get, SESSION_FIELDS)) if value), None)
    return _seconds(entry.get("time")), text, next(outputs, DEFAULT_OUTPUT_TOKENS), session


def _seconds(value: Any) -> float:
    if isinstance(value, str):
        return datetime.fromisoformat(value).timestamp()
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError('"time" is neither Unix seconds nor an ISO 8601 date')
    return float(value)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.replay.from_log",
        description=str(__doc__).partition(": ")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("log", type=Path, metavar="LOG")
    parser.add_argument("trace", type=Path, metavar="TRACE")
    arguments = parser.parse_args(argv)
    try:
        with arguments.log.open("rb") as file:
            trace = convert(file)
        text = "".join(json.dumps(entry, separators=(",", ":")) + "\n" for entry in trace).encode()
        arguments.trace.write_bytes(gzip.compress(text, mtime=0) if arguments.trace.suffix == ".gz" else text)
    except (LogError, OSError) as error:
        sys.stderr.write(f"{parser.prog}: {arguments.log}: {error}\n")
        return 2
    print(f"{arguments.trace}: {len(trace)} requests, blocks of {BLOCK_TOKENS} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
