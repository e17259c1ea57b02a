"""A container's health check: what it takes for an answer, and that it finds the port a gateway really uses."""

import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import trustme

from router import healthcheck
from tests.support.gateway_process import running_gateway


@contextmanager
def answering(answer: bytes, context: ssl.SSLContext | None = None) -> Iterator[tuple[str, int]]:
    """A server that gives each of its connections this answer, until the test ends."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection, suppress(OSError):  # a plain question to a TLS port ends in one
                if context is None:
                    stream = connection
                else:
                    stream = context.wrap_socket(connection, server_side=True)
                with stream:
                    stream.recv(4096)
                    stream.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield server.getsockname()
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()


OK = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


def test_200_alone_is_alive():
    with answering(OK) as address:
        assert healthcheck.ask(address)[0]
    with answering(OK.replace(b"200 OK", b"404 Not Found")) as address:
        assert healthcheck.ask(address) == (False, f"http://127.0.0.1:{address[1]}/livez: 404")


def test_a_port_that_speaks_tls_is_asked_in_tls():
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("gateway.example").configure_cert(context)
    with answering(OK, context) as address:
        assert healthcheck.ask(address) == (True, f"https://127.0.0.1:{address[1]}/livez: 200")


def test_neither_http_nor_tls_is_not_alive():
    with answering(b"220 mail\r\n") as address:
        alive, told = healthcheck.ask(address)
    assert not alive
    assert "BadStatusLine, with TLS SSLError" in told


def test_a_process_that_accepts_and_is_silent_is_not_alive(monkeypatch):
    monkeypatch.setattr(healthcheck, "TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as server:
        alive, told = healthcheck.ask(server.getsockname())
    assert not alive
    assert "no answer" in told


def check(gateway) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "router", "healthcheck", "--pid", str(gateway.process.pid)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)


def test_the_port_that_a_gateway_really_uses_is_found():
    """Ports 0 on both listeners: nothing but the kernel knows them."""
    with running_gateway([]) as gateway:
        done = check(gateway)
        assert (done.returncode, done.stdout) == (0, f"http://127.0.0.1:{gateway.port}/livez: 200\n"), done.stderr
        assert gateway.admin("GET", "/livez").status == 404


def test_a_gateway_that_speaks_tls_is_found_and_has_nothing_to_complain_of(tmp_path):
    """running_gateway looks for errors in its log: the plain question must not make one every ten seconds."""
    certificate = trustme.CA().issue_cert("gateway.example")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    tls = {"port": 0, "tls_cert": str(tmp_path / "cert.pem"), "tls_key": str(tmp_path / "key.pem")}
    with running_gateway([], server=tls) as gateway:
        done = check(gateway)
        assert (done.returncode, done.stdout) == (0, f"https://127.0.0.1:{gateway.port}/livez: 200\n"), done.stderr
        assert gateway.stop() == 0
        assert [line for line in gateway.err.wait_end() if "ERROR" in line or "Exception" in line] == []
