"""`kvgate check --probe` for kvaware: each precondition that an engine does not meet is named, with its cure."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from router.backends.probe import probe
from router.config import parse
from router.kv_probe import Patience, probe_caches
from tests.support.sim_process import SimProcess, running_sim
from tests.support.tokenizer_folders import write_folder

FAST = ("--step-ms", "1", "--decode-ms", "1", "--enable-prompt-tokens-details")
JSON = {"content-type": "application/json"}
NO_REPLAY = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:0"}


@pytest.fixture(scope="module")
def sim() -> Iterator[SimProcess]:
    with running_sim(*FAST) as process:
        yield process


USUAL = Patience()


def findings(url: str, patience: Patience = USUAL, **more: Any) -> list[str]:
    routing = {"strategy": "kvaware", "kvaware": more.pop("kvaware", {})}
    config = parse({"routing": routing, "backends": [{"name": "e", "url": url, **more}]})

    async def ask() -> list[str]:
        results = await probe(config.backends, kv_events=True)
        await probe_caches(config, results, patience)
        return [str(finding) for result in results for finding in result.findings]

    return asyncio.run(ask())


def test_an_engine_that_tells_what_it_computes_has_no_findings(sim: SimProcess) -> None:
    assert findings(sim.url) == []


@pytest.mark.parametrize(
    ("arguments", "problem", "cure"),
    [
        (("--no-kv-events",), "no KV events published", "--kv-events-config"),
        (("--no-enable-prefix-caching",), "prefix caching is off", "--enable-prefix-caching"),
        (("--kv-events-config", json.dumps(NO_REPLAY)), "incomplete: no replay endpoint", '"replay_endpoint"'),
    ],
)
def test_what_an_engine_lacks_is_named_once(arguments: tuple[str, ...], problem: str, cure: str) -> None:
    with running_sim(*FAST, *arguments) as lacking:
        (finding,) = findings(lacking.url)
    assert problem in finding
    assert cure in finding


def test_events_that_do_not_arrive_are_named() -> None:
    patience = Patience(following_s=0.2)
    with running_sim(*FAST, "--no-kv-events") as silent:
        (finding,) = findings(silent.url, patience, kv_events="tcp://127.0.0.1:9")
    assert re.search(r"KV events do not flow \(connecting\): .*tcp://127\.0\.0\.1:9", finding)


def test_events_of_another_engine_are_found_out(sim: SimProcess) -> None:
    """Its own are off, and what is configured in their place tells of prompts that it never saw."""
    endpoint = sim.request("GET", "/kv_event_sources").json()["0"]["endpoint"]
    there = f"tcp://127.0.0.1:{endpoint.rpartition(':')[2]}"
    with running_sim(*FAST, "--no-kv-events") as mute:
        found = findings(mute.url, Patience(events_s=0.3), kv_events=there)
    assert any("do not tell of a prompt that it has just computed" in finding for finding in found), found


def test_a_wrong_tokenizer_is_named_with_the_difference(sim: SimProcess, tmp_path: Path) -> None:
    (finding,) = findings(sim.url, kvaware={"tokenizer": str(write_folder(tmp_path))})
    assert re.search(r"tokens of model sim-8b: engine, .*sample '\w+'.*; correct routing\.kvaware\.tokenizer", finding)


@pytest.mark.parametrize(("status", "body"), [(500, b"{}"), (404, b"{}"), (200, b"<html>"), (200, b'{"tokens": [-1]}')])
def test_a_tokenize_of_no_use_is_named(sim: SimProcess, status: int, body: bytes) -> None:
    async def ask() -> list[str]:
        async def relay(request: web.Request) -> web.Response:
            if request.path == "/tokenize":
                return web.Response(status=status, body=body)
            async with (
                aiohttp.ClientSession(auto_decompress=False) as session,
                session.request(
                    request.method, sim.url + request.path, data=await request.read(), headers=JSON
                ) as told,
            ):
                return web.Response(status=told.status, body=await told.read())

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", relay)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        config = parse({"routing": {"strategy": "kvaware"}, "backends": [{"url": f"http://127.0.0.1:{port}"}]})
        results = await probe(config.backends, kv_events=True)
        await probe_caches(config, results)
        await runner.cleanup()
        return [str(finding) for result in results for finding in result.findings]

    (finding,) = asyncio.run(ask())
    assert "their /tokenize is of no use" in finding
    assert "routing.kvaware.tokenizer" in finding


def test_an_engine_that_refuses_the_completion_is_named(sim: SimProcess) -> None:
    with running_sim(*FAST, "--max-model-len", "20") as short:
        found = findings(short.url)
    assert any("a completion of one token answers 400" in finding for finding in found), found


def test_backends_without_events_by_choice_are_not_asked(sim: SimProcess) -> None:
    assert findings(sim.url, kv_events="off") == []
