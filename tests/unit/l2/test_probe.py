"""What `kvgate check --probe` finds out about the shared store."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from router.backends.probe import Probed
from router.l2.probe import probe_store
from router.l2.settings import L2Settings
from tests.support.redis_server import RedisServer, running_redis
from tests.unit.l2.rig import ROOT, prompt, scripted, stored, write

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("empty_server")]
ENGINES = [
    Probed("gpu-0", entries=[{"id": "served", "root": ROOT}, {"id": "sql", "root": "/l", "parent": "served"}]),
    Probed("gpu-1"),
]


async def test_a_store_that_is_right_or_empty_has_no_finding(server: RedisServer) -> None:
    empty = await probe_store(L2Settings(server.url), ENGINES)
    assert (str(empty), empty.findings) == ("kv_cache.l2: told nothing", [])
    write(server.port, stored(prompt(600)))
    found = await probe_store(L2Settings(server.url), ENGINES)
    assert (str(found), found.findings) == (f"kv_cache.l2: models {ROOT}", [])


async def test_keys_of_another_form_and_a_hash_that_is_not_installed_are_named_with_their_cure(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(server.port, [b"session:1"])
    (finding,) = (await probe_store(L2Settings(server.url), ENGINES)).findings
    assert "none of a form that is known" in finding.problem
    write(server.port, [f"{ROOT}@01000100@0@{'5d' * 32}".encode()])
    assert (await probe_store(L2Settings(server.url), ENGINES)).findings == []
    monkeypatch.setitem(sys.modules, "blake3", None)
    (finding,) = (await probe_store(L2Settings(server.url), ENGINES)).findings
    assert finding.cure == "pip install 'kvgate[lmcache]'"


async def test_a_store_that_is_not_there_or_refuses_is_named_with_its_cure(tmp_path: Path) -> None:
    (finding,) = (await probe_store(L2Settings("redis://127.0.0.1:1"), ENGINES)).findings
    assert finding.problem.startswith("unreachable, ")
    assert "redis://127.0.0.1:1" in finding.cure
    with running_redis(tmp_path, "--requirepass", "s3cret") as closed:
        (finding,) = (await probe_store(L2Settings(closed.url, "wr0ng"), ENGINES)).findings
        assert "WRONGPASS" in finding.problem
        assert "wr0ng" not in str(finding)
    server, _store, url = await scripted(lambda words: b"+PONG\r\n" if words[0] == b"PING" else b"-NOPERM no\r\n")
    (finding,) = (await probe_store(L2Settings(url), ENGINES)).findings
    assert "NOPERM" in finding.problem
    assert "SCAN" in finding.cure
    server.close()
