"""GET /metrics: the counters of metrics.py and the gauges of the moment, as Prometheus families.

Apart from metrics.py because that is compiled, and a compiled class cannot build on prometheus_client's.
"""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from router.metrics import Histogram, Metrics


@dataclass(slots=True)
class BackendFigures:
    """One backend's gauges at the moment of a scrape; None where the engine does not tell."""

    name: str
    up: bool
    in_flight: int
    running: float | None
    waiting: float | None
    kv_usage: float | None
    hit_ratio: float | None
    index_blocks: int
    models: tuple[str, ...]


@dataclass(slots=True)
class Snapshot:
    """What the gauges show, taken when somebody scrapes."""

    backends: list[BackendFigures] = field(default_factory=list)
    queue_depth: int = 0
    queued_by_model: dict[str, int] = field(default_factory=dict)
    index_memory_bytes: int = 0
    connections: int = 0
    upstream_connections: int = 0
    open_exchanges: int = 0


class _GatewayCollector(Collector):
    def __init__(self, metrics: Metrics, snapshot: Callable[[], Snapshot], version: str, native: str) -> None:
        self._metrics = metrics
        self._snapshot = snapshot
        self._build = (version, native, platform.python_version())

    def collect(self) -> Iterable[Metric]:
        m = self._metrics
        yield _counter(
            "requests",
            "Requests by the model asked for, the backend that answered and the status sent (499: client left first).",
            ("model", "backend", "code"),
            (((model, backend, str(code)), n) for (model, backend, code), n in m.requests.items()),
        )
        yield _counter(
            "ended",
            "Exchanges by who ended them and in which phase.",
            ("ended_by", "phase"),
            m.ended.items(),
        )
        yield _counter(
            "routing_decisions", "Choices of a backend by reason.", ("strategy", "reason"), m.decisions.items()
        )
        yield _counter(
            "retries", "Attempts repeated, by cause.", ("reason",), (((r,), n) for r, n in m.retries.items())
        )
        matched = [((backend, "predicted"), n) for backend, n in m.matched_predicted.items()]
        matched += [((backend, "reported"), n) for backend, n in m.matched_reported.items()]
        yield _counter(
            "matched_tokens",
            "Prompt tokens of answered requests: expected in the backend's cache at the choice, and reported cached.",
            ("backend", "kind"),
            matched,
        )
        yield _counter(
            "prompt_tokens",
            "Prompt tokens of answered requests, as their usage told, else estimated.",
            ("backend",),
            (((backend,), n) for backend, n in m.prompt_tokens.items()),
        )
        yield _counter(
            "config_reloads", "Reloads of the configuration.", ("result",), (((r,), n) for r, n in m.reloads.items())
        )
        yield _counter("broken_exchanges", "Exchanges ended by a fault of the gateway.", (), [((), m.broken_exchanges)])
        yield _counter(
            "access_lines_dropped",
            "Access lines that their reader was too slow for.",
            (),
            [((), m.access_lines_dropped)],
        )
        yield _histogram("ttft_seconds", "Arrival of the request to the first body byte written to the client.", m.ttft)
        yield _histogram("itl_seconds", "Between two pieces of a stream written to the client.", m.itl)
        yield _histogram("e2e_seconds", "Arrival of the request to the last body byte written to the client.", m.e2e)
        yield _histogram("queue_seconds", "Waiting for a place on a backend.", m.queue_time)
        yield _histogram(
            "overhead_seconds",
            "Arrival of the last request byte to the first byte written to the engine, queueing apart.",
            m.overhead,
        )
        yield from self._gauges(self._snapshot())

    def _gauges(self, now: Snapshot) -> Iterable[Metric]:
        backends = now.backends

        def by_backend(name: str, text: str, value: Callable[[BackendFigures], float | None]) -> Metric:
            family = GaugeMetricFamily(f"kvgate_{name}", text, labels=("backend",))
            for b in backends:
                if (v := value(b)) is not None:
                    family.add_metric((b.name,), v)
            return family

        yield by_backend("in_flight", "Attempts chosen and not ended.", lambda b: b.in_flight)
        yield by_backend("backend_up", "1 while the backend may be chosen.", lambda b: float(b.up))
        yield by_backend("backend_running", "Requests running, as the engine reports.", lambda b: b.running)
        yield by_backend("backend_waiting", "Requests waiting, as the engine reports.", lambda b: b.waiting)
        yield by_backend("backend_kv_usage", "KV blocks in use, 0 to 1, as the engine reports.", lambda b: b.kv_usage)
        yield by_backend(
            "backend_hit_ratio", "Prefix cache hits per queried token, as the engine reports.", lambda b: b.hit_ratio
        )
        blocks = GaugeMetricFamily("kvgate_index_blocks", "Blocks in the index.", labels=("index", "backend"))
        for b in backends:
            blocks.add_metric(("mirror", b.name), b.index_blocks)
        yield blocks
        yield GaugeMetricFamily("kvgate_index_memory_bytes", "Memory of the index.", now.index_memory_bytes)
        yield GaugeMetricFamily("kvgate_queue_depth", "Requests waiting for a place.", now.queue_depth)
        yield GaugeMetricFamily("kvgate_connections", "Client connections.", now.connections)
        yield GaugeMetricFamily("kvgate_upstream_connections", "Engine connections.", now.upstream_connections)
        yield GaugeMetricFamily("kvgate_open_exchanges", "Exchanges begun and not ended.", now.open_exchanges)
        demand: defaultdict[str, float] = defaultdict(float)
        for b in backends:
            for model in b.models:
                demand[model] += (b.running or 0.0) + (b.waiting or 0.0)
        for model, queued in now.queued_by_model.items():
            demand[model] += queued
        family = GaugeMetricFamily(
            "kvgate_demand", "Running, waiting and queued here, for autoscalers.", labels=("model",)
        )
        for model, value in demand.items():
            family.add_metric((model,), value)
        yield family
        info = GaugeMetricFamily("kvgate_build_info", "What runs here.", labels=("version", "native", "python"))
        info.add_metric(self._build, 1)
        yield info


def _counter(
    name: str, text: str, labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], float]]
) -> CounterMetricFamily:
    family = CounterMetricFamily(f"kvgate_{name}", text, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family


def _histogram(name: str, text: str, histogram: Histogram) -> HistogramMetricFamily:
    buckets, total = [], 0
    for bound, count in zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True):
        total += count
        buckets.append((bound, total))
    return HistogramMetricFamily(f"kvgate_{name}", text, buckets=buckets, sum_value=histogram.sum)


class Exporter:
    """`render()` gives the text of GET /metrics."""

    def __init__(self, metrics: Metrics, snapshot: Callable[[], Snapshot], version: str, native: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_GatewayCollector(metrics, snapshot, version, native))
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)

    def render(self) -> bytes:
        return generate_latest(self._registry)
