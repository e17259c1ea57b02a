"""A real Redis server on a free port, for as long as a test or a module of them needs it."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.debian_tools import program

TRIES = 5  # a free port may be taken before the server has it
STOP_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class RedisServer:
    port: int
    process: subprocess.Popen[str]

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(STOP_TIMEOUT_S)


@contextmanager
def running_redis(folder: Path, *options: str, port: int = 0, tls: bool = False) -> Iterator[RedisServer]:
    """Nothing is kept on disk but `folder` for its working directory. `port`: 0 for any free one; with `tls` that port
    speaks TLS, and `options` name its certificates."""
    server = _start(folder, options, port, tls)
    try:
        yield server
    finally:
        server.stop()
        assert server.process.stdout is not None
        server.process.stdout.close()


def _start(folder: Path, options: tuple[str, ...], port: int, tls: bool) -> RedisServer:
    executable = program("redis-check-rdb")
    said = ""
    for _ in range(TRIES):
        chosen = port or _free_port()
        ports = ("--port", "0", "--tls-port", str(chosen)) if tls else ("--port", str(chosen))
        # What it does goes by the name that it is called by.
        command = ["redis-server", *ports, "--bind", "127.0.0.1", "--save", "", "--dir", str(folder), *options]
        process = subprocess.Popen(
            command, executable=executable, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if "Ready to accept connections" in line:
                return RedisServer(chosen, process)
        process.wait(STOP_TIMEOUT_S)
        process.stdout.close()
    raise RuntimeError(f"no Redis server: {said}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
