"""The simulated engine answers with the bytes of the recorded one; only ids, dates, texts and token numbers differ."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sim_process import SimProcess, running_sim

FIXTURES = Path(__file__).parents[1] / "fixtures" / "vllm"
HTTP = FIXTURES / "http"
SIZES = ("--served-model-name", "tiny-chat", "--max-model-len", "1024", "--block-size", "32")
MAIN = (*SIZES, "--num-gpu-blocks-override", "64", "--enable-prompt-tokens-details", "--enable-scale-out")

# Recorded with other flags, or of a set-up that is not simulated (data parallel ranks).
OTHER_SETUPS = {"auth-missing", "auth-wrong", "auth-models-missing", "err-render-disabled"}


def names() -> list[str]:
    recorded = [entry["name"] for entry in json.loads((FIXTURES / "http-index.json").read_text())]
    return [name for name in recorded if (HTTP / f"{name}.req.http").exists() and name not in OTHER_SETUPS]


def request_bytes(name: str) -> bytes:
    """The recorded request; where the recording was cut, text of the same length stands for it."""
    raw = (HTTP / f"{name}.req.http").read_bytes()
    return re.sub(rb"\.\.\.\[(\d+) bytes cut\]\.\.\.", lambda found: b"x" * int(found[1]), raw)


def response_bytes(name: str) -> bytes:
    return (HTTP / f"{name}.resp.http").read_bytes()


STRING = r'"(?:[^"\\]|\\.)*"'
MASKS = [
    (r"([Dd])ate: [^\r]*", r"\1ate: DATE"),
    (r"content-length: \d+", "content-length: N"),
    (r"x-request-id: [0-9a-f]{32}", "x-request-id: ID"),
    (r'"((?:chatcmpl|cmpl|modelperm)-|resp_|msg_)[0-9a-f]{16}"', r'"\1ID"'),
    (r'"(created|created_at)":\d+', r'"\1":N'),
    (r'"system_fingerprint":"vllm-0\.32\.0-[0-9a-f]{8}"', '"system_fingerprint":"FINGERPRINT"'),
    (rf'"(content|text|token|prompt|delta)":{STRING}', r'"\1":"TEXT"'),
    (rf'"token_strs":\[{STRING}(?:,{STRING})*\]', '"token_strs":["TEXT"]'),
    (r'"(\w*tokens|count|logprob|num_requests_waiting|kv_cache_usage_perc)":\s?-?\d[\d.e-]*', r'"\1":N'),
    (r"\[\d+(?:,\d+)*\]", "[N]"),
    (r"tcp://\*:\d+", "tcp://*:PORT"),
    (r'"root":"[^"]*"', '"root":"ROOT"'),
]


def masked(raw: bytes) -> str:
    text = raw.decode()
    text = re.sub(r"(?m)^[0-9a-f]+\r$", "SIZE\r", text) if "chunked" in text else text
    for pattern, mask in MASKS:
        text = re.sub(pattern, mask, text)
    return text


@pytest.fixture(scope="module")
def sim() -> Iterator[SimProcess]:
    with running_sim(*MAIN) as process:
        yield process


def exchange(sim: SimProcess, name: str) -> bytes:
    request = request_bytes(name)
    with sim.connect() as connection:
        connection.send(request)
        return connection.read(head_only=request.startswith(b"HEAD")).raw


@pytest.mark.parametrize("name", names())
def test_answer_is_that_of_the_recorded_engine(sim: SimProcess, name: str) -> None:
    assert masked(exchange(sim, name)) == masked(response_bytes(name))


def test_masks_leave_fields_and_their_order_to_compare() -> None:
    text = masked(response_bytes("chat"))
    assert '"finish_reason":"length","stop_reason":null' in text
    assert '"usage":{"prompt_tokens":N,"total_tokens":N,"completion_tokens":N,' in text
    assert masked(response_bytes("chat")) != masked(response_bytes("completion"))
    assert len(names()) > 50


def test_unnamed_and_wrong_keys_are_refused_in_the_recorded_words() -> None:
    with running_sim(*SIZES, "--num-gpu-blocks-override", "64", "--api-key", "secret") as sim:
        for name in ("auth-missing", "auth-wrong", "auth-models-missing"):
            assert masked(exchange(sim, name)) == masked(response_bytes(name))
        assert sim.request("GET", "/v1/models", headers={"Authorization": "Bearer secret"}).status == 200
        for path in ("/health", "/metrics", "/load"):
            assert sim.request("GET", path).status == 200


def test_render_is_refused_without_its_flag() -> None:
    with running_sim(*SIZES, "--num-gpu-blocks-override", "64") as sim:
        assert masked(exchange(sim, "err-render-disabled")) == masked(response_bytes("err-render-disabled"))


def metric_shape(text: str) -> list[str]:
    """Names, help, types, labels and buckets of vLLM's own metrics, without values."""
    lines = [line for line in text.splitlines() if "vllm:" in line]
    shape = [line if line.startswith("#") else line.rpartition(" ")[0] for line in lines]
    # What the recorded engine says of its own memory is no fact about ours.
    return [re.sub(r'kv_cache_memory_bytes="\d+"', 'kv_cache_memory_bytes="None"', line) for line in shape]


def test_metrics_have_the_recorded_names_labels_and_buckets(sim: SimProcess) -> None:
    exchange(sim, "chat")
    ours = sim.request("GET", "/metrics")
    assert ours.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert metric_shape(ours.body.decode()) == metric_shape((FIXTURES / "metrics-after.txt").read_text())


def test_process_metrics_have_the_recorded_names(sim: SimProcess) -> None:
    def heads(text: str) -> list[str]:
        return [line for line in text.splitlines() if line.startswith(("# TYPE python", "# TYPE process"))]

    assert heads(sim.request("GET", "/metrics").body.decode()) == heads((FIXTURES / "metrics-after.txt").read_text())


def test_comments_keep_a_silent_stream_alive() -> None:
    slow = ("--step-ms", "300", "--sse-keep-alive-interval", "0.05", "--enable-prompt-tokens-details")
    with running_sim("--served-model-name", "tiny-chat", *slow) as sim:
        body = {"prompt": "a", "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
        response = sim.request("POST", "/v1/completions", body)
    ours = [masked(chunk) for chunk in response.chunks]
    recorded = re.findall(r"(: keep-alive|data: .*)", masked(response_bytes("completion-stream-keep-alive")))
    assert ours[0] == ": keep-alive\n\n"
    # Where comments fall is a matter of time; without them the streams are one.
    assert [chunk.strip() for chunk in ours if not chunk.startswith(":")] == [
        event.strip() for event in recorded if not event.startswith(":")
    ]
