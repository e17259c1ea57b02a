"""The processes of a measurement: mock engines, and the proxies in front of them. Each is stopped by its pid."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

READY_BODY = json.dumps({"model": "mock", "messages": [{"role": "user", "content": "Are you there?"}]})


class BenchError(Exception):
    """Something the measurement needs is missing or did not start; the message says what."""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextlib.contextmanager
def running(command: Sequence[str], core: int | None, log: Path, **options: object) -> Iterator[subprocess.Popen[str]]:
    """Run `command` pinned to `core`, its stderr in `log`; stopped by its pid (TERM, after 10 s KILL) on leaving."""
    pinned = [*(["taskset", "-c", str(core)] if core is not None else []), *command]
    with log.open("a") as stderr:
        process: subprocess.Popen[str] = subprocess.Popen(  # type: ignore[call-overload]
            pinned, stdin=subprocess.DEVNULL, stderr=stderr, text=True, start_new_session=True, **options
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.stdout:
            process.stdout.close()


@dataclass(frozen=True)
class Engines:
    ports: list[int]

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    def counters(self) -> dict[str, int]:
        connection = http.client.HTTPConnection("127.0.0.1", self.ports[0], timeout=5)
        connection.request("GET", "/mock/counters")
        answer: dict[str, int] = json.loads(connection.getresponse().read())
        connection.close()
        return answer


@contextlib.contextmanager
def mock_engines(binary: Path, arguments: Sequence[str], core: int | None, log: Path) -> Iterator[Engines]:
    with running([str(binary), *arguments], core, log, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        words = process.stdout.readline().split()
        if words[:1] != ["ports"]:
            raise BenchError(f"the mock engine did not start, see {log}")
        yield Engines([int(word) for word in words[1:]])


NGINX_CONFIG = """\
daemon off;
{user}
worker_processes 1;
worker_rlimit_nofile 65536;
error_log stderr crit;
pid {dir}/nginx.pid;
events {{ worker_connections 32768; }}
http {{
    access_log {access_log};
    keepalive_timeout 75s;
    keepalive_requests 100000000;
    client_max_body_size 0;
    client_body_buffer_size 1m;  # the default would write bodies over 16 KB to disk
    client_body_temp_path {dir}/body;
    proxy_temp_path {dir}/proxy;
    fastcgi_temp_path {dir}/fastcgi;
    uwsgi_temp_path {dir}/uwsgi;
    scgi_temp_path {dir}/scgi;
    upstream engines {{
{servers}
        keepalive 2048;
        keepalive_requests 100000000;
    }}
    server {{
        listen 127.0.0.1:{port} backlog=4096;
        location / {{
            proxy_pass http://engines;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_read_timeout 600s;
            proxy_buffering {buffering};
        }}
    }}
}}
"""

KVGATE_CONFIG = """\
[server]
host = "127.0.0.1"
port = {port}
[admin]
host = "127.0.0.1"
port = {admin_port}
[routing]
strategy = "prefixaware"
[log]
access = {access}
"""

# Given the port to serve, the engines, a folder of its own, and whether the case streams: the command to run.
MakeCommand = Callable[[int, Engines, Path, bool], list[str]]


@dataclass(frozen=True)
class Proxy:
    name: str
    command: MakeCommand


def nginx(name: str = "nginx", access_log: str = "off") -> Proxy:
    def command(port: int, engines: Engines, folder: Path, streams: bool) -> list[str]:
        config = folder / "nginx.conf"
        config.write_text(
            NGINX_CONFIG.format(
                user="user root;" if os.geteuid() == 0 else "",
                dir=folder,
                access_log=access_log,
                servers="\n".join(f"        server 127.0.0.1:{p};" for p in engines.ports),
                port=port,
                buffering="off" if streams else "on",
            )
        )
        return ["nginx", "-p", str(folder), "-e", "stderr", "-c", str(config)]

    return Proxy(name, command)


def kvgate(name: str, executable: Sequence[str], *, access: bool) -> Proxy:
    def command(port: int, engines: Engines, folder: Path, streams: bool) -> list[str]:
        config = folder / "kvgate.toml"
        text = KVGATE_CONFIG.format(port=port, admin_port=free_port(), access=str(access).lower())
        text += "".join(f'[[backends]]\nurl = "{url}"\n' for url in engines.urls)
        config.write_text(text)
        return [*executable, "serve", "-c", str(config)]

    return Proxy(name, command)


def peer(spec: str) -> Proxy:
    """Any other proxy, from "NAME=COMMAND".

    In the command {port} is the port to serve on 127.0.0.1, {urls} the engines' URLs with spaces between (each an
    argument of its own where {urls} stands alone), {comma_urls} the same with commas, {dir} a folder to write to.
    """
    name, separator, template = spec.partition("=")
    if not separator or not name or not template:
        raise BenchError(f"--peer wants NAME=COMMAND, not {spec!r}")

    def command(port: int, engines: Engines, folder: Path, streams: bool) -> list[str]:
        arguments: list[str] = []
        for word in shlex.split(template):
            if word == "{urls}":
                arguments.extend(engines.urls)
                continue
            for key, value in {
                "{port}": str(port),
                "{urls}": " ".join(engines.urls),
                "{comma_urls}": ",".join(engines.urls),
                "{dir}": str(folder),
            }.items():
                word = word.replace(key, value)
            arguments.append(word)
        return arguments

    return Proxy(name, command)


@dataclass(frozen=True)
class RunningProxy:
    name: str
    pid: int
    port: int


@contextlib.contextmanager
def serving(proxy: Proxy, engines: Engines, folder: Path, core: int | None, streams: bool) -> Iterator[RunningProxy]:
    """The proxy, up to the moment when it has answered a first request through an engine."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    log = folder / "stderr.log"
    command = proxy.command(port, engines, folder, streams)
    with running(command, core, log, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60
        while not answers(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise BenchError(f"{proxy.name} does not answer; its last words:\n{log.read_text()[-2000:]}")
            time.sleep(0.05)
        yield RunningProxy(proxy.name, process.pid, port)


def answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("POST", "/v1/chat/completions", READY_BODY, {"Content-Type": "application/json"})
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
