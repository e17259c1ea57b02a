"""Request traces: JSON lines, gzipped or not, one request a line, in order of arrival.

    {"t_ms": 0, "in": 6758, "out": 500, "hash_ids": [0, 1, 2], "s": 3}

t_ms: arrival, milliseconds. in, out: tokens of prompt and answer. hash_ids: one id for each block of the prompt, the
last one possibly partly filled; an id stands for its block and everything before it. s: the session, where known.
Mooncake's names (timestamp, input_length, output_length) are read as well; keys beyond these are ignored.

The number of tokens in a block is not in the file: it follows from the lengths, and can be given.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

MAX_LINE_BYTES: Final = 4 << 20
MAX_REQUESTS: Final = 1_000_000
MAX_TOKENS: Final = 10_000_000  # of one prompt or answer
MAX_AT_MS: Final = 10.0 * 365 * 86_400 * 1000
MAX_ID: Final = (1 << 64) - 1
MAX_SESSION_LENGTH: Final = 128
NAMES: Final = {"t_ms": "timestamp", "in": "input_length", "out": "output_length"}


class TraceError(ValueError):
    """The trace cannot be used; the text names file, line, key, value, and what was expected."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    at_s: float  # from the first request, at the trace's own speed
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]
    session: str | None


@dataclass(frozen=True, slots=True)
class Trace:
    name: str  # of the file, without its endings
    block_tokens: int
    requests: tuple[TraceRequest, ...]

    @property
    def span_s(self) -> float:
        return self.requests[-1].at_s

    @property
    def crowded(self) -> int:
        """Requests that share their time with the one before: what a coarse clock writes."""
        return sum(after.at_s == before.at_s for before, after in zip(self.requests, self.requests[1:], strict=False))

    def endless_hit_ratio(self) -> float:
        """Share of the prompt tokens that one cache that forgets nothing would serve, whole blocks only."""
        seen: set[int] = set()
        hits = 0
        for request in self.requests:
            known = 0
            for block_id in request.block_ids:
                if block_id not in seen:
                    break
                known += 1
            hits += min(known * self.block_tokens, request.prompt_tokens - 1)
            seen.update(request.block_ids)
        return hits / sum(request.prompt_tokens for request in self.requests)


def load_trace(path: Path, block_tokens: int | None = None) -> Trace:
    """Reads a whole trace. TraceError for what is no trace, OSError for what cannot be read."""
    requests: list[TraceRequest] = []
    sizes = _BlockSizes(block_tokens)
    start_ms = last_ms = 0.0
    for number, line in _lines(path):
        where = f"{path}:{number}"
        at_ms, request = _parse(line, where)
        if not requests:
            start_ms = last_ms = at_ms
        if at_ms < last_ms:
            raise TraceError(f"{where}: t_ms: {at_ms:g} is before the line above ({last_ms:g}); sort the file by time")
        if len(requests) == MAX_REQUESTS:
            raise TraceError(f"{where}: more than {MAX_REQUESTS:,} requests; cut the trace into parts")
        sizes.take(request, where)
        last_ms = at_ms
        requests.append(
            TraceRequest(
                (at_ms - start_ms) / 1000,
                request.prompt_tokens,
                request.output_tokens,
                request.block_ids,
                request.session,
            )
        )
    if not requests:
        raise TraceError(f"{path}: no request in it")
    name = path.name.removesuffix(".gz").removesuffix(".jsonl")
    return Trace(name, sizes.size(str(path)), tuple(requests))


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Number and content of each line that is not blank. The file may be compressed, whatever its name."""
    with path.open("rb") as raw:
        compressed = raw.peek(2)[:2] == b"\x1f\x8b"
        number = 0
        try:
            with gzip.open(raw) if compressed else raw as file:
                while line := file.readline(MAX_LINE_BYTES + 1):
                    number += 1
                    if len(line) > MAX_LINE_BYTES:
                        raise TraceError(f"{path}:{number}: a line above {MAX_LINE_BYTES >> 20} MiB")
                    if line.strip():
                        yield number, line
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise TraceError(f"{path}:{number + 1}: the compressed file is damaged: {error}") from None


def _parse(line: bytes, where: str) -> tuple[float, TraceRequest]:
    try:
        entry = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise TraceError(f"{where}: not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise TraceError(f"{where}: {_shown(entry)} is not an object")
    at_ms = _number(entry, "t_ms", where)
    prompt_tokens = _tokens(entry, "in", where)
    request = TraceRequest(
        at_s=0.0,
        prompt_tokens=prompt_tokens,
        output_tokens=_tokens(entry, "out", where),
        block_ids=_block_ids(entry, prompt_tokens, where),
        session=_session(entry, where),
    )
    return at_ms, request


def _value(entry: dict[str, Any], key: str, where: str) -> Any:
    for name in (key, NAMES.get(key, key)):
        if name in entry:
            return entry[name]
    raise TraceError(f"{where}: {key} is missing")


def _number(entry: dict[str, Any], key: str, where: str) -> float:
    value = _value(entry, key, where)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TraceError(f"{where}: {key}: {_shown(value)}: expected milliseconds")
    if not 0 <= value <= MAX_AT_MS:
        raise TraceError(f"{where}: {key}: {_shown(value)}: expected milliseconds from 0 to ten years")
    return float(value)


def _tokens(entry: dict[str, Any], key: str, where: str) -> int:
    value = _value(entry, key, where)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_TOKENS:
        raise TraceError(f"{where}: {key}: {_shown(value)}: expected a number of tokens, 1 to {MAX_TOKENS:,}")
    return value


def _block_ids(entry: dict[str, Any], prompt_tokens: int, where: str) -> tuple[int, ...]:
    value = _value(entry, "hash_ids", where)
    if not isinstance(value, list) or not value:
        raise TraceError(f"{where}: hash_ids: {_shown(value)}: expected a list of numbers, not empty")
    for block_id in value:
        if isinstance(block_id, bool) or not isinstance(block_id, int) or not 0 <= block_id <= MAX_ID:
            raise TraceError(f"{where}: hash_ids: {_shown(block_id)}: expected a whole number, 0 to 2^64 - 1")
    if len(value) > prompt_tokens:
        raise TraceError(f"{where}: hash_ids: {len(value)} blocks for {prompt_tokens} tokens")
    return tuple(value)


def _session(entry: dict[str, Any], where: str) -> str | None:
    value = entry.get("s")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TraceError(f"{where}: s: {_shown(value)}: expected a number or a string")
    text = str(value)
    # It is sent as a header.
    if not 1 <= len(text) <= MAX_SESSION_LENGTH or not text.isascii() or not text.isprintable() or " " in text:
        raise TraceError(
            f"{where}: s: {_shown(value)}: expected 1 to {MAX_SESSION_LENGTH} ASCII characters without blanks"
        )
    return text


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


class _BlockSizes:
    """The sizes of a block that all lines so far allow: n blocks of B tokens hold more than (n - 1) x B tokens and at
    most n x B."""

    def __init__(self, given: int | None) -> None:
        self._given = given
        self._least = given or 1
        self._most = given or MAX_TOKENS

    def take(self, request: TraceRequest, where: str) -> None:
        tokens, blocks = request.prompt_tokens, len(request.block_ids)
        least = max(self._least, -(-tokens // blocks))
        most = min(self._most, (tokens - 1) // (blocks - 1)) if blocks > 1 else self._most
        if least > most:
            expected = (
                f"of {self._least}"
                if self._least == self._most
                else f"of {self._least} to {self._most} tokens, as the lines above have"
            )
            raise TraceError(f"{where}: hash_ids: {tokens} tokens are not {blocks} blocks {expected}")
        self._least, self._most = least, most

    def size(self, path: str) -> int:
        """The only one, or else the only power of two."""
        if self._least == self._most:
            return self._least
        powers = [1 << at for at in range(24) if self._least <= 1 << at <= self._most]
        if len(powers) == 1:
            return powers[0]
        raise TraceError(
            f"{path}: the lengths allow blocks of {self._least} to {self._most} tokens: say which, --block-tokens N"
        )
