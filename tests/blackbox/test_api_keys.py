"""With [auth] nobody without a key gets further than the probes, and no key is ever seen again."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import openai
import pytest

from tests.blackbox.raw_engine import MODEL, RawEngine, raw_engine
from tests.support.gateway_process import GatewayProcess, next_id, running_gateway
from tests.support.sim_process import http_request

KEY = "sk-plain-4711-abcdef"
HASHED_KEY = "sk-hashed-0815-ghijkl"
CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": []}


@pytest.fixture(scope="module")
def engine() -> Iterator[RawEngine]:
    with raw_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def gateway(engine: RawEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    file: Path = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"# who may ask\nteam-a:{KEY}\nteam-b:sha256:{sha256(HASHED_KEY.encode()).hexdigest()}\n")
    with running_gateway([engine.url], auth={"api_keys_file": str(file)}) as gateway:
        yield gateway
        said = "\n".join(gateway.out.all() + gateway.err.all())
        said += gateway.admin("GET", "/metrics").body.decode() + gateway.admin("GET", "/backends").body.decode()
        assert KEY not in said
        assert HASHED_KEY not in said


@pytest.mark.parametrize("headers", [{"Authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}])
def test_a_key_opens_is_named_in_the_access_line_and_stays_here(
    gateway: GatewayProcess, engine: RawEngine, headers: dict[str, str]
) -> None:
    with gateway.send(
        "POST", CHAT, BODY, {**headers, "X-Request-Id": (request_id := next_id()), "X-Other": "1"}
    ) as client:
        received = engine.take()
        assert KEY.encode() not in received.head
        assert received.header("x-other") == ["1"]
        received.answer()
        assert client.read().status == 200
    assert gateway.access(request_id)["key"] == "team-a"


def test_a_hashed_key_opens_too(gateway: GatewayProcess) -> None:
    answer = gateway.request(
        "GET", "/version", headers={"x-api-key": HASHED_KEY, "X-Request-Id": (request_id := next_id())}
    )
    assert answer.status == 200
    assert gateway.access(request_id)["key"] == "team-b"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/metrics"),
        ("GET", "/v1/models"),
        ("GET", "/version"),
        ("POST", CHAT),
        ("GET", "/no/such/path"),
        ("POST", "/sleep"),
    ],
)
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}])
def test_without_one_it_is_401(
    gateway: GatewayProcess, engine: RawEngine, method: str, path: str, headers: dict[str, str]
) -> None:
    answer = gateway.request(method, path, BODY if method == "POST" else None, headers)
    assert answer.status == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.headers["x-kvgate-error"] == "1"
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("authentication_error", "invalid_api_key", None)
    assert engine.waiting() == 0


@pytest.mark.parametrize("path", ["/health", "/ping", "/livez", "/readyz"])
def test_probes_need_none(gateway: GatewayProcess, path: str) -> None:
    assert gateway.request("GET", path).status == 200


def test_openai_clients_raise_their_authentication_error(gateway: GatewayProcess) -> None:
    with openai.OpenAI(base_url=gateway.url + "/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            client.models.list()
        assert caught.value.code == "invalid_api_key"
        assert [model.id for model in client.with_options(api_key=KEY).models.list()] == [MODEL]


def test_a_stranger_s_upload_is_refused_at_its_head(gateway: GatewayProcess) -> None:
    before = gateway.memory_bytes()
    with gateway.connect() as client:
        client.send(f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Length: 268435456\r\n\r\n".encode())
        assert client.read().status == 401
        with suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(40):
                client.send(b"x" * 1_048_576)
    gateway.until_metric("open_exchanges", 0)
    assert gateway.memory_bytes() - before < 32 * 1024 * 1024


def test_a_websocket_needs_a_key_and_its_tunnel_does_not_carry_it(gateway: GatewayProcess, engine: RawEngine) -> None:
    nonce = base64.b64encode(b"0123456789abcdef").decode()
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Key": nonce}
    assert gateway.request("GET", "/v1/realtime", headers=upgrade).status == 401
    assert engine.waiting() == 0
    with gateway.send("GET", "/v1/realtime", headers={**upgrade, "Authorization": f"Bearer {KEY}"}) as client:
        received = engine.take()
        assert received.header("authorization") == []
        received.send(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        client.read_until(b"\r\n\r\n")
        client.send(b"ping")
        assert received.receive(4) == b"ping"
        received.close()


def test_keys_are_replaced_by_a_reload_and_open_connections_ask_by_the_new_ones(
    engine: RawEngine, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.write_text(f"old:{KEY}\n")
    with running_gateway([engine.url], auth={"api_keys_file": str(file)}) as gateway, gateway.connect() as client:
        ask = http_request("GET", "/version", headers={"x-api-key": KEY})
        client.send(ask)
        assert client.read().status == 200
        file.write_text(f"new:{HASHED_KEY}\n")
        gateway.reload()
        client.send(ask)
        assert client.read().status == 401
        client.send(http_request("GET", "/version", headers={"x-api-key": HASHED_KEY}))
        assert client.read().status == 200
        gateway.write_config([engine.url])
        gateway.reload()
        assert gateway.request("GET", "/version").status == 200
