"""The demo's children: started, watched and ended with it.

Each is in a session of its own, so that Ctrl-C reaches the demo alone and the tree ends in order; and the kernel kills
it when the demo is gone, whatever ended that.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

PR_SET_PDEATHSIG: Final = 1
START_TIMEOUT_S: Final = 30.0
STOP_TIMEOUT_S: Final = 3.0
KEPT_LINES: Final = 20
SOURCE: Final = str(Path(__file__).parents[2])  # children run the code that runs here, whatever folder this is


class ChildFailed(Exception):
    """A child did not start, or ended by itself. The text has its last lines."""


_prctl = ctypes.CDLL(None, use_errno=True).prctl  # looked up before any fork


def _die_with(parent: int) -> None:
    """In the child, before it becomes the program: tie its life to that of `parent`."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # gone before the call took effect
        os._exit(1)


class Child:
    """One `kvgate` process. `announced` has what it printed at its start: "listening", "admin" -> URL; it is ready when
    all of `announces` are there."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, announces: frozenset[str]) -> None:
        self.name = name
        self._announces = announces
        self.announced: dict[str, str] = {}
        self._process = process
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._ready = asyncio.Event()
        self.ended = asyncio.get_running_loop().create_task(self._follow(), name=f"follow {name}")

    @property
    def url(self) -> str:
        return self.announced["listening"]

    @property
    def last_words(self) -> str:
        return "\n".join(self._lines)

    async def wait_until_listening(self) -> None:
        """ChildFailed if it ends first, or takes too long."""
        ready = asyncio.create_task(self._ready.wait())
        try:
            await asyncio.wait((ready, self.ended), timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if not self._ready.is_set() or self.ended.done():
            raise ChildFailed(f"{self.name} did not start:\n{self.last_words}")

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def stop(self) -> None:
        """Ask it to end, and make it end if it does not."""
        self.signal(signal.SIGTERM)
        await asyncio.wait((self.ended,), timeout=STOP_TIMEOUT_S)
        if not self.ended.done():
            self.signal(signal.SIGKILL)
        await self.ended

    async def _follow(self) -> int:
        """Read all it says, so that it never waits for us; its exit code."""
        assert self._process.stdout is not None
        while True:
            try:
                raw = await self._process.stdout.readline()
            except ValueError:  # a line above the reader's limit, which dropped it
                continue
            if not raw:
                return await self._process.wait()
            line = raw.decode(errors="replace").rstrip()
            self._lines.append(line)
            word, on, url = line.partition(" on ")
            if on and word in self._announces and not self._ready.is_set():
                self.announced[word] = url
                if self._announces <= self.announced.keys():
                    self._ready.set()


class ProcessTree:
    """All children. Leaving it ends them, whatever the reason."""

    def __init__(self) -> None:
        self._children: list[Child] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        try:
            await asyncio.gather(*(child.stop() for child in self._children))
        finally:  # also when told a second time to stop
            for child in self._children:
                child.signal(signal.SIGKILL)

    async def start(
        self, name: str, arguments: Sequence[str], *, stdin: bytes = b"", announces: Sequence[str] = ("listening",)
    ) -> Child:
        """`kvgate ARGUMENTS`; it may read `stdin` as the file /dev/stdin. OSError if it cannot be started."""
        parent = os.getpid()
        path = os.pathsep.join(filter(None, (SOURCE, os.environ.get("PYTHONPATH"))))
        file = os.memfd_create(name)
        try:
            os.write(file, stdin)
            os.lseek(file, 0, os.SEEK_SET)
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "router",
                *arguments,
                env=os.environ | {"PYTHONPATH": path},
                stdin=file,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: _die_with(parent),
            )
        finally:
            os.close(file)
        child = Child(name, process, frozenset(announces))
        self._children.append(child)
        return child

    async def stop(self, child: Child) -> None:
        await child.stop()
        self._children.remove(child)

    async def watch(self) -> None:
        """Until one of those that run now ends by itself: ChildFailed."""
        children = list(self._children)
        await asyncio.wait([child.ended for child in children], return_when=asyncio.FIRST_COMPLETED)
        dead = next(child for child in children if child.ended.done())
        raise ChildFailed(f"{dead.name} ended with {dead.ended.result()}:\n{dead.last_words}")
