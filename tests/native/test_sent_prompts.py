"""Prompts on their way: the longest prefix shared with one of them."""

from __future__ import annotations

import gc
import sys

from hypothesis import given
from hypothesis import strategies as st

from native.block_hash import BlockHashes
from native.sent_prompts import SentPrompts

# Chains as real hashes are: one that differs at i differs from there on.
chains = st.lists(st.integers(0, 2), max_size=9).map(
    lambda marks: [hash(tuple(marks[: i + 1])) % 2**64 for i in range(len(marks))]
)


def shared(one: list[int], other: list[int]) -> int:
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


@given(st.lists(st.tuples(st.integers(0, 2), chains), max_size=12), chains, st.integers(0, 4), st.data())
def test_it_finds_what_a_plain_comparison_finds(
    sent: list[tuple[int, list[int]]], asked: list[int], at_least: int, data: st.DataObject
) -> None:
    prompts = SentPrompts()
    held = [(slot, chain, BlockHashes.from_list(chain)) for slot, chain in sent]
    for slot, _, blocks in held:
        prompts.add(slot, blocks)
    gone = data.draw(st.lists(st.integers(0, max(len(held) - 1, 0)), unique=True, max_size=len(held)))
    for at in gone:
        assert prompts.discard(held[at][0], held[at][2])
    held = [entry for at, entry in enumerate(held) if at not in gone]
    assert len(prompts) == len(held)
    for slot in range(3):
        at_least = min(at_least, len(asked))
        # What is known already is the truth of some prompt: the blocks before it are the same.
        expected = max([at_least, *(shared(asked, chain) for other, chain, _ in held if other == slot)])
        assert prompts.longest(slot, BlockHashes.from_list(asked), at_least) == expected


def test_a_prompt_leaves_as_the_object_that_it_came_as() -> None:
    prompts = SentPrompts()
    one, twin = BlockHashes.from_list([1, 2]), BlockHashes.from_list([1, 2])
    prompts.add(0, one)
    assert not prompts.discard(0, twin)
    assert not prompts.discard(1, one)
    assert prompts.discard(0, one)
    assert not prompts.discard(0, one)
    assert len(prompts) == 0


def test_the_same_prompt_sent_twice_counts_until_both_are_gone() -> None:
    prompts = SentPrompts()
    blocks = BlockHashes.from_list([1, 2, 3])
    prompts.add(4, blocks)
    prompts.add(4, blocks)
    prompts.discard(4, blocks)
    assert prompts.longest(4, blocks) == 3
    prompts.discard(4, blocks)
    assert prompts.longest(4, blocks) == 0


def test_an_engine_that_is_gone_takes_its_prompts_along_and_holds_no_references() -> None:
    prompts = SentPrompts()
    blocks = BlockHashes.from_list([1, 2, 3])
    gc.collect()
    before = sys.getrefcount(blocks)
    for slot in (0, 0, 1):
        prompts.add(slot, blocks)
    prompts.forget(0)
    prompts.forget(7)
    assert (len(prompts), prompts.longest(0, blocks), prompts.longest(1, blocks)) == (1, 0, 3)
    prompts.discard(1, blocks)
    assert sys.getrefcount(blocks) == before
