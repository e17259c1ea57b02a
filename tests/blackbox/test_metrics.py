"""Every metric against what was done, series by series: traffic of each kind and each end, a fleet that changes, and
scrapes from both ports."""

from __future__ import annotations

import json
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.proxy.phases import EndedBy, Phase
from tests.blackbox.raw_engine import MODEL, RawEngine, Received, raw_engine
from tests.support.gateway_process import Figures, GatewayProcess, next_id, running_gateway
from tests.support.sim_process import SimProcess, http_request, running_sim

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"

Series = dict[tuple[str, ...], float]


def answer(received: Received, body: bytes = b"{}", status: bytes = b"200 OK") -> None:
    """Whole, and the last one on its connection: one that the gateway kept could turn out closed and count as stale."""
    head = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    received.send(head % (status, len(body)) + body)
    received.close()


def chunk(text: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(text), text)


class Ledger:
    """What was done, in the terms of the metrics."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, ...]] = Counter()
        self.ended: Counter[tuple[str, ...]] = Counter()
        self.decisions: Counter[tuple[str, ...]] = Counter()
        self.retries: Counter[tuple[str, ...]] = Counter()
        self.begun = 0  # answers whose first byte went out
        self.pieces = 0  # that followed it
        self.placed = 0  # requests that got a backend
        self.sent = 0  # whose first attempt was written to its backend

    def add(self, model: str, backend: str, code: int, ended: str, *, placed: bool, begun: bool, sent: bool) -> None:
        self.requests[model, backend, str(code)] += 1
        by, _, phase = ended.partition("@")
        self.ended[by, phase] += 1
        self.begun += begun
        self.placed += placed
        self.sent += sent


def series(figures: Figures, name: str, *labels: str) -> Series:
    """Every sample of a metric by the values of its labels, and that it has no others."""
    found: Series = {}
    for given, value in figures.samples.get(f"kvgate_{name}", []):
        assert set(given) == set(labels)
        found[tuple(given[label] for label in labels)] = value
    return found


def compare(figures: Figures, ledger: Ledger) -> None:
    assert series(figures, "requests_total", "model", "backend", "code") == ledger.requests
    assert series(figures, "ended_total", "ended_by", "phase") == ledger.ended
    assert series(figures, "routing_decisions_total", "strategy", "reason") == ledger.decisions
    assert series(figures, "retries_total", "reason") == ledger.retries
    assert figures.sum("ttft_seconds_count") == figures.sum("e2e_seconds_count") == ledger.begun
    assert figures.sum("itl_seconds_count") == ledger.pieces
    assert figures.sum("queue_seconds_count") == ledger.placed
    assert figures.sum("overhead_seconds_count") == ledger.sent
    for name in ("ttft_seconds", "itl_seconds", "e2e_seconds", "queue_seconds", "overhead_seconds"):
        assert figures.sum(f"{name}_bucket", le="+Inf") == figures.sum(f"{name}_count")
        assert figures.sum(f"{name}_sum") >= 0.0
    assert figures.sum("e2e_seconds_sum") >= figures.sum("ttft_seconds_sum")
    assert figures.sum("broken_exchanges_total") == figures.sum("access_lines_dropped_total") == 0


def at_rest(gateway: GatewayProcess) -> Figures:
    gateway.until_metric("open_exchanges", 0)
    figures = gateway.metrics()
    assert figures.sum("in_flight") == figures.sum("queue_depth") == figures.sum("demand") == 0
    return figures


@pytest.fixture
def engine() -> Iterator[RawEngine]:
    with raw_engine(keep_alive=False) as engine:
        yield engine


def test_what_has_not_happened_yet_is_there_at_zero(engine: RawEngine) -> None:
    with running_gateway([engine.url]) as gateway:
        figures = gateway.metrics()
        compare(figures, Ledger())
        assert series(figures, "config_reloads_total", "result") == {("ok",): 0, ("failed",): 0}
        for name in ("kv_event_gaps_total", "spans_dropped_total", "queue_depth", "open_exchanges", "connections"):
            assert series(figures, name) == {(): 0}
        for name in ("in_flight", "backend_up"):
            assert series(figures, name, "backend") == {("gpu-0",): float(name == "backend_up")}
        assert series(figures, "index_blocks", "index", "backend") == {
            ("mirror", "gpu-0"): 0,
            ("events", "gpu-0"): 0,
        }
        assert figures.sum("index_memory_bytes") > 0
        ((labels, value),) = figures.samples["kvgate_build_info"]
        assert set(labels) == {"version", "native", "python"}
        assert value == 1
        assert series(figures, "demand", "model") == {(MODEL,): 0}


def test_every_end_of_a_request_is_counted_as_what_it_was(engine: RawEngine) -> None:
    """One gateway, one engine and room for one request: each kind in turn, and the sums after each."""
    ledger = Ledger()
    limits = {"max_in_flight": 1, "max_queue": 1}
    routing = {"strategy": "leastload"}
    with running_gateway([engine.url], limits=limits, routing=routing, retry={"attempts": 0}) as gateway:

        def after(request_id: str) -> None:
            """The request has ended, and all that is told of it is as the ledger has it."""
            gateway.access(request_id)
            compare(at_rest(gateway), ledger)

        def placed(code: int, ended: str, *, begun: bool = True, backend: str = "gpu-0", model: str = MODEL) -> None:
            ledger.decisions["leastload", "leastload"] += 1
            ledger.add(model, backend, code, ended, placed=True, begun=begun, sent=True)

        # a whole answer
        with gateway.send("POST", CHAT, BODY, {"X-Request-Id": (request_id := next_id())}) as client:
            received = engine.take()
            during = gateway.metrics()
            assert series(during, "in_flight", "backend") == {("gpu-0",): 1}
            assert during.sum("open_exchanges") == 1
            answer(received)
            client.read()
        placed(200, "upstream@done")
        after(request_id)

        # an engine's own error, and a path without a model
        with gateway.send("POST", CHAT, BODY, {"X-Request-Id": (request_id := next_id())}) as client:
            answer(engine.take(), status=b"422 Unprocessable Entity")
            client.read()
        placed(422, "upstream@done")
        after(request_id)
        with gateway.send("GET", "/made/up", headers={"X-Request-Id": (request_id := next_id())}) as client:
            answer(engine.take())
            client.read()
        placed(200, "upstream@done", model="")
        after(request_id)

        # a stream, piece by piece
        with gateway.send("POST", CHAT, BODY, {"X-Request-Id": (request_id := next_id())}) as client:
            received = engine.take()
            received.send(SSE + chunk(b"data: 0\n\n"))
            client.read_until(b"data: 0\n\n")
            for at in (b"1", b"2", b"3"):
                received.send(chunk(b"data: %b\n\n" % at))
                client.read_until(b"data: %b\n\n" % at)
            received.send(b"0\r\n\r\n")
            received.next_request()
            client.read_until(b"0\r\n\r\n")
        ledger.pieces += 4
        placed(200, "upstream@done")
        after(request_id)

        # an answer that the engine cuts, and one that it never begins
        with gateway.send("POST", CHAT, BODY, {"X-Request-Id": (request_id := next_id())}) as client:
            received = engine.take()
            received.send(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf")
            client.read_until(b"half")
            received.reset()
            assert client.closed()
        placed(200, "upstream@streaming")
        after(request_id)
        with gateway.send("POST", CHAT, BODY, {"X-Request-Id": (request_id := next_id())}) as client:
            engine.take().reset()
            assert client.read().status == 502
        placed(502, "upstream@await_head", begun=False, backend="")
        after(request_id)

        # a client that leaves: while it sends, before the answer, in it
        with gateway.connect() as client:
            request_id = next_id()
            head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nX-Request-Id: {request_id}\r\nContent-Length: 10\r\n"
            client.send(head.encode() + b"Expect: 100-continue\r\n\r\n")
            client.read_until(b"100 Continue\r\n\r\n")
        ledger.add("", "", 499, "client@read_body", placed=False, begun=False, sent=False)
        after(request_id)
        with gateway.send("POST", CHAT, BODY, {"X-Request-Id": (request_id := next_id())}):
            received = engine.take()
        received.wait_closed()
        placed(499, "client@await_head", begun=False, backend="")
        after(request_id)
        with gateway.send("POST", CHAT, BODY, {"X-Request-Id": (request_id := next_id())}) as client:
            received = engine.take()
            received.send(SSE + chunk(b"data: 0\n\n"))
            client.read_until(b"data: 0\n\n")
        received.wait_closed()
        placed(200, "client@streaming")
        after(request_id)

        # the queue: one waits and leaves, one is refused, one waits and is served
        with gateway.send("POST", CHAT, BODY, {"X-Request-Id": (first := next_id())}) as client:
            received = engine.take()
            with gateway.send("POST", CHAT, BODY, {"X-Request-Id": (leaving := next_id())}):
                gateway.until_metric("queue_depth", 1)
                assert gateway.metric("demand", model=MODEL) == 1
                refused = gateway.request("POST", CHAT, BODY, {"X-Request-Id": next_id()})
                assert refused.status == 429
            gateway.access(leaving)
            with gateway.send("POST", CHAT, BODY, {"X-Request-Id": (waiting := next_id())}) as second:
                gateway.until_metric("queue_depth", 1)
                answer(received)
                client.read()
                answer(engine.take())
                second.read()
            gateway.access(first)
        ledger.add(MODEL, "", 429, "gateway@queued", placed=False, begun=False, sent=False)
        ledger.add(MODEL, "", 499, "client@queued", placed=False, begun=False, sent=False)
        for _ in range(2):
            placed(200, "upstream@done")
        after(waiting)
        assert gateway.metrics().sum("queue_seconds_sum") > 0.0

        # what never needs an engine
        for method, path, body, code, ended in (
            ("GET", "/livez", None, 200, "gateway@done"),
            ("POST", CHAT, {"model": "nobody's"}, 404, "gateway@read_body"),
        ):
            given = gateway.request(method, path, body, {"X-Request-Id": (request_id := next_id())})
            assert given.status == code
            ledger.add("", "", code, ended, placed=False, begun=False, sent=False)
            after(request_id)
        with gateway.connect() as client:
            client.send(b"NOT HTTP\r\n\r\n")
            assert client.read().status == 400
        ledger.add("", "", 400, "gateway@read_head", placed=False, begun=False, sent=False)
        compare(at_rest(gateway), ledger)

        # nobody there
        engine.close()
        engine.alive = False
        gateway.wait_out("gpu-0", "down")
        refused = gateway.request("POST", CHAT, BODY, {"X-Request-Id": (request_id := next_id())})
        assert refused.status == 503
        ledger.add(MODEL, "", 503, "gateway@queued", placed=False, begun=False, sent=False)
        after(request_id)
        assert series(gateway.metrics(), "backend_up", "backend") == {("gpu-0",): 0}
        # the labels are those that the documents promise
        assert {by for by, _ in ledger.ended} == set(EndedBy)
        assert {phase for _, phase in ledger.ended} <= set(Phase)


def test_repeats_and_a_fleet_that_changes_are_counted(engine: RawEngine) -> None:
    ledger = Ledger()
    routing = {"strategy": "roundrobin"}
    with raw_engine(keep_alive=False) as other, running_gateway([engine.url, other.url], routing=routing) as gateway:
        engines = {"gpu-0": engine, "gpu-1": other}
        usage = {"prompt_tokens": 20, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 16}}
        told = json.dumps({"usage": usage}).encode()
        with gateway.send("POST", CHAT, BODY, {"X-Request-Id": (request_id := next_id())}) as client:
            gateway.until(lambda: any(each.waiting() for each in engines.values()), "a first attempt")
            first = next(name for name, each in engines.items() if each.waiting())
            (second,) = engines.keys() - {first}
            engines[first].take().reset()
            answer(engines[second].take(), told)
            assert client.read().headers["x-kvgate-backend"] == second
        ledger.decisions["roundrobin", "roundrobin"] += 1
        ledger.decisions["roundrobin", "retry"] += 1
        ledger.retries["upstream_lost",] += 1
        ledger.add(MODEL, second, 200, "upstream@done", placed=True, begun=True, sent=True)
        gateway.access(request_id)
        figures = at_rest(gateway)
        compare(figures, ledger)
        assert series(figures, "prompt_tokens_total", "backend") == {(second,): 20}
        matched = series(figures, "matched_tokens_total", "backend", "kind")
        assert matched == {(second, "predicted"): 0, (second, "reported"): 16}

        # it is removed: its series end, the sums of others go on
        left = [{"url": engines[first].url, "name": first}]
        gateway.write_config([], backends=left, routing=routing)
        gateway.reload()
        del ledger.requests[MODEL, second, "200"]
        figures = at_rest(gateway)
        compare(figures, ledger)
        assert series(figures, "config_reloads_total", "result") == {("ok",): 1, ("failed",): 0}
        for name in ("in_flight", "backend_up", "prompt_tokens_total"):
            assert (second,) not in series(figures, name, "backend")
        assert series(figures, "matched_tokens_total", "backend", "kind") == {}

        # and added again: it begins at zero
        gateway.write_config([engine.url, other.url], routing=routing)
        gateway.reload()
        gateway.wait_up(second, times=2)
        figures = at_rest(gateway)
        compare(figures, ledger)
        assert series(figures, "backend_up", "backend") == {("gpu-0",): 1, ("gpu-1",): 1}
        seen: Counter[str] = Counter()
        for _ in range(2):
            with gateway.send("POST", CHAT, BODY, {"X-Request-Id": (request_id := next_id())}) as client:
                gateway.until(lambda: any(each.waiting() for each in engines.values()), "an attempt")
                answer(next(each for each in engines.values() if each.waiting()).take(), told)
                seen[client.read().headers["x-kvgate-backend"]] += 1
            gateway.access(request_id)
        for name, count in seen.items():
            for _ in range(count):
                ledger.decisions["roundrobin", "roundrobin"] += 1
                ledger.add(MODEL, name, 200, "upstream@done", placed=True, begun=True, sent=True)
        figures = at_rest(gateway)
        compare(figures, ledger)
        assert series(figures, "prompt_tokens_total", "backend") == {(name,): 20 * n for name, n in seen.items()}


def test_a_drain_ends_what_is_under_way_and_counts_it(engine: RawEngine) -> None:
    with running_gateway([engine.url]) as gateway, gateway.send("POST", CHAT, BODY) as client:
        received = engine.take()
        with gateway.connect() as idle:
            idle.send(http_request("GET", "/livez"))
            assert idle.read().status == 200
            answer(received)
            assert client.read().status == 200
        gateway.until_metric("ended_total", 1, ended_by="upstream", phase="done")
        assert gateway.metric("ended_total", ended_by="gateway", phase="done") == 1
        assert gateway.stop() == 0


def test_no_client_makes_a_series(engine: RawEngine) -> None:
    with running_gateway([engine.url]) as gateway:
        before = len(gateway.metrics().samples["kvgate_requests_total"]) if gateway.metric("requests_total") else 0
        for at in range(30):
            gateway.request("POST", CHAT, {"model": f"made-up-{at}"}, {"X-Session-Id": f"made-up-{at}"})
            gateway.request("GET", f"/health?made-up-{at}", headers={"X-Request-Id": f"made-up-{at}"})
            with gateway.connect() as client:
                client.send(f"MADE-UP-{at} / HTTP/1.1\r\n\r\n".encode())
                client.read()
        figures = at_rest(gateway)
        assert "made-up" not in str(figures.samples)
        assert series(figures, "requests_total", "model", "backend", "code") == {
            ("", "", "404"): 30,
            ("", "", "200"): 30,
            ("", "", "400"): 30,
        }
        assert before == 0


def test_scrapes_on_both_ports_at_one_time_are_whole_and_a_scraper_that_leaves_costs_nothing(engine: RawEngine) -> None:
    with running_gateway([engine.url]) as gateway, ExitStack() as stack:
        clients = [stack.enter_context(gateway.send("GET", "/metrics")) for _ in range(20)]
        for leaving in clients[::2]:
            leaving.socket.close()
        texts = [client.read() for client in clients[1::2]]
        texts.append(gateway.admin("GET", "/metrics"))
        for text in texts:
            assert text.status == 200
            assert text.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
            assert text.body.startswith(b"# HELP kvgate_requests_total ")
            assert b"\nkvgate_build_info{" in text.body
            assert b"\nprocess_open_fds " in text.body
        head = gateway.request("HEAD", "/metrics")
        assert (head.status, head.body) == (200, b"")
        stack.close()
        gateway.until_metric("connections", 0)
        assert gateway.metric("open_exchanges") == 0
        figures = gateway.metrics()
        assert figures.sum("requests_total", backend="", code="200") + figures.sum("requests_total", code="499") == 21


def test_figures_of_an_engine_are_its_own_and_the_index_holds_what_was_sent() -> None:
    fast = ("--step-ms", "1", "--decode-ms", "0", "--decode-ms-per-seq", "0", "--max-num-seqs", "2")
    with running_sim(*fast) as sim, running_gateway([sim.url]) as gateway, ExitStack() as stack:
        texts = [f"{at} " * 640 for at in range(3)]  # 1280 bytes: ten blocks, of which nothing is common
        for text in (*texts, texts[0], texts[0]):
            answer = gateway.request("POST", "/v1/completions", {"model": "sim-8b", "prompt": text, "max_tokens": 2})
            assert answer.status == 200
        for _ in range(3):  # two run, one waits
            body = {"model": "sim-8b", "prompt": texts[0], "max_tokens": 100_000, "stream": True}
            stack.enter_context(gateway.send("POST", "/v1/completions", body))
        gateway.until_metric("backend_waiting", 1)
        gateway.until_metric("backend_running", 2)
        assert gateway.metric("demand", model="sim-8b") == 3
        assert gateway.metric("in_flight", backend="gpu-0") == 3
        assert 0.0 < gateway.metric("backend_kv_usage", backend="gpu-0") < 1.0
        assert gateway.metric("index_blocks", index="mirror", backend="gpu-0") == 30
        stack.close()
        gateway.until_metric("backend_running", 0)
        gateway.until_metric("backend_kv_usage", 0)
        told = Vllm(sim)
        gateway.until(lambda: gateway.metric("backend_hit_ratio") == told.hits / told.queries, "its own hit ratio")
        assert told.hits > 0
        figures = at_rest(gateway)
        assert figures.sum("index_blocks", backend="gpu-0") == 30


class Vllm:
    """What the engine itself says at /metrics."""

    def __init__(self, sim: SimProcess) -> None:
        samples: dict[str, float] = {}
        with urllib.request.urlopen(f"{sim.url}/metrics", timeout=20) as answer:
            for family in text_string_to_metric_families(answer.read().decode()):
                for sample in family.samples:
                    samples[sample.name] = samples.get(sample.name, 0.0) + sample.value
        self.hits = samples["vllm:prefix_cache_hits_total"]
        self.queries = samples["vllm:prefix_cache_queries_total"]
