"""One line a request, written by a thread so that a slow terminal or pipe never holds up the event loop.

Lines hold names of the fleet, counts and times: no header, no query, no body.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from functools import lru_cache
from typing import NamedTuple

import orjson

from router.metrics import Metrics

PENDING_LIMIT = 20_000  # lines; beyond it lines are dropped and counted
BATCH_S = 0.05
PATH_LIMIT, ID_LIMIT = 256, 128  # characters that a client can put into a line
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

    def __init__(self, metrics: Metrics, fd: int, json_lines: bool) -> None:
        self._metrics = metrics
        self._fd = fd
        self._render = _json_line if json_lines else _text_line
        self._pending: deque[tuple[float, AccessLine]] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
        self._thread.start()

    def write(self, line: AccessLine) -> None:
        pending = self._pending
        if len(pending) >= PENDING_LIMIT:
            self._metrics.access_lines_dropped += 1
            return
        pending.append((time.time(), line))
        if len(pending) == 1:
            self._wake.set()

    def close(self, timeout_s: float = 2.0) -> None:
        self._closing = True
        self._wake.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            self._wake.wait()
            if not self._closing:
                time.sleep(BATCH_S)  # gathers a batch; this thread has nothing else to do
            self._wake.clear()
            self._write_pending()
            if self._closing and not self._pending:
                return

    def _write_pending(self) -> None:
        lines = []
        while self._pending:
            lines.append(self._render(*self._pending.popleft()))
        data = memoryview(b"".join(lines))
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except OSError:  # nobody reads any more: the lines are lost, and counted
                self._metrics.access_lines_dropped += len(lines)
                return


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
