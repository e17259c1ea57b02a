"""The counters behind every metric. docs/metrics.md says what each is good for.

The request path counts in plain integers and lists (some 0.1 us each; a prometheus_client counter costs five times
that, under a lock); metrics_exporter.py turns them into Prometheus families when somebody scrapes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from typing import Final

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

SERIES_LIMIT: Final = 20_000  # of requests_total: 512 backends with 8 codes each of 5 models come to as many

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


class BackendCounts:
    """What one backend did with its attempts, repeats included. No labels: a sampler reads it once a second."""

    __slots__ = ("attempts", "failed", "ttft_count", "ttft_sum_s")

    def __init__(self) -> None:
        self.attempts = 0  # ended, however
        self.failed = 0  # by its doing, or answered with 5xx
        self.ttft_count = 0
        self.ttft_sum_s = 0.0  # as ttft_seconds counts it: from the request's arrival here


class Metrics:
    """The counters of one process. Labels are names of the fleet and words of ours, never client text."""

    def __init__(self) -> None:
        self.requests: defaultdict[tuple[str, str, int], int] = defaultdict(int)
        self.ended: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.codes: defaultdict[int, int] = defaultdict(int)  # requests by status alone
        self.by_backend: defaultdict[str, BackendCounts] = defaultdict(BackendCounts)
        self.decisions: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.retries: defaultdict[str, int] = defaultdict(int)
        self.matched_predicted: defaultdict[str, int] = defaultdict(int)
        self.matched_reported: defaultdict[str, int] = defaultdict(int)
        self.prompt_tokens: defaultdict[str, int] = defaultdict(int)
        self.kv_events: defaultdict[tuple[str, str], int] = defaultdict(int)  # by backend and type
        self.kv_event_gaps = 0
        self.kv_resyncs: defaultdict[str, int] = defaultdict(int)  # by backend
        self.kv_levels: defaultdict[tuple[str, str], int] = defaultdict(int)  # by backend and the level it came to
        self.reloads: dict[str, int] = {"ok": 0, "failed": 0}
        self.broken_exchanges = 0
        self.held = 0  # requests that were kept back from a busy engine
        self.access_lines_dropped = 0
        self.spans_dropped = 0
        self.ttft = Histogram(_WAIT_BUCKETS)
        self.itl = Histogram(_TOKEN_BUCKETS)
        self.e2e = Histogram(_WAIT_BUCKETS)
        self.queue_time = Histogram(_WAIT_BUCKETS)
        self.overhead = Histogram(_OVERHEAD_BUCKETS)

    def count_request(self, model: str, backend: str, code: int) -> None:
        """One more request answered. Models and codes are the engines' words, and some engines load adapters at a
        client's call: beyond SERIES_LIMIT they no longer make a series each, but are counted without their model, and
        with the class of their code (200 for 2xx) where that is new too."""
        key = (model, backend, code)
        if len(self.requests) >= SERIES_LIMIT and key not in self.requests:
            key = ("", backend, code)
            if key not in self.requests:
                key = ("", backend, code // 100 * 100)
        self.requests[key] += 1

    def forget_backend(self, name: str) -> None:
        """A removed backend's series end, so that names that come and go do not pile up."""
        for key in [key for key in self.requests if key[1] == name]:
            del self.requests[key]
        self.by_backend.pop(name, None)
        for event in [event for event in self.kv_events if event[0] == name]:
            del self.kv_events[event]
        for level in [level for level in self.kv_levels if level[0] == name]:
            del self.kv_levels[level]
        for by_backend in (self.matched_predicted, self.matched_reported, self.prompt_tokens, self.kv_resyncs):
            by_backend.pop(name, None)
