"""docs/metrics.md has every metric of router/metrics_exporter.py, with its type and labels, and no other."""

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.metrics import Metrics
from router.metrics_exporter import BackendFigures, Frozen, L2Figures, Snapshot, TokenFigures, slices

DOC = Path(__file__).parents[2] / "docs" / "metrics.md"
ROW = re.compile(r"^\| `(kvgate_[a-z0-9_]+)` \| (counter|gauge|histogram) \| ([a-z, _]*)\|(.*)\|(.*)\|$", re.MULTILINE)


def documented() -> list[tuple[str, str, frozenset[str], str, str]]:
    return [
        (name, kind, frozenset(labels.replace(",", " ").split()), what.strip(), deed.strip())
        for name, kind, labels, what, deed in ROW.findall(DOC.read_text())
    ]


def exported() -> dict[str, tuple[str, frozenset[str]]]:
    """Type and labels by name, of an exporter with at least one series of each metric."""
    metrics = Metrics()
    metrics.requests["m", "b", 200] = 1
    metrics.ended["client", "queued"] = 1
    metrics.decisions["prefixaware", "prefix"] = 1
    metrics.retries["busy"] = 1
    metrics.kv_events["b", "stored"] = 1
    metrics.kv_resyncs["b"] = 1
    metrics.kv_levels["b", "mirror"] = 1
    for by_backend in (metrics.matched_predicted, metrics.matched_reported, metrics.prompt_tokens):
        by_backend["b"] = 1
    figures = BackendFigures(
        name="b",
        up=True,
        in_flight=1,
        running=1.0,
        waiting=1.0,
        kv_usage=0.5,
        hit_ratio=0.5,
        index_blocks=1,
        kv_blocks=1,
        models=("m",),
    )
    build = '{version="0",native="compiled",python="3"}'
    now = Snapshot(backends=[figures], tokens=TokenFigures(results={"local": 1}), l2=L2Figures(results={"store": 1}))
    text = b"".join(slices(Frozen(metrics), now, build)).decode()
    found: dict[str, tuple[str, frozenset[str]]] = {}
    for family in text_string_to_metric_families(text):
        if not family.name.startswith("kvgate_"):
            continue
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert family.samples, f"give {name} a series here, so that its labels are seen"
        found[name] = (family.type, frozenset(family.samples[0].labels) - {"le"})
    return found


def test_every_metric_stands_in_the_document_once_and_no_other():
    names = [name for name, *_ in documented()]
    assert sorted(names) == sorted(exported())


def test_types_and_labels_are_those_of_the_exporter():
    assert {name: (kind, labels) for name, kind, labels, *_ in documented()} == exported()


@pytest.mark.parametrize("column", [3, 4])
def test_each_row_says_what_it_counts_and_what_to_do(column):
    assert [row[0] for row in documented() if len(row[column]) < 10] == []


def test_every_name_in_the_prose_is_a_metric():
    named = set(re.findall(r"\bkvgate_[a-z0-9_]+", DOC.read_text()))
    assert named <= set(exported())
