"""`python -m loadtest.policy` as `make policy-bench` calls it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRACES = "loadtest/policy/traces"


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    # From source: compiling the model takes longer than these runs.
    return subprocess.run(
        [sys.executable, "-m", "loadtest.policy", *arguments, "--pure"],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_table_goes_on_where_it_was_stopped_and_is_reported_again(tmp_path: Path) -> None:
    out = str(tmp_path / "runs.jsonl")
    table = ("table", "--traces", TRACES, "--only", "ragpulse 4M", "--jobs", "1", "--out", out)
    one = bench(*table, "--seeds", "1", "--policies", "roundrobin")
    assert one.returncode == 0, one.stderr
    both = bench(*table, "--seeds", "1", "--policies", "roundrobin", "prefixaware")
    assert "1/1 ragpulse 4M 65%, prefixaware" in both.stderr
    assert "left out" in both.stderr  # the traces that are not in the repository
    assert both.stdout.count("| roundrobin |") == both.stdout.count("| prefixaware |") == 2
    assert bench("report", out).stdout == both.stdout


def test_what_is_unknown_is_refused() -> None:
    for arguments in (("--policies", "best"), ("--only", "nothing"), ("--scenarios", "rain")):
        found = bench("table", "--traces", TRACES, *arguments)
        assert found.returncode == 2
        assert "error:" in found.stderr
