"""Every command of README.md and docs/ does what is shown there.

Those that cannot run in a test stand in NOT_RUN, with the reason; what can be known of them without running is checked
in test_names.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import Block, Command, Page, commands, pages
from tests.docs.shell import PageShell
from tests.support import debian_tools
from tests.support.sim_process import SimProcess, running_sim

# How a command begins -> why it is not run here.
NOT_RUN: dict[str, str] = {
    "git clone ": "the network",
    "kubectl ": "no cluster",
    "vllm serve ": "needs a GPU or minutes; tests/vllm runs real engines",
    "vllm-router ": "not ours",
}

PAGES = [page for page in pages() if any(block.language == "console" for block in page.blocks)]


def is_run(command: Command) -> bool:
    return not command.text.startswith(tuple(NOT_RUN))


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[SimProcess, SimProcess]]:
    flags = ("--served-model-name", "meta-llama/Llama-3.1-8B-Instruct", "--enable-prompt-tokens-details")
    with running_sim(*flags) as first, running_sim(*flags) as second:
        yield first, second


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_do_what_the_page_shows(
    page: Page, engines: tuple[SimProcess, SimProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for program in debian_tools.packages():
        if any(re.search(rf"\b{program} ", block.text) for block in page.blocks if block.language == "console"):
            debian_tools.program(program)
    monkeypatch.chdir(tmp_path)
    shell = PageShell(tmp_path, engines)
    try:
        for block in page.blocks:
            if block.file is not None:
                shell.write(block)
            elif block.language == "console":
                for command in filter(is_run, commands(block)):
                    shell.run(command)
    finally:
        shell.close()


def test_every_reason_not_to_run_is_still_needed() -> None:
    begun = {
        start
        for page in PAGES
        for block in page.blocks
        if block.language == "console"
        for command in commands(block)
        for start in NOT_RUN
        if command.text.startswith(start)
    }
    assert begun == set(NOT_RUN)


def test_commands_stand_in_console_blocks() -> None:
    """Where they are run. A block of another kind that looks like commands would be a hole in this test."""
    loose = [
        f"{page.name}:{block.line}"
        for page in pages()
        for block in page.blocks
        if block.language in ("", "sh", "bash", "shell") and any(map(looks_like_a_command, block.text.splitlines()))
    ]
    assert loose == []


def looks_like_a_command(line: str) -> bool:
    return line.startswith(("$ ", "kvgate ", "curl ", "make ", ".venv/bin/", *NOT_RUN))


@pytest.mark.parametrize(
    ("line", "is_one"),
    [("curl 127.0.0.1:9090/backends", True), ("make demo", True), ("$ true", True), ("strategy  hit ratio", False)],
)
def test_commands_are_told_from_output(line: str, is_one: bool) -> None:
    assert looks_like_a_command(line) is is_one


def test_a_block_that_differs_is_found(tmp_path: Path, engines: tuple[SimProcess, SimProcess]) -> None:
    shell = PageShell(tmp_path, engines)
    try:
        shell.run(commands(Block("console", "$ echo one\none", 1, None))[0])
        with pytest.raises(AssertionError, match="printed"):
            shell.run(commands(Block("console", "$ echo one\ntwo", 1, None))[0])
    finally:
        shell.close()
