"""`kvgate demo` as a real process tree: what it prints, how it ends, and that nothing outlives it."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from urllib.parse import urlsplit

import pytest

from tests.support.sim_process import Connection, http_request

DEADLINE_S = 60.0
SMALL = ("--conversations", "12", "--turns", "4")
LONG = ("--engines", "2", "--conversations", "200", "--turns", "6", "--strategies", "roundrobin")
UNDER_WAY = re.compile(r"[1-9]\d*/1200 turns")


class Demo:
    """A running demo. `shown` is all that was read of its output."""

    def __init__(self, process: subprocess.Popen[bytes], output: int) -> None:
        self.process = process
        self.output = output
        self.shown = ""

    def read_until(self, pattern: str | re.Pattern[str]) -> re.Match[str]:
        while not (found := re.search(pattern, self.shown)):
            assert self._more(), f"ended with {self.process.wait()} before {pattern!r}: {self.shown}"
        return found

    def read_all(self) -> str:
        while self._more():
            pass
        return self.shown

    def _more(self) -> bool:
        try:
            data = os.read(self.output, 65_536)
        except OSError:  # how a terminal says that its other side is closed
            return False
        self.shown += data.decode(errors="replace")
        return bool(data)

    def children(self) -> list[int]:
        """File descriptors of its child processes."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == self.process.pid:
                    found.append(os.pidfd_open(int(entry.name)))
            except (FileNotFoundError, ProcessLookupError):
                continue
        return found


@contextmanager
def running_demo(*arguments: str, terminal: bool = False) -> Iterator[Demo]:
    """Its output through a pipe or a terminal. One that hangs is killed, so that the test fails and does not hang."""
    output, inside = pty.openpty() if terminal else os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "router", "demo", *arguments], stdout=inside, stderr=subprocess.STDOUT
    )
    os.close(inside)
    watchdog = Timer(DEADLINE_S, process.kill)
    watchdog.start()
    try:
        yield Demo(process, output)
    finally:
        watchdog.cancel()
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(output)


def all_gone(children: list[int]) -> bool:
    """Wait for the end of processes."""
    waiting = set(children)
    try:
        while waiting:
            ready, _, _ = select.select(waiting, (), (), DEADLINE_S)
            if not ready:
                return False
            waiting -= set(ready)
        return True
    finally:
        for child in children:
            os.close(child)


def rows(shown: str) -> dict[str, list[str]]:
    """The cells of the table by strategy, units dropped."""
    lines = (
        shown[shown.index("\nstrategy ") + 1 :].replace("%", "").replace(" ms", "").replace(" s\n", "\n").splitlines()
    )
    table = lines[2 : lines.index(next(line for line in lines if line.startswith("Hit ratio")))]
    return {cells[0]: cells[1:] for cells in map(str.split, table)}


def test_a_small_demo_ends_with_one_row_for_each_strategy():
    strategies = ["roundrobin", "leastload", "session", "prefixaware", "kvaware"]
    with running_demo(*SMALL) as demo:
        demo.read_until("leastload .* answers")
        children = demo.children()
        shown = demo.read_all()
        assert demo.process.wait() == 0
    assert "12 conversations of 4 turns over 6 system prompts (seed 1): 48 streamed requests." in shown
    assert re.search(r"together: \d+% of the [\d,]+ tokens that are said", shown)
    assert shown.count(" 48 answers in ") == len(strategies)
    found = rows(shown)
    assert list(found) == strategies
    for hits, p50, p99, imbalance, errors, took in found.values():
        assert 0.0 <= float(hits) < 100.0
        assert 0.0 < float(p50) <= float(p99)
        assert 1.0 <= float(imbalance) <= 4.0
        assert int(errors) == 0
        assert float(took) > 0.0
    assert float(found["prefixaware"][0]) > 1.5 * float(found["roundrobin"][0])  # 2.5 times on an idle machine
    assert len(children) >= 2
    assert all_gone(children)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_told_to_stop_in_mid_load_it_ends_the_whole_tree(number):
    with running_demo(*LONG, terminal=True) as demo:
        demo.read_until(UNDER_WAY)
        children = demo.children()
        demo.process.send_signal(number)
        shown = demo.read_all()
        assert demo.process.wait() == 0
    assert len(children) == 3
    assert all_gone(children)
    assert shown.rstrip().endswith("stopped")
    assert "Traceback" not in shown


def test_its_children_die_with_it_when_it_is_killed():
    with running_demo(*LONG, terminal=True) as demo:
        demo.read_until(UNDER_WAY)
        children = demo.children()
        demo.process.kill()
        demo.process.wait()
    assert len(children) == 3
    assert all_gone(children)


def test_a_child_that_dies_ends_the_demo_with_1_and_its_name():
    with running_demo(*LONG, terminal=True) as demo:
        demo.read_until(UNDER_WAY)
        children = demo.children()
        signal.pidfd_send_signal(children[0], signal.SIGKILL)
        shown = demo.read_all()
        assert demo.process.wait() == 1
    assert all_gone(children)
    assert re.search(r"kvgate demo: (engine-\d|gateway \(roundrobin\)) ended with -9", shown)
    assert "Traceback" not in shown


def test_held_it_serves_until_it_is_told_to_stop():
    with running_demo("--conversations", "2", "--turns", "2", "--strategies", "prefixaware", "--hold") as demo:
        url = urlsplit(demo.read_until(r"stays: (http://\S+)\n")[1])
        demo.read_until("Ctrl-C ends it")
        body = {"model": "sim-8b", "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}]}
        with Connection(str(url.hostname), int(url.port or 0)) as connection:
            connection.send(http_request("POST", "/v1/chat/completions", body))
            response = connection.read()
        assert response.status == 200
        assert response.headers["x-kvgate-backend"] in ("engine-0", "engine-1", "engine-2", "engine-3")
        assert response.json()["usage"]["completion_tokens"] == 4
        children = demo.children()
        demo.process.send_signal(signal.SIGINT)
        demo.read_all()
        assert demo.process.wait() == 0
    assert all_gone(children)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--strategies", "fastest"), "'fastest' is none of roundrobin"),
        (("--turns", "0"), "0 is not within 1 to 50"),
        (("--engines", "four"), "invalid number value"),
    ],
)
def test_wrong_arguments_are_told_and_exit_with_2(arguments, said):
    with running_demo(*arguments) as demo:
        shown = demo.read_all()
        assert demo.process.wait() == 2
    assert said in shown
