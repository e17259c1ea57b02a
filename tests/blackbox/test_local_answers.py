"""What the gateway answers by itself: its own paths on both ports, and refusals with status, code and headers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.blackbox.raw_engine import MODEL, RawEngine, raw_engine
from tests.support.gateway_process import GatewayProcess, next_id, running_gateway
from tests.support.sim_process import Response, SimProcess, http_request, running_sim

CHAT = "/v1/chat/completions"
LOCAL_PATHS = ("/health", "/ping", "/livez", "/readyz", "/v1/models", "/metrics", "/version")


def assert_error(response: Response, status: int, code: str) -> dict[str, object]:
    """An error of the gateway in the shape that OpenAI clients read."""
    assert response.status == status, response.raw
    assert response.headers["x-kvgate-error"] == "1"
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    assert "x-kvgate-backend" not in response.headers
    error: dict[str, object] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    return error


@pytest.fixture(scope="module")
def sims() -> Iterator[list[SimProcess]]:
    with ExitStack() as stack:
        first = stack.enter_context(running_sim("--served-model-name", "alpha", "alpha-too"))
        yield [first, stack.enter_context(running_sim("--served-model-name", "beta"))]


@pytest.fixture(scope="module")
def gateway(sims: list[SimProcess]) -> Iterator[GatewayProcess]:
    limits = {"max_body_bytes": 4096, "max_header_bytes": 2048}
    with running_gateway([sim.url for sim in sims], limits=limits, timeouts={"client_body_s": 0.3}) as gateway:
        yield gateway


# -- the gateway's own paths


@pytest.mark.parametrize("path", ["/health", "/ping", "/livez", "/readyz"])
def test_a_gateway_with_engines_is_well(gateway: GatewayProcess, path: str) -> None:
    answer = gateway.request("GET", path)
    assert (answer.status, answer.json()) == (200, {"status": "ok"})
    assert "x-kvgate-error" not in answer.headers
    assert "x-kvgate-backend" not in answer.headers


def test_sagemaker_pings_with_post(gateway: GatewayProcess) -> None:
    assert gateway.request("POST", "/ping").json() == {"status": "ok"}


@pytest.mark.parametrize("path", LOCAL_PATHS)
def test_head_of_an_own_path_is_its_head_alone(gateway: GatewayProcess, path: str) -> None:
    with gateway.send("HEAD", path) as client:
        answer = client.read(head_only=True)
        assert answer.status == 200
        assert int(answer.headers["content-length"]) > 0
        client.send(http_request("GET", "/livez"))
        assert client.read().json() == {"status": "ok"}


def test_a_query_does_not_change_whose_path_it_is(gateway: GatewayProcess) -> None:
    assert gateway.request("GET", "/health?probe=1").json() == {"status": "ok"}


def test_own_paths_are_answered_with_one_date_and_the_given_id(gateway: GatewayProcess) -> None:
    answer = gateway.request("GET", "/health", headers={"X-Request-Id": "mine"})
    assert answer.headers["x-request-id"] == "mine"
    assert answer.raw.lower().count(b"\r\ndate:") == 1


def test_models_are_the_union_with_every_field(gateway: GatewayProcess, sims: list[SimProcess]) -> None:
    listing = gateway.request("GET", "/v1/models").json()
    assert listing["object"] == "list"
    entries = {entry["id"]: entry for entry in listing["data"]}
    assert set(entries) == {"alpha", "alpha-too", "beta"}
    own = {entry["id"]: entry for sim in sims for entry in sim.request("GET", "/v1/models").json()["data"]}
    for name, entry in entries.items():
        assert entry.keys() == own[name].keys()
        assert entry["max_model_len"] == own[name]["max_model_len"]


def test_one_model_of_the_listing_is_an_engine_s_answer(gateway: GatewayProcess) -> None:
    assert gateway.request("GET", "/v1/models/alpha").headers["x-kvgate-backend"].startswith("gpu-")


def test_the_version_is_the_gateway_s(gateway: GatewayProcess) -> None:
    import router

    assert gateway.request("GET", "/version").json() == {"version": router.__version__}


def test_both_ports_tell_the_same_metrics(gateway: GatewayProcess) -> None:
    data, admin = gateway.request("GET", "/metrics"), gateway.admin("GET", "/metrics")
    assert data.status == admin.status == 200
    assert data.headers["content-type"] == admin.headers["content-type"]
    assert data.headers["content-type"].startswith("text/plain; version=0.0.4")

    def names(answer: Response) -> list[str]:
        return [line for line in answer.body.decode().splitlines() if line.startswith("# TYPE")]

    assert names(data) == names(admin)


def test_the_admin_port_tells_of_each_backend(gateway: GatewayProcess, sims: list[SimProcess]) -> None:
    assert gateway.admin("GET", "/health").json() == {"status": "ok"}
    gateway.until(lambda: gateway.backend("gpu-0")["report"] is not None, "its figures were polled")
    backend = gateway.backend("gpu-0")
    assert backend["url"] == sims[0].url
    assert backend["state"] == "up"
    assert backend["serving"] is True
    assert backend["why"] == ""
    assert backend["models"] == ["alpha", "alpha-too"]
    assert backend["in_flight"] == 0
    assert backend["report"]["running"] == 0
    assert backend["hits"]["predicted_tokens"] == 0


def test_the_admin_port_refuses_in_json(gateway: GatewayProcess) -> None:
    missing = gateway.admin("GET", "/nothing")
    assert (missing.status, missing.json()["error"]["code"]) == (404, "not_found")
    wrong = gateway.admin("DELETE", "/metrics")
    assert (wrong.status, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert "GET" in wrong.headers["allow"]


# -- refusals


def test_an_unknown_model_is_404_with_the_known_ones(gateway: GatewayProcess) -> None:
    answer = gateway.request("POST", CHAT, {"model": "gamma", "messages": [{"role": "user", "content": "hi"}]})
    error = assert_error(answer, 404, "model_not_found")
    assert error["param"] == "model"
    for name in ("gamma", "alpha", "alpha-too", "beta"):
        assert f"{name}" in str(error["message"])


@pytest.mark.parametrize("body", [b"{not json", b"", b"[1, 2]", b'"text"', b'{"messages": []}'])
def test_a_body_without_model_is_400_where_it_is_needed(gateway: GatewayProcess, body: bytes) -> None:
    answer = gateway.request("POST", CHAT, body)
    assert answer.status == 400
    assert answer.headers["x-kvgate-error"] == "1"
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_body_that_is_no_json_says_so(gateway: GatewayProcess) -> None:
    assert_error(gateway.request("POST", CHAT, b'{"model": "alpha'), 400, "invalid_json")


def test_a_model_of_the_fleet_goes_where_it_is_served(gateway: GatewayProcess) -> None:
    for model, name in (("alpha", "gpu-0"), ("alpha-too", "gpu-0"), ("beta", "gpu-1")):
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        answer = gateway.request("POST", CHAT, body)
        assert (answer.status, answer.headers["x-kvgate-backend"]) == (200, name)


def test_a_body_over_the_limit_is_413_before_it_is_read(gateway: GatewayProcess) -> None:
    with gateway.connect() as client:
        client.send(f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Length: 4097\r\n\r\n".encode())
        assert_error(client.read(), 413, "body_too_large")
        assert client.closed()


def test_a_chunked_body_over_the_limit_is_413(gateway: GatewayProcess) -> None:
    with gateway.connect() as client:
        client.send(f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        client.send(b"1001\r\n" + b"x" * 4097 + b"\r\n")
        assert_error(client.read(), 413, "body_too_large")


def test_a_body_at_the_limit_passes(gateway: GatewayProcess) -> None:
    body = json.dumps({"model": "alpha", "max_tokens": 1, "messages": [{"role": "user", "content": ""}]}).encode()
    text = b"y " * 2048
    body = body.replace(b'"content": ""', b'"content": "' + text[: 4096 - len(body)] + b'"')
    assert len(body) == 4096
    assert gateway.request("POST", CHAT, body).status == 200


@pytest.mark.parametrize("end", [b"\r\n\r\n", b""])
def test_a_head_over_the_limit_is_431(gateway: GatewayProcess, end: bytes) -> None:
    with gateway.connect() as client:
        client.send(b"GET / HTTP/1.1\r\nHost: a\r\nX-Big: " + b"a" * 2048 + end)
        assert_error(client.read(), 431, "headers_too_large")
        assert client.closed()


@pytest.mark.parametrize(
    ("sent", "what"),
    [(b"GET / HTTP/1.1\r\nHo", "head"), (b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nabc", "body")],
)
def test_a_client_that_stops_in_its_request_is_408(gateway: GatewayProcess, sent: bytes, what: str) -> None:
    with gateway.connect() as client:
        client.send(sent)
        answer = client.read()
        assert what in str(assert_error(answer, 408, "request_timeout")["message"])
        assert answer.headers["connection"] == "close"
        assert client.closed()


BAD_REQUESTS = {
    "unknown method": (b"BREW / HTTP/1.1\r\nHost: a\r\n\r\n", 400, "invalid_method"),
    "connect": (b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n", 405, "method_not_allowed"),
    "another coding": (
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        501,
        "transfer_encoding",
    ),
    "length and coding": (
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
        "invalid_http",
    ),
    "two lengths": (
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        400,
        "invalid_http",
    ),
    "signed length": (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: +1\r\n\r\na", 400, "invalid_http"),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400, "invalid_http"),
    "two hosts": (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400, "invalid_http"),
    "folded header": (b"GET / HTTP/1.1\r\nHost: a\r\nX: 1\r\n 2\r\n\r\n", 400, "invalid_http"),
    "bare LF": (b"GET / HTTP/1.1\nHost: a\n\n\r\n\r\n", 400, "invalid_http"),
    "control byte": (b"GET / HTTP/1.1\r\nHost: a\r\nX: a\x01b\r\n\r\n", 400, "invalid_http"),
    "space before colon": (b"GET / HTTP/1.1\r\nHost: a\r\nX : 1\r\n\r\n", 400, "invalid_http"),
    "ftp target": (b"GET ftp://a/ HTTP/1.1\r\nHost: a\r\n\r\n", 400, "invalid_http"),
    "expectation": (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nExpect: x\r\n\r\na", 417, "expectation"),
    "bad chunk size": (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400, "invalid_http"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_what_is_no_proper_request_is_refused_and_its_connection_ends(gateway: GatewayProcess, name: str) -> None:
    sent, status, code = BAD_REQUESTS[name]
    with gateway.connect() as client:
        client.send(sent + http_request("GET", "/livez"))  # what follows must not be taken for a request
        answer = client.read()
        assert_error(answer, status, code)
        assert answer.headers["connection"] == "close"
        if status == 405:
            assert "GET" in answer.headers["allow"]
        assert client.closed()
        assert client.rest == b""


# -- fleets


def test_a_gateway_without_backends_starts_and_says_503() -> None:
    with running_gateway([]) as gateway:
        assert gateway.request("GET", "/livez").status == 200
        for path in ("/health", "/ping", "/readyz"):
            answer = gateway.request("GET", path)
            assert answer.status == 503
            assert answer.headers["x-kvgate-error"] == "1"
        assert gateway.admin("GET", "/health").status == 503
        assert gateway.request("GET", "/v1/models").json() == {"object": "list", "data": []}
        answer = gateway.request("POST", CHAT, {"model": "m", "messages": []})
        assert_error(answer, 503, "no_backend")
        assert int(answer.headers["retry-after"]) >= 1


def test_a_dead_backend_takes_its_models_from_choices_but_breaks_nothing() -> None:
    with ExitStack() as stack:
        left = stack.enter_context(running_sim("--served-model-name", "stays"))
        gone = stack.enter_context(running_sim("--served-model-name", "goes"))
        health = {"unhealthy_after": 1}
        gateway = stack.enter_context(running_gateway([left.url, gone.url], health=health))
        gone.stop()
        gateway.wait_out("gpu-1", "down")
        assert gateway.request("GET", "/health").status == 200
        assert "stays" in {entry["id"] for entry in gateway.request("GET", "/v1/models").json()["data"]}
        answer = gateway.request("POST", CHAT, {"model": "goes", "messages": []})
        assert_error(answer, 503, "no_backend")
        assert int(answer.headers["retry-after"]) >= 1
        left.stop()
        gateway.wait_out("gpu-0", "down")
        assert gateway.request("GET", "/readyz").status == 503
        assert gateway.request("GET", "/v1/models").status == 200


def test_a_single_model_fleet_needs_no_model_in_the_body() -> None:
    with raw_engine() as engine, running_gateway([engine.url]) as gateway:
        for body in (b'{"messages": []}', b"{broken", b"", b"[]", b"\xff\xfe", b'{"model": null}'):
            with gateway.send("POST", CHAT, body, {"X-Request-Id": (request_id := next_id())}) as client:
                received = engine.take()
                assert received.body == body
                received.answer(b'{"error":"its own words"}', status="400 Bad Request")
                answer = client.read()
            assert (answer.status, answer.body) == (400, b'{"error":"its own words"}')
            assert "x-kvgate-error" not in answer.headers
            assert gateway.access(request_id)["status"] == 400


def test_a_body_that_nobody_can_read_goes_by_load() -> None:
    with raw_engine() as engine, running_gateway([engine.url]) as gateway:
        for body in (b"\x00\x01\x02", json.dumps({"model": MODEL, "messages": {"not": "a list"}}).encode()):
            with gateway.send("POST", CHAT, body) as client:
                engine.take().answer()
                assert client.read().headers["x-kvgate-reason"] == "fallback-shape"


def test_metrics_can_be_left_to_the_admin_port() -> None:
    with raw_engine() as engine, running_gateway([engine.url], server={"metrics": False}) as gateway:
        with gateway.send("GET", "/metrics") as client:
            engine.take().answer(b"the engine's")
            assert client.read().body == b"the engine's"
        assert gateway.admin("GET", "/metrics").status == 200


def test_a_key_from_the_environment_takes_the_client_s_place() -> None:
    with raw_engine() as engine:
        backends = [{"url": engine.url, "name": "gpu-0", "api_key_env": "TEST_ENGINE_KEY"}]
        with running_gateway(
            [engine.url], backends=backends, environment={"TEST_ENGINE_KEY": "engine-secret"}
        ) as gateway:
            with gateway.send("GET", "/x", headers={"Authorization": "Bearer client-secret"}) as client:
                received = engine.take()
                assert received.header("authorization") == ["Bearer engine-secret"]
                received.answer()
                client.read()
            said = "\n".join(gateway.out.all() + gateway.err.all()) + gateway.admin("GET", "/backends").body.decode()
            assert "engine-secret" not in said
            assert "client-secret" not in said


def test_requests_wait_for_a_backend_that_is_just_starting() -> None:
    """A gateway and its engines are often started together: who comes a moment early waits in the queue."""
    engine = RawEngine()
    try:
        engine.alive = False
        backends = [{"url": engine.url, "name": "gpu-0", "models": [MODEL]}]
        with (
            running_gateway([engine.url], wait=False, backends=backends) as gateway,
            gateway.send("POST", CHAT, {"model": MODEL, "messages": []}) as client,
        ):
            gateway.until_metric("queue_depth", 1)
            engine.alive = True
            engine.take().answer(b"{}")
            assert client.read().status == 200
    finally:
        engine.close()
