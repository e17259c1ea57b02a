"""Chance comes from an injected random.Random, so that a seed repeats a run. Identifiers may come from `secrets`."""

import ast
from pathlib import Path

import pytest

from tests.rules.source_tree import ROOT, parsed, python_files

INSTANCES = {"Random", "SystemRandom"}


def uses(tree: ast.Module) -> list[tuple[int, str]]:
    modules = set()
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name for alias in node.names if alias.name == "random"}
        elif isinstance(node, ast.ImportFrom) and node.module == "random":
            found += [(node.lineno, alias.name) for alias in node.names if alias.name not in INSTANCES]
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in modules
            and node.attr not in INSTANCES
        ):
            found.append((node.lineno, node.attr))
    return found


def test_router_uses_no_generator_of_the_module():
    assert [
        f"{file.relative_to(ROOT)}:{line}: random.{name}"
        for file in python_files("router")
        for line, name in uses(parsed(file))
    ] == []


@pytest.mark.parametrize(
    "source",
    [
        "import random\nrandom.random()",
        "import random as r\nr.shuffle(x)",
        "from random import choice",
        "import random\nf(random.seed)",
    ],
)
def test_each_way_to_the_module_is_found(source):
    assert len(uses(ast.parse(source))) == 1


@pytest.mark.parametrize(
    "source", ["import random\nrandom.Random(1).random()", "from random import Random", "self.random.choice(x)"]
)
def test_an_injected_generator_passes(source):
    assert uses(ast.parse(source)) == []


def test_the_paths_are_those_of_the_package():
    assert Path("router/clock.py") in [file.relative_to(ROOT) for file in python_files("router")]
