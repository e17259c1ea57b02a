"""Real engines for the tests of this folder; without KVGATE_VLLM=1 (tests/vllm/run sets it) nothing is collected.

KVGATE_VLLM_TARGET=URL runs what makes sense against that one engine, with no gateway between: a test that fails there
too is not the gateway's fault.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import pytest

from tests.vllm.engines import Engine, eventually
from tests.vllm.gateway import Gateway, free_port, running_gateway

if os.environ.get("KVGATE_VLLM") != "1":
    collect_ignore_glob = ["test_*.py"]

TARGET = os.environ.get("KVGATE_VLLM_TARGET", "").rstrip("/")
FIGURES: list[str] = []


class StartGateway(Protocol):
    def __call__(self, strategy: str, more: str = "") -> AbstractContextManager[Gateway]: ...


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # the tests that kill engines go last: a test after them has to wait for new ones
    items.sort(key=lambda item: "engine_death" in item.nodeid)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if FIGURES:
        terminalreporter.section("measured on real engines")
        for line in FIGURES:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def figures() -> list[str]:
    """Lines for the end of the run: what was measured."""
    return FIGURES


@pytest.fixture(scope="session")
def vllm_environment() -> Path:
    environment = Path(os.environ.get("KVGATE_VLLM_VENV", ".state/vllm-venv")).absolute()
    assert (environment / "kvgate-model" / "config.json").exists(), "start these tests with tests/vllm/run"
    return environment


@pytest.fixture(scope="session")
def logs() -> Path:
    """Kept after the run, so that a failure can be read about."""
    folder = Path(tempfile.mkdtemp(prefix="kvgate-vllm-logs-"))
    FIGURES.append(f"logs: {folder}")
    return folder


@pytest.fixture(scope="session")
def engine_pair(vllm_environment: Path, logs: Path) -> Iterator[list[Engine]]:
    if TARGET:
        yield [Engine("target", TARGET, vllm_environment, logs / "target.log")]
        return
    engines = [
        Engine(f"engine-{n}", f"http://127.0.0.1:{free_port()}", vllm_environment, logs / f"engine-{n}.log")
        for n in range(2)
    ]
    try:
        yield engines
    finally:
        for engine in engines:
            engine.stop()


@pytest.fixture
def engines(engine_pair: list[Engine]) -> list[Engine]:
    """Both engines, up, idle and with empty caches, whatever the test before did to them."""
    fallen = [engine for engine in engine_pair if not TARGET and not engine.whole]
    for engine in fallen:
        engine.stop()
        engine.start()
    for engine in fallen:
        engine.wait_until_up()
    for engine in engine_pair:
        eventually(lambda engine=engine: engine.busy() == 0, 30, f"{engine.name} is idle")
        engine.reset_prefix_cache()
    return engine_pair


@pytest.fixture
def start_gateway(engines: list[Engine], logs: Path) -> StartGateway:
    if TARGET:
        pytest.skip("needs a gateway")
    return lambda strategy, more="": running_gateway(engines, logs, strategy, more)


@pytest.fixture
def base_url(request: pytest.FixtureRequest, engines: list[Engine]) -> Iterator[str]:
    """Where a client sends its requests: a gateway with the default strategy, or KVGATE_VLLM_TARGET."""
    if TARGET:
        yield TARGET
        return
    start: StartGateway = request.getfixturevalue("start_gateway")
    with start("prefixaware") as gateway:
        yield gateway.url
