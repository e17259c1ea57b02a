"""An engine whose answers a test writes byte by byte, for what no simulated engine does.

Questions of the health monitor (/health, /v1/models, /metrics) are answered by threads; every other request goes to
the test, with the connection that it came on.
"""

from __future__ import annotations

import json
import queue
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tests.support.gateway_process import WAIT_S

MODEL = "raw-8b"


class Received:
    """One request as it came, and the connection for the answer. It is the test's until `next_request`."""

    def __init__(self, engine: RawEngine, connection: socket.socket, head: bytes, body: bytes, rest: bytes) -> None:
        self._engine = engine
        self.connection = connection
        self.head = head
        self.body = body
        self.rest = rest  # what came behind it
        first, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
        self.line = first
        self.headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]

    def header(self, name: str) -> list[str]:
        return [value for given, value in self.headers if given == name]

    def send(self, data: bytes) -> None:
        self.connection.sendall(data)

    def answer(self, body: bytes = b"{}", *, status: str = "200 OK", content_type: str = "application/json") -> None:
        """A whole answer, and then the next request on the same connection."""
        head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
        self.send(head.encode() + body)
        self.next_request()

    def next_request(self) -> None:
        """Let the engine read on, or close, as it was made."""
        if self._engine.keep_alive:
            self._engine.read_on(self.connection, self.rest)
        else:
            self.connection.close()

    def close(self) -> None:
        self.connection.close()

    def reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def receive(self, count: int) -> bytes:
        """Exactly so many further bytes."""
        while len(self.rest) < count:
            data = self.connection.recv(65_536)
            assert data, "the gateway closed"
            self.rest += data
        data, self.rest = self.rest[:count], self.rest[count:]
        return data

    def wait_closed(self) -> None:
        """Until the gateway has closed the connection. TimeoutError if it does not."""
        with suppress(ConnectionResetError):
            while self.connection.recv(65_536):
                pass


class RawEngine:
    """Without `keep_alive` it closes each connection after its answer: none is ever used again, so that a lost one is
    always the loss of an attempt."""

    def __init__(self, *, models: tuple[str, ...] = (MODEL,), keep_alive: bool = True) -> None:
        self.models = models
        self.keep_alive = keep_alive
        self.alive = True  # what /health says
        self._requests: queue.Queue[Received] = queue.Queue()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def take(self) -> Received:
        """The next request that is not the health monitor's."""
        return self._requests.get(timeout=WAIT_S)

    def waiting(self) -> int:
        """Requests that came and were not taken."""
        return self._requests.qsize()

    def close(self) -> None:
        # shutdown wakes the thread that accepts; close alone would leave it, and the port, until the next connection
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._sockets:
            connection.close()

    def read_on(self, connection: socket.socket, rest: bytes) -> None:
        threading.Thread(target=self._read, args=(connection, rest), daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.settimeout(WAIT_S)
            self._sockets.append(connection)
            self.read_on(connection, b"")

    def _read(self, connection: socket.socket, data: bytes) -> None:
        try:
            while True:
                while b"\r\n\r\n" not in data:
                    if not (more := connection.recv(65_536)):
                        connection.close()
                        return
                    data += more
                head, _, data = data.partition(b"\r\n\r\n")
                length = 0
                for line in head.split(b"\r\n")[1:]:
                    name, _, value = line.partition(b":")
                    if name.lower() == b"content-length":
                        length = int(value)
                while len(data) < length:
                    if not (more := connection.recv(65_536)):
                        connection.close()
                        return
                    data += more
                body, data = data[:length], data[length:]
                received = Received(self, connection, head + b"\r\n\r\n", body, data)
                answer = self._for_the_monitor(received)
                if answer is None:
                    self._requests.put(received)
                    return
                connection.sendall(answer)
        except OSError:
            connection.close()

    def _for_the_monitor(self, received: Received) -> bytes | None:
        if received.header("user-agent") != ["kvgate"]:
            return None
        status, body = "200 OK", b""
        if received.line.startswith("GET /health "):
            status = "200 OK" if self.alive else "503 Service Unavailable"
        elif received.line.startswith("GET /v1/models "):
            entries = [{"id": name, "object": "model", "created": 1, "owned_by": "raw"} for name in self.models]
            body = json.dumps({"object": "list", "data": entries}).encode()
        return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@contextmanager
def raw_engine(*, models: tuple[str, ...] = (MODEL,), keep_alive: bool = True) -> Iterator[RawEngine]:
    engine = RawEngine(models=models, keep_alive=keep_alive)
    try:
        yield engine
    finally:
        engine.close()
