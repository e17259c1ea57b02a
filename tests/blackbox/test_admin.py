"""The admin port of a running gateway: the fleet changed under traffic, choices explained, answers while draining."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.sim_process import Response, SimProcess, running_sim

CHAT = "/v1/chat/completions"
FAST = ("--step-ms", "1", "--decode-ms", "2", "--decode-ms-per-seq", "0", "--enable-prompt-tokens-details")


@pytest.fixture(scope="module")
def sims() -> Iterator[list[SimProcess]]:
    with ExitStack() as stack:
        yield [stack.enter_context(running_sim(*FAST)) for _ in range(2)]


@pytest.fixture(scope="module")
def gateway(sims: list[SimProcess]) -> Iterator[GatewayProcess]:
    with running_gateway([sims[0].url], routing={"strategy": "prefixaware"}) as running:
        yield running


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "sim-8b", "messages": [{"role": "user", "content": text}], "max_tokens": 2, **fields}


def long(name: str) -> str:
    return " ".join(f"{name} {at}" for at in range(400))


def placed(answer: Response) -> tuple[str, str, int]:
    assert answer.status == 200, answer.raw
    headers = answer.headers
    return headers["x-kvgate-backend"], headers["x-kvgate-reason"], int(headers["x-kvgate-matched"])


def test_a_backend_comes_serves_drains_and_goes_while_its_stream_ends_whole(
    gateway: GatewayProcess, sims: list[SimProcess]
) -> None:
    added = gateway.admin("POST", "/backends", {"url": sims[1].url, "name": "late"})
    assert (added.status, added.headers["location"]) == (201, "/backends/late")
    gateway.wait_up("late")
    assert gateway.admin("POST", "/backends", {"url": sims[1].url, "name": "late"}).status == 409
    assert gateway.admin("POST", "/backends/gpu-0/drain").status == 200
    with gateway.send("POST", CHAT, chat("stream", stream=True, max_tokens=400)) as client:
        head = client.read_until(b"\r\n\r\n")
        assert b"x-kvgate-backend: late\r\n" in head
        assert gateway.admin("POST", "/backends/gpu-0/undrain").status == 200
        deleted = gateway.admin("DELETE", "/backends/late")
        assert (deleted.status, deleted.json()["why"]) == (202, "being removed")
        for _ in range(4):
            assert placed(gateway.request("POST", CHAT, chat("others")))[0] == "gpu-0"
        assert client.read_until(b"[DONE]\n\n")
    gateway.until(lambda: gateway.admin("GET", "/backends/late").status == 404, "the deleted backend gone")
    assert gateway.admin("DELETE", "/backends/late").status == 404


def test_an_explanation_is_what_then_happens(gateway: GatewayProcess, sims: list[SimProcess]) -> None:
    assert gateway.admin("POST", "/backends", {"url": sims[1].url, "name": "second"}).status == 201
    gateway.wait_up("second")
    warm = placed(gateway.request("POST", CHAT, chat(long("warm"))))[0]
    decisions = gateway.metric("routing_decisions_total")
    body = chat(long("warm") + " and a new question")
    told = gateway.admin("POST", "/explain", body)
    assert told.status == 200, told.body
    found = told.json()
    choice = found["choice"]
    assert (choice["backend"], choice["reason"]) == (warm, "prefix")
    matches = {c["backend"]: c["match_tokens"] for c in found["candidates"]}
    assert matches[warm] == choice["match_tokens"] > 500
    assert min(matches.values()) == 0
    assert gateway.metric("routing_decisions_total") == decisions
    assert placed(gateway.request("POST", CHAT, body)) == (warm, "prefix", choice["match_tokens"])
    assert gateway.admin("POST", "/explain", chat("x", model="no such")).json()["error"]["code"] == "model_not_found"
    assert gateway.admin("DELETE", "/backends/second").status == 202


def test_the_listing_shows_what_engine_and_gateway_know(gateway: GatewayProcess) -> None:
    gateway.request("POST", CHAT, chat(long("listed")))
    gateway.until(lambda: gateway.backend("gpu-0")["report"] is not None, "a report")
    shown = gateway.backend("gpu-0")
    assert (shown["state"], shown["serving"], shown["why"], shown["models"]) == ("up", True, "", ["sim-8b"])
    assert shown["report"]["kv_capacity_tokens"] > 0
    assert shown["report"]["kv_usage"] is not None
    assert shown["index"]["blocks"] > 0
    assert shown["learned"]["prefill_tokens_per_s"] > 0
    assert shown["hits"]["prompt_tokens"] > 0
    assert shown["health"]["check_ok"] is True
    assert shown["kv_events"]["state"] == "off"


def test_the_configuration_in_force_and_the_version(gateway: GatewayProcess, sims: list[SimProcess]) -> None:
    config = gateway.admin("GET", "/config").json()
    assert config["routing"]["strategy"] == "prefixaware"
    assert config["backends"][0]["url"] == sims[0].url
    version = gateway.admin("GET", "/version").json()
    assert version["version"] == gateway.request("GET", "/version").json()["version"]
    reloaded = gateway.admin("POST", "/reload")
    assert (reloaded.status, reloaded.json()) == (200, {"result": "ok", "changed": []})


def test_a_reload_by_request_takes_over_the_file_or_says_why_not(
    gateway: GatewayProcess, sims: list[SimProcess]
) -> None:
    assert gateway.file is not None
    before = gateway.file.read_bytes()
    gateway.file.write_text('[server]\nprot = 1\n[log]\nlevel = "loud"\n')
    refused = gateway.admin("POST", "/reload")
    assert (refused.status, refused.headers["x-kvgate-error"]) == (400, "1")
    message = refused.json()["error"]["message"]
    assert [line.partition(":")[0] for line in message.splitlines()] == ["server.prot", "log.level"]
    assert gateway.admin("GET", "/config").json()["log"]["level"] == "info"
    gateway.write_config([sims[0].url], routing={"strategy": "leastload"}, limits={"max_queue": 7})
    changed = gateway.admin("POST", "/reload")
    assert changed.status == 200, changed.body
    assert any(line.startswith("limits.max_queue: 1000 -> 7") for line in changed.json()["changed"])
    assert gateway.admin("GET", "/config").json()["limits"]["max_queue"] == 7
    assert gateway.admin("GET", "/backends").json()["strategy"] == "leastload"
    assert gateway.admin("POST", "/explain", chat("x")).json()["choice"]["reason"] == "leastload"
    gateway.file.write_bytes(before)
    assert gateway.admin("POST", "/reload").status == 200
    assert gateway.admin("POST", "/explain", chat("x")).json()["strategy"] == "prefixaware"


def test_strangers_change_nothing(gateway: GatewayProcess) -> None:
    drain = "/backends/gpu-0/drain"
    for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        refused = gateway.admin("POST", drain, headers=headers)
        assert (refused.status, refused.headers["x-kvgate-error"]) == (403, "1")
    assert gateway.backend("gpu-0")["draining"] is False


def test_a_token_opens_it_and_is_shown_nowhere(sims: list[SimProcess]) -> None:
    with running_gateway(
        [sims[0].url], admin={"token_env": "ADMIN_TOKEN"}, environment={"ADMIN_TOKEN": "sesame-token"}
    ) as gateway:
        away = {"Host": "gateway.example"}  # as whoever came under a name of somebody else's making
        assert gateway.admin("POST", "/backends/gpu-0/drain", headers=away).status == 401
        opened = gateway.admin(
            "POST", "/backends/gpu-0/drain", headers={**away, "Authorization": "Bearer sesame-token"}
        )
        assert opened.status == 200
        assert gateway.backend("gpu-0")["draining"] is True
        for path in ("/config", "/backends", "/metrics"):
            assert b"sesame-token" not in gateway.admin("GET", path).body
        assert gateway.admin("GET", "/config").json()["admin"]["token"] == "(set)"
        assert not [line for line in gateway.err.all() + gateway.out.all() if "sesame-token" in line]


def test_it_answers_while_the_gateway_drains(sims: list[SimProcess]) -> None:
    with running_gateway([sims[0].url], timeouts={"lame_duck_s": 0}) as gateway:
        with gateway.send("POST", CHAT, chat("bye", stream=True, max_tokens=100_000)) as client:
            client.read_until(b"\r\n\r\n")
            gateway.kill(signal.SIGTERM)
            gateway.until(lambda: gateway.admin("GET", "/backends").json()["draining"], "draining")
            listed = gateway.admin("GET", "/backends").json()
            assert listed["in_flight"] == 1
            assert gateway.admin("GET", "/metrics").status == 200
            assert gateway.admin("POST", "/explain", chat("x")).status == 200
            assert json.loads(gateway.admin("POST", "/backends/gpu-0/drain").body)["draining"] is True
        assert gateway.wait() == 0
