"""Reloads, drains, deaths and changes of the fleet while a dozen clients send: no request that had not begun to answer
fails."""

from __future__ import annotations

import signal

from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.sim_process import running_sim
from tests.support.steady_load import steady_load

MODEL = "sim-8b"
QUICK = ("--step-ms", "1", "--prefill-tokens-per-s", "100000")


def returned_to_zero(gateway: GatewayProcess) -> None:
    gateway.until_metric("in_flight", 0)
    gateway.until_metric("queue_depth", 0)
    gateway.until_metric("open_exchanges", 0)
    assert gateway.metric("broken_exchanges_total") == 0


def test_reloads_with_other_strategies_limits_and_weights() -> None:
    with running_sim(*QUICK) as first, running_sim(*QUICK) as second:
        urls = [first.url, second.url]
        with running_gateway(urls) as gateway:
            with steady_load(gateway.url, MODEL) as load:
                for turn, strategy in enumerate(("session", "roundrobin", "kvaware", "leastload", "prefixaware") * 2):
                    load.wait_more(20)
                    backends = [{"url": url, "name": f"gpu-{n}", "weight": 1.0 + turn} for n, url in enumerate(urls)]
                    gateway.write_config(
                        urls, routing={"strategy": strategy}, limits={"max_in_flight": turn % 3 * 4}, backends=backends
                    )
                    gateway.reload()
                load.wait_more(20)
                assert load.stop().keys() == {"ok"}
            returned_to_zero(gateway)


def test_backends_that_come_and_go_by_the_file() -> None:
    with (
        running_sim(*QUICK) as first,
        running_sim(*QUICK) as second,
        running_sim(*QUICK) as third,
        running_gateway([first.url]) as gateway,
    ):
        with steady_load(gateway.url, MODEL) as load:
            for urls in ([first, second], [second, third], [third, first], [second]) * 2:
                load.wait_more(20)
                gateway.write_config(
                    [], backends=[{"url": sim.url, "name": sim.url.rpartition(":")[2]} for sim in urls]
                )
                gateway.reload()
            load.wait_more(20)
            assert load.stop().keys() == {"ok"}
        returned_to_zero(gateway)


def test_backends_added_drained_undrained_and_deleted_by_request() -> None:
    with running_sim(*QUICK) as first, running_sim(*QUICK) as second, running_gateway([first.url]) as gateway:
        with steady_load(gateway.url, MODEL) as load:
            for _ in range(4):
                load.wait_more(10)
                assert gateway.admin("POST", "/backends", {"url": second.url, "name": "extra"}).status == 201
                gateway.until(lambda: gateway.backend("extra")["state"] == "up", "the new one is up")
                load.wait_more(10)
                assert gateway.admin("POST", "/backends/gpu-0/drain").status == 200
                gateway.until_metric("in_flight", 0, backend="gpu-0")
                load.wait_more(10)
                assert gateway.admin("POST", "/backends/gpu-0/undrain").status == 200
                load.wait_more(10)
                assert gateway.admin("DELETE", "/backends/extra").status == 202
                gateway.until(
                    lambda: len(gateway.admin("GET", "/backends").json()["backends"]) == 1, "it left the fleet"
                )
            assert load.stop().keys() == {"ok"}
        returned_to_zero(gateway)


def test_an_engine_that_is_killed() -> None:
    """What it had begun to answer is cut, visibly; everything else is answered by the other."""
    with (
        running_sim(*QUICK) as first,
        running_sim(*QUICK) as second,
        running_gateway([first.url, second.url], retry={"budget": 1.0}) as gateway,
    ):
        with steady_load(gateway.url, MODEL) as load:
            load.wait_more(50)
            second.process.kill()
            load.wait_more(100)
            ended = load.stop()
        assert ended.keys() <= {"ok", "cut"}, ended
        assert ended["cut"] <= 12  # as many as there are clients
        returned_to_zero(gateway)


def test_sigterm_with_a_second_gateway_in_the_wings() -> None:
    """As behind a load balancer that looks at readyz: it sends to the other gateway from then on; nothing is lost."""
    with (
        running_sim(*QUICK) as engine,
        running_gateway([engine.url], timeouts={"lame_duck_s": 1.0}) as leaving,
        running_gateway([engine.url]) as staying,
    ):
        with steady_load(leaving.url, MODEL) as load:
            load.wait_more(50)
            leaving.kill(signal.SIGTERM)
            leaving.until(lambda: leaving.request("GET", "/readyz").status == 503, "it says that it leaves")
            load.move_to(staying.url)
            assert leaving.wait() == 0
            load.wait_more(50)
            assert load.stop().keys() == {"ok"}
        returned_to_zero(staying)
