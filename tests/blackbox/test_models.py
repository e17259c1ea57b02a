"""Several models in one fleet, their other names, aliases, and adapters that come and go."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack

import openai
import pytest

from tests.blackbox.raw_engine import RawEngine, raw_engine
from tests.support.gateway_process import GatewayProcess, next_id, running_gateway
from tests.support.sim_process import SimProcess, running_sim

CHAT = "/v1/chat/completions"
ALIASES = {"gpt-4o": "alpha", "größe/éclair": "beta", "beta-too": "beta", "nobody": "gone", "fast-sql": "sql"}


@pytest.fixture(scope="module")
def sims() -> Iterator[list[SimProcess]]:
    with ExitStack() as stack:
        first = stack.enter_context(running_sim("--served-model-name", "alpha", "alpha-too", "--enable-lora"))
        yield [first, stack.enter_context(running_sim("--served-model-name", "beta"))]


@pytest.fixture(scope="module")
def gateway(sims: list[SimProcess]) -> Iterator[GatewayProcess]:
    with running_gateway([sim.url for sim in sims], models={"aliases": ALIASES}) as gateway:
        yield gateway


def ask(model: str, text: str = "hi") -> dict[str, object]:
    return {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 1}


@pytest.mark.parametrize(
    ("model", "backend", "label"),
    [
        ("alpha", "gpu-0", "alpha"),
        ("alpha-too", "gpu-0", "alpha-too"),
        ("gpt-4o", "gpu-0", "alpha"),
        ("größe/éclair", "gpu-1", "beta"),
        ("beta-too", "gpu-1", "beta"),
    ],
)
def test_each_name_goes_to_the_engine_that_serves_it(
    gateway: GatewayProcess, model: str, backend: str, label: str
) -> None:
    answer = gateway.request("POST", CHAT, ask(model), {"X-Request-Id": (request_id := next_id())})
    assert (answer.status, answer.headers["x-kvgate-backend"]) == (200, backend)
    assert gateway.access(request_id)["model"] == label
    assert gateway.metric("requests_total", model=label, backend=backend, code="200") >= 1


def test_a_model_s_other_names_share_its_prefixes(gateway: GatewayProcess) -> None:
    text = "a story told to every name of one model " * 30
    matched = [
        int(gateway.request("POST", CHAT, ask(model, text)).headers["x-kvgate-matched"])
        for model in ("gpt-4o", "alpha", "alpha-too", "gpt-4o")
    ]
    assert matched[0] == 0
    assert all(tokens > 0 for tokens in matched[1:])


def test_the_listing_has_aliases_of_what_is_known(gateway: GatewayProcess, sims: list[SimProcess]) -> None:
    entries = {entry["id"]: entry for entry in gateway.request("GET", "/v1/models").json()["data"]}
    assert set(entries) == {"alpha", "alpha-too", "beta", "gpt-4o", "größe/éclair", "beta-too"}
    assert entries["gpt-4o"] == entries["alpha"] | {"id": "gpt-4o"}


def test_an_unknown_name_is_told_the_known_ones_aliases_included(gateway: GatewayProcess) -> None:
    for model in ("nobody", "elsewhere"):
        answer = gateway.request("POST", CHAT, ask(model))
        error = answer.json()["error"]
        assert (answer.status, error["code"]) == (404, "model_not_found")
        assert f"`{model}`" in error["message"]
        assert "gpt-4o" in error["message"]


def test_an_adapter_is_a_model_as_soon_as_it_is_loaded_and_until_it_is_unloaded(gateway: GatewayProcess) -> None:
    with openai.OpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=0) as client:

        def call(model: str) -> str:
            messages = [{"role": "user", "content": "adapter words " * 60}]
            answer = client.chat.completions.create(model=model, messages=messages, max_tokens=1)  # type: ignore[arg-type]
            return answer.model

        with pytest.raises(openai.NotFoundError):
            call("sql")
        load = {"lora_name": "sql", "lora_path": "/adapters/sql"}
        # it reaches whichever engine has least to do: the one without LoRA refuses
        while (answer := gateway.request("POST", "/v1/load_lora_adapter", load)).status != 200:
            assert answer.headers["x-kvgate-backend"] == "gpu-1"
        assert call("sql") == "sql"
        assert call("fast-sql") == "sql"
        (entry,) = [model for model in client.models.list() if model.id == "sql"]
        assert entry.to_dict()["parent"] == "alpha"
        while (answer := gateway.request("POST", "/v1/unload_lora_adapter", {"lora_name": "sql"})).status != 200:
            assert answer.headers["x-kvgate-backend"] == "gpu-1"
        with pytest.raises(openai.NotFoundError):
            call("sql")


# -- the bytes


@pytest.fixture(scope="module")
def engine() -> Iterator[RawEngine]:
    with raw_engine(models=("模型/7b",)) as engine:
        yield engine


@pytest.fixture(scope="module")
def aliased(engine: RawEngine) -> Iterator[GatewayProcess]:
    with running_gateway([engine.url], models={"aliases": {"gpt-4o": "模型/7b", 'q"\\': "模型/7b"}}) as gateway:
        yield gateway


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('{"model":"gpt-4o","messages":[]}', '{"model":"模型/7b","messages":[]}'),
        ('{ "messages" :[ ],\n"model"\t: "gpt-4o" }\n', '{ "messages" :[ ],\n"model"\t: "模型/7b" }\n'),
        ('{"mod\\u0065l":"gpt\\u002d4o","x":"é\\u00e9"}', '{"mod\\u0065l":"模型/7b","x":"é\\u00e9"}'),
        ('{"model":"other","model":"gpt-4o"}', '{"model":"other","model":"模型/7b"}'),
        ('{"model":"q\\"\\\\","user":"gpt-4o"}', '{"model":"模型/7b","user":"gpt-4o"}'),
        ('{"a":{"model":"gpt-4o"},"n":1e400,"messages":[]}', '{"a":{"model":"gpt-4o"},"n":1e400,"messages":[]}'),
    ],
)
@pytest.mark.parametrize("chunked", [False, True])
def test_the_name_alone_changes(
    aliased: GatewayProcess, engine: RawEngine, before: str, after: str, chunked: bool
) -> None:
    body = before.encode()
    framing = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % len(body)
    with aliased.connect() as client:
        client.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n%b\r\n\r\n" % framing)
        client.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body)
        received = engine.take()
        assert received.body.decode() == after
        assert received.header("content-length") == [str(len(after.encode()))]
        received.answer()
        assert client.read().status == 200


def test_a_form_s_field_changes(aliased: GatewayProcess, engine: RawEngine) -> None:
    form = (
        '--B\r\nContent-Disposition: form-data; name="file"; filename="model"\r\n\r\ngpt-4o\r\n'
        '--B\r\nContent-Disposition: form-data; name="model"\r\n\r\n{}\r\n--B--\r\n'
    )
    body = form.format("gpt-4o").encode()
    headers = {"Content-Type": "multipart/form-data; boundary=B"}
    with aliased.send("POST", "/v1/audio/transcriptions", body, headers) as client:
        received = engine.take()
        assert received.body.decode() == form.format("模型/7b")
        received.answer()
        assert client.read().status == 200


# -- fleets that are just starting


def test_requests_wait_for_engines_whose_models_nobody_knows_yet() -> None:
    engine = RawEngine(models=("late",))
    try:
        engine.alive = False
        with running_gateway([engine.url], wait=False) as gateway, ExitStack() as stack:
            known = stack.enter_context(gateway.send("POST", CHAT, {"model": "late"}))
            unknown = stack.enter_context(gateway.send("POST", CHAT, {"model": "never"}))
            gateway.until_metric("queue_depth", 2)
            engine.alive = True
            received = engine.take()
            assert json.loads(received.body) == {"model": "late"}
            received.answer()
            assert known.read().status == 200
            assert unknown.read().status == 404
    finally:
        engine.close()


def test_aliases_are_replaced_by_a_reload(engine: RawEngine) -> None:
    with running_gateway([engine.url], models={"aliases": {"old": "模型/7b"}}) as gateway:
        gateway.write_config([engine.url], models={"aliases": {"new": "模型/7b"}})
        gateway.reload()
        assert gateway.request("POST", CHAT, ask("old")).status == 404
        with gateway.send("POST", CHAT, {"model": "new"}):
            assert json.loads(engine.take().body) == {"model": "模型/7b"}
        listing = gateway.request("GET", "/v1/models").json()
        assert [entry["id"] for entry in listing["data"]] == ["模型/7b", "new"]
