"""A simulated engine as a real process on a free port, and the smallest raw HTTP client that tests can read along."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

START_TIMEOUT_S = 30.0
ANSWER_TIMEOUT_S = 20.0


class Response:
    """One answer: `raw` are its bytes as they came, `chunks` those of a chunked body, `whole` whether its end came."""

    def __init__(self, raw: bytes, status: int, headers: dict[str, str], body: bytes, chunks: list[bytes]) -> None:
        self.raw = raw
        self.status = status
        self.headers = headers
        self.body = body
        self.chunks = chunks
        self.whole = True

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """The data of its server-sent events; [DONE] as a string."""
        found: list[Any] = []
        for line in self.body.decode().splitlines():
            if line.startswith("data: "):
                data = line[6:]
                found.append(data if data == "[DONE]" else json.loads(data))
        return found


class Connection:
    """A raw connection. `read` gives the next answer, also one that is cut short."""

    def __init__(self, host: str, port: int) -> None:
        self.socket = socket.create_connection((host, port), timeout=ANSWER_TIMEOUT_S)
        self.rest = b""

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def _more(self) -> bool:
        data = self.socket.recv(65_536)
        self.rest += data
        return bool(data)

    def read_until(self, mark: bytes) -> bytes:
        """Everything up to and with `mark`; EOFError if the connection ends first."""
        while mark not in self.rest:
            if not self._more():
                raise EOFError(self.rest)
        head, _, self.rest = self.rest.partition(mark)
        return head + mark

    def read_exactly(self, count: int) -> bytes:
        while len(self.rest) < count:
            if not self._more():
                raise EOFError(self.rest)
        data, self.rest = self.rest[:count], self.rest[count:]
        return data

    def read(self, *, head_only: bool = False) -> Response:
        raw = self.read_until(b"\r\n\r\n")
        while raw.startswith(b"HTTP/1.1 100"):
            raw += self.read_until(b"\r\n\r\n")
            if raw.count(b"HTTP/1.1") == 2:
                break
        lines = raw.decode("latin-1").rstrip("\r\n").split("\r\n")
        final = max(at for at, line in enumerate(lines) if line.startswith("HTTP/1."))
        status = int(lines[final].split(" ")[1])
        headers = {
            name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[final + 1 :])
        }
        if head_only:
            return Response(raw, status, headers, b"", [])
        chunks: list[bytes] = []
        if headers.get("transfer-encoding") != "chunked":
            body = self.read_exactly(int(headers["content-length"]))
            return Response(raw + body, status, headers, body, chunks)
        response = Response(raw, status, headers, b"", chunks)
        try:
            while True:
                size = self.read_until(b"\r\n")
                data = self.read_exactly(int(size, 16) + 2)
                response.raw += size + data
                if int(size, 16) == 0:
                    break
                chunks.append(data[:-2])
        except (EOFError, ConnectionResetError):
            response.whole = False
        response.body = b"".join(chunks)
        return response

    def closed(self) -> bool:
        """Wait for the end: True for FIN, False for RST."""
        try:
            while self._more():
                pass
        except ConnectionResetError:
            return False
        return True


class SimProcess:
    """A running `kvgate sim`."""

    def __init__(self, process: subprocess.Popen[str], url: str, control_url: str | None) -> None:
        self.process = process
        self.url = url
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self.host, self.port = parts.hostname, parts.port
        self.control_url = control_url

    def connect(self) -> Connection:
        return Connection(self.host, self.port)

    def request(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Response:
        """One request on its own connection; a dict becomes JSON."""
        with self.connect() as connection:
            connection.send(http_request(method, path, body, headers))
            return connection.read(head_only=method == "HEAD")

    def fault(self, kind: str, value: Any = True, count: int | None = None) -> None:
        """Over the control port where there is one: it answers while the other refuses."""
        url = urlsplit(self.control_url or self.url)
        body = {"kind": kind, "value": value} | ({} if count is None else {"count": count})
        with Connection(str(url.hostname), int(url.port or 0)) as connection:
            connection.send(http_request("POST", "/sim/fault", body))
            response = connection.read()
        assert response.status == 200, response.body

    def stats(self) -> dict[str, Any]:
        return self.request("GET", "/sim/stats").json()

    def wait(self, **counts: int) -> None:
        """Until each count of /sim/stats is at least so high."""
        query = "&".join(f"{name}={least}" for name, least in counts.items())
        response = self.request("GET", f"/sim/wait?{query}")
        assert response.status == 200, response.body

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout=START_TIMEOUT_S)


def http_request(method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> bytes:
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {"Host": "sim", **({"Content-Type": "application/json"} if body is not None else {}), **(headers or {})}
    if body is not None:
        fields["Content-Length"] = str(len(data))
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + data


@contextmanager
def running_sim(*arguments: str) -> Iterator[SimProcess]:
    """`kvgate sim --port 0 ARGUMENTS`; killed at the end if it still runs."""
    command = [sys.executable, "-m", "router.sim", "--port", "0", *arguments]
    environment = {key: value for key, value in os.environ.items() if key != "VLLM_SERVER_DEV_MODE"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        urls: dict[str, str] = {}
        while "listening" not in urls:
            line = process.stdout.readline()
            assert line, f"the simulated engine ended with {process.wait()}"
            word, _, url = line.strip().partition(" on ")
            urls[word] = url
        yield SimProcess(process, urls["listening"], urls.get("control"))
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
