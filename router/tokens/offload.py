"""Work for threads, so that the loop never waits: a bounded queue in front of a few threads.

A rendered template holds the GIL as any Python does (the interpreter takes it away every 5 ms); hashing long parts and
the tokenizer itself release it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final

log = logging.getLogger(__name__)

_STOP: Final = None


class Job:
    __slots__ = ("_work", "cancelled", "done", "size")

    def __init__(self, work: Callable[[], Any], size: int, done: Callable[[Any], None]) -> None:
        self._work = work
        self.size = size
        self.done = done
        self.cancelled = False

    def cancel(self) -> None:
        """`done` is not called any more; work that has not begun never does."""
        self.cancelled = True

    def run(self) -> Any:
        try:
            return self._work()
        except Exception as error:
            return error
        except BaseException as error:  # a panic in the tokenizer's native code: the thread lives on
            return RuntimeError(f"{type(error).__name__} in a thread for tokens")


class Offload:
    """Used from the loop's thread. `queue_limit` jobs and `queue_bytes` of their inputs may wait or run at a time."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        threads: int = 2,
        queue_limit: int = 64,
        queue_bytes: int = 64 * 1024 * 1024,
    ) -> None:
        self._loop = loop
        self._limit = queue_limit
        self._limit_bytes = queue_bytes
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._threads = threads
        self._started = False
        self._closed = False
        self.queued = 0  # waiting or running
        self.queued_bytes = 0

    def submit(self, work: Callable[[], Any], size: int, done: Callable[[Any], None]) -> Job | None:
        """`done` gets the result, or the exception, on the loop. None: full, or closed."""
        if self._closed or self.queued >= self._limit or self.queued_bytes + size > self._limit_bytes:
            return None
        if not self._started:
            self._started = True
            for number in range(self._threads):
                # daemons: a process that is told to stop does not wait for a prompt that nobody wants any more
                threading.Thread(target=self._run, name=f"tokens-{number}", daemon=True).start()
        job = Job(work, size, done)
        self.queued += 1
        self.queued_bytes += size
        self._queue.put(job)
        return job

    def close(self) -> None:
        self._closed = True
        if self._started:
            for _ in range(self._threads):
                self._queue.put(_STOP)

    def _run(self) -> None:
        while (job := self._queue.get()) is not _STOP:
            result = None if job.cancelled else job.run()
            try:
                self._loop.call_soon_threadsafe(self._ended, job, result)
            except RuntimeError:  # the loop is closed
                return
            del job, result  # not kept while waiting for the next one

    def _ended(self, job: Job, result: Any) -> None:
        self.queued -= 1
        self.queued_bytes -= job.size
        if job.cancelled:
            return
        if isinstance(result, Exception) and self._closed:
            return
        job.done(result)
