"""Replays of the small trace against a real gateway with a simulated engine, as the command line runs them."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.replay.__main__ import main
from loadtest.replay.progress import Progress
from loadtest.replay.replay import Settings, replay
from loadtest.replay.trace import load_trace
from tests.rules.source_tree import ROOT
from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.sim_process import SimProcess, running_sim

AGENTS = ROOT / "loadtest" / "traces" / "agents.jsonl.gz"
SIM = ("--step-ms", "1", "--decode-ms", "0.2", "--decode-ms-per-seq", "0", "--prefill-tokens-per-s", "1000000")


@pytest.fixture(scope="module")
def fleet() -> Iterator[tuple[GatewayProcess, SimProcess]]:
    with running_sim(*SIM, "--enable-prompt-tokens-details") as sim, running_gateway([sim.url]) as gateway:
        yield gateway, sim


def run(gateway: GatewayProcess, *flags: str) -> list[str]:
    return [str(AGENTS), "--target", gateway.url, "--speed", "60", "--max-output-tokens", "8", *flags]


def test_a_replay_of_the_small_trace_tells_what_engine_and_gateway_saw(fleet, tmp_path, capsys):
    gateway, sim = fleet
    file = tmp_path / "report.json"
    assert main(run(gateway, "--limit-s", "1.5", "--engines", sim.url, "--json", str(file))) == 0
    out, err = capsys.readouterr()
    trace = load_trace(AGENTS)
    due = sum(request.at_s / 60 < 1.5 for request in trace.requests)
    assert due > 40
    found = json.loads(file.read_text())
    assert found["requests"]["answered"] == found["requests"]["sent"] == found["requests"]["due"] == due
    assert found["errors"] == {}
    assert found["calibration"].startswith("calibrated: 1.000 tokens a word")
    tokens = found["tokens"]
    assert tokens["prompt"] == pytest.approx(tokens["prompt_in_trace"], rel=0.01)
    # The engine's counters and the usage in its answers count the same tokens.
    (engine,) = found["engines"]
    assert engine["queried_tokens"] == tokens["prompt"]
    assert engine["hit_tokens"] == tokens["cached_by_usage"] > 0
    assert found["hit_ratio"] == found["hit_ratio_by_usage"]
    assert found["imbalance"] == 1.0
    assert found["backends"] == {"gpu-0": due}
    assert set(found["reasons"]) <= {"prefix", "load"}
    assert found["ttft_s"]["p50"] <= found["ttft_s"]["p99"] <= found["e2e_s"]["p99"]
    assert f"{due} due, {due} sent, {due} answered, 0 failed" in out
    assert "824 requests in 10 s, blocks of 16 tokens" in err
    # A prompt of the trace shares as much as its ids say: one engine with room for all has little less than that,
    # since some come while the first of their kind is still computed.
    cut = [request for request in trace.requests if request.at_s / 60 < 1.5]
    seen: set[int] = set()
    known = sum(16 for request in cut for block in request.block_ids if block in seen or seen.add(block))
    endless = known / sum(request.prompt_tokens for request in cut)
    assert 0.7 * endless < found["hit_ratio"] <= endless


def test_the_same_salt_finds_its_prompts_cached_and_another_does_not(fleet, capsys):
    gateway, sim = fleet
    ratios = []
    for salt in ("once", "once", "other"):
        assert (
            main(run(gateway, "--limit-s", "0.4", "--salt", salt, "--engines", sim.url, "--no-sessions", "--json", "-"))
            == 0
        )
        ratios.append(json.loads(capsys.readouterr().out)["hit_ratio"])
    first, again, other = (1.0 - ratio for ratio in ratios)
    assert again < first / 2
    assert again < other / 2


def test_errors_are_named_counted_and_fail_the_run(fleet, capsys):
    _, sim = fleet
    sim.fault("first-event-error", True, 100)
    try:
        assert main([str(AGENTS), "--target", sim.url, "--speed", "60", "--limit-s", "0.3"]) == 1
    finally:
        sim.fault("clear")
    assert "times: an error event" in capsys.readouterr().out


def test_the_bound_on_requests_in_flight_is_kept_and_told(fleet, capsys):
    gateway, sim = fleet
    sim.fault("stall", True, 1)  # the first request hangs until its time-out
    flags = ("--limit-s", "0.5", "--max-in-flight", "1", "--request-timeout-s", "1", "--json", "-")
    try:
        assert main(run(gateway, *flags)) == 1
    finally:
        sim.fault("clear")
    found = json.loads(capsys.readouterr().out)
    assert found["errors"] == {"no end within 1 s": 1}
    assert found["requests"]["sent"] == 1
    assert found["requests"]["not_sent"] == found["requests"]["due"] - 1 > 5


def test_what_does_not_fit_the_model_is_left_out_and_told(fleet, capsys):
    with running_sim(*SIM, "--max-model-len", "1600") as small:
        arguments = [str(AGENTS), "--target", small.url, "--speed", "60", "--limit-s", "0.5", "--json", "-"]
        assert main([*arguments, "--max-output-tokens", "8"]) == 0
    found = json.loads(capsys.readouterr().out)
    due = [request for request in load_trace(AGENTS).requests if request.at_s / 60 < 0.5]
    fitting = [request for request in due if request.prompt_tokens + min(request.output_tokens, 8) <= 1600]
    assert 0 < found["requests"]["answered"] == len(fitting) < len(due)
    assert found["requests"]["too_long"] == len(due) - len(fitting)
    assert found["backends"] == {}


def test_stopped_early_it_reports_what_it_has(fleet):
    """What Ctrl-C sets off, told at the first answer."""
    gateway, _ = fleet

    class StopAtFirstFrame(Progress):
        def show(self, *figures: float) -> None:
            stop.set()

    stop = asyncio.Event()

    async def ask():
        settings = Settings(target=gateway.url, speed=60.0, max_output_tokens=8)
        return await replay(load_trace(AGENTS), settings, StopAtFirstFrame(sys.stderr), stop)

    found = asyncio.run(ask())
    assert found.interrupted
    assert found.sent > 0
    assert found.left == found.requests - found.sent > 0
    assert found.tally.answered + found.tally.interrupted == found.sent
    assert found.clean
    gateway.until_metric("in_flight", 0)


def test_ctrl_c_ends_the_command_with_the_report_so_far(fleet):
    gateway, _ = fleet
    command = [sys.executable, "-m", "loadtest.replay", *run(gateway, "--speed", "0.001", "--json", "-")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        before = gateway.metric("requests_total")
        gateway.until(lambda: gateway.metric("requests_total") > before or process.poll() is not None, "it began")
        # Its first request has come, so its handlers stand.
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, err
    assert "Traceback" not in err
    found = json.loads(out)
    assert found["interrupted"] is True
    assert found["requests"]["sent"] >= 1
    assert found["requests"]["left"] > 0


def test_wrong_arguments_and_traces_end_with_2_and_a_silent_target_with_1(tmp_path, capsys, monkeypatch):
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{}\n")
    assert main([str(bad), "--target", "http://127.0.0.1:1"]) == 2
    assert f"{bad}:1: t_ms is missing" in capsys.readouterr().err
    assert main([str(Path(tmp_path) / "none"), "--target", "http://127.0.0.1:1"]) == 2
    assert main([str(AGENTS), "--target", "http://127.0.0.1:1"]) == 1
    assert "http://127.0.0.1:1/v1/models" in capsys.readouterr().err
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    for flags in (
        ["--target", "localhost:8080"],
        ["--target", "http://h/path"],
        ["--target", "http://h", "--speed", "0"],
        ["--target", "http://h", "--max-in-flight", "0"],
        ["--target", "http://h", "--engines", "http://a,b"],
        ["--target", "http://h", "--api-key-env", "NO_SUCH_KEY"],
        [],
    ):
        with pytest.raises(SystemExit) as ended:
            main([str(AGENTS), *flags])
        assert ended.value.code == 2
