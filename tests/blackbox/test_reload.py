"""SIGHUP: what a new configuration changes, what it keeps, and that a bad one changes nothing."""

from __future__ import annotations

import signal

import pytest

from tests.blackbox.raw_engine import MODEL, raw_engine
from tests.support.gateway_process import GatewayProcess, next_id, running_gateway
from tests.support.sim_process import http_request, running_sim

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
LONG = {"model": "sim-8b", "max_tokens": 1, "messages": [{"role": "user", "content": "the same long beginning " * 40}]}


def names(gateway: GatewayProcess) -> list[str]:
    return [backend["name"] for backend in gateway.admin("GET", "/backends").json()["backends"]]


def test_a_bad_file_changes_nothing_and_says_why() -> None:
    with raw_engine() as engine, running_gateway([engine.url], wait=True) as gateway:
        assert gateway.file is not None
        gateway.file.write_text('[server]\nprot = 1\n[log]\nlevel = "loud"\n')
        gateway.kill(signal.SIGHUP)
        (line,) = gateway.err.wait(lambda line: "reload failed" in line)
        assert "server.prot" in line
        assert "log.level" in line
        assert gateway.metric("config_reloads_total", result="failed") == 1
        assert names(gateway) == ["gpu-0"]
        assert gateway.request("GET", "/readyz").status == 200


@pytest.mark.parametrize(
    ("tables", "path"),
    [
        ({"server": {"port": 1}}, "server.port"),
        ({"admin": {"host": "127.0.0.2"}}, "admin.host"),
        ({"index": {"block_bytes": 64}}, "index.block_bytes"),
    ],
)
def test_what_only_a_restart_can_change_is_refused_as_a_whole(tables: dict[str, dict[str, object]], path: str) -> None:
    with raw_engine() as engine, running_gateway([engine.url]) as gateway:
        gateway.write_config([], **tables)
        gateway.kill(signal.SIGHUP)
        (line,) = gateway.err.wait(lambda line: "reload failed" in line)
        assert f"{path}: " in line
        assert "only a restart can change it" in line
        assert names(gateway) == ["gpu-0"]


def test_backends_follow_the_file_and_those_that_stay_keep_connection_and_cache() -> None:
    with running_sim() as first, running_sim() as second, running_gateway([first.url]) as gateway:
        assert gateway.request("POST", CHAT, LONG).headers["x-kvgate-matched"] == "0"
        opened = gateway.metric("upstream_connections")
        gateway.write_config([first.url, second.url])
        gateway.reload()
        gateway.wait_up("gpu-1")
        assert names(gateway) == ["gpu-0", "gpu-1"]
        again = gateway.request("POST", CHAT, LONG)
        assert again.headers["x-kvgate-backend"] == "gpu-0"
        assert int(again.headers["x-kvgate-matched"]) > 100
        assert gateway.metric("upstream_connections") == opened
        gateway.write_config([second.url], backends=[{"url": second.url, "name": "gpu-1", "weight": 2.0}])
        gateway.reload()
        assert names(gateway) == ["gpu-1"]
        assert gateway.backend("gpu-1")["weight"] == 2.0
        assert gateway.request("POST", CHAT, LONG).headers["x-kvgate-backend"] == "gpu-1"


def test_a_backend_whose_address_changes_is_another_and_the_old_one_ends_what_it_has() -> None:
    with raw_engine() as old, raw_engine() as new, running_gateway([old.url]) as gateway:
        with gateway.send("POST", CHAT, BODY) as begun:
            at_old = old.take()
            gateway.write_config([new.url])
            gateway.reload()
            gateway.wait_up("gpu-0", times=2)
            assert names(gateway) == ["gpu-0", "gpu-0"]
            assert gateway.metric("in_flight", backend="gpu-0") == 1
            with gateway.send("POST", CHAT, BODY) as later:
                new.take().answer(b"new")
                assert later.read().body == b"new"
            at_old.answer(b"old")
            assert begun.read().body == b"old"
        gateway.until(lambda: names(gateway) == ["gpu-0"], "the old one left")


def test_the_strategy_changes_and_what_is_known_of_the_caches_stays() -> None:
    with (
        running_sim() as first,
        running_sim() as second,
        running_gateway([first.url, second.url], routing={"strategy": "kvaware"}) as gateway,
    ):
        served_by = gateway.request("POST", CHAT, LONG).headers["x-kvgate-backend"]
        for strategy, reason in (("prefixaware", "prefix"), ("session", "prefix"), ("leastload", "leastload")):
            gateway.write_config([first.url, second.url], routing={"strategy": strategy})
            gateway.reload()
            answer = gateway.request("POST", CHAT, LONG)
            assert answer.headers["x-kvgate-reason"] == reason
            if reason == "prefix":
                assert answer.headers["x-kvgate-backend"] == served_by
        assert gateway.metric("routing_decisions_total", strategy="leastload") == 1
        # leastload does not follow the caches: what was known of them is dropped, not trusted
        gateway.write_config([first.url, second.url], routing={"strategy": "prefixaware"})
        gateway.reload()
        assert gateway.request("POST", CHAT, LONG).headers["x-kvgate-matched"] == "0"


def test_a_strategy_that_changes_while_requests_run_loses_no_count() -> None:
    with (
        raw_engine() as engine,
        running_gateway([engine.url], routing={"strategy": "prefixaware"}) as gateway,
    ):
        with gateway.send("POST", CHAT, BODY) as one, gateway.send("POST", CHAT, BODY) as other:
            first, second = engine.take(), engine.take()
            gateway.write_config([engine.url], routing={"strategy": "roundrobin"})
            gateway.reload()
            first.answer()
            gateway.until_metric("in_flight", 1)
            gateway.write_config([engine.url], routing={"strategy": "kvaware"})
            gateway.reload()
            second.answer()
            assert [one.read().status, other.read().status] == [200, 200]
        gateway.until_metric("in_flight", 0)
        assert gateway.metric("broken_exchanges_total") == 0


def test_limits_and_log_are_those_of_the_new_file() -> None:
    with raw_engine() as engine, running_gateway([engine.url]) as gateway:
        seen, unseen = next_id(), next_id()
        gateway.request("GET", "/livez", headers={"X-Request-Id": seen})
        gateway.access(seen)
        gateway.write_config(
            [engine.url], limits={"max_in_flight": 1, "max_queue": 0, "max_body_bytes": 1024}, log={"access": False}
        )
        gateway.reload()
        assert gateway.request("POST", CHAT, {**BODY, "user": "x" * 2000}).status == 413
        with gateway.send("POST", CHAT, BODY) as running:
            received = engine.take()
            refused = gateway.request("POST", CHAT, BODY, headers={"X-Request-Id": unseen})
            assert (refused.status, refused.json()["error"]["code"]) == (429, "queue_full")
            received.answer()
            assert running.read().status == 200
        gateway.stop()
        assert not any(unseen in line for line in gateway.out.wait_end())


def test_more_room_after_a_reload_is_given_to_those_who_wait() -> None:
    with (
        raw_engine() as engine,
        running_gateway([engine.url], limits={"max_in_flight": 1}) as gateway,
        gateway.send("POST", CHAT, BODY) as one,
        gateway.send("POST", CHAT, BODY) as other,
    ):
        first = engine.take()
        gateway.until_metric("queue_depth", 1)
        gateway.write_config([engine.url], limits={"max_in_flight": 2})
        gateway.reload()
        second = engine.take()
        first.answer()
        second.answer()
        assert [one.read().status, other.read().status] == [200, 200]


def test_a_client_connection_lives_through_a_reload() -> None:
    with raw_engine() as engine, running_gateway([engine.url]) as gateway, gateway.connect() as client:
        client.send(http_request("GET", "/livez"))
        assert client.read().status == 200
        gateway.write_config([engine.url], limits={"max_queue": 5})
        gateway.reload()
        client.send(http_request("GET", "/livez"))
        assert client.read().status == 200
