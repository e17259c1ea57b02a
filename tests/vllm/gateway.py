"""`kvgate serve` as a process in front of the engines of a test."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.vllm.engines import Engine, ask, eventually, metric_sum

CONFIG = """\
[server]
host = "127.0.0.1"
port = {port}
[admin]
host = "127.0.0.1"
port = {admin_port}
[routing]
strategy = "{strategy}"
[health]
interval_s = 0.5
"""


@dataclass(frozen=True)
class Gateway:
    url: str
    admin_url: str
    log: Path

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the series of kvgate_NAME that carry `labels`; 0 where none was counted yet."""
        return metric_sum(ask(f"{self.admin_url}/metrics")[1], f"kvgate_{name}", **labels) or 0.0

    def in_flight(self, engine: Engine) -> float:
        return self.metric("in_flight", backend=engine.name)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextlib.contextmanager
def running_gateway(engines: Sequence[Engine], folder: Path, strategy: str, more: str = "") -> Iterator[Gateway]:
    """A gateway of its own, from the moment when it has found every engine. `more` goes into its configuration."""
    port, admin_port = free_port(), free_port()
    folder = Path(tempfile.mkdtemp(prefix=f"kvgate-{strategy}-", dir=folder))
    config = folder / "kvgate.toml"
    text = CONFIG.format(port=port, admin_port=admin_port, strategy=strategy)
    for engine in engines:
        text += f"[[backends]]\nname = {json.dumps(engine.name)}\nurl = {json.dumps(engine.url)}\n"
    config.write_text(text + more)
    gateway = Gateway(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}", folder / "kvgate.log")
    with gateway.log.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "router", "serve", "-c", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def sees_all_engines() -> bool:
        if process.poll() is not None:
            raise AssertionError(f"kvgate ended with {process.returncode}: {gateway.log.read_text()[-3000:]}")
        try:
            return ask(f"{gateway.url}/readyz")[0] == 200 and gateway.metric("backend_up") == len(engines)
        except (OSError, http.client.HTTPException):
            return False

    try:
        eventually(sees_all_engines, 30, "kvgate is ready with all engines", every_s=0.1)
        yield gateway
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
