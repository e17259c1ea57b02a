"""A scrape: what it shows, how it is cut, and who shares it."""

from __future__ import annotations

import asyncio
import logging

import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.metrics import SERIES_LIMIT, Metrics
from router.metrics_exporter import SLICE_LINES, SLICE_STEPS, BackendFigures, Exporter, Frozen, Snapshot, slices

BUILD = '{version="0",native="compiled",python="3"}'


def figures(name: str, models: tuple[str, ...] = ("m",), running: float | None = 1.0) -> BackendFigures:
    return BackendFigures(
        name=name,
        up=True,
        in_flight=2,
        running=running,
        waiting=running,
        kv_usage=0.5,
        hit_ratio=None,
        index_blocks=7,
        kv_blocks=5,
        models=models,
    )


def samples(text: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Parsed by a foreign implementation; that no series stands twice."""
    found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return f"kvgate_{name}", frozenset(labels.items())


def test_counters_and_gauges_are_those_of_the_moment() -> None:
    metrics = Metrics()
    metrics.count_request("m", "e0", 200)
    metrics.count_request("m", "e0", 200)
    metrics.reloads["failed"] += 1
    metrics.kv_events["e0", "BlockStored"] = 5
    for value in (0.0, 0.005, 0.006, 1000.0):
        metrics.ttft.observe(value)
    now = Snapshot(backends=[figures("e0"), figures("e1", running=None)], queued_by_model={"m": 3, "n": 1})
    found = samples(b"".join(slices(Frozen(metrics), now, BUILD)))
    assert found[key("requests_total", model="m", backend="e0", code="200")] == 2
    assert found[key("config_reloads_total", result="failed")] == 1
    assert found[key("config_reloads_total", result="ok")] == 0
    assert found[key("kv_events_total", backend="e0", type="BlockStored")] == 5
    assert found[key("kv_event_gaps_total")] == 0
    assert found[key("ttft_seconds_bucket", le="0.005")] == 2
    assert found[key("ttft_seconds_bucket", le="0.01")] == 3
    assert found[key("ttft_seconds_bucket", le="600.0")] == 3
    assert found[key("ttft_seconds_bucket", le="+Inf")] == found[key("ttft_seconds_count")] == 4
    assert found[key("ttft_seconds_sum")] == pytest.approx(1000.011)
    assert found[key("demand", model="m")] == 1 + 1 + 3
    assert found[key("demand", model="n")] == 1
    assert key("backend_running", backend="e1") not in found
    assert key("backend_hit_ratio", backend="e0") not in found
    assert found[key("build_info", version="0", native="compiled", python="3")] == 1


def test_later_counts_do_not_reach_a_rendering_under_way() -> None:
    metrics = Metrics()
    metrics.itl.observe(1.0)
    counters = Frozen(metrics)
    metrics.itl.observe(1.0)
    metrics.count_request("m", "e0", 200)
    found = samples(b"".join(slices(counters, Snapshot(), BUILD)))
    assert found[key("itl_seconds_count")] == 1
    assert key("requests_total", model="m", backend="e0", code="200") not in found


@pytest.mark.parametrize("model", ['a"b', "a\\b", "a\nb", 'x"} 1\nkvgate_forged 1', "naïve 模型", "\ud800"])
def test_no_model_s_name_breaks_the_text(model: str) -> None:
    metrics = Metrics()
    metrics.count_request(model, "e0", 200)
    text = b"".join(slices(Frozen(metrics), Snapshot(backends=[figures("e0", (model,))]), BUILD))
    found = samples(text)
    shown = model.encode("utf-8", "replace").decode()
    assert found[key("requests_total", model=shown, backend="e0", code="200")] == 1
    assert found[key("demand", model=shown)] == 2
    assert not any(name == "kvgate_forged" for name, _ in found)


def test_no_slice_is_longer_than_its_bound() -> None:
    metrics = Metrics()
    for at in range(512):
        for code in (200, 400, 499, 503):
            metrics.count_request("m", f"e{at}", code)
        metrics.matched_predicted[f"e{at}"] = metrics.prompt_tokens[f"e{at}"] = at
    now = Snapshot(backends=[figures(f"e{at}") for at in range(512)])
    pieces = list(slices(Frozen(metrics), now, BUILD))
    # heads are two lines of one entry
    assert max(piece.count(b"\n") for piece in pieces) <= SLICE_LINES + 2 * 40
    assert len(pieces) > 512 * 12 // SLICE_LINES
    assert len(samples(b"".join(pieces))) > 512 * 12


def test_a_sum_that_makes_few_lines_is_cut_too() -> None:
    models = tuple(f"m{at}" for at in range(100))
    now = Snapshot(backends=[figures(f"e{at}", models) for at in range(100)])
    few = len(list(slices(Frozen(Metrics()), Snapshot(backends=now.backends, queue_depth=1), BUILD)))
    none = len(list(slices(Frozen(Metrics()), Snapshot(backends=[figures(f"e{at}", ()) for at in range(100)]), BUILD)))
    assert few - none >= 100 * 100 // SLICE_STEPS


def test_series_of_requests_are_bounded_and_none_is_lost() -> None:
    metrics = Metrics()
    for at in range(SERIES_LIMIT + 5_000):
        metrics.count_request(f"adapter-{at}", "e0", 200)
    assert len(metrics.requests) == SERIES_LIMIT + 1
    assert metrics.requests["", "e0", 200] == 5_000
    for code in range(100, 1000):  # an engine that makes codes up
        metrics.count_request("new", "e0", code)
    assert len(metrics.requests) <= SERIES_LIMIT + 10
    assert sum(metrics.requests.values()) == SERIES_LIMIT + 5_000 + 900
    metrics.count_request("adapter-0", "e0", 200)  # known ones go on
    assert metrics.requests["adapter-0", "e0", 200] == 2


def test_a_removed_backend_s_series_end() -> None:
    metrics = Metrics()
    for name in ("e0", "e1"):
        metrics.count_request("m", name, 200)
        metrics.kv_events[name, "BlockStored"] += 1
        for by_backend in (metrics.matched_predicted, metrics.matched_reported, metrics.prompt_tokens):
            by_backend[name] += 1
    metrics.forget_backend("e0")
    text = b"".join(slices(Frozen(metrics), Snapshot(), BUILD))
    assert b'"e0"' not in text
    assert text.count(b'"e1"') == 5


class Counted:
    """An exporter whose snapshots are counted."""

    def __init__(self, backends: int = 0) -> None:
        self.taken = 0
        self.begun = asyncio.Event()
        self.metrics = Metrics()
        self.fault: Exception | None = None
        self._backends = [figures(f"e{at}") for at in range(backends)]
        self.exporter = Exporter(self.metrics, self._snapshot, "0", "compiled")

    def _snapshot(self) -> Snapshot:
        self.taken += 1
        self.begun.set()
        if self.fault is not None:
            raise self.fault
        return Snapshot(backends=self._backends, queue_depth=self.taken)


async def rounds_until(task: asyncio.Task[bytes]) -> int:
    """How often the loop could do something else before the task was done."""
    rounds = 0
    while not task.done():
        await asyncio.sleep(0)
        rounds += 1
    return rounds


@pytest.mark.asyncio
async def test_the_loop_runs_between_the_slices() -> None:
    counted = Counted(backends=512)
    pieces = len(list(slices(Frozen(counted.metrics), counted._snapshot(), BUILD)))
    assert pieces > 15
    task = asyncio.get_running_loop().create_task(counted.exporter.text())
    assert await rounds_until(task) >= pieces
    assert b"process_resident_memory_bytes" in task.result()


@pytest.mark.asyncio
async def test_scrapes_at_one_time_share_a_rendering() -> None:
    counted = Counted(backends=64)
    texts = await asyncio.gather(*(counted.exporter.text() for _ in range(50)))
    assert counted.taken == 1
    assert len({id(text) for text in texts}) == 1


@pytest.mark.asyncio
async def test_who_comes_during_a_rendering_gets_the_next_which_shows_what_was_true_then() -> None:
    counted = Counted(backends=512)
    loop = asyncio.get_running_loop()
    first = loop.create_task(counted.exporter.text())
    await counted.begun.wait()
    counted.metrics.broken_exchanges = 1
    late = [loop.create_task(counted.exporter.text()) for _ in range(20)]
    assert samples(await first)[key("broken_exchanges_total")] == 0
    for text in await asyncio.gather(*late):
        assert samples(text)[key("broken_exchanges_total")] == 1
    assert counted.taken == 2


@pytest.mark.asyncio
async def test_a_scraper_that_leaves_takes_nobody_along() -> None:
    counted = Counted(backends=64)
    loop = asyncio.get_running_loop()
    leaving, staying = (loop.create_task(counted.exporter.text()) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    assert b"kvgate_build_info" in await staying
    assert counted.taken == 1


@pytest.mark.asyncio
async def test_a_rendering_that_fails_is_told_and_the_next_succeeds(caplog: pytest.LogCaptureFixture) -> None:
    counted = Counted()
    counted.fault = ValueError("broken")
    with caplog.at_level(logging.CRITICAL), pytest.raises(RuntimeError, match="could not be rendered"):
        await counted.exporter.text()
    counted.fault = None
    assert b"kvgate_build_info" in await counted.exporter.text()
