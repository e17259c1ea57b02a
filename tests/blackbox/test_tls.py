"""TLS on the data port, and to https engines with a CA of their own."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from pathlib import Path

import pytest

from tests.blackbox.raw_engine import MODEL, raw_engine
from tests.support.certificates import make_certificates
from tests.support.gateway_process import running_gateway
from tests.support.sim_process import running_sim
from tests.support.tls_front import tls_front

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


def client_of(url_host: str, port: int, ca: Path) -> http.client.HTTPSConnection:
    return http.client.HTTPSConnection(url_host, port, context=ssl.create_default_context(cafile=ca), timeout=20)


def status_of(client: http.client.HTTPSConnection, path: str) -> int:
    client.request("GET", path)
    response = client.getresponse()
    response.read()
    return response.status


def served_certificate(host: str, port: int) -> bytes:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with socket.create_connection((host, port)) as raw, context.wrap_socket(raw, server_hostname=host) as secured:
        found = secured.getpeercert(binary_form=True)
        assert found is not None
        return found


def test_clients_are_served_over_tls_and_a_reload_takes_the_renewed_certificate(tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    server = {"port": 0, "tls_cert": str(made.cert), "tls_key": str(made.key)}
    with running_sim("--served-model-name", MODEL) as engine, running_gateway([engine.url], server=server) as gateway:
        assert gateway.url.startswith("https://")
        client = client_of(gateway.host, gateway.port, made.ca)
        assert status_of(client, "/readyz") == 200
        client.request("POST", CHAT, json.dumps({**BODY, "stream": True}), {"content-type": "application/json"})
        assert client.getresponse().read().endswith(b"data: [DONE]\n\n")
        before = served_certificate(gateway.host, gateway.port)
        make_certificates(tmp_path)  # the same files, another key
        gateway.reload()
        assert served_certificate(gateway.host, gateway.port) != before
        assert status_of(client, "/readyz") == 200  # a connection made before goes on
        client.close()
        gateway.until_metric("in_flight", 0)


def test_plain_text_and_broken_handshakes_on_the_tls_port_harm_nobody(tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    server = {"port": 0, "tls_cert": str(made.cert), "tls_key": str(made.key)}
    with running_sim("--served-model-name", MODEL) as engine, running_gateway([engine.url], server=server) as gateway:
        for sent in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01", b""):
            with socket.create_connection((gateway.host, gateway.port)) as raw:
                raw.sendall(sent)
                raw.shutdown(socket.SHUT_WR)
                while raw.recv(4096):
                    pass
        client = client_of(gateway.host, gateway.port, made.ca)
        assert status_of(client, "/livez") == 200
        client.close()
        gateway.until_metric("connections", 0)


def test_an_https_engine_with_its_own_ca_is_checked_and_served(tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    with raw_engine() as engine, tls_front(engine.url, made) as url:
        backends = [{"url": url, "name": "gpu-0", "tls_ca": str(made.ca)}]
        with running_gateway([], backends=backends) as gateway:
            gateway.wait_up("gpu-0")
            for body in (b"first", b"second"):
                with gateway.send("POST", CHAT, BODY) as client:
                    engine.take().answer(body)
                    assert client.read().body == body


@pytest.mark.parametrize("case", ["no CA", "another CA", "another name"])
def test_an_engine_whose_certificate_is_not_accepted_stays_out_and_says_why(tmp_path: Path, case: str) -> None:
    made = make_certificates(tmp_path / "engine", *(["elsewhere.test"] if case == "another name" else []))
    ca = make_certificates(tmp_path / "other").ca if case == "another CA" else made.ca
    with raw_engine() as engine, tls_front(engine.url, made) as url:
        backend = {"url": url, "name": "gpu-0"} | ({} if case == "no CA" else {"tls_ca": str(ca)})
        with running_gateway([], backends=[backend]) as gateway:
            gateway.until(lambda: "certificate" in gateway.backend("gpu-0")["why"], "the reason is told")
            assert gateway.request("GET", "/readyz").status == 503


def test_a_certificate_is_not_looked_at_where_the_file_says_so(tmp_path: Path) -> None:
    made = make_certificates(tmp_path, "elsewhere.test")
    with raw_engine() as engine, tls_front(engine.url, made) as url:
        backends = [{"url": url, "name": "gpu-0", "tls_verify": False}]
        with running_gateway([], backends=backends) as gateway:
            gateway.wait_up("gpu-0")
            with gateway.send("POST", CHAT, BODY) as client:
                engine.take().answer()
                assert client.read().status == 200
