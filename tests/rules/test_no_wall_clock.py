"""Durations come from clock.now(). The wall clock jumps; it is for dates that people or protocols read."""

import ast
from pathlib import Path

import pytest

from tests.rules.source_tree import ROOT, parsed, python_files

WALL_CLOCK = {
    "time": {"time", "time_ns", "gmtime", "localtime", "ctime", "asctime"},
    "datetime": {"now", "utcnow", "today", "fromtimestamp"},
    "date": {"today", "fromtimestamp"},
}

# (file, name) -> which date it writes. An entry that is not used is a fault too.
ALLOWED: dict[tuple[str, str], str] = {
    ("router/proxy/access_log.py", "time.time"): "when a request ended, for people and log stores",
    ("router/proxy/access_log.py", "time.gmtime"): "writes that date",
    ("router/proxy/decisions.py", "time.time"): "when a choice was made, for people and log stores",
    ("router/proxy/decisions.py", "time.localtime"): "writes that date, as Python's logging does",
    ("router/proxy/services.py", "time.time"): "the Date header",
    ("router/tracing.py", "time.time_ns"): "when a span began and ended, by a duration from now",
    ("router/tokens/template.py", "time.localtime"): "the date that a chat template asks for (strftime_now)",
    ("router/sim/cli.py", "time.time"): "dates in answers and KV events, as an engine writes them",
}


def uses(file: Path, source: ast.Module | None = None) -> list[tuple[int, str]]:
    """(line, name) of each use of the wall clock, by whatever name the module was imported."""
    tree = parsed(file) if source is None else source
    names: dict[str, str] = {}  # local name -> time, datetime or date
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update({alias.asname or alias.name: alias.name for alias in node.names if alias.name in WALL_CLOCK})
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            found += [(node.lineno, f"time.{alias.name}") for alias in node.names if alias.name in WALL_CLOCK["time"]]
        elif isinstance(node, ast.ImportFrom) and node.module == "datetime":
            names.update({alias.asname or alias.name: alias.name for alias in node.names if alias.name in WALL_CLOCK})
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        owner = node.value
        if isinstance(owner, ast.Name):
            kind = names.get(owner.id)
        elif isinstance(owner, ast.Attribute):  # datetime.datetime.now
            kind = owner.attr if isinstance(owner.value, ast.Name) and owner.value.id in names else None
        else:
            kind = None
        if kind is not None and node.attr in WALL_CLOCK.get(kind, ()):
            found.append((node.lineno, f"{kind}.{node.attr}"))
    return found


def test_no_duration_is_measured_by_the_wall_clock():
    found = {}
    for file in python_files("router"):
        path = str(file.relative_to(ROOT))
        found.update({(path, name): f"{path}:{line}: {name}" for line, name in uses(file)})
    assert [text for use, text in found.items() if use not in ALLOWED] == []
    unused = [use for use in ALLOWED if use not in found and (ROOT / use[0]).exists()]
    assert unused == [], "an entry of ALLOWED is not used any more"


@pytest.mark.parametrize(
    "source",
    [
        "import time\ntime.time()",
        "import time as t\nstarted = t.time_ns",
        "from time import time",
        "import datetime\ndatetime.datetime.now()",
        "from datetime import datetime\ndatetime.utcnow()",
        "from datetime import datetime as d, date\nd.now(); x = 1",
        "import datetime as dt\ndt.date.today()",
    ],
)
def test_each_way_to_the_wall_clock_is_found(source):
    assert len(uses(Path(), ast.parse(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import time\ntime.monotonic(); time.perf_counter()",
        "from time import monotonic",
        "clock.now()",
        "self.time.time",
    ],
)
def test_monotonic_time_passes(source):
    assert uses(Path(), ast.parse(source)) == []
