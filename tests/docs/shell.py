"""Runs a page's commands as a reader would: in one folder, with `kvgate` on the path, one after the other.

Pages show fixed addresses. `kvgate serve` and `kvgate sim` get free ports here, and what a page says of the shown ones
is put in place of them, in commands and back in what they print. Pages that start no gateway find one in front of two
simulated engines, with the page's kvgate.toml if it has one.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from tests.docs.compare import matches
from tests.docs.pages import Block, Command
from tests.docs.settings import environment_names, localized
from tests.support.gateway_process import GatewayProcess, serving
from tests.support.sim_process import SimProcess, running_sim

DATA, ADMIN = "127.0.0.1:8080", "127.0.0.1:9090"
ADMIN_FROM_AFAR = "gateway:9090"
ENGINES = ("10.0.0.7:8000", "10.0.0.8:8000", "10.0.0.9:8000")  # the last one is the second under another address
SECRET = "a-secret-of-the-environment"
WAIT_S = 10.0  # only a command that fails waits so long

_DEFAULT = """
[[backends]]
url = "http://10.0.0.7:8000"
name = "gpu-0"
[[backends]]
url = "http://10.0.0.8:8000"
name = "gpu-1"
"""


class PageShell:
    """`folder`: the working directory of the test too, as a gateway's own is. `engines`: two simulated ones that other
    pages share."""

    def __init__(self, folder: Path, engines: tuple[SimProcess, SimProcess]) -> None:
        self._folder = folder
        self._processes = ExitStack()
        self._gateway: GatewayProcess | None = None
        self._addresses = {
            shown: _authority(engine.url) for shown, engine in zip(ENGINES, (*engines, engines[1]), strict=True)
        }
        commands = folder / "bin"
        commands.mkdir()
        (commands / "kvgate").write_text(f'#!/bin/sh\nexec {sys.executable} -m router "$@"\n')
        (commands / "kvgate").chmod(0o755)
        self._environment = {
            **os.environ,
            "PATH": f"{commands}:{os.environ['PATH']}",
            "KVGATE_ADMIN_TOKEN": SECRET,
            "ENGINE_KEY": SECRET,
        }

    def close(self) -> None:
        """Ends what the page started; the gateway must end as asked."""
        try:
            if self._gateway is not None:
                assert self._gateway.stop() == 0, self._gateway.err.all()
        finally:
            self._processes.close()

    def write(self, block: Block) -> None:
        """A file that the page shows."""
        assert block.file is not None
        text = block.text
        if block.file.endswith(".toml"):
            for name in environment_names(text):
                self._environment.setdefault(name, SECRET)
            text = localized(text, self._addresses, self._folder)
        (self._folder / block.file).write_text(text + "\n")

    def run(self, command: Command) -> None:
        """AssertionError with what it printed, if that is not what the page shows."""
        words = _words(command.text)
        if words[:2] == ["kvgate", "sim"]:
            printed = self._start_engine(words[2:])
        elif words[:2] == ["kvgate", "serve"] and self._stays(command):
            printed = self._start_gateway(words[2:])
        else:
            printed = self._ask(command)
        told = "\n".join([f"line {command.line}: $ {command.text}", "-- printed:", *printed, "-- shown:"])
        assert matches(command.output, printed), "\n".join([told, *command.output])

    @staticmethod
    def _stays(command: Command) -> bool:
        """One that is shown to fail at its start is a command like any other."""
        return not command.output or command.output[0].startswith("listening on")

    def _start_engine(self, arguments: list[str]) -> list[str]:
        at = arguments.index("--port")
        shown = f"127.0.0.1:{arguments[at + 1]}"
        engine = self._processes.enter_context(running_sim(*arguments[:at], *arguments[at + 2 :]))
        self._addresses[shown] = _authority(engine.url)
        for file in self._folder.glob("*.toml"):
            file.write_text(file.read_text().replace(shown, self._addresses[shown]))
        self._environment["ENGINE_PID"] = str(engine.process.pid)
        return [f"listening on http://{shown}"]

    def _start_gateway(self, arguments: list[str]) -> list[str]:
        """The page's file, or an empty one, gets the free ports; flags that a page shows stay."""
        if self._gateway is not None:
            assert self._gateway.stop() == 0, self._gateway.err.all()
        given = [self._real(argument) for argument in arguments]
        if "-c" not in given:
            given = ["-c", str(self._empty_file()), *given]
        self._gateway = self._processes.enter_context(serving(*given, environment=self._environment))
        self._gateway.out.wait(lambda line: line.startswith("admin on "))
        self._addresses[DATA] = _authority(self._gateway.url)
        self._addresses[ADMIN] = self._addresses[ADMIN_FROM_AFAR] = _authority(self._gateway.admin_url)
        self._environment["PID"] = str(self._gateway.process.pid)
        self._gateway.until(self._all_are_known, "all engines asked")
        return [self._shown(line) for line in self._gateway.out.all()[:2]]

    def _all_are_known(self) -> bool:
        """Of the engines that run here."""
        assert self._gateway is not None
        return all(
            backend["state"] != "starting"
            for backend in self._gateway.admin("GET", "/backends").json()["backends"]
            if _authority(backend["url"]) in self._addresses.values()
        )

    def _empty_file(self) -> Path:
        file = self._folder / "flags-alone.toml"
        file.write_text(localized("", {}, self._folder))
        return file

    def _ask(self, command: Command) -> list[str]:
        """A question that changes nothing is asked again until the answer is as shown: the change before it may still
        be under way."""
        if self._gateway is None and any(sign in command.text for sign in (DATA, ADMIN, ADMIN_FROM_AFAR, "$PID")):
            if not (self._folder / "kvgate.toml").exists():
                self.write(Block("toml", _DEFAULT, 0, "kvgate.toml"))
            self._start_gateway(["-c", "kvgate.toml"])
        repeats = command.text.startswith("curl") and not any(
            sign in command.text for sign in (" -X", " -d", "--data", " -F")
        )
        end = time.monotonic() + WAIT_S
        while True:
            done = subprocess.run(
                ["bash", "-c", self._real(command.text)],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=WAIT_S,
                check=False,
            )
            printed = self._shown(done.stdout.replace("\r", "")).splitlines()
            if not repeats or matches(command.output, printed) or time.monotonic() > end:
                return printed

    def _real(self, text: str) -> str:
        for shown, real in self._addresses.items():
            text = text.replace(shown, real)
        return text

    def _shown(self, text: str) -> str:
        for shown, real in self._addresses.items():
            text = text.replace(real, shown)
        return text.replace(f"{self._folder}/", "")


def _words(text: str) -> list[str]:
    """Of a simple command, without the & at its end."""
    try:
        words = shlex.split(text.replace("\\\n", " "))
    except ValueError:  # a here-document may hold anything
        return text.split()
    return words[:-1] if words[-1:] == ["&"] else words


def _authority(url: str) -> str:
    return url.partition("://")[2]
