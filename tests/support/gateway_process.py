"""`kvgate serve` as a real process on free ports, with what tests ask of it: its lines, its figures, its end.

Nothing here sleeps. A test waits for a line that the gateway writes (a backend came up, a request ended), or asks the
gateway for its figures again and again until they are as they have to be.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from tests.support.sim_process import Connection, Response, http_request

WAIT_S = 20.0  # for what has to happen; only a test that fails waits so long

_ids = itertools.count(1)


class Lines:
    """What a process writes to one pipe, gathered by a thread so that the pipe never fills."""

    def __init__(self, pipe: IO[str]) -> None:
        self._pipe = pipe
        self._lines: list[str] = []
        self._changed = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._gather, daemon=True)
        self._thread.start()

    def _gather(self) -> None:
        for line in self._pipe:
            with self._changed:
                self._lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def all(self) -> list[str]:
        with self._changed:
            return list(self._lines)

    def wait(self, wanted: Callable[[str], bool], count: int = 1) -> list[str]:
        """The lines that are `wanted`, once there are `count` of them. AssertionError with all lines after WAIT_S, or
        when the process ends before."""

        def enough() -> bool:
            return self._ended or sum(map(wanted, self._lines)) >= count

        with self._changed:
            self._changed.wait_for(enough, WAIT_S)
            found = [line for line in self._lines if wanted(line)]
            assert len(found) >= count, "\n".join(["missing among:", *self._lines[-40:]])
            return found

    def wait_end(self) -> list[str]:
        """All lines, once the process has closed its end."""
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        return self.all()

    def close(self) -> None:
        self._thread.join(WAIT_S)
        self._pipe.close()


class GatewayProcess:
    """A running `kvgate serve`. `out` and `err` are its lines; `file` its configuration, where that was generated."""

    file: Path | None = None

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self.process = process
        self.out = Lines(process.stdout)
        self.err = Lines(process.stderr)
        self.url = self._address("listening on ")
        self.admin_url = self._address("admin on ")
        self.host, self.port = _authority(self.url)
        self.admin_host, self.admin_port = _authority(self.admin_url)

    def _address(self, prefix: str) -> str:
        try:
            return self.out.wait(lambda line: line.startswith(prefix))[0].removeprefix(prefix)
        except AssertionError:
            raise AssertionError(f"kvgate did not start: {self.err.all()}") from None

    # -- requests

    def connect(self) -> Connection:
        return Connection(self.host, self.port)

    def send(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Connection:
        """One request on its own connection, not waited for."""
        connection = self.connect()
        connection.send(http_request(method, path, body, headers))
        return connection

    def request(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Response:
        """One request on its own connection; a dict becomes JSON."""
        with self.send(method, path, body, headers) as connection:
            return connection.read(head_only=method == "HEAD")

    def admin(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Response:
        with Connection(self.admin_host, self.admin_port) as connection:
            fields = {"Host": self.admin_url.partition("://")[2], **(headers or {})}
            connection.send(http_request(method, path, body, fields))
            return connection.read(head_only=method == "HEAD")

    # -- what it says

    def wait_up(self, *names: str, times: int = 1) -> None:
        """Until each backend came into rotation `times` times."""
        for name in names:
            self.err.wait(lambda line, name=name: f"backend {name}: " in line and "-> up" in line, times)

    def wait_out(self, name: str, state: str) -> str:
        """Until the backend left rotation for this state; the line that says so."""
        return self.err.wait(lambda line: f"backend {name}: " in line and f"-> {state}" in line)[0]

    def access(self, request_id: str) -> dict[str, Any]:
        """The access line of a request, once it ended; that it is the only one."""
        lines = self.out.wait(lambda line: f'"id":"{request_id}"' in line)
        assert len(lines) == 1, lines
        found: dict[str, Any] = json.loads(lines[0])
        return found

    def access_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.all() if line.startswith("{")]

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples kvgate_NAME that carry `labels`."""
        return self.metrics().sum(name, **labels)

    def metrics(self) -> Figures:
        response = self.admin("GET", "/metrics")
        assert response.status == 200
        return Figures(response.body.decode())

    def backend(self, name: str) -> dict[str, Any]:
        """What GET /backends says of it."""
        (found,) = [b for b in self.admin("GET", "/backends").json()["backends"] if b["name"] == name]
        return dict(found)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Ask until it is so: each question is an answer of the gateway, so that it has always done something."""
        end = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < end, f"never: {what}"

    def until_metric(self, name: str, value: float, **labels: str) -> None:
        seen = 0.0

        def is_so() -> bool:
            nonlocal seen
            seen = self.metric(name, **labels)
            return seen == value

        try:
            self.until(is_so, "")
        except AssertionError:
            raise AssertionError(f"kvgate_{name}{labels} is {seen}, not {value}") from None

    # -- changes

    def write_config(self, urls: Sequence[str], **tables: Any) -> None:
        """A new file in place of its own, as gateway_config makes it; SIGHUP or POST /reload reads it."""
        assert self.file is not None
        self.file.write_text(toml(gateway_config(urls, **tables)))

    def reload(self, result: str = "ok") -> None:
        """SIGHUP, and its end: `ok` or `failed`."""
        before = self.metric("config_reloads_total", result=result)
        self.kill(signal.SIGHUP)
        self.until_metric("config_reloads_total", before + 1, result=result)

    # -- what it holds

    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def memory_bytes(self) -> int:
        """Resident memory."""
        with open(f"/proc/{self.process.pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    # -- its end

    def kill(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(timeout=WAIT_S)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.kill(number)
        return self.wait()


class Figures:
    """One scrape of /metrics."""

    def __init__(self, text: str) -> None:
        self.samples: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self.samples.setdefault(sample.name, []).append((sample.labels, sample.value))

    def sum(self, name: str, **labels: str) -> float:
        """Over the samples kvgate_NAME that carry `labels`; 0 where there is none."""
        found = self.samples.get(f"kvgate_{name}", [])
        return sum(value for given, value in found if labels.items() <= given.items())


def next_id() -> str:
    """A request id that no other request of this test run has."""
    return f"test-{next(_ids)}"


def _authority(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def toml(config: dict[str, Any]) -> str:
    """Tables of scalars and lists, nested, and lists of tables: what a configuration is made of. A JSON string or list
    is TOML too."""
    lines: list[str] = []

    def table(path: str, content: dict[str, Any]) -> None:
        for key, value in content.items():
            if not _is_table(value):
                lines.append(f"{json.dumps(key)} = {json.dumps(value)}")
        for key, value in content.items():
            name = f"{path}.{json.dumps(key)}" if path else json.dumps(key)
            if isinstance(value, dict):
                lines.append(f"[{name}]")
                table(name, value)
            elif _is_table(value):
                for entry in value:
                    lines.append(f"[[{name}]]")
                    table(name, entry)

    table("", config)
    return "\n".join(lines) + "\n"


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and bool(value) and isinstance(value[0], dict))


def gateway_config(urls: Sequence[str], **tables: dict[str, Any]) -> dict[str, Any]:
    """Backends gpu-0, gpu-1 ... at `urls`, free ports, JSON access lines, quick health checks, no lame-duck moment;
    `tables` add to it or win over it."""
    config: dict[str, Any] = {
        "server": {"port": 0},
        "admin": {"port": 0},
        "routing": {},
        "timeouts": {"lame_duck_s": 0.0},
        "health": {"interval_s": 0.2, "healthy_after": 1},
        "log": {"format": "json"},
        "backends": [{"url": url, "name": f"gpu-{at}"} for at, url in enumerate(urls)],
    }
    for name, table in tables.items():
        if isinstance(table, dict):
            config[name] = {**config.get(name, {}), **table}
        else:
            config[name] = table
    if not config["backends"]:
        del config["backends"]
    return config


def serve_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "router", "serve", *arguments]


@contextmanager
def serving(*arguments: str, environment: dict[str, str] | None = None) -> Iterator[GatewayProcess]:
    """`kvgate serve ARGUMENTS`; killed at the end if it still runs."""
    process = subprocess.Popen(
        serve_command(*arguments),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    )
    gateway = None
    try:
        gateway = GatewayProcess(process)
        yield gateway
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        if gateway is not None:
            gateway.out.close()
            gateway.err.close()


@contextmanager
def running_gateway(
    urls: Sequence[str], *, wait: bool = True, environment: dict[str, str] | None = None, **tables: Any
) -> Iterator[GatewayProcess]:
    """A gateway with a generated configuration (gateway_config); `wait` for all of its backends to be up. What it
    wrote to its log must be free of tracebacks in the end."""
    with tempfile.TemporaryDirectory(prefix="kvgate-test-") as folder:
        file = Path(folder) / "kvgate.toml"
        file.write_text(toml(gateway_config(urls, **tables)))
        with serving("-c", str(file), environment=environment) as gateway:
            gateway.file = file
            if wait:
                gateway.wait_up(*(f"gpu-{at}" for at in range(len(urls))))
            yield gateway
            gateway.stop()
            broken = [line for line in gateway.err.wait_end() if "Traceback" in line or '"level":"error"' in line]
            assert broken == [], "\n".join(gateway.err.all())
