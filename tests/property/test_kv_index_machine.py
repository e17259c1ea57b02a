"""The native KV index and the plain reference read the same batches and hold the same, reference for reference."""

from __future__ import annotations

from typing import Any

import msgspec
import xxhash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from native.kv_index import MIN_MEMORY_LIMIT_BYTES, KvIndex
from native.token_hash import block_hashes
from router.index.kv_reference import KvReference

AMPLE = 1 << 24
COUNTS = (
    "stored",
    "removed",
    "cleared",
    "unknown",
    "orphans",
    "joined",
    "orphans_dropped",
    "duplicates",
    "retiered",
    "absent",
    "other_size",
    "block_size_changed",
)


class Engines(RuleBasedStateMachine):
    """Engines with two seeds of hashes, so that ranks agree and disagree about names. Prompts are words over two
    tokens: they share prefixes, and meet again. What is stored or removed is any: no engine is this inconsistent."""

    sizes: tuple[int, ...] = (4, 4, 4, 4, 4, 2)

    def __init__(self) -> None:
        super().__init__()
        self.native = KvIndex(AMPLE)
        self.reference = KvReference()
        self.ranks: list[int] = []

    @initialize(ranks=st.integers(1, 4))
    def begin(self, ranks: int) -> None:
        for _ in range(ranks):
            self.add_rank()

    @precondition(lambda self: len(self.ranks) < 6)
    @rule()
    def add_rank(self) -> None:
        rank = self.native.add_rank()
        assert rank == self.reference.add_rank()
        self.ranks.append(rank)

    def engine_hashes(self, data: st.DataObject) -> tuple[list[int], list[int], int, str | None, str | None]:
        """(hashes of a prompt's blocks as an engine names them, tokens, block size, adapter, salt)"""
        size = data.draw(st.sampled_from(self.sizes), label="block size")
        words = data.draw(st.lists(st.sampled_from([5, 300]), min_size=1, max_size=4), label="words")
        tokens = [word for word in words for _ in range(size)]
        adapter = data.draw(st.sampled_from([None, None, None, "a"]), label="adapter")
        salt = data.draw(st.sampled_from([None, None, None, "s"]), label="salt")
        seed = data.draw(st.sampled_from(["one", "one", "two"]), label="seed")
        names = []
        name = f"{seed} {adapter} {salt}"
        for i in range(0, len(tokens), size):
            name += f" {tokens[i : i + size]}"
            names.append(xxhash.xxh3_64_intdigest(name.encode()))
        return names, tokens, size, adapter, salt

    def send(self, data: st.DataObject, *events: dict[str, Any]) -> None:
        rank = data.draw(st.sampled_from(self.ranks), label="rank")
        payload = msgspec.msgpack.encode([1.5, events, 0])
        applied = self.native.apply(rank, payload)
        expected = self.reference.apply(rank, payload)
        assert not applied.malformed
        assert {name: getattr(applied, name) for name in COUNTS} == {name: getattr(expected, name) for name in COUNTS}

    place = st.fixed_dictionaries(
        {},
        optional={
            "medium": st.sampled_from(["GPU", "GPU", "CPU", "cpu", "STORAGE", "FS", None]),
            "group_idx": st.sampled_from([0, 0, 0, 1, 16, None]),
        },
    )

    def stored(self, data: st.DataObject) -> dict[str, Any]:
        names, tokens, size, adapter, salt = self.engine_hashes(data)
        first = data.draw(st.integers(0, len(names) - 1), label="first")
        last = data.draw(st.integers(first + 1, len(names)), label="last")
        extras = [[each for each in (adapter, salt if i == 0 else None) if each] or None for i in range(len(names))]
        return {
            "type": "BlockStored",
            "block_hashes": names[first:last],
            "parent_block_hash": names[first - 1] if first else None,
            "token_ids": tokens[first * size : last * size],
            "block_size": size,
            "lora_name": adapter,
            "extra_keys": extras[first:last],
            **data.draw(self.place),
        }

    @precondition(lambda self: self.ranks)
    @rule(data=st.data(), count=st.integers(1, 3))
    def store(self, data: st.DataObject, count: int) -> None:
        self.send(data, *[self.stored(data) for _ in range(count)])

    @precondition(lambda self: self.ranks)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        names = self.engine_hashes(data)[0]
        some = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=4))
        self.send(data, {"type": "BlockRemoved", "block_hashes": some, **data.draw(self.place)})

    @precondition(lambda self: self.ranks)
    @rule(data=st.data())
    def retier(self, data: st.DataObject) -> None:
        names = self.engine_hashes(data)[0]
        event = {"type": "BlockStored", "block_hashes": names, "parent_block_hash": None, "token_ids": []}
        self.send(data, {**event, "block_size": 0, **data.draw(self.place)})

    @precondition(lambda self: self.ranks)
    @rule(data=st.data())
    def cleared_between_stores(self, data: st.DataObject) -> None:
        self.send(data, self.stored(data), {"type": "AllBlocksCleared"}, self.stored(data), {"type": "New", "x": [1]})

    @precondition(lambda self: self.ranks)
    @rule(data=st.data())
    def clear_rank(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from(self.ranks))
        self.native.clear_rank(rank)
        self.reference.clear_rank(rank)

    @precondition(lambda self: self.ranks)
    @rule(data=st.data())
    def remove_rank(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from(self.ranks))
        self.ranks.remove(rank)
        self.native.remove_rank(rank)
        self.reference.remove_rank(rank)

    @rule()
    def sweep(self) -> None:
        self.native._purge()

    @rule(data=st.data())
    def match(self, data: st.DataObject) -> None:
        _, tokens, size, adapter, salt = self.engine_hashes(data)
        blocks = block_hashes(tokens, size, adapter, salt)
        self.native.match(blocks, size)
        self.reference.match(blocks, size)
        for name in ("matched_gpu", "matched_cpu", "matched_any"):
            assert getattr(self.native, name)[:6] == getattr(self.reference, name)[:6]

    @invariant()
    def both_hold_the_same(self) -> None:
        self.native.check()
        for rank in self.ranks:
            assert self.native.holdings(rank) == self.reference.holdings(rank)
            assert self.native.blocks_of(rank) == self.reference.blocks_of(rank)
            assert self.native.orphans_of(rank) == self.reference.orphans_of(rank)
            assert self.native.rank_block_size(rank) == self.reference.rank_block_size(rank)
            assert not self.native.incomplete(rank)

    def teardown(self) -> None:
        for rank in self.ranks:
            self.native.remove_rank(rank)
        self.native._purge()
        self.native.check()
        assert (len(self.native), self.native.block_count) == (0, 0)


class EnginesWithoutMemory(Engines):
    """Allocations fail: the index may then know less than it was told, never more, and says of whom."""

    sizes = (4,)  # what sets a rank's block size may be what was lost

    @precondition(lambda self: self.ranks)
    @rule(data=st.data(), after=st.integers(1, 6))
    def run_out_of_memory(self, data: st.DataObject, after: int) -> None:
        self.native._fail_allocation(after)
        rank = data.draw(st.sampled_from(self.ranks))
        payload = msgspec.msgpack.encode([1.5, [self.stored(data), self.stored(data)], 0])
        try:
            self.native.apply(rank, payload)
        finally:
            self.native._fail_allocation(0)
        self.native.check()
        self.reference.apply(rank, payload)
        for each in self.ranks:
            known = self.reference.holdings(each)
            for name, (own, refs) in self.native.holdings(each).items():
                assert known[name][0] == own
                assert all(known[name][1][place] >= count for place, count in refs.items())
        # From here on they would differ: all ranks start anew.
        for each in self.ranks:
            self.native.remove_rank(each)
            self.reference.remove_rank(each)
        count = len(self.ranks)
        self.ranks = []
        for _ in range(count):
            self.add_rank()


Engines.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
EnginesWithoutMemory.TestCase.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)

TestIndexAgainstReference = Engines.TestCase
TestIndexWithoutMemory = EnginesWithoutMemory.TestCase


def test_the_smallest_limit_is_the_smallest() -> None:
    assert KvIndex(MIN_MEMORY_LIMIT_BYTES).memory_bytes() < MIN_MEMORY_LIMIT_BYTES
