"""Every metric: name, labels, help. INTERFACE.md section 5 is the contract, docs/metrics.md says what each is good for.

The request path counts in plain integers and lists (some 0.1 us each; a prometheus_client counter costs five times
that, under a lock); a collector turns them into Prometheus families when somebody scrapes.
"""

from __future__ import annotations

import platform
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_WAIT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0, 600.0)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 10.0)
_OVERHEAD_BUCKETS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.1, 0.5, 2.0)


class Histogram:
    """Counts by bucket; `bounds` are upper bounds in seconds."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self.counts)


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


class Metrics:
    """The counters of one process. Labels are names of the fleet and words of ours, never client text."""

    def __init__(self) -> None:
        self.requests: defaultdict[tuple[str, str, int], int] = defaultdict(int)
        self.ended: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.decisions: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.retries: defaultdict[str, int] = defaultdict(int)
        self.matched_predicted: defaultdict[str, int] = defaultdict(int)
        self.matched_reported: defaultdict[str, int] = defaultdict(int)
        self.prompt_tokens: defaultdict[str, int] = defaultdict(int)
        self.broken_exchanges = 0
        self.access_lines_dropped = 0
        self.ttft = Histogram(_WAIT_BUCKETS)
        self.itl = Histogram(_TOKEN_BUCKETS)
        self.e2e = Histogram(_WAIT_BUCKETS)
        self.queue_time = Histogram(_WAIT_BUCKETS)
        self.overhead = Histogram(_OVERHEAD_BUCKETS)

    def forget_backend(self, name: str) -> None:
        """A removed backend's series end, so that names that come and go do not pile up."""
        for key in [key for key in self.requests if key[1] == name]:
            del self.requests[key]
        for by_backend in (self.matched_predicted, self.matched_reported, self.prompt_tokens):
            by_backend.pop(name, None)


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
            "Prompt tokens expected in a backend's cache at the choice, and reported cached by its answers.",
            ("backend", "kind"),
            matched,
        )
        yield _counter(
            "prompt_tokens",
            "Prompt tokens reported by answers.",
            ("backend",),
            (((backend,), n) for backend, n in m.prompt_tokens.items()),
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
