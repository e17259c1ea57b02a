"""What the demo shows: a line that moves while a strategy runs, and a table at the end."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TextIO

BAR_WIDTH: Final = 24
QUIET_EVERY_S: Final = 5.0  # between two lines where nothing can be updated in place


@dataclass(frozen=True, slots=True)
class Result:
    """One strategy's row. Token counts are the engines' own, one entry an engine; times in seconds."""

    strategy: str
    queried_tokens: tuple[int, ...]
    hit_tokens: tuple[int, ...]
    ttfts_s: tuple[float, ...]
    errors: int
    took_s: float

    @property
    def hit_ratio(self) -> float:
        queried = sum(self.queried_tokens)
        return sum(self.hit_tokens) / queried if queried else 0.0

    @property
    def imbalance(self) -> float:
        """Prompt tokens that the busiest engine computed, by the mean of all: 1 is even."""
        computed = [asked - hit for asked, hit in zip(self.queried_tokens, self.hit_tokens, strict=True)]
        return max(computed) * len(computed) / sum(computed) if any(computed) else 1.0

    def ttft_s(self, share: float) -> float | None:
        """The least TTFT that `share` of the answers stayed within; None if nothing was answered."""
        if not self.ttfts_s:
            return None
        ordered = sorted(self.ttfts_s)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


class View:
    """Writes to `out`: in place on a terminal, a line now and then elsewhere."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._in_place = out.isatty()
        self._moving = False
        self._next_s = QUIET_EVERY_S

    def say(self, text: str) -> None:
        """A line that stays."""
        self._erase()
        self._out.write(f"{text}\n")
        self._out.flush()

    def begin(self) -> None:
        """A new strategy's time starts."""
        self._next_s = QUIET_EVERY_S

    def progress(self, strategy: str, done: int, total: int, elapsed_s: float, hit_ratio: float) -> None:
        bar = ("#" * (BAR_WIDTH * done // total)).ljust(BAR_WIDTH, ".")
        line = f"{strategy:<12}[{bar}] {done:>3}/{total} turns {elapsed_s:5.1f} s  cached {hit_ratio:4.0%}"
        if self._in_place:
            width = shutil.get_terminal_size().columns
            self._out.write(f"\r\x1b[K{line[: width - 1]}")
            self._out.flush()
            self._moving = True
        elif elapsed_s >= self._next_s:
            self._next_s += QUIET_EVERY_S
            self.say(line)

    def close(self) -> None:
        """Leave the terminal at the start of an empty line."""
        self._erase()
        self._out.flush()

    def _erase(self) -> None:
        if self._moving:
            self._out.write("\r\x1b[K")
            self._moving = False


HEADINGS: Final = ("strategy", "hit ratio", "TTFT p50", "TTFT p99", "imbalance", "errors", "took")


def table(results: Sequence[Result]) -> str:
    """The results, one row each."""
    rows = [HEADINGS, *(_row(result) for result in results)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(_aligned(at, cell, widths[at]) for at, cell in enumerate(row)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _row(result: Result) -> tuple[str, ...]:
    return (
        result.strategy,
        f"{result.hit_ratio:.1%}",
        _milliseconds(result.ttft_s(0.50)),
        _milliseconds(result.ttft_s(0.99)),
        f"{result.imbalance:.2f}",
        str(result.errors),
        f"{result.took_s:.1f} s",
    )


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.0f} ms"


def _aligned(at: int, cell: str, width: int) -> str:
    return cell.ljust(width) if at == 0 else cell.rjust(width)
