"""The life of the process: what it prints, how it ends, and with which exit code."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.blackbox.raw_engine import MODEL, raw_engine
from tests.support.gateway_process import WAIT_S, gateway_config, next_id, running_gateway, serving, toml
from tests.support.sim_process import http_request, running_sim

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
FIRST, LAST = b"9\r\ndata: 1\n\n\r\n", b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A `kvgate` that is to end by itself."""
    return subprocess.run(
        [sys.executable, "-m", "router", *arguments], capture_output=True, text=True, timeout=WAIT_S, check=False
    )


# -- the end


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_gateway_ends_with_0(number: signal.Signals) -> None:
    with raw_engine() as engine, running_gateway([engine.url]) as gateway, gateway.send("GET", "/livez") as idle:
        assert idle.read().status == 200
        assert gateway.stop(number) == 0
        assert idle.closed()


def test_sigterm_lets_those_under_way_end() -> None:
    with (
        raw_engine() as engine,
        running_gateway([engine.url], limits={"max_in_flight": 2}) as gateway,
        gateway.send("GET", "/livez") as idle,
    ):
        assert idle.read().status == 200
        with gateway.send("POST", CHAT, BODY) as streaming:
            stream_at_engine = engine.take()
            stream_at_engine.send(SSE_HEAD + FIRST)
            streaming.read_until(FIRST)
            with gateway.send("POST", CHAT, BODY) as silent, gateway.send("POST", CHAT, BODY) as queued:
                silent_at_engine = engine.take()
                gateway.until_metric("queue_depth", 1)
                gateway.kill(signal.SIGTERM)
                gateway.err.wait(lambda line: "draining: 3 requests under way" in line)
                assert idle.closed()
                with pytest.raises(ConnectionRefusedError):
                    gateway.connect()
                assert gateway.metric("in_flight") == 2  # the admin port stays until the end
                stream_at_engine.send(LAST)
                stream_at_engine.next_request()
                assert streaming.read_exactly(len(LAST)) == LAST
                assert streaming.closed()
                silent_at_engine.answer(b"late")
                engine.take().answer(b"queued")
                answers = [silent.read(), queued.read()]
                assert sorted(answer.body for answer in answers) == [b"late", b"queued"]
                assert silent.closed()
                assert queued.closed()
        assert gateway.wait() == 0


def test_a_draining_gateway_is_not_ready_but_answers_what_was_sent_before() -> None:
    with raw_engine() as engine, running_gateway([engine.url]) as gateway:
        with gateway.connect() as client:
            client.send(http_request("POST", CHAT, BODY))
            received = engine.take()
            gateway.kill(signal.SIGTERM)
            gateway.err.wait(lambda line: "draining" in line)
            received.answer()
            assert client.read().status == 200
            assert client.closed()
        assert gateway.wait() == 0


def test_a_second_signal_ends_it_at_once() -> None:
    with raw_engine() as engine, running_gateway([engine.url]) as gateway:
        with gateway.send("POST", CHAT, BODY, {"X-Request-Id": (stream := next_id())}) as streaming:
            at_engine = engine.take()
            at_engine.send(SSE_HEAD + FIRST)
            streaming.read_until(FIRST)
            with gateway.send("POST", CHAT, BODY) as silent:
                silent_at_engine = engine.take()
                gateway.kill(signal.SIGTERM)
                gateway.err.wait(lambda line: "draining: 2 requests under way" in line)
                gateway.kill(signal.SIGTERM)
                answer = silent.read()
                assert (answer.status, answer.headers["x-kvgate-error"]) == (503, "1")
                silent_at_engine.wait_closed()
            streaming.closed()
            assert b'data: {"error":' in streaming.rest
            assert b"[DONE]" not in streaming.rest
            assert not streaming.rest.endswith(b"0\r\n\r\n")
            at_engine.wait_closed()
        assert gateway.wait() == 0
        assert gateway.access(stream)["ended"] == "gateway@streaming"


def test_after_sigterm_a_load_balancer_has_a_moment_to_notice() -> None:
    """Who has not seen readyz fail is still served; only the beginning of the moment is looked at."""
    with raw_engine() as engine, running_gateway([engine.url], timeouts={"lame_duck_s": 3600.0}) as gateway:
        assert gateway.request("GET", "/readyz").status == 200
        gateway.kill(signal.SIGTERM)
        gateway.err.wait(lambda line: "draining" in line)
        assert gateway.request("GET", "/readyz").status == 503
        assert gateway.request("GET", "/livez").status == 200
        with gateway.send("POST", CHAT, BODY) as client:
            engine.take().answer()
            answer = client.read()
            assert (answer.status, answer.headers["connection"]) == (200, "close")
            assert client.closed()
        gateway.kill(signal.SIGTERM)
        assert gateway.wait() == 0


def test_an_interrupt_at_the_terminal_ends_an_idle_gateway_without_that_moment() -> None:
    with raw_engine() as engine, running_gateway([engine.url], timeouts={"lame_duck_s": 3600.0}) as gateway:
        assert gateway.stop(signal.SIGINT) == 0


def test_systemd_is_told_of_each_state(tmp_path: Path) -> None:
    told = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    told.bind(str(tmp_path / "notify"))
    told.settimeout(WAIT_S)
    environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "200000"}
    with told, raw_engine() as engine, running_gateway([engine.url], environment=environment) as gateway:

        def next_state() -> str:
            while (message := told.recv(4096).decode()) == "WATCHDOG=1":
                pass
            return message.partition("\n")[0]

        assert next_state() == "READY=1"
        assert told.recv(4096) == b"WATCHDOG=1"
        gateway.kill(signal.SIGHUP)
        assert [next_state(), next_state()] == ["RELOADING=1", "READY=1"]
        gateway.kill(signal.SIGTERM)
        assert next_state() == "STOPPING=1"
        assert gateway.wait() == 0


def test_draining_ends_with_its_time() -> None:
    with raw_engine() as engine, running_gateway([engine.url], timeouts={"drain_s": 0.2}) as gateway:
        with gateway.send("POST", CHAT, BODY) as client:
            received = engine.take()
            gateway.kill(signal.SIGTERM)
            assert client.read().status == 503
            received.wait_closed()
        assert gateway.wait() == 0


def test_every_access_line_is_written_before_the_end() -> None:
    with raw_engine() as engine, running_gateway([engine.url]) as gateway:
        ids = [next_id() for _ in range(50)]
        for request_id in ids:
            assert gateway.request("GET", "/livez", headers={"X-Request-Id": request_id}).status == 200
        assert gateway.stop() == 0
        gateway.out.wait_end()
        assert [line["id"] for line in gateway.access_lines()] == ids


# -- the start


def test_flags_are_enough_and_win_over_the_file(tmp_path: Path) -> None:
    with raw_engine() as engine:
        file = tmp_path / "kvgate.toml"
        config = gateway_config(["http://127.0.0.1:1"], routing={"strategy": "session"}, server={"port": 1})
        file.write_text(toml(config))
        flags = ["--backend", engine.url, "--strategy", "leastload", "--port", "0", "--host", "127.0.0.1"]
        with serving("-c", str(file), *flags) as gateway:
            name = engine.url.removeprefix("http://")
            gateway.wait_up(name)
            with gateway.send("POST", CHAT, BODY) as client:
                engine.take().answer()
                answer = client.read()
            assert answer.headers["x-kvgate-reason"] == "leastload"
            assert answer.headers["x-kvgate-backend"] == name
            assert gateway.stop() == 0


@pytest.mark.parametrize("table", ["server", "admin"])
def test_a_port_that_is_taken_is_one_clear_line_and_1(tmp_path: Path, table: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        file = tmp_path / "kvgate.toml"
        file.write_text(toml(gateway_config([], **{table: {"port": port}})))
        ended = run("serve", "-c", str(file))
    assert ended.returncode == 1
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert line.startswith("kvgate: ")
    assert "in use" in line
    assert str(port) in line


BAD_CONFIGS = {
    "[server]\nporrt = 1\n": "server.porrt",
    "[server]\nport = 70000\n": "server.port",
    '[server]\nport = "80"\n': "server.port",
    '[routing]\nstrategy = "best"\n': "routing.strategy",
    '[[backends]]\nurl = "10.0.0.7:8000"\n': "backends[0].url",
    '[[backends]]\nurl = "http://a:1"\nname = "x"\n[[backends]]\nurl = "http://b:1"\nname = "x"\n': "backends[1].name",
    '[[backends]]\nurl = "http://a:1"\napi_key_env = "KVGATE_TEST_NOT_SET"\n': "backends[0].api_key_env",
    "[limits]\nmax_queue = -1\n": "limits.max_queue",
    "[server]\nworkers = 2\n": "server.workers",
    '[redis]\nurl = "redis://127.0.0.1:6379/0"\n': "redis.url",
    '[auth]\napi_keys_file = "/nowhere"\n': "auth.api_keys_file",
}


@pytest.mark.parametrize("text", BAD_CONFIGS)
def test_a_wrong_configuration_names_its_key_and_ends_with_2(tmp_path: Path, text: str) -> None:
    file = tmp_path / "kvgate.toml"
    file.write_text(text)
    for command in ("serve", "check"):
        ended = run(command, "-c", str(file))
        assert ended.returncode == 2
        assert BAD_CONFIGS[text] in ended.stderr
        assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve"],
        ["serve", "--backend", "10.0.0.7:8000"],
        ["serve", "--backend", "http://a:1", "--strategy", "best"],
        ["serve", "--backend", "http://a:1", "--port", "http"],
        ["serve", "-c", "/nowhere/kvgate.toml"],
        ["unheard-of"],
        [],
    ],
)
def test_wrong_arguments_end_with_2(arguments: list[str]) -> None:
    ended = run(*arguments)
    assert ended.returncode == 2
    assert ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_right_configuration_is_checked_with_0(tmp_path: Path) -> None:
    file = tmp_path / "kvgate.toml"
    file.write_text(toml(gateway_config(["http://127.0.0.1:1"])))
    ended = run("check", "-c", str(file))
    assert (ended.returncode, ended.stderr) == (0, "")


def test_probing_tells_what_the_engines_lack(tmp_path: Path) -> None:
    with running_sim("--no-enable-prefix-caching", "--no-kv-events") as sim:
        file = tmp_path / "kvgate.toml"
        file.write_text(toml(gateway_config([sim.url, "http://127.0.0.1:1"])))
        ended = run("check", "-c", str(file), "--probe")
    assert ended.returncode in (1, 2)
    assert "gpu-0" in ended.stderr
    assert "--enable-prefix-caching" in ended.stderr
    assert "gpu-1" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_version_is_told() -> None:
    ended = run("version")
    assert ended.returncode == 0
    assert ended.stdout.startswith("kvgate ")
