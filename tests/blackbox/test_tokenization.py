"""`[routing.kvaware] tokenization` of a running gateway: who counts tokens, and what it tells where they differ."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from router.tokens.local import LocalTokenizer
from router.tokens.model_folder import read_model_folder
from router.tokens.question import CHAT_PATH, COMPLETIONS_PATH, read_prompt
from router.tokens.segment_cache import SegmentCache
from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.sim_process import SimProcess, running_sim
from tests.support.tokenizer_folders import write_folder

MODEL = "sim-8b"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Grüße, 世界! " * 40}], "max_tokens": 1}


def kvaware(**keys: Any) -> dict[str, Any]:
    return {"routing": {"strategy": "kvaware", "kvaware": keys}, "log": {"format": "text"}}


@pytest.fixture(scope="module")
def sim() -> Iterator[SimProcess]:
    with running_sim("--step-ms", "1", "--decode-ms", "1") as process:
        yield process


@pytest.fixture(scope="module")
def wrong_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer, and not that of the engine."""
    return write_folder(tmp_path_factory.mktemp("wrong"))


@pytest.fixture(scope="module")
def gateway(sim: SimProcess) -> Iterator[GatewayProcess]:
    with running_gateway([sim.url], **kvaware(tokenization="engine")) as process:
        yield process


def tokens_of(gateway: GatewayProcess, model: str = MODEL) -> dict[str, Any]:
    """Its state, once it is settled."""
    state: dict[str, Any] = {}

    def settled() -> bool:
        state.clear()
        state.update(gateway.admin("GET", "/backends").json()["tokens"].get(model, {"source": "loading"}))
        return state["source"] not in ("loading", "testing")

    gateway.until(settled, "who counts the model's tokens is settled")
    return state


def reload(gateway: GatewayProcess, sim: SimProcess, **tables: Any) -> None:
    gateway.write_config([sim.url], **tables)
    gateway.reload()


def explained(gateway: GatewayProcess) -> dict[str, Any]:
    gateway.until(lambda: gateway.backend("gpu-0")["kv_events"]["state"] == "live", "its events are followed")
    prompt: dict[str, Any] = gateway.admin("POST", "/explain", CHAT).json()["prompt"]
    return prompt


def test_an_engine_is_asked_and_its_count_is_the_prompts(gateway: GatewayProcess, sim: SimProcess) -> None:
    reload(gateway, sim, **kvaware(tokenization="engine"))
    assert tokens_of(gateway) == {"source": "engine", "check": None, "detail": ""}
    prompt = explained(gateway)
    assert (prompt["tokens_exact"], prompt["without_ids"]) == (True, None)
    assert prompt["tokens"] == gateway.request("POST", CHAT_PATH, CHAT).json()["usage"]["prompt_tokens"]
    assert gateway.metric("tokens_total", result="engine") >= 1
    assert gateway.metric("tokens_wait_seconds_count") >= 1
    assert gateway.metric("tokens_cache_tokens_total", result="missed") >= prompt["tokens"]
    assert gateway.metric("tokens_cache_bytes") > 0


def test_off_is_off_and_requests_go_on(gateway: GatewayProcess, sim: SimProcess) -> None:
    reload(gateway, sim, **kvaware(tokenization="off"))
    assert tokens_of(gateway) == {
        "source": "off",
        "check": None,
        "detail": "routing.kvaware.tokenization is off",
    }
    prompt = explained(gateway)
    assert (prompt["tokens_exact"], prompt["without_ids"][:4]) == (False, "off:")
    assert gateway.request("POST", CHAT_PATH, CHAT).status == 200


def test_a_wrong_folder_is_named_and_the_engine_asked_instead(
    gateway: GatewayProcess, sim: SimProcess, wrong_folder: Path
) -> None:
    reload(gateway, sim, **kvaware(tokenization="auto", tokenizer=str(wrong_folder)))
    state = tokens_of(gateway)
    assert (state["source"], state["check"]) == ("engine", "mismatch")
    assert state["detail"].startswith("sample 'plain': token 0 is 1 here and ")
    (line,) = gateway.err.wait(lambda line: "local tokenizing is off" in line)
    assert f"model '{MODEL}'" in line
    assert state["detail"] in line
    assert explained(gateway)["tokens_exact"]


def test_a_wrong_folder_where_only_that_is_wanted_leaves_no_tokens(
    gateway: GatewayProcess, sim: SimProcess, wrong_folder: Path
) -> None:
    tables = kvaware(tokenization="local")
    reload(gateway, sim, **tables, models={"tokenizers": {MODEL: str(wrong_folder)}})
    state = tokens_of(gateway)
    assert (state["source"], state["check"]) == ("off", "mismatch")
    assert "token 0 is 1 here" in state["detail"]
    assert not explained(gateway)["tokens_exact"]
    answer = gateway.request("POST", CHAT_PATH, CHAT)
    assert answer.status == 200
    reload(gateway, sim, **tables)
    assert tokens_of(gateway)["detail"].startswith("no folder with its tokenizer is known")


def test_a_folder_that_is_not_there_fails_the_reload(gateway: GatewayProcess, sim: SimProcess) -> None:
    reload(gateway, sim, **kvaware(tokenization="engine"))
    gateway.write_config([sim.url], **kvaware(tokenization="auto", tokenizer="/nowhere"))
    gateway.reload("failed")
    gateway.err.wait(lambda line: "routing.kvaware.tokenizer" in line and "a folder with a tokenizer.json" in line)
    assert tokens_of(gateway)["source"] == "engine"


def test_tokens_are_counted_for_kvaware_alone(gateway: GatewayProcess, sim: SimProcess) -> None:
    reload(gateway, sim, **kvaware(tokenization="engine"))
    tokens_of(gateway)
    assert "tokens_queued" in str(gateway.metrics().samples)
    reload(gateway, sim, routing={"strategy": "prefixaware"}, log={"format": "text"})
    gateway.until(lambda: gateway.admin("GET", "/backends").json()["tokens"] == {}, "nobody counts tokens")
    assert "kvgate_tokens_queued" not in gateway.metrics().samples
    assert gateway.request("POST", CHAT_PATH, CHAT).status == 200
    reload(gateway, sim, **kvaware(tokenization="engine"))
    assert tokens_of(gateway)["source"] == "engine"


@contextmanager
def folder_engine(folder: Path) -> Iterator[str]:
    """An engine that has its model from `folder`, as its /v1/models says, and tokenizes by it."""
    local = LocalTokenizer(read_model_folder(str(folder)), SegmentCache(1 << 20))
    models = {"object": "list", "data": [{"id": "m", "object": "model", "root": str(folder)}]}
    adapter = {"id": "m-adapter", "object": "model", "root": "/adapters/one", "parent": "m"}
    models["data"].append(adapter)  # type: ignore[attr-defined]

    class Engine(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(200 if self.path in ("/health", "/v1/models") else 404, models)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            path = CHAT_PATH if "messages" in json.loads(body) else COMPLETIONS_PATH
            ids = local.tokenize(read_prompt(path, body)).ids.tolist()
            self._answer(200, {"count": len(ids), "max_model_len": 4096, "tokens": ids})

        def _answer(self, status: int, answer: object) -> None:
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_an_engines_own_folder_serves_once_it_is_verified(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", "words")
    with folder_engine(folder) as url, running_gateway([url], routing={"strategy": "kvaware"}) as gateway:
        for model in ("m", "m-adapter"):
            assert tokens_of(gateway, model) == {
                "source": "local",
                "check": "verified",
                "detail": "7 of 7 samples equal the engine's ids",
                "folder": str(folder),
                "chats": "on",
                "cache": "on",
            }


def test_a_folder_that_was_mended_is_read_at_the_next_reload(tmp_path: Path) -> None:
    right, given = write_folder(tmp_path / "right", "words"), write_folder(tmp_path / "given")
    with folder_engine(right) as url, running_gateway([url], **kvaware(tokenizer=str(given))) as gateway:
        assert tokens_of(gateway, "m")["check"] == "mismatch"
        write_folder(given, "words")
        gateway.reload()
        gateway.until(lambda: tokens_of(gateway, "m")["source"] == "local", "the mended folder serves")
