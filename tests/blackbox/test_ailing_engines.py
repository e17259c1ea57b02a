"""Engines that are neither well nor dead, beside one that is well: their clients notice nothing."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.gateway_process import running_gateway
from tests.support.sim_process import running_sim

CHAT = "/v1/chat/completions"
QUICK = ("--served-model-name", "m", "--no-kv-events", "--step-ms", "1", "--decode-ms", "1")


def chat(number: int) -> dict[str, object]:
    words = f"request {number} is like no other. " * 12
    return {"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": words}]}


@pytest.mark.parametrize("strategy", ["prefixaware", "leastload", "roundrobin"])
@pytest.mark.parametrize(("fault", "value"), [("reset", True), ("status", 503), ("status", 500)])
def test_an_engine_that_fails_at_once_does_not_draw_the_traffic(strategy: str, fault: str, value: object) -> None:
    """It looks idle for as long as nobody counts its failures. A 500 of a living engine passes, so a few may."""
    with (
        running_sim(*QUICK) as ailing,
        running_sim(*QUICK) as well,
        running_gateway([ailing.url, well.url], routing={"strategy": strategy}) as gateway,
    ):
        gateway.wait_up("gpu-0", "gpu-1")
        ailing.fault(fault, value)
        with ThreadPoolExecutor(6) as clients:
            statuses = list(clients.map(lambda n: gateway.request("POST", CHAT, chat(n)).status, range(300)))
        allowed = 12 if value == 500 else 0
        assert sum(status != 200 for status in statuses) <= allowed
        assert gateway.metric("open_exchanges") == 0


def test_what_waits_on_a_frozen_engine_is_repeated_once_its_health_checks_fail() -> None:
    health = {"interval_s": 0.2, "timeout_s": 0.2, "unhealthy_after": 2}
    with (
        running_sim(*QUICK) as frozen,
        running_sim(*QUICK) as well,
        running_gateway([frozen.url, well.url], routing={"strategy": "roundrobin"}, health=health) as gateway,
    ):
        gateway.wait_up("gpu-0", "gpu-1")
        frozen.process.send_signal(signal.SIGSTOP)
        try:
            with ThreadPoolExecutor(4) as clients:
                answers = list(clients.map(lambda n: gateway.request("POST", CHAT, chat(n)), range(4)))
            assert [answer.status for answer in answers] == [200] * 4
            assert {answer.headers["x-kvgate-backend"] for answer in answers} == {"gpu-1"}
            assert gateway.metric("in_flight", backend="gpu-0") == 0
        finally:
            frozen.process.send_signal(signal.SIGCONT)
