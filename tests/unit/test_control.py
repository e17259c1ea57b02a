"""router/control.py: what a reload does to the fleet, and what it refuses."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from router.backends.in_flight import InFlight
from router.backends.registry import BACKENDS_LIMIT, Registry
from router.clock import VirtualClock
from router.config import Config, ConfigError, parse
from router.control import Control
from router.metrics import Metrics


def fleet(*names: str, **tables: Any) -> Config:
    """Backends NAME at http://NAME:1, or at what follows a `=`."""
    backends = []
    for name in names:
        name, _, host = name.partition("=")
        backends.append({"name": name, "url": f"http://{host or name}:1"})
    return parse({"backends": backends, **tables}, environ={})


class Run:
    """A control over a registry, with the file that the next reload finds."""

    def __init__(self, config: Config) -> None:
        self.file: Config | ConfigError = config
        self.registry = Registry(VirtualClock())
        self.metrics = Metrics()
        self.applied: list[Config] = []
        self.control = Control(config, self.read, self.registry, self.metrics, self.applied.append)
        self.control.start()

    def read(self) -> Config:
        if isinstance(self.file, ConfigError):
            raise self.file
        return self.file

    def reload(self, config: Config | ConfigError) -> list[str]:
        self.file = config
        return [str(change) for change in asyncio.run(self.control.reload())]

    @property
    def names(self) -> list[str]:
        return [backend.name for backend in self.registry.backends]


def test_the_fleet_follows_the_file_by_name() -> None:
    run = Run(fleet("a", "b"))
    a = run.registry.get("a")
    told = run.reload(fleet("c", "a"))
    assert run.names == ["a", "c"]
    assert run.registry.get("a") is a
    assert told == ["backends.b: http://b:1 -> removed", "backends.c: absent -> http://c:1"]
    assert run.metrics.reloads == {"ok": 1, "failed": 0}


def test_nothing_changed_is_fine_too() -> None:
    run = Run(fleet("a"))
    assert run.reload(fleet("a")) == []
    assert run.names == ["a"]


def test_another_address_is_another_backend_and_the_old_one_ends_its_work() -> None:
    run = Run(fleet("a"))
    old = run.registry.get("a")
    assert old is not None
    guard = InFlight(old)
    run.reload(fleet("a=elsewhere"))
    new = run.registry.get("a")
    assert new is not None
    assert (old.deleted, new.host, run.registry.backends) == (True, "elsewhere", (old, new))
    guard.release()
    run.registry.reap()
    assert run.registry.backends == (new,)


def test_backends_of_the_admin_port_stay_until_the_file_or_a_person_says_otherwise() -> None:
    run = Run(fleet("a"))
    added = run.control.add({"url": "http://b:1", "name": "b"})
    run.reload(fleet())
    assert run.names == ["b"]
    run.reload(fleet("b"))  # the file's from now on, the same engine
    assert run.registry.get("b") is added
    run.reload(fleet())
    assert run.names == []


def test_what_a_person_removed_comes_back_with_the_file() -> None:
    run = Run(fleet("a"))
    run.control.remove("a")
    assert run.names == []
    run.reload(fleet("a"))
    assert run.names == ["a"]


def test_a_drain_outlives_a_reload() -> None:
    run = Run(fleet("a"))
    backend = run.control.drain("a")
    run.reload(fleet("a"))
    assert backend.draining
    assert not run.control.undrain("a").draining


@pytest.mark.parametrize(
    ("tables", "path"),
    [
        ({"server": {"port": 1}}, "server.port"),
        ({"server": {"host": "0.0.0.0"}}, "server.host"),
        ({"admin": {"port": 1}}, "admin.port"),
        ({"index": {"memory_limit_bytes": 1_048_576}}, "index.memory_limit_bytes"),
        ({"tracing": {"sample_ratio": 0.5}}, "tracing.sample_ratio"),
    ],
)
def test_a_reload_that_needs_a_restart_changes_nothing_at_all(tables: dict[str, Any], path: str) -> None:
    run = Run(fleet("a"))
    with pytest.raises(ConfigError) as caught:
        run.reload(fleet("b", limits={"max_queue": 1}, **tables))
    assert [fault.key_path for fault in caught.value.faults] == [path]
    assert (run.names, run.applied, run.control.config) == (["a"], [], fleet("a"))
    assert run.metrics.reloads == {"ok": 0, "failed": 1}


def test_a_file_that_cannot_be_read_changes_nothing() -> None:
    run = Run(fleet("a"))
    with pytest.raises(ConfigError):
        run.reload(ConfigError([]))
    assert (run.names, run.metrics.reloads["failed"]) == (["a"], 1)
    assert run.reload(fleet("a", limits={"max_queue": 5})) == ["limits.max_queue: 1000 -> 5"]
    assert [config.limits.max_queue for config in run.applied] == [5]


def test_a_change_of_a_secret_is_told_and_the_secret_is_not() -> None:
    tables = {"backends": [{"name": "a", "url": "http://a:1", "api_key_env": "KEY"}]}
    run = Run(parse(tables, environ={"KEY": "before-1"}))
    told = run.reload(parse(tables, environ={"KEY": "after-2"}))
    assert told == ["backends.a.api_key: (hidden) -> (hidden)"]
    backend = run.registry.get("a")
    assert backend is not None
    assert backend.api_key == "after-2"


def test_the_fleet_with_those_added_by_hand_has_a_limit() -> None:
    run = Run(fleet())
    run.control.add({"url": "http://by-hand:1"})
    with pytest.raises(ConfigError):
        run.reload(fleet(*(f"b{n}" for n in range(BACKENDS_LIMIT))))
    assert run.names == ["by-hand:1"]


def test_a_wrong_backend_is_told_by_key_paths_of_its_own() -> None:
    run = Run(fleet("a"))
    with pytest.raises(ConfigError) as caught:
        run.control.add({"url": "b:1", "wieght": 1})
    assert {fault.key_path for fault in caught.value.faults} == {"url", "wieght"}
    with pytest.raises(ValueError, match="exists"):
        run.control.add({"url": "http://other:1", "name": "a"})


def test_another_secret_of_ours_is_never_an_engines_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUR_TOKEN", "s3cret")
    monkeypatch.setenv("ENGINE_KEY", "key")
    run = Run(parse({"admin": {"token_env": "OUR_TOKEN"}}, environ={"OUR_TOKEN": "s3cret"}))
    with pytest.raises(ConfigError, match="api_key_env"):
        run.control.add({"url": "http://a:1", "api_key_env": "OUR_TOKEN"})
    assert run.control.add({"url": "http://a:1", "api_key_env": "ENGINE_KEY"}).api_key == "key"


def test_a_change_that_cannot_be_taken_over_counts_as_failed() -> None:
    def broken(_: Config) -> None:
        raise ZeroDivisionError

    run = Run(fleet("a"))
    run.control = Control(fleet("a"), run.read, run.registry, run.metrics, broken)
    with pytest.raises(ZeroDivisionError):
        run.reload(fleet("a", limits={"max_queue": 1}))
    assert run.metrics.reloads == {"ok": 0, "failed": 1}
