"""The contract of the index of prefixes, on the native tree and on the plain reference alike."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator

import pytest

from native.block_hash import BlockHashes
from native.prefix_tree import MAX_BACKENDS, MIN_MEMORY_LIMIT_BYTES, PrefixTree
from router.index import reference
from router.index.prefix_index import PrefixIndex, build_index

AMPLE = 1 << 26


@pytest.fixture(params=["native", "reference"])
def index(request: pytest.FixtureRequest) -> Iterator[PrefixIndex]:
    index = build_index(request.param, AMPLE)
    yield index
    index.check()


def prompt(*parts: str | int) -> BlockHashes:
    """One block a letter; prompt("abc") and prompt("abd") share two."""
    return BlockHashes.from_list([ord(letter) for part in parts for letter in str(part)])


def matches(index: PrefixIndex, text: str, slots: int) -> list[int]:
    index.match(prompt(text))
    return index.matched[:slots].tolist()


def test_the_configuration_picks_the_index() -> None:
    assert isinstance(build_index("native", AMPLE), PrefixTree)
    assert isinstance(build_index("reference", AMPLE), reference.ReferenceIndex)
    with pytest.raises(ValueError, match="neither native nor reference"):
        build_index("fast", AMPLE)  # type: ignore[arg-type]


def test_both_have_the_same_bounds() -> None:
    assert (MAX_BACKENDS, MIN_MEMORY_LIMIT_BYTES) == (reference.MAX_BACKENDS, reference.MIN_MEMORY_LIMIT_BYTES)


def test_an_empty_index_matches_nothing(index: PrefixIndex) -> None:
    assert index.match(prompt("abc")) == 0
    slot = index.add_backend()
    assert index.match(prompt("abc")) == 0
    assert index.match_one(slot, prompt("abc")) == 0
    assert len(index) == 0


def test_an_empty_prompt_is_nothing(index: PrefixIndex) -> None:
    slot = index.add_backend()
    assert index.insert(slot, prompt("")) == 0
    assert index.match(prompt("")) == 0
    assert index.forget_after(slot, prompt(""), 0) == 0


def test_each_backend_is_matched_for_what_it_holds(index: PrefixIndex) -> None:
    a, b, c = (index.add_backend() for _ in range(3))
    assert index.insert(a, prompt("system-one")) == 10
    assert index.insert(b, prompt("system-two")) == 10
    assert index.insert(c, prompt("sys")) == 3
    assert index.match(prompt("system-once")) == 9
    assert index.matched[:3].tolist() == [9, 7, 3]
    assert [index.match_one(slot, prompt("system-once")) for slot in (a, b, c)] == [9, 7, 3]
    assert matches(index, "other", 3) == [0, 0, 0]
    assert len(index) == 23


def test_insert_returns_the_blocks_that_were_new_to_that_backend(index: PrefixIndex) -> None:
    a, b = index.add_backend(), index.add_backend()
    assert index.insert(a, prompt("abcd")) == 4
    assert index.insert(a, prompt("abcdef")) == 2
    assert index.insert(a, prompt("abcd")) == 0
    assert index.insert(a, prompt("abxy")) == 2
    assert index.insert(b, prompt("abcdef")) == 6
    assert (index.blocks_of(a), index.blocks_of(b), len(index)) == (8, 6, 14)


def test_the_same_hash_in_two_places_is_two_blocks(index: PrefixIndex) -> None:
    slot = index.add_backend()
    assert index.insert(slot, prompt("aaaa")) == 4
    assert index.insert(slot, prompt("aab")) == 1
    assert index.insert(slot, prompt("aaaab")) == 1
    assert [matches(index, text, 1) for text in ("aaaab", "aab", "aaab", "b")] == [[5], [3], [3], [0]]


def test_a_match_touches_nothing(index: PrefixIndex) -> None:
    slot = index.add_backend()
    index.insert(slot, prompt("old"))
    index.insert(slot, prompt("new"))
    index.match(prompt("old"))
    index.match_one(slot, prompt("old"))
    index.set_capacity(slot, 3)
    assert (matches(index, "old", 1), matches(index, "new", 1)) == ([0], [3])


def test_the_least_recently_used_is_evicted_its_tail_first(index: PrefixIndex) -> None:
    slot = index.add_backend()
    index.set_capacity(slot, 6)
    index.insert(slot, prompt("abcd"))
    index.insert(slot, prompt("wxyz"))
    assert (matches(index, "abcd", 1), matches(index, "wxyz", 1)) == ([2], [4])
    assert index.evicted(slot) == 2
    index.insert(slot, prompt("ab"))
    index.insert(slot, prompt("k"))
    assert (matches(index, "abcd", 1), matches(index, "wxyz", 1)) == ([2], [3])


def test_a_prompt_that_ends_inside_a_longer_one_refreshes_only_its_own_blocks(index: PrefixIndex) -> None:
    slot = index.add_backend()
    index.insert(slot, prompt("abcdef"))
    index.insert(slot, prompt("xyz"))
    index.insert(slot, prompt("abc"))
    index.set_capacity(slot, 6)
    assert (matches(index, "abcdef", 1), matches(index, "xyz", 1)) == ([3], [3])


def test_a_shared_head_outlives_the_tails_below_it(index: PrefixIndex) -> None:
    slot = index.add_backend()
    for tail in "123":
        index.insert(slot, prompt("head", tail * 4))
    index.set_capacity(slot, 4)
    assert matches(index, "head1111", 1) == [4]
    index.set_capacity(slot, 2)
    assert matches(index, "head1111", 1) == [2]


def test_a_prompt_longer_than_the_capacity_keeps_its_head(index: PrefixIndex) -> None:
    slot = index.add_backend()
    index.set_capacity(slot, 3)
    index.insert(slot, prompt("xy"))
    assert index.insert(slot, prompt("abcdef")) == 3
    assert (matches(index, "abcdef", 1), matches(index, "xy", 1)) == ([3], [0])
    assert (index.blocks_of(slot), index.evicted(slot)) == (3, 2)


def test_a_capacity_counts_to_the_block(index: PrefixIndex) -> None:
    slot = index.add_backend()
    index.set_capacity(slot, 6)
    index.insert(slot, prompt("abcdef"))
    assert (index.blocks_of(slot), index.evicted(slot)) == (6, 0)
    index.set_capacity(slot, 5)
    assert (index.blocks_of(slot), index.evicted(slot)) == (5, 1)
    index.set_capacity(slot, 0)
    index.insert(slot, prompt("abcdefghijkl"))
    assert index.blocks_of(slot) == 12


def test_one_backends_eviction_leaves_the_others_alone(index: PrefixIndex) -> None:
    a, b = index.add_backend(), index.add_backend()
    index.insert(a, prompt("abcdef"))
    index.insert(b, prompt("abcdef"))
    index.set_capacity(a, 2)
    assert matches(index, "abcdef", 2) == [2, 6]
    index.set_capacity(b, 4)
    assert index.match(prompt("abcdef")) == 4


def test_a_removed_backend_leaves_nothing_and_its_slot_comes_again(index: PrefixIndex) -> None:
    a, b, c = (index.add_backend() for _ in range(3))
    for slot in (a, b, c):
        index.insert(slot, prompt("shared", slot))
    index.set_capacity(b, 100)
    index.match(prompt("shared"))
    index.remove_backend(b)
    assert index.matched[b] == 0
    assert len(index) == 14
    assert matches(index, "shared1", 3) == [6, 0, 6]
    with pytest.raises(ValueError, match="slot"):
        index.blocks_of(b)
    assert index.add_backend() == b
    assert (index.blocks_of(b), index.evicted(b)) == (0, 0)
    index.insert(b, prompt("q" * 200))
    assert index.blocks_of(b) == 200, "the capacity of the one before is gone"


def test_a_removed_last_backend_reads_as_zero(index: PrefixIndex) -> None:
    a, b = index.add_backend(), index.add_backend()
    index.insert(a, prompt("ab"))
    index.insert(b, prompt("abc"))
    index.match(prompt("abc"))
    index.remove_backend(b)
    assert index.matched[: b + 1].tolist() == [2, 0]
    assert matches(index, "abc", 2) == [2, 0]


def test_a_cleared_backend_keeps_its_place_and_capacity(index: PrefixIndex) -> None:
    a, b = index.add_backend(), index.add_backend()
    index.set_capacity(a, 4)
    index.insert(a, prompt("abcdef"))
    index.insert(b, prompt("abcdef"))
    index.clear_backend(a)
    assert matches(index, "abcdef", 2) == [0, 6]
    assert index.insert(a, prompt("abcdef")) == 4
    assert index.evicted(a) == 0, "clearing is no eviction"


def test_forgetting_drops_the_rest_of_the_prompt_and_all_below_it(index: PrefixIndex) -> None:
    a, b = index.add_backend(), index.add_backend()
    index.insert(a, prompt("abcd"))
    index.insert(a, prompt("abcdef"))
    index.insert(a, prompt("abcdefgh"))
    index.insert(a, prompt("abcdexyz"))
    index.insert(a, prompt("abq"))
    index.insert(b, prompt("abcdef"))
    assert index.forget_after(a, prompt("abcdef"), 4) == 7  # ef, gh, xyz
    assert matches(index, "abcdefgh", 2) == [4, 6]
    assert matches(index, "abcdexyz", 2) == [4, 5]
    assert index.match_one(a, prompt("abq")) == 3
    assert index.evicted(a) == 0, "forgetting is no eviction"


@pytest.mark.parametrize("keep", [0, 1, 2, 3, 4, 5, 6, 2**40])
def test_forgetting_keeps_exactly_what_it_was_told(index: PrefixIndex, keep: int) -> None:
    slot = index.add_backend()
    index.insert(slot, prompt("abc"))
    index.insert(slot, prompt("abd"))  # a node boundary at 2
    index.insert(slot, prompt("abcde"))
    held = len(index)
    dropped = index.forget_after(slot, prompt("abcde"), keep)
    assert index.match_one(slot, prompt("abcde")) == min(keep, 5)
    assert len(index) == held - dropped
    assert index.match_one(slot, prompt("abd")) == (3 if keep >= 2 else keep)


def test_forgetting_what_branches_off_before_drops_nothing(index: PrefixIndex) -> None:
    a, b = index.add_backend(), index.add_backend()
    index.insert(a, prompt("abcdef"))
    index.insert(b, prompt("abcxyz"))
    assert index.forget_after(a, prompt("abcxyz"), 3) == 0
    assert index.forget_after(a, prompt("zzz"), 0) == 0
    assert index.forget_after(b, prompt("abcdef"), 5) == 0
    assert len(index) == 12


def test_wrong_slots_raise(index: PrefixIndex) -> None:
    live = index.add_backend()
    index.add_backend()
    gone = index.add_backend()
    index.remove_backend(gone)
    calls: list[Callable[[int], object]] = [
        index.remove_backend,
        index.clear_backend,
        index.blocks_of,
        index.evicted,
        lambda slot: index.set_capacity(slot, 1),
        lambda slot: index.insert(slot, prompt("a")),
        lambda slot: index.match_one(slot, prompt("a")),
        lambda slot: index.forget_after(slot, prompt("a"), 0),
    ]
    for call in calls:
        for slot in (gone, live - 1, 500, 2**40):
            with pytest.raises(ValueError, match="no backend has slot"):
                call(slot)


def test_wrong_numbers_raise(index: PrefixIndex) -> None:
    slot = index.add_backend()
    index.insert(slot, prompt("abc"))
    with pytest.raises(ValueError, match="capacity"):
        index.set_capacity(slot, -1)
    with pytest.raises(ValueError, match="keep"):
        index.forget_after(slot, prompt("abc"), -1)
    assert index.blocks_of(slot) == 3
    for kind in ("native", "reference"):
        with pytest.raises(ValueError, match="memory_limit_bytes"):
            build_index(kind, MIN_MEMORY_LIMIT_BYTES - 1)  # type: ignore[arg-type]


def test_wrong_types_raise() -> None:
    tree = PrefixTree(AMPLE)
    slot = tree.add_backend()
    for wrong in (None, [1, 2], b"ab"):
        for call in (tree.match, lambda b: tree.insert(slot, b), lambda b: tree.match_one(slot, b)):
            with pytest.raises(TypeError):
                call(wrong)
        with pytest.raises(TypeError):
            tree.forget_after(slot, wrong, 0)  # type: ignore[arg-type]
    for wrong_slot in (None, "0", 0.0):
        with pytest.raises(TypeError):
            tree.insert(wrong_slot, prompt("a"))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        PrefixTree("1 GB")  # type: ignore[arg-type]


def test_there_is_room_for_so_many_backends_and_no_more(index: PrefixIndex) -> None:
    assert [index.add_backend() for _ in range(MAX_BACKENDS)] == list(range(MAX_BACKENDS))
    with pytest.raises(ValueError, match="at most"):
        index.add_backend()
    index.insert(MAX_BACKENDS - 1, prompt("ab"))
    assert index.match(prompt("ab")) == 2
    assert index.matched[MAX_BACKENDS - 1] == 2
    index.remove_backend(7)
    assert index.add_backend() == 7


def test_a_shortened_result_array_is_refused_not_overrun() -> None:
    tree = PrefixTree(AMPLE)
    slot = tree.add_backend()
    tree.insert(slot, prompt("ab"))
    assert isinstance(tree.matched, array)
    del tree.matched[10:]
    with pytest.raises(ValueError, match="matched"):
        tree.match(prompt("ab"))
    with pytest.raises(ValueError, match="matched"):
        tree.remove_backend(slot)


def test_runs_are_not_parted_without_need() -> None:
    # A conversation that grows is one run, for all of its holders.
    tree = PrefixTree(AMPLE)
    a, b = tree.add_backend(), tree.add_backend()
    for n in range(1, 50):
        tree.insert(a, BlockHashes.from_list(list(range(n))))
    tree.insert(b, BlockHashes.from_list(list(range(30))))
    assert (tree.node_count, tree.entry_count) == (1, 2)
    tree.insert(b, BlockHashes.from_list([*range(30), 77]))
    assert tree.node_count == 3
    tree.check()
