"""Every strategy in a running gateway, by what its answers say: the backend, the reason, the match."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.sim_process import Response, SimProcess, running_sim

CHAT = "/v1/chat/completions"
FAST = ("--step-ms", "1", "--decode-ms", "0", "--decode-ms-per-seq", "0", "--enable-prompt-tokens-details")


@pytest.fixture(scope="module")
def sims() -> Iterator[list[SimProcess]]:
    with ExitStack() as stack:
        yield [stack.enter_context(running_sim(*FAST)) for _ in range(3)]


def gateway_of(sims: list[SimProcess], strategy: str, **tables: Any) -> Any:
    """With a strategy that knows all it can: kvaware waits for tokens as long as it may, and for the events to flow."""
    routing = {"strategy": strategy, "kvaware": {"token_wait_share": 1.0}, **tables.pop("routing", {})}

    @contextmanager
    def running() -> Iterator[GatewayProcess]:
        with running_gateway([sim.url for sim in sims], routing=routing, **tables) as gateway:
            if strategy == "kvaware":
                for at in range(len(sims)):
                    gateway.until(
                        lambda name=f"gpu-{at}": gateway.backend(name)["kv_events"]["state"] == "live", "events flow"
                    )
            yield gateway

    return running()


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "sim-8b", "messages": [{"role": "user", "content": text}], "max_tokens": 2, **fields}


def ask(gateway: GatewayProcess, body: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    answer = gateway.request("POST", CHAT, body, headers)
    assert answer.status == 200, answer.raw
    return answer


def placed(answer: Response) -> tuple[str, str, int]:
    return (
        answer.headers["x-kvgate-backend"],
        answer.headers["x-kvgate-reason"],
        int(answer.headers["x-kvgate-matched"]),
    )


def cached(answer: Response) -> int:
    details = answer.json()["usage"]["prompt_tokens_details"]
    return int(details["cached_tokens"]) if details else 0


def long(name: str) -> str:
    """A prompt of some 1,500 tokens that shares nothing with those of other names."""
    return " ".join(f"{name} {at}" for at in range(400))


def test_roundrobin_takes_turns_by_weight(sims: list[SimProcess]) -> None:
    backends = [{"url": sim.url, "name": f"gpu-{at}", "weight": at + 1.0} for at, sim in enumerate(sims)]
    with gateway_of(sims, "roundrobin", backends=backends) as gateway:
        answers = [placed(ask(gateway, chat("hi"))) for _ in range(12)]
    assert {reason for _, reason, _ in answers} == {"roundrobin"}
    assert Counter(backend for backend, _, _ in answers) == {"gpu-0": 2, "gpu-1": 4, "gpu-2": 6}


def test_leastload_spreads_what_is_under_way(sims: list[SimProcess]) -> None:
    with gateway_of(sims, "leastload") as gateway, ExitStack() as stack:
        for _ in range(6):
            client = stack.enter_context(gateway.send("POST", CHAT, chat("x", max_tokens=100_000, stream=True)))
            head = client.read_until(b"\r\n\r\n")
            assert b"x-kvgate-reason: leastload\r\n" in head
        loads = [gateway.metric("in_flight", backend=f"gpu-{at}") for at in range(3)]
    assert loads == [2, 2, 2]


@pytest.mark.parametrize(
    ("fields", "headers"),
    [
        ({}, {"X-Session-Id": "KEY"}),
        ({}, {"x-user-id": "KEY"}),
        ({"user": "KEY"}, {}),
        ({"prompt_cache_key": "KEY"}, {}),
        ({}, {"Cookie": "a=b; session=KEY; c=d"}),
    ],
)
def test_a_session_stays_where_it_is(sims: list[SimProcess], fields: dict[str, str], headers: dict[str, str]) -> None:
    with gateway_of(sims, "session", routing={"session": {"cookie": "session"}}) as gateway:
        homes = {}
        for key in ("anna", "ben", "chris", "dora", "emil", "fay"):
            given = {name: value.replace("KEY", key) for name, value in headers.items()}
            extra = {name: value.replace("KEY", key) for name, value in fields.items()}
            answers = [placed(ask(gateway, chat(f"turn {turn}", **extra), given)) for turn in range(3)]
            assert {reason for _, reason, _ in answers} == {"session"}
            (homes[key],) = {backend for backend, _, _ in answers}
        assert len(set(homes.values())) > 1


def test_a_session_without_key_is_placed_by_its_prefix(sims: list[SimProcess]) -> None:
    with gateway_of(sims, "session") as gateway:
        first = placed(ask(gateway, chat(long("keyless"))))
        again = placed(ask(gateway, chat(long("keyless"))))
    assert first[1] == "load"
    assert again[:2] == (first[0], "prefix")
    assert again[2] > 0


@pytest.mark.parametrize("strategy", ["prefixaware", "kvaware"])
def test_a_conversation_goes_where_its_prefix_is(sims: list[SimProcess], strategy: str) -> None:
    known = "prefix" if strategy == "prefixaware" else "kv"
    with gateway_of(sims, strategy) as gateway:
        homes: Counter[str] = Counter()
        for name in (f"{strategy}-{at}" for at in range(6)):
            first = ask(gateway, chat(long(name)))
            backend, reason, matched = placed(first)
            assert (reason, matched, cached(first)) == ("load", 0, 0)
            homes[backend] += 1
            body = chat(long(name))
            for _ in range(2):
                body["messages"] = [
                    *body["messages"],
                    {"role": "assistant", "content": "yes"},
                    {"role": "user", "content": "on"},
                ]
                answer = ask(gateway, body)
                assert placed(answer)[:2] == (backend, known)
                reported = cached(answer)
                assert reported > 1000
                # predicted in the engine's own tokens: estimated ones, or counted
                assert abs(placed(answer)[2] - reported) <= (0.15 * reported if known == "prefix" else 0)
        assert homes == {"gpu-0": 2, "gpu-1": 2, "gpu-2": 2}  # what is new goes to the least loaded
        assert gateway.metric("routing_decisions_total", strategy=strategy, reason=known) == 12


def test_an_engine_that_denies_its_cache_loses_our_trust_and_regains_it() -> None:
    with running_sim(*FAST) as sim, gateway_of([sim], "kvaware") as gateway:
        sim.fault("cached-tokens", 0)
        reasons = [placed(ask(gateway, chat(long("lie"))))[1] for _ in range(12)]
        assert reasons[0] == "load"
        assert "kv" in reasons
        assert reasons[-1] == "fallback-untrusted"
        assert gateway.metric("kv_resyncs_total", backend="gpu-0") == 1
        assert gateway.backend("gpu-0")["learned"]["placed_by"] == "load"
        hits = gateway.backend("gpu-0")["hits"]
        assert hits["trusted"] is False
        assert hits["trust"] < 0.5
        assert hits["predicted_tokens"] > 0
        assert hits["reported_tokens"] == 0
        assert gateway.metric("routing_decisions_total", reason="fallback-untrusted") >= 1
        sim.fault("cached-tokens", False)
        reasons = [placed(ask(gateway, chat(long("lie"))))[1] for _ in range(5)]
        assert reasons[-1] == "kv"
        assert gateway.backend("gpu-0")["learned"]["placed_by"] == "events"
        assert gateway.backend("gpu-0")["hits"]["trusted"] is True


def test_prefixaware_takes_no_engine_s_word() -> None:
    with running_sim(*FAST) as sim, gateway_of([sim], "prefixaware") as gateway:
        sim.fault("cached-tokens", 0)
        reasons = [placed(ask(gateway, chat(long("lie"))))[1] for _ in range(9)]
        assert reasons[1:] == ["prefix"] * 8
        assert "trust" not in gateway.backend("gpu-0")["hits"]


@pytest.mark.parametrize("strategy", ["prefixaware", "kvaware"])
def test_what_a_restarted_engine_had_is_forgotten(strategy: str) -> None:
    with running_sim(*FAST) as sim, gateway_of([sim], strategy) as gateway:
        gateway.until(lambda: gateway.backend("gpu-0")["report"] is not None, "polled")
        for _ in range(2):
            answer = ask(gateway, chat(long("before")))
        assert placed(answer)[2] > 0
        gateway.until(lambda: (gateway.backend("gpu-0")["report"]["prefix_queries"] or 0) > 0, "polled again")
        sim.fault("cold-restart")
        gateway.err.wait(lambda line: "gpu-0 is another process than before" in line)
        assert gateway.metric("index_blocks", backend="gpu-0") == 0
        answer = ask(gateway, chat(long("before")))
        assert placed(answer)[1] in ("load", "fallback-no-events")  # it is asked anew where its events are
        assert (placed(answer)[2], cached(answer)) == (0, 0)


def test_an_engine_that_was_killed_comes_back_cold_and_is_used_again() -> None:
    with ExitStack() as stack:
        stays = stack.enter_context(running_sim(*FAST))
        killed = stack.enter_context(running_sim(*FAST))
        gateway = stack.enter_context(gateway_of([stays, killed], "prefixaware", health={"unhealthy_after": 1}))
        homes: dict[str, str] = {}
        for name in ("one", "two", "three", "four"):
            homes[name] = placed(ask(gateway, chat(long(name))))[0]
        lost = [name for name, home in homes.items() if home == "gpu-1"]
        assert lost
        killed.stop(signal.SIGKILL)
        for name in homes:  # nobody notices, whether the gateway has
            assert placed(ask(gateway, chat(long(name))))[0] == "gpu-0"
        gateway.wait_out("gpu-1", "down")
        stack.enter_context(running_sim(*FAST, "--port", str(killed.port)))
        gateway.wait_up("gpu-1", times=2)
        backends = set()
        for at in range(6):
            backends.add(placed(ask(gateway, chat(long(f"new {at}"))))[0])
        assert backends == {"gpu-0", "gpu-1"}
        for name in lost:
            assert placed(ask(gateway, chat(long(name))))[0] == "gpu-0"  # where it was computed since
