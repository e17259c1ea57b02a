"""From a request to its pool and its session key, as clients see it."""

from __future__ import annotations

import json

import pytest

from router.backends.backend import State
from tests.support.scripted import Response, request, response_head
from tests.support.world import Rules, World

JSON = b"content-type: application/json"
SESSION = "session"


def world_of(*models: tuple[str, ...], strategy: str = "roundrobin") -> World:
    world = World(Rules(strategy=strategy), backends=0)
    for number, names in enumerate(models):
        world.add_backend(f"e{number}", models=names)
    raw = response_head(200, JSON, b"content-length: 2") + b"{}"
    world.on_engine_requests(lambda connection, received: connection.write(raw))
    return world


def post(world: World, body: object, *lines: bytes, path: bytes = b"/v1/chat/completions") -> Response:
    client = world.client()
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    client.send(request(b"POST", path, JSON, *lines, body=raw))
    world.run(0.1)
    return client.responses[0]


def served_by(response: Response) -> bytes | None:
    return response.header(b"x-kvgate-backend")


def error(response: Response) -> tuple[int, str]:
    problem = response.json()["error"]
    assert isinstance(problem, dict)
    return response.status, problem["code"]


def test_a_model_goes_to_those_that_serve_it() -> None:
    world = world_of(("a",), ("b",), ("b", "c"))
    assert {served_by(post(world, {"model": "b"})) for _ in range(4)} == {b"e1", b"e2"}
    assert served_by(post(world, {"model": "c"})) == b"e2"
    world.rest()


def test_without_a_model_the_only_one_is_meant() -> None:
    world = world_of(("a",), ("a",))
    assert post(world, {"messages": []}).status == 200
    world.rest()


def test_without_a_model_and_with_several_to_choose_from_it_is_400() -> None:
    world = world_of(("a",), ("b",))
    response = post(world, {"messages": []})
    assert response.status == 400
    assert b"a, b" in response.payload
    assert error(post(world, b"{odd")) == (400, "invalid_json")
    world.rest()


def test_a_model_that_nobody_serves_is_404_and_a_long_name_is_not_sent_back_whole() -> None:
    world = world_of(("a",))
    response = post(world, {"model": "x" * 100_000})
    assert error(response) == (404, "model_not_found")
    assert len(response.payload) < 1000
    world.rest()


def test_without_any_backend_it_is_503() -> None:
    world = world_of()
    assert error(post(world, {"model": "a"})) == (503, "no_backend")
    assert error(post(world, {})) == (503, "no_backend")
    world.rest()


def test_a_model_may_be_one_of_a_backend_that_did_not_tell_yet() -> None:
    world = world_of(("a",))
    world.registry.add("new", "http://new.test:1")
    assert error(post(world, {"model": "b"})) == (503, "no_backend")
    world.rest()


def test_a_known_model_of_a_dead_backend_is_503_and_not_404() -> None:
    world = world_of(("a",), ("b",))
    world.registry.set_state(world.backend("e1"), State.DOWN, "dead")
    assert error(post(world, {"model": "b"})) == (503, "no_backend")
    world.rest()


def test_paths_without_a_model_go_anywhere() -> None:
    world = world_of(("a",), ("b",))
    assert {served_by(post(world, b"whatever", path=b"/unknown")) for _ in range(4)} == {b"e0", b"e1"}
    world.rest()


@pytest.mark.parametrize("place", ["header", "body"])
def test_one_session_stays_on_one_backend_and_says_so(place: str) -> None:
    world = world_of(("a",), ("a",), ("a",), strategy=SESSION)
    used = set()
    for key in range(12):
        answers = []
        for _ in range(3):
            lines = (b"x-session-id: k%d" % key,) if place == "header" else ()
            body = {"model": "a"} if place == "header" else {"model": "a", "user": f"k{key}"}
            answers.append(post(world, body, *lines))
        assert len({served_by(answer) for answer in answers}) == 1
        assert {answer.header(b"x-kvgate-reason") for answer in answers} == {b"session"}
        used.add(served_by(answers[0]))
    assert len(used) > 1
    world.rest()


def test_the_header_wins_over_the_body() -> None:
    world = world_of(("a",), ("a",), ("a",), strategy=SESSION)
    answers = [post(world, {"model": "a", "user": f"u{n}"}, b"x-session-id: same") for n in range(8)]
    assert len({served_by(answer) for answer in answers}) == 1
    world.rest()


def test_a_session_on_a_path_without_a_model_is_kept_too() -> None:
    world = world_of(("a",), ("a",), ("a",), strategy=SESSION)
    answers = [post(world, b"", b"x-session-id: same", path=b"/x") for _ in range(5)]
    assert len({served_by(answer) for answer in answers}) == 1
    world.rest()


def test_a_key_that_is_empty_is_no_key() -> None:
    world = world_of(("a",), ("a",), strategy=SESSION)
    assert post(world, {"model": "a"}, b"x-session-id: ").header(b"x-kvgate-reason") != b"session"
    world.rest()
