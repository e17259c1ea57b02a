"""curl, as people and health checks call it: HTTP/1.0 with and without keep-alive, streams, large bodies."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.client_fleet import ENDLESS, MODEL, ClientFleet, client_fleet
from tests.support.debian_tools import program

CHAT = "/v1/chat/completions"
SAY = [{"role": "user", "content": "say something"}]
PARTIAL = 18  # curl's exit code for an answer that ended before its end


@pytest.fixture(scope="module")
def fleet() -> Iterator[ClientFleet]:
    program("curl")
    with client_fleet() as fleet:
        yield fleet


def chat(**fields: Any) -> str:
    return json.dumps({"model": MODEL, "messages": SAY, "max_tokens": 6, **fields})


def curl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["curl", "--silent", "--show-error", "--no-buffer", "--max-time", "20", "--noproxy", "*", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def post(url: str, body: str, *arguments: str) -> tuple[int, dict[str, str], str, str]:
    """Exit code, the headers of the last answer, its status line, its body."""
    done = curl("--include", "-H", "Content-Type: application/json", "-d", body, *arguments, url)
    head, _, content = done.stdout.partition("\n\n" if "\n\n" in done.stdout[:2000] else "\r\n\r\n")
    start, *lines = head.splitlines()
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return done.returncode, headers, start, content


def events(content: str) -> list[Any]:
    """The data of the stream's events; the end as a string."""
    found = re.findall(r"^data: (.*)$", content, re.MULTILINE)
    return [data if data == "[DONE]" else json.loads(data) for data in found]


def text_of(found: list[Any]) -> str:
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in found if event != "[DONE]")


@pytest.mark.parametrize("version", ["--http1.0", "--http1.1"])
def test_a_chat(fleet: ClientFleet, version: str) -> None:
    code, headers, start, content = post(f"{fleet.gateway.url}{CHAT}", chat(), version)
    assert (code, start.split(" ")[1]) == (0, "200")
    fleet.routed(headers)
    answer = json.loads(content)
    assert answer["usage"]["completion_tokens"] == 6
    assert len(content.encode()) == int(headers["content-length"])
    if version == "--http1.0":
        assert headers["connection"] == "close"


def test_an_old_client_that_asks_to_keep_its_connection_is_told_that_it_is_closed(fleet: ClientFleet) -> None:
    """As vLLM itself does; a newer one keeps it."""
    url = f"{fleet.gateway.url}{CHAT}"
    one = ("-H", "Content-Type: application/json", "-d", chat(), "--write-out", "\n%{http_code} %{num_connects}\n")
    quiet = ("--silent", "--noproxy", "*")
    for version, connects in (("--http1.0", ["1", "1"]), ("--http1.1", ["1", "0"])):
        keep = (version, "-H", "Connection: keep-alive", "--include")
        done = curl(*keep, *one, url, "--next", *quiet, *keep, *one, url)
        assert done.returncode == 0, done.stderr
        found = re.findall(r"^(\d+) (\d+)$", done.stdout, re.MULTILINE)
        assert found == [("200", count) for count in connects]
        closes = re.findall(r"^connection: close\r?$", done.stdout, re.MULTILINE | re.IGNORECASE)
        assert len(closes) == (2 if version == "--http1.0" else 0)


@pytest.mark.parametrize("asks", [(), ("-H", "Connection: keep-alive")], ids=["plain", "keep-alive"])
def test_an_old_client_gets_a_stream_without_chunks_that_ends_with_its_connection(
    fleet: ClientFleet, asks: tuple[str, ...]
) -> None:
    body = chat(stream=True, stream_options={"include_usage": True})
    code, headers, start, content = post(f"{fleet.gateway.url}{CHAT}", body, "--http1.0", *asks)
    assert (code, start.split(" ")[1]) == (0, "200")
    fleet.routed(headers)
    assert "transfer-encoding" not in headers
    assert "content-length" not in headers
    assert headers["connection"] == "close"
    assert headers["content-type"].startswith("text/event-stream")
    *found, usage, end = events(content)
    assert end == "[DONE]"
    assert usage["usage"]["completion_tokens"] == 6
    # nothing of the chunks' framing is left
    assert re.sub(r"^data: .*\n\n", "", content, flags=re.MULTILINE) == ""
    plain = json.loads(post(f"{fleet.gateway.url}{CHAT}", chat(), "--http1.0")[3])
    assert text_of(found) == plain["choices"][0]["message"]["content"]


def test_a_stream_in_chunks(fleet: ClientFleet) -> None:
    code, headers, _, content = post(f"{fleet.gateway.url}{CHAT}", chat(stream=True), "--http1.1")
    assert code == 0
    assert headers["transfer-encoding"] == "chunked"
    assert events(content)[-1] == "[DONE]"


def test_a_stream_whose_engine_dies_is_seen_by_curl(fleet: ClientFleet) -> None:
    body = chat(stream=True, max_tokens=ENDLESS)
    for version, wanted in (("--http1.1", PARTIAL), ("--http1.0", 0)):
        fleet.fault("reset-after-chunks", 4, 1)
        code, _, _, content = post(f"{fleet.gateway.url}{CHAT}", body, version)
        # an answer that ends with its connection has no other sign than the event
        assert code == wanted
        found = events(content)
        assert "[DONE]" not in found
        assert found[-1]["error"]["code"] == "upstream_error"
        fleet.fault("reset-after-chunks", False)


def test_a_large_body_that_asks_before_it_is_sent(fleet: ClientFleet, tmp_path: Path) -> None:
    """curl waits for 100 Continue before it sends more than a megabyte."""
    file = tmp_path / "body.json"
    file.write_text(chat(messages=[{"role": "user", "content": "word " * 300_000}]))
    done = curl("-i", "-H", "Content-Type: application/json", "-d", f"@{file}", f"{fleet.gateway.url}{CHAT}")
    assert done.returncode == 0
    assert done.stdout.startswith("HTTP/1.1 100 Continue")
    assert "maximum context length" in done.stdout  # the engine has read it to its end
    assert re.search(r"^HTTP/1.1 400 ", done.stdout, re.MULTILINE)
    chunked = curl(
        *("-i", "-H", "Content-Type: application/json", "-H", "Transfer-Encoding: chunked"),
        *("-H", "Expect:", "-d", chat(), f"{fleet.gateway.url}{CHAT}"),
    )
    assert '"completion_tokens":6' in chunked.stdout


def test_heads_and_errors(fleet: ClientFleet) -> None:
    url = fleet.gateway.url
    done = curl("--http1.0", "--head", "--write-out", "%{http_code} %{size_download}", f"{url}/health")
    assert done.stdout.endswith(" 0")
    assert done.returncode == 0
    assert curl("--fail", "--http1.0", f"{url}/readyz").returncode == 0
    assert curl("--fail", f"{url}/v1/nothing").returncode == 22  # curl's code for 4xx and 5xx
    code, headers, start, content = post(f"{url}{CHAT}", chat(model="nobody"), "--http1.0")
    assert (code, start.split(" ")[1], headers["x-kvgate-error"]) == (0, "404", "1")
    assert json.loads(content)["error"]["code"] == "model_not_found"
