"""docs/admin.md shows the answers as they are: the examples have the fields of real ones, and no other."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from router.backends.backend import EngineReport, State
from tests.unit.admin.rig import running

pytestmark = pytest.mark.asyncio

FENCE = re.compile(r"```json (\w+)\n(.*?)```", re.DOTALL)


def shape(value: Any, path: str = "") -> set[str]:
    """Every field, by its path; of a list, those of its first element."""
    if isinstance(value, list):
        return shape(value[0], path + "[]") if value else set()
    if not isinstance(value, dict):
        return {path}
    return set().union(*(shape(inner, f"{path}.{key}") for key, inner in value.items()))


async def test_the_examples_have_the_fields_of_real_answers(pytestconfig: pytest.Config) -> None:
    text = (pytestconfig.rootpath / "docs/admin.md").read_text()
    shown = {name: json.loads(example) for name, example in FENCE.findall(text)}
    assert set(shown) == {"backends", "explain"}
    async with running("prefixaware", backends=1) as admin:
        (backend,) = admin.registry.backends
        admin.registry.set_state(backend, State.DOWN, "cannot connect: Connection refused")
        admin.registry.set_state(backend, State.UP, "")
        backend.report = EngineReport(at=admin.clock.now())
        listed = (await admin.ask("GET", "/backends")).json()
        explained = (await admin.ask("POST", "/explain", {"model": "m", "prompt": "x"})).json()
    # The rig's own figures; router/app.py gives them, and the black-box test of the listing looks at those.
    for answer in (listed, shown["backends"]):
        answer["backends"][0]["hits"] = None
    assert shape(shown["backends"]) == shape(listed)
    assert shape(shown["explain"]) == shape(explained)


async def test_every_route_and_field_is_told_of(pytestconfig: pytest.Config) -> None:
    text = (pytestconfig.rootpath / "docs/admin.md").read_text()
    async with running(backends=1) as admin:
        assert admin.server._runner is not None
        app = admin.server._runner.app
        assert app is not None
        paths = {route.resource.canonical for route in app.router.routes() if route.resource is not None}
        fields = (await admin.ask("GET", "/backends")).json()
    for path in paths - {"/backends/{name}/undrain"}:
        assert f" {path.replace('{name}', 'NAME')}`" in text, path
    told = text.partition("| field |")[2]
    for field in {*fields, *fields["backends"][0]} - {"backends", "name", "url", "weight", "api_key_set"}:
        assert f"`{field}`" in told, field
