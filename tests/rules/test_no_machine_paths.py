"""Nothing in the repository belongs to one machine: no absolute path of a home or a workspace, no registry's host."""

import re

import pytest

from tests.rules.source_tree import ROOT, tracked_files

FORBIDDEN = re.compile(
    r"(?<![\w.~$}/-])/(?:work|workspace|root|home/[a-z][\w-]*|Users/\w+|tmp/[a-z]\w*)/[\w.-]"  # a path of a machine
    r"|(?:index-url|extra-index-url|find-links)\b"  # where packages come from is the environment's to say
    r"|files\.pythonh[o]sted\.org|(?:artifactory|nexus|devpi)[\w.-]*\.[a-z]{2,}"
)
# file -> why it may hold one.
ALLOWED: dict[str, str] = {
    "tests/rules/test_no_machine_paths.py": "shows what is forbidden",
}


def faults(text: str) -> list[tuple[int, str]]:
    return [(number, found[0]) for number, line in enumerate(text.split("\n"), 1) for found in FORBIDDEN.finditer(line)]


def test_no_tracked_file_names_a_place_of_one_machine():
    found = []
    for file in tracked_files():
        path = str(file.relative_to(ROOT))
        if path not in ALLOWED:
            text = file.read_bytes().decode("utf-8", "replace")
            found += [f"{path}:{line}: {what}" for line, what in faults(text)]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "see /" + "work/main/x",
        '"/home/jo/kvgate"',
        "cd /" + "root/x",
        "=/tmp/build/a.log",
        "pip --index-url http://x",
        "nexus.local.net",
    ],
)
def test_each_kind_is_found(text):
    assert len(faults(text)) == 1


@pytest.mark.parametrize(
    "text", ["/v1/models", "http://a/work/x", "../root/x", "$HOME/home/jo/x", "/tmp", "/models/llama"]
)
def test_other_paths_pass(text):
    assert faults(text) == []
