"""The test of the documentation reads pages, and compares, as it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.compare import matches
from tests.docs.pages import commands, read_page


@pytest.mark.parametrize(
    ("shown", "printed", "equal"),
    [
        (["state up"], ["state up"], True),
        (["state up"], ["state down"], False),
        (["took 0.1 s"], ["took 12.5 s"], True),
        (["200"], ["503"], False),
        (["HTTP/1.1 429 Too Many Requests"], ["HTTP/1.1 200 OK"], False),
        (['{"id":"...","n":1}'], ['{"id":"abc","n":7}'], True),
        (["a", "...", "z"], ["a", "b", "c", "z"], True),
        (["a", "...", "z"], ["a", "b"], False),
        (["a", "..."], ["a"], True),
        (["a"], ["a", "b"], False),
        ([], ["a"], False),
    ],
)
def test_what_is_shown_is_compared_loosely_in_numbers_alone(shown: list[str], printed: list[str], equal: bool) -> None:
    assert matches(shown, printed) is equal


def test_a_page_is_read_into_commands_with_their_output(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text(
        "Text with `code`.\n\n<!-- file: a.toml -->\n```toml\nx = 1\n```\n\n```console\n$ one \\\n>   two\nout\n> out\n"
        "$ cat > f <<'END'\n> body\n> END\n```\n"
    )
    page = read_page(file)
    assert page.code_spans() == ["code"]
    assert [(block.language, block.file, block.line) for block in page.blocks] == [
        ("toml", "a.toml", 5),
        ("console", None, 9),
    ]
    assert [(command.text, command.output, command.line) for command in commands(page.blocks[1])] == [
        ("one \\\n  two", ["out", "> out"], 9),
        ("cat > f <<'END'\nbody\nEND", [], 13),
    ]


@pytest.mark.parametrize("text", ["```console\n$ true\n", "```console\noutput\n```\n"])
def test_a_page_that_is_not_well_made_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "page.md"
    file.write_text(text)
    with pytest.raises(AssertionError):
        [commands(block) for block in read_page(file).blocks]
