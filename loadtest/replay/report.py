"""What a replay saw: gathered request by request, then rendered for people and as JSON. Times in seconds."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from loadtest.chat_stream import ChatStream
from loadtest.replay.engine_counters import EngineShare, imbalance

MAX_KINDS: Final = 50  # of errors, backends, reasons: what the other side writes is bounded
OTHER: Final = "other"
# Gaps are counted in classes that are 2% wide, from 1 us to above an hour: a day of streams costs no memory.
CLASS_WIDTH: Final = 1.02
LEAST_S: Final = 1e-6
CLASSES: Final = math.ceil(math.log(4000.0 / LEAST_S, CLASS_WIDTH))


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """The least value that `share` of all are at most; None of nothing. `ordered` is sorted."""
    if not ordered:
        return None
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


class GapHistogram:
    """Quantiles of any number of durations, each right within half a class (1%)."""

    def __init__(self) -> None:
        self._counts = array("Q", bytes(8 * (CLASSES + 1)))
        self.count = 0
        self._total = 0.0

    def add(self, seconds: float) -> None:
        at = math.ceil(math.log(seconds / LEAST_S, CLASS_WIDTH)) if seconds > LEAST_S else 0
        self._counts[min(at, CLASSES)] += 1
        self.count += 1
        self._total += seconds

    @property
    def mean(self) -> float | None:
        return self._total / self.count if self.count else None

    def quantile(self, share: float) -> float | None:
        if not self.count:
            return None
        wanted = max(math.ceil(share * self.count), 1)
        seen = 0
        for at, count in enumerate(self._counts):
            seen += count
            if seen >= wanted:
                return LEAST_S * CLASS_WIDTH ** (at - 0.5) if at else 0.0
        raise AssertionError("more counted than there is")


def count(counter: Counter[str], kind: str, by: int = 1) -> None:
    """Into its own class, or the common one when there are MAX_KINDS already."""
    counter[kind if kind in counter or len(counter) < MAX_KINDS else OTHER] += by


@dataclass(slots=True)
class Tally:
    """The answers so far."""

    ttfts_s: array[float] = field(default_factory=lambda: array("d"))
    e2es_s: array[float] = field(default_factory=lambda: array("d"))
    gaps: GapHistogram = field(default_factory=GapHistogram)
    answered: int = 0
    interrupted: int = 0  # under way when the replay was ended
    errors: Counter[str] = field(default_factory=Counter)
    backends: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    asked_tokens: int = 0  # prompts as the trace has them, of the answers with usage
    prompt_tokens: int = 0  # as the engines count them
    cached_tokens: int = 0
    cached_answers: int = 0  # whose usage tells cached_tokens
    matched_tokens: int = 0  # what the gateway expected to be cached
    output_tokens: int = 0

    def answer(
        self, stream: ChatStream, asked_tokens: int, e2e_s: float, backend: str, reason: str, matched: int
    ) -> None:
        """A whole answer."""
        self.answered += 1
        if stream.ttft_s is not None:
            self.ttfts_s.append(stream.ttft_s)
        self.e2es_s.append(e2e_s)
        for gap_s in stream.gaps_s:
            self.gaps.add(gap_s)
        if backend:
            count(self.backends, backend)
        if reason:
            count(self.reasons, reason)
        self.matched_tokens += matched
        if stream.prompt_tokens is not None:
            self.asked_tokens += asked_tokens
            self.prompt_tokens += stream.prompt_tokens
            self.output_tokens += stream.output_tokens or 0
            if stream.cached_tokens is not None:
                self.cached_answers += 1
                self.cached_tokens += stream.cached_tokens

    def error(self, kind: str) -> None:
        count(self.errors, kind)

    @property
    def failed(self) -> int:
        return self.errors.total()

    @property
    def cached_share(self) -> float | None:
        return self.cached_tokens / self.prompt_tokens if self.cached_answers and self.prompt_tokens else None


@dataclass(frozen=True, slots=True)
class Times:
    """Of one duration over all answers, in seconds; None where there was none."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """One replay, ended or interrupted."""

    trace: str
    target: str
    model: str
    speed: float
    calibration: str
    requests: int  # of the trace within the limit
    sent: int
    not_sent: int  # due while the client was at its bound
    too_long: int  # left out: above the model's context
    left: int  # not reached: the replay was interrupted
    late: int
    latest_s: float
    took_s: float
    interrupted: bool
    tally: Tally
    engines: tuple[EngineShare, ...]
    engine_faults: tuple[str, ...]  # why an engine's counters are missing

    @property
    def clean(self) -> bool:
        """Whether everything that was due was sent and answered."""
        return not (self.tally.errors or self.not_sent)

    @property
    def hit_ratio(self) -> float | None:
        """The engines' own; None where they were not asked, or one of them did not tell."""
        queried = sum(engine.queried_tokens for engine in self.engines)
        if self.engine_faults or not queried:
            return None
        return sum(engine.hit_tokens for engine in self.engines) / queried

    @property
    def imbalance(self) -> float | None:
        """Of computed prompt tokens over the engines; None where one of them is not known."""
        if self.engine_faults or not self.engines:
            return None
        return imbalance([engine.computed_tokens for engine in self.engines])

    @property
    def request_imbalance(self) -> float | None:
        """Of answers over the backends that answered."""
        return imbalance(list(self.tally.backends.values())) if self.tally.backends else None

    @property
    def ttft(self) -> Times:
        return _times(self.tally.ttfts_s)

    @property
    def e2e(self) -> Times:
        return _times(self.tally.e2es_s)

    @property
    def itl(self) -> Times:
        gaps = self.tally.gaps
        return Times(gaps.mean, gaps.quantile(0.5), gaps.quantile(0.9), gaps.quantile(0.99))

    def as_json(self) -> dict[str, Any]:
        """All figures under names that end in their unit."""
        tally = self.tally
        return {
            "trace": self.trace,
            "target": self.target,
            "model": self.model,
            "speed": self.speed,
            "calibration": self.calibration,
            "interrupted": self.interrupted,
            "took_s": self.took_s,
            "requests": {
                "due": self.requests,
                "sent": self.sent,
                "answered": tally.answered,
                "failed": tally.failed,
                "interrupted": tally.interrupted,
                "not_sent": self.not_sent,
                "too_long": self.too_long,
                "left": self.left,
                "late": self.late,
                "latest_s": self.latest_s,
            },
            "errors": dict(tally.errors.most_common()),
            "ttft_s": _times_json(self.ttft),
            "itl_s": _times_json(self.itl),
            "e2e_s": _times_json(self.e2e),
            "tokens": {
                "prompt_in_trace": tally.asked_tokens,
                "prompt": tally.prompt_tokens,
                "output": tally.output_tokens,
                "cached_by_usage": tally.cached_tokens if tally.cached_answers else None,
                "matched_by_gateway": tally.matched_tokens,
            },
            "hit_ratio": self.hit_ratio,
            "hit_ratio_by_usage": tally.cached_share,
            "imbalance": self.imbalance,
            "request_imbalance": self.request_imbalance,
            "engines": [
                {
                    "url": engine.url,
                    "queried_tokens": engine.queried_tokens,
                    "hit_tokens": engine.hit_tokens,
                    "hit_ratio": engine.hit_ratio,
                }
                for engine in self.engines
            ],
            "engine_faults": list(self.engine_faults),
            "backends": dict(sorted(tally.backends.items())),
            "reasons": dict(tally.reasons.most_common()),
        }

    def as_text(self) -> str:
        tally = self.tally
        lines = [
            f"{self.trace} x {self.speed:g} at {self.target}, model {self.model}: {self.took_s:.1f} s"
            + (", interrupted" if self.interrupted else ""),
            f"requests   {self.requests} due, {self.sent} sent, {tally.answered} answered, {tally.failed} failed"
            + (f", {tally.interrupted} interrupted" if tally.interrupted else "")
            + (f", {self.left} not reached" if self.left else ""),
        ]
        if self.not_sent:
            lines.append(f"not sent   {self.not_sent}: the bound on requests in flight was reached when they were due")
        if self.too_long:
            lines.append(f"too long   {self.too_long} left out: above the model's context")
        if self.late:
            lines.append(f"late       {self.late} sent above 50 ms late, at most {self.latest_s:.2f} s: a slow client")
        lines += (f"error      {times} times: {kind}" for kind, times in tally.errors.most_common())
        lines.append(f"{'':11}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}")
        for name, times in (("TTFT", self.ttft), ("ITL", self.itl), ("E2E", self.e2e)):
            shown = (times.mean, times.p50, times.p90, times.p99)
            lines.append(f"{name:11}" + "".join(f"{milliseconds(value):>10}" for value in shown))
        lines.append(f"tokens     {self._tokens()}")
        lines.append(f"hit ratio  {self._hit_ratios()}")
        for engine in self.engines:
            lines.append(
                f"  {engine.url}  {percent(engine.hit_ratio)} of {engine.queried_tokens:,} tokens, "
                f"{engine.computed_tokens:,} computed"
            )
        lines += (f"  {fault}" for fault in self.engine_faults)
        if self.imbalance is not None:
            lines.append(f"imbalance  {self.imbalance:.2f} (computed prompt tokens, busiest engine by mean)")
        if tally.backends:
            shown_backends = ", ".join(f"{name} {times}" for name, times in sorted(tally.backends.items()))
            lines.append(f"backends   {shown_backends}; imbalance {self.request_imbalance or 1:.2f}")
        if tally.reasons:
            lines.append("reasons    " + ", ".join(f"{name} {times}" for name, times in tally.reasons.most_common()))
        return "\n".join(lines)

    def _tokens(self) -> str:
        tally = self.tally
        if not tally.prompt_tokens:
            return f"no usage was told ({self.calibration})"
        off = tally.prompt_tokens / tally.asked_tokens - 1
        return (
            f"{tally.prompt_tokens:,} of prompts, {off:+.1%} against the trace ({self.calibration}); "
            f"{tally.output_tokens:,} of answers"
        )

    def _hit_ratios(self) -> str:
        tally = self.tally
        told = []
        if self.hit_ratio is not None:
            told.append(f"{percent(self.hit_ratio)} by the engines' counters")
        if tally.cached_share is not None:
            told.append(f"{percent(tally.cached_share)} by usage")
        if tally.backends and tally.prompt_tokens:
            told.append(f"{percent(tally.matched_tokens / tally.prompt_tokens)} expected by the gateway")
        return ", ".join(told) or "not told: give --engines, or let engines tell cached_tokens"


def _times(values: Sequence[float]) -> Times:
    ordered = sorted(values)
    mean = math.fsum(ordered) / len(ordered) if ordered else None
    return Times(mean, quantile(ordered, 0.5), quantile(ordered, 0.9), quantile(ordered, 0.99))


def _times_json(times: Times) -> dict[str, float | None]:
    return {"mean": times.mean, "p50": times.p50, "p90": times.p90, "p99": times.p99}


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.01 else f"{1e3 * seconds:.1f} ms"
