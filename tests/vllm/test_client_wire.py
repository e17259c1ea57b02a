"""curl with HTTP/1.0, and a websocket client, through the gateway as on an engine."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tests.vllm.engines import MODEL, Engine

pytestmark = pytest.mark.vllm


def curl(url: str, *arguments: str, **fields: object) -> str:
    body = json.dumps({"model": MODEL, "prompt": "def join(", "max_tokens": 8, "temperature": 0, **fields})
    flags = ("-sS", "-N", "-m", "60", "--noproxy", "*", "-H", "Content-Type: application/json", "-d", body)
    done = subprocess.run(
        ["curl", *flags, *arguments, f"{url}/v1/completions"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_an_old_client_gets_its_answer_plain_and_streamed(base_url: str, engines: list[Engine]) -> None:
    direct = json.loads(curl(engines[0].url))["choices"][0]["text"]
    for asks in ((), ("-H", "Connection: keep-alive")):
        assert json.loads(curl(base_url, "--http1.0", *asks))["choices"][0]["text"] == direct
        raw = curl(base_url, "--http1.0", "-i", *asks, stream=True)
        head, _, stream = raw.partition("\n\n") if "\r" not in raw else raw.partition("\r\n\r\n")
        assert "transfer-encoding" not in head.lower()
        *events, end = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: ")]
        assert end == "[DONE]"
        assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == direct
        assert all(line.startswith("data: ") or not line for line in stream.splitlines())


def refusal(url: str) -> tuple[int, bytes]:
    with pytest.raises(InvalidStatus) as refused, connect(url.replace("http", "ws", 1) + "/v1/realtime", proxy=None):
        pass
    return refused.value.response.status_code, refused.value.response.body


def test_a_websocket_is_refused_by_a_model_that_hears_nothing_as_the_engine_refuses_it(
    base_url: str, engines: list[Engine]
) -> None:
    assert refusal(base_url) == refusal(engines[0].url) == (403, b"")
