"""What happened in the last ten minutes: figures of the fleet second by second, of each backend in steps of five.

A Recorder samples on the event loop of the proxy, so a sample has to be cheap and what it keeps has to be bounded. It
reads plain counters and the registry; nothing is told to it, and nothing on the request path knows it. Measured, as
compiled, on a core of 2.6 GHz: docs/dashboard.md has the figures, tests/benchmarks/test_dashboard.py measures them.

Memory: TOTAL_COLUMNS x KEPT_S doubles for the fleet (67 kB), and BACKEND_COLUMNS x BACKEND_STEPS floats (about 7 kB
with their objects) for each of at most TRACKED backends.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from router.backends.backend import Backend, EngineReport
from router.backends.registry import Registry
from router.clock import Clock, TimerHandle
from router.metrics import Histogram, Metrics

SAMPLE_S: Final = 1.0
KEPT_S: Final = 600  # samples of the fleet
STEP_S: Final = 5  # samples that make one step of a backend's history
BACKEND_STEPS: Final = KEPT_S // STEP_S
TRACKED: Final = 1024  # backends with a history: those beyond have present figures only
WINDOW_S: Final = 60  # of the figures that are told as one number
HIT_WINDOW_S: Final = 300  # hit ratios need more: a quiet minute has few prompts
WINDOW_STEPS: Final = WINDOW_S // STEP_S
HIT_WINDOW_STEPS: Final = HIT_WINDOW_S // STEP_S

STALE_AFTER_S: Final = 15  # an engine that did not report for so long tells nothing about now

NAN: Final = float("nan")

TOTAL_COLUMNS: Final = (
    "in_flight",
    "queued",
    "requests",  # ended, per second
    "failed",  # of them with 5xx but 503, or broken after their first byte, per second
    "refused",  # of them with 429 or 503, per second
    "invalid",  # of them with another 4xx, per second
    "left",  # of them by the client's leaving before a head (499), per second
    "ttft_p50",  # seconds, of this second's first bytes; NaN without one
    "ttft_p99",
    "prompt_tokens",  # of answered requests, in this second
    "predicted_tokens",  # of them expected in a cache
    "queried_tokens",  # what the engines' own counters say: looked up
    "hit_tokens",  # and found
)
BACKEND_COLUMNS: Final = (
    "in_flight",  # highest of the step
    "running",  # the engine's last word; NaN where it has none
    "waiting",
    "kv_usage",
    "attempts",  # ended, in the step
    "failed",  # of them by the backend's doing
    "ttft_sum_s",
    "ttft_count",
    "prompt_tokens",
    "predicted_tokens",
    "queried_tokens",
    "hit_tokens",
)


class Ring:
    """Columns of one length, written together; the oldest row is overwritten."""

    __slots__ = ("_columns", "_index", "count", "length")

    def __init__(self, names: Sequence[str], length: int, typecode: str) -> None:
        self.length = length
        self.count = 0  # rows ever written
        self._index = {name: at for at, name in enumerate(names)}
        self._columns = [array(typecode, [NAN]) * length for _ in names]

    def append(self, row: Sequence[float]) -> None:
        at = self.count % self.length
        for column, value in zip(self._columns, row, strict=True):
            column[at] = value
        self.count += 1

    def last(self, name: str, rows: int) -> list[float]:
        """The newest `rows` values or as many as there are, oldest first."""
        rows = min(rows, self.count, self.length)
        if rows <= 0:
            return []
        column = self._columns[self._index[name]]
        end = self.count % self.length
        if rows <= end:
            return column[end - rows : end].tolist()
        return (column[end - rows :] + column[:end]).tolist()

    def sum(self, name: str, rows: int) -> float:
        """Of the newest `rows` values that are numbers."""
        values = self.last(name, rows)
        total = sum(values)
        return total if total == total else sum(value for value in values if value == value)

    def memory_bytes(self) -> int:
        return sum(len(column) * column.itemsize for column in self._columns)


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float:
    """The value below which `share` of the observations lie, taken for evenly spread within their bucket, as
    Prometheus' histogram_quantile does: no better than the buckets are. NaN without observations; the highest bound
    for one beyond all bounds. `counts` has one more than `bounds`."""
    total = sum(counts)
    if total == 0:
        return NAN
    rank = share * total
    seen = 0
    low = 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count and seen + count >= rank:
            return low + (bound - low) * max(rank - seen, 0.0) / count
        seen += count
        low = bound
    return bounds[-1]


class RecentHistogram:
    """What a histogram counted in the last second and in the last WINDOW_S."""

    __slots__ = ("_histogram", "_marks", "newest")

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._marks: deque[tuple[int, ...]] = deque([tuple(histogram.counts)], maxlen=WINDOW_S + 1)
        self.newest: list[int] = [0] * len(histogram.counts)

    @property
    def lowest_s(self) -> float:
        """The lowest bound: quantiles below it are not known any better."""
        return self._histogram.bounds[0]

    def sample(self) -> None:
        counts = tuple(self._histogram.counts)
        before = self._marks[-1]
        self.newest = [0] * len(counts) if counts == before else [a - b for a, b in zip(counts, before, strict=True)]
        self._marks.append(counts)

    def last_second(self, share: float) -> float:
        return quantile(self._histogram.bounds, self.newest, share)

    def window(self, share: float) -> float:
        oldest, newest = self._marks[0], self._marks[-1]
        return quantile(self._histogram.bounds, [a - b for a, b in zip(newest, oldest, strict=True)], share)


class BackendHistory:
    """One backend as the recorder saw it. `number` is its own for ever: a name that comes back is another one."""

    __slots__ = (
        "_attempts",
        "_failed",
        "_hits",
        "_peak",
        "_predicted",
        "_prompt",
        "_queried",
        "_report",
        "_seen",
        "_step_hits",
        "_step_queried",
        "_ttft_count",
        "_ttft_sum_s",
        "backend",
        "changed_at",
        "number",
        "reported_at",
        "ring",
    )

    def __init__(self, backend: Backend, number: int, sample: int, ring: Ring) -> None:
        self.backend = backend
        self.number = number
        self.changed_at = sample  # the sample that first saw its present state
        self.reported_at = sample  # the sample that first saw its last report
        self.ring = ring
        self._seen = (backend.state, backend.draining)
        self._report: EngineReport | None = None
        self._queried = self._hits = NAN  # the engine's counters at its last report
        self._step_queried = self._step_hits = 0.0
        self._peak = 0
        self._attempts = self._failed = self._ttft_count = 0
        self._ttft_sum_s = 0.0
        self._prompt = self._predicted = 0

    def note_state(self, sample: int) -> None:
        backend = self.backend
        if (backend.state, backend.draining) != self._seen:
            self._seen = (backend.state, backend.draining)
            self.changed_at = sample

    def sample(self, sample: int) -> tuple[float, float]:
        """Once a second. Returns what the engine's counters gained: tokens looked up and found."""
        backend = self.backend
        in_flight = backend.in_flight
        if in_flight > self._peak:
            self._peak = in_flight
        if backend.state is not self._seen[0] or backend.draining is not self._seen[1]:
            self.note_state(sample)
        report = backend.report
        if report is self._report:
            return 0.0, 0.0
        self.reported_at = sample
        return self._read(report)

    def told(self, sample: int, stale_after: int) -> bool:
        """Whether what the engine last reported is news enough to be shown as the present."""
        return self.backend.report.at > float("-inf") and sample - self.reported_at <= stale_after

    def _read(self, report: EngineReport) -> tuple[float, float]:
        self._report = report
        queried, hits = report.prefix_queries, report.prefix_hits
        if queried is None or hits is None:
            return 0.0, 0.0
        more_queried, more_hits = queried - self._queried, hits - self._hits
        self._queried, self._hits = queried, hits
        # the first report is where counting begins, and a counter that went back is another process
        if not (more_queried >= 0 and more_hits >= 0):
            return 0.0, 0.0
        self._step_queried += more_queried
        self._step_hits += more_hits
        return more_queried, more_hits

    def end_step(self, metrics: Metrics, told: bool) -> None:
        backend = self.backend
        name = backend.name
        counts = metrics.by_backend.get(name)
        attempts = failed = ttft_count = 0
        ttft_sum_s = 0.0
        if counts is not None:
            attempts, failed = counts.attempts, counts.failed
            ttft_count, ttft_sum_s = counts.ttft_count, counts.ttft_sum_s
        prompt = metrics.prompt_tokens.get(name, 0)
        predicted = metrics.matched_predicted.get(name, 0)
        report = backend.report
        self.ring.append(
            (
                self._peak,
                report.running if told and report.running is not None else NAN,
                report.waiting if told and report.waiting is not None else NAN,
                report.kv_usage if told and report.kv_usage is not None else NAN,
                max(attempts - self._attempts, 0),
                max(failed - self._failed, 0),
                max(ttft_sum_s - self._ttft_sum_s, 0.0),
                max(ttft_count - self._ttft_count, 0),
                max(prompt - self._prompt, 0),
                max(predicted - self._predicted, 0),
                self._step_queried,
                self._step_hits,
            )
        )
        self._attempts, self._failed = attempts, failed
        self._ttft_sum_s, self._ttft_count = ttft_sum_s, ttft_count
        self._prompt, self._predicted = prompt, predicted
        self._step_queried = self._step_hits = 0.0
        self._peak = backend.in_flight

    def skip_step(self) -> None:
        self.ring.append((NAN,) * len(BACKEND_COLUMNS))


class Recorder:
    """Samples once a second from `start()` to `stop()`. `queued` tells how many requests wait for a place now,
    `poll_interval_s` how often engines are asked for their figures.

    `samples` counts the seconds since `start`, those in which the loop stood still included (as NaN): it is the time
    axis of all that is kept.
    """

    def __init__(
        self,
        clock: Clock,
        registry: Registry,
        metrics: Metrics,
        queued: Callable[[], int],
        *,
        poll_interval_s: float = 0.0,
    ) -> None:
        self._clock = clock
        self._registry = registry
        self._metrics = metrics
        self._queued = queued
        self.poll_every(poll_interval_s)
        self._timer: TimerHandle | None = None
        self._next_at = 0.0
        self._numbers = 0
        self._fleet: tuple[Backend, ...] = ()
        self._followed: dict[Backend, BackendHistory] = {}
        self._requests = self._failed = self._refused = self._invalid = self._left = 0
        self._prompt = self._predicted = 0
        self.totals = Ring(TOTAL_COLUMNS, KEPT_S, "d")
        self.ttft = RecentHistogram(metrics.ttft)
        self.queue_time = RecentHistogram(metrics.queue_time)

    def poll_every(self, interval_s: float) -> None:
        """How often engines are asked from now on, by which their silence is judged."""
        self.stale_after = round(max(STALE_AFTER_S, 3 * interval_s) / SAMPLE_S)  # samples

    @property
    def samples(self) -> int:
        return self.totals.count

    @property
    def steps(self) -> int:
        """Steps of the backends' histories that ended."""
        return self.samples // STEP_S

    @property
    def followed(self) -> dict[Backend, BackendHistory]:
        """The backends with a history, at most TRACKED, in the order of the fleet."""
        return self._followed

    def start(self) -> None:
        if self._timer is None:
            self._follow()
            self._count_requests()  # what was counted before belongs to no second
            self._next_at = self._clock.now() + SAMPLE_S
            self._timer = self._clock.call_later(SAMPLE_S, self._tick)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def memory_bytes(self) -> int:
        """Of the rings, without the objects that hold them."""
        return self.totals.memory_bytes() + sum(h.ring.memory_bytes() for h in self._followed.values())

    def _tick(self) -> None:
        now = self._clock.now()
        missed = min(int((now - self._next_at) / SAMPLE_S), KEPT_S)
        for _ in range(missed):
            self._skip()
        self.sample(SAMPLE_S * (1 + missed))
        self._next_at = max(self._next_at + SAMPLE_S * (1 + missed), now)
        self._timer = self._clock.call_later(max(self._next_at - now, 0.0), self._tick)

    def _skip(self) -> None:
        """A second in which the loop ran nothing of ours."""
        self.totals.append((NAN,) * len(TOTAL_COLUMNS))
        if self.samples % STEP_S == 0:
            for history in self._followed.values():
                history.skip_step()

    def sample(self, elapsed_s: float = SAMPLE_S) -> None:
        """One row, of what was counted in the `elapsed_s` since the last."""
        if self._registry.backends is not self._fleet:
            self._follow()
        metrics = self._metrics
        sample = self.samples + 1
        in_flight = 0
        queried = hits = 0.0
        for history in self._followed.values():
            in_flight += history.backend.in_flight
            more_queried, more_hits = history.sample(sample)
            queried += more_queried
            hits += more_hits
        if len(self._followed) < len(self._fleet):
            in_flight = sum(backend.in_flight for backend in self._fleet)
        self.ttft.sample()
        self.queue_time.sample()
        requests, failed, refused, invalid, left = self._count_requests()
        prompt, predicted = sum(metrics.prompt_tokens.values()), sum(metrics.matched_predicted.values())
        self.totals.append(
            (
                in_flight,
                self._queued(),
                round(requests / elapsed_s, 3),
                round(failed / elapsed_s, 3),
                round(refused / elapsed_s, 3),
                round(invalid / elapsed_s, 3),
                round(left / elapsed_s, 3),
                round(self.ttft.last_second(0.5), 4),
                round(self.ttft.last_second(0.99), 4),
                max(prompt - self._prompt, 0),  # a sum falls when a backend is removed
                max(predicted - self._predicted, 0),
                queried,
                hits,
            )
        )
        self._prompt, self._predicted = prompt, predicted
        if sample % STEP_S == 0:
            for history in self._followed.values():
                history.end_step(metrics, history.told(sample, self.stale_after))

    def _follow(self) -> None:
        """Follow those that came, as far as there is room, and forget those that went."""
        self._fleet = self._registry.backends
        before, self._followed = self._followed, {}
        for backend in self._fleet[:TRACKED]:
            history = before.get(backend)
            if history is None:
                self._numbers += 1
                ring = Ring(BACKEND_COLUMNS, BACKEND_STEPS, "f")
                history = BackendHistory(backend, self._numbers, self.samples, ring)
            self._followed[backend] = history

    def _count_requests(self) -> tuple[int, int, int, int, int]:
        """What ended since the last call: all, failed, refused, invalid, left."""
        requests = failed = refused = invalid = left = 0
        for code, count in self._metrics.codes.items():
            requests += count
            if code == 499:
                left += count
            elif code in (429, 503):
                refused += count
            elif code >= 500:
                failed += count
            elif code >= 400:
                invalid += count
        # the status of an answer that broke after its first byte was 200
        failed += self._metrics.ended.get(("upstream", "streaming"), 0)
        failed += self._metrics.ended.get(("gateway", "streaming"), 0)
        gained = (
            requests - self._requests,
            failed - self._failed,
            refused - self._refused,
            invalid - self._invalid,
            left - self._left,
        )
        self._requests, self._failed, self._refused = requests, failed, refused
        self._invalid, self._left = invalid, left
        return gained
