"""The contract of the KV index, case by case; at random, beside the reference: tests/property."""

from __future__ import annotations

import random
from array import array
from typing import Any

import msgspec
import pytest

from native.kv_index import (
    MAX_GROUPS,
    MAX_ORPHANS_PER_RANK,
    MAX_RANKS,
    MIN_MEMORY_LIMIT_BYTES,
    Applied,
    KvIndex,
)
from native.token_hash import block_hashes
from router.index import kv_reference

AMPLE = 1 << 26
SIZE = 4


def frame(*events: Any) -> bytes:
    return msgspec.msgpack.encode([1.5, events, 0])


def stored(first: int, tokens: list[int], parent: int | None = None, size: int = SIZE, **more: Any) -> dict[str, Any]:
    """Blocks of these tokens, named first, first + 1, ..."""
    return {
        "type": "BlockStored",
        "block_hashes": list(range(first, first + len(tokens) // size)),
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": size,
        **more,
    }


def removed(*names: int, **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(names), **more}


def retiered(*names: int, **more: Any) -> dict[str, Any]:
    return stored(0, [], **more) | {"block_hashes": list(names), "block_size": 0}


CLEARED = {"type": "AllBlocksCleared"}
PROMPT = list(range(100, 124))  # six blocks


def runs(index: KvIndex, rank: int, tokens: list[int] = PROMPT, size: int = SIZE, **more: Any) -> tuple[int, int, int]:
    index.match(block_hashes(tokens, size, **more), size)
    index.check()
    return index.matched_gpu[rank], index.matched_cpu[rank], index.matched_any[rank]


@pytest.fixture
def index() -> KvIndex:
    return KvIndex(AMPLE)


def test_the_reference_has_the_same_bounds() -> None:
    assert (MAX_RANKS, MAX_GROUPS, MAX_ORPHANS_PER_RANK) == (
        kv_reference.MAX_RANKS,
        kv_reference.MAX_GROUPS,
        kv_reference.MAX_ORPHANS_PER_RANK,
    )


def test_an_empty_index_matches_nothing(index: KvIndex) -> None:
    assert index.match(block_hashes(PROMPT, SIZE), SIZE) == 0
    rank = index.add_rank()
    assert runs(index, rank) == (0, 0, 0)
    assert (len(index), index.block_count, index.rank_block_size(rank)) == (0, 0, 0)


def test_a_hole_ends_the_run_and_filling_it_joins_the_rest(index: KvIndex) -> None:
    rank = index.add_rank()
    index.apply(rank, frame(stored(1, PROMPT)))
    assert runs(index, rank) == (6, 6, 6)
    assert index.apply(rank, frame(removed(3))).removed == 1
    assert runs(index, rank) == (2, 2, 2)
    assert index.blocks_of(rank) == 5
    index.apply(rank, frame(removed(1)))
    assert runs(index, rank) == (0, 0, 0)
    index.apply(rank, frame(stored(1, PROMPT[:4]), stored(3, PROMPT[8:12], parent=2)))
    assert runs(index, rank) == (6, 6, 6)


def test_holders_of_different_lengths_are_told_apart(index: KvIndex) -> None:
    ranks = [index.add_rank() for _ in range(5)]
    for n, rank in enumerate(ranks):
        index.apply(rank, frame(stored(1, PROMPT[: 4 * n])))
    index.apply(ranks[4], frame(removed(2)))
    assert index.match(block_hashes(PROMPT, SIZE), SIZE) == 3
    assert index.matched_gpu[:6].tolist() == [0, 1, 2, 3, 1, 0]
    assert index.block_count == 4


def test_a_hash_stored_twice_is_removed_twice(index: KvIndex) -> None:
    rank = index.add_rank()
    assert index.apply(rank, frame(stored(1, PROMPT), stored(5, PROMPT[16:], parent=4))).duplicates == 2
    index.apply(rank, frame(removed(6), removed(5)))
    assert runs(index, rank) == (6, 6, 6)
    index.apply(rank, frame(removed(6)))
    assert runs(index, rank) == (5, 5, 5)
    assert index.apply(rank, frame(removed(6))).absent == 1


def test_engines_with_different_seeds_share_blocks_and_remove_their_own(index: KvIndex) -> None:
    a, b = index.add_rank(), index.add_rank()
    index.apply(a, frame(stored(1, PROMPT)))
    index.apply(b, frame(stored(1000, PROMPT)))
    assert index.block_count == 6
    assert index.apply(b, frame(removed(3))).absent == 1
    index.apply(b, frame(removed(1002)))
    assert runs(index, a)[0] == 6
    assert runs(index, b)[0] == 2


def test_one_rank_may_have_two_names_for_a_block(index: KvIndex) -> None:
    # As before 0.17, where two salts look alike in events.
    rank = index.add_rank()
    index.apply(rank, frame(stored(1, PROMPT), stored(11, PROMPT)))
    assert index.blocks_of(rank) == 6
    index.apply(rank, frame(removed(*range(1, 7))))
    assert runs(index, rank) == (6, 6, 6)
    index.apply(rank, frame(removed(16)))
    assert runs(index, rank) == (5, 5, 5)


@pytest.mark.parametrize(
    ("name", "tier"),
    [("GPU", 0), ("gpu", 0), (None, 0), ("CPU", 1), ("cpu", 1), ("FS", 2), ("OBJ", 2), ("STORAGE", 2), ("disk", 2)],
)
def test_media_of_all_releases(index: KvIndex, name: str | None, tier: int) -> None:
    rank = index.add_rank()
    index.apply(rank, frame(stored(1, PROMPT, medium=name)))
    assert runs(index, rank) == tuple(6 if tier <= least else 0 for least in (0, 1, 2))
    assert index.apply(rank, frame(removed(6, medium="elsewhere" if tier != 2 else "GPU"))).absent == 1
    index.apply(rank, frame(removed(6, medium=name)))
    assert index.blocks_of(rank) == 5


def test_an_event_without_tokens_only_moves_known_blocks(index: KvIndex) -> None:
    rank, other = index.add_rank(), index.add_rank()
    index.apply(rank, frame(stored(1, PROMPT)))
    applied = index.apply(rank, frame(retiered(1, 2, 3, 99, medium="CPU")))
    assert (applied.retiered, applied.absent) == (3, 1)
    assert index.apply(other, frame(retiered(1, medium="CPU"))).absent == 1
    index.apply(rank, frame(removed(*range(1, 7), medium="GPU")))
    assert runs(index, rank) == (0, 3, 3)
    index.apply(rank, frame(retiered(1, 2, medium="STORAGE"), removed(1, medium="CPU")))
    assert runs(index, rank) == (0, 0, 3)


def test_tiers_add_up_along_a_run(index: KvIndex) -> None:
    rank = index.add_rank()
    index.apply(
        rank,
        frame(
            stored(1, PROMPT[:8]), stored(3, PROMPT[8:16], 2, medium="CPU"), stored(5, PROMPT[16:20], 4, medium="FS")
        ),
    )
    assert runs(index, rank) == (2, 4, 5)


def test_a_block_is_present_when_all_groups_of_the_rank_hold_it(index: KvIndex) -> None:
    rank = index.add_rank()
    index.apply(rank, frame(stored(1, PROMPT, group_idx=0)))
    assert runs(index, rank)[0] == 6
    index.apply(rank, frame(stored(1, PROMPT[:16], group_idx=1)))
    assert runs(index, rank)[0] == 4
    index.apply(rank, frame(removed(2, group_idx=0)))
    assert runs(index, rank)[0] == 1
    assert index.apply(rank, frame(stored(50, PROMPT, group_idx=MAX_GROUPS))).unknown == 1
    # Another group's block size counts for nothing.
    assert index.apply(rank, frame(stored(60, PROMPT, size=8, group_idx=2))).other_size == 1
    assert runs(index, rank)[0] == 1


def test_another_block_size_forgets_what_was_held_under_the_old_one(index: KvIndex) -> None:
    rank, other = index.add_rank(), index.add_rank()
    index.apply(rank, frame(stored(1, PROMPT)))
    index.apply(other, frame(stored(1, PROMPT)))
    assert index.apply(rank, frame(stored(30, PROMPT[:2], size=2))).other_size == 1  # a partial block
    assert index.apply(rank, frame(stored(31, PROMPT, size=8, medium="CPU"))).other_size == 1
    applied = index.apply(rank, frame(stored(40, PROMPT, size=8)))
    assert applied.block_size_changed
    assert index.rank_block_size(rank) == 8
    assert runs(index, rank) == (0, 0, 0)
    assert runs(index, rank, size=8) == (3, 3, 3)
    assert runs(index, other) == (6, 6, 6)
    assert runs(index, other, size=8) == (0, 0, 0)


def test_clearing_is_at_once_and_for_one_rank_and_all_tiers(index: KvIndex) -> None:
    a, b = index.add_rank(), index.add_rank()
    for rank in (a, b):
        index.apply(rank, frame(stored(1, PROMPT), retiered(1, 2, medium="CPU"), stored(80, [1] * 4, parent=79)))
    assert index.apply(a, frame(CLEARED)).cleared == 1
    assert runs(index, a) == (0, 0, 0)
    assert (index.blocks_of(a), index.orphans_of(a)) == (0, 0)
    assert runs(index, b) == (6, 6, 6)
    index.clear_rank(b)
    assert (index.block_count, len(index)) == (0, 0)
    index.apply(a, frame(stored(1, PROMPT)))
    assert runs(index, a) == (6, 6, 6)
    assert runs(index, b) == (0, 0, 0)


def test_adapters_salts_and_images_keep_apart_what_they_should(index: KvIndex) -> None:
    rank = index.add_rank()
    index.apply(
        rank,
        frame(
            stored(1, PROMPT, lora_name="lora", extra_keys=[["lora", "salt"], ["lora"], *[None] * 4]),
            stored(11, PROMPT, extra_keys=[None, [["img", 2]], [["img", -2], b"digest"], None, None, None]),
            stored(21, PROMPT, extra_keys=[None, ["img"], None, None, None, None]),  # before 0.20
        ),
    )
    assert runs(index, rank) == (1, 1, 1)
    assert runs(index, rank, lora="lora", salt="salt") == (6, 6, 6)
    assert runs(index, rank, lora="lora") == runs(index, rank, salt="salt") == (0, 0, 0)
    assert runs(index, rank, mm=[("img", 6, 2)]) == (6, 6, 6)
    assert runs(index, rank, mm=[("other", 6, 2)]) == (1, 1, 1)


def test_an_orphan_waits_for_its_parent_and_brings_its_children(index: KvIndex) -> None:
    rank, other = index.add_rank(), index.add_rank()
    applied = index.apply(rank, frame(stored(5, PROMPT[16:], parent=4), stored(3, PROMPT[8:16], parent=2)))
    assert (applied.orphans, applied.stored, index.orphans_of(rank)) == (2, 0, 2)
    index.apply(other, frame(stored(1, PROMPT[:8])))  # the parent of another rank is none
    assert index.orphans_of(rank) == 2
    applied = index.apply(rank, frame(stored(1, PROMPT[:8])))
    assert (applied.joined, applied.stored, index.orphans_of(rank)) == (2, 6, 0)
    assert runs(index, rank) == (6, 6, 6)


def test_what_is_removed_while_it_waits_does_not_come_back(index: KvIndex) -> None:
    rank = index.add_rank()
    index.apply(rank, frame(stored(3, PROMPT[8:], parent=2), removed(5)))
    index.apply(rank, frame(stored(1, PROMPT[:8])))
    assert runs(index, rank) == (4, 4, 4)
    index.apply(rank, frame(stored(30, PROMPT[:8], parent=29), removed(30)))
    assert index.orphans_of(rank) == 0


def test_the_oldest_orphan_goes_at_the_bound(index: KvIndex) -> None:
    rank = index.add_rank()
    events = [stored(10 * n + 1, PROMPT[:4], parent=10 * n) for n in range(1, MAX_ORPHANS_PER_RANK + 3)]
    applied = index.apply(rank, frame(*events))
    assert (applied.orphans, applied.orphans_dropped) == (MAX_ORPHANS_PER_RANK + 2, 2)
    assert index.orphans_of(rank) == MAX_ORPHANS_PER_RANK
    assert index.apply(rank, frame(stored(20, PROMPT[:4]))).joined == 0
    assert index.apply(rank, frame(stored(30, PROMPT[4:8]))).joined == 1
    index.check()


def test_orphans_take_a_sixteenth_of_the_memory_at_most() -> None:
    index = KvIndex(MIN_MEMORY_LIMIT_BYTES)
    rank = index.add_rank()
    events = [stored(1000 * n + 1, [7] * 4000, parent=1000 * n) for n in range(1, 40)]
    applied = index.apply(rank, frame(*events))
    assert applied.orphans_dropped > 0
    assert index.orphans_of(rank) == 39 - applied.orphans_dropped > 0
    index.check()


def test_ranks_come_again_and_are_bounded(index: KvIndex) -> None:
    ranks = [index.add_rank() for _ in range(MAX_RANKS)]
    assert ranks == list(range(MAX_RANKS))
    with pytest.raises(ValueError, match="at most"):
        index.add_rank()
    index.apply(77, frame(stored(1, PROMPT)))
    index.remove_rank(77)
    index.match(block_hashes(PROMPT, SIZE), SIZE)
    assert index.matched_any[77] == 0
    assert index.add_rank() == 77
    assert runs(index, 77) == (0, 0, 0)


@pytest.mark.parametrize("method", ["remove_rank", "clear_rank", "blocks_of", "evicted", "incomplete", "orphans_of"])
@pytest.mark.parametrize("rank", [-1, 1, 2, 1 << 40])
def test_a_rank_that_is_not_there_is_refused(index: KvIndex, method: str, rank: int) -> None:
    index.add_rank()
    index.add_rank()
    index.remove_rank(1)
    with pytest.raises(ValueError, match="no rank"):
        getattr(index, method)(rank)
    with pytest.raises(ValueError, match="no rank"):
        index.apply(rank, b"")


def test_many_ranks_hold_one_prefix_and_drop_it_in_any_order(index: KvIndex) -> None:
    ranks = [index.add_rank() for _ in range(300)]
    for rank in ranks:
        index.apply(rank, frame(stored(1, PROMPT)))
    assert (index.block_count, len(index)) == (6, 1800)
    assert index.match(block_hashes(PROMPT, SIZE), SIZE) == 6
    assert index.matched_gpu[:301].tolist() == [6] * 300 + [0]
    order = random.Random(1).sample(ranks, 300)
    for n, rank in enumerate(order[:150]):
        index.apply(rank, frame(removed(6))) if n % 2 else index.remove_rank(rank)
    index.check()
    index.match(block_hashes(PROMPT, SIZE), SIZE)
    gone, shorter = set(order[:150:2]), set(order[1:150:2])
    assert [index.matched_gpu[rank] for rank in ranks] == [
        0 if rank in gone else 5 if rank in shorter else 6 for rank in ranks
    ]


# --- malformed ---


def test_what_came_before_the_broken_place_is_applied(index: KvIndex) -> None:
    rank = index.add_rank()
    payload = frame(stored(1, PROMPT[:8]), stored(3, PROMPT[8:], parent=2))
    first = len(frame(stored(1, PROMPT[:8]))) - 1
    for end in range(len(payload)):
        index.clear_rank(rank)
        applied = index.apply(rank, payload[:end])
        assert applied.malformed
        assert index.blocks_of(rank) == (0 if end < first else 2 if end < len(payload) - 1 else 6)
    index.clear_rank(rank)
    assert not index.apply(rank, payload).malformed
    assert index.apply(rank, payload + b"\0").malformed
    index.check()


@pytest.mark.parametrize(
    "event",
    [
        {"type": "BlockMoved", "block_hashes": [1]},
        {"type": 7},
        {},
        [],
        [None],
        ["BlockStored", "no hashes"],
        "BlockStored",
        None,
        stored(1, PROMPT)["block_hashes"],
        stored(1, PROMPT) | {"token_ids": PROMPT[:-1]},
        stored(1, PROMPT) | {"token_ids": [*PROMPT[:-1], -1]},
        stored(1, PROMPT) | {"token_ids": [*PROMPT[:-1], 1 << 32]},
        stored(1, PROMPT) | {"block_hashes": [1, 2, 3, 4, 5, 6.5]},
        stored(1, PROMPT) | {"block_hashes": [1, 2, 3, 4, 5, b""]},
        stored(1, PROMPT) | {"block_hashes": [1, 2, 3, 4, 5, b"x" * 65]},
        stored(1, PROMPT) | {"block_size": 1 << 20},
        stored(1, PROMPT) | {"medium": 3},
        stored(1, PROMPT) | {"group_idx": -1},
        stored(1, PROMPT) | {"parent_block_hash": [1]},
    ],
)
def test_events_of_unknown_type_or_shape_are_skipped_and_counted(index: KvIndex, event: Any) -> None:
    rank = index.add_rank()
    applied = index.apply(rank, frame(event, stored(1, PROMPT[:4])))
    assert (applied.unknown, applied.stored, applied.malformed) == (1, 1, False)


def test_unknown_fields_and_their_nesting_are_skipped(index: KvIndex) -> None:
    rank = index.add_rank()
    more = {"ownership": {"a": [1, {"b": None}]}, "session_id": "x", 5: [[]]}
    assert index.apply(rank, frame({**more, **stored(1, PROMPT), **more})).stored == 6
    as_array: list[Any] = ["BlockStored", [11], None, PROMPT[:4], 4, None, "GPU", None, [None], 0, "full", "new", [{}]]
    assert index.apply(rank, frame(as_array)).stored == 1
    payload = msgspec.msgpack.encode([1, [CLEARED], None, {"x": [1]}, 5])
    assert index.apply(rank, payload).cleared == 1


@pytest.mark.parametrize(
    "hostile",
    [
        b"\x93\xcb" + bytes(8) + b"\x91" + b"\x91" * 200_000,  # nests without end
        b"\x93\xcb" + bytes(8) + b"\xdd\xff\xff\xff\xff" + b"\x80" * 100,
        b"\x93\xcb" + bytes(8) + b"\x91\x82\xa4type\xabBlockStored\xacblock_hashes\xdd\x7f\xff\xff\xff\x01",
        b"\x93\xcb" + bytes(8) + b"\x91\x81\xa9token_ids\xdd\x7f\xff\xff\xff\x01",
        b"\x93\xcb" + bytes(8) + b"\x91\xdf\xff\xff\xff\xff",
        b"\x93\xcb" + bytes(8) + b"\x91\xc6\xff\xff\xff\xff",
        b"\x93\xcb" + bytes(8) + b"\x91\x81\xc1",
        b"",
        b"\x93",
        b"\x91\x00",
        b"\x92\xa1a\x90",
        b"\xc0",
    ],
)
def test_lengths_and_depths_that_the_bytes_do_not_bear_out_cost_nothing(index: KvIndex, hostile: bytes) -> None:
    rank = index.add_rank()
    before = index.memory_bytes()
    assert index.apply(rank, hostile).malformed
    assert index.memory_bytes() == before


def test_a_frame_of_clears_does_not_sweep_the_index_each_time(index: KvIndex) -> None:
    # That the last cleared block is still in place shows it: a sweep at each clear would have taken it.
    big, small = index.add_rank(), index.add_rank()
    index.apply(big, frame(stored(1, list(range(200_000)))))
    one = [stored(7, PROMPT[:4]), CLEARED]
    applied = index.apply(small, frame(*one * 2000))
    assert (applied.cleared, applied.stored) == (2000, 2000)
    assert (index.blocks_of(small), index.blocks_of(big)) == (0, 50_000)
    assert index.block_count == 50_001  # one of them held by nobody alive
    index._purge()
    assert index.block_count == 50_000
    index.check()


# --- memory ---


def chain(rng: random.Random, n: int) -> dict[str, Any]:
    return stored(rng.getrandbits(60), [rng.getrandbits(17) for _ in range(n * SIZE)])


@pytest.mark.parametrize("length", [1, 30, 2000])
def test_the_limit_holds_and_what_is_left_matches(length: int) -> None:
    rng = random.Random(length)
    index = KvIndex(MIN_MEMORY_LIMIT_BYTES)
    ranks = [index.add_rank() for _ in range(3)]
    events = []
    for n in range(60_000 // length):
        events.append(chain(rng, length))
        assert index.apply(ranks[n % 3], frame(events[-1])).refused == 0
        assert index.memory_bytes() <= MIN_MEMORY_LIMIT_BYTES
        if n % (12_000 // length + 1) == 0:
            index.check()
    index.check()
    assert all(index.incomplete(rank) and index.evicted(rank) > 0 for rank in ranks)
    assert sum(index.evicted(rank) for rank in ranks) + len(index) == len(events) * length
    matched = [index.match(block_hashes(event["token_ids"], SIZE), SIZE) for event in events]
    # Leaves first: what is left of a prompt is its head, so all that is left can be matched.
    assert sum(matched) == len(index)
    assert matched[-1] == length
    assert len(index) * 60 > MIN_MEMORY_LIMIT_BYTES * 0.5
    index.clear_rank(ranks[0])
    assert not index.incomplete(ranks[0])


def test_a_prompt_beyond_the_limit_keeps_its_head_or_its_tail_but_never_a_lie() -> None:
    index = KvIndex(MIN_MEMORY_LIMIT_BYTES)
    rank = index.add_rank()
    tokens = [n % 100_000 for n in range(50_000 * SIZE)]
    applied = index.apply(rank, frame(stored(1, tokens)))
    assert applied.refused > 0
    assert index.incomplete(rank)
    assert index.memory_bytes() <= MIN_MEMORY_LIMIT_BYTES
    assert index.match(block_hashes(array("I", tokens), SIZE), SIZE) == index.blocks_of(rank) == applied.stored
    index.check()


@pytest.mark.parametrize("holders", [1, 8])
def test_bytes_a_block(holders: int) -> None:
    # At most 48 with one holder and 80 with eight of one seed, where tables stand worst, which a range of sizes finds.
    index = KvIndex(1 << 28)
    ranks = [index.add_rank() for _ in range(holders)]
    rng = random.Random(1)
    fixed = KvIndex(MIN_MEMORY_LIMIT_BYTES).memory_bytes()  # its tables are as good as none
    index.apply(ranks[0], frame(chain(rng, 30_000)))
    for _ in range(70):
        event = chain(rng, 1000)
        for rank in ranks:
            index.apply(rank, frame(event))
        assert (index.memory_bytes() - fixed) / index.block_count <= (48 if holders == 1 else 80)


def test_a_frame_larger_than_the_kept_scratch_leaves_no_memory_behind(index: KvIndex) -> None:
    rank = index.add_rank()
    before = index.memory_bytes()
    index.apply(rank, frame({"type": "BlockStored", "token_ids": [1] * 500_000}))
    assert index.memory_bytes() == before


def test_arguments_of_other_kinds_are_refused(index: KvIndex) -> None:
    rank = index.add_rank()
    with pytest.raises(ValueError, match="memory_limit_bytes"):
        KvIndex(MIN_MEMORY_LIMIT_BYTES - 1)
    for wrong in (bytearray(b"x"), "x", None):
        with pytest.raises(TypeError):
            index.apply(rank, wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        index.match([1], SIZE)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Applied()
    index.matched_gpu.pop()
    with pytest.raises(ValueError, match="shortened"):
        index.match(block_hashes([], SIZE), SIZE)
