"""Attempts: what is repeated on another backend before the first body byte, what is passed on as it is, and what may
never be sent twice."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from tests.blackbox.raw_engine import MODEL, RawEngine, Received, raw_engine
from tests.support.gateway_process import GatewayProcess, next_id, running_gateway
from tests.support.sim_process import Connection, Response, http_request

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**BODY, "stream": True}
SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
ERROR_EVENT = b'data: {"error": {"message": "EngineCore died", "type": "InternalServerError", "code": 500}}\n\n'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Pair:
    """A gateway over two scripted engines; whoever gets a request first is the first."""

    def __init__(self, gateway: GatewayProcess, engines: list[RawEngine]) -> None:
        self.gateway = gateway
        self.engines = engines

    @contextmanager
    def exchange(self, path: str = CHAT, body: Any = None, method: str = "POST") -> Iterator[Exchange]:
        request_id = next_id()
        given = (BODY if body is None else body) if method == "POST" else None
        with self.gateway.send(method, path, given, {"X-Request-Id": request_id}) as client:
            yield Exchange(self, client, request_id)


class Exchange:
    """One request on its way through the pair."""

    def __init__(self, pair: Pair, client: Connection, request_id: str) -> None:
        self._pair = pair
        self.client = client
        self.id = request_id
        self._backend = -1

    def first(self) -> Received:
        """The request at whichever engine it came to."""
        pair = self._pair
        pair.gateway.until(lambda: any(engine.waiting() for engine in pair.engines), "a request at an engine")
        self._backend = 0 if pair.engines[0].waiting() else 1
        return pair.engines[self._backend].take()

    def second(self) -> Received:
        """The repeat, at the other engine."""
        return self._pair.engines[1 - self._backend].take()

    def read(self) -> Response:
        return self.client.read()

    @property
    def first_name(self) -> str:
        return f"gpu-{self._backend}"

    @property
    def second_name(self) -> str:
        return f"gpu-{1 - self._backend}"

    def access(self) -> dict[str, Any]:
        return self._pair.gateway.access(self.id)

    def assert_repeated(self, answer: Response) -> None:
        assert answer.status == 200, answer.raw
        assert answer.headers["x-kvgate-backend"] == self.second_name
        assert answer.headers["x-kvgate-reason"] == "retry"
        line = self.access()
        assert (line["attempts"], line["reason"], line["backend"]) == (2, "retry", self.second_name)
        assert line["ended"] == "upstream@done"

    def assert_nothing_more(self) -> None:
        assert [engine.waiting() for engine in self._pair.engines] == [0, 0]
        assert self.access()["attempts"] == 1


@pytest.fixture
def pair() -> Iterator[Pair]:
    with pair_of() as pair:
        yield pair


@contextmanager
def pair_of(models: Sequence[tuple[str, ...]] = ((MODEL,), (MODEL,)), **tables: Any) -> Iterator[Pair]:
    with ExitStack() as stack:
        engines = [stack.enter_context(raw_engine(models=names, keep_alive=False)) for names in models]
        tables.setdefault("routing", {"strategy": "roundrobin"})
        gateway = stack.enter_context(running_gateway([engine.url for engine in engines], **tables))
        yield Pair(gateway, engines)
        assert gateway.metric("in_flight") == gateway.metric("queue_depth") == gateway.metric("open_exchanges") == 0


@pytest.fixture(scope="module")
def shared() -> Iterator[Pair]:
    """For tests that leave both engines as they were. Each breaks one of them once, and together too often."""
    with pair_of(health={"failed_attempts": 1000}) as pair:
        yield pair


# -- before the first body byte


@pytest.mark.parametrize(
    "sent", [b"", b"HTTP/1.1 200 OK\r\nContent-Le", SSE_HEAD, SSE_HEAD + chunk(b": keep-alive\n\n")]
)
@pytest.mark.parametrize("end", ["close", "reset"])
def test_an_engine_lost_before_its_first_body_byte_costs_the_client_nothing(
    shared: Pair, sent: bytes, end: str
) -> None:
    with shared.exchange(body=STREAM) as exchange:
        lost = exchange.first()
        if sent:
            lost.send(sent)
        getattr(lost, end)()
        repeated = exchange.second()
        assert (repeated.line, repeated.body) == (lost.line, lost.body)
        assert repeated.header("x-request-id") == [exchange.id]
        repeated.send(SSE_HEAD + chunk(b"data: 1\n\n") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        repeated.next_request()
        answer = exchange.read()
        assert answer.body == b"data: 1\n\ndata: [DONE]\n\n"  # nothing of the first try
        exchange.assert_repeated(answer)


def test_a_first_event_that_is_an_error_is_repeated(shared: Pair) -> None:
    before = shared.gateway.metric("retries_total", reason="error_event")
    with shared.exchange(body=STREAM) as exchange:
        failed = exchange.first()
        failed.send(SSE_HEAD + chunk(b": ping\n\n") + chunk(ERROR_EVENT[:20]) + chunk(ERROR_EVENT[20:]))
        repeated = exchange.second()
        failed.wait_closed()
        repeated.send(SSE_HEAD + chunk(b"data: 1\n\n") + b"0\r\n\r\n")
        repeated.next_request()
        answer = exchange.read()
        assert answer.body == b"data: 1\n\n"
        exchange.assert_repeated(answer)
    assert shared.gateway.metric("retries_total", reason="error_event") == before + 1


def test_a_first_event_that_is_an_error_on_both_passes_in_the_end(shared: Pair) -> None:
    """Nobody else is left: the second engine's own words are the answer."""
    with shared.exchange(body=STREAM) as exchange:
        exchange.first().send(SSE_HEAD + chunk(ERROR_EVENT))
        last = exchange.second()
        last.send(SSE_HEAD + chunk(ERROR_EVENT) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        last.next_request()
        answer = exchange.read()
        assert answer.body == ERROR_EVENT + b"data: [DONE]\n\n"
        assert exchange.access()["attempts"] == 2


@pytest.mark.parametrize("status", ["429 Too Many Requests", "503 Service Unavailable"])
def test_a_busy_answer_is_repeated_elsewhere(shared: Pair, status: str) -> None:
    with shared.exchange() as exchange:
        exchange.first().answer(b'{"error":"busy"}', status=status)
        exchange.second().answer(b'{"ok":1}')
        answer = exchange.read()
        assert answer.json() == {"ok": 1}
        exchange.assert_repeated(answer)
    assert shared.gateway.metric("backend_up") == 2  # its own limits are no sign of death


@pytest.mark.parametrize("status", ["429 Too Many Requests", "503 Service Unavailable"])
def test_a_busy_answer_passes_as_it_is_where_all_are_busy(shared: Pair, status: str) -> None:
    with shared.exchange() as exchange:
        exchange.first().answer(b'{"error":"first"}', status=status)
        exchange.second().answer(b'{"error":"second"}', status=status)
        answer = exchange.read()
    assert answer.raw.startswith(f"HTTP/1.1 {status}\r\n".encode())
    assert answer.json() == {"error": "second"}
    assert "x-kvgate-error" not in answer.headers
    assert answer.headers["x-kvgate-backend"] == exchange.second_name


def test_a_busy_answer_passes_when_the_other_then_fails(shared: Pair) -> None:
    """The engine's own answer says more than our 502."""
    with shared.exchange() as exchange:
        exchange.first().answer(b'{"error":"busy"}', status="503 Service Unavailable")
        exchange.second().reset()
        answer = exchange.read()
    assert (answer.status, answer.json()) == (503, {"error": "busy"})
    assert answer.headers["x-kvgate-backend"] == exchange.first_name


def test_a_500_of_an_engine_that_is_dead_is_repeated(pair: Pair) -> None:
    with pair.exchange() as exchange:
        dying = exchange.first()
        pair.engines[int(exchange.first_name[-1])].alive = False
        dying.answer(b'{"error":"EngineCore died"}', status="500 Internal Server Error")
        exchange.second().answer(b'{"ok":1}')
        answer = exchange.read()
        assert answer.json() == {"ok": 1}
        exchange.assert_repeated(answer)
        pair.gateway.wait_out(exchange.first_name, "down")
    assert pair.gateway.metric("retries_total", reason="broken") == 1


def test_a_500_of_an_engine_that_lives_passes_as_it_is(shared: Pair) -> None:
    with shared.exchange() as exchange:
        exchange.first().answer(b'{"error":"this prompt broke it"}', status="500 Internal Server Error")
        answer = exchange.read()
        assert (answer.status, answer.json()) == (500, {"error": "this prompt broke it"})
        exchange.assert_nothing_more()


@pytest.mark.parametrize("status", ["400 Bad Request", "404 Not Found", "422 Unprocessable Entity", "502 Bad Gateway"])
def test_other_answers_pass_as_they_are(shared: Pair, status: str) -> None:
    with shared.exchange() as exchange:
        exchange.first().answer(b'{"error":"own words"}', status=status)
        answer = exchange.read()
        assert answer.raw.startswith(f"HTTP/1.1 {status}\r\n".encode())
        assert answer.json() == {"error": "own words"}
        exchange.assert_nothing_more()


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\r\n folded\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\x00b\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nnot a size\r\n",
        b"not HTTP at all\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
    ],
)
def test_an_answer_that_breaks_http_is_repeated_elsewhere(shared: Pair, said: bytes) -> None:
    with shared.exchange() as exchange:
        broken = exchange.first()
        broken.send(said)
        exchange.second().answer(b'{"ok":1}')
        broken.wait_closed()
        exchange.assert_repeated(exchange.read())


def test_an_engine_that_refuses_connections_is_passed_over(pair: Pair) -> None:
    pair.engines[0].close()
    for _ in range(4):
        with pair.exchange() as exchange:
            pair.engines[1].take().answer(b'{"ok":1}')
            answer = exchange.read()
        assert answer.status == 200
        assert answer.headers["x-kvgate-backend"] == "gpu-1"


def test_a_connection_that_died_while_idle_is_replaced_without_an_attempt() -> None:
    with raw_engine() as engine, running_gateway([engine.url]) as gateway:
        with gateway.send("POST", CHAT, BODY) as client:
            first = engine.take()
            first.answer()
            client.read()
        with gateway.send("POST", CHAT, BODY, {"X-Request-Id": (request_id := next_id())}) as client:
            again = engine.take()
            assert again.connection is first.connection
            again.reset()  # as if it had been closed just before: the gateway cannot tell
            engine.take().answer(b'{"ok":1}')
            assert client.read().json() == {"ok": 1}
        line = gateway.access(request_id)
        assert (line["attempts"], line["reason"]) == (1, "load")
        assert gateway.metric("retries_total", reason="stale_connection") == 1


# -- what must not be sent twice


@pytest.mark.parametrize("path", ["/sleep?level=1", "/wake_up", "/v1/load_lora_adapter", "/unheard/of"])
def test_what_changes_an_engine_is_not_repeated_once_sent(shared: Pair, path: str) -> None:
    with shared.exchange(path) as exchange:
        exchange.first().reset()
        answer = exchange.read()
        assert (answer.status, answer.json()["error"]["code"]) == (502, "upstream_error")
        exchange.assert_nothing_more()


def test_what_changes_an_engine_is_repeated_where_it_was_never_sent(pair: Pair) -> None:
    pair.engines[0].close()
    for _ in range(2):
        with pair.exchange("/wake_up") as exchange:
            pair.engines[1].take().answer(b'{"awake":1}')
            assert exchange.read().json() == {"awake": 1}


def test_a_busy_answer_to_a_change_passes(shared: Pair) -> None:
    with shared.exchange("/wake_up") as exchange:
        exchange.first().answer(b'{"error":"no"}', status="503 Service Unavailable")
        assert exchange.read().json() == {"error": "no"}
        exchange.assert_nothing_more()


def test_reads_are_repeated_too(shared: Pair) -> None:
    with shared.exchange("/load", method="GET") as exchange:
        exchange.first().reset()
        exchange.second().answer(b'{"server_load":0}')
        exchange.assert_repeated(exchange.read())


# -- the end of trying


def test_engines_that_all_fail_are_502_in_the_end(shared: Pair) -> None:
    with shared.exchange() as exchange:
        exchange.first().reset()
        exchange.second().reset()
        answer = exchange.read()
        assert (answer.status, answer.json()["error"]["code"]) == (502, "upstream_error")
        assert answer.headers["x-kvgate-error"] == "1"
        line = exchange.access()
    assert (line["status"], line["attempts"], line["ended"].partition("@")[0]) == (502, 2, "upstream")


def test_attempts_are_limited() -> None:
    with pair_of(retry={"attempts": 0}) as pair, pair.exchange() as exchange:
        exchange.first().reset()
        assert exchange.read().status == 502
        exchange.assert_nothing_more()


def test_repeats_without_a_budget_are_only_those_before_sending() -> None:
    with pair_of(retry={"budget": 0.0}) as pair:
        with pair.exchange() as exchange:
            exchange.first().reset()
            assert exchange.read().status == 502
            exchange.assert_nothing_more()
        pair.engines[0].close()
        for _ in range(2):
            with pair.exchange() as exchange:
                pair.engines[1].take().answer()
                assert exchange.read().status == 200


def test_no_first_byte_in_time_is_repeated_and_then_504() -> None:
    with pair_of(timeouts={"first_byte_s": 0.3}) as pair:
        with pair.exchange(body=STREAM) as exchange:
            silent = exchange.first()
            silent.send(SSE_HEAD)
            repeated = exchange.second()
            silent.wait_closed()
            repeated.send(SSE_HEAD + chunk(b"data: 1\n\n") + b"0\r\n\r\n")
            repeated.next_request()
            exchange.assert_repeated(exchange.read())
        with pair.exchange() as exchange:
            first, second = exchange.first(), exchange.second()
            answer = exchange.read()
            assert (answer.status, answer.json()["error"]["code"]) == (504, "upstream_timeout")
            first.wait_closed()
            second.wait_closed()


def test_a_silent_backend_is_ejected_and_its_requests_go_elsewhere() -> None:
    """A hung engine answers /health with 200; only what it owes, while another one answers, shows that it hangs."""
    health = {"silence_s": 0.5, "ejection_s": 60.0}
    with (
        pair_of(models=((MODEL,), (MODEL, "other")), health={"interval_s": 0.2, **health}) as pair,
        ExitStack() as stack,
    ):
        gateway, (silent, other) = pair.gateway, pair.engines
        hung: Exchange | None = None
        for _ in range(2):  # round robin: one of two comes to the silent one
            exchange = stack.enter_context(pair.exchange(body=STREAM))
            received = exchange.first()
            if exchange.first_name == "gpu-1":
                received.answer()
                continue
            hung, at_silent = exchange, received
        assert hung is not None
        at_silent.send(SSE_HEAD)
        repeat: Received | None = None
        while repeat is None:
            with pair.exchange(body={**BODY, "model": "other"}) as steady:
                received = other.take()
                if received.header("x-request-id") == [hung.id]:
                    repeat, received = received, other.take()
                received.answer()
                assert steady.read().status == 200
        repeat.answer(b'{"ok":1}')
        hung.assert_repeated(hung.read())
        at_silent.wait_closed()
        assert "silent" in gateway.wait_out("gpu-0", "ejected")
        backend = gateway.backend("gpu-0")
        assert (backend["state"], backend["why"], backend["serving"]) == ("ejected", "silent", False)
        assert gateway.metric("backend_up", backend="gpu-0") == 0
        assert gateway.metric("retries_total", reason="silent") == 1
        assert silent.waiting() == 0


def test_pipelined_requests_are_repeated_each_on_its_own(shared: Pair) -> None:
    one, two = (http_request("POST", CHAT, {**BODY, "user": name}) for name in ("one", "two"))
    with shared.gateway.connect() as client:
        client.send(one + two)
        for name in ("one", "two"):
            exchange = Exchange(shared, client, "")
            lost = exchange.first()
            assert json.loads(lost.body)["user"] == name
            lost.reset()
            exchange.second().answer(name.encode())
            assert client.read().body == name.encode()
