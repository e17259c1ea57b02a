"""The Dockerfile as .ci/image.py reads it, which runs it without a container engine (`make container`)."""

import importlib.util
import sys

import pytest

from router import cli
from tests.rules.source_tree import ROOT


def load_image():
    spec = importlib.util.spec_from_file_location("image", ROOT / ".ci" / "image.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


image = load_image()
INSTRUCTIONS = image.parse((ROOT / "Dockerfile").read_text())
PATTERNS = [
    line for line in (ROOT / ".dockerignore").read_text().splitlines() if line.strip() and not line.startswith("#")
]


def last(name: str):
    return [instruction for instruction in INSTRUCTIONS if instruction.name == name][-1]


def test_lines_are_joined_comments_dropped_and_options_split_off():
    text = "from a AS b\n# no\nRUN x \\\n  # between\n  && y\nCOPY --from=b /p /q\n"
    assert [(i.name, dict(i.options), i.rest) for i in image.parse(text)] == [
        ("FROM", {}, "a AS b"),
        ("RUN", {}, "x && y"),
        ("COPY", {"from": "b"}, "/p /q"),
    ]


@pytest.mark.parametrize(
    "text", ["# syntax=docker/dockerfile:1\nFROM a\n", "RUN cat <<EOF\nx\nEOF\n", "RUN x \\\n"], ids=repr
)
def test_what_is_not_carried_out_is_refused(text):
    with pytest.raises(image.NotKnown):
        image.parse(text)


def test_every_instruction_is_known():
    assert [i.name for i in INSTRUCTIONS if not hasattr(image.Build, f"_{i.name.lower()}")] == []


@pytest.mark.parametrize(
    ("path", "into"),
    [
        ("pyproject.toml", True),
        ("router/net/downstream.py", True),
        ("native/prefix_tree.pyx", True),
        ("native/prefix_tree.c", False),
        ("router/net/downstream.cpython-312-x86_64-linux-gnu.so", False),
        ("router/net/__pycache__/downstream.pyc", False),
        ("tests/conftest.py", False),
        (".git/config", False),
        (".venv/bin/python", False),
        ("keys.txt", False),
    ],
)
def test_a_build_is_given_the_sources_and_nothing_else(path, into):
    assert image.sent(path, PATTERNS) is into


def test_what_is_copied_is_let_in():
    names = {word for i in INSTRUCTIONS if i.name == "COPY" and not i.options for word in i.words[:-1]}
    assert {name for name in names if image.sent(name, PATTERNS)} == names
    assert {"pyproject.toml", "setup.py", "MANIFEST.in", "native", "router"} <= names


def test_it_ends_as_a_number_that_is_not_root_with_the_gateway_as_process_1():
    assert int(last("USER").rest.split(":")[0]) > 0
    program, *arguments = last("ENTRYPOINT").words
    assert program == "kvgate"
    parsed = cli._parser(arguments).parse_args(arguments)
    assert (parsed.command, parsed.host) == ("serve", "0.0.0.0")


def test_its_health_check_is_a_command_of_the_gateway():
    program, *arguments = last("HEALTHCHECK").rest.removeprefix("CMD ").strip("[]").replace('"', "").split(", ")
    assert program == "kvgate"
    assert cli._parser(arguments).parse_args(arguments).pid == 1
