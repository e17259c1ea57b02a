"""The scripts that a stranger and CI start: executable, complete, and clear where the machine lacks something."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.rules.source_tree import ROOT
from tests.support import debian_tools

PREREQUISITES = ROOT / ".ci" / "prerequisites"


def prerequisites(python: Path | str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **({} if path is None else {"PATH": path})}
    command = ["/bin/bash", str(PREREQUISITES), str(python)]
    return subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=60)


@pytest.fixture
def stand_in(tmp_path):
    """Writes a Python that lies: `replies` is the body of a shell function over its arguments."""

    def write(replies: str) -> Path:
        file = tmp_path / "python"
        file.write_text(f'#!/bin/bash\nreal={sys.executable}\n{replies}\nexec "$real" "$@"\n')
        file.chmod(0o755)
        return file

    return write


def test_a_complete_machine_passes_silently():
    done = prerequisites(sys.executable)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_no_python_at_all_names_what_to_install(tmp_path):
    done = prerequisites(tmp_path / "absent")
    assert done.returncode == 1
    assert "apt-get install python3 python3-venv python3-dev gcc" in done.stderr


def test_an_old_python_is_named(stand_in):
    old = stand_in('[[ $2 == *version_info* ]] && exit 1\n[[ $1 == -V ]] && { echo "Python 3.9.2"; exit 0; }')
    done = prerequisites(old)
    assert done.returncode == 1
    assert "is Python 3.9.2" in done.stderr


def test_a_missing_venv_module_is_named(stand_in):
    done = prerequisites(stand_in("[[ $2 == *ensurepip* ]] && exit 1"))
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("apt-get install python3-venv")


def test_missing_headers_and_compiler_are_named(stand_in, tmp_path):
    python = stand_in("[[ $2 == *Python.h* ]] && { echo /nowhere/Python.h; exit 0; }")
    done = prerequisites(python, path=str(tmp_path / "empty"))
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("apt-get install python3-dev gcc libc6-dev")


SCRIPTS = [file for file in sorted((ROOT / ".ci").iterdir()) if file.read_bytes().startswith(b"#!")]


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.name)
def test_scripts_are_executable_and_stop_at_the_first_failure(file):
    assert os.access(file, os.X_OK)
    text = file.read_text()
    assert text.startswith("#!/bin/bash\n") or text.startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in text


def test_ci_runs_what_people_run():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    steps = re.search(r"for step in ([a-z -]+);", (ROOT / ".ci" / "run").read_text())[1].split()
    assert steps == ["test", "check", "sanitize", "container", "package", "test-clients"]
    assert {"demo", "test-vllm", "bench", "clean", *steps} <= targets


def test_what_make_watches_is_what_mypyc_compiles():
    command = ["make", "--no-print-directory", "--eval", "show:;@echo $(COMPILED)", "show"]
    watched = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout.split()
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["kvgate"]["request-path"]
    compiled = {str(file.relative_to(ROOT)) for pattern in patterns for file in ROOT.glob(pattern)}
    assert compiled
    assert set(watched) == compiled


def tools_of_tests(path: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["/bin/bash", str(ROOT / ".ci" / "test-tools")]
    return subprocess.run(
        command, check=False, env={"PATH": path, **environment}, capture_output=True, text=True, timeout=60
    )


def test_complete_tools_of_the_tests_pass_silently(tmp_path):
    for name in debian_tools.packages():
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    done = tools_of_tests(str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_missing_tools_of_the_tests_are_named_and_fail_where_nothing_may_be_skipped(tmp_path):
    """Nothing on the path, so neither the tools nor apt-get."""
    done = tools_of_tests(str(tmp_path))
    assert done.returncode == 0
    assert set(done.stderr.split("apt-get install ")[1].split()) == set(debian_tools.packages().values())
    assert tools_of_tests(str(tmp_path), KVGATE_NO_SKIPS="1").returncode == 1


def test_a_program_that_is_missing_skips_its_test_and_fails_it_in_ci(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("KVGATE_NO_SKIPS", raising=False)
    with pytest.raises(pytest.skip.Exception, match="apt-get install chromium"):
        debian_tools.program("chromium")
    monkeypatch.setenv("KVGATE_NO_SKIPS", "1")
    with pytest.raises(pytest.fail.Exception, match="apt-get install chromium"):
        debian_tools.program("chromium")


@pytest.mark.parametrize(("setting", "code"), [("", 0), ("1", 1)])
def test_a_skipped_test_fails_the_run_where_nothing_may_be_skipped(tmp_path, setting, code):
    test = tmp_path / "test_one.py"
    test.write_text("import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip('no tool')\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.conftest",
        "-p",
        "no:cacheprovider",
        f"--rootdir={tmp_path}",
    ]
    done = subprocess.run(
        [*command, test],
        check=False,
        cwd=ROOT,
        env={**os.environ, "KVGATE_NO_SKIPS": setting},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert ("test_one.py::test_b: Skipped: no tool" in done.stdout) is bool(code)
