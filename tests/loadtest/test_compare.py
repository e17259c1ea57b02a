"""loadtest/compare as a person starts it, and that the README's commands are ones that exist."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loadtest.replay import compare
from loadtest.replay.__main__ import make_parser
from loadtest.replay.compare import ratios, speed_of
from loadtest.replay.trace import Trace, TraceRequest
from tests.rules.source_tree import ROOT
from tests.support.sim_process import running_sim

AGENTS = ROOT / "loadtest" / "traces" / "agents.jsonl.gz"
README = (ROOT / "loadtest" / "README.md").read_text()
SIM_FLAGS = "--step-ms 1 --decode-ms 0.2 --decode-ms-per-seq 0 --prefill-tokens-per-s 1000000"
QUICK = (str(AGENTS), "--speed", "60", "--limit-s", "0.4", "--max-output-tokens", "4")


def commands(prefix: str) -> list[list[str]]:
    """The arguments of each of the README's commands that begin so, in blocks and in lines."""
    found = re.findall(rf"(?:^|`)({re.escape(prefix)} [^`\n]+)", README, re.MULTILINE)
    return [shlex.split(command.removeprefix(prefix), comments=True) for command in found]


def test_the_readme_names_commands_that_exist():
    compared, replayed = commands("loadtest/compare"), commands("python -m loadtest.replay")
    assert len(compared) >= 3
    assert len(replayed) >= 1
    for arguments in compared:
        compare.make_parser().parse_args(arguments)
    for arguments in replayed:
        make_parser().parse_args(arguments)


def test_every_flag_that_the_readme_names_is_one():
    known = make_parser().format_help() + compare.make_parser().format_help()
    section = README[README.index("## Which strategy") : README.index("## How does my fleet")]
    flags = set(re.findall(r"`(--[a-z-]+)[^`]*`", section)) - {"--session-key", "--routing-logic", "--help"}
    assert len(flags) > 10
    assert {flag for flag in flags if flag not in known} == set()


def test_strategies_are_compared_before_simulated_engines(tmp_path):
    file = tmp_path / "report.json"
    script = str(ROOT / "loadtest" / "compare")
    flags = ("--strategies", "roundrobin,prefixaware", "--sims", "2", "--sim-flags", SIM_FLAGS, "--json", str(file))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [script, *QUICK, *flags],
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    table, _, told = done.stdout.strip().partition("\n\n")
    heading, _, *rows = table.split("\n")
    assert heading.split("|")[1].strip() == "strategy"
    assert [row.split("|")[1].strip() for row in rows] == ["roundrobin", "prefixaware"]
    assert re.fullmatch(r"prefixaware: mean TTFT [0-9.]+ of roundrobin's", told)
    found = json.loads(file.read_text())
    plain, aware = found["roundrobin"][0], found["prefixaware"][0]
    assert plain["requests"]["answered"] == aware["requests"]["answered"] == plain["requests"]["due"] > 5
    assert set(plain["reasons"]) == {"roundrobin"}
    assert set(aware["reasons"]) <= {"prefix", "load"}
    # Each began with cold engines: both asked them for the same tokens.
    asked = [sum(engine["queried_tokens"] for engine in one["engines"]) for one in (plain, aware)]
    assert asked[0] == asked[1] == plain["tokens"]["prompt"]


def test_engines_of_ones_own_get_prompts_that_they_do_not_know(capsys):
    with running_sim(*SIM_FLAGS.split(), "--enable-prompt-tokens-details") as sim:
        flags = ("--engines", sim.url, "--strategies", "roundrobin", "--rounds", "2", "--json", "-")
        assert compare.main([*QUICK, *flags]) == 0
    first, second = json.loads(capsys.readouterr().out)["roundrobin"]
    # With the same prompts the second round would compute next to nothing.
    computed = [one["tokens"]["prompt"] - one["tokens"]["cached_by_usage"] for one in (first, second)]
    assert computed[1] > computed[0] / 2 > 0


def test_an_unknown_strategy_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        compare.main([str(AGENTS), "--strategies", "roundrobin,best"])
    assert ended.value.code == 2
    assert "'best' is none of" in capsys.readouterr().err


def trace_at(*times: float) -> Trace:
    return Trace("t", 16, tuple(TraceRequest(at_s, 10, 1, (at,), None) for at, at_s in enumerate(times)))


def test_the_part_of_a_trace_that_is_replayed_comes_at_the_wanted_rate() -> None:
    dense_at_first = trace_at(*(0.1 * at for at in range(100)), *(10.0 + at for at in range(100)))
    assert speed_of(dense_at_first, 1.0, None) == pytest.approx(109.0 / 199)
    speed = speed_of(dense_at_first, 1.0, 50.0)
    due = [request for request in dense_at_first.requests if request.at_s / speed < 50.0]
    assert len(due) == pytest.approx(50, abs=1)


def test_ratios_are_told_of_whole_comparisons_alone() -> None:
    def report(mean: float | None, interrupted: bool = False) -> Any:
        return SimpleNamespace(ttft=SimpleNamespace(mean=mean), interrupted=interrupted)

    whole = {"roundrobin": [report(2.0), report(4.0)], "prefixaware": [report(1.0), report(2.0)]}
    assert ratios(whole) == "prefixaware: mean TTFT 0.50 of roundrobin's"
    assert ratios({**whole, "kvaware": [report(1.0), report(None)]}) == "prefixaware: mean TTFT 0.50 of roundrobin's"
    assert ratios({**whole, "kvaware": [report(1.0)]}) == ""
    assert ratios({**whole, "kvaware": [report(1.0), report(1.0, interrupted=True)]}) == ""
