"""The models of a fleet are followed as they come and go."""

from __future__ import annotations

import asyncio

import pytest

from router.backends.backend import State
from router.backends.registry import Registry
from router.clock import VirtualClock
from router.l2.following import FleetL2
from router.l2.settings import L2Settings

pytestmark = pytest.mark.asyncio


async def test_models_are_followed_by_the_names_that_engines_load_them_by_and_adapters_are_not() -> None:
    clock = VirtualClock()
    registry = Registry(clock)
    first = registry.add("a", "http://a")
    registry.set_models(first, [{"id": "early", "root": "/w/early"}])
    fleet = FleetL2(registry, clock, asyncio.get_running_loop(), L2Settings("redis://127.0.0.1:1"))
    try:
        assert set(fleet.l2.state()["models"]) == {"early"}
        second = registry.add("b", "http://b")
        registry.set_state(second, State.UP, "")
        entries = [{"id": "m", "root": "/w/m"}, {"id": "sql", "root": "/l/sql", "parent": "m"}, {"id": "bare"}]
        registry.set_models(second, entries)
        assert set(fleet.l2.state()["models"]) == {"early", "m", "bare"}
        assert fleet.l2.state()["models"]["m"]["detail"] == "no key of /w/m or m was seen"
        assert fleet.l2.state()["models"]["bare"]["detail"] == "no key of bare was seen"
        registry.set_models(second, [{"id": "m", "root": "/w/new"}])
        assert fleet.l2.state()["models"]["m"]["detail"] == "no key of /w/new or m was seen"
        assert "bare" not in fleet.l2.state()["models"]
        registry.remove("b")
        assert set(fleet.l2.state()["models"]) == {"early"}
    finally:
        fleet.close()
    registry.add("c", "http://c")
    assert clock.pending == 0
