"""Who is let in, what of a key goes on, and that nothing of it is ever told."""

from __future__ import annotations

import json
from hashlib import sha256

import pytest

from router.proxy.api_keys import ApiKeys
from tests.support.scripted import Client, Received, Response, request, response_head
from tests.support.world import World

JSON = b"content-type: application/json"
KEY = b"sk-one-0123456789"
OTHER_KEY = b"sk-two-9876543210"
KEYS = ApiKeys({sha256(KEY).digest(): "team-a", sha256(OTHER_KEY).digest(): "team-b"})
BEARER = b"Authorization: Bearer " + KEY
BODY = json.dumps({"model": "m", "messages": []}).encode()


def guarded() -> World:
    world = World()
    world.services.api_keys = KEYS
    raw = response_head(200, JSON, b"content-length: 2") + b"{}"
    world.on_engine_requests(lambda connection, received: connection.write(raw))
    return world


def asked(world: World, raw: bytes) -> Client:
    client = world.client()
    client.send(raw)
    world.run(0.1)
    return client


def chat(*lines: bytes) -> bytes:
    return request(b"POST", b"/v1/chat/completions", JSON, *lines, body=BODY)


def received(world: World) -> list[Received]:
    return [each for engine in world.engines.values() for each in engine.received]


def is_refused(response: Response) -> bool:
    if response.status != 401:
        return False
    assert response.header(b"www-authenticate") == b"Bearer"
    assert response.header(b"x-kvgate-error") == b"1"
    problem = response.json()["error"]
    assert isinstance(problem, dict)
    assert (problem["type"], problem["code"]) == ("authentication_error", "invalid_api_key")
    assert KEY not in response.payload
    return True


@pytest.mark.parametrize(
    "lines",
    [
        (BEARER,),
        (b"authorization:bearer " + KEY,),
        (b"AUTHORIZATION: BEARER   " + KEY + b"  ",),
        (b"X-Api-Key: " + KEY,),
        (b"Authorization: Bearer wrong", b"x-api-key: " + KEY),
        (b"x-api-key: wrong", BEARER),
        (b"Authorization: Basic dTpw", b"x-api-key: " + KEY),
    ],
)
def test_a_known_key_opens_and_its_name_is_told(lines: tuple[bytes, ...]) -> None:
    world = guarded()
    assert asked(world, chat(*lines)).responses[0].status == 200
    assert world.access_lines[0].key == "team-a"
    world.rest()


@pytest.mark.parametrize(
    "lines",
    [
        (),
        (b"Authorization: Bearer",),
        (b"Authorization: Bearer ",),
        (b"Authorization: " + KEY,),
        (b"Authorization: Basic " + KEY,),
        (b"Authorization: Bearer " + KEY[:-1],),
        (b"Authorization: Bearer " + KEY + b"x",),
        (b"Authorization: Bearer " + KEY.upper(),),
        (b"Authorization: Bearer " + sha256(KEY).hexdigest().encode(),),
        (b"x-api-key: ",),
        (b"x-api-key: Bearer " + KEY,),
        (b"api-key: " + KEY,),
        (b"Cookie: Authorization=" + KEY,),
        (b"Authorization: Bearer \xff\x80",),
        (b"Authorization: Bearer wrong", BEARER),
    ],
)
def test_everybody_else_is_refused_and_reaches_no_engine(lines: tuple[bytes, ...]) -> None:
    world = guarded()
    assert is_refused(asked(world, chat(*lines)).responses[0])
    assert received(world) == []
    assert world.access_lines[0].key == ""
    assert world.access_lines[0].status == 401
    assert world.metrics.requests == {("", "", 401): 1}
    world.rest()


@pytest.mark.parametrize("path", [b"/metrics", b"/v1/models", b"/version", b"/", b"/health/", b"/livez/..", b"/Health"])
def test_every_other_path_needs_a_key(path: bytes) -> None:
    world = guarded()
    assert is_refused(asked(world, request(b"GET", path)).responses[0])
    assert asked(world, request(b"GET", path, BEARER)).responses[0].status == 200
    world.rest()


@pytest.mark.parametrize("path", [b"/health", b"/ping", b"/livez", b"/readyz", b"/health?x=1"])
def test_probes_need_none(path: bytes) -> None:
    world = guarded()
    for method in (b"GET", b"HEAD"):
        assert asked(world, request(method, path)).responses[0].status == 200
    assert received(world) == []
    world.rest()


def test_a_probe_s_path_is_no_way_to_an_engine_and_no_place_for_a_body() -> None:
    world = guarded()
    assert asked(world, request(b"POST", b"/ping")).responses[0].status == 200  # SageMaker's
    for raw in (
        request(b"POST", b"/health"),
        request(b"DELETE", b"/livez"),
        request(b"GET", b"/health", body=b"x"),
        request(b"POST", b"/ping", b"transfer-encoding: chunked"),
    ):
        assert is_refused(asked(world, raw).responses[0])
    assert received(world) == []
    world.rest()


def test_a_websocket_needs_a_key_too() -> None:
    world = guarded()
    upgrade = (b"Connection: Upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Key: x")
    assert is_refused(asked(world, request(b"GET", b"/v1/realtime", *upgrade)).responses[0])
    assert received(world) == []
    world.rest()


@pytest.mark.parametrize("framing", [b"content-length: 900000", b"transfer-encoding: chunked"])
def test_a_stranger_s_body_is_not_waited_for(framing: bytes) -> None:
    world = guarded()
    client = world.client()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\n" + framing + b"\r\n"
    client.send(head + b"Expect: 100-continue\r\n\r\n" + b"x" * 100_000)
    world.run(0.1)
    assert is_refused(client.responses[0])
    assert client.responses[0].header(b"connection") == b"close"
    assert not world.connections, "it was closed, though no body had ended"
    assert world.access_lines[0].ended == "gateway@read_body"
    world.rest()


def test_a_refused_request_without_a_body_leaves_the_connection_open_for_a_better_one() -> None:
    world = guarded()
    client = asked(world, request(b"GET", b"/version"))
    assert is_refused(client.responses[0])
    client.send(request(b"GET", b"/version", BEARER))
    world.run(0.1)
    assert client.responses[1].status == 200
    world.rest()


def test_the_key_that_was_for_us_does_not_go_on_and_nothing_else_is_lost() -> None:
    world = guarded()
    lines = (b"x-before: 1", b"x-api-key: " + KEY, b"Authorization: Bearer engine-key", b"x-after: 2")
    asked(world, chat(*lines))
    (seen,) = received(world)
    assert not any(KEY in value for values in seen.headers.values() for value in values)
    assert seen.header(b"authorization") == b"Bearer engine-key"
    assert (seen.header(b"x-before"), seen.header(b"x-after")) == (b"1", b"2")
    asked(world, chat(BEARER, b"x-api-key: " + OTHER_KEY))
    assert received(world)[-1].header(b"x-api-key") is None
    assert received(world)[-1].header(b"authorization") is None
    world.rest()


def test_the_engine_s_own_key_takes_its_place() -> None:
    world = guarded()
    for backend in world.registry.backends:
        backend.api_key = "engine-secret"
    asked(world, chat(BEARER))
    assert received(world)[0].header(b"authorization") == b"Bearer engine-secret"
    world.rest()


def test_without_keys_to_know_headers_pass_untouched() -> None:
    world = guarded()
    world.services.api_keys = None
    assert asked(world, chat(BEARER, b"x-api-key: " + OTHER_KEY)).responses[0].status == 200
    (seen,) = received(world)
    assert seen.header(b"authorization") == b"Bearer " + KEY
    assert seen.header(b"x-api-key") == OTHER_KEY
    assert world.access_lines[0].key == ""
    world.rest()


def test_keys_can_be_replaced_while_running() -> None:
    world = guarded()
    client = asked(world, chat(BEARER))
    assert client.responses[0].status == 200
    world.services.api_keys = ApiKeys({sha256(OTHER_KEY).digest(): "team-b"})
    client.send(chat(BEARER))
    world.run(0.1)
    assert is_refused(client.responses[1])
    assert asked(world, chat(b"x-api-key: " + OTHER_KEY)).responses[0].status == 200
    world.rest()


def test_neither_keys_nor_digests_show_in_a_repr() -> None:
    assert repr(KEYS) == "<ApiKeys 2>"
