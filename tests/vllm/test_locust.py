"""locust with the project's chat traffic, at its default settings for two minutes, without one failure."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vllm.engines import Engine

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[2]


def test_two_minutes_at_default_settings(
    base_url: str, engines: list[Engine], tmp_path: Path, figures: list[str]
) -> None:
    command = [
        *(sys.executable, "-m", "locust", "-f", str(ROOT / "loadtest" / "locustfile.py"), "--host", base_url),
        *("--headless", "-t", "2m", "--only-summary", "--csv", str(tmp_path / "locust")),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    with (tmp_path / "locust_stats.csv").open() as file:
        rows = {row["Name"]: row for row in csv.DictReader(file)}
    answers = rows["/v1/chat/completions"]
    assert int(answers["Request Count"]) > 0
    assert int(rows["Aggregated"]["Failure Count"]) == 0
    figures.append(
        f"locust, defaults, 2 min: {answers['Request Count']} answers, 0 failures, "
        f"median {answers['Median Response Time']} ms"
    )
