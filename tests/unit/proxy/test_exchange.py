"""One request and its answer, whatever the engines and the client do: the retry table, the phases, the ends."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable

import pytest

from router.backends.backend import State
from tests.support.scripted import Client, EngineConnection, Received, Response, chunked, request, response_head
from tests.support.world import HealthSettings, Rules, World

JSON = b"content-type: application/json"
SSE = b"content-type: text/event-stream; charset=utf-8"
CHUNKED = b"transfer-encoding: chunked"
BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
CHAT = request(b"POST", b"/v1/chat/completions", JSON, body=BODY)
UNKNOWN_POST = request(b"POST", b"/unknown", JSON, body=b"{}")
EVENT = b'data: {"id":"1"}\n\n'
DONE = b"data: [DONE]\n\n"

Handler = Callable[[EngineConnection, Received], None]


def whole(status: int = 200, body: bytes = b'{"ok":true}', *lines: bytes) -> Handler:
    raw = response_head(status, JSON, b"content-length: %d" % len(body), *lines) + body
    return lambda connection, received: connection.write(raw)


def stream(*pieces: bytes, last: bool = True) -> Handler:
    raw = response_head(200, SSE, CHUNKED) + chunked(list(pieces), last=last)
    return lambda connection, received: connection.write(raw)


def silent(connection: EngineConnection, received: Received) -> None:
    pass


def reset(connection: EngineConnection, received: Received) -> None:
    connection.reset()


def reset_after(raw: bytes, delay_s: float = 0.1) -> Handler:
    def handler(connection: EngineConnection, received: Received) -> None:
        connection.write(raw)
        clock = connection.transport.network.clock  # type: ignore[union-attr]
        clock.call_later(delay_s, connection.reset)

    return handler


def world_of(*handlers: Handler, **rules: object) -> World:
    """A world with one engine per handler; roundrobin asks them in this order."""
    world = World(Rules(**rules), backends=len(handlers))  # type: ignore[arg-type]
    for engine, handler in zip(world.engines.values(), handlers, strict=True):
        engine.handler = handler
    return world


def ask(world: World, raw: bytes = CHAT, *, seconds: float = 1.0) -> Client:
    client = world.client()
    client.send(raw)
    world.run(seconds)
    return client


def only_answer(client: Client) -> Response:
    assert len(client.responses) == 1
    return client.responses[0]


def error_of(response: Response) -> tuple[int, object]:
    assert response.ours
    error = response.json()["error"]
    assert isinstance(error, dict)
    assert set(error) == {"message", "type", "param", "code"}
    return response.status, error["code"]


def received(world: World) -> list[int]:
    return [len(engine.received) for engine in world.engines.values()]


def ended(world: World) -> list[str]:
    return [str(line.ended) for line in world.access_lines]


# -- what an answer carries -------------------------------------------------------------------------------------------


def test_an_answer_passes_as_it_is_with_our_headers_added() -> None:
    world = world_of(whole(201, b'{"a":1}', b"x-engine: e", b"date: Mon, 01 Jan 2024 00:00:00 GMT"))
    response = only_answer(ask(world, CHAT.replace(b"\r\n\r\n", b"\r\nX-Request-Id: mine\r\n\r\n", 1)))
    assert response.status == 201
    assert response.payload == b'{"a":1}'
    assert response.header(b"x-engine") == b"e"
    assert response.headers[b"date"] == [b"Mon, 01 Jan 2024 00:00:00 GMT"]
    assert response.header(b"x-request-id") == b"mine"
    assert response.header(b"x-kvgate-backend") == b"e0"
    assert response.header(b"x-kvgate-reason") == b"roundrobin"
    assert response.header(b"x-kvgate-matched") == b"0"
    assert world.engines["e0"].received[0].header(b"x-request-id") == b"mine"
    world.rest()


def test_a_body_reaches_the_engine_unchanged() -> None:
    world = world_of(whole())
    raw = b'{ "model":"m" ,\n"messages":[],"x":"\xc3\xa4"}'
    ask(world, request(b"POST", b"/v1/chat/completions?a=b", JSON, body=raw))
    seen = world.engines["e0"].received[0]
    assert seen.body == raw
    assert seen.line == b"POST /v1/chat/completions?a=b HTTP/1.1"
    assert seen.headers[b"content-length"] == [b"%d" % len(raw)]
    assert seen.header(b"x-forwarded-for") == b"10.0.0.1"
    world.rest()


def test_a_chunked_body_reaches_the_engine_in_one_piece_with_its_length() -> None:
    world = world_of(whole())
    ask(world, request(b"POST", b"/v1/chat/completions", JSON, chunks=[BODY[:10], BODY[10:]]))
    seen = world.engines["e0"].received[0]
    assert seen.body == BODY
    assert seen.headers[b"content-length"] == [b"%d" % len(BODY)]
    world.rest()


def test_multipart_reaches_the_engine_untouched() -> None:
    world = world_of(whole())
    body = b'--B\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--B--\r\n'
    kind = b"content-type: multipart/form-data; boundary=B"
    ask(world, request(b"POST", b"/v1/audio/transcriptions", kind, body=body))
    assert world.engines["e0"].received[0].body == body
    assert world.engines["e0"].received[0].header(b"content-type") == kind.partition(b": ")[2]
    world.rest()


def test_any_path_and_method_goes_to_an_engine() -> None:
    world = world_of(whole())
    for method in (b"GET", b"PUT", b"DELETE", b"PATCH", b"OPTIONS"):
        assert only_answer(ask(world, request(method, b"/some/path"))).status == 200
    world.rest()


# -- the end of an answer ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", [b"content-length: 500", CHUNKED])
def test_the_answer_to_head_ends_with_its_head_and_the_connection_serves_on(line: bytes) -> None:
    world = world_of(lambda connection, received: connection.write(response_head(200, JSON, line)))
    client = ask(world, request(b"HEAD", b"/x"))
    assert only_answer(client).complete
    client.send(request(b"HEAD", b"/y"))
    world.run(1.0)
    assert [response.complete for response in client.responses] == [True, True]
    assert world.engines["e0"].accepted == 1
    world.rest()


@pytest.mark.parametrize("status", [204, 304])
def test_answers_without_a_body_end_with_their_head(status: int) -> None:
    world = world_of(lambda connection, received: connection.write(response_head(status, b"content-length: 5")))
    client = ask(world, request(b"GET", b"/x"))
    client.send(request(b"GET", b"/y"))
    world.run(1.0)
    assert [response.status for response in client.responses] == [status, status]
    assert world.engines["e0"].accepted == 1
    world.rest()


def test_an_answer_until_close_ends_with_the_connection() -> None:
    def handler(connection: EngineConnection, received: Received) -> None:
        connection.write(response_head(200, JSON) + b"all of it")
        connection.close()

    world = world_of(handler)
    client = ask(world)
    assert only_answer(client).payload == b"all of it"
    assert only_answer(client).complete
    assert only_answer(client).header(b"connection") == b"close"
    assert client.eof
    world.rest()


@pytest.mark.parametrize("apart", [False, True])
def test_bytes_after_the_end_are_never_relayed_and_end_the_connection(apart: bool) -> None:
    def handler(connection: EngineConnection, received: Received) -> None:
        connection.write(
            response_head(200, JSON, b"content-length: 2") + b"{}" + (b"" if apart else b"HTTP/1.1 200 OK")
        )
        if apart:
            world.clock.call_later(0.1, connection.write, b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil")

    world = world_of(handler)
    client = ask(world, seconds=0.05)
    world.run(0.5)
    assert only_answer(client).payload == b"{}"
    assert not world.engines["e0"].open_connections
    client.send(CHAT)
    world.run(0.05)
    assert [response.payload for response in client.responses] == [b"{}", b"{}"]
    assert world.engines["e0"].accepted == 2
    world.rest()


def test_interim_answers_stay_between_the_engine_and_us() -> None:
    raw = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
    raw += response_head(200, JSON, b"content-length: 2") + b"{}"
    world = world_of(lambda connection, received: connection.write(raw))
    response = only_answer(ask(world))
    assert response.interim == []
    assert response.payload == b"{}"
    world.rest()


def test_an_http_1_0_client_gets_a_chunked_answer_without_its_chunks() -> None:
    world = world_of(stream(EVENT, DONE))
    client = ask(world, request(b"POST", b"/v1/chat/completions", JSON, body=BODY, version=b"HTTP/1.0"))
    response = only_answer(client)
    assert response.payload == EVENT + DONE
    assert b"transfer-encoding" not in response.headers
    assert client.eof
    world.rest()


def test_an_engine_s_connection_serves_again_unless_it_says_close() -> None:
    world = world_of(whole())
    client = ask(world)
    client.send(CHAT)
    world.run(1.0)
    assert world.engines["e0"].accepted == 1
    world.engines["e0"].handler = whole(200, b"{}", b"connection: close")
    for _ in range(2):
        client.send(CHAT)
        world.run(1.0)
    assert world.engines["e0"].accepted == 2
    world.rest()


# -- the head is held back --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "handler",
    [
        pytest.param(reset, id="reset before the head"),
        pytest.param(reset_after(response_head(200, SSE, CHUNKED)), id="reset after the head"),
        pytest.param(reset_after(response_head(200, SSE, CHUNKED) + b"5\r\n"), id="reset after a chunk's size"),
        pytest.param(
            reset_after(response_head(200, SSE, CHUNKED) + chunked([b": ping\n\n"], last=False)), id="after a comment"
        ),
        pytest.param(reset_after(response_head(200, JSON, b"content-length: 9")), id="reset before the body"),
        pytest.param(stream(b'data: {"error":{"message":"dead"}}\n\n', DONE), id="an error event first"),
        pytest.param(stream(b": ping\n\n", b"event: error\ndata: {}\n\n"), id="an error after a comment"),
        pytest.param(whole(429), id="429"),
        pytest.param(whole(503), id="503"),
        pytest.param(lambda c, r: c.write(b"HTTP/1.1 200 OK\r\nx: a\r\n b\r\n\r\n"), id="a folded head"),
        pytest.param(
            lambda c, r: c.write(response_head(200, JSON, b"content-length: 2", CHUNKED) + b"{}"), id="two framings"
        ),
        pytest.param(lambda c, r: c.write(response_head(200, SSE, CHUNKED) + b"zz\r\n"), id="a bad chunk size"),
        pytest.param(lambda c, r: c.write(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70000), id="a head without end"),
        pytest.param(lambda c, r: c.write(b"HTTP/1.1 101 X\r\nupgrade: h2c\r\n\r\n"), id="an upgrade unasked"),
        pytest.param(lambda c, r: c.close(), id="closed"),
    ],
)
def test_what_fails_before_its_first_body_byte_is_repeated_elsewhere(handler: Handler) -> None:
    world = world_of(handler, whole(200, b'{"second":1}'))
    response = only_answer(ask(world, seconds=3.0))
    assert response.status == 200
    assert response.payload == b'{"second":1}'
    assert response.header(b"x-kvgate-backend") == b"e1"
    assert response.header(b"x-kvgate-reason") == b"retry"
    assert received(world) == [1, 1]
    assert world.access_lines[0].attempts == 2
    world.rest()


def test_nothing_goes_downstream_before_the_first_body_byte() -> None:
    world = world_of(lambda c, r: c.write(response_head(200, SSE, CHUNKED) + chunked([b": ping\n\n"] * 3, last=False)))
    client = ask(world)
    assert client.reader.raw == b""
    world.engines["e0"].open_connections[0].write(chunked([EVENT]))
    world.run(0.1)
    assert only_answer(client).payload == b": ping\n\n" * 3 + EVENT
    world.rest()


@pytest.mark.parametrize(
    ("handler", "status"),
    [(whole(429), 429), (whole(503), 503), (whole(400), 400), (whole(404), 404), (whole(500), 500)],
)
def test_with_nobody_else_an_engine_s_answer_passes_whatever_it_is(handler: Handler, status: int) -> None:
    world = world_of(handler)
    response = only_answer(ask(world))
    assert response.status == status
    assert not response.ours
    assert response.header(b"x-kvgate-backend") == b"e0"
    assert received(world) == [1]
    world.rest()


@pytest.mark.parametrize("status", [400, 401, 404, 422, 501])
def test_an_engine_s_verdict_on_the_request_is_never_repeated(status: int) -> None:
    world = world_of(whole(status), whole())
    assert only_answer(ask(world)).status == status
    assert received(world) == [1, 0]
    world.rest()


def test_when_all_are_busy_the_last_answer_passes_under_its_engine_s_name() -> None:
    world = world_of(whole(429, b'{"e":0}', b"retry-after: 7"), whole(503, b'{"e":1}'))
    response = only_answer(ask(world))
    assert (response.status, response.payload) == (503, b'{"e":1}')
    assert response.header(b"x-kvgate-backend") == b"e1"
    assert world.metrics.requests["m", "e1", 503] == 1
    assert received(world) == [1, 1]
    world.rest()


def test_a_busy_answer_passes_when_the_other_attempt_got_none() -> None:
    world = world_of(whole(503, b'{"e":0}'), reset)
    response = only_answer(ask(world))
    assert (response.status, response.payload) == (503, b'{"e":0}')
    assert response.header(b"x-kvgate-backend") == b"e0"
    assert world.metrics.requests["m", "e0", 503] == 1
    world.rest()


def test_a_500_of_a_dead_engine_is_repeated() -> None:
    world = world_of(whole(500), whole())
    world.engines["e0"].alive = False
    response = only_answer(ask(world))
    assert response.status == 200
    assert world.metrics.retries["broken"] == 1
    world.rest()


def test_a_500_of_a_living_engine_passes() -> None:
    world = world_of(whole(500, b'{"bug":1}'), whole())
    response = only_answer(ask(world))
    assert (response.status, response.payload) == (500, b'{"bug":1}')
    assert received(world) == [1, 0]
    world.rest()


def test_a_busy_answer_too_long_to_hold_passes() -> None:
    world = world_of(whole(503, b"x" * 100_000), whole())
    response = only_answer(ask(world))
    assert (response.status, len(response.payload)) == (503, 100_000)
    assert received(world) == [1, 0]
    world.rest()


def test_an_error_event_passes_when_nobody_else_can_take_it() -> None:
    world = world_of(stream(b'data: {"error":{}}\n\n', DONE))
    response = only_answer(ask(world))
    assert response.payload == b'data: {"error":{}}\n\n' + DONE
    assert response.complete
    world.rest()


def test_a_busy_answer_is_a_sign_of_life() -> None:
    world = world_of(whole(503), whole(503), whole())
    world.registry.set_state(world.backend("e0"), State.TRIAL, "on trial")
    ask(world)
    assert world.backend("e0").state is State.UP
    world.rest()


def test_an_engine_that_was_too_busy_is_not_asked_again_at_once() -> None:
    world = world_of(whole(503), whole())
    for _ in range(10):
        assert only_answer(ask(world, seconds=0.01)).status == 200
    assert received(world)[0] == 1
    assert world.metrics.retries["busy"] == 1
    world.rest()


def test_where_all_are_too_busy_they_are_asked_all_the_same() -> None:
    world = world_of(whole(429), whole(429))
    for _ in range(3):
        assert only_answer(ask(world, seconds=0.01)).status == 429
    assert sum(received(world)) >= 3
    world.rest()


def test_an_engine_that_fails_each_request_at_once_does_not_keep_drawing_them() -> None:
    """It looks idle, so every strategy that weighs load would prefer it."""
    world = world_of(reset, whole(), strategy="prefixaware")
    for number in range(40):
        body = BODY.replace(b'"content":"', b'"content":"%d ' % number)
        raw = request(b"POST", b"/v1/chat/completions", JSON, body=body)
        assert only_answer(ask(world, raw, seconds=0.02)).status == 200
    assert world.backend("e0").state in (State.EJECTED, State.TRIAL)
    assert received(world)[0] < 10
    world.rest()


def test_a_failure_that_is_not_repeated_ends_in_the_phase_where_it_happened() -> None:
    world = world_of(reset)
    assert only_answer(ask(world)).status == 502
    assert ended(world) == ["upstream@await_head"]
    world.rest()


def test_a_repeat_under_a_cap_goes_before_those_who_wait() -> None:
    world = world_of(reset_after(b"", 0.05), whole(), max_in_flight=1)
    first, second = ask(world, seconds=0.0), ask(world, seconds=0.0)
    world.run(1.0)
    assert [only_answer(client).status for client in (first, second)] == [200, 200]
    assert world.access_lines[0].attempts == 2  # the one that failed was the first to be answered
    world.rest()


def test_a_trial_is_not_held_up_by_an_old_stream() -> None:
    world = world_of(stream(b"data: 1\n\n", last=False), whole())
    streaming = ask(world, seconds=0.1)
    backend = world.backend("e0")
    assert backend.in_flight == 1
    world.engines["e0"].handler = whole()
    world.registry.set_state(world.backend("e1"), State.DOWN, "gone")
    world.registry.set_state(backend, State.TRIAL, "on trial")
    assert only_answer(ask(world, seconds=0.1)).status == 200
    assert backend.state is State.UP
    assert not backend.trial_open
    streaming.abort()
    world.run(0.1)
    world.rest()


def test_a_silent_backend_that_goes_on_trial_at_once_loses_its_requests_all_the_same() -> None:
    """It is the only one with an adapter, so it may not stay out; the base model has another."""
    world = World(Rules(strategy="roundrobin"), backends=2)
    x, y = world.engines["e0"], world.engines["e1"]
    x.handler, y.handler = silent, whole()
    world.registry.set_models(world.backend("e0"), [{"id": "m"}, {"id": "adapter"}])
    waiting = ask(world, seconds=0.01)
    assert received(world) == [1, 0]
    for _ in range(10):
        world.registry.set_state(world.backend("e0"), world.backend("e0").state, "")
        client = ask(world, seconds=0.5)
        client.abort()
        world.run(0.01)
    assert only_answer(waiting).header(b"x-kvgate-backend") == b"e1"
    world.run(30)


@pytest.mark.parametrize("method", ["first_byte", "observe"])
def test_a_strategy_that_raises_costs_one_exchange_and_no_place(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of(whole(), max_in_flight=1)

    def broken(*_: object) -> None:
        raise RuntimeError("a fault of ours")

    client = world.client()
    with monkeypatch.context() as patch:
        patch.setattr(logging.getLogger("router.proxy.exchange"), "propagate", False)
        patch.setattr(world.strategy, method, broken)
        client.send(CHAT)
        world.clock.advance(0.5)
    assert world.metrics.broken_exchanges == 1
    assert world.admission.in_flight == world.backend("e0").in_flight == 0
    assert not world.services.exchanges
    assert world.backend("e0").state is State.UP  # it is not to blame
    world.metrics.broken_exchanges = 0
    other = world.client()
    other.send(CHAT)
    world.clock.advance(0.5)
    assert only_answer(other).status == 200


# -- the retry table --------------------------------------------------------------------------------------------------


def test_a_refused_connection_is_repeated_elsewhere_for_any_path() -> None:
    world = world_of(whole(), whole())
    world.engines["e0"].accepts = "refuse"
    assert only_answer(ask(world, UNKNOWN_POST)).header(b"x-kvgate-backend") == b"e1"
    assert world.metrics.retries["connect"] == 1
    world.rest()


def test_what_may_change_an_engine_is_not_sent_twice() -> None:
    world = world_of(reset, whole())
    assert error_of(only_answer(ask(world, UNKNOWN_POST))) == (502, "upstream_error")
    assert received(world) == [1, 0]
    world.rest()


def test_a_busy_answer_to_what_may_change_an_engine_passes() -> None:
    world = world_of(whole(503), whole())
    assert only_answer(ask(world, UNKNOWN_POST)).status == 503
    assert received(world) == [1, 0]
    world.rest()


def test_a_read_is_repeated_like_inference() -> None:
    world = world_of(reset, whole())
    assert only_answer(ask(world, request(b"GET", b"/x"))).status == 200
    world.rest()


def test_each_attempt_goes_to_another_backend_and_their_number_is_bounded() -> None:
    world = world_of(reset, reset, reset, whole())
    assert error_of(only_answer(ask(world))) == (502, "upstream_error")
    assert received(world) == [1, 1, 1, 0]
    world.rest()


def test_without_attempts_to_repeat_the_first_failure_is_the_answer() -> None:
    world = world_of(reset, whole(), retry_attempts=0)
    assert only_answer(ask(world)).status == 502
    assert received(world) == [1, 0]
    world.rest()


def test_without_a_budget_only_what_was_never_sent_is_repeated() -> None:
    world = world_of(reset, whole(), retry_budget=0.0)
    assert only_answer(ask(world)).status == 502
    world.engines["e0"].accepts = "refuse"
    world.pool.drop(world.backend("e0"))
    for _ in range(2):
        assert only_answer(ask(world)).status == 200
    assert world.metrics.retries == {"connect": 1}
    world.rest()


def test_a_stale_pooled_connection_costs_no_attempt_and_no_budget() -> None:
    world = world_of(whole(), retry_attempts=0, retry_budget=0.0)
    ask(world)
    connection = world.engines["e0"].open_connections[0]
    client = world.client()
    client.send(CHAT)
    world.run(0.0)
    world.clock.call_later(0.0011, connection.reset)  # when the next request is on its way to it
    world.run(1.0)
    assert only_answer(client).status == 200
    assert world.metrics.retries == {"stale_connection": 1}
    assert world.access_lines[-1].attempts == 1
    assert received(world) == [2]
    world.rest()


def test_a_new_connection_that_dies_is_not_stale() -> None:
    world = world_of(reset)
    assert only_answer(ask(world)).status == 502
    assert received(world) == [1]
    world.rest()


def test_a_reused_connection_that_dies_after_a_byte_is_not_stale() -> None:
    world = world_of(whole())
    ask(world)
    world.engines["e0"].handler = reset_after(b"HTTP/1.1 2")
    assert only_answer(ask(world)).status == 502
    assert received(world) == [2]
    world.rest()


def test_what_may_change_an_engine_never_uses_an_old_connection() -> None:
    world = world_of(whole())
    ask(world)
    ask(world, UNKNOWN_POST)
    assert world.engines["e0"].accepted == 2
    world.rest()


# -- after the first byte ---------------------------------------------------------------------------------------------


def test_a_stream_that_breaks_gets_an_error_event_and_no_end() -> None:
    world = world_of(reset_after(response_head(200, SSE, CHUNKED) + chunked([EVENT], last=False)), whole())
    client = ask(world)
    response = only_answer(client)
    events = response.payload.split(b"\n\n")
    assert response.payload.startswith(EVENT)
    assert json.loads(events[-2].removeprefix(b"data: "))["error"]["code"] == "upstream_error"
    assert not response.complete, "no last chunk: nobody takes it for the whole"
    assert client.lost
    assert received(world) == [1, 0]
    assert ended(world) == ["upstream@streaming"]
    world.rest()


@pytest.mark.parametrize("broken", [b"5\r\nhel", b"ff\r\n" + b"x" * 100 + b"\r\n", b"5", b"5\r\nhello"])
def test_a_stream_that_breaks_inside_of_a_chunk_is_cut_without_a_word(broken: bytes) -> None:
    raw = response_head(200, SSE, CHUNKED) + chunked([EVENT], last=False) + broken
    world = world_of(reset_after(raw))
    client = ask(world)
    response = only_answer(client)
    assert b"error" not in response.payload
    assert not response.complete
    assert client.lost
    world.rest()


def test_a_bad_chunk_after_half_a_chunk_does_not_put_our_words_into_it() -> None:
    def handler(connection: EngineConnection, received: Received) -> None:
        connection.write(response_head(200, SSE, CHUNKED) + chunked([EVENT], last=False) + b"40\r\ndata: half")
        world.clock.call_later(0.1, connection.write, b"x" * (0x40 - 10) + b"\r\nzz\r\n")

    world = world_of(handler)
    client = ask(world)
    assert only_answer(client).payload == EVENT + b"data: half"
    assert not only_answer(client).complete
    world.rest()


def test_an_answer_with_a_length_that_breaks_is_shorter_than_it_said() -> None:
    world = world_of(reset_after(response_head(200, JSON, b"content-length: 100") + b"{half"))
    client = ask(world)
    assert only_answer(client).payload == b"{half"
    assert not only_answer(client).complete
    assert client.lost
    world.rest()


def test_an_answer_until_close_that_breaks_is_reset() -> None:
    world = world_of(reset_after(response_head(200, JSON) + b"{half"))
    client = ask(world)
    assert only_answer(client).reset
    assert not only_answer(client).complete
    world.rest()


def test_a_broken_stream_tells_an_http_1_0_client_too() -> None:
    world = world_of(reset_after(response_head(200, SSE, CHUNKED) + chunked([EVENT], last=False)))
    client = ask(world, request(b"POST", b"/v1/chat/completions", JSON, body=BODY, version=b"HTTP/1.0"))
    assert only_answer(client).cut
    assert b"[DONE]" not in only_answer(client).payload
    world.rest()


# -- deadlines --------------------------------------------------------------------------------------------------------


def test_a_connection_that_does_not_come_about_in_time_is_repeated_elsewhere() -> None:
    world = world_of(whole(), whole())
    world.engines["e0"].accepts = "blackhole"
    client = ask(world, seconds=0.4)
    assert not client.responses
    world.run(0.2)
    assert only_answer(client).header(b"x-kvgate-backend") == b"e1"
    assert world.pool.open == 1
    world.rest()


@pytest.mark.parametrize("raw", [b"", response_head(200, SSE, CHUNKED), response_head(200, JSON, b"content-length: 5")])
def test_a_first_byte_that_does_not_come_in_time_is_repeated_elsewhere(raw: bytes) -> None:
    world = world_of(lambda c, r: c.write(raw) if raw else None, whole())
    client = ask(world, seconds=4.9)
    assert not client.responses
    world.run(0.3)
    assert only_answer(client).header(b"x-kvgate-backend") == b"e1"
    assert not world.engines["e0"].open_connections, "the engine's work is ended"
    world.rest()


def test_a_first_byte_that_comes_nowhere_is_504() -> None:
    world = world_of(silent)
    client = ask(world, seconds=5.2)
    assert error_of(only_answer(client)) == (504, "upstream_timeout")
    world.rest()


def test_a_stream_that_stands_still_too_long_is_cut() -> None:
    world = world_of(stream(EVENT, last=False))
    client = ask(world, seconds=2.9)
    assert not client.lost
    world.run(0.3)
    assert only_answer(client).cut
    assert client.lost
    assert ended(world) == ["gateway@streaming"]
    assert not world.engines["e0"].open_connections
    world.rest()


def test_a_stream_that_goes_on_is_not_cut() -> None:
    world = world_of(stream(EVENT, last=False))
    client = ask(world, seconds=0.1)
    for _ in range(10):
        world.run(2.0)
        world.engines["e0"].open_connections[0].write(chunked([EVENT], last=False))
    world.run(0.1)
    assert not client.lost
    world.rest()


def test_waiting_too_long_for_a_place_is_429_with_retry_after() -> None:
    world = world_of(silent, max_in_flight=1)
    ask(world, seconds=0.1)
    client = ask(world, seconds=3.1)
    assert error_of(only_answer(client)) == (429, "queue_full")
    assert only_answer(client).header(b"retry-after") == b"4"  # nobody was placed in those 3 s
    assert world.admission.depth == 0
    world.rest()


# -- the client leaves ------------------------------------------------------------------------------------------------


LEAVING = [
    pytest.param(lambda client: client.abort(), id="reset"),
    pytest.param(lambda client: client.close(), id="close"),
    pytest.param(lambda client: client.half_close(), id="half-close"),
]


@pytest.mark.parametrize("leave", LEAVING)
@pytest.mark.parametrize(
    ("handler", "accepts", "phase"),
    [
        (silent, "blackhole", "connecting"),
        (silent, "up", "await_head"),
        (lambda c, r: c.write(response_head(200, SSE, CHUNKED)), "up", "await_head"),
        (stream(EVENT, last=False), "up", "streaming"),
    ],
)
def test_a_client_that_leaves_frees_its_slot_and_ends_the_engine_s_work_at_once(
    handler: Handler, accepts: str, phase: str, leave: Callable[[Client], None]
) -> None:
    world = world_of(handler)
    world.engines["e0"].accepts = accepts
    client = ask(world, seconds=0.3)
    assert world.backend("e0").in_flight == 1
    leave(client)
    world.run(0.01)
    assert world.backend("e0").in_flight == 0
    assert world.pool.open == 0
    assert not world.engines["e0"].open_connections
    assert ended(world) == [f"client@{phase}"]
    assert world.access_lines[0].status == (200 if phase == "streaming" else 499)
    world.rest()


@pytest.mark.parametrize("leave", LEAVING)
def test_a_client_that_leaves_the_queue_gives_its_place_to_the_next(leave: Callable[[Client], None]) -> None:
    world = world_of(silent, max_in_flight=1)
    first = ask(world, seconds=0.1)
    second = ask(world, seconds=0.1)
    ask(world, seconds=0.1)
    assert world.admission.depth == 2
    leave(second)
    world.run(0.01)
    assert world.admission.depth == 1
    assert ended(world) == ["client@queued"]
    leave(first)
    world.run(0.01)
    assert world.admission.depth == 0
    assert world.admission.in_flight == 1
    world.rest()


@pytest.mark.parametrize("leave", LEAVING)
def test_a_client_that_leaves_in_its_body_is_forgotten(leave: Callable[[Client], None]) -> None:
    world = world_of(whole())
    client = ask(world, CHAT[:-5], seconds=0.1)
    leave(client)
    world.run(0.1)
    assert ended(world) == ["client@read_body"]
    assert received(world) == [0]
    world.rest()


@pytest.mark.parametrize("leave", LEAVING)
def test_a_client_that_leaves_while_a_500_is_looked_into_is_forgotten(leave: Callable[[Client], None]) -> None:
    world = world_of(whole(500), whole())
    client = ask(world, seconds=0.02)
    leave(client)
    world.run(0.5)
    assert ended(world) == ["client@await_head"]
    assert received(world) == [1, 0]
    world.rest()


@pytest.mark.parametrize("leave", LEAVING)
def test_a_client_that_leaves_while_a_large_body_is_sent_ends_the_sending(leave: Callable[[Client], None]) -> None:
    world = world_of(silent)
    big = request(b"POST", b"/v1/chat/completions", JSON, body=BODY[:-1] + b',"x":"' + b"y" * 500_000 + b'"}')
    client = world.client()
    client.send(big)
    stalled: list[bool] = []

    def stall() -> None:
        for connection in world.engines["e0"].open_connections:
            if connection.transport is not None:
                connection.transport.pause_reading()
                stalled.append(True)

    while not stalled:
        world.run(0.0005)
        stall()
    world.run(0.2)
    leave(client)
    world.run(0.1)
    assert ended(world) == ["client@sending"]
    assert world.backend("e0").in_flight == 0
    for connection in world.engines["e0"].open_connections:
        assert connection.transport is not None
        connection.transport.resume_reading()  # one who does not read does not hear of the end
    world.rest()


# -- back-pressure ----------------------------------------------------------------------------------------------------


def test_a_slow_client_stops_the_reading_from_its_engine() -> None:
    body = b"x" * 2_000_000
    world = world_of(lambda c, r: c.write(response_head(200, JSON, b"content-length: %d" % len(body)) + body))
    client = world.client()
    assert client.transport is not None
    client.transport.pause_reading()
    client.send(CHAT)
    world.run(1.0)  # world.check() bounds what is held
    engine = world.engines["e0"].open_connections[0]
    assert engine.transport is not None
    assert engine.transport.get_write_buffer_size() > 1_500_000
    client.transport.resume_reading()
    world.run(2.0)
    assert only_answer(client).payload == body
    world.rest()


def test_a_client_that_never_reads_is_cut_and_its_engine_freed() -> None:
    body = b"x" * 2_000_000
    world = world_of(lambda c, r: c.write(response_head(200, JSON, b"content-length: %d" % len(body)) + body))
    client = world.client()
    assert client.transport is not None
    client.transport.pause_reading()
    client.send(CHAT)
    world.run(3.5)
    assert ended(world) == ["client@streaming"]
    assert world.backend("e0").in_flight == 0
    world.rest()


def test_a_slow_engine_holds_the_request_in_the_phase_of_sending() -> None:
    world = world_of(whole())
    engine = world.engines["e0"]
    big = BODY[:-1] + b',"x":"' + b"y" * 900_000 + b'"}'
    client = world.client()
    client.send(request(b"POST", b"/v1/chat/completions", JSON, body=big))
    world.run(2.0)
    assert only_answer(client).status == 200
    assert engine.received[0].body == big
    world.rest()


# -- what a client sends ----------------------------------------------------------------------------------------------


def test_pipelined_requests_are_answered_in_order() -> None:
    def handler(connection: EngineConnection, received: Received) -> None:
        path = received.line.split(b" ")[1]
        delay = 0.5 if path == b"/slow" else 0.0
        raw = response_head(200, b"content-length: %d" % len(path)) + path
        world.clock.call_later(delay, connection.write, raw)

    world = world_of(handler, handler)
    client = world.client()
    client.send(request(b"GET", b"/slow") + request(b"GET", b"/a") + request(b"GET", b"/livez"), b"GET", b"GET", b"GET")
    world.run(2.0)
    assert [response.payload for response in client.responses] == [b"/slow", b"/a", b'{"status":"ok"}']
    world.rest()


def test_a_client_that_expects_100_gets_it_before_its_body() -> None:
    world = world_of(whole())
    client = world.client()
    head, _, body = request(b"POST", b"/v1/chat/completions", JSON, b"Expect: 100-continue", body=BODY).partition(b"{")
    client.send(head)
    world.run(0.1)
    assert client.reader.raw == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.push(b"{" + body)
    world.run(0.5)
    assert only_answer(client).interim == [100]
    assert only_answer(client).status == 200
    assert world.engines["e0"].received[0].header(b"expect") is None
    world.rest()


def test_no_100_is_sent_where_the_body_came_along() -> None:
    world = world_of(whole())
    client = ask(world, request(b"POST", b"/v1/chat/completions", JSON, b"Expect: 100-continue", body=BODY))
    assert only_answer(client).interim == []
    world.rest()


def test_an_unknown_expectation_is_417() -> None:
    world = world_of(whole())
    client = ask(world, request(b"POST", b"/v1/chat/completions", JSON, b"Expect: miracles", body=BODY))
    assert error_of(only_answer(client)) == (417, "expectation")
    world.rest(5.0)


def test_a_body_over_the_limit_is_413_and_may_be_sent_to_its_end() -> None:
    world = world_of(whole(), max_body_bytes=10_000)
    client = ask(world, request(b"POST", b"/v1/chat/completions", JSON, body=b"x" * 500_000))
    assert error_of(only_answer(client)) == (413, "body_too_large")
    assert only_answer(client).header(b"connection") == b"close"
    assert only_answer(client).complete, "an answer that a reset would have taken away"
    assert received(world) == [0]
    world.rest()


def test_a_chunked_body_over_the_limit_is_413() -> None:
    world = world_of(whole(), max_body_bytes=10_000)
    client = ask(world, request(b"POST", b"/v1/chat/completions", JSON, chunks=[b"x" * 900] * 12))
    assert error_of(only_answer(client)) == (413, "body_too_large")
    world.rest()


def test_a_body_at_the_limit_passes() -> None:
    world = world_of(whole(), max_body_bytes=10_000)
    body = BODY[:-1] + b" " * (10_000 - len(BODY)) + b"}"
    assert only_answer(ask(world, request(b"POST", b"/v1/chat/completions", JSON, body=body))).status == 200
    chunks = [body[:5000], body[5000:]]
    assert only_answer(ask(world, request(b"POST", b"/v1/chat/completions", JSON, chunks=chunks))).status == 200
    world.rest()


def test_one_who_sends_for_ever_after_a_refusal_is_cut() -> None:
    world = world_of(whole(), max_body_bytes=10)
    client = world.client()
    client.send(request(b"POST", b"/x", b"Content-Length: 99999999999"))
    for _ in range(40):
        client.push(b"x" * 1000)
        world.run(0.1)
    assert not world.connections
    world.rest()


def test_a_head_over_the_limit_is_431() -> None:
    world = world_of(whole(), max_header_bytes=1000)
    client = ask(world, request(b"GET", b"/x", b"X: " + b"y" * 1000))
    assert error_of(only_answer(client)) == (431, "headers_too_large")
    world.rest()


def test_a_head_without_end_is_431_before_it_ends() -> None:
    world = world_of(whole(), max_header_bytes=1000)
    client = ask(world, b"GET / HTTP/1.1\r\nX: " + b"y" * 1000)
    assert only_answer(client).status == 431
    world.rest()


@pytest.mark.parametrize("begun", [b"GET / HT", CHAT[:-3], CHAT[: CHAT.index(b"\r\n\r\n") + 4]])
def test_a_request_that_does_not_end_in_time_is_408(begun: bytes) -> None:
    world = world_of(whole())
    client = ask(world, begun, seconds=1.9)
    assert not client.responses
    world.run(0.3)
    assert error_of(only_answer(client)) == (408, "request_timeout")
    world.rest()


def test_a_head_that_drips_is_408_and_a_body_that_drips_is_read() -> None:
    world = world_of(whole())
    head = world.client()
    head.methods.append(b"POST")
    body = world.client()
    body.methods.append(b"POST")
    start = CHAT.index(b"\r\n\r\n") + 4
    body.push(CHAT[:start])
    for at in range(40):
        head.push(CHAT[at : at + 1])
        body.push(CHAT[start + at : start + at + 1])
        world.run(0.1)
    assert head.responses[0].status == 408
    body.push(CHAT[start + 40 :])
    world.run(0.5)
    assert body.responses[0].status == 200
    world.rest()


def test_an_idle_connection_is_closed_without_a_word() -> None:
    world = world_of(whole())
    client = world.client()
    world.run(5.9)
    assert not client.lost
    world.run(0.2)
    assert client.eof
    assert client.reader.raw == b""
    assert world.begun == 0
    world.rest()


def test_empty_lines_before_a_request_are_skipped() -> None:
    world = world_of(whole())
    client = world.client()
    client.send(b"\r\n\r\n" + CHAT, b"POST")
    world.run(0.5)
    assert only_answer(client).status == 200
    world.rest()


def test_empty_lines_alone_do_not_keep_a_connection() -> None:
    world = world_of(whole())
    client = world.client()
    for _ in range(80):
        client.push(b"\r\n")
        world.run(0.1)
    assert client.lost
    world.rest()


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST /v1/x HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
        (b"POST /v1/x HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"POST /v1/x HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello!\r\n", 400),
        (b"CONNECT h:1 HTTP/1.1\r\nHost: h\r\n\r\n", 405),
        (b"BREW / HTTP/1.1\r\nHost: h\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\nHost: h\r\n\r\n", 505),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
        (b"GET / HTTP/1.1\nHost: h\n\n\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    ],
)
def test_a_request_that_cannot_be_read_is_refused_and_nothing_behind_it_is_read(raw: bytes, status: int) -> None:
    world = world_of(whole())
    client = world.client()
    client.send(raw + CHAT, b"POST", b"POST")
    world.run(0.5)
    got = only_answer(client)
    assert got.status == status or (status == 505 and got.status == 400)
    assert got.header(b"connection") == b"close"
    assert received(world) == [0]
    world.rest(5.0)


# -- upgrades ---------------------------------------------------------------------------------------------------------

UPGRADE = request(b"GET", b"/v1/realtime", b"Connection: Upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Key: x")


def switching(connection: EngineConnection, received: Received) -> None:
    assert received.header(b"upgrade") == b"websocket"
    connection.tunnel = bytearray()
    connection.write(b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\nfrom the engine")


def test_a_websocket_is_tunnelled_both_ways_early_bytes_included() -> None:
    world = world_of(switching)
    client = world.client()
    client.send(UPGRADE + b"early", b"GET")
    world.run(0.1)
    response = only_answer(client)
    assert response.status == 101
    assert response.header(b"upgrade") == b"websocket"
    assert response.payload == b"from the engine"
    connection = world.engines["e0"].open_connections[0]
    assert connection.tunnel == b"early"
    client.push(b"GET / HTTP/1.1\r\n\r\n")
    connection.write(b"\x00\x01")
    world.run(0.1)
    assert connection.tunnel == b"earlyGET / HTTP/1.1\r\n\r\n"
    assert response.payload == b"from the engine\x00\x01"
    assert world.begun == 1
    world.rest()


def test_a_tunnel_ends_when_the_engine_ends_it() -> None:
    world = world_of(switching)
    client = world.client()
    client.send(UPGRADE)
    world.run(0.1)
    world.engines["e0"].open_connections[0].close()
    world.run(0.1)
    assert client.eof
    assert world.backend("e0").in_flight == 0
    assert ended(world) == ["upstream@done"]
    world.rest()


def test_a_tunnel_ends_when_the_client_leaves_and_its_last_bytes_arrive() -> None:
    world = world_of(switching)
    client = world.client()
    client.send(UPGRADE)
    world.run(0.1)
    connection = world.engines["e0"].open_connections[0]
    client.push(b"bye")
    client.close()
    world.run(0.1)
    assert connection.tunnel == b"bye"
    assert connection.lost
    assert world.backend("e0").in_flight == 0
    world.rest()


def test_a_tunnel_has_back_pressure_towards_the_engine() -> None:
    world = world_of(switching)
    client = world.client()
    client.send(UPGRADE)
    world.run(0.1)
    engine = world.engines["e0"].open_connections[0]
    assert engine.transport is not None
    engine.transport.pause_reading()
    client.push(b"x" * 1_000_000)
    world.run(1.0)
    assert client.transport is not None
    assert client.transport.get_write_buffer_size() > 700_000
    engine.transport.resume_reading()
    world.run(1.0)
    assert engine.tunnel == b"x" * 1_000_000
    world.rest()


def test_an_upgrade_that_the_engine_declines_is_an_answer_like_any_other() -> None:
    world = world_of(whole(426))
    client = world.client()
    client.send(UPGRADE + CHAT, b"GET", b"POST")
    world.run(0.5)
    assert [response.status for response in client.responses] == [426, 426]
    world.rest()


# -- nobody to ask ----------------------------------------------------------------------------------------------------


def test_without_a_backend_that_can_serve_it_is_503_with_retry_after() -> None:
    world = world_of(whole())
    world.registry.set_state(world.backend("e0"), State.DOWN, "dead")
    response = only_answer(ask(world))
    assert error_of(response) == (503, "no_backend")
    assert response.header(b"retry-after") == b"1"
    world.rest()


def test_a_starting_backend_is_waited_for() -> None:
    world = world_of(whole())
    world.registry.set_state(world.backend("e0"), State.STARTING, "starting")
    client = ask(world, seconds=1.0)
    assert world.admission.depth == 1
    world.registry.set_state(world.backend("e0"), State.UP, "")
    world.run(0.5)
    assert only_answer(client).status == 200
    world.rest()


def test_an_unknown_model_is_404_and_the_known_ones_are_named() -> None:
    world = world_of(whole())
    response = only_answer(ask(world, request(b"POST", b"/v1/chat/completions", JSON, body=b'{"model":"nobody"}')))
    assert error_of(response) == (404, "model_not_found")
    assert b"Available models: m." in response.payload
    world.rest()


def test_a_body_of_an_unknown_shape_goes_to_an_engine_that_may_judge_it() -> None:
    world = world_of(whole(400, b'{"engine":"says so"}'))
    response = only_answer(ask(world, request(b"POST", b"/v1/chat/completions", JSON, body=b"{odd")))
    assert response.payload == b'{"engine":"says so"}'
    world.rest()


def test_a_draining_backend_gets_nothing_new_and_ends_what_it_has() -> None:
    world = world_of(stream(EVENT, last=False), whole())
    client = ask(world)
    world.registry.drain("e0")
    for _ in range(4):
        assert only_answer(ask(world, seconds=0.3)).header(b"x-kvgate-backend") == b"e1"
    world.engines["e0"].open_connections[0].write(chunked([DONE]))
    world.run(0.1)
    assert only_answer(client).complete
    world.rest()


def test_a_removed_backend_leaves_when_its_last_answer_ends() -> None:
    world = world_of(stream(EVENT, last=False), whole())
    client = ask(world)
    world.registry.remove("e0")
    world.run(1.0)
    assert world.registry.get("e0") is not None
    world.engines["e0"].open_connections[0].write(chunked([DONE]))
    world.run(1.0)
    assert only_answer(client).complete
    assert world.registry.get("e0") is None
    world.rest()


# -- silence ----------------------------------------------------------------------------------------------------------


def test_what_waits_for_a_backend_that_fell_silent_is_repeated_elsewhere() -> None:
    world = world_of(silent, stream(EVENT, last=False))
    client = ask(world, seconds=1.0)
    other = ask(world, seconds=0.1)
    for _ in range(6):
        world.engines["e1"].open_connections[0].write(chunked([EVENT], last=False))
        world.run(0.4)
    assert world.backend("e0").state is not State.UP
    assert not other.lost
    assert only_answer(client).header(b"x-kvgate-backend") == b"e1"
    assert world.metrics.retries["silent"] == 1
    world.rest()


def test_what_cannot_be_repeated_waits_on_for_a_silent_backend() -> None:
    world = world_of(silent, stream(EVENT, last=False))
    client = ask(world, UNKNOWN_POST, seconds=1.0)
    ask(world, seconds=0.1)
    ask(world, seconds=0.1)
    for _ in range(6):
        world.engines["e1"].open_connections[0].write(chunked([EVENT], last=False))
        world.run(0.4)
    assert world.backend("e0").state is not State.UP
    assert not client.responses
    world.engines["e0"].open_connections[0].write(response_head(200, b"content-length: 2") + b"ok")
    world.run(0.1)
    assert only_answer(client).payload == b"ok"
    world.rest()


# -- the gateway's end ------------------------------------------------------------------------------------------------


def test_while_draining_each_answer_says_that_its_connection_closes() -> None:
    world = world_of(silent)
    client = world.client()
    client.send(CHAT)
    idle = world.client()
    world.run(0.1)
    world.services.draining = True
    for connection in list(world.connections):
        connection.drain()
    world.run(0.1)
    assert idle.eof
    whole()(world.engines["e0"].open_connections[0], Received(b"", {}))
    world.run(0.1)
    assert only_answer(client).complete
    assert only_answer(client).header(b"connection") == b"close"
    assert client.eof
    world.rest()


@pytest.mark.parametrize(
    ("handler", "raw", "phase"),
    [
        (silent, CHAT, "await_head"),
        (silent, CHAT[:-4], "read_body"),
        (stream(EVENT, last=False), CHAT, "streaming"),
    ],
)
def test_at_the_end_of_the_drain_time_everything_open_is_told_and_ended(
    handler: Handler, raw: bytes, phase: str
) -> None:
    world = world_of(handler)
    client = ask(world, raw, seconds=0.1)
    world.services.draining = True
    while world.services.exchanges:
        next(iter(world.services.exchanges)).on_shutdown()
    world.run(0.5)
    assert ended(world) == [f"gateway@{phase}"]
    response = only_answer(client)
    if phase == "streaming":
        assert response.cut
        assert not response.complete
    else:
        assert error_of(response) == (503, "no_backend")
        assert response.header(b"connection") == b"close"
    world.rest()


def test_the_last_exchange_to_end_tells_that_the_gateway_is_idle() -> None:
    world = world_of(whole())
    told: list[int] = []
    world.services.on_idle = lambda: told.append(len(world.services.exchanges))
    ask(world)
    assert told == [0]
    world.rest()


def test_a_fault_of_ours_ends_its_exchange_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()  # pytest's own handlers keep records, and with a traceback the exchange in it
    logger = logging.getLogger("router.proxy.exchange")
    handler = logging.StreamHandler(out)
    monkeypatch.setattr(logger, "propagate", False)
    logger.addHandler(handler)
    world = world_of(whole())
    choose = world.strategy.choose

    def broken(request: object, candidates: object) -> None:
        raise ZeroDivisionError

    world.strategy.choose = broken  # type: ignore[method-assign, assignment]
    client = world.client()
    client.send(request(b"POST", b"/v1/chat/completions", JSON, body=BODY.replace(b"hi", b"hush")))
    world.clock.advance(0.5)
    logger.removeHandler(handler)
    assert error_of(only_answer(client)) == (500, "internal_error")
    assert world.metrics.broken_exchanges == 1
    assert "ZeroDivisionError" in out.getvalue()
    assert "hush" not in out.getvalue()
    world.metrics.broken_exchanges = 0
    world.strategy.choose = choose  # type: ignore[method-assign]
    client.send(CHAT)
    world.run(0.5)
    assert client.responses[1].status == 200
    world.rest()


# -- paths of our own -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [b"/health", b"/ping", b"/livez", b"/readyz", b"/v1/models", b"/metrics", b"/version"])
def test_local_paths_are_answered_here(path: bytes) -> None:
    world = world_of(whole())
    assert only_answer(ask(world, request(b"GET", path))).status == 200
    head = only_answer(ask(world, request(b"HEAD", path)))
    assert (head.status, head.complete, head.payload) == (200, True, b"")
    assert received(world) == [0]
    world.rest()


def test_health_and_readiness_tell_whether_anybody_can_serve() -> None:
    world = world_of(whole())
    world.registry.set_state(world.backend("e0"), State.DOWN, "dead")
    statuses = {
        p: only_answer(ask(world, request(b"GET", p))).status for p in (b"/health", b"/ping", b"/livez", b"/readyz")
    }
    assert statuses == {b"/health": 503, b"/ping": 503, b"/livez": 200, b"/readyz": 503}
    world.rest()


def test_while_draining_readyz_says_no_and_health_says_yes() -> None:
    world = world_of(whole())
    world.services.draining = True
    assert only_answer(ask(world, request(b"GET", b"/readyz"))).status == 503
    assert only_answer(ask(world, request(b"GET", b"/health"))).status == 200
    world.rest()


def test_metrics_can_be_switched_off_on_the_data_port() -> None:
    world = world_of(whole(200, b"the engine's"), metrics_on_data_port=False)
    assert only_answer(ask(world, request(b"GET", b"/metrics"))).payload == b"the engine's"
    world.rest()


# -- accounting -------------------------------------------------------------------------------------------------------


def test_one_access_line_tells_who_ended_it_where_and_holds_no_client_text() -> None:
    world = world_of(whole(200, b'{"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":4}}}'))
    secret = request(b"POST", b"/v1/chat/completions?key=hush", JSON, b"Authorization: Bearer hush", body=BODY)
    ask(world, secret)
    (line,) = world.access_lines
    assert line.ended == "upstream@done"
    assert (line.method, line.path, line.status, line.backend) == (
        b"POST",
        b"/v1/chat/completions",
        200,
        "e0",
    )
    assert "hush" not in str(line)
    assert world.metrics.prompt_tokens["e0"] == 9
    assert world.metrics.matched_reported["e0"] == 4
    assert world.metrics.requests["m", "e0", 200] == 1
    assert world.metrics.decisions["roundrobin", "roundrobin"] == 1
    world.rest()


def test_each_backend_has_its_own_attempts_failures_and_times_to_first_token() -> None:
    world = world_of(whole(500), whole(), whole(200))
    world.engines["e0"].alive = False
    for _ in range(3):
        assert only_answer(ask(world)).status == 200
    counts = world.metrics.by_backend
    assert {name: (count.attempts, count.failed, count.ttft_count) for name, count in counts.items()} == {
        "e0": (1, 1, 0),  # repeated elsewhere: the client saw nothing of it
        "e1": (2, 0, 2),
        "e2": (1, 0, 1),
    }
    assert sum(count.ttft_sum_s for count in counts.values()) == world.metrics.ttft.sum
    assert world.metrics.codes == {200: 3}
    world.metrics.forget_backend("e0")
    assert "e0" not in counts
    world.rest()


def test_a_stream_that_breaks_is_its_backends_failure_and_a_client_that_leaves_is_not() -> None:
    world = world_of(reset_after(response_head(200, SSE, CHUNKED) + chunked([EVENT], last=False)))
    ask(world)
    (broken,) = world.metrics.by_backend.values()
    assert (broken.attempts, broken.failed, broken.ttft_count) == (1, 1, 1)
    world = world_of(silent)
    client = ask(world)
    client.abort()
    world.run(1.0)
    (left,) = world.metrics.by_backend.values()
    assert (left.attempts, left.failed, left.ttft_count) == (1, 0, 0)
    assert world.metrics.codes == {499: 1}
    world.rest()


def test_the_access_line_of_a_client_that_left_names_the_backend_that_it_waited_for() -> None:
    world = world_of(silent)
    client = ask(world, seconds=0.1)
    client.abort()
    world.run(0.1)
    (line,) = world.access_lines
    assert (line.ended, line.backend) == ("client@await_head", "e0")
    assert world.metrics.requests["m", "", 499] == 1  # nobody answered
    world.rest()


def test_a_lie_about_cached_tokens_is_not_counted() -> None:
    world = world_of(whole(200, b'{"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":99}}}'))
    ask(world)
    assert world.metrics.matched_reported["e0"] == 0
    world.rest()


def test_an_ejected_backend_comes_back_through_one_trial() -> None:
    world = world_of(whole(), whole(), health=HealthSettings(connect_failures=2))
    world.engines["e0"].accepts = "refuse"
    for _ in range(4):
        assert only_answer(ask(world, seconds=0.1)).status == 200
    assert world.backend("e0").state is State.EJECTED
    world.engines["e0"].accepts = "up"
    world.run(2.0)
    assert world.backend("e0").state is State.TRIAL
    for _ in range(3):
        ask(world, seconds=0.1)
    assert world.backend("e0").state is State.UP
    world.rest()


# -- scrapes ----------------------------------------------------------------------------------------------------------

SCRAPE = b"GET /metrics HTTP/1.1\r\nhost: a\r\n\r\n"


def test_a_scrape_is_answered_when_its_text_is_there_and_what_follows_it_waits() -> None:
    world = world_of(whole())
    asked: list[Callable[[bytes | None], object]] = []
    world.services.scrape = asked.append
    client = world.client()
    client.send(SCRAPE)
    client.send(CHAT)
    world.run(100.0)  # no deadline of a client's body is running any more
    assert client.responses == []
    (tell,) = asked
    tell(b"the text")
    world.run(1.0)
    first, second = client.responses
    assert (first.status, first.payload) == (200, b"the text")
    assert second.status == 200


def test_a_scrape_that_fails_is_a_fault_of_ours() -> None:
    world = world_of(whole())
    world.services.scrape = lambda tell: tell(None)
    assert error_of(only_answer(ask(world, SCRAPE))) == (500, "internal_error")


def test_a_scraper_that_left_is_told_nothing() -> None:
    world = world_of(whole())
    asked: list[Callable[[bytes | None], object]] = []
    world.services.scrape = asked.append
    client = ask(world, SCRAPE)
    client.abort()
    world.run(1.0)
    assert world.access_lines[-1].ended == "client@read_body"
    asked.pop()(b"the text")
    world.run(1.0)
    assert len(world.access_lines) == 1
    world.check_at_rest()


def test_a_scrape_under_way_at_the_end_is_told_so_once() -> None:
    world = world_of(whole())
    asked: list[Callable[[bytes | None], object]] = []
    world.services.scrape = asked.append
    client = ask(world, SCRAPE)
    for exchange in list(world.services.exchanges):
        exchange.on_shutdown()
    asked.pop()(b"the text")
    world.run(1.0)
    assert error_of(only_answer(client)) == (503, "no_backend")


# -- who ended it, and where ------------------------------------------------------------------------------------------


def test_a_client_that_leaves_while_its_engine_is_connected_is_counted_there() -> None:
    world = world_of(silent)
    world.engines["e0"].accepts = "blackhole"
    client = ask(world, seconds=0.1)
    client.abort()
    world.run(0.1)
    counts = world.metrics
    assert counts.ended == {("client", "connecting"): 1}
    assert counts.requests == {("m", "", 499): 1}
    assert sum(counts.decisions.values()) == counts.queue_time.count == 1
    assert counts.overhead.count == counts.ttft.count == counts.e2e.count == 0  # nothing was sent
