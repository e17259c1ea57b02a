"""What the page shows now, as JSON: whole at its first question, later only what changed since its last one.

The fleet is looked at once per sample of the recorder however many pages are open, and not at all while none is. Of a
page the server keeps nothing: each question says what it has. Of client text an answer has request ids alone, cut.
"""

from __future__ import annotations

import secrets
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import orjson

from router.backends.backend import Backend
from router.backends.registry import Registry
from router.dashboard.history import (
    BACKEND_COLUMNS,
    BACKEND_STEPS,
    HIT_WINDOW_S,
    HIT_WINDOW_STEPS,
    KEPT_S,
    STEP_S,
    TOTAL_COLUMNS,
    WINDOW_S,
    WINDOW_STEPS,
    BackendHistory,
    Recorder,
)
from router.proxy.decisions import Decision

DECISIONS_SHOWN: Final = 50
SPARKS_LIMIT: Final = 64  # backends whose load over time one question may ask for
MODELS_SHOWN: Final = 8
WINDOWS_AT_ONCE: Final = 128  # backends whose figures of the last minute are made anew at one look
TEXT_LIMIT_CHARS: Final = 200
ID_LIMIT_CHARS: Final = 64


@dataclass(frozen=True, slots=True)
class Question:
    """What a page has already: `after` is the sample and `decision` the number that it got last, both 0 at first, of
    the process `boot`. `sparks` and `detail` are numbers of backends; `detail_step` is the step that it has of the
    latter."""

    boot: str = ""
    after: int = 0
    decision: int = 0
    sparks: tuple[int, ...] = ()
    detail: int = 0
    detail_step: int = -1


class Live:
    """`decisions` are the last ones, oldest first; `hit_accounting` gives the figures of one backend, by name; `about`
    what is told of the gateway itself (`version`, `strategy`, `draining`). All are called on the event loop."""

    def __init__(
        self,
        recorder: Recorder,
        registry: Registry,
        *,
        decisions: Callable[[], Sequence[Decision]],
        hit_accounting: Callable[[Backend], Mapping[str, object]],
        about: Callable[[], Mapping[str, object]],
    ) -> None:
        self._recorder = recorder
        self._registry = registry
        self._recent_decisions = decisions
        self._hit_accounting = hit_accounting
        self._about = about
        self._boot = secrets.token_hex(8)
        self._looked_at = -1  # the sample of what is below
        self._rows: dict[int, tuple[int, dict[str, Any]]] = {}  # number -> (sample of its last change, row)
        self._windows: dict[int, tuple[int, dict[str, float | None]]] = {}  # number -> (step, figures)
        self._order: list[int] = []
        self._order_changed_at = 0
        self._summary: dict[str, Any] = {}
        self._dark: list[str] = []
        self._dark_version = -1
        self._decisions: deque[tuple[int, Decision]] = deque(maxlen=DECISIONS_SHOWN)
        self._decision_count = 0

    def answer(self, question: Question) -> bytes:
        recorder = self._recorder
        self._look()
        same = question.boot == self._boot and question.after <= recorder.samples
        after = question.after if same else 0
        told: dict[str, Any] = {"boot": self._boot, "sample": recorder.samples, "steps": recorder.steps}
        if not same or after == 0:
            told["limits"] = {
                "kept_s": KEPT_S,
                "step_s": STEP_S,
                "window_s": WINDOW_S,
                "hit_window_s": HIT_WINDOW_S,
                "lowest_s": recorder.ttft.lowest_s,
            }
        if after < recorder.samples or not same or after == 0:
            told["summary"] = self._summary
            if self._order_changed_at > after or not after:
                told["order"] = self._order
            if rows := [row for changed_at, row in self._rows.values() if changed_at > after or not after]:
                told["backends"] = rows
            fresh = recorder.samples - after
            told["totals"] = {name: recorder.totals.last(name, fresh) for name in TOTAL_COLUMNS}
        told |= self._tell_decisions(question.decision if same else 0)
        told |= self._tell_histories(question, same)
        return orjson.dumps(told)

    # -- looking, once per sample

    def _look(self) -> None:
        recorder = self._recorder
        if self._looked_at == recorder.samples:
            return
        self._looked_at = recorder.samples
        self._renew_windows()
        rows = {}
        for history in recorder.followed.values():
            row = self._row(history)
            before = self._rows.get(history.number)
            changed_at = before[0] if before is not None and before[1] == row else recorder.samples
            rows[history.number] = (changed_at, row)
        if rows.keys() != self._rows.keys():
            self._order = list(rows)
            self._order_changed_at = recorder.samples
        self._rows = rows
        self._summary = self._summarize()
        self._number_decisions()

    def _renew_windows(self) -> None:
        """Of those whose step ended: in a large fleet some at each look, so that none holds the loop for long."""
        followed, steps = self._recorder.followed, self._recorder.steps
        before, self._windows = self._windows, {}
        left = max(WINDOWS_AT_ONCE, len(followed) // (STEP_S - 1))
        for history in followed.values():
            known = before.get(history.number)
            if left and (known is None or known[0] != steps):
                left -= 1
                known = (steps, _window(history))
            if known is not None:
                self._windows[history.number] = known

    def _row(self, history: BackendHistory) -> dict[str, Any]:
        backend = history.backend
        report = backend.report
        windows = self._windows.get(history.number)
        told = history.told(self._recorder.samples, self._recorder.stale_after)
        return {
            "id": history.number,
            "name": _cut(backend.name),
            "url": _cut(backend.url),
            "state": backend.state.value,
            "serving": backend.serving,
            "draining": backend.draining,
            "deleted": backend.deleted,
            "why": _cut(backend.why),
            "since": history.changed_at,
            "models": [_cut(model) for model in islice(backend.models, MODELS_SHOWN)],
            "models_count": len(backend.models),
            "in_flight": backend.in_flight,
            "running": report.running if told else None,
            "waiting": report.waiting if told else None,
            "kv_usage": _rounded(report.kv_usage) if told else None,
            **(windows[1] if windows is not None else _NOTHING_YET),
        }

    def _summarize(self) -> dict[str, Any]:
        recorder, fleet = self._recorder, self._registry.backends
        if self._dark_version != self._registry.version:
            self._dark_version = self._registry.version
            self._dark = _models_without_backend(fleet)
        totals = recorder.totals
        window = min(WINDOW_S, recorder.samples)

        def per_second(name: str) -> float | None:
            return round(totals.sum(name, window) / window, 3) if window else None

        def ratio(part: str, whole: str) -> float | None:
            all_of_it = totals.sum(whole, HIT_WINDOW_S)
            return round(totals.sum(part, HIT_WINDOW_S) / all_of_it, 4) if all_of_it else None

        states = Counter(backend.state.value for backend in fleet if not backend.draining)
        followed = recorder.followed
        unlisted = [backend for backend in fleet if backend not in followed]
        return {
            **self._about(),
            "backends": len(fleet),
            "serving": sum(backend.serving for backend in fleet),
            "draining_backends": sum(backend.draining for backend in fleet),
            "states": states,
            "unlisted": len(unlisted),
            "unlisted_out": sum(not backend.serving for backend in unlisted),
            "models_without_backend": self._dark[:MODELS_SHOWN],
            "models_without_backend_count": len(self._dark),
            "in_flight": sum(backend.in_flight for backend in fleet),
            "queued": _last(totals.last("queued", 1)),
            "requests_per_s": per_second("requests"),
            "failed_per_s": per_second("failed"),
            "refused_per_s": per_second("refused"),
            "invalid_per_s": per_second("invalid"),
            "left_per_s": per_second("left"),
            "ttft_p50_s": _rounded(recorder.ttft.window(0.5)),
            "ttft_p99_s": _rounded(recorder.ttft.window(0.99)),
            "queue_p99_s": _rounded(recorder.queue_time.window(0.99)),
            "predicted_ratio": ratio("predicted_tokens", "prompt_tokens"),
            "reported_ratio": ratio("hit_tokens", "queried_tokens"),
        }

    # -- decisions and histories

    def _number_decisions(self) -> None:
        """Number those that came since the last look; what fell out of the ring meanwhile is not missed here."""
        newest = self._decisions[-1][1] if self._decisions else None
        fresh = []
        for decision in reversed(self._recent_decisions()):
            if decision is newest:
                break
            fresh.append(decision)
        for decision in reversed(fresh):
            self._decision_count += 1
            self._decisions.append((self._decision_count, decision))

    def _tell_decisions(self, after: int) -> dict[str, Any]:
        fresh = [_decision(number, decision) for number, decision in self._decisions if number > after]
        return {"decisions": fresh} if fresh else {}

    def _tell_histories(self, question: Question, same: bool) -> dict[str, Any]:
        told: dict[str, Any] = {}
        wanted = {*question.sparks[:SPARKS_LIMIT], question.detail} if same else set()
        found = {h.number: h for h in self._recorder.followed.values() if h.number in wanted} if wanted else {}
        if sparks := [found[number] for number in question.sparks[:SPARKS_LIMIT] if number in found]:
            told["sparks"] = {str(h.number): h.ring.last("in_flight", BACKEND_STEPS) for h in sparks}
        if question.detail and same:
            history = found.get(question.detail)
            if history is None:
                told["detail"] = None
            elif question.detail_step != self._recorder.steps:
                told["detail"] = self._detail(history)
        return told

    def _detail(self, history: BackendHistory) -> dict[str, Any]:
        backend = history.backend
        figures = {
            name: value
            for name, value in self._hit_accounting(backend).items()
            if value is None or isinstance(value, int | float)
        }
        return {
            "id": history.number,
            "weight": backend.weight,
            "kv_capacity_tokens": backend.report.kv_capacity_tokens,
            "hits": figures,
            "series": {name: _series(history.ring.last(name, BACKEND_STEPS)) for name in BACKEND_COLUMNS},
        }


_NOTHING_YET: Final[dict[str, float | None]] = dict.fromkeys(
    ("attempts_per_s", "failed_per_s", "ttft_mean_s", "predicted_ratio", "reported_ratio")
)


def _window(history: BackendHistory) -> dict[str, float | None]:
    """Figures of one backend over WINDOW_S, hit ratios over HIT_WINDOW_S."""
    ring = history.ring
    steps = min(ring.count, WINDOW_STEPS)
    if not steps:
        return _NOTHING_YET
    first_bytes = ring.sum("ttft_count", steps)
    prompt = ring.sum("prompt_tokens", HIT_WINDOW_STEPS)
    queried = ring.sum("queried_tokens", HIT_WINDOW_STEPS)
    return {
        "attempts_per_s": round(ring.sum("attempts", steps) / (steps * STEP_S), 3),
        "failed_per_s": round(ring.sum("failed", steps) / (steps * STEP_S), 3),
        "ttft_mean_s": round(ring.sum("ttft_sum_s", steps) / first_bytes, 4) if first_bytes else None,
        "predicted_ratio": round(ring.sum("predicted_tokens", HIT_WINDOW_STEPS) / prompt, 4) if prompt else None,
        "reported_ratio": round(ring.sum("hit_tokens", HIT_WINDOW_STEPS) / queried, 4) if queried else None,
    }


def _models_without_backend(fleet: Sequence[Backend]) -> list[str]:
    """Models that some backend lists and none of those that serve."""
    known: set[str] = set()
    served: set[str] = set()
    for backend in fleet:
        if not backend.deleted:
            known.update(backend.models)
        if backend.serving:
            served.update(backend.models)
    return sorted(_cut(model) for model in known - served)


def _decision(number: int, decision: Decision) -> dict[str, Any]:
    return {
        "number": number,
        "at": round(decision.at, 3),
        "request_id": _cut(decision.request_id[:ID_LIMIT_CHARS].decode("latin-1")),
        "attempt": decision.attempt,
        "model": _cut(decision.model),
        "backend": _cut(decision.backend),
        "reason": decision.reason,
        "matched_tokens": decision.matched_tokens,
        "prompt_tokens": decision.prompt_tokens,
        "load": decision.load,
        "took_s": round(decision.took_s, 6),
    }


def _cut(text: str) -> str:
    """Short and printable: a lone surrogate is legal in an engine's JSON and not in ours, and marks that turn the
    direction of writing would make a line say something else."""
    if len(text) > TEXT_LIMIT_CHARS:
        text = text[: TEXT_LIMIT_CHARS - 1] + "…"
    return text if text.isprintable() else "".join([char if char.isprintable() else "\ufffd" for char in text])


def _rounded(value: float | None) -> float | None:
    return None if value is None or value != value else round(value, 4)


def _last(values: Sequence[float]) -> float | None:
    return _rounded(values[-1]) if values else None


def _series(values: list[float]) -> list[float]:
    return [round(value, 4) for value in values]
