"""The report on known input: every figure by hand."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

from loadtest.chat_stream import ChatStream
from loadtest.replay import engine_counters, report
from loadtest.replay.compare import table
from loadtest.replay.engine_counters import Counters, EngineShare, ScrapeFailed, imbalance
from loadtest.replay.report import GapHistogram, Report, Tally, quantile


def stream(ttft_s: float, gaps_s: list[float], cached: int | None = 8) -> ChatStream:
    """An answer to a prompt of 20 tokens."""
    answer = ChatStream(0.0)
    now = ttft_s
    for gap_s in [0.0, *gaps_s]:
        now += gap_s
        answer.feed(b'data: {"choices": [{"delta": {"content": "x"}}]}\n\n', now)
    usage = {"prompt_tokens": 20, "completion_tokens": 1 + len(gaps_s)}
    if cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    answer.feed(b"data: %b\n\ndata: [DONE]\n\n" % json.dumps({"usage": usage}).encode(), now)
    answer.end()
    return answer


def made(tally: Tally, **fields: object) -> Report:
    given = {
        "trace": "t",
        "target": "http://h:1",
        "model": "m",
        "speed": 2.0,
        "calibration": "calibrated",
        "requests": 5,
        "sent": 4,
        "not_sent": 1,
        "too_long": 2,
        "left": 0,
        "late": 0,
        "latest_s": 0.0,
        "took_s": 9.5,
        "interrupted": False,
        "tally": tally,
        "engines": (EngineShare("http://a", 100, 80), EngineShare("http://b", 60, 0)),
        "engine_faults": (),
    }
    return Report(**{**given, **fields})


@pytest.fixture
def tally() -> Tally:
    tally = Tally()
    tally.answer(stream(0.1, [0.02, 0.04]), 19, 0.2, "a", "prefix", 12)
    tally.answer(stream(0.3, [0.02], cached=None), 19, 0.5, "b", "load", 0)
    tally.answer(stream(0.2, []), 19, 0.2, "a", "prefix", 8)
    tally.error("status 429 queue_full")
    return tally


def test_the_figures_are_those_of_the_answers(tally):
    found = made(tally).as_json()
    assert found["requests"] == {
        "due": 5,
        "sent": 4,
        "answered": 3,
        "failed": 1,
        "interrupted": 0,
        "not_sent": 1,
        "too_long": 2,
        "left": 0,
        "late": 0,
        "latest_s": 0.0,
    }
    assert found["errors"] == {"status 429 queue_full": 1}
    assert found["ttft_s"] == pytest.approx({"mean": 0.2, "p50": 0.2, "p90": 0.3, "p99": 0.3})
    assert found["e2e_s"] == pytest.approx({"mean": 0.3, "p50": 0.2, "p90": 0.5, "p99": 0.5})
    assert found["itl_s"] == pytest.approx({"mean": 0.08 / 3, "p50": 0.02, "p90": 0.04, "p99": 0.04}, rel=0.011)
    assert found["tokens"] == {
        "prompt_in_trace": 57,
        "prompt": 60,
        "output": 6,
        "cached_by_usage": 16,
        "matched_by_gateway": 20,
    }
    assert found["hit_ratio"] == 80 / 160
    assert found["hit_ratio_by_usage"] == 16 / 60  # an answer that tells none of it had nothing cached
    assert found["imbalance"] == 60 / 40  # computed: 20 and 60
    assert found["request_imbalance"] == 2 / 1.5
    assert [engine["hit_ratio"] for engine in found["engines"]] == [0.8, 0.0]
    assert found["backends"] == {"a": 2, "b": 1}
    assert found["reasons"] == {"prefix": 2, "load": 1}


def test_the_text_says_what_went_wrong_and_what_was_measured(tally):
    text = made(tally, late=3, latest_s=1.25, left=7, interrupted=True).as_text()
    for part in (
        "9.5 s, interrupted",
        "5 due, 4 sent, 3 answered, 1 failed, 7 not reached",
        "not sent   1: the bound",
        "too long   2 left out",
        "late       3 sent above 50 ms late, at most 1.25 s",
        "error      1 times: status 429 queue_full",
        "60 of prompts, +5.3% against the trace",
        "50.0% by the engines' counters, 26.7% by usage, 33.3% expected by the gateway",
        "http://a  80.0% of 100 tokens, 20 computed",
        "imbalance  1.50",
        "backends   a 2, b 1; imbalance 1.33",
        "reasons    prefix 2, load 1",
    ):
        assert part in text


def test_a_replay_is_clean_if_all_was_sent_and_answered(tally):
    assert not made(tally, not_sent=0).clean
    assert made(Tally(), not_sent=0).clean
    assert not made(Tally(), not_sent=1).clean


def test_nothing_answered_and_nobody_asked_is_no_figure_and_no_crash():
    empty = made(Tally(), engines=())
    assert empty.hit_ratio is None
    assert empty.imbalance is None
    assert empty.as_json()["ttft_s"] == {"mean": None, "p50": None, "p90": None, "p99": None}
    assert "not told" in empty.as_text()


def test_one_engine_that_does_not_tell_leaves_no_ratio_over_the_others(tally):
    partly = made(tally, engine_faults=("http://b: the engine was restarted during the replay",))
    assert (partly.hit_ratio, partly.imbalance) == (None, None)
    assert "restarted" in partly.as_text()


def test_quantiles_are_the_least_value_that_enough_are_within():
    values = [float(value) for value in range(1, 101)]
    assert [quantile(values, share) for share in (0.5, 0.9, 0.99, 1.0)] == [50.0, 90.0, 99.0, 100.0]
    assert quantile([7.0], 0.01) == 7.0
    assert quantile([], 0.5) is None


def test_the_histogram_is_right_within_a_percent_and_takes_anything():
    gaps = GapHistogram()
    assert (gaps.mean, gaps.quantile(0.5)) == (None, None)
    for value in range(1, 1001):
        gaps.add(value / 1000)
    assert gaps.quantile(0.5) == pytest.approx(0.5, rel=0.011)
    assert gaps.quantile(0.99) == pytest.approx(0.99, rel=0.011)
    assert gaps.mean == pytest.approx(0.5005)
    for value in (0.0, 1e-9, 1e9):
        gaps.add(value)
    assert gaps.quantile(0.0) == 0.0
    assert gaps.quantile(1.0) > 3600


def test_names_from_the_other_side_are_bounded(monkeypatch):
    monkeypatch.setattr(report, "MAX_KINDS", 3)
    tally = Tally()
    for number in range(10):
        tally.error(f"kind {number}")
    tally.error("kind 1")
    assert dict(tally.errors) == {"kind 0": 1, "kind 1": 2, "kind 2": 1, "other": 7}


def test_counters_are_deltas_and_a_restart_makes_them_worthless():
    before = Counters(100.0, 40.0, 5.0)
    shared = engine_counters.share("u", before, Counters(160.0, 90.0, 5.0))
    assert (shared.queried_tokens, shared.hit_tokens, shared.computed_tokens) == (60, 50, 10)
    for after in (Counters(160.0, 90.0, 6.0), Counters(90.0, 50.0, 5.0), Counters(160.0, 30.0, 5.0)):
        with pytest.raises(ScrapeFailed, match="u: the engine was restarted"):
            engine_counters.share("u", before, after)


def test_imbalance_is_the_busiest_by_the_mean():
    assert imbalance([10, 10]) == 1.0
    assert imbalance([30, 0, 0]) == 3.0
    assert imbalance([0, 0]) is None


def test_an_engine_that_is_not_there_is_named():
    async def ask() -> None:
        async with aiohttp.ClientSession() as session:
            await engine_counters.scrape(session, "http://127.0.0.1:1")

    with pytest.raises(ScrapeFailed, match=r"http://127\.0\.0\.1:1/metrics: "):
        asyncio.run(ask())


def test_the_table_has_medians_and_the_spread_of_several_rounds(tally):
    rows = table({"session": [made(tally)], "prefixaware": [made(tally), made(tally, engines=())]}).split("\n")
    assert rows[2].startswith("| session     | 50.0%")
    assert "| 200 ms (200 ms to 200 ms) |" in rows[3]
    assert rows[2].rstrip(" |").endswith("| 2")
