"""From a request to its pool and its session key, as clients see it."""

from __future__ import annotations

import json

import pytest

from router.backends.backend import State
from router.backends.registry import START_PATIENCE_S
from tests.support.scripted import Client, EngineConnection, Response, request, response_head
from tests.support.world import Rules, ScriptedEngine, World

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
    if response.status == 200:
        return 200, ""
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
    new = world.registry.add("new", "http://new.test:1")
    world.clock.advance(START_PATIENCE_S)  # it is not just starting any more
    assert error(post(world, {"model": "b"})) == (503, "no_backend")
    assert error(post(world, {"model": "a"})) == (200, "")
    world.registry.set_models(new, [{"id": "c"}])
    assert error(post(world, {"model": "b"})) == (404, "model_not_found")
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


# -- aliases


def bodies(world: World) -> list[bytes]:
    return [received.body for engine in world.engines.values() for received in engine.received]


def test_an_alias_goes_to_its_model_s_backends_under_the_model_s_name() -> None:
    world = world_of(("a",), ("modèle",))
    world.registry.set_aliases({"gpt-4o": "modèle"})
    body = b'{ "messages" : [], "model" : "gpt\\u002d4o" , "temperature": 1.0 }'
    response = post(world, body)
    assert (response.status, served_by(response)) == (200, b"e1")
    (received,) = world.engines["e1"].received
    assert received.body == '{ "messages" : [], "model" : "modèle" , "temperature": 1.0 }'.encode()
    assert received.header(b"content-length") == b"%d" % len(received.body)
    assert world.access_lines[0].model == "modèle"
    assert world.metrics.requests == {("modèle", "e1", 200): 1}
    world.rest()


def test_an_alias_in_a_form_is_replaced_too() -> None:
    world = world_of(("whisper-large",))
    world.registry.set_aliases({"whisper-1": "whisper-large"})
    form = b'--X\r\nContent-Disposition: form-data; name="model"\r\n\r\n%b\r\n--X--\r\n'
    client = world.client()
    lines = (b"content-type: multipart/form-data; boundary=X",)
    client.send(request(b"POST", b"/v1/audio/transcriptions", *lines, body=form % b"whisper-1"))
    world.run(0.1)
    assert client.responses[0].status == 200
    assert bodies(world) == [form % b"whisper-large"]
    world.rest()


def test_a_repeat_sends_the_model_s_name_again() -> None:
    world = world_of(("a",), ("a",))
    world.registry.set_aliases({"x": "a"})
    answers = iter([response_head(503, b"content-length: 0"), response_head(200, JSON, b"content-length: 2") + b"{}"])
    world.on_engine_requests(lambda connection, received: connection.write(next(answers)))
    assert post(world, {"model": "x"}).status == 200
    assert bodies(world) == [b'{"model": "a"}'] * 2
    world.rest()


def test_an_alias_wins_over_a_model_of_its_name() -> None:
    world = world_of(("a",), ("b",))
    world.registry.set_aliases({"a": "b"})
    assert served_by(post(world, {"model": "a"})) == b"e1"
    world.rest()


def test_an_alias_of_an_unknown_model_is_unknown_by_its_own_name_and_aliases_are_named() -> None:
    world = world_of(("a",))
    world.registry.set_aliases({"lost": "nobody", "found": "a"})
    response = post(world, {"model": "lost"})
    assert error(response) == (404, "model_not_found")
    assert b"`lost`" in response.payload
    assert b"Available models: a, found." in response.payload
    world.rest()


def test_paths_that_are_no_inference_keep_their_body() -> None:
    world = world_of(("a",))
    world.registry.set_aliases({"x": "a"})
    assert post(world, b'{"model": "x"}', path=b"/v1/load_lora_adapter").status == 200
    assert bodies(world) == [b'{"model": "x"}']
    world.rest()


@pytest.mark.parametrize("body", [b'{"model": "x"', b'{"model": "x"}}', b"\xff\xfe", b'{"model": ["x"]}', b""])
def test_a_body_that_names_no_model_is_not_touched(body: bytes) -> None:
    world = world_of(("a",))
    world.registry.set_aliases({"x": "a"})
    assert post(world, body).status == 200
    assert bodies(world) == [body]
    world.rest()


LONG = "once upon a time " * 40


@pytest.mark.parametrize(
    ("first", "then"), [("a", "x"), ("x", "a"), ("a", None), (None, "x"), ("a-too", "a"), ("x", "a-too")]
)
def test_alias_model_its_other_names_and_no_name_share_one_prefix(first: str | None, then: str | None) -> None:
    world = world_of(("a", "a-too"), ("a", "a-too"), strategy="prefixaware")
    for backend in world.registry.backends:
        world.registry.set_models(backend, [{"id": "a", "root": "/w"}, {"id": "a-too", "root": "/w"}])
    world.registry.set_aliases({"x": "a"})

    def ask(model: str | None) -> Response:
        body: dict[str, object] = {"messages": [{"role": "user", "content": LONG}]}
        return post(world, body if model is None else body | {"model": model})

    miss, hit = ask(first), ask(then)
    assert miss.header(b"x-kvgate-matched") == b"0"
    assert int(hit.header(b"x-kvgate-matched") or 0) > 0
    assert served_by(miss) == served_by(hit)
    world.rest()


def test_an_adapter_shares_no_prefix_with_its_base() -> None:
    world = world_of(("a",), strategy="prefixaware")
    (backend,) = world.registry.backends
    backend.configured_models = None
    world.registry.set_models(backend, [{"id": "a", "root": "/w"}, {"id": "sql", "root": "/lora", "parent": "a"}])
    body = {"messages": [{"role": "user", "content": LONG}]}
    for model, matched in (("a", False), ("sql", False), ("sql", True), (None, True)):
        answer = post(world, body if model is None else body | {"model": model})
        assert (answer.header(b"x-kvgate-matched") != b"0") is matched
    world.rest()


# -- adapters that come and go


def adapters_world() -> World:
    world = world_of(("a",))
    (backend,) = world.registry.backends
    backend.configured_models = None
    world.engines["e0"].models = ["a"]
    return world


def test_an_adapter_can_be_asked_for_as_soon_as_its_loading_was_answered() -> None:
    world = adapters_world()
    assert error(post(world, {"model": "sql"})) == (404, "model_not_found")
    world.engines["e0"].models = ["a", "sql"]
    assert post(world, {"lora_name": "sql"}, path=b"/v1/load_lora_adapter").status == 200
    assert post(world, {"model": "sql"}).status == 200
    world.engines["e0"].models = ["a"]
    assert post(world, {"lora_name": "sql"}, path=b"/v1/unload_lora_adapter").status == 200
    assert error(post(world, {"model": "sql"})) == (404, "model_not_found")
    world.rest()


def test_an_engine_that_does_not_tell_its_models_then_keeps_nobody_waiting() -> None:
    world = adapters_world()
    world.engines["e0"].models = None
    assert post(world, {"lora_name": "sql"}, path=b"/v1/load_lora_adapter").status == 200
    world.rest()


@pytest.mark.parametrize("status", [400, 404])
def test_a_change_that_failed_asks_nothing(status: int) -> None:
    world = adapters_world()
    world.on_engine_requests(lambda c, r: c.write(response_head(status, JSON, b"content-length: 2") + b"{}"))
    world.engines["e0"].models = ["a", "sql"]
    assert post(world, {"lora_name": "sql"}, path=b"/v1/load_lora_adapter").status == status
    assert world.registry.known_models() == ["a"]
    world.rest()


def test_a_client_that_leaves_while_the_models_are_asked_leaves_nothing_behind() -> None:
    world = adapters_world()
    client = world.client()
    client.send(request(b"POST", b"/v1/load_lora_adapter", JSON, body=b"{}"))
    world.run(0.02)
    assert world.admission.in_flight == 1
    client.abort()
    world.run(0.02)
    assert world.admission.in_flight == 0
    world.rest()


# -- waiting for backends that are just starting


def starting_world(*names: str) -> World:
    """Backends that have not told their models yet."""
    world = world_of()
    for name in names:
        world.engines[name] = ScriptedEngine(world, name)
        world.registry.add(name, f"http://{name}.test:8000")
    world.on_engine_requests(
        lambda connection, received: connection.write(response_head(200, JSON, b"content-length: 2") + b"{}")
    )
    return world


def comes_up(world: World, name: str, *models: str) -> None:
    backend = world.backend(name)
    world.registry.set_models(backend, [{"id": model} for model in models])
    world.registry.set_state(backend, State.UP, "")


def waiting(world: World, model: str | None) -> Client:
    client = world.client()
    body = json.dumps({} if model is None else {"model": model}).encode()
    client.send(request(b"POST", b"/v1/chat/completions", JSON, body=body))
    world.run(0.05)
    assert not client.responses
    return client


def test_requests_wait_for_backends_that_have_not_told_their_models_yet() -> None:
    world = starting_world("e0", "e1")
    world.registry.set_aliases({"x": "b"})
    for_a, for_b, for_x, for_c = (waiting(world, model) for model in ("a", "b", "x", "c"))
    assert world.admission.depth == 4
    assert world.admission.queued_by_model() == {"": 4}
    comes_up(world, "e0", "a")
    world.run(0.1)
    assert for_a.responses[0].status == 200
    assert [client.responses for client in (for_b, for_x, for_c)] == [[], [], []]
    comes_up(world, "e1", "b")
    world.run(0.1)
    assert [client.responses[0].status for client in (for_b, for_x, for_c)] == [200, 200, 404]
    assert [served_by(client.responses[0]) for client in (for_b, for_x)] == [b"e1", b"e1"]
    assert b'{"model": "b"}' in bodies(world)
    assert all(line.model in ("a", "b", "") for line in world.access_lines)
    world.rest()


def test_a_request_that_names_no_model_waits_for_the_only_one() -> None:
    world = starting_world("e0")
    client = waiting(world, None)
    comes_up(world, "e0", "a")
    world.run(0.1)
    assert client.responses[0].status == 200
    world.rest()


def test_waiting_for_a_starting_backend_ends_with_its_time() -> None:
    world = starting_world("e0")
    client = waiting(world, "a")
    world.run(world.rules.queue_timeout_s)
    assert error(client.responses[0]) == (503, "no_backend")
    assert client.responses[0].header(b"retry-after") == b"3"
    assert world.admission.depth == 0
    world.rest()


def test_who_leaves_while_waiting_for_a_starting_backend_frees_the_place() -> None:
    world = starting_world("e0")
    client = waiting(world, "a")
    client.abort()
    world.run(0.05)
    assert world.admission.depth == 0
    assert world.access_lines[0].ended == "client@queued"
    world.rest()


def test_one_whose_model_becomes_known_while_all_places_are_taken_takes_none() -> None:
    world = World(Rules(max_in_flight=1), backends=0)
    world.add_backend("e0", models=("a",))
    world.engines["e1"] = ScriptedEngine(world, "e1")
    world.registry.add("e1", "http://e1.test:8000")
    held: list[EngineConnection] = []
    world.on_engine_requests(lambda connection, received: held.append(connection))
    first = waiting(world, "a")
    second = waiting(world, "b")
    comes_up(world, "e1", "b")
    world.run(0.1)
    assert world.admission.in_flight == 1
    assert world.admission.queued_by_model() == {"b": 1}
    held[0].write(response_head(200, b"content-length: 0"))
    world.run(0.1)
    held[1].write(response_head(200, b"content-length: 0"))
    world.run(0.1)
    assert [client.responses[0].status for client in (first, second)] == [200, 200]
    world.rest()


# -- outages


@pytest.mark.parametrize(("out_s", "retry_after"), [(0.0, b"1"), (5.5, b"5"), (500.0, b"60")])
def test_an_outage_says_to_come_back_after_as_long_as_it_has_lasted(out_s: float, retry_after: bytes) -> None:
    world = world_of(("a",), ("a",), ("b",))
    world.registry.set_state(world.backend("e0"), State.DOWN, "dead")
    world.clock.advance(50.0)
    world.registry.set_state(world.backend("e1"), State.DOWN, "dead")
    world.clock.advance(out_s)
    response = post(world, {"model": "a"})
    assert error(response) == (503, "no_backend")
    assert response.header(b"retry-after") == retry_after
    world.rest()


def test_a_model_that_nobody_serves_any_more_is_told_at_once_though_all_places_are_taken() -> None:
    world = World(Rules(max_in_flight=1), backends=0)
    world.add_backend("e0", models=("a",))
    world.add_backend("e1", models=("b",))
    world.on_engine_requests(lambda connection, received: None)
    waiting(world, "a")
    queued = waiting(world, "b")
    world.registry.set_state(world.backend("e1"), State.DOWN, "dead")
    assert error(post(world, {"model": "b"})) == (503, "no_backend")
    assert error(queued.responses[0]) == (503, "no_backend")
    assert world.admission.depth == 0
    world.rest()
