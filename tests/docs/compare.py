"""Whether what a command printed is what the page shows of it.

Numbers match any number, `...` any text, and a line of `...` alone any lines; a status line and a number that stands
alone (an exit code, a status) are exact. Everything else is literal.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_NUMBER = r"[0-9][0-9.]*(?:e[+-]?[0-9]+)?"
_EXACT = re.compile(r"HTTP/\S+ [0-9]+.*|[0-9]+")


def matches(shown: Sequence[str], printed: Sequence[str]) -> bool:
    """Line for line, both without what is blank at the end."""
    return _match(_stripped(shown), _stripped(printed))


def _match(shown: list[str], printed: list[str]) -> bool:
    for at, line in enumerate(shown):
        if line.strip() == "...":
            rest = shown[at + 1 :]
            return any(_match(rest, printed[skipped:]) for skipped in range(at, len(printed) + 1))
        if at >= len(printed) or not pattern(line).fullmatch(printed[at]):
            return False
    return len(printed) == len(shown)


def pattern(line: str) -> re.Pattern[str]:
    if _EXACT.fullmatch(line):
        return re.compile(re.escape(line))
    parts = re.split(rf"(\.\.\.|{_NUMBER})", line)
    return re.compile(
        "".join(
            ".*" if part == "..." else _NUMBER if re.fullmatch(_NUMBER, part) else re.escape(part) for part in parts
        )
    )


def _stripped(lines: Sequence[str]) -> list[str]:
    found = [line.rstrip() for line in lines]
    while found and not found[-1]:
        found.pop()
    return found
