"""The simulated engine as a process: disconnects, keep-alive, signals, limits, adapters, sleeping, and its counts."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.sim_process import SimProcess, http_request, running_sim

CHAT = "/v1/chat/completions"
FAST = ("--step-ms", "1", "--decode-ms", "1", "--decode-ms-per-seq", "0")
ARGUMENTS = (*FAST, "--enable-prompt-tokens-details", "--server-dev-mode", "--enable-lora", "--enable-auto-tool-choice")


@pytest.fixture(scope="module")
def sim() -> Iterator[SimProcess]:
    with running_sim(*ARGUMENTS) as process:
        yield process


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def usage(sim: SimProcess, body: dict[str, Any]) -> dict[str, Any]:
    response = sim.request("POST", CHAT, body)
    assert response.status == 200, response.body
    found: dict[str, Any] = response.json()["usage"]
    return found


def test_a_repeated_prompt_hits_all_but_its_last_tokens(sim: SimProcess) -> None:
    body = chat("the first turn of a conversation " * 40, max_tokens=4)
    first, second = usage(sim, body), usage(sim, body)
    prompt = first["prompt_tokens"]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] == (prompt - 1) // 16 * 16


def test_the_next_turn_hits_the_answer_before_it_too(sim: SimProcess) -> None:
    body = chat("tell me a long story " * 30, max_tokens=100)
    first = sim.request("POST", CHAT, body).json()
    answer = first["choices"][0]["message"]
    turns = [
        *body["messages"],
        {"role": "assistant", "content": answer["content"]},
        {"role": "user", "content": "go on"},
    ]
    second = usage(sim, {"messages": turns, "max_tokens": 4})
    computed = first["usage"]["total_tokens"] - 1  # the last token was never fed back
    assert second["prompt_tokens_details"]["cached_tokens"] == computed // 16 * 16


def test_a_salt_keeps_caches_apart(sim: SimProcess) -> None:
    body = chat("salted words " * 40, max_tokens=1)
    usage(sim, body)
    assert usage(sim, {**body, "cache_salt": "tenant"})["prompt_tokens_details"]["cached_tokens"] == 0
    assert usage(sim, {**body, "cache_salt": "tenant"})["prompt_tokens_details"]["cached_tokens"] > 0


def test_tokenize_gives_the_ids_of_the_chat_prompt(sim: SimProcess) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is a block? é"}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    tokens = sim.request("POST", "/tokenize", {"messages": messages, "tools": tools}).json()["tokens"]
    body = {"messages": messages, "tools": tools, "max_tokens": 1, "return_token_ids": True}
    assert sim.request("POST", CHAT, body).json()["prompt_token_ids"] == tokens
    text = "words that come back é"
    given = sim.request("POST", "/tokenize", {"prompt": text}).json()["tokens"]
    assert sim.request("POST", "/detokenize", {"tokens": given}).json()["prompt"] == text


def test_a_client_that_closes_aborts_its_request(sim: SimProcess) -> None:
    before = sim.stats()
    with sim.connect() as connection:
        connection.send(http_request("POST", CHAT, chat("a long answer", max_tokens=100_000, stream=True)))
        connection.read_until(b"data: ")
    sim.wait(aborted=before["aborted"] + 1)
    after = sim.stats()
    assert after["running"] == after["open"] == 0


def test_a_client_that_half_closes_aborts_its_request(sim: SimProcess) -> None:
    before = sim.stats()
    with sim.connect() as connection:
        body = chat("not streamed", max_tokens=100_000)
        connection.send(http_request("POST", CHAT, body, {"X-Request-Id": "half-closed"}))
        sim.wait(accepted=before["accepted"] + 1)
        connection.socket.shutdown(socket.SHUT_WR)
        assert connection.closed()
    sim.wait(aborted=before["aborted"] + 1)
    tries = sim.request("GET", "/sim/stats?request_id=half-closed").json()["tries"]
    assert [entry["state"] for entry in tries] == ["aborted"]


def test_pipelined_requests_are_answered_in_order(sim: SimProcess) -> None:
    with sim.connect() as connection:
        slow = http_request("POST", CHAT, chat("first", max_tokens=20), {"X-Request-Id": "one"})
        connection.send(slow + http_request("GET", "/version") + http_request("GET", "/nope"))
        assert connection.read().json()["id"] == "chatcmpl-one"
        assert connection.read().json() == {"version": "0.32.0"}
        assert connection.read().status == 404


def test_connection_close_is_honoured(sim: SimProcess) -> None:
    with sim.connect() as connection:
        connection.send(http_request("GET", "/version", headers={"Connection": "close"}))
        assert connection.read().headers["connection"] == "close"
        assert connection.closed()


@pytest.mark.parametrize(
    "request_bytes",
    [b"NOT HTTP\r\n\r\n", b"GET / HTTP/1.1\r\nbad header\r\n\r\n", b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n"],
)
def test_what_is_not_http_is_400_and_closed(sim: SimProcess, request_bytes: bytes) -> None:
    with sim.connect() as connection:
        connection.send(request_bytes)
        response = connection.read()
        assert (response.status, response.body) == (400, b"Invalid HTTP request received.")
        assert connection.closed()


def test_an_endless_head_is_cut_at_its_bound(sim: SimProcess) -> None:
    with sim.connect() as connection:
        connection.send(b"GET / HTTP/1.1\r\nx-long: " + b"a" * 70_000 + b"\r\n\r\n")
        assert connection.read().status == 431


def test_a_body_above_its_bound_is_413() -> None:
    with running_sim(*FAST, "--max-body-bytes", "1000") as sim:
        assert sim.request("POST", CHAT, chat("x" * 900, max_tokens=1)).status == 200
        assert sim.request("POST", CHAT, chat("x" * 1100, max_tokens=1)).status == 413


def test_an_upgrade_to_anything_but_a_websocket_is_answered_as_a_plain_request(sim: SimProcess) -> None:
    with sim.connect() as connection:
        connection.send(http_request("GET", "/v1/realtime", headers={"Connection": "Upgrade", "Upgrade": "h2c"}))
        assert connection.read().status == 404
        assert connection.closed()


def test_nothing_is_left_after_many_requests_and_departures() -> None:
    with running_sim(*FAST) as sim:

        def resources() -> tuple[int, dict[str, Any]]:
            with sim.connect() as connection:
                stats: dict[str, Any] = {"connections": 2}
                while stats["connections"] > 1:  # closed ones are noticed one iteration later
                    connection.send(http_request("GET", "/sim/stats"))
                    stats = connection.read().json()
                fds = len(os.listdir(f"/proc/{sim.process.pid}/fd"))
            return fds, {key: stats[key] for key in ("open", "running", "free_blocks")}

        sim.request("POST", CHAT, chat("warm", max_tokens=1))
        before = resources()
        for number in range(150):
            with sim.connect() as connection:
                body = chat(f"request {number} " * 20, max_tokens=50 if number % 3 else 5, stream=number % 2 == 0)
                connection.send(http_request("POST", CHAT, body))
                if number % 3 == 0:
                    assert connection.read().whole
        sim.wait(aborted=100)
        assert sim.stats()["finished"] == 51
        assert resources() == before


def test_sigterm_ends_requests_as_vllm_does() -> None:
    with running_sim(*FAST) as sim:
        with sim.connect() as stream, sim.connect() as plain:
            stream.send(http_request("POST", "/v1/completions", {"prompt": "a", "max_tokens": 9999, "stream": True}))
            plain.send(http_request("POST", "/v1/completions", {"prompt": "a", "max_tokens": 9999}))
            sim.wait(accepted=2, generated_tokens=4)
            sim.process.send_signal(signal.SIGTERM)
            streamed, whole = stream.read(), plain.read()
        events = streamed.events()
        assert streamed.whole
        assert events[-1] == "[DONE]"
        assert events[-2]["choices"][0]["finish_reason"] == "abort"
        assert events[-2]["choices"][0]["text"] == ""
        assert whole.status == 200
        assert whole.json()["choices"][0]["finish_reason"] == "abort"
        assert sim.stop() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_an_idle_engine_with_0(number: signal.Signals) -> None:
    with running_sim() as sim:
        assert sim.stop(number) == 0


def test_queued_requests_beyond_the_limit_are_busy() -> None:
    with (
        running_sim("--max-num-seqs", "1", "--max-num-queued-reqs", "1") as sim,
        sim.connect() as a,
        sim.connect() as b,
    ):
        body = {"prompt": "a", "max_tokens": 9999, "stream": True}
        a.send(http_request("POST", "/v1/completions", body))
        sim.wait(running=1)
        b.send(http_request("POST", "/v1/completions", body))
        sim.wait(accepted=2)
        refused = sim.request("POST", "/v1/completions", body)
        assert refused.status == 503
        assert refused.json()["error"]["type"] == "Service Unavailable"
        assert "retry-after" not in refused.headers


def test_adapters_come_and_go_and_have_their_own_cache(sim: SimProcess) -> None:
    body = chat("adapter words " * 40, max_tokens=1)
    usage(sim, body)
    assert sim.request("POST", CHAT, {**body, "model": "sql"}).status == 404
    load = {"lora_name": "sql", "lora_path": "/adapters/sql"}
    assert sim.request("POST", "/v1/load_lora_adapter", load).status == 200
    assert sim.request("POST", "/v1/load_lora_adapter", load).status == 400
    cards = {card["id"]: card for card in sim.request("GET", "/v1/models").json()["data"]}
    assert cards["sql"]["parent"] == "sim-8b"
    response = sim.request("POST", CHAT, {**body, "model": "sql"}).json()
    assert response["model"] == "sql"
    assert response["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert sim.request("POST", "/v1/unload_lora_adapter", {"lora_name": "sql"}).status == 200
    assert sim.request("POST", CHAT, {**body, "model": "sql"}).status == 404


def test_a_sleeping_engine_answers_after_it_wakes(sim: SimProcess) -> None:
    assert sim.request("POST", "/sleep?level=1").status == 200
    assert sim.request("GET", "/is_sleeping").json() == {"is_sleeping": True}
    assert 'sleep_state="weights_offloaded"} 1.0' in sim.request("GET", "/metrics").body.decode()
    before = sim.stats()
    with sim.connect() as connection:
        connection.send(http_request("POST", CHAT, chat("good morning", max_tokens=2)))
        sim.wait(accepted=before["accepted"] + 1)
        assert sim.stats()["waiting"] == 1
        assert sim.request("POST", "/wake_up").status == 200
        assert connection.read().status == 200


def test_reset_prefix_cache_empties_it(sim: SimProcess) -> None:
    body = chat("reset words " * 40, max_tokens=1)
    usage(sim, body)
    assert sim.request("POST", "/reset_prefix_cache").json() == {"success": True}
    assert usage(sim, body)["prompt_tokens_details"]["cached_tokens"] == 0


def test_metrics_count_tokens_and_what_runs() -> None:
    with running_sim("--enable-prompt-tokens-details") as sim:
        body = chat("count these words " * 40, max_tokens=3)
        prompt = usage(sim, body)["prompt_tokens"]
        hit = usage(sim, body)["prompt_tokens_details"]["cached_tokens"]
        with sim.connect() as connection:
            connection.send(http_request("POST", CHAT, chat("b", max_tokens=9999, stream=True)))
            connection.read_until(b"data: ")
            text = sim.request("GET", "/metrics").body.decode()
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line and line[0] != "#")
        labels = '{engine="0",model_name="sim-8b"}'
        assert float(values[f"vllm:num_requests_running{labels}"]) == 1
        assert float(values[f"vllm:kv_cache_usage_perc{labels}"]) > 0
        assert float(values[f"vllm:prefix_cache_hits_total{labels}"]) == hit
        assert float(values[f"vllm:prefix_cache_queries_total{labels}"]) >= 2 * prompt
        assert float(values[f"vllm:time_to_first_token_seconds_count{labels}"]) == 3
        assert float(values['vllm:request_success_total{engine="0",finished_reason="length",model_name="sim-8b"}']) == 2
        assert 'num_gpu_blocks="28672"' in text


def test_old_metric_names_for_old_releases() -> None:
    with running_sim("--metrics-names", "old") as sim:
        text = sim.request("GET", "/metrics").body.decode()
        assert "vllm:gpu_cache_usage_perc{" in text
        assert "vllm:gpu_prefix_cache_hits_total{" in text
        assert "vllm:kv_cache_usage_perc" not in text
        assert "vllm:prefix_cache_queries" not in text


def test_embeddings_of_a_pooling_engine() -> None:
    with running_sim("--runner", "pooling") as sim:
        body = {"input": ["one text", "another"], "model": "sim-8b"}
        first = sim.request("POST", "/v1/embeddings", body).json()
        assert [len(entry["embedding"]) for entry in first["data"]] == [64, 64]
        assert first["data"][0]["embedding"] != first["data"][1]["embedding"]
        assert sim.request("POST", "/v1/embeddings", body).json()["data"] == first["data"]
        assert sim.request("POST", CHAT, chat("x")).status == 404


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--max-model-len", "100000", "--num-gpu-blocks-override", "10"), "--max-model-len"),
        (("--port", "70000"), "--port"),
        (("--fault", "no-such"), "--fault"),
        (("--fault", "status=418"), "status"),
        (("--block-size", "0"), "block_size"),
        (("--kv-events-config", '{"enable_kv_cache_events": true, "endpoint": "x"}'), "--kv-events-config"),
    ],
)
def test_arguments_that_cannot_be_end_with_2(
    arguments: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import argparse

    from router.sim import cli

    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    assert cli.run(parser.parse_args(arguments)) == 2
    assert named in capsys.readouterr().err


# The client that users have must be content with every shape of answer.

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}


@pytest.fixture(scope="module")
def client(sim: SimProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{sim.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_openai_client_plain_and_streamed_answers_agree(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hello there"}]
    plain = client.chat.completions.create(model="sim-8b", messages=messages, max_tokens=7)
    stream = client.chat.completions.create(
        model="sim-8b", messages=messages, max_tokens=7, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == plain.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 7


def test_openai_client_required_tool_is_called(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "weather?"}]
    tools: Any = [TOOL]
    plain = client.chat.completions.create(
        model="sim-8b", messages=messages, tools=tools, tool_choice="required", max_tokens=100
    )
    assert plain.choices[0].finish_reason == "tool_calls"
    assert plain.choices[0].message.tool_calls is not None
    function: Any = plain.choices[0].message.tool_calls[0]
    assert function.function.name == "get_weather"
    assert isinstance(json.loads(function.function.arguments)["city"], str)
    stream = client.chat.completions.create(
        model="sim-8b", messages=messages, tools=tools, tool_choice="required", max_tokens=100, stream=True
    )
    parts = [call for chunk in stream for call in chunk.choices[0].delta.tool_calls or []]
    assert parts[0].function is not None
    assert parts[0].function.name == "get_weather"
    assert "".join((part.function and part.function.arguments) or "" for part in parts) == function.function.arguments


def test_openai_client_named_tool_and_schema(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "weather?"}]
    tools: Any = [TOOL]
    choice: Any = {"type": "function", "function": {"name": "get_weather"}}
    plain = client.chat.completions.create(model="sim-8b", messages=messages, tools=tools, tool_choice=choice)
    assert plain.choices[0].message.tool_calls
    schema: Any = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"ok": {"type": "boolean"}}}},
    }
    answer = client.chat.completions.create(model="sim-8b", messages=messages, response_format=schema)
    assert isinstance(json.loads(answer.choices[0].message.content or "")["ok"], bool)


def test_openai_client_responses_plain_and_streamed(client: openai.OpenAI) -> None:
    plain = client.responses.create(model="sim-8b", input="hello", max_output_tokens=6)
    stream = client.responses.create(model="sim-8b", input="hello", max_output_tokens=6, stream=True)
    deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(deltas) == plain.output_text
    assert plain.usage is not None
    assert plain.usage.output_tokens == 6


def test_openai_client_completions_with_lists_and_stops(client: openai.OpenAI) -> None:
    several = client.completions.create(model="sim-8b", prompt=["one", "two"], n=2, max_tokens=5)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    text = several.choices[0].text
    stopped = client.completions.create(model="sim-8b", prompt="one", max_tokens=5, stop=[text[4:8]])
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text == text[: text.index(text[4:8])]


def test_openai_client_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nope", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="sim-8b", messages=[])
