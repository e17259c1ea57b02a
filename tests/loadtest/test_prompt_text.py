"""Prompts: equal ids are equal text, other ids and other salts are not, and lengths are right for the engine."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loadtest.replay.prompt_text import WORDS, PromptText, TokenScale

BLOCK = 16
ONE_TO_ONE = PromptText(BLOCK, TokenScale(), "salt")


def full(ids: list[int]) -> str:
    return ONE_TO_ONE.prompt(ids, BLOCK * len(ids))


def test_each_word_is_one_piece_of_four_bytes():
    assert len(WORDS) == 256
    assert len(set(WORDS)) == 128
    assert {len(word) for word in WORDS} == {4}


@given(
    shared=st.lists(st.integers(0, 2**64 - 1), max_size=5),
    ends=st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=2, unique=True),
)
def test_two_prompts_share_text_as_far_as_they_share_ids_and_no_further(shared, ends):
    first, second = (full([*shared, end]) for end in ends)
    pairs = enumerate(zip(first, second, strict=False))
    common = next((at for at, (one, other) in pairs if one != other), min(len(first), len(second)))
    assert common >= 4 * BLOCK * len(shared)
    assert first != second
    assert common < min(len(first), len(second))


def test_the_same_id_gives_the_same_words_in_every_process():
    assert full([5]) == PromptText(BLOCK, TokenScale(), "salt").prompt([5], BLOCK)
    # Pinned: a change here makes replays of one trace by two versions incomparable.
    assert PromptText(4, TokenScale(), "").prompt([1], 4) == "end man pay all"


def test_another_salt_shares_nothing():
    assert PromptText(BLOCK, TokenScale(), "other").prompt([0, 1], 32)[:16] != full([0, 1])[:16]


@given(st.integers(1, BLOCK))
def test_a_partly_filled_block_is_the_beginning_of_the_full_one(tokens):
    partly = ONE_TO_ONE.prompt([1, 2], BLOCK + tokens)
    assert len(partly.split()) == BLOCK + tokens
    assert f"{full([1, 2])} ".startswith(f"{partly} ")


@given(per_word=st.floats(0.5, 4.0), template=st.integers(0, 30), blocks=st.integers(100, 300))
def test_lengths_are_right_for_an_engine_that_counts_otherwise(per_word, template, blocks):
    text = PromptText(BLOCK, TokenScale(per_word, template), "")
    counted = len(text.prompt(range(blocks), BLOCK * blocks).split()) * per_word + template
    # The rounding of a block's words is right on average, not for each.
    assert abs(counted / (BLOCK * blocks) - 1) < 0.06


def test_a_template_longer_than_the_last_block_leaves_one_word_of_it():
    text = PromptText(BLOCK, TokenScale(1.0, 20), "")
    assert len(text.prompt([1, 2], BLOCK + 3).split()) == BLOCK + 1
