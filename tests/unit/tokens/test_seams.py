"""The ids of the parts are the ids of the whole: for each kind of tokenizer, on texts made to break it."""

from __future__ import annotations

import json
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from router.tokens import seams
from router.tokens.seams import Seams
from tests.support.tokenizer_folders import END, KINDS, SPECIAL, START, TEXTS, tokenizer_of

tokenizer_for = lru_cache(tokenizer_of)


@pytest.fixture
def tiny_parts(monkeypatch):
    monkeypatch.setattr(seams, "MIN_SEGMENT_CHARS", 1)


def ids_of(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).ids


def seams_of(tokenizer):
    return Seams(json.loads(tokenizer.to_str()))


FRAGMENTS = [
    *SPECIAL, "<|left|>", "<|right|>", "<|im", "_end|>", "<|im_end|>\n", "<|", "|>", "<", " ", "  ", "\n", "\n\n",
    "\t", "quick brown", "quick", " fox", "don't", "123456", "é", "e\u0301", "\u0301", "世界", "👩‍🚀", "\u200d", "▁",
    "assistant\n", "ﬁ", "x" * 40,
]  # fmt: skip
texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=8), max_size=30).map("".join)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_of_parts_are_the_ids_of_the_whole(kind, tiny_parts):
    tokenizer = tokenizer_for(kind)
    cuts = seams_of(tokenizer)
    assert not cuts.why_not
    most = 0

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(texts)
    def check(text):
        nonlocal most
        parts = cuts.cut(text)
        most = max(most, len(parts))
        assert "".join(parts) == text
        assert [token for part in parts for token in ids_of(tokenizer, part)] == ids_of(tokenizer, text)

    check()
    assert most > 3, "texts were hardly cut: nothing was tested"


@settings(max_examples=100, deadline=None, derandomize=True)
@given(texts, texts)
def test_cuts_of_a_text_are_cuts_of_each_that_it_begins(text, more):
    cuts = seams_of(tokenizer_for("byte-level"))
    # what follows must not complete a token that the text ends in the middle of
    shorter, longer = cuts.cut(text + "\n"), cuts.cut(text + "\n" + more)
    assert longer[: len(shorter) - 1] == shorter[:-1]


def test_cutting_elsewhere_would_be_wrong():
    """The property above can fail: most places are no seams."""
    tokenizer = tokenizer_for("words")
    text = TEXTS[0]
    whole = ids_of(tokenizer, text)
    cuts = [ids_of(tokenizer, text[:at]) + ids_of(tokenizer, text[at:]) for at in range(1, len(text))]
    assert sum(joined != whole for joined in cuts) > len(text) // 2


def test_a_part_is_at_least_as_long_as_it_is_worth():
    turn = f"{START}user\nhello{END}\n"
    parts = seams_of(tokenizer_for("byte-level")).cut(turn * 100)
    assert len(parts) > 5
    assert all(len(part) >= seams.MIN_SEGMENT_CHARS for part in parts[:-1])
    assert all(part.startswith("<|") for part in parts)


def test_a_token_that_takes_the_space_left_of_it_is_no_cut(tiny_parts):
    assert seams_of(tokenizer_for("swallowing")).cut("a <|left|>b<|right|> c") == ["a <|left|>b", "<|right|> c"]


def test_whole_word_tokens_turn_cutting_off():
    tokenizer = tokenizer_of("byte-level")
    tokenizer.add_special_tokens([AddedToken("dog", single_word=True, normalized=False)])
    cuts = seams_of(tokenizer)
    assert "whole words" in cuts.why_not
    assert cuts.cut(f"a{START}" * 500) == [f"a{START}" * 500]


def test_a_tokenizer_without_added_tokens_is_not_cut():
    assert Seams({"added_tokens": []}).why_not
    assert Seams({}).why_not
