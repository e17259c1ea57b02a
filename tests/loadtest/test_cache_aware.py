"""The placement to compare with: sglang's, by its description."""

from __future__ import annotations

from loadtest.replay.cache_aware import APART, CacheAware

ENGINES = ["http://a", "http://b"]


def test_what_was_sent_before_goes_there_again_and_the_rest_where_least_was_sent() -> None:
    placing = CacheAware(ENGINES)
    first = placing.choose("x" * 400)
    assert placing.choose("x" * 400 + "y" * 100) == first
    other = placing.choose("z" * 160)
    assert other != first
    assert placing.choose("x" * 160 + "w" * 400) == other  # less than half of it is at the first


def test_far_apart_the_one_with_the_fewest_outstanding_takes_it_until_answers_come() -> None:
    placing = CacheAware(ENGINES)
    home = placing.choose("x" * 400)
    for _ in range(APART):
        assert placing.choose("x" * 400) == home
    away = placing.choose("x" * 400)
    assert away != home
    for _ in range(APART + 1):
        placing.ended(home)
    placing.ended(away)
    assert placing.choose("x" * 400) in ENGINES
