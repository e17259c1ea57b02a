"""deploy/prometheus and deploy/grafana ask for metrics, labels and values of labels that the exporter has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from router.metrics import Metrics
from router.metrics_exporter import Frozen, Snapshot, slices
from router.proxy.phases import EndedBy, Phase
from router.strategies.strategy import Reason
from tests.rules.source_tree import ROOT
from tests.rules.test_metrics_doc import exported

RULES = ROOT / "deploy" / "prometheus" / "kvgate.rules.yaml"
RULES_TEST = ROOT / "deploy" / "prometheus" / "kvgate.rules.test.yaml"
DASHBOARD = ROOT / "deploy" / "grafana" / "kvgate.json"

SCRAPE_LABELS = {"job", "instance"}  # Prometheus adds them
PROCESS_METRICS = {"process_resident_memory_bytes": frozenset[str]()}
VALUES: dict[str, set[str]] = {
    "ended_by": set(EndedBy),
    "phase": set(Phase),
    "kind": {"predicted", "reported"},
    "result": {"ok", "failed"},
    "reason": set(Reason),
}
SELECTOR = re.compile(r"\b((?:kvgate|process)_[a-z0-9_]+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r"""\s*([a-z_]+)\s*(=~|!~|!=|=)\s*(?:"([^"]*)"|'([^']*)')\s*""")
GROUPING = re.compile(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)")


def series() -> dict[str, frozenset[str]]:
    """Labels by the name of a series; a histogram has three."""
    found: dict[str, frozenset[str]] = dict(PROCESS_METRICS)
    for name, (kind, labels) in exported().items():
        if kind == "histogram":
            found[f"{name}_bucket"] = labels | {"le"}
            found[f"{name}_sum"] = found[f"{name}_count"] = labels
        else:
            found[name] = labels
    return found


def bounds_of(name: str) -> set[str]:
    text = b"".join(slices(Frozen(Metrics()), Snapshot(), "{}")).decode()
    return set(re.findall(rf'^{name}\{{le="([^"]+)"\}}', text, re.MULTILINE))


def faults(query: str, templates: str = "") -> Iterator[str]:
    """What a query, and the text beside its result, ask for in vain."""
    known = series()
    asked: set[str] = set()
    for name, inside in SELECTOR.findall(query):
        if name not in known:
            yield f"no such series: {name}"
            continue
        asked |= known[name]
        rest = inside
        while rest:
            matched = MATCHER.match(rest)
            if matched is None:
                yield f"not understood: {inside}"
                break
            rest = rest[matched.end() :].removeprefix(",")
            label, operator, value = matched[1], matched[2], matched[3] or matched[4] or ""
            if label not in known[name] | SCRAPE_LABELS:
                yield f"{name} has no label {label}"
            elif label == "le" and value not in bounds_of(name):
                yield f"{name} has no bucket {value}"
            elif label in VALUES and not set(value.split("|")) <= VALUES[label]:
                yield f"{name} has no {label} {operator} {value}"
    for grouping in GROUPING.findall(query):
        for label in (label.strip() for label in grouping.split(",")):
            if label not in asked | SCRAPE_LABELS:
                yield f"grouped by {label}, which none of it has"
    kept = asked | SCRAPE_LABELS
    if groupings := re.findall(r"\bby\s*\(([^)]*)\)", query):
        kept = {label.strip() for grouping in groupings for label in grouping.split(",")}
    elif re.search(r"\bsum\(", query):
        kept = set()
    for label in re.findall(r"\{\{\s*(?:\$labels\.)?([a-z_]+)\s*\}\}", templates):
        if label not in kept:
            yield f"shows {label}, which the result does not have"


def yaml_rules() -> list[dict[str, str]]:
    """The alerts, by the little of YAML that the file uses: no parser of it is among the tests' dependencies."""
    alerts: list[dict[str, str]] = []
    for block in RULES.read_text().split("      - alert: ")[1:]:
        name, *lines = block.splitlines()
        fields = {"alert": name}
        key = ""
        for line in lines:
            if matched := re.match(r" {8}(?:  )?(\w+): *(.*)", line):
                key, text = matched.groups()
                fields[key] = "" if text in ("|", ">-") else text.strip('"')
            else:
                fields[key] += " " + line.strip()
        alerts.append(fields)
    return alerts


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return [panel for panel in found if panel["type"] != "row"]


ALERTS = yaml_rules()
PANELS = panels()


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_asks_for_what_there_is_and_says_what_to_do(alert: dict[str, str]) -> None:
    assert SELECTOR.search(alert["expr"])
    assert list(faults(alert["expr"], alert["summary"] + alert["description"])) == []
    assert alert["severity"] in ("critical", "warning", "info")
    assert len(alert["runbook"]) > 80


def test_every_trouble_has_its_alert() -> None:
    assert [alert["alert"] for alert in ALERTS] == [
        "KvgateNoBackend",
        "KvgateBackendDown",
        "KvgateQueueRejecting",
        "KvgateErrorRateHigh",
        "KvgateTtftBurn",
        "KvgatePredictionsApart",
        "KvgateReloadFailed",
        "KvgateLinesDropped",
        "KvgateSpansDropped",
        "KvgateBrokenExchanges",
        "KvgateKvEventGaps",
    ]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"].replace(" ", "-"))
def test_a_panel_asks_for_what_there_is(panel: dict[str, Any]) -> None:
    assert panel["targets"]
    for target in panel["targets"]:
        query = target["expr"].replace("$__rate_interval", "5m")
        assert SELECTOR.search(query)
        assert list(faults(query, target["legendFormat"])) == []


def test_the_dashboard_shows_every_metric_but_what_runs_here() -> None:
    text = DASHBOARD.read_text()
    assert [name for name in exported() if name not in text] == []


def test_panels_do_not_lie_on_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert all(x < 24 for x, _ in cells)
        taken |= cells


@pytest.mark.parametrize(
    ("query", "templates", "fault"),
    [
        ("sum(kvgate_made_up)", "", "no such series"),
        ("kvgate_ttft_seconds", "", "no such series"),
        ('kvgate_backend_up{pod="x"}', "", "no label pod"),
        ('kvgate_ended_total{phase=~"done|asleep"}', "", "no phase"),
        ('kvgate_ttft_seconds_bucket{le="2"}', "", "no bucket 2"),
        ("sum by (code) (kvgate_backend_up)", "", "grouped by code"),
        ("sum by (backend) (kvgate_requests_total)", "{{ $labels.code }}", "shows code"),
        ("sum(kvgate_requests_total)", "{{code}}", "shows code"),
    ],
)
def test_what_is_asked_in_vain_is_found(query: str, templates: str, fault: str) -> None:
    assert any(fault in found for found in faults(query, templates))


promtool = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    promtool is None, reason="promtool is not installed (Debian: apt-get install prometheus)"
)


def run_promtool(*arguments: str, text: bytes = b"", cwd: Path = ROOT) -> None:
    assert promtool is not None
    done = subprocess.run([promtool, *arguments], check=False, input=text, capture_output=True, cwd=cwd, timeout=60)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()


@needs_promtool
def test_promtool_takes_the_rules_and_they_fire_when_they_should() -> None:
    run_promtool("check", "rules", str(RULES))
    run_promtool("test", "rules", str(RULES_TEST))


@needs_promtool
def test_promtool_finds_no_fault_in_the_exporter() -> None:
    metrics = Metrics()
    metrics.count_request("m", "e0", 200)
    metrics.ended["client", "queued"] = 1
    run_promtool("check", "metrics", text=b"".join(slices(Frozen(metrics), Snapshot(), '{version="0"}')))
