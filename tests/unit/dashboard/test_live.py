"""What the page is told: all at first, later what changed, and nothing of clients but the ids of their requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
import pytest

from router.backends.backend import Backend, State
from router.backends.in_flight import InFlight
from router.dashboard.history import BACKEND_COLUMNS, KEPT_S, STEP_S, TOTAL_COLUMNS, TRACKED
from router.dashboard.live import DECISIONS_SHOWN, MODELS_SHOWN, SPARKS_LIMIT, TEXT_LIMIT_CHARS, Live, Question
from router.proxy.decisions import Decisions
from router.strategies.strategy import Choice, Reason, RoutingRequest
from tests.unit.dashboard.test_history import Fleet


class Told(Fleet):
    """A fleet with what a page is told of it."""

    def __init__(self, *names: str) -> None:
        super().__init__(*names)
        self.decisions = Decisions()
        self.hits: Mapping[str, object] = {"predicted_tokens": 10, "trust": 0.5, "trusted": True}
        self.live = Live(
            self.recorder,
            self.registry,
            decisions=self.decisions.recent,
            hit_accounting=lambda backend: self.hits,
            about=lambda: {"version": "1", "strategy": "prefixaware", "draining": False},
        )

    def ask(self, **question: Any) -> dict[str, Any]:
        answer: dict[str, Any] = orjson.loads(self.live.answer(Question(**question)))
        return answer

    def later(self, seconds: int, before: Mapping[str, Any], **question: Any) -> dict[str, Any]:
        """What a page that has `before` is told after so many seconds."""
        self.clock.advance(seconds)
        return self.ask(boot=before["boot"], after=before["sample"], **question)

    def decide(self, backend: Backend, request_id: bytes = b"id-1") -> None:
        choice = Choice(RoutingRequest("m", 0.0), backend, Reason.PREFIX)
        self.decisions.add(request_id, 1, 3, 0.000_25, choice)


def test_the_first_answer_has_everything() -> None:
    fleet = Told("a", "b")
    fleet.registry.set_state(fleet.backends[1], State.DOWN, "refused")
    fleet.decide(fleet.backends[0])
    fleet.clock.advance(3)
    told = fleet.ask()
    assert told["sample"] == 3
    assert told["limits"]["kept_s"] == KEPT_S
    assert told["order"] == [1, 2]
    a, b = told["backends"]
    assert (a["name"], a["url"], a["state"], a["serving"], a["why"]) == ("a", "http://a:8000", "up", True, "")
    assert (b["state"], b["serving"], b["why"]) == ("down", False, "refused")
    assert a["models"] == ["m"]
    assert (a["running"], a["kv_usage"]) == (None, None)  # no report was taken
    assert {name: len(values) for name, values in told["totals"].items()} == dict.fromkeys(TOTAL_COLUMNS, 3)
    assert told["totals"]["ttft_p50"] == [None] * 3
    assert told["summary"]["backends"] == 2
    assert told["summary"]["serving"] == 1
    assert told["summary"]["states"] == {"up": 1, "down": 1}
    assert told["summary"]["strategy"] == "prefixaware"
    (decision,) = told["decisions"]
    assert decision["request_id"] == "id-1"
    assert (decision["backend"], decision["reason"], decision["load"], decision["number"]) == ("a", "prefix", 3, 1)


def test_where_nothing_changed_the_answer_is_small() -> None:
    fleet = Told(*(f"gpu-{at}" for at in range(64)))
    fleet.decide(fleet.backends[0])
    fleet.clock.advance(20)
    first = fleet.ask()
    same = fleet.ask(boot=first["boot"], after=first["sample"], decision=1)
    assert same.keys() == {"boot", "sample", "steps"}
    answer = fleet.live.answer(Question(first["boot"], first["sample"], 1))
    assert len(answer) < 100
    later = fleet.later(1, first, decision=1)
    assert later.keys() == {"boot", "sample", "steps", "summary", "totals"}
    assert len(orjson.dumps(later)) < 1500


def test_a_row_is_told_again_when_it_changed_and_to_each_page_that_has_not_seen_that() -> None:
    fleet = Told("a", "b")
    fleet.clock.advance(5)
    first = fleet.ask()
    guard = InFlight(fleet.backends[1])
    second = fleet.later(1, first)
    assert [(row["name"], row["in_flight"]) for row in second["backends"]] == [("b", 1)]
    assert "backends" not in fleet.later(1, second)
    assert [row["name"] for row in fleet.ask(boot=first["boot"], after=first["sample"])["backends"]] == ["b"]
    guard.release()


def test_what_changes_after_a_look_is_told_with_the_next_sample() -> None:
    fleet = Told("a")
    fleet.clock.advance(1)
    first = fleet.ask()
    guard = InFlight(fleet.backends[0])
    again = fleet.ask(boot=first["boot"], after=first["sample"])
    assert "backends" not in again
    assert [row["in_flight"] for row in fleet.later(1, again)["backends"]] == [1]
    guard.release()


def test_backends_that_come_and_go_change_the_order() -> None:
    fleet = Told("a", "b")
    fleet.clock.advance(1)
    first = fleet.ask()
    fleet.registry.remove("a")
    fleet.add("c")
    second = fleet.later(1, first)
    assert second["order"] == [2, 3]
    assert [row["name"] for row in second["backends"]] == ["c"]
    assert "order" not in fleet.later(1, second)


def test_a_page_of_another_process_gets_everything_anew() -> None:
    fleet = Told("a")
    fleet.clock.advance(10)
    told = fleet.ask(boot="of-a-process-that-ended", after=5, decision=99, sparks=(1,), detail=1)
    assert len(told["totals"]["requests"]) == 10
    assert told["order"] == [1]
    assert "limits" in told
    assert "sparks" not in told  # numbers of that process mean nothing here
    assert "detail" not in told
    assert len(fleet.ask(boot=told["boot"], after=11)["totals"]["requests"]) == 10  # a sample that was not yet


def test_a_page_that_slept_gets_what_is_kept() -> None:
    fleet = Told("a")
    fleet.clock.advance(1)
    first = fleet.ask()
    late = fleet.later(2 * KEPT_S, first)
    assert late["sample"] == 1 + 2 * KEPT_S
    assert len(late["totals"]["requests"]) == KEPT_S


def test_decisions_are_told_once_newest_last_and_no_more_than_are_shown() -> None:
    fleet = Told("a")
    (a,) = fleet.backends
    for at in range(3):
        fleet.decide(a, b"%d" % at)
    fleet.clock.advance(1)
    first = fleet.ask()
    assert [decision["request_id"] for decision in first["decisions"]] == ["0", "1", "2"]
    fleet.decide(a, b"3")
    second = fleet.later(1, first, decision=3)
    assert [(decision["number"], decision["request_id"]) for decision in second["decisions"]] == [(4, "3")]
    for at in range(1000):  # the ring turns over within one second
        fleet.decide(a, b"%d" % at)
    third = fleet.later(1, second, decision=4)
    assert len(third["decisions"]) == DECISIONS_SHOWN
    assert third["decisions"][-1]["request_id"] == "999"
    assert fleet.later(1, third, decision=third["decisions"][-1]["number"]).get("decisions") is None


def test_a_request_id_is_cut_and_may_be_any_bytes() -> None:
    fleet = Told("a")
    fleet.decide(fleet.backends[0], b"\xff<b>" + b"x" * 500)
    fleet.clock.advance(1)
    (decision,) = fleet.ask()["decisions"]
    assert decision["request_id"].startswith("\xff<b>x")
    assert len(decision["request_id"]) == 64


def test_names_of_any_kind_and_length_are_text() -> None:
    fleet = Told()
    backend = fleet.registry.add('<img src=x onerror="alert(1)">', "http://a", models=())
    fleet.registry.set_state(backend, State.DOWN, "w" * 1000)
    backend.models = {
        "\ud800<script>": {},
        "\u202etxt\n": {},
        "m" * 1000: {},
        **{f"lora-{at}": {} for at in range(100)},
    }
    fleet.clock.advance(1)
    told = fleet.ask()
    (row,) = told["backends"]
    assert row["name"] == '<img src=x onerror="alert(1)">'
    assert len(row["why"]) == TEXT_LIMIT_CHARS
    assert row["models"][:2] == ["\ufffd<script>", "\ufffdtxt\ufffd"]
    assert len(row["models"][2]) == TEXT_LIMIT_CHARS
    assert len(row["models"]) == MODELS_SHOWN
    assert row["models_count"] == 103
    assert len(told["summary"]["models_without_backend"]) == MODELS_SHOWN
    assert told["summary"]["models_without_backend_count"] == 103


def test_a_model_is_without_backend_while_none_that_lists_it_serves() -> None:
    fleet = Told("a", "b")
    fleet.registry.set_models(fleet.backends[0], [{"id": "m"}, {"id": "lora"}])
    only = fleet.registry.add("c", "http://c", models=["other"])
    fleet.registry.set_state(only, State.UP, "")
    fleet.clock.advance(1)
    first = fleet.ask()
    assert first["summary"]["models_without_backend"] == []
    fleet.registry.set_state(only, State.DOWN, "")
    second = fleet.later(1, first)
    assert second["summary"]["models_without_backend"] == ["other"]
    fleet.registry.remove("c")
    assert fleet.later(1, second)["summary"]["models_without_backend"] == []


def test_figures_of_the_last_minute_are_sums_over_it() -> None:
    fleet = Told("a")
    (a,) = fleet.backends
    assert fleet.ask()["summary"]["requests_per_s"] is None  # nothing was sampled yet: not 0
    counts = fleet.metrics.by_backend["a"]
    for _ in range(20):
        fleet.metrics.codes[200] += 3
        fleet.metrics.codes[500] += 1
        counts.attempts += 4
        counts.failed += 1
        counts.ttft_count += 3
        counts.ttft_sum_s += 0.6
        fleet.metrics.prompt_tokens["a"] += 100
        fleet.metrics.matched_predicted["a"] += 70
        seen = a.report.prefix_queries or 0.0
        fleet.report(a, prefix_queries=seen + 100.0, prefix_hits=0.6 * (seen + 100.0))
        fleet.clock.advance(1)
    told = fleet.ask()
    assert told["summary"]["requests_per_s"] == 4.0
    assert told["summary"]["failed_per_s"] == 1.0
    assert told["summary"]["predicted_ratio"] == 0.7
    assert told["summary"]["reported_ratio"] == 0.6
    (row,) = told["backends"]
    assert (row["attempts_per_s"], row["failed_per_s"], row["ttft_mean_s"]) == (4.0, 1.0, 0.2)
    assert (row["predicted_ratio"], row["reported_ratio"]) == (0.7, 0.6)


def test_without_prompts_a_hit_ratio_is_not_zero_but_unknown() -> None:
    fleet = Told("a")
    fleet.clock.advance(STEP_S)
    told = fleet.ask()
    assert (told["summary"]["predicted_ratio"], told["summary"]["reported_ratio"]) == (None, None)
    assert (told["backends"][0]["predicted_ratio"], told["backends"][0]["ttft_mean_s"]) == (None, None)


def test_histories_are_told_of_those_asked_for() -> None:
    fleet = Told("a", "b")
    guard = InFlight(fleet.backends[1])
    fleet.clock.advance(2 * STEP_S)
    first = fleet.ask()
    told = fleet.ask(boot=first["boot"], after=first["sample"], sparks=(2, 77))
    assert told["sparks"] == {"2": [1.0, 1.0]}
    detail = fleet.ask(boot=first["boot"], after=first["sample"], detail=2)["detail"]
    assert detail["id"] == 2
    assert detail["series"].keys() == set(BACKEND_COLUMNS)
    assert detail["series"]["in_flight"] == [1, 1]
    assert detail["hits"] == {"predicted_tokens": 10, "trust": 0.5, "trusted": True}
    assert fleet.ask(boot=first["boot"], detail=77)["detail"] is None  # it left
    known = {"boot": first["boot"], "after": first["sample"], "detail": 2, "detail_step": told["steps"]}
    assert "detail" not in fleet.ask(**known)
    fleet.clock.advance(STEP_S)
    assert len(fleet.ask(**known)["detail"]["series"]["in_flight"]) == 3
    guard.release()


def test_of_the_hit_accounting_only_figures_are_told() -> None:
    fleet = Told("a")
    fleet.hits = {"trust": 0.5, "note": "of whoever writes it", "unknown": None}
    fleet.clock.advance(1)
    told = fleet.ask(boot=fleet.ask()["boot"], after=1, detail=1)
    assert told["detail"]["hits"] == {"trust": 0.5, "unknown": None}


def test_a_key_is_never_told() -> None:
    fleet = Told()
    fleet.registry.add("a", "http://a", api_key="sesame")
    fleet.clock.advance(STEP_S)
    boot = fleet.ask()["boot"]
    assert b"sesame" not in fleet.live.answer(Question(boot, 0, 0, (1,), 1))


def test_backends_beyond_those_followed_are_counted() -> None:
    fleet = Told(*(f"b{at}" for at in range(TRACKED + 2)))
    fleet.registry.set_state(fleet.backends[-1], State.DOWN, "refused")
    fleet.clock.advance(1)
    told = fleet.ask()
    assert len(told["backends"]) == len(told["order"]) == TRACKED
    assert told["summary"]["backends"] == TRACKED + 2
    assert (told["summary"]["unlisted"], told["summary"]["unlisted_out"]) == (2, 1)


@pytest.mark.parametrize("count", [0, SPARKS_LIMIT, SPARKS_LIMIT + 10])
def test_no_more_histories_than_the_limit_at_once(count: int) -> None:
    fleet = Told(*(f"b{at}" for at in range(count)))
    fleet.clock.advance(1)
    told = fleet.ask(boot=fleet.ask()["boot"], sparks=tuple(range(1, count + 1)))
    assert len(told.get("sparks", {})) == min(count, SPARKS_LIMIT)


def test_in_a_large_fleet_the_figures_of_the_last_minute_come_within_a_step() -> None:
    fleet = Told(*(f"b{at}" for at in range(1000)))
    for backend in fleet.backends:
        fleet.metrics.by_backend[backend.name].attempts = 10
    fleet.clock.advance(STEP_S)
    told = fleet.ask()
    seen = {row["id"]: row["attempts_per_s"] for row in told["backends"]}
    assert 0 < sum(value is not None for value in seen.values()) < 1000  # not all at once
    for _ in range(STEP_S - 1):
        told = fleet.later(1, told)
        seen |= {row["id"]: row["attempts_per_s"] for row in told.get("backends", [])}
    assert set(seen.values()) == {2.0}
