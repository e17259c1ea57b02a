"""One line a request, written by a thread so that a slow terminal or pipe never holds up the event loop.

Lines hold names of the fleet, counts and times: no header, no query, no body.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque

import orjson

from router.metrics import Metrics

PENDING_LIMIT = 20_000  # lines; beyond it lines are dropped and counted
BATCH_S = 0.02


class AccessLog:
    """`format`: text | json. `close()` writes what is left."""

    def __init__(self, metrics: Metrics, fd: int, json_lines: bool) -> None:
        self._metrics = metrics
        self._fd = fd
        self._json = json_lines
        self._pending: deque[tuple[float, dict[str, object]]] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
        self._thread.start()

    def write(self, fields: dict[str, object]) -> None:
        """`fields` in the order of the line; None values are left out."""
        if len(self._pending) >= PENDING_LIMIT:
            self._metrics.access_lines_dropped += 1
            return
        self._pending.append((time.time(), fields))
        if not self._wake.is_set():
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
            at, fields = self._pending.popleft()
            lines.append(self._json_line(at, fields) if self._json else self._text_line(at, fields))
        data = memoryview(b"".join(lines))
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except OSError:  # nobody reads any more: the lines are lost, and counted
                self._metrics.access_lines_dropped += len(lines)
                return

    @staticmethod
    def _text_line(at: float, fields: dict[str, object]) -> bytes:
        words = [time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at)), "access"]
        for name, value in fields.items():
            if value is not None:
                words.append(f"{name}={value:.4f}" if isinstance(value, float) else f"{name}={value}")
        return " ".join(words).encode("utf-8", "replace") + b"\n"

    @staticmethod
    def _json_line(at: float, fields: dict[str, object]) -> bytes:
        present = {name: value for name, value in fields.items() if value is not None}
        return orjson.dumps({"time": at, "kind": "access", **present}) + b"\n"
