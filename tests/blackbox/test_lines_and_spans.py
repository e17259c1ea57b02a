"""Decision lines and spans of a real gateway: in whose format, that a reload switches them, and that a collector gets
what the engine was told."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.blackbox.raw_engine import MODEL, RawEngine, raw_engine
from tests.support.collector import running_collector
from tests.support.gateway_process import GatewayProcess, next_id, running_gateway

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "the-prompt-of-a-client"}]}
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PRODUCTION_STACK = re.compile(
    r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}\] INFO: Routing request (\S+) with session id (\S+) to (\S+)"
    r" at \d+\.\d+, process time = \d+\.\d{4}"
)


@pytest.fixture(scope="module")
def engine() -> Iterator[RawEngine]:
    with raw_engine() as engine:
        yield engine


def ask(gateway: GatewayProcess, engine: RawEngine, headers: dict[str, str] | None = None) -> str:
    request_id = next_id()
    with gateway.send("POST", CHAT, BODY, {"X-Request-Id": request_id, **(headers or {})}) as client:
        engine.take().answer(json.dumps({"usage": {"prompt_tokens": 9, "completion_tokens": 2}}).encode())
        assert client.read().status == 200
    return request_id


def test_a_reload_switches_lines_on_off_and_between_formats(engine: RawEngine) -> None:
    alice = {"X-Session-Id": "alice"}

    def reload(**log: object) -> None:
        gateway.write_config([engine.url], log=log)
        gateway.reload()

    with running_gateway([engine.url]) as gateway:
        silent = ask(gateway, engine, alice)
        gateway.access(silent)
        assert len([line for line in gateway.out.all() if silent in line]) == 1

        reload(format="json", decisions="on")
        told = ask(gateway, engine, alice)
        (line, access) = gateway.out.wait(lambda line: told in line, 2)
        decision = json.loads(line)
        assert json.loads(access)["kind"] == "access"
        assert (decision["kind"], decision["id"], decision["attempt"]) == ("decision", told, 1)
        assert (decision["backend"], decision["model"], decision["reason"]) == ("gpu-0", MODEL, "load")
        assert decision["strategy"] == "prefixaware"
        assert decision["took_s"] >= 0.0
        assert "alice" not in line

        reload(format="text", decisions="production-stack", access=False)
        theirs = ask(gateway, engine, alice)
        (line,) = gateway.out.wait(lambda line: theirs in line)
        found = PRODUCTION_STACK.fullmatch(line)
        assert found is not None
        assert found.groups() == (theirs, "alice", engine.url)
        nobody = ask(gateway, engine)
        (line,) = gateway.out.wait(lambda line: nobody in line)
        assert "with session id None to" in line
        hostile = ask(gateway, engine, {"X-Session-Id": "a b\tc" * 100})
        (line,) = gateway.out.wait(lambda line: hostile in line)
        found = PRODUCTION_STACK.fullmatch(line)
        assert found is not None
        assert len(found[2]) == 128

        reload(format="json", decisions="production-stack", access=True)
        theirs = ask(gateway, engine, alice)
        (line, access) = gateway.out.wait(lambda line: theirs in line, 2)
        assert json.loads(line)["message"].startswith(f"Routing request {theirs} with session id alice to {engine.url}")
        assert json.loads(access)["kind"] == "access"

        reload(format="text", level="error", access=False)
        ask(gateway, engine)
        before = len(gateway.err.all())
        gateway.stop()
        assert "the-prompt-of-a-client" not in "\n".join(gateway.out.wait_end())
        assert gateway.out.wait_end()[-1] == access  # nothing is written any more
        assert gateway.err.wait_end()[before:] == []  # as "draining" would be at info


def test_spans_reach_the_collector_and_are_the_engine_s_parents(engine: RawEngine) -> None:
    with running_collector() as collector:
        tracing = {"otlp_endpoint": collector.url, "sample_ratio": 0.0, "headers_env": "OTLP", "service_name": "edge"}
        environment = {"OTLP": "authorization=Bearer%20collector"}
        with running_gateway([engine.url], tracing=tracing, environment=environment) as gateway:
            with gateway.send(
                "POST",
                CHAT + "?secret=query",
                BODY,
                {
                    "Traceparent": f"00-{TRACE}-{SPAN}-01",
                    "Tracestate": "vendor=1",
                    "X-Request-Id": (sampled := next_id()),
                },
            ) as client:
                received = engine.take()
                received.answer(json.dumps({"usage": {"prompt_tokens": 9, "completion_tokens": 2}}).encode())
                client.read()
            (told,) = received.header("traceparent")
            assert received.header("tracestate") == ["vendor=1"]
            ask(gateway, engine, {"Traceparent": f"00-{TRACE}-{SPAN}-00"})
            ask(gateway, engine)
            gateway.access(sampled)
            gateway.stop()  # what is left goes out
        server, attempt = collector.wait(2)
        assert len(collector.spans) == 2
    assert (server.trace_id, server.parent_id, server.kind) == (TRACE, SPAN, "server")
    assert (attempt.trace_id, attempt.parent_id, attempt.kind) == (TRACE, server.span_id, "client")
    assert told == f"00-{TRACE}-{attempt.span_id}-01"
    assert server.start_ns <= attempt.start_ns <= attempt.end_ns <= server.end_ns
    assert server.attributes["kvgate.request_id"] == sampled
    assert server.attributes["url.path"] == CHAT
    assert attempt.attributes["server.port"] == engine.port
    assert attempt.attributes["gen_ai.usage.input_tokens"] == 9
    assert server.resource["service.name"] == "edge"
    assert collector.headers[0]["authorization"] == "Bearer collector"
    assert "secret" not in str(collector.spans)
    assert "the-prompt" not in str(collector.spans)


def test_a_dead_collector_is_counted_and_told_and_nothing_else_happens(engine: RawEngine) -> None:
    with running_collector() as gone:
        pass
    with running_gateway([engine.url], tracing={"otlp_endpoint": gone.url}, log={"format": "json"}) as gateway:
        for _ in range(3):
            ask(gateway, engine)
        gateway.err.wait(lambda line: "does not take spans" in line)
        gateway.until_metric("spans_dropped_total", 6)
        ask(gateway, engine)
        assert gateway.stop() == 0


@pytest.mark.parametrize("command", ["serve", "check"])
def test_traces_without_the_extra_end_the_start_and_say_what_to_install(command: str, tmp_path: Path) -> None:
    file = tmp_path / "kvgate.toml"
    file.write_text('[tracing]\notlp_endpoint = "http://127.0.0.1:4318"\n')
    program = (
        "import sys; sys.modules['opentelemetry'] = None; from router.cli import main; "
        f"sys.exit(main([{command!r}, '-c', {str(file)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "tracing.otlp_endpoint" in done.stderr + done.stdout
    assert "kvgate[otel]" in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
