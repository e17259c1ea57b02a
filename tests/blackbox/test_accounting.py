"""What the gateway tells of its traffic is true: metrics against what was sent, one access line a request, no secrets,
and nothing kept of what has ended."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.blackbox.raw_engine import MODEL, raw_engine
from tests.support.gateway_process import GatewayProcess, next_id, running_gateway
from tests.support.sim_process import SimProcess, running_sim

CHAT = "/v1/chat/completions"
FAST = ("--step-ms", "1", "--decode-ms", "0", "--decode-ms-per-seq", "0", "--enable-prompt-tokens-details")


@pytest.fixture
def sims() -> Iterator[list[SimProcess]]:
    with ExitStack() as stack:
        yield [stack.enter_context(running_sim(*FAST)) for _ in range(2)]


@pytest.fixture
def gateway(sims: list[SimProcess]) -> Iterator[GatewayProcess]:
    with running_gateway([sim.url for sim in sims], routing={"strategy": "kvaware"}) as gateway:
        yield gateway


def chat(text: str, **fields: object) -> dict[str, object]:
    return {"model": "sim-8b", "messages": [{"role": "user", "content": text}], "max_tokens": 3, **fields}


def test_the_figures_are_those_of_the_traffic(sims: list[SimProcess], gateway: GatewayProcess) -> None:
    sent: dict[str, tuple[str, int]] = {}  # request id -> (backend, status)
    prompt_tokens: Counter[str] = Counter()
    cached_tokens: Counter[str] = Counter()
    predicted: Counter[str] = Counter()
    decisions: Counter[str] = Counter()
    usage = {"stream_options": {"include_usage": True}}
    for turn in range(4):
        for user in range(3):
            body = chat(f"user {user} says " * 60 * (turn + 1), **({"stream": True, **usage} if user else {}))
            answer = gateway.request("POST", CHAT, body, {"X-Request-Id": (request_id := next_id())})
            assert answer.status == 200
            backend = answer.headers["x-kvgate-backend"]
            sent[request_id] = (backend, 200)
            told = answer.events()[-2]["usage"] if user else answer.json()["usage"]
            prompt_tokens[backend] += told["prompt_tokens"]
            cached_tokens[backend] += told["prompt_tokens_details"]["cached_tokens"]
            predicted[backend] += int(answer.headers["x-kvgate-matched"])
            decisions[answer.headers["x-kvgate-reason"]] += 1
    for _ in range(3):
        request_id = next_id()
        answer = gateway.request("POST", CHAT, chat("x", temperature=-1.0), {"X-Request-Id": request_id})
        assert answer.status == 400
        sent[request_id] = (answer.headers["x-kvgate-backend"], 400)
        decisions[answer.headers["x-kvgate-reason"]] += 1
    for _ in range(2):
        request_id = next_id()
        assert gateway.request("POST", CHAT, {"model": "nobody's"}, {"X-Request-Id": request_id}).status == 404
        sent[request_id] = ("", 404)

    lines = {request_id: gateway.access(request_id) for request_id in sent}
    figures = gateway.metrics()
    for backend, status in set(sent.values()):
        model = "sim-8b" if backend else ""
        asked = sum(value == (backend, status) for value in sent.values())
        assert figures.sum("requests_total", model=model, backend=backend, code=str(status)) == asked
    assert figures.sum("ended_total", ended_by="upstream", phase="done") == 15
    assert figures.sum("ended_total", ended_by="gateway") == 2
    assert figures.sum("ended_total") == len(sent)
    for reason, count in decisions.items():
        assert figures.sum("routing_decisions_total", strategy="kvaware", reason=reason) == count
    assert figures.sum("routing_decisions_total") == sum(decisions.values())
    for backend in ("gpu-0", "gpu-1"):
        assert figures.sum("prompt_tokens_total", backend=backend) == prompt_tokens[backend]
        assert figures.sum("matched_tokens_total", backend=backend, kind="reported") == cached_tokens[backend]
    assert sum(cached_tokens.values()) > 0
    assert sum(predicted.values()) > 0
    assert figures.sum("ttft_seconds_count") == figures.sum("e2e_seconds_count") == 15
    assert figures.sum("overhead_seconds_count") == 15
    assert figures.sum("queue_seconds_count") == 15
    assert figures.sum("in_flight") == figures.sum("queue_depth") == figures.sum("open_exchanges") == 0
    assert figures.sum("retries_total") == figures.sum("broken_exchanges_total") == 0
    assert figures.sum("backend_up") == 2
    assert figures.sum("index_blocks") > 0
    for request_id, (backend, status) in sent.items():
        line = lines[request_id]
        assert (line.get("backend", ""), line["status"], line["path"]) == (backend, status, CHAT)
        assert line["total_s"] >= line.get("ttft_s", 0.0) >= 0.0
        assert line["bytes_out"] > 0
    # the engines agree: each was asked what the gateway says that it was
    for sim, backend in zip(sims, ("gpu-0", "gpu-1"), strict=True):
        assert sim.stats()["requests"] == sum(value[0] == backend for value in sent.values())


def test_polled_figures_are_the_engines_own(sims: list[SimProcess], gateway: GatewayProcess) -> None:
    with ExitStack() as stack:
        for _ in range(3):
            client = stack.enter_context(gateway.send("POST", CHAT, chat("go on", max_tokens=100_000, stream=True)))
            client.read_until(b"data: ")
        gateway.until_metric("backend_running", 3)
        assert gateway.metric("in_flight") == 3
        assert gateway.metric("demand", model="sim-8b") == 3
        per_backend = [gateway.metric("backend_running", backend=name) for name in ("gpu-0", "gpu-1")]
        assert per_backend == [sim.stats()["running"] for sim in sims]
    gateway.until_metric("backend_running", 0)
    assert gateway.metric("in_flight") == 0


def test_one_access_line_a_request_says_who_ended_it_and_where() -> None:
    with raw_engine(keep_alive=False) as engine, running_gateway([engine.url]) as gateway:
        ids = [next_id() for _ in range(5)]
        whole, left, refused, broken, local = ids
        with gateway.send("POST", CHAT, {"model": MODEL}, {"X-Request-Id": whole}) as client:
            engine.take().answer()
            client.read()
        with gateway.send("POST", CHAT, {"model": MODEL}, {"X-Request-Id": left}):
            engine.take()
        gateway.access(left)
        gateway.request("POST", CHAT, {"model": "unknown"}, {"X-Request-Id": refused})
        with gateway.send("POST", CHAT, {"model": MODEL}, {"X-Request-Id": broken}) as client:
            engine.take().reset()
            client.read()
        gateway.request("GET", "/health?secret=query", headers={"X-Request-Id": local})
        found = {request_id: gateway.access(request_id) for request_id in ids}
        assert {request_id: (line["ended"], line["status"]) for request_id, line in found.items()} == {
            whole: ("upstream@done", 200),
            left: ("client@await_head", 499),
            refused: ("gateway@read_body", 404),
            broken: ("upstream@await_head", 502),
            local: ("gateway@done", 200),
        }
        assert found[whole]["client"] == "127.0.0.1"
        assert found[whole]["method"] == "POST"
        assert found[whole]["model"] == MODEL
        assert found[local]["path"] == "/health"
        assert len(gateway.access_lines()) == len(ids)


def test_an_access_line_in_text_is_one_line_of_fields() -> None:
    with raw_engine() as engine, running_gateway([engine.url], log={"format": "text"}) as gateway:
        path = "/x%0a/" + "y" * 400
        with gateway.send("GET", path, headers={"X-Request-Id": "a b\tc" * 40}) as client:
            engine.take().answer()
            client.read()
        (line,) = gateway.out.wait(lambda line: " access " in line)
        _, kind, *fields = line.split(" ")
        assert kind == "access"
        values = dict(field.partition("=")[::2] for field in fields)
        assert values["status"] == "200"
        assert values["ended"] == "upstream@done"
        assert values["backend"] == "gpu-0"
        assert len(values["path"]) <= 256
        assert len(values["id"]) <= 128


def test_access_lines_can_be_switched_off() -> None:
    with raw_engine() as engine, running_gateway([engine.url], log={"access": False}) as gateway:
        assert gateway.request("GET", "/livez").status == 200
        assert gateway.stop() == 0
        assert [line for line in gateway.out.wait_end() if " on http://" not in line] == []


def test_prompts_and_keys_never_reach_the_logs_or_the_admin_port() -> None:
    secret = "the-prompt-of-a-client"
    with raw_engine(keep_alive=False) as engine, running_gateway([engine.url], log={"level": "debug"}) as gateway:
        headers = {"Authorization": f"Bearer {secret}", "Cookie": secret, "X-Api-Key": secret}
        for body in (
            json.dumps({"model": MODEL, "prompt": secret}).encode(),
            b'{"model": "' + secret.encode() + b'", x',
        ):
            with gateway.send("POST", f"/v1/completions?key={secret}", body, headers) as client:
                engine.take().reset()
                assert client.read().status == 502
        refused = gateway.request("POST", CHAT, {"model": secret}, headers)
        assert refused.status == 404
        told = gateway.metrics().samples, gateway.admin("GET", "/backends").body.decode()
        gateway.stop()
        assert secret not in "\n".join(gateway.out.wait_end() + gateway.err.wait_end())
        assert secret not in str(told)


def test_labels_never_come_from_client_text() -> None:
    with raw_engine() as engine, running_gateway([engine.url]) as gateway:
        before = gateway.request("GET", "/metrics").body.count(b"\n")
        for at in range(20):
            gateway.request("POST", CHAT, {"model": f"made-up-{at}"})
        text = gateway.request("GET", "/metrics").body
        assert b"made-up" not in text
        assert text.count(b"\n") < before + 10
        assert gateway.metric("requests_total", model="", backend="", code="404") == 20


def test_files_and_connections_return_to_where_they_were(sims: list[SimProcess], gateway: GatewayProcess) -> None:
    gateway.until(lambda: gateway.backend("gpu-0")["report"] is not None, "polled")
    before = gateway.open_files()
    with ExitStack() as stack:
        clients = [
            stack.enter_context(gateway.send("POST", CHAT, chat(f"{at}", max_tokens=100_000, stream=True)))
            for at in range(40)
        ]
        for client in clients:
            client.read_until(b"data: ")
        figures = gateway.metrics()
        assert figures.sum("in_flight") == figures.sum("connections") == figures.sum("upstream_connections") == 40
        assert gateway.open_files() > before + 70
    gateway.until_metric("in_flight", 0)
    gateway.until_metric("connections", 0)
    gateway.until(lambda: gateway.open_files() <= before + 2, f"{before} open files")  # the admin port's own connection
    for sim in sims:
        sim.wait(aborted=1)
        assert sim.stats()["running"] == 0
