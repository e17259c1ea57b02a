"""The locust file under locust itself, where that is installed (dependency group `load`).

In a process of its own: importing locust patches the standard library.
"""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.rules.source_tree import ROOT
from tests.support.gateway_process import WAIT_S, running_gateway
from tests.support.sim_process import running_sim

pytestmark = pytest.mark.skipif(importlib.util.find_spec("locust") is None, reason="needs: pip install --group load")
SIM = ("--step-ms", "1", "--decode-ms", "0.2", "--decode-ms-per-seq", "0")
LOCUST = (sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless", "--json")


def run(host: str, enough: Callable[[], bool], *flags: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code and final statistics by name of a run that is told to end when it was `enough`."""
    command = [*LOCUST, "--host", host, "--chat-think-s", "0.01", *flags]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + WAIT_S
    try:
        while not enough():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end, "locust did not get so far"
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in err, err
    return process.returncode, {row["name"]: row for row in json.loads(out)}


def test_conversations_are_held_and_timed_without_an_error() -> None:
    with running_sim(*SIM) as sim, running_gateway([sim.url], routing={"strategy": "session"}) as gateway:
        code, rows = run(gateway.url, lambda: gateway.metric("ended_total", phase="done") >= 15, "-u", "4", "-r", "4")
        reasons = {line["reason"] for line in gateway.access_lines() if line.get("reason")}
    assert code == 0
    assert {"TTFT, first turn", "TTFT, later turns", "ITL", "E2E"} < set(rows)
    answered = rows["/v1/chat/completions"]["num_requests"]
    assert answered == rows["E2E"]["num_requests"] > 5
    assert [name for name, row in rows.items() if row["num_failures"]] == []
    # Every request named its session.
    assert reasons == {"session"}


def test_half_an_answer_and_an_error_in_a_stream_are_failures() -> None:
    with running_sim(*SIM, "--fault", "first-event-error=true:1", "--fault", "close-after-chunks=3") as sim:
        code, rows = run(sim.url, lambda: sim.stats()["requests"] >= 4)
    assert code == 1
    row = rows["/v1/chat/completions"]
    assert row["num_failures"] == row["num_requests"] > 1
    assert "E2E" not in rows
