"""One line a request. Lines are made where the exchange ends, and written in batches by a thread that does nothing
else: a slow terminal or pipe never holds up the event loop, and no two threads compete for every line.

Lines hold names of the fleet, counts and times: no header, no query, no body.
"""

from __future__ import annotations

import os
import re
import time
from functools import lru_cache
from queue import SimpleQueue
from threading import Thread
from typing import Final, NamedTuple

import orjson

from router.clock import Clock
from router.metrics import Metrics

PENDING_LIMIT_BYTES: Final = 4 * 1024 * 1024  # made and not written; beyond it lines are dropped and counted
BATCH_S: Final = 0.05
PATH_LIMIT: Final = 256  # characters that a client can put into a line
ID_LIMIT: Final = 128
_PLAIN, _ODD = re.compile(rb"[!-~]*"), re.compile(rb"[^!-~]")


class AccessLine(NamedTuple):
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


class AccessLog:
    """`json_lines`: JSON, else name=value. `close()` writes what is left."""

    def __init__(self, metrics: Metrics, clock: Clock, fd: int, json_lines: bool) -> None:
        self._metrics = metrics
        self._clock = clock
        self._json_lines = json_lines
        self._batch: list[bytes] = []
        self._writer = _Writer(fd)

    def write(self, line: AccessLine) -> None:
        now = time.time()
        batch = self._batch
        if not batch:
            self._clock.call_later(BATCH_S, self._flush)
        batch.append(_json_line(now, line) if self._json_lines else _text_line(now, line))

    def close(self, timeout_s: float = 2.0) -> None:
        self._flush()
        self._writer.close(timeout_s)
        self._metrics.access_lines_dropped += self._writer.lost_lines
        self._writer.lost_lines = 0

    def _flush(self) -> None:
        batch, self._batch = self._batch, []
        if batch and not self._writer.take(b"".join(batch), len(batch)):
            self._metrics.access_lines_dropped += len(batch)


class _Writer:
    """The thread. `pending_bytes` is written by both sides, each adding or subtracting under the interpreter's lock."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._queue: SimpleQueue[tuple[bytes, int] | None] = SimpleQueue()
        self._taken_bytes = 0  # by the loop, ever
        self._written_bytes = 0  # by the thread, ever
        self.lost_lines = 0  # nobody read them; written by the thread
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
    served = ""
    if line.backend:
        served = f" model={line.model} backend={line.backend} reason={line.reason} matched={line.matched}"
    ttft = f" ttft_s={line.ttft_s:.4f}" if line.ttft_s is not None else ""
    return (
        f"{_timestamp(int(at))} access client={_text(line.client)} method={_text(line.method)}"
        f" path={_text(line.path[:PATH_LIMIT])} status={line.status} ended={line.ended}{served}{ttft}"
        f" load={line.load} attempts={line.attempts} queue_s={line.queue_s:.4f} total_s={line.total_s:.4f}"
        f" bytes={line.bytes_out} id={_text(line.id[:ID_LIMIT])}\n"
    ).encode()


@lru_cache(maxsize=4)
def _timestamp(second: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(second))


def _json_line(at: float, line: AccessLine) -> bytes:
    fields = line._asdict()
    fields |= {"client": _text(line.client), "method": _text(line.method), "path": _text(line.path[:PATH_LIMIT])}
    fields["id"] = _text(line.id[:ID_LIMIT])
    present = {name: value for name, value in fields.items() if value is not None and value != ""}
    return orjson.dumps({"time": at, "kind": "access", **present}) + b"\n"


def _text(value: bytes) -> str:
    """Printable without white space, so that no client breaks a line or adds a field."""
    return (value if _PLAIN.fullmatch(value) else _ODD.sub(b"?", value)).decode("ascii")
