"""The admin port, asked over its own socket."""

from __future__ import annotations

import asyncio
import json

import pytest

from router.backends.backend import EngineReport, State
from router.backends.in_flight import InFlight
from router.backends.vllm_metrics import parse as parse_metrics
from router.config import ConfigError, Fault
from tests.support.fleet import request, text_of
from tests.support.scripted import request as client_request
from tests.support.world import Rules
from tests.unit.admin.rig import KV_EVENTS, METRICS_TYPE, Admin, running

pytestmark = pytest.mark.asyncio

FIELDS = {
    "name",
    "url",
    "weight",
    "models",
    "models_configured",
    "api_key_set",
    "state",
    "state_age_s",
    "serving",
    "why",
    "draining",
    "deleted",
    "last_error",
    "health",
    "in_flight",
    "queue_depth",
    "report",
    "hits",
    "learned",
    "index",
    "kv_events",
    "lacks",
}


async def listed(admin: Admin, name: str) -> dict[str, object]:
    answer = await admin.ask("GET", f"/backends/{name}")
    assert answer.status == 200
    found: dict[str, object] = answer.json()
    (same,) = [b for b in (await admin.ask("GET", "/backends")).json()["backends"] if b["name"] == name]
    assert found == same
    return found


# ---- what it tells


async def test_health_is_200_while_a_backend_can_serve() -> None:
    async with running() as admin:
        backend = admin.registry.add("a", "http://a")
        answer = await admin.ask("GET", "/health")
        assert answer.error() == (503, "no_backend")
        assert answer.headers["retry-after"] == "1"
        admin.registry.set_state(backend, State.UP, "")
        answer = await admin.ask("GET", "/health")
        assert (answer.status, answer.json()) == (200, {"status": "ok"})
        admin.registry.drain("a")
        assert (await admin.ask("GET", "/health")).status == 503


async def test_metrics_are_the_rendered_bytes_with_their_type() -> None:
    async with running() as admin:
        answer = await admin.ask("GET", "/metrics")
        assert (answer.status, answer.body) == (200, b"kvgate_up 1\n")
        assert answer.headers["content-type"] == METRICS_TYPE


async def test_the_version_is_what_it_was_given() -> None:
    async with running() as admin:
        assert (await admin.ask("GET", "/version")).json() == {"version": "1.2.3"}


async def test_a_backend_that_never_answered() -> None:
    async with running("roundrobin") as admin:
        admin.registry.add("a", "http://a", 0.5, api_key="sesame")
        admin.clock.advance(4.5)
        assert await listed(admin, "a") == {
            "name": "a",
            "url": "http://a:80",
            "weight": 0.5,
            "models": [],
            "models_configured": False,
            "api_key_set": True,
            "state": "starting",
            "state_age_s": 4.5,
            "serving": False,
            "why": "no health check answered yet",
            "draining": False,
            "deleted": False,
            "last_error": None,
            "health": {
                "check_ok": False,
                "connect_failures": 0,
                "failed_attempts": 0,
                "busy_answers": 0,
                "asked_last_for_s": 0.0,
                "last_byte_age_s": None,
                "trial_open": False,
            },
            "in_flight": 0,
            "queue_depth": 0,
            "report": None,
            "hits": {"predicted_tokens": 10, "reported_tokens": 8, "trust": 0.9},
            "learned": {},
            "index": None,
            "kv_events": KV_EVENTS,
            "lacks": [],
        }


async def test_load_models_and_a_report_with_its_age() -> None:
    async with running() as admin:
        backend = admin.registry.add("a", "http://a", models=["m", "lora"])
        admin.registry.set_state(backend, State.UP, "")
        guard = InFlight(backend)
        backend.report = EngineReport(
            at=admin.clock.now(), running=2, waiting=None, kv_usage=0.5, block_size_tokens=16, num_gpu_blocks=10
        )
        admin.clock.advance(1.5)
        shown = await listed(admin, "a")
        guard.release()
        assert set(shown) == FIELDS
        assert (shown["serving"], shown["why"], shown["in_flight"]) == (True, "", 1)
        assert (shown["models"], shown["models_configured"]) == (["m", "lora"], True)
        report = shown["report"]
        assert isinstance(report, dict)
        assert (report["age_s"], report["running"], report["waiting"], report["kv_usage"]) == (1.5, 2, None, 0.5)
        assert report["kv_capacity_tokens"] == 160


async def test_what_the_strategy_learned_and_holds_of_it() -> None:
    async with running("prefixaware", backends=2) as admin:
        strategy = admin.world.strategy.real
        first = admin.registry.backends[0]
        choice = strategy.choose(request(text_of(1, 64)), (first,))
        assert choice is not None
        strategy.placed(choice)
        shown = await listed(admin, first.name)
        learned, index = shown["learned"], shown["index"]
        assert isinstance(learned, dict)
        assert isinstance(index, dict)
        assert index["blocks"] == 2
        assert index["capacity_blocks"] > 2
        assert learned["prefill_tokens_per_s"] == pytest.approx(10_000)
        assert learned["prefill_speed_learned"] is False
        assert learned["prefilling"] == 1
        assert learned["prefill_pending_s"] > 0
        assert (await listed(admin, admin.registry.backends[1].name))["index"]["blocks"] == 0  # type: ignore[index]


async def test_why_it_is_out_since_when_and_what_went_wrong_last() -> None:
    async with running(backends=1) as admin:
        (backend,) = admin.registry.backends
        name = backend.name
        assert (await listed(admin, name))["last_error"] is None
        admin.clock.advance(60)
        admin.registry.set_state(backend, State.DOWN, "cannot connect: Connection refused")
        admin.clock.advance(10)
        shown = await listed(admin, name)
        assert (shown["state"], shown["state_age_s"]) == ("down", 10.0)
        assert shown["why"] == "cannot connect: Connection refused"
        assert shown["last_error"] == {"why": "cannot connect: Connection refused", "age_s": 10.0}
        admin.registry.set_state(backend, State.DOWN, "/health answers 500")  # the same state for another reason
        assert (await listed(admin, name))["last_error"] == {"why": "/health answers 500", "age_s": 10.0}
        admin.registry.set_state(backend, State.UP, "")
        admin.clock.advance(5)
        shown = await listed(admin, name)
        assert (shown["state"], shown["state_age_s"], shown["why"]) == ("up", 5.0, "")
        assert shown["last_error"] == {"why": "cannot connect: Connection refused", "age_s": 15.0}


async def test_a_draining_backend_says_so_and_leaves_when_it_carries_nothing() -> None:
    async with running(backends=1) as admin:
        (backend,) = admin.registry.backends
        guard = InFlight(backend)
        assert (await admin.ask("POST", "/backends/e0/drain")).json()["why"] == "draining"
        answer = await admin.ask("DELETE", "/backends/e0")
        assert (answer.status, answer.json()["why"], answer.json()["deleted"]) == (202, "being removed", True)
        assert (await listed(admin, "e0"))["in_flight"] == 1
        guard.release()
        admin.registry.reap()
        assert (await admin.ask("GET", "/backends")).json()["backends"] == []
        assert (await admin.ask("GET", "/backends/e0")).error() == (404, "backend_not_found")


async def test_nothing_is_remembered_of_backends_that_left() -> None:
    async with running() as admin:
        for at in range(20):
            admin.registry.add(f"b{at}", f"http://b{at}")
            admin.registry.remove(f"b{at}")
        assert admin.server._view._known == {}


async def test_those_who_wait_count_for_the_backends_that_could_serve_them() -> None:
    async with running(rules=Rules(strategy="leastload", max_in_flight=1), backends=0) as admin:
        admin.world.add_backend("a", models=("m",))
        admin.world.add_backend("b", models=("other",))
        admin.world.on_engine_requests(lambda connection, received: None)  # they never answer
        for _ in range(3):
            client = admin.world.client()
            client.send(client_request(b"POST", b"/v1/completions", body=b'{"model":"m","prompt":"x"}'))
        admin.world.run(0.1)
        answer = (await admin.ask("GET", "/backends")).json()
        assert (answer["strategy"], answer["draining"]) == ("leastload", False)
        assert (answer["in_flight"], answer["queue_depth"]) == (1, 2)
        assert {b["name"]: (b["in_flight"], b["queue_depth"]) for b in answer["backends"]} == {"a": (1, 2), "b": (0, 0)}
        admin.world.rest()


async def test_every_figure_of_a_real_scrape_is_json(pytestconfig: pytest.Config) -> None:
    scrape = pytestconfig.rootpath / "tests/fixtures/vllm/metrics-under-load.txt"
    async with running(backends=1) as admin:
        (backend,) = admin.registry.backends
        backend.report = parse_metrics(scrape.read_bytes())
        backend.report.at = admin.clock.now()
        report = (await listed(admin, "e0"))["report"]
        assert isinstance(report, dict)
        assert report["running"] is not None
        assert report["kv_capacity_tokens"] > 0
        assert "at" not in report


async def test_no_key_is_ever_shown() -> None:
    environ = {"ADMIN": "admin-secret", "ENGINE": "engine-secret"}
    config = {
        "admin": {"token_env": "ADMIN"},
        "backends": [{"url": "http://a", "name": "a", "api_key_env": "ENGINE"}],
    }
    async with running(config=config, environ=environ) as admin:
        (backend,) = admin.control.config.backends
        admin.registry.add("a", backend.url, api_key=backend.api_key)
        for path in ("/backends", "/backends/a", "/metrics", "/health", "/config", "/version"):
            body = (await admin.ask("GET", path)).body
            assert b"-secret" not in body, path


# ---- what it changes


async def test_a_backend_is_added_with_every_key_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_KEY", "engine-secret")
    async with running() as admin:
        spec = {
            "url": "http://10.0.0.7",
            "name": "gpu:7@rack",
            "weight": 0.5,
            "models": ["m"],
            "api_key_env": "ENGINE_KEY",
            "kv_events": "auto",
            "tls_ca": None,
        }
        answer = await admin.ask("POST", "/backends", spec)
        assert answer.status == 201
        shown = answer.json()
        assert (shown["url"], shown["name"], shown["weight"]) == ("http://10.0.0.7:80", "gpu:7@rack", 0.5)
        assert (shown["models"], shown["api_key_set"]) == (["m"], True)
        assert answer.headers["location"] == "/backends/gpu%3A7%40rack"
        assert b"engine-secret" not in answer.body
        assert (await admin.ask("GET", answer.headers["location"])).json() == shown
        backend = admin.registry.get("gpu:7@rack")
        assert backend is not None
        assert backend.api_key == "engine-secret"


async def test_without_a_name_it_is_called_by_its_address() -> None:
    async with running() as admin:
        answer = await admin.ask("POST", "/backends", {"url": "http://[::1]:8000"})
        assert (answer.status, answer.json()["name"]) == (201, "[::1]:8000")
        for written in (answer.headers["location"], "/backends/[::1]:8000"):
            assert (await admin.ask("GET", written)).json()["name"] == "[::1]:8000"
        answer = await admin.ask("DELETE", answer.headers["location"])
        assert answer.status == 202
        assert admin.registry.backends == ()


async def test_all_faults_of_a_backend_are_named_at_once_and_nothing_is_added() -> None:
    async with running() as admin:
        spec = {"url": "10.0.0.7:8000", "weight": -1, "api_key_env": "not a name", "wheight": 2}
        answer = await admin.ask("POST", "/backends", spec)
        assert answer.error() == (400, "invalid_backend")
        for said in ("url", "weight: -1", "api_key_env: (hidden)", "wheight: unknown key", "a scheme"):
            assert said in answer.message
        assert len(answer.message.splitlines()) == 4
        assert admin.registry.backends == ()


async def test_a_key_in_clear_is_refused_without_showing_it() -> None:
    async with running() as admin:
        answer = await admin.ask("POST", "/backends", {"url": "http://a", "api_key": "engine-secret"})
        assert answer.error() == (400, "invalid_backend")
        assert "api_key_env" in answer.message
        assert b"engine-secret" not in answer.body
        assert admin.registry.backends == ()


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"null", b"\xff", b'{"url": "http://a"} x'])
async def test_a_body_that_is_no_object_is_400(body: bytes) -> None:
    async with running() as admin:
        answer = await admin.ask("POST", "/backends", body)
        assert answer.status == 400
        assert answer.error()[1] in ("invalid_json", "bad_request")
        assert admin.registry.backends == ()


async def test_a_name_that_is_taken_is_409() -> None:
    async with running(backends=1) as admin:
        answer = await admin.ask("POST", "/backends", {"url": "http://b", "name": "e0"})
        assert answer.error() == (409, "conflict")
        assert len(admin.registry.backends) == 1


async def test_drain_and_undrain_can_be_said_twice() -> None:
    async with running(backends=1) as admin:
        (backend,) = admin.registry.backends
        for path, draining in (("drain", True), ("drain", True), ("undrain", False), ("undrain", False)):
            answer = await admin.ask("POST", f"/backends/e0/{path}")
            assert (answer.status, answer.json()["draining"]) == (200, draining)
            assert backend.serving is not draining


async def test_delete_can_be_said_twice_and_is_not_undone() -> None:
    async with running(backends=1) as admin:
        (backend,) = admin.registry.backends
        guard = InFlight(backend)
        for _ in range(2):
            assert (await admin.ask("DELETE", "/backends/e0")).status == 202
        assert (await admin.ask("POST", "/backends/e0/undrain")).error() == (409, "conflict")
        guard.release()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("DELETE", "/backends/x"),
        ("POST", "/backends/x/drain"),
        ("POST", "/backends/a%2Fb/undrain"),
        ("GET", "/backends/x"),
    ],
)
async def test_a_name_that_nobody_has_is_404(method: str, path: str) -> None:
    async with running() as admin:
        assert (await admin.ask(method, path)).error() == (404, "backend_not_found")


async def test_a_reload_tells_what_changed() -> None:
    async with running() as admin:
        admin.control.outcome = ["limits.max_queue: 1000 -> 10"]
        answer = await admin.ask("POST", "/reload")
        assert (answer.status, answer.json()) == (200, {"result": "ok", "changed": ["limits.max_queue: 1000 -> 10"]})


async def test_a_reload_that_fails_names_every_fault() -> None:
    async with running() as admin:
        faults = [Fault("server.port", "-1", "a port"), Fault("log.level", '"loud"', "another")]
        admin.control.outcome = ConfigError(faults)
        answer = await admin.ask("POST", "/reload")
        assert answer.error() == (400, "invalid_configuration")
        assert answer.message == "\n".join(map(str, faults))
        assert answer.json()["error"]["param"] == "server.port"


# ---- who may


CHANGES = [
    ("POST", "/backends", {"url": "http://b"}),
    ("DELETE", "/backends/e0", None),
    ("POST", "/backends/e0/drain", None),
    ("POST", "/backends/e0/undrain", None),
    ("POST", "/reload", None),
]
REBOUND = {"host": "evil.example:9090"}


@pytest.mark.parametrize(("method", "path", "body"), CHANGES)
async def test_every_change_asks_who_is_there(method: str, path: str, body: object) -> None:
    config = {"admin": {"token_env": "T"}}
    async with running(backends=1, config=config, environ={"T": "sesame"}) as admin:
        (backend,) = admin.registry.backends
        for headers, expected in (
            (REBOUND, (401, "invalid_admin_token")),
            ({**REBOUND, "authorization": "Bearer wrong"}, (401, "invalid_admin_token")),
            ({"origin": "http://evil.example"}, (403, "cross_site")),
            ({"sec-fetch-site": "cross-site"}, (403, "cross_site")),
        ):
            answer = await admin.ask(method, path, body, headers)
            assert answer.error() == expected
            assert ("www-authenticate" in answer.headers) is (expected[0] == 401)
        assert admin.registry.backends == (backend,)
        assert backend.serving
        answer = await admin.ask(method, path, body, {**REBOUND, "authorization": "Bearer sesame"})
        assert answer.status < 300


@pytest.mark.parametrize(("method", "path", "body"), CHANGES)
async def test_without_a_configured_token_it_is_403(method: str, path: str, body: object) -> None:
    async with running(backends=1) as admin:
        answer = await admin.ask(method, path, body, {**REBOUND, "x-forwarded-for": "127.0.0.1"})
        assert answer.error() == (403, "no_admin_token")
        assert "token_env" in answer.message


@pytest.mark.parametrize("header", ["x-forwarded-for", "x-real-ip", "forwarded"])
async def test_addresses_in_headers_are_nobodys_proof(header: str) -> None:
    async with running(backends=1) as admin:
        assert (await admin.ask("POST", "/backends/e0/drain", headers={**REBOUND, header: "127.0.0.1"})).status == 403
        assert (await admin.ask("POST", "/backends/e0/drain", headers={header: "8.8.8.8"})).status == 200


async def test_a_page_of_a_stranger_cannot_ask_for_leave_either() -> None:
    """A preflight gets no permission, so no browser sends what it asks for."""
    async with running(backends=1) as admin:
        headers = {"origin": "http://evil.example", "access-control-request-method": "DELETE"}
        answer = await admin.ask("OPTIONS", "/backends/e0", headers=headers)
        assert answer.error() == (405, "method_not_allowed")
        assert not [name for name in answer.headers if name.lower().startswith("access-control")]


async def test_the_token_of_a_reload_counts_at_once() -> None:
    async with running(backends=1) as admin:
        headers = {**REBOUND, "authorization": "Bearer new"}
        assert (await admin.ask("POST", "/backends/e0/drain", headers=headers)).status == 403
        other = {"admin": {"token_env": "T"}}
        async with running(config=other, environ={"T": "new"}) as source:
            admin.control.config = source.control.config
        assert (await admin.ask("POST", "/backends/e0/drain", headers=headers)).status == 200


async def test_reading_needs_nothing() -> None:
    async with running(backends=1) as admin:
        for path in ("/backends", "/config", "/metrics", "/health", "/version"):
            headers = {**REBOUND, "origin": "http://evil.example"}
            assert (await admin.ask("GET", path, headers=headers)).status == 200


# ---- bounds and faults


async def test_a_body_beyond_the_limit_is_413_whether_its_length_is_told_or_not() -> None:
    async with running() as admin:
        big = b" " * (1024 * 1024 + 1)
        assert (await admin.ask("POST", "/backends", big)).error() == (413, "body_too_large")
        reader, writer = await asyncio.open_connection("127.0.0.1", admin.port)
        writer.write(b"POST /backends HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(b"%x\r\n%b\r\n" % (len(big), big))
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 413")
        writer.close()
        exact = b'{"url":"http://a"}'.ljust(1024 * 1024)
        assert (await admin.ask("POST", "/backends", exact)).status == 201


async def test_a_small_body_does_not_become_a_large_one() -> None:
    """A coding of the body is not undone: the bytes are read as they came."""
    async with running() as admin:
        answer = await admin.ask("POST", "/backends", b"\x1f\x8b\x08\x00", {"content-encoding": "gzip"})
        assert answer.error() == (400, "invalid_json")


async def test_a_body_that_does_not_come_is_408() -> None:
    async with running(config={"timeouts": {"client_body_s": 0.05}}) as admin:
        reader, writer = await asyncio.open_connection("127.0.0.1", admin.port)
        writer.write(b"POST /backends HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408")
        writer.close()


async def test_an_unknown_path_is_a_json_404() -> None:
    async with running() as admin:
        assert (await admin.ask("GET", "/nope")).error() == (404, "not_found")


@pytest.mark.parametrize(
    ("path", "right"),
    [("/health", "GET"), ("/backends", "POST"), ("/backends/x/drain", "POST"), ("/reload", "POST"), ("/config", "GET")],
)
async def test_another_method_is_a_json_405_that_names_the_right_ones(path: str, right: str) -> None:
    async with running() as admin:
        answer = await admin.ask("PUT", path)
        assert answer.error() == (405, "method_not_allowed")
        assert right in answer.headers["allow"]


async def test_a_fault_of_ours_is_a_json_500_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as admin:
        admin.broken = True
        answer = await admin.ask("GET", "/metrics")
        assert answer.error() == (500, "internal_error")
        assert b"secret" not in answer.body
        assert "the admin port failed on /metrics" in caplog.text
        admin.broken = False
        assert (await admin.ask("GET", "/metrics")).status == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 as TLS begins\r\n\r\n",
        b"GET /backends HTTP/1.1\r\nHost: localhost\r\nno colon\r\n\r\n",
        b"GET /backends HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"POST /reload HTTP/1.1\r\nHost: localhost\r\nContent-Length: many\r\n\r\n",
        b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_a_json_400_and_no_traceback(raw: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with running() as admin:
        reader, writer = await asyncio.open_connection("127.0.0.1", admin.port)
        writer.write(raw)
        answer = await reader.read()
        writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ") or head.startswith(b"HTTP/1.0 400 ")
        assert b"\r\nx-kvgate-error: 1" in head
        assert json.loads(body)["error"]["code"] == "invalid_http"
        assert caplog.text == ""
        assert (await admin.ask("GET", "/version")).status == 200


async def test_others_may_add_routes_which_get_the_same_errors() -> None:
    async with running() as admin:
        other = Admin(admin.world, admin.control.config)

        async def fails(request: object) -> None:
            raise ConfigError([])

        other.server._add_routes = lambda app: app.router.add_get("/more", fails)
        other.port = await other.server.start()
        try:
            assert (await other.ask("GET", "/more")).error() == (500, "internal_error")
        finally:
            await other.server.stop()


async def test_a_taken_port_is_an_os_error_and_leaves_nothing() -> None:
    async with running() as admin:
        other = Admin(admin.world, admin.control.config)
        other.server._port = admin.port
        with pytest.raises(OSError, match="in use"):
            await other.server.start()
        await other.server.stop()


async def test_stop_frees_the_port_at_once_and_lets_go_of_the_fleet() -> None:
    async with running() as admin:
        followers = len(admin.registry._subscribers)
        await admin.server.stop()
        assert len(admin.registry._subscribers) == followers - 1
        with pytest.raises(OSError, match="Connect call failed"):
            await asyncio.open_connection("127.0.0.1", admin.port)
        await admin.server.stop()


async def test_what_an_engine_lacks_is_named_with_its_cure() -> None:
    async with running("kvaware") as admin:
        first, second = (admin.registry.add(name, f"http://{name}", models=["m"]) for name in "ab")
        first.report = EngineReport(at=0.0, block_size_tokens=16, prefix_caching=False)
        second.report = EngineReport(at=0.0, block_size_tokens=32, prefix_caching=True)
        told = {
            backend["name"]: backend["lacks"] for backend in (await admin.ask("GET", "/backends")).json()["backends"]
        }
        assert told["a"] == ["prefix caching is off; start it with --enable-prefix-caching"]
        assert told["b"] == [
            "block size 32 tokens, while a has 16 for the same model; start both with the same --block-size"
        ]
