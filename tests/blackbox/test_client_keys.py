"""Clients and their keys: with [auth], each sends its key in its own way, and a wrong one is what it raises for it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import openai
import pytest

from tests.support.client_fleet import MODEL, ClientFleet, client_fleet

SAY: Any = [{"role": "user", "content": "say something"}]
PLAIN, HASHED = "sk-plain-0123456789", "sk-hashed-0123456789"
WRONG = "sk-wrong-0123456789"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientFleet]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"alice:{PLAIN}\nbob:sha256:{hashlib.sha256(HASHED.encode()).hexdigest()}\n")
    keys.chmod(0o600)
    with client_fleet(auth={"api_keys_file": str(keys)}) as fleet:
        yield fleet
        said = "\n".join([*fleet.gateway.out.all(), *fleet.gateway.err.all()])
        said += fleet.gateway.admin("GET", "/metrics").body.decode()
        assert not any(key in said for key in (PLAIN, HASHED, WRONG))


@contextmanager
def openai_client(fleet: ClientFleet, key: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{fleet.gateway.url}/v1", api_key=key, max_retries=0, timeout=20) as client:
        yield client


@contextmanager
def anthropic_client(fleet: ClientFleet, **key: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=fleet.gateway.url, max_retries=0, timeout=20, **key) as client:  # type: ignore[arg-type]
        yield client


@pytest.mark.parametrize("key", [PLAIN, HASHED])
def test_a_good_key_is_taken_from_each_client(fleet: ClientFleet, key: str) -> None:
    with openai_client(fleet, key) as client:
        raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=SAY, max_tokens=3)
        fleet.routed(raw.headers)
        assert raw.parse().usage.completion_tokens == 3  # type: ignore[union-attr]
        assert [model.id for model in client.models.list()] == [MODEL]
    for given in ({"api_key": key}, {"auth_token": key}):
        with anthropic_client(fleet, **given) as other:
            assert other.messages.create(model=MODEL, max_tokens=3, messages=SAY).usage.output_tokens == 3


def test_a_wrong_key_is_an_authentication_error(fleet: ClientFleet) -> None:
    asked = sum(sim.stats()["requests"] for sim in fleet.sims)
    with openai_client(fleet, WRONG) as client:
        with pytest.raises(openai.AuthenticationError) as refused:
            client.chat.completions.create(model=MODEL, messages=SAY)
        assert refused.value.type == "authentication_error"
        assert refused.value.response.headers["x-kvgate-error"] == "1"
        with pytest.raises(openai.AuthenticationError):
            client.chat.completions.create(model=MODEL, messages=SAY, stream=True)
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
    for given in ({"api_key": WRONG}, {"auth_token": WRONG}):
        with anthropic_client(fleet, **given) as other:
            with pytest.raises(anthropic.AuthenticationError) as denied:
                other.messages.create(model=MODEL, max_tokens=3, messages=SAY)
            assert denied.value.type == "authentication_error"
    assert sum(sim.stats()["requests"] for sim in fleet.sims) == asked


def test_no_key_is_an_authentication_error_but_health_is_open(fleet: ClientFleet) -> None:
    body = {"model": MODEL, "messages": SAY}
    answer = fleet.gateway.request("POST", "/v1/chat/completions", body)
    assert (answer.status, answer.json()["error"]["type"]) == (401, "authentication_error")
    for path in ("/health", "/ping", "/livez", "/readyz"):
        assert fleet.gateway.request("GET", path).status == 200
