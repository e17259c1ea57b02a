"""The counters behind every metric. docs/metrics.md says what each is good for.

The request path counts in plain integers and lists (some 0.1 us each; a prometheus_client counter costs five times
that, under a lock); metrics_exporter.py turns them into Prometheus families when somebody scrapes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict

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
        self.reloads: dict[str, int] = {"ok": 0, "failed": 0}
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
        self.by_backend.pop(name, None)
        for by_backend in (self.matched_predicted, self.matched_reported, self.prompt_tokens):
            by_backend.pop(name, None)
