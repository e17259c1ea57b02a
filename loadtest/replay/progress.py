"""How far a replay is: a line that moves on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import shutil
from typing import Final, TextIO

BAR_WIDTH: Final = 24
QUIET_EVERY_S: Final = 10.0
FRAME_S: Final = 0.2


class Progress:
    """Writes to `out`, which is standard error: the report has standard output to itself."""

    def __init__(self, out: TextIO, label: str = "") -> None:
        self._out = out
        self._in_place = out.isatty()
        self._label = f"{label.ljust(13)}" if label else ""
        self._moving = False
        self._next_s = QUIET_EVERY_S

    def say(self, text: str) -> None:
        """A line that stays."""
        self.close()
        self._out.write(f"{self._label}{text}\n")
        self._out.flush()

    def show(
        self, elapsed_s: float, span_s: float, sent: int, requests: int, in_flight: int, failed: int, not_sent: int
    ) -> None:
        """`span_s`: when the last request is due; after that the bar is full and only in_flight moves."""
        share = min(elapsed_s / span_s, 1.0) if span_s > 0 else 1.0
        bar = ("#" * int(BAR_WIDTH * share)).ljust(BAR_WIDTH, ".")
        line = (
            f"{self._label}[{bar}] {elapsed_s:5.0f}/{span_s:.0f} s  {sent}/{requests} sent, {in_flight} in flight, "
            f"{failed} failed" + (f", {not_sent} not sent" if not_sent else "")
        )
        if self._in_place:
            width = shutil.get_terminal_size().columns
            self._out.write(f"\r\x1b[K{line[: width - 1]}")
            self._out.flush()
            self._moving = True
        elif elapsed_s >= self._next_s:
            self._next_s = (elapsed_s // QUIET_EVERY_S + 1) * QUIET_EVERY_S
            self._out.write(f"{line}\n")
            self._out.flush()

    def close(self) -> None:
        """Leave the terminal at the start of an empty line."""
        if self._moving:
            self._out.write("\r\x1b[K")
            self._out.flush()
            self._moving = False
