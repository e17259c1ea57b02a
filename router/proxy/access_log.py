"""One line a request. Lines are made where the exchange ends, and written in batches by a thread that does nothing
else: a slow terminal or pipe never holds up the event loop, and no two threads compete for every line.

Lines hold names of the fleet, counts and times: no header, no query, no body.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, fields
from functools import lru_cache
from queue import SimpleQueue
from threading import Thread
from typing import Any, Final

import orjson

from router.clock import Clock
from router.metrics import Metrics

PENDING_LIMIT_BYTES: Final = 4 * 1024 * 1024  # made and not written; beyond it lines are dropped and counted
BATCH_S: Final = 0.05
PATH_LIMIT: Final = 256  # characters that a client can put into a line
ID_LIMIT: Final = 128
_PLAIN, _ODD = re.compile(rb"[!-~]*"), re.compile(rb"[^!-~]")


@dataclass(slots=True)
class AccessLine:
    """One exchange as it ended. Times in seconds; None and "" are left out of the line."""

    client: bytes
    method: bytes
    path: bytes
    status: int
    ended: str  # by whom @ in which phase
    model: str
    backend: str
    reason: str
    matched: int | None  # tokens predicted
    load: int  # in flight on the backend at the choice
    attempts: int
    queue_s: float
    ttft_s: float | None
    total_s: float
    bytes_out: int
    id: bytes
    key: str = ""  # the operator's name for the API key, never the key


class AccessLog:
    """`json_lines`: JSON, else name=value; may be changed at any time. `close()` writes what is left."""

    def __init__(self, metrics: Metrics, clock: Clock, fd: int, json_lines: bool) -> None:
        self._metrics = metrics
        self._clock = clock
        self.json_lines = json_lines
        self._lost_lines = 0  # counted already
        self._batch: list[bytes] = []
        self._writer = _Writer(fd)

    def write(self, line: AccessLine) -> None:
        now = time.time()
        self.append(_json_line(now, line) if self.json_lines else _text_line(now, line))

    def append(self, line: bytes) -> None:
        """A line of another kind, whole with its end, in its place among the others."""
        batch = self._batch
        if not batch:
            self._clock.call_later(BATCH_S, self._flush)
        batch.append(line)

    def close(self, timeout_s: float = 2.0) -> None:
        self._flush()
        self._writer.close(timeout_s)
        self._count_lost()

    def _count_lost(self) -> None:
        lost = self._writer.lost_lines
        self._metrics.access_lines_dropped += lost - self._lost_lines
        self._lost_lines = lost

    def _flush(self) -> None:
        self._count_lost()
        batch, self._batch = self._batch, []
        if batch and not self._writer.take(b"".join(batch), len(batch)):
            self._metrics.access_lines_dropped += len(batch)


class _Writer:
    """The thread. Of the two counts of bytes the loop writes one and the thread the other."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._queue: SimpleQueue[tuple[bytes, int] | None] = SimpleQueue()
        self._taken_bytes = 0  # by the loop, ever
        self._written_bytes = 0  # by the thread, ever
        self.lost_lines = 0  # nobody read them, ever; written by the thread
        self._runner = Thread(target=self._run, name="access-log", daemon=True)
        self._runner.start()

    def take(self, data: bytes, lines: int) -> bool:
        """False where too much is waiting already."""
        if self._taken_bytes - self._written_bytes + len(data) > PENDING_LIMIT_BYTES:
            return False
        self._taken_bytes += len(data)
        self._queue.put((data, lines))
        return True

    def close(self, timeout_s: float) -> None:
        self._queue.put(None)
        self._runner.join(timeout_s)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            data, lines = item
            left = memoryview(data)
            try:
                while left:
                    written = os.write(self._fd, left)  # apart: mypyc evaluates a slice's bound twice
                    left = left[written:]
            except OSError:  # its reader is gone
                self.lost_lines += lines
            self._written_bytes += len(data)


def _text_line(at: float, line: AccessLine) -> bytes:
    # One format of bytes and integers: floats and text took three times as long.
    served = ttft = key = b""
    if line.backend:
        served = b" model=%b backend=%b reason=%b matched=%d" % (
            plain(line.model.encode()),  # the engine's word
            line.backend.encode(),
            line.reason.encode(),
            line.matched or 0,
        )
    if line.ttft_s is not None:
        units = int(line.ttft_s * 10_000)
        ttft = b" ttft_s=%d.%04d" % (units // 10_000, units % 10_000)
    if line.key:
        key = b" key=%b" % line.key.encode()  # visible ASCII, as config.py wants it
    queue, total = int(line.queue_s * 10_000), int(line.total_s * 10_000)
    return (
        (
            b"%b access client=%b method=%b path=%b status=%d ended=%b%b%b load=%d attempts=%d"
            b" queue_s=%d.%04d total_s=%d.%04d bytes=%d%b id=%b\n"
        )
        % (
            timestamp(int(at)),
            line.client,  # an address
            line.method,  # one that llhttp knows
            plain(line.path[:PATH_LIMIT]),
            line.status,
            line.ended.encode(),
            served,
            ttft,
            line.load,
            line.attempts,
            queue // 10_000,
            queue % 10_000,
            total // 10_000,
            total % 10_000,
            line.bytes_out,
            key,
            plain(line.id[:ID_LIMIT]),
        )
    )


@lru_cache(maxsize=4)
def timestamp(second: int) -> bytes:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(second)).encode()


def _json_line(at: float, line: AccessLine) -> bytes:
    told: dict[str, Any] = {"time": at, "kind": "access"}
    for field in fields(line):
        value = getattr(line, field.name)
        if isinstance(value, bytes):
            value = plain(value[: PATH_LIMIT if field.name == "path" else ID_LIMIT]).decode()
        if value is not None and value != "":
            told[field.name] = value
    return orjson.dumps(told) + b"\n"


def plain(value: bytes) -> bytes:
    """Printable ASCII without white space, so that no client breaks a line or adds a field."""
    return value if _PLAIN.fullmatch(value) else _ODD.sub(b"?", value)
