"""router/backends/probe.py against engines that are scripted: each lack is named with the flag that cures it."""

import asyncio
import json
import re
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from router.backends import probe as probe_module
from router.backends.probe import probe
from router.config import BackendConfig

METRICS = (
    'vllm:num_requests_running{engine="0"} 0.0\n'
    'vllm:cache_config_info{block_size="%s",enable_prefix_caching="%s",engine="0",num_gpu_blocks="64"} 1.0\n'
)
SOURCES = {"0": {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557"}}


class Engine:
    """A vLLM that is ready in every way; a test breaks what it is about."""

    def __init__(self) -> None:
        self.health = 200
        self.models: object = {"data": [{"id": "lora", "parent": "m"}, {"id": "m", "parent": None}]}
        self.metrics = METRICS % (16, "True")
        self.metrics_status = 200
        self.sources: object = SOURCES
        self.sources_status = 200
        self.completion_status = 200
        self.details: Callable[[int], object] = lambda count: {"cached_tokens": 0}
        self.api_key: str | None = None
        self.answers: dict[str, Callable[[web.Request], object]] = {}  # path -> a handler of the test's own
        self.completions: list[dict] = []
        self.paths: list[str] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.paths.append(request.path)
        if request.path in self.answers:
            return await self.answers[request.path](request)
        if request.path == "/health":
            return web.Response(status=self.health)
        if request.path == "/metrics":
            return web.Response(status=self.metrics_status, text=self.metrics)
        if request.path == "/kv_event_sources":
            return web.json_response(self.sources, status=self.sources_status)
        if self.api_key is not None and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if request.path == "/v1/models":
            return web.json_response(self.models)
        assert (request.method, request.path) == ("POST", "/v1/completions")
        assert request.content_type == "application/json"
        self.completions.append(await request.json())
        usage = {"prompt_tokens": 32, "prompt_tokens_details": self.details(len(self.completions))}
        return web.json_response({"usage": usage}, status=self.completion_status)

    @asynccontextmanager
    async def running(self):
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self.handle)
        async with TestServer(application) as server:
            yield f"http://127.0.0.1:{server.port}"


def asked(*engines: Engine, timeout_s: float = 5.0, **backend: object) -> list[probe_module.Probed]:
    """The results of probing these engines, named e0, e1 ..."""

    async def ask() -> list[probe_module.Probed]:
        async with asyncio.timeout(30):
            urls = []
            contexts = [engine.running() for engine in engines]
            for context in contexts:
                urls.append(await context.__aenter__())
            try:
                backends = [BackendConfig(url=url, name=f"e{n}", **backend) for n, url in enumerate(urls)]
                return await probe(backends, timeout_s=timeout_s, generation_timeout_s=timeout_s)
            finally:
                for context in contexts:
                    await context.__aexit__(None, None, None)

    return asyncio.run(ask())


def only_finding(*engines: Engine, **options: object) -> str:
    findings = [str(finding) for result in asked(*engines, **options) for finding in result.findings]
    assert len(findings) == 1, findings
    return findings[0]


def test_a_ready_engine_has_no_findings_and_its_base_model_was_asked_for_one_token():
    engine = Engine()
    (result,) = asked(engine)
    assert result.findings == []
    assert str(result) == "e0: models m, lora; block size 16 tokens; 64 blocks"
    (completion,) = engine.completions
    assert (completion["model"], completion["max_tokens"]) == ("m", 1)
    assert len(completion["prompt"].split()) > 16  # more than a block, else there is nothing to cache


def test_no_backends_are_no_results():
    assert asked() == []


def test_an_unreachable_engine_is_named_and_does_not_keep_others_from_being_asked():
    async def ask():
        listener = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        listener.close()
        await listener.wait_closed()
        async with Engine().running() as url:
            return await probe([BackendConfig(f"http://127.0.0.1:{port}", "gone"), BackendConfig(url, "here")])

    gone, here = asyncio.run(ask())
    assert re.match(r"gone: unreachable, /health fails: Connection refused; .*--port", str(gone.findings[0]))
    assert len(gone.findings) == 1
    assert here.findings == []


def test_a_dead_engine_behind_a_live_server_is_unreachable():
    engine = Engine()
    engine.health = 503
    assert "unreachable, /health answers 503" in only_finding(engine)
    assert engine.paths == ["/health"]


def test_a_silent_engine_is_unreachable_after_the_time_limit():
    engine = Engine()
    closed = asyncio.Event()

    async def silent(request):
        await closed.wait()

    engine.answers["/health"] = silent
    assert "does not answer within 0.05 s" in only_finding(engine, timeout_s=0.05)


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/kv_event_sources", "/v1/completions"])
def test_an_endless_answer_is_a_finding_and_the_other_questions_are_asked(path, monkeypatch):
    monkeypatch.setattr(probe_module, "ANSWER_LIMIT_BYTES", 100_000)
    engine = Engine()

    async def endless(request):
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"x" * 65_536)
        except ConnectionError:
            return response

    engine.answers[path] = endless
    assert f"{path} answers with more than 100000 bytes" in "\n".join(
        str(finding) for finding in asked(engine)[0].findings
    )
    assert "/kv_event_sources" in engine.paths


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/kv_event_sources", "/v1/completions"])
def test_a_reset_is_a_finding(path):
    engine = Engine()

    async def reset(request):
        request.transport.abort()

    engine.answers[path] = reset
    findings = "\n".join(str(finding) for finding in asked(engine)[0].findings)
    assert f"{path} fails: it closed the connection without an answer" in findings


def test_a_redirect_is_not_followed():
    engine = Engine()

    async def elsewhere(request):
        raise web.HTTPFound("/health")

    engine.answers["/kv_event_sources"] = elsewhere
    assert "/kv_event_sources answers 302" in only_finding(engine)


def test_a_missing_model_is_named_with_those_that_are_there():
    finding = only_finding(Engine(), models=("m", "other"))
    assert "model missing: other (it serves m, lora)" in finding
    assert "--served-model-name" in finding


def test_a_configured_model_is_the_one_that_is_asked():
    engine = Engine()
    assert asked(engine, models=("lora",))[0].findings == []
    assert engine.completions[0]["model"] == "lora"


def test_an_entry_that_cannot_be_used_is_named_and_the_other_models_are_asked() -> None:
    engine = Engine()
    engine.models = {"data": [{"id": "m"}, {}]}
    assert "without a string `id` (1 of 2 left out)" in only_finding(engine)
    assert engine.completions


@pytest.mark.parametrize("models", [[], {}, {"data": 5}, {"data": [{"id": 7}]}, "x", None])
def test_an_engine_without_readable_models_is_named(models):
    engine = Engine()
    engine.models = models
    assert "/v1/models is not as vLLM answers it" in only_finding(engine)
    assert engine.completions == []


def test_an_engine_without_models_is_named():
    engine = Engine()
    engine.models = {"data": []}
    assert "serves no model" in only_finding(engine)


def test_control_characters_in_the_name_of_a_model_do_not_reach_the_terminal():
    engine = Engine()
    engine.models = {"data": [{"id": "a\x1b[31m"}]}
    assert "models a?[31m;" in str(asked(engine)[0])


def test_a_key_that_is_missing_is_named_and_a_right_one_is_used():
    engine = Engine()
    engine.api_key = "s3cret"
    finding = only_finding(engine)
    assert "/v1/models answers 401" in finding
    assert "api_key_env" in finding
    assert asked(engine, api_key="s3cret")[0].findings == []


def test_prefix_caching_that_is_off_is_named():
    engine = Engine()
    engine.metrics = METRICS % (16, "False")
    engine.details = lambda count: None
    finding = only_finding(engine)
    assert "prefix caching is off" in finding
    assert "--enable-prefix-caching" in finding
    assert engine.completions == []  # without a cache it cannot be told


def test_an_engine_that_does_not_tell_its_block_size_is_named():
    engine = Engine()
    engine.metrics = "vllm:num_requests_running 0.0\n"
    assert "does not tell its block size" in only_finding(engine)


def test_an_engine_without_metrics_is_named():
    engine = Engine()
    engine.metrics_status = 404
    assert "/metrics answers 404" in only_finding(engine)


def test_block_sizes_that_differ_for_one_model_are_named():
    first, second = Engine(), Engine()
    second.metrics = METRICS % (32, "True")
    finding = only_finding(first, second)
    assert finding.startswith("e1: block size 32 tokens, while e0 has 16 for model m; ")
    assert "--block-size" in finding


def test_block_sizes_of_different_models_may_differ():
    first, second = Engine(), Engine()
    second.metrics = METRICS % (32, "True")
    second.models = {"data": [{"id": "other"}]}
    assert [result.findings for result in asked(first, second)] == [[], []]


@pytest.mark.parametrize(
    "sources",
    [
        {},
        {"0": None},
        {"0": {"enable_kv_cache_events": False, "publisher": "zmq"}},
        {"0": {"enable_kv_cache_events": True, "publisher": "null"}},
        {**SOURCES, "1": {"enable_kv_cache_events": False}},
    ],
)
def test_an_engine_that_publishes_no_kv_events_is_named(sources):
    engine = Engine()
    engine.sources = sources
    finding = only_finding(engine)
    assert "no KV events published" in finding
    # What is to be passed must be JSON that the engine takes.
    passed = json.loads(re.search(r"--kv-events-config '(.*)'", finding)[1])
    assert passed == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:5557",
        "replay_endpoint": "tcp://*:5558",
    }


def test_an_engine_that_fails_to_tell_its_sources_is_not_taken_for_one_without():
    engine = Engine()
    engine.sources = []
    assert "/kv_event_sources is not as vLLM answers it" in only_finding(engine)
    engine = Engine()
    engine.sources_status = 500
    assert "/kv_event_sources answers 500" in only_finding(engine)


def test_an_engine_that_does_not_know_kv_event_sources_is_named():
    engine = Engine()
    engine.sources_status = 404
    assert "no KV events published, as far as it tells" in only_finding(engine)


def test_kv_events_switched_off_in_the_configuration_are_not_asked_for():
    engine = Engine()
    engine.sources = {}
    assert asked(engine, kv_events="off")[0].findings == []
    assert "/kv_event_sources" not in engine.paths


@pytest.mark.parametrize("details", [None, {}, {"cached_tokens": None}, {"cached_tokens": True}, 5])
def test_answers_without_cached_tokens_are_named_after_the_second(details):
    engine = Engine()
    engine.details = lambda count: details
    finding = only_finding(engine)
    assert "no cached_tokens" in finding
    assert "--enable-prompt-tokens-details" in finding
    assert len(engine.completions) == 2


def test_cached_tokens_of_a_second_answer_alone_are_enough():
    engine = Engine()
    engine.details = lambda count: {"cached_tokens": 16} if count == 2 else None
    assert asked(engine)[0].findings == []


def test_an_engine_that_cannot_complete_is_named():
    engine = Engine()
    engine.completion_status = 400
    assert "a completion of one token answers 400" in only_finding(engine)


def test_no_finding_repeats_what_an_engine_sent():
    engine = Engine()

    async def hostile(request):
        return web.Response(status=500, text="\x1b[31mEVIL", headers={"x-evil": "EVIL"}, reason="EVIL")

    for path in ("/v1/models", "/metrics", "/kv_event_sources", "/v1/completions"):
        engine.answers[path] = hostile
    (result,) = asked(engine)
    assert len(result.findings) == 3
    assert "EVIL" not in str(result) + "".join(map(str, result.findings))


def test_many_engines_are_all_asked(monkeypatch):
    monkeypatch.setattr(probe_module, "AT_ONCE", 2)
    engines = [Engine() for _ in range(5)]
    assert [result.findings for result in asked(*engines)] == [[]] * 5


RECORDED = Path(__file__).parents[2] / "fixtures" / "vllm"


def test_a_recorded_vllm_is_ready():
    """With its own bytes: what the scripted engine above only imitates."""
    answers = {
        b"GET /health": (RECORDED / "http" / "health.resp.http").read_bytes(),
        b"GET /v1/models": (RECORDED / "http" / "models.resp.http").read_bytes(),
        b"GET /kv_event_sources": (RECORDED / "http" / "kv-event-sources.resp.http").read_bytes(),
        b"POST /v1/completions": (RECORDED / "http" / "completion.resp.http").read_bytes(),
    }
    metrics = (RECORDED / "metrics-after.txt").read_bytes()
    answers[b"GET /metrics"] = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(metrics) + metrics

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(answers[head[: head.index(b" HTTP/")]])
        await writer.drain()
        await reader.read()  # until the client leaves: it asks once per connection
        writer.close()
        await writer.wait_closed()

    async def ask() -> list[probe_module.Probed]:
        async with asyncio.timeout(30):
            engine = await asyncio.start_server(answer, "127.0.0.1", 0)
            port = engine.sockets[0].getsockname()[1]
            results = await probe([BackendConfig(f"http://127.0.0.1:{port}", "real")])
            engine.close()
            await engine.wait_closed()
            return results

    (result,) = asyncio.run(ask())
    assert result.findings == []
    assert str(result) == "real: models tiny-chat; block size 32 tokens; 64 blocks"
