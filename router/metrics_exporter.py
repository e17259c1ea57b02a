"""GET /metrics: the counters of metrics.py and the gauges of the moment, as Prometheus text.

A scrape never holds up the event loop. What it shows is copied at one instant and rendered in slices of SLICE_LINES
lines, between which the loop does its other work; what the operating system is asked for is asked in a thread. With 512
backends and 9,400 lines the copy took 0.8 ms of a core here, the longest slice 0.4 ms, all of them together 16 ms.
Scrapes that come while one is rendered share the next rendering.

Apart from metrics.py because that is compiled, and prometheus_client, which tells of the process, cannot be.
"""

from __future__ import annotations

import asyncio
import logging
import platform
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Final

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, generate_latest

from router.metrics import Histogram, Metrics

logger = logging.getLogger(__name__)

SLICE_LINES: Final = 200  # about 0.4 ms here
SLICE_STEPS: Final = 2000  # of a sum that makes no line

Series = Iterator[tuple[str, float] | None]  # rendered labels and value; None: some time has passed without a line


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
    models: Collection[str]  # not changed in place
    kv_blocks: int = 0


@dataclass(slots=True)
class TokenFigures:
    """Of tokenizing; `results`: prompts by the source of their ids, or by the word for why there are none."""

    results: dict[str, int] = field(default_factory=dict)
    wait: Histogram = field(default_factory=lambda: Histogram(()))
    queued: int = 0
    cache_hit_tokens: int = 0
    cache_missed_tokens: int = 0
    cache_bytes: int = 0


@dataclass(slots=True)
class L2Figures:
    """Of the store that engines share; `results`: questions by how they were answered, or by the word for why not."""

    up: bool = False
    failures: int = 0
    results: dict[str, int] = field(default_factory=dict)
    wait: Histogram = field(default_factory=lambda: Histogram(()))
    asked_tokens: int = 0
    found_tokens: int = 0


@dataclass(slots=True)
class Snapshot:
    """What the gauges show, taken when somebody scrapes."""

    backends: list[BackendFigures] = field(default_factory=list)
    queue_depth: int = 0
    queued_by_model: dict[str, int] = field(default_factory=dict)
    index_memory_bytes: int = 0  # of the mirror and the index of events
    connections: int = 0
    upstream_connections: int = 0
    open_exchanges: int = 0
    tokens: TokenFigures | None = None  # None: nobody counts tokens
    l2: L2Figures | None = None  # None: no store is asked


class Frozen:
    """The counters at one instant."""

    def __init__(self, metrics: Metrics) -> None:
        self.requests = list(metrics.requests.items())
        self.ended = list(metrics.ended.items())
        self.decisions = list(metrics.decisions.items())
        self.retries = list(metrics.retries.items())
        self.predicted = list(metrics.matched_predicted.items())
        self.reported = list(metrics.matched_reported.items())
        self.prompt_tokens = list(metrics.prompt_tokens.items())
        self.kv_events = list(metrics.kv_events.items())
        self.kv_resyncs = list(metrics.kv_resyncs.items())
        self.kv_levels = list(metrics.kv_levels.items())
        self.kv_event_gaps = metrics.kv_event_gaps
        self.reloads = list(metrics.reloads.items())
        self.broken_exchanges = metrics.broken_exchanges
        self.held = metrics.held
        self.access_lines_dropped = metrics.access_lines_dropped
        self.spans_dropped = metrics.spans_dropped
        self.ttft = _copy(metrics.ttft)
        self.itl = _copy(metrics.itl)
        self.e2e = _copy(metrics.e2e)
        self.queue_time = _copy(metrics.queue_time)
        self.overhead = _copy(metrics.overhead)


def _copy(histogram: Histogram) -> tuple[tuple[float, ...], list[int], float]:
    return histogram.bounds, list(histogram.counts), histogram.sum


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. `name` as it stands in the text, without the prefix; the suffixes of a histogram are its own."""

    name: str
    kind: str  # counter | gauge | histogram
    text: str
    series: Callable[[Frozen, Snapshot], Series]


def _gauge_by_backend(name: str, text: str, value: Callable[[BackendFigures], float | None]) -> Family:
    def series(counters: Frozen, now: Snapshot) -> Series:
        for b in now.backends:
            if (v := value(b)) is not None:
                yield _labels(backend=b.name), v

    return Family(name, "gauge", text, series)


def _gauge(name: str, text: str, value: Callable[[Snapshot], float]) -> Family:
    return Family(name, "gauge", text, lambda counters, now: iter([("", value(now))]))


def _counter(name: str, text: str, series: Callable[[Frozen], Series]) -> Family:
    return Family(name, "counter", text, lambda counters, now: series(counters))


def _histogram(
    name: str, text: str, histogram: Callable[[Frozen], tuple[tuple[float, ...], list[int], float]]
) -> Family:
    return Family(name, "histogram", text, lambda counters, now: _buckets(*histogram(counters)))


def _buckets(bounds: tuple[float, ...], counts: list[int], total_s: float) -> Series:
    total = 0
    for bound, count in zip((*map(str, bounds), "+Inf"), counts, strict=True):
        total += count
        yield "_bucket" + _labels(le=bound), total
    yield "_count", total
    yield "_sum", total_s


def _of_tokens(name: str, kind: str, text: str, series: Callable[[TokenFigures], Series]) -> Family:
    return Family(name, kind, text, lambda c, now: iter(()) if now.tokens is None else series(now.tokens))


def _of_l2(name: str, kind: str, text: str, series: Callable[[L2Figures], Series]) -> Family:
    return Family(name, kind, text, lambda c, now: iter(()) if now.l2 is None else series(now.l2))


def _matched(c: Frozen) -> Series:
    for kind, by_backend in (("predicted", c.predicted), ("reported", c.reported)):
        for backend, n in by_backend:
            yield _labels(backend=backend, kind=kind), n


def _index_blocks(counters: Frozen, now: Snapshot) -> Series:
    for b in now.backends:
        yield _labels(index="mirror", backend=b.name), b.index_blocks
        yield _labels(index="events", backend=b.name), b.kv_blocks


def _demand(counters: Frozen, now: Snapshot) -> Series:
    demand: defaultdict[str, float] = defaultdict(float)
    steps = 0
    for b in now.backends:
        load = (b.running or 0.0) + (b.waiting or 0.0)
        for model in b.models:
            demand[model] += load
            steps += 1
            if steps % SLICE_STEPS == 0:
                yield None
    for model, queued in now.queued_by_model.items():
        demand[model] += queued
    for model, value in demand.items():
        yield _labels(model=model), value


FAMILIES: Final = (
    _counter(
        "requests_total",
        "Requests by the model asked for, the backend that answered and the status sent (499: client left first).",
        lambda c: ((_labels(model=m, backend=b, code=str(code)), n) for (m, b, code), n in c.requests),
    ),
    _counter(
        "ended_total",
        "Exchanges by who ended them and in which phase.",
        lambda c: ((_labels(ended_by=who, phase=phase), n) for (who, phase), n in c.ended),
    ),
    _counter(
        "routing_decisions_total",
        "Choices of a backend by reason.",
        lambda c: ((_labels(strategy=strategy, reason=reason), n) for (strategy, reason), n in c.decisions),
    ),
    _counter(
        "retries_total",
        "Attempts repeated, by cause.",
        lambda c: ((_labels(reason=reason), n) for reason, n in c.retries),
    ),
    _counter(
        "matched_tokens_total",
        "Prompt tokens of answered requests: expected in the backend's cache at the choice, and reported cached.",
        _matched,
    ),
    _counter(
        "prompt_tokens_total",
        "Prompt tokens of answered requests, as their usage told, else estimated.",
        lambda c: ((_labels(backend=backend), n) for backend, n in c.prompt_tokens),
    ),
    _counter(
        "kv_events_total",
        "KV cache events taken from engines, by type.",
        lambda c: ((_labels(backend=backend, type=kind), n) for (backend, kind), n in c.kv_events),
    ),
    _counter(
        "kv_event_gaps_total", "Times that KV events of an engine were missed.", lambda c: iter([("", c.kv_event_gaps)])
    ),
    _counter(
        "kv_resyncs_total",
        "Times that the KV events of an engine were heard anew, as its reports contradicted them.",
        lambda c: ((_labels(backend=backend), n) for backend, n in c.kv_resyncs),
    ),
    _counter(
        "kv_level_changes_total",
        "Times that kvaware came to place a backend's requests by its events, by the mirror of its cache or by load.",
        lambda c: ((_labels(backend=backend, to=level), n) for (backend, level), n in c.kv_levels),
    ),
    _counter(
        "config_reloads_total",
        "Reloads of the configuration by result; a failed one leaves the old one working.",
        lambda c: ((_labels(result=result), n) for result, n in c.reloads),
    ),
    _counter(
        "held_total",
        "Requests that were held back here from an engine with a batch of work ahead.",
        lambda c: iter([("", c.held)]),
    ),
    _counter(
        "broken_exchanges_total",
        "Exchanges ended by a fault of the gateway.",
        lambda c: iter([("", c.broken_exchanges)]),
    ),
    _counter(
        "access_lines_dropped_total",
        "Access and decision lines that their reader was too slow for.",
        lambda c: iter([("", c.access_lines_dropped)]),
    ),
    _counter(
        "spans_dropped_total",
        "Spans of traces that the collector was too slow for, or did not take.",
        lambda c: iter([("", c.spans_dropped)]),
    ),
    _of_tokens(
        "tokens_total",
        "counter",
        "Prompts by where their token ids came from, or why there are none.",
        lambda t: ((_labels(result=result), n) for result, n in t.results.items()),
    ),
    _of_tokens(
        "tokens_cache_tokens_total",
        "counter",
        "Token ids found in the tokenization cache, and those that had to be made.",
        lambda t: iter(
            [(_labels(result="hit"), t.cache_hit_tokens), (_labels(result="missed"), t.cache_missed_tokens)]
        ),
    ),
    _of_tokens(
        "tokens_wait_seconds",
        "histogram",
        "From the question for a prompt's token ids to these.",
        lambda t: _buckets(*_copy(t.wait)),
    ),
    _of_l2(
        "l2_lookups_total",
        "counter",
        "Questions to the store that engines share, by how they were answered or why not.",
        lambda l2: ((_labels(result=result), n) for result, n in l2.results.items()),
    ),
    _of_l2(
        "l2_tokens_total",
        "counter",
        "Prompt tokens looked for in that store, and found in it.",
        lambda l2: iter([(_labels(kind="asked"), l2.asked_tokens), (_labels(kind="found"), l2.found_tokens)]),
    ),
    _of_l2(
        "l2_lookup_seconds",
        "histogram",
        "From a question to the store to its answer.",
        lambda l2: _buckets(*_copy(l2.wait)),
    ),
    _of_l2(
        "l2_failures_total",
        "counter",
        "Connections to the store that failed or were lost.",
        lambda l2: iter([("", l2.failures)]),
    ),
    _of_l2("l2_up", "gauge", "1 while the store can be asked.", lambda l2: iter([("", float(l2.up))])),
    _histogram(
        "ttft_seconds", "Arrival of the request to the first body byte written to the client.", lambda c: c.ttft
    ),
    _histogram("itl_seconds", "Between two pieces of a stream written to the client.", lambda c: c.itl),
    _histogram("e2e_seconds", "Arrival of the request to the last body byte written to the client.", lambda c: c.e2e),
    _histogram("queue_seconds", "Waiting for a place on a backend.", lambda c: c.queue_time),
    _histogram(
        "overhead_seconds",
        "Arrival of the last request byte to the first byte written to the engine, queueing apart.",
        lambda c: c.overhead,
    ),
    _gauge_by_backend("in_flight", "Attempts chosen and not ended.", lambda b: b.in_flight),
    _gauge_by_backend("backend_up", "1 while the backend may be chosen.", lambda b: float(b.up)),
    _gauge_by_backend("backend_running", "Requests running, as the engine reports.", lambda b: b.running),
    _gauge_by_backend("backend_waiting", "Requests waiting, as the engine reports.", lambda b: b.waiting),
    _gauge_by_backend("backend_kv_usage", "KV blocks in use, 0 to 1, as the engine reports.", lambda b: b.kv_usage),
    _gauge_by_backend(
        "backend_hit_ratio", "Prefix cache hits per queried token, as the engine reports.", lambda b: b.hit_ratio
    ),
    Family(
        "index_blocks",
        "gauge",
        "Blocks in the index.",
        _index_blocks,
    ),
    _gauge("index_memory_bytes", "Memory of the index.", lambda now: now.index_memory_bytes),
    _of_tokens("tokens_queued", "gauge", "Prompts in a thread or waiting for one.", lambda t: iter([("", t.queued)])),
    _of_tokens("tokens_cache_bytes", "gauge", "Size of the tokenization cache.", lambda t: iter([("", t.cache_bytes)])),
    _gauge("queue_depth", "Requests waiting for a place.", lambda now: now.queue_depth),
    _gauge("connections", "Client connections.", lambda now: now.connections),
    _gauge("upstream_connections", "Engine connections.", lambda now: now.upstream_connections),
    _gauge("open_exchanges", "Exchanges begun and not ended.", lambda now: now.open_exchanges),
    Family("demand", "gauge", "Running, waiting and queued here, for autoscalers.", _demand),
)

_ESCAPES: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def _labels(**labels: str) -> str:
    """Names of models are the engines' words: anything may be in them, half of a surrogate pair too."""
    inside = ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in labels.items())
    return f"{{{inside}}}"


def slices(counters: Frozen, now: Snapshot, build: str) -> Iterator[bytes]:
    """The text, in pieces of at most SLICE_LINES lines and two."""
    build_info = Family("build_info", "gauge", "What runs here.", lambda c, n: iter([(build, 1.0)]))
    lines: list[str] = []
    for family in (*FAMILIES, build_info):
        name = f"kvgate_{family.name}"
        lines.append(f"# HELP {name} {family.text}\n# TYPE {name} {family.kind}\n")
        for sample in family.series(counters, now):
            if sample is not None:
                lines.append(f"{name}{sample[0]} {sample[1]}\n")
            if sample is None or len(lines) >= SLICE_LINES:
                yield _joined(lines)
                lines = []
    yield _joined(lines)


def _joined(lines: list[str]) -> bytes:
    return "".join(lines).encode("utf-8", "replace")


class Exporter:
    """Gives the text of GET /metrics. All methods are for the event loop's thread."""

    def __init__(self, metrics: Metrics, snapshot: Callable[[], Snapshot], version: str, native: str) -> None:
        self._metrics = metrics
        self._snapshot = snapshot
        self._build = _labels(version=version, native=native, python=platform.python_version())
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        PlatformCollector(registry=self._process)
        self._waiting: list[Callable[[bytes | None], object]] = []
        self._task: asyncio.Task[None] | None = None
        self.renderings = 0

    def scrape(self, tell: Callable[[bytes | None], object]) -> None:
        """Render what is true now or a moment later, and `tell` it; None where that failed, with a line in the log.
        Not called any more after close()."""
        self._waiting.append(tell)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._serve())

    async def text(self) -> bytes:
        """RuntimeError where the rendering failed."""
        done: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()

        def tell(text: bytes | None) -> None:
            if not done.done():  # who asked may have left
                done.set_result(text)

        self.scrape(tell)
        text = await done
        if text is None:
            raise RuntimeError("the metrics could not be rendered")
        return text

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _serve(self) -> None:
        """A rendering for those who wait, then the next for those who came meanwhile: what it shows was true after
        they asked."""
        try:
            while self._waiting:
                sharing, self._waiting = self._waiting, []
                text: bytes | None = None
                try:
                    text = await self._render()
                except Exception:
                    logger.exception("the metrics could not be rendered")
                for tell in sharing:
                    try:
                        tell(text)
                    except Exception:  # one who asked must not keep the metrics from all who ask later
                        logger.exception("a scrape could not be answered")
        finally:
            self._task = None

    async def _render(self) -> bytes:
        self.renderings += 1
        counters, now = Frozen(self._metrics), self._snapshot()
        # /proc/self/fd may have ten thousand entries
        process = asyncio.get_running_loop().run_in_executor(None, generate_latest, self._process)
        pieces = []
        await asyncio.sleep(0)
        for piece in slices(counters, now, self._build):
            pieces.append(piece)
            await asyncio.sleep(0)
        pieces.append(await process)
        return b"".join(pieces)
