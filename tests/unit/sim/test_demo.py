"""The demo's load, figures and view, without a process."""

import io

import pytest

from router.sim import demo
from router.sim.chat_template import render
from router.sim.demo_load import TEMPLATE_TOKENS, Tally, make_plan, tokens_of
from router.sim.demo_view import QUIET_EVERY_S, Result, View, table
from router.sim.tokenizer import tokenize_segments


def result(**changes):
    figures = {
        "strategy": "s",
        "queried_tokens": (100, 300),
        "hit_tokens": (50, 200),
        "ttfts_s": tuple(number / 100 for number in range(1, 101)),
        "errors": 0,
        "took_s": 1.0,
    }
    return Result(**(figures | changes))


def test_a_seed_gives_one_plan():
    assert make_plan(7, 5, 3) == make_plan(7, 5, 3)
    assert make_plan(7, 5, 3) != make_plan(8, 5, 3)


def test_more_conversations_begin_with_the_same_ones():
    assert make_plan(7, 9, 3).conversations[:5] == make_plan(7, 5, 3).conversations


def test_conversations_start_one_after_the_other_and_think_before_all_turns_but_the_first():
    plan = make_plan(1, 20, 4)
    starts = [conversation.starts_at_s for conversation in plan.conversations]
    assert starts == sorted(starts)
    assert plan.requests == 80
    for conversation in plan.conversations:
        first, *others = conversation.turns
        assert first.think_s == 0.0
        assert all(turn.think_s > 0.0 for turn in others)
        assert conversation.system in plan.systems


def test_the_tokens_of_a_conversation_are_nearly_what_the_engine_counts():
    conversation = make_plan(1, 1, 6).conversations[0]
    messages = [{"role": "system", "content": conversation.system}]
    for turn in conversation.turns:
        answer = " the" * turn.answer_tokens
        messages += [{"role": "user", "content": turn.message}, {"role": "assistant", "content": answer}]
    counted = len(tokenize_segments(render(messages)))
    planned = tokens_of(conversation.system) + conversation.own_tokens
    assert abs(counted - planned) <= TEMPLATE_TOKENS + len(conversation.turns)


def test_the_pools_hold_half_of_what_is_said():
    plan = make_plan(1, 60, 6)
    held = 4 * demo._pool_blocks(plan, 4) * demo.BLOCK_TOKENS
    assert held / plan.distinct_tokens == pytest.approx(demo.POOL_SHARE, rel=0.01)


def test_a_pool_has_room_for_two_conversations_however_small_the_load():
    plan = make_plan(1, 1, 6)
    assert demo._pool_blocks(plan, 64) * demo.BLOCK_TOKENS >= 2 * plan.longest_tokens


def test_the_hit_ratio_weighs_engines_by_their_tokens():
    assert result().hit_ratio == pytest.approx(250 / 400)


def test_imbalance_is_computed_tokens_of_the_busiest_by_the_mean():
    assert result().imbalance == pytest.approx(100 / 75)
    assert result(hit_tokens=(0, 200)).imbalance == 1.0


def test_an_idle_fleet_has_no_figures_and_breaks_nothing():
    idle = result(queried_tokens=(0, 0), hit_tokens=(0, 0), ttfts_s=(), errors=3)
    assert (idle.hit_ratio, idle.imbalance, idle.ttft_s(0.5)) == (0.0, 1.0, None)
    assert table([idle]).splitlines()[2].split() == ["s", "0.0%", "-", "-", "1.00", "3", "1.0", "s"]


def test_percentiles_are_answers_that_were_seen():
    assert result().ttft_s(0.50) == 0.51
    assert result().ttft_s(0.99) == 1.0
    assert result(ttfts_s=(0.2,)).ttft_s(0.99) == 0.2


def test_table_columns_are_aligned():
    lines = table([result(strategy="roundrobin"), result(strategy="s", errors=1000)]).splitlines()
    assert len({len(line) for line in lines}) == 1


def test_turns_that_were_never_sent_count_as_done():
    tally = Tally(answered=3, skipped=2)
    tally.errors["status 502"] += 1
    assert (tally.done, tally.failed) == (6, 1)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_one_line_that_moves():
    out = Terminal()
    view = View(out)
    view.progress("roundrobin", 1, 4, 0.1, 0.0)
    view.progress("roundrobin", 2, 4, 0.2, 0.5)
    view.say("done")
    assert "\n" not in out.getvalue().removesuffix("done\n")
    assert out.getvalue().endswith("\r\x1b[Kdone\n")


def test_elsewhere_progress_is_a_plain_line_now_and_then():
    out = io.StringIO()
    view = View(out)
    view.begin()
    for tenth in range(120):
        view.progress("roundrobin", tenth, 120, tenth / 10, 0.0)
    lines = out.getvalue().splitlines()
    assert len(lines) == int(12 / QUIET_EVERY_S)
    assert "\x1b" not in out.getvalue()
    view.begin()
    view.progress("leastload", 1, 120, QUIET_EVERY_S, 0.0)
    assert len(out.getvalue().splitlines()) == len(lines) + 1
