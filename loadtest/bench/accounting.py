"""CPU time and memory of a process and everything it started, read from /proc (Linux)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def _stat_fields(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the command's name, so that [1] is the parent; None if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text[text.rindex(")") + 2 :].split()


def process_tree(root: int) -> list[int]:
    """`root` and all its living descendants."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := _stat_fields(int(entry))):
            children.setdefault(int(fields[1]), []).append(int(entry))
    tree = [root]
    for pid in tree:
        tree.extend(children.get(pid, ()))
    return tree


@dataclass(frozen=True)
class Cpu:
    """CPU time in seconds (10 ms steps)."""

    user: float
    system: float

    @property
    def total(self) -> float:
        return self.user + self.system

    def __sub__(self, other: Cpu) -> Cpu:
        return Cpu(self.user - other.user, self.system - other.system)


def cpu_time(root: int) -> Cpu:
    """What the tree has used, all threads and all children that have ended included."""
    user = system = 0
    for pid in process_tree(root):
        if fields := _stat_fields(pid):
            utime, stime, cutime, cstime = (int(value) for value in fields[11:15])
            user += utime + cutime
            system += stime + cstime
    return Cpu(user / TICKS_PER_S, system / TICKS_PER_S)


def resident_bytes(root: int) -> int:
    """Sum of the resident sets of the tree. Pages shared by fork count once a process: compare differences only."""
    total = 0
    for pid in process_tree(root):
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))
    return total
