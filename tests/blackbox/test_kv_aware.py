"""kvaware in a running gateway: engines that tell what they hold, and each way in which they do not."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.sim_process import Response, SimProcess, running_sim

CHAT = "/v1/chat/completions"
FAST = ("--step-ms", "1", "--decode-ms", "0", "--decode-ms-per-seq", "0", "--enable-prompt-tokens-details")
PATIENT = {"strategy": "kvaware", "kvaware": {"token_wait_share": 1.0}}
TOOL = {"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def sims() -> Iterator[list[SimProcess]]:
    with ExitStack() as stack:
        yield [stack.enter_context(running_sim(*FAST, "--server-dev-mode")) for _ in range(2)]


def long(name: str, words: int = 400) -> str:
    return " ".join(f"{name} {at}" for at in range(words))


class Chat:
    """A conversation with tools and content parts that grows."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": long("system", 100)}]

    def turn(self, gateway: GatewayProcess, **fields: Any) -> Response:
        text = long(f"{self.name}-{len(self.messages)}", 60)
        parts = [{"type": "text", "text": text}, {"type": "text", "text": "and?"}]
        self.messages.append({"role": "user", "content": parts if len(self.messages) % 2 else text})
        body = {"model": "sim-8b", "messages": self.messages, "tools": [TOOL], "tool_choice": "none", "max_tokens": 20}
        answer = gateway.request("POST", CHAT, body | fields)
        assert answer.status == 200, answer.raw
        self.messages.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})
        return answer


def matched(answer: Response) -> int:
    return int(answer.headers["x-kvgate-matched"])


def cached(answer: Response) -> int:
    details = answer.json()["usage"]["prompt_tokens_details"]
    return int(details["cached_tokens"]) if details else 0


def reason(answer: Response) -> str:
    return answer.headers["x-kvgate-reason"]


def until_state(gateway: GatewayProcess, name: str, state: str) -> None:
    gateway.until(lambda: gateway.backend(name)["kv_events"]["state"] == state, f"{name} is {state}")


def test_predictions_are_what_the_engines_report_whatever_becomes_of_their_caches(sims: list[SimProcess]) -> None:
    with running_gateway([sim.url for sim in sims], routing=PATIENT) as gateway:
        for name in ("gpu-0", "gpu-1"):
            until_state(gateway, name, "live")
        chats = [Chat(f"c{number}") for number in range(6)]
        answers = [chat.turn(gateway) for _ in range(4) for chat in chats]
        assert [matched(answer) for answer in answers] == [cached(answer) for answer in answers]
        assert {reason(answer) for answer in answers} == {"load", "kv"}
        assert sum(map(matched, answers)) > 1000
        assert gateway.metric("kv_events_total", type="stored") > 100
        assert gateway.metric("index_blocks", index="events") > 100
        salted = [chats[0].turn(gateway, cache_salt=salt) for salt in ("one", "two", "one")]
        assert [matched(answer) > 0 for answer in salted] == [False, False, True]
        assert [matched(answer) for answer in salted] == [cached(answer) for answer in salted]
        for sim in sims:
            sim.request("POST", "/reset_prefix_cache")
        # The engine tells of it with its next batch: one choice each may go by what was there.
        answers = [chat.turn(gateway) for _ in range(3) for chat in chats]
        assert sum(matched(answer) != cached(answer) for answer in answers) <= len(sims)
        assert all(gateway.backend(name)["hits"]["trusted"] for name in ("gpu-0", "gpu-1"))


def test_a_gateway_that_starts_late_knows_what_was_cached_before(sims: list[SimProcess]) -> None:
    chat = Chat("late")
    with running_gateway([sim.url for sim in sims], routing=PATIENT) as gateway:
        for name in ("gpu-0", "gpu-1"):
            until_state(gateway, name, "live")
        served_by = chat.turn(gateway).headers["x-kvgate-backend"]
    with running_gateway([sim.url for sim in sims], routing=PATIENT) as gateway:
        for name in ("gpu-0", "gpu-1"):
            until_state(gateway, name, "live")
        answer = chat.turn(gateway)
        assert (answer.headers["x-kvgate-backend"], reason(answer)) == (served_by, "kv")
        assert matched(answer) == cached(answer) > 0


def test_an_engine_that_restarts_is_empty() -> None:
    with running_sim(*FAST) as first, running_gateway([first.url], routing=PATIENT) as gateway:
        until_state(gateway, "gpu-0", "live")
        chat = Chat("restarted")
        chat.turn(gateway)
        assert matched(chat.turn(gateway)) > 0
        first.stop(signal.SIGKILL)
        gateway.until(lambda: gateway.metric("backend_up") == 0, "the engine is out")
        with running_sim(*FAST, "--port", str(first.port)):
            gateway.wait_up("gpu-0", times=2)
            until_state(gateway, "gpu-0", "live")
            answers = [chat.turn(gateway) for _ in range(3)]
            assert [matched(answer) for answer in answers] == [cached(answer) for answer in answers]
            assert matched(answers[0]) == 0
            assert matched(answers[1]) > 0


@pytest.mark.parametrize(
    ("arguments", "key", "why"),
    [
        (("--no-kv-events",), "auto", "--kv-events-config"),
        ((), "off", "switched off"),
    ],
)
def test_without_events_the_mirror_places_and_says_so(arguments: tuple[str, ...], key: str, why: str) -> None:
    with ExitStack() as stack:
        sim = stack.enter_context(running_sim(*FAST, *arguments))
        backends = [{"name": "gpu-0", "url": sim.url, "kv_events": key}]
        gateway = stack.enter_context(running_gateway([sim.url], routing=PATIENT, backends=backends))
        until_state(gateway, "gpu-0", "off")
        chat = Chat("silent")
        answers = [chat.turn(gateway) for _ in range(3)]
        assert {reason(answer) for answer in answers} == {"fallback-no-events"}
        assert matched(answers[2]) > 0
        told = gateway.backend("gpu-0")
        assert why in told["kv_events"]["why"]
        assert told["learned"]["placed_by"] == "mirror"


def without_tokens(**kvaware: Any) -> dict[str, Any]:
    return {"strategy": "kvaware", "kvaware": {"token_wait_share": 1.0, **kvaware}}


def test_without_tokens_the_mirror_places_and_says_so(sims: list[SimProcess]) -> None:
    with running_gateway([sims[0].url], routing=without_tokens(tokenization="off")) as gateway:
        until_state(gateway, "gpu-0", "live")
        chat = Chat("uncounted")
        answers = [chat.turn(gateway) for _ in range(3)]
        assert {reason(answer) for answer in answers} == {"fallback-no-tokens"}
        assert matched(answers[2]) > 0
        assert gateway.admin("GET", "/backends").json()["tokens"]["sim-8b"]["source"] == "off"


def test_a_change_of_strategy_begins_and_ends_the_following(sims: list[SimProcess]) -> None:
    urls = [sim.url for sim in sims]
    with running_gateway(urls, routing={"strategy": "prefixaware"}) as gateway:
        assert gateway.backend("gpu-0")["kv_events"]["state"] == "off"
        gateway.write_config(urls, routing=PATIENT)
        gateway.reload()
        chat = Chat("changed")
        for name in ("gpu-0", "gpu-1"):
            until_state(gateway, name, "live")
        gateway.until(lambda: reason(chat.turn(gateway)) == "kv", "a match by events")
        gateway.write_config(urls, routing={"strategy": "prefixaware"})
        gateway.reload()
        until_state(gateway, "gpu-0", "off")
        assert reason(chat.turn(gateway)) == "prefix"
        assert gateway.metric("index_blocks", index="events") == 0


NO_REPLAY = '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:0"}'


def test_without_replay_an_engine_is_known_by_what_it_tells_from_then_on() -> None:
    with running_sim(*FAST, "--kv-events-config", NO_REPLAY) as sim:
        before = Chat("before")
        with running_gateway([sim.url], routing=PATIENT) as gateway:
            before.turn(gateway)
        with running_gateway([sim.url], routing=PATIENT) as gateway:
            until_state(gateway, "gpu-0", "incomplete")
            assert gateway.backend("gpu-0")["learned"]["placed_by"] == "mirror"
            answer = before.turn(gateway)
            assert (matched(answer), cached(answer) > 0) == (0, True)  # nobody has told of it
            answers = [before.turn(gateway) for _ in range(3)]
            assert {reason(answer) for answer in answers} <= {"kv", "prefix"}
            assert "replay_endpoint" in gateway.backend("gpu-0")["kv_events"]["why"]
