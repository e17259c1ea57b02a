"""What the router learns of engines and models."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.learning import bytes_per_token, prefill_speed
from router.learning.arrival_rate import ArrivalRate
from router.learning.bytes_per_token import BytesPerToken
from router.learning.copy_worth import CopyAccounts
from router.learning.mirror_size import MirrorSize
from router.learning.prefill_ledger import Phase, PrefillLedger
from router.learning.prefill_speed import PrefillSpeed
from router.learning.recent_work import RecentWork
from router.learning.trust import Trust

# ---- bytes per token


def test_the_ratio_is_the_middle_of_what_was_seen() -> None:
    ratio = BytesPerToken()
    assert ratio.ratio == 4.0
    rng = Random(1)
    for n in range(200):
        image = n % 4 == 0
        ratio.observe(3000, 2900 if image else rng.randint(950, 1050))
    assert 2.8 < ratio.ratio < 3.2


@pytest.mark.parametrize(
    ("prefix_bytes", "tokens"), [(0, 100), (100, 0), (100, 31), (40_000, 100), (40, 100), (10, -5)]
)
def test_impossible_or_tiny_figures_teach_nothing(prefix_bytes: int, tokens: int) -> None:
    ratio = BytesPerToken()
    assert not ratio.observe(prefix_bytes, tokens)
    assert ratio.ratio == 4.0


def test_the_ratio_follows_a_change_and_its_window_is_bounded() -> None:
    ratio = BytesPerToken()
    for _ in range(500):
        ratio.observe(400, 100)
    for _ in range(bytes_per_token.WINDOW):
        ratio.observe(200, 100)
    assert ratio.ratio == 2.0
    assert len(ratio._samples) == bytes_per_token.WINDOW


# ---- the ledger


def test_the_wait_is_the_work_ahead_less_what_the_engine_has_done() -> None:
    ledger = PrefillLedger()
    for name, work in (("a", 1.0), ("b", 2.0), ("c", 3.0)):
        ledger.sent(name, work, 10, 100.0)
    assert ledger.wait_s(100.0) == 6.0
    assert ledger.wait_s(100.5) == 5.5
    assert ledger.wait_s(150.0) == 5.0  # "a" is late; "b" and "c" cannot have begun
    assert ledger.first_token("a", 101.0)
    assert ledger.wait_s(101.5) == pytest.approx(4.5)
    assert (ledger.waiting, ledger.decoding, len(ledger)) == (2, 1, 3)


def test_one_that_leaves_from_the_middle_leaves_the_oldest_its_time() -> None:
    ledger = PrefillLedger()
    ledger.sent("a", 1.0, 10, 100.0)
    ledger.sent("b", 2.0, 20, 100.0)
    assert ledger.ended("b", 100.5) is Phase.WAITING
    assert ledger.wait_s(100.5) == pytest.approx(0.5)
    assert ledger.kv_tokens == 10


def test_in_once_and_out_once() -> None:
    ledger = PrefillLedger()
    ledger.sent("a", 1.0, 10, 0.0)
    with pytest.raises(ValueError):
        ledger.sent("a", 1.0, 10, 0.0)
    assert ledger.first_token("a", 1.0)
    assert not ledger.first_token("a", 1.0)
    with pytest.raises(ValueError):
        ledger.sent("a", 1.0, 10, 0.0)
    assert ledger.ended("a", 2.0) is Phase.DECODING
    assert ledger.ended("a", 2.0) is None
    assert not ledger.first_token("a", 3.0)
    assert len(ledger) == 0


@given(st.lists(st.tuples(st.sampled_from(["sent", "first", "end"]), st.integers(0, 5), st.floats(0.001, 9.9))))
def test_the_ledger_is_the_sum_of_what_is_open_and_exactly_zero_without(steps: list[tuple[str, int, float]]) -> None:
    ledger = PrefillLedger()
    waiting: dict[int, float] = {}
    decoding: set[int] = set()
    now = 0.0
    for what, key, amount in steps:
        now += amount / 10
        if what == "sent" and key not in waiting and key not in decoding:
            ledger.sent(key, amount, key, now)
            waiting[key] = amount
        elif what == "first":
            assert ledger.first_token(key, now) == (key in waiting)
            if waiting.pop(key, None) is not None:
                decoding.add(key)
        elif what == "end":
            ledger.ended(key, now)
            waiting.pop(key, None)
            decoding.discard(key)
        assert ledger.pending_s == pytest.approx(sum(waiting.values()))
        assert -1e-9 <= ledger.wait_s(now) <= ledger.pending_s + 1e-9
        assert ledger.kv_tokens == sum(waiting) + sum(decoding)
        assert ledger.decoding_kv_tokens == sum(decoding)
    for key in range(6):
        ledger.ended(key, now)
    assert (ledger.pending_s, ledger.wait_s(now), ledger.kv_tokens) == (0.0, 0.0, 0)


def test_a_silent_attempt_passes_when_the_engine_has_had_the_time() -> None:
    ledger = PrefillLedger()
    ledger.sent("a", 1.0, 10, 100.0, silent=True)
    ledger.sent("b", 2.0, 20, 100.0, silent=True)
    ledger.sent("c", 4.0, 40, 100.0)
    assert ledger.wait_s(102.0) == 5.0  # read between events: nothing moves
    assert ledger.waiting == 3
    ledger.advance(103.5)
    assert (ledger.waiting, ledger.decoding, ledger.decoding_kv_tokens) == (1, 2, 30)
    assert ledger.wait_s(103.5) == pytest.approx(3.5)
    assert ledger.wait_s(150.0) == pytest.approx(0.0)
    ledger.sent("d", 1.0, 0, 150.0)
    assert ledger.wait_s(160.0) == pytest.approx(1.0)  # "c" shows its first token, and has not yet
    assert not ledger.first_token("a", 151.0)
    assert "a" in ledger
    assert ledger.ended("a", 151.0) is Phase.DECODING
    assert ledger.ended("c", 151.0) is Phase.WAITING
    assert "c" not in ledger


# ---- arrivals


def test_a_steady_stream_is_measured() -> None:
    rate = ArrivalRate()
    now = 1000.0
    for _ in range(2000):
        now += 0.1
        rate.arrived(now, 0.05)
    assert rate.per_s(now) == pytest.approx(10.0, rel=0.02)
    assert rate.mean_work_s() == pytest.approx(0.05)
    # 0.5 s of work per second: 2.5 arrivals per engine and second, an eighth of each engine busy
    assert rate.pressure(now, 4) == pytest.approx(2.5 / (1 - 0.125), rel=0.02)


def test_a_young_stream_is_not_underrated() -> None:
    rate = ArrivalRate()
    for n in range(50):
        rate.arrived(1000.0 + n / 10, 0.05)
    assert 8.0 < rate.per_s(1004.9) < 12.0


def test_silence_fades_it_and_the_next_stream_starts_afresh() -> None:
    rate = ArrivalRate()
    for n in range(500):
        rate.arrived(n / 10, 0.05)
    assert rate.per_s(50.0 + 90.0) < 0.5
    assert rate.pressure(50.0 + 900.0, 4) < 1e-6
    for n in range(50):
        rate.arrived(5000.0 + n / 10, 0.05)
    assert 8.0 < rate.per_s(5004.9) < 12.0


def test_an_overloaded_fleet_has_a_finite_pressure() -> None:
    rate = ArrivalRate()
    for n in range(1000):
        rate.arrived(n / 10, 5.0)
    assert rate.pressure(99.9, 1) == pytest.approx(100.0, rel=0.05)  # utilisation counts as 0.9


def test_nothing_arrived_is_no_pressure() -> None:
    assert ArrivalRate().pressure(5.0, 3) == 0.0
    assert ArrivalRate().mean_work_s() == 0.0


# ---- the size of a mirror


def test_a_mirror_is_sized_by_the_pool_and_resized_beyond_five_per_cent() -> None:
    size = MirrorSize(128, 1000)
    assert size.update(None, 4.0)
    assert size.blocks == 31
    assert size.update(64_000, 4.0)
    assert size.blocks == 2000
    assert not size.update(64_000, 4.19)
    assert size.update(64_000, 4.3)
    assert size.blocks == 2150
    assert not size.update(62_000, 4.3)
    assert size.update(32_000, 4.3)
    assert size.update(1, 0.5)
    assert size.blocks == 1  # 0 would mean no limit
    with pytest.raises(ValueError):
        MirrorSize(0, 1)


# ---- trust


def test_four_total_misses_lose_trust_and_three_good_answers_regain_it() -> None:
    trust = Trust()
    states = []
    for reported in (0, 0, 0, 0, 1000, 1000, 1000):
        trust.compare(1000, reported, allowance=0)
        states.append(trust.lost)
    assert states == [False, False, False, True, True, False, False]
    assert (trust.predicted_tokens, trust.reported_tokens) == (7000, 3000)


def test_untrusted_is_worth_nothing_and_doubt_a_part() -> None:
    trust = Trust()
    trust.compare(1000, 500, allowance=0)
    assert trust.worth == pytest.approx(0.9)
    for _ in range(10):
        trust.compare(1000, 0, allowance=0)
    assert trust.worth == 0.0 < trust.value


def test_rounding_and_small_predictions_hardly_count() -> None:
    trust = Trust()
    for _ in range(20):
        trust.compare(1000, 985, allowance=16)
    assert trust.value == 1.0
    trust.compare(16, 0, allowance=0)
    assert trust.value > 0.98
    assert trust.ghosts == 0


def test_three_ghosts_in_a_row_are_told_once() -> None:
    trust = Trust()
    told = []
    for reported in (0, 0, 900, 0, 0, 100, 0):
        trust.compare(1000, reported, allowance=0)
        told.append(trust.cache_gone())
    assert told == [False, False, False, False, False, True, False]


def test_a_sum_over_many_answers_weighs_as_many() -> None:
    one_by_one, together = Trust(), Trust()
    for _ in range(5):
        one_by_one.compare(1000, 400, allowance=0)
    together.compare(5000, 2000, allowance=0, answers=5)
    assert together.value == pytest.approx(one_by_one.value)


# ---- copies


def test_eight_uses_pay_for_a_cheap_copy_and_making_it_spends_that() -> None:
    accounts = CopyAccounts()
    for _ in range(8):
        assert accounts.balance_s(7, 0.0) < 0.2
        accounts.served(7, 0.2, 0.0, 0.0)
    assert accounts.balance_s(7, 0.0) == pytest.approx(0.2)
    accounts.copied(7, 0.15, 0.0)
    assert accounts.balance_s(7, 0.0) == pytest.approx(0.05)
    accounts.copied(7, 9.0, 0.0)
    assert accounts.balance_s(7, 0.0) == 0.0


def test_dear_copies_earn_slowly_unless_their_users_wait() -> None:
    accounts = CopyAccounts()
    for _ in range(50):
        accounts.served(1, 5.0, 0.0, 0.0)
        accounts.served(2, 5.0, 0.4, 0.0)
    assert accounts.balance_s(1, 0.0) < 2.0
    assert accounts.balance_s(2, 0.0) > 5.0


def test_accounts_fade_are_capped_and_bounded() -> None:
    accounts = CopyAccounts(limit=3)
    for _ in range(100):
        accounts.served(1, 0.2, 1.0, 0.0)
    assert accounts.balance_s(1, 0.0) == pytest.approx(0.8)
    assert accounts.balance_s(1, 300.0) == pytest.approx(0.8 / 2.718, rel=0.01)
    for prefix in (2, 3):
        accounts.served(prefix, 0.2, 0.0, 1.0)
    accounts.served(1, 0.2, 0.0, 2.0)
    accounts.served(4, 0.2, 0.0, 3.0)  # 2 was used least recently
    assert len(accounts) == 3
    assert accounts.balance_s(2, 3.0) == 0.0
    assert accounts.balance_s(1, 3.0) > 0.0
    accounts.copied(99, 1.0, 3.0)
    assert len(accounts) == 3
    with pytest.raises(ValueError):
        CopyAccounts(0)


# ---- recent work


def test_recent_work_fades_and_survives_any_stretch_of_time() -> None:
    work: RecentWork[str] = RecentWork()
    work.add("old", 10.0, 5.0)
    work.add("new", 5.0, 65.0)
    assert work.of("new") > work.of("old") > 0.0
    work.add("old", 1.0, 1e9)
    assert work.of("old") == pytest.approx(1.0)
    assert work.of("new") < 1e-9
    work.forget("old")
    work.forget("never")
    assert (work.of("old"), len(work)) == (0.0, 1)


# ---- prefill speed


def test_quiet_samples_give_the_speed_and_outliers_do_not() -> None:
    speed = PrefillSpeed()
    rng = Random(1)
    for n in range(40):
        tokens = rng.randint(300, 5000)
        seconds = 0.010 + tokens / 3000
        if n % 4 == 0:
            seconds *= 3  # had company that we did not see
        if n % 9 == 0:
            seconds = 0.02  # was cached, against our prediction
        speed.quiet(tokens, seconds)
    assert speed.learned
    assert speed.tokens_per_s == pytest.approx(3000, rel=0.1)


def test_small_prompts_give_the_fixed_cost_only() -> None:
    speed = PrefillSpeed()
    for _ in range(5):
        assert speed.quiet(20, 0.040)
        assert not speed.quiet(150, 0.040)
    assert not speed.learned
    assert speed.fixed_s == pytest.approx(0.038)
    for _ in range(5):
        speed.quiet(20, 7.0)
    speed.quiet(20, 7.0)
    assert speed.fixed_s <= prefill_speed.MAX_FIXED_S


def test_the_fixed_cost_never_eats_the_speed() -> None:
    speed = PrefillSpeed()
    for _ in range(9):
        speed.quiet(10, 0.2)
    speed.quiet(2000, 0.2)
    assert speed.tokens_per_s == pytest.approx(20_000)


def test_impossible_samples_are_refused() -> None:
    speed = PrefillSpeed()
    assert not speed.quiet(1000, 0.0)
    assert not speed.learned


def test_the_engines_own_sums_stand_in_and_correct_upwards() -> None:
    speed = PrefillSpeed()
    assert not speed.reported(9000, 1.0, 9, 2.0)  # who knows what was under way when it began
    assert not speed.reported(3000, 1.0, 2, 2.0)  # not enough yet
    assert speed.reported(3000, 1.0, 2, 2.0)
    assert speed.tokens_per_s == pytest.approx(3000, rel=0.05)
    for _ in range(5):
        speed.quiet(1000, 1.010)  # a third of it: had company
    assert speed.tokens_per_s == pytest.approx(3000, rel=0.05)
    for _ in range(40):
        speed.quiet(4000, 1.010)
    assert speed.tokens_per_s == pytest.approx(4000, rel=0.05)


@pytest.mark.parametrize(
    "sums", [(9000, 1.9, 9, 2.0), (9000, 1.0, 0, 2.0), (-1, 1.0, 9, 2.0), (9000, -1.0, 9, 2.0), (9000, 1.0, 9, 0.0)]
)
def test_sums_that_overlap_or_cannot_be_are_dropped(sums: tuple[float, float, float, float]) -> None:
    speed = PrefillSpeed()
    for _ in range(5):
        assert not speed.reported(*sums)
    assert speed.tokens_per_s == 10_000.0


def test_a_prefill_longer_than_a_poll_is_counted_with_its_tokens() -> None:
    """The engine counts the tokens of a prefill at its start and its seconds at its end, polls apart. A stretch that
    overlaps too much is dropped whole, never its seconds alone."""
    speed = PrefillSpeed()
    speed.reported(0, 0.0, 0, 0.25)
    for _ in range(12):
        for overlapping in (True, False):
            speed.reported(5000, 0.0, 0, 0.25, settled=False)
            speed.reported(0, 0.0, 0, 0.75, settled=False)
            speed.reported(0, 1.0, 1, 0.1 if overlapping else 1.0)
        assert speed.tokens_per_s == (pytest.approx(5000, rel=0.05) if speed.learned else 10_000.0)
    assert speed.learned


def test_a_busy_stretch_corrects_a_prior_that_is_far_off() -> None:
    speed = PrefillSpeed()
    now = 0.0
    speed.busy_began(now)
    for _ in range(12):
        now += 1.5  # 1,000 tokens/s with decode steps in between
        speed.busy_prefilled(1000, now, idle=False)
    assert 900 < speed.tokens_per_s < 1500
    speed.quiet(1000, 1.010)
    assert speed.tokens_per_s == pytest.approx(1000, rel=0.02)


def test_gaps_end_a_stretch() -> None:
    speed = PrefillSpeed()
    for n in range(20):
        speed.busy_began(n * 100.0)
        assert not speed.busy_prefilled(3000, n * 100.0 + 50.0, idle=True)
    assert not speed.learned
