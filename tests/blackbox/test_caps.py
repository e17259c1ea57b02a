"""The caps are true ones, held until the last byte; who comes beyond them waits in turn, and beyond that is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from tests.blackbox.raw_engine import MODEL, RawEngine, Received, raw_engine
from tests.support.gateway_process import GatewayProcess, next_id, running_gateway
from tests.support.sim_process import Connection

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": []}


@contextmanager
def engines_behind(count: int, **limits: Any) -> Iterator[tuple[GatewayProcess, list[RawEngine]]]:
    with ExitStack() as stack:
        engines = [stack.enter_context(raw_engine(keep_alive=False)) for _ in range(count)]
        urls = [engine.url for engine in engines]
        gateway = stack.enter_context(running_gateway(urls, limits=limits, routing={"strategy": "roundrobin"}))
        yield gateway, engines


def test_a_cap_over_all_is_held_until_the_last_byte() -> None:
    with engines_behind(2, max_in_flight=2) as (gateway, engines), ExitStack() as stack:
        clients: list[Connection] = []
        taken: list[Received] = []
        for _ in range(2):
            clients.append(stack.enter_context(gateway.send("POST", CHAT, BODY)))
            gateway.until(lambda: any(engine.waiting() for engine in engines), "a request at an engine")
            taken.append(next(engine for engine in engines if engine.waiting()).take())
        waiting = stack.enter_context(gateway.send("POST", CHAT, BODY, {"X-Request-Id": (request_id := next_id())}))
        gateway.until_metric("queue_depth", 1)
        taken[0].send(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nabc")  # all but the last byte
        clients[0].read_until(b"abc")
        assert gateway.metric("queue_depth") == 1
        assert gateway.metric("in_flight") == 2
        assert not any(engine.waiting() for engine in engines)
        taken[0].send(b"d")
        taken[0].next_request()
        gateway.until(lambda: any(engine.waiting() for engine in engines), "the one who waited at an engine")
        next(engine for engine in engines if engine.waiting()).take().answer()
        assert waiting.read().status == 200
        line = gateway.access(request_id)
        assert line["queue_s"] > 0
        taken[1].answer()
        assert clients[1].read().status == 200


def test_a_cap_for_each_backend() -> None:
    with engines_behind(2, max_in_flight_per_backend=1) as (gateway, engines), ExitStack() as stack:
        clients = [stack.enter_context(gateway.send("POST", CHAT, BODY)) for _ in range(3)]
        first, second = engines[0].take(), engines[1].take()  # one at each, whatever the strategy would like
        gateway.until_metric("queue_depth", 1)
        assert [gateway.metric("in_flight", backend=f"gpu-{at}") for at in range(2)] == [1, 1]
        second.answer()
        engines[1].take().answer()  # where there is room, though the other's turn it is
        first.answer()
        assert [client.read().status for client in clients] == [200, 200, 200]


def test_first_come_first_served() -> None:
    with engines_behind(1, max_in_flight=1) as (gateway, (engine,)), ExitStack() as stack:
        clients = []
        for at in range(4):
            clients.append(stack.enter_context(gateway.send("POST", CHAT, BODY, {"X-At": str(at)})))
            gateway.until_metric("open_exchanges", at + 1)
        for at in range(4):
            received = engine.take()
            assert received.header("x-at") == [str(at)]
            received.answer()
        assert [client.read().status for client in clients] == [200] * 4


def test_a_full_queue_refuses_with_429_and_a_time() -> None:
    with engines_behind(1, max_in_flight=1, max_queue=1) as (gateway, (engine,)), ExitStack() as stack:
        running = stack.enter_context(gateway.send("POST", CHAT, BODY))
        received = engine.take()
        waiting = stack.enter_context(gateway.send("POST", CHAT, BODY))
        gateway.until_metric("queue_depth", 1)
        refused = gateway.request("POST", CHAT, BODY, {"X-Request-Id": (request_id := next_id())})
        assert (refused.status, refused.json()["error"]["code"]) == (429, "queue_full")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert refused.headers["x-kvgate-error"] == "1"
        assert int(refused.headers["retry-after"]) >= 1
        assert gateway.access(request_id)["ended"] == "gateway@queued"
        assert gateway.request("GET", "/health").status == 200  # its own paths need no place
        received.answer()
        assert running.read().status == 200
        engine.take().answer()
        assert waiting.read().status == 200
        assert gateway.metric("queue_depth") == 0


def test_no_queue_at_all_is_possible() -> None:
    with engines_behind(1, max_in_flight=1, max_queue=0) as (gateway, (engine,)):
        with gateway.send("POST", CHAT, BODY) as running:
            received = engine.take()
            assert gateway.request("POST", CHAT, BODY).status == 429
            received.answer()
            assert running.read().status == 200
        with gateway.send("POST", CHAT, BODY) as after:
            engine.take().answer()
            assert after.read().status == 200


def test_waiting_ends_with_its_time() -> None:
    with (
        engines_behind(1, max_in_flight=1, queue_timeout_s=0.2) as (gateway, (engine,)),
        gateway.send("POST", CHAT, BODY) as running,
    ):
        received = engine.take()
        late = gateway.request("POST", CHAT, BODY, {"X-Request-Id": (request_id := next_id())})
        assert (late.status, late.json()["error"]["code"]) == (429, "queue_full")
        assert int(late.headers["retry-after"]) >= 1
        assert gateway.access(request_id)["ended"] == "gateway@queued"
        received.answer()
        assert running.read().status == 200
        assert engine.waiting() == 0


def test_one_model_s_queue_does_not_hold_up_another_s() -> None:
    with ExitStack() as stack:
        engines = [stack.enter_context(raw_engine(models=(name,), keep_alive=False)) for name in ("a", "b")]
        limits = {"max_in_flight_per_backend": 1}
        gateway = stack.enter_context(running_gateway([engine.url for engine in engines], limits=limits))
        first = stack.enter_context(gateway.send("POST", CHAT, {"model": "a"}))
        received = engines[0].take()
        second = stack.enter_context(gateway.send("POST", CHAT, {"model": "a"}))
        gateway.until_metric("queue_depth", 1)
        with gateway.send("POST", CHAT, {"model": "b"}) as other:
            engines[1].take().answer()
            assert other.read().status == 200
        received.answer()
        engines[0].take().answer()
        assert [first.read().status, second.read().status] == [200, 200]


def test_a_crowd_for_one_model_leaves_another_a_place_in_the_queue() -> None:
    with ExitStack() as stack:
        engines = [stack.enter_context(raw_engine(models=(name,), keep_alive=False)) for name in ("a", "b")]
        limits = {"max_in_flight_per_backend": 1, "max_queue": 2}
        gateway = stack.enter_context(running_gateway([engine.url for engine in engines], limits=limits))
        running = [stack.enter_context(gateway.send("POST", CHAT, {"model": model})) for model in ("a", "b")]
        held = [engine.take() for engine in engines]
        crowd = []
        for depth in (1, 2):
            crowd.append(stack.enter_context(gateway.send("POST", CHAT, {"model": "a"})))
            gateway.until_metric("queue_depth", depth)
        other = stack.enter_context(gateway.send("POST", CHAT, {"model": "b"}))
        refused = crowd[1].read()  # the youngest of the longer line
        assert (refused.status, refused.json()["error"]["code"]) == (429, "queue_full")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        for received in held:
            received.answer()
        for engine in engines:
            engine.take().answer()
        assert [client.read().status for client in (*running, crowd[0], other)] == [200] * 4


def test_a_tunnel_holds_its_place_until_it_ends() -> None:
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket"}
    with engines_behind(1, max_in_flight=1) as (gateway, (engine,)), ExitStack() as stack:
        tunnel = stack.enter_context(gateway.send("GET", "/v1/realtime", headers=upgrade))
        received = engine.take()
        received.send(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        tunnel.read_until(b"\r\n\r\n")
        waiting = stack.enter_context(gateway.send("POST", CHAT, BODY))
        gateway.until_metric("queue_depth", 1)
        tunnel.send(b"ping")
        assert received.receive(4) == b"ping"
        assert (gateway.metric("in_flight"), gateway.metric("queue_depth")) == (1, 1)
        received.close()
        engine.take().answer()
        assert waiting.read().status == 200


def test_an_upload_takes_its_place_when_it_is_whole_and_keeps_it_while_the_engine_reads() -> None:
    with engines_behind(1, max_in_flight=1) as (gateway, (engine,)), ExitStack() as stack:
        slow = stack.enter_context(gateway.connect())
        slow.send(f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Length: 1000002\r\n\r\n".encode() + b"[" * 500_000)
        gateway.until_metric("open_exchanges", 1)
        with gateway.send("POST", CHAT, BODY) as other:  # nobody waits for one who still sends
            engine.take().answer()
            assert other.read().status == 200
        slow.send(b" " * 500_002)
        received = engine.take()
        waiting = stack.enter_context(gateway.send("POST", CHAT, BODY))
        gateway.until_metric("queue_depth", 1)
        received.answer()
        assert slow.read().status == 200
        engine.take().answer()
        assert waiting.read().status == 200


def test_too_many_connections_are_cut() -> None:
    with engines_behind(1, max_connections=2) as (gateway, _):
        with gateway.connect() as one, gateway.connect() as two:
            for client in (one, two):
                client.send(b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
                assert client.read().status == 200
            with gateway.connect() as three, suppress(BrokenPipeError, ConnectionResetError):
                three.send(b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
                three.closed()
            assert three.rest == b""
            one.send(b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
            assert one.read().status == 200
        gateway.until_metric("connections", 0)
        assert gateway.request("GET", "/livez").status == 200
