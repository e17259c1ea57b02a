"""The documentation as data: pages, their fenced blocks, and the commands in those.

A ```console block holds commands after `$ `, their further lines after `> `, and after each command its output.
`<!-- file: NAME -->` on the line before a block, which no reader sees, makes it a file that the commands after it find
in their folder.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]

_FENCE = re.compile(r"^( *)(`{3,})([a-z]*)[^`]*$")
_FILE = re.compile(r"<!-- file: (\S+) -->")
_CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


@dataclass
class Block:
    """`line` is that of its first line of content."""

    language: str
    text: str
    line: int
    file: str | None


@dataclass
class Command:
    text: str
    output: list[str]
    line: int


@dataclass
class Page:
    path: Path
    blocks: list[Block] = field(default_factory=list)
    prose: str = ""  # everything outside of blocks, line for line

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    def code_spans(self) -> list[str]:
        return _CODE.findall(self.prose)


def read_page(path: Path) -> Page:
    page = Page(path)
    prose: list[str] = []
    content: list[str] | None = None
    opened = ("", "", "", 0)
    before = ""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        fence = _FENCE.match(line)
        if content is None and fence:
            content, opened = [], (fence[1], fence[2], fence[3], number + 1)
        elif content is not None and fence and (fence[2], fence[3]) == (opened[1], ""):
            marked = _FILE.fullmatch(before.strip())
            page.blocks.append(Block(opened[2], "\n".join(content), opened[3], marked[1] if marked else None))
            content = None
        elif content is not None:
            content.append(line.removeprefix(opened[0]))
        else:
            before = line
        prose.append("" if content is not None or fence else line)
    assert content is None, f"{path}: a block is not closed"
    page.prose = "\n".join(prose)
    return page


def pages() -> list[Page]:
    """README.md and everything in docs/."""
    return [read_page(path) for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))]


def commands(block: Block) -> list[Command]:
    """Of a console block."""
    found: list[Command] = []
    for number, line in enumerate(block.text.splitlines(), block.line):
        if line.startswith("$ "):
            found.append(Command(line[2:], [], number))
            continue
        assert found, f"line {number}: output before a command"
        if line.startswith("> ") and not found[-1].output:
            found[-1].text += "\n" + line[2:]
        else:
            found[-1].output.append(line)
    return found
