"""The native tree and the plain reference go through the same steps and hold the same, block for block, at each."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from native.block_hash import BlockHashes
from native.prefix_tree import MIN_MEMORY_LIMIT_BYTES, PrefixTree
from router.index.reference import ReferenceIndex

AMPLE = 1 << 30


class Indices(RuleBasedStateMachine):
    """Prompts branch off earlier ones anywhere: at the end of a run, inside it, or before it ends."""

    memory_limit_bytes = AMPLE
    longest_tail = 6
    hashes = 3  # few, so that branches meet again, and one hash stands in many places

    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree(self.memory_limit_bytes)
        self.reference = ReferenceIndex(1 << 40)
        self.prompts: list[list[int]] = [[]]
        self.slots: list[int] = []

    @initialize(backends=st.integers(1, 3))
    def begin(self, backends: int) -> None:
        for _ in range(backends):
            self.add_backend()

    def evicted_alike(self, before: int) -> None:
        # Bytes are the tree's own affair: the reference is told how much the limit took, and must find the same blocks.
        self.reference.evict_oldest(self.tree.evicted_by_memory - before)

    def prompt(self, data: st.DataObject) -> BlockHashes:
        base = data.draw(st.sampled_from(self.prompts), label="base")
        kept = data.draw(st.integers(0, len(base)), label="kept")
        tail = data.draw(st.integers(0, self.longest_tail), label="tail")
        draw = random.Random(data.draw(st.integers(0, 2**16), label="seed"))
        made = base[:kept] + [draw.randrange(self.hashes) for _ in range(tail)]
        if len(self.prompts) < 50:
            self.prompts.append(made)
        return BlockHashes.from_list(made)

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def insert(self, data: st.DataObject) -> None:
        slot, prompt = data.draw(st.sampled_from(self.slots)), self.prompt(data)
        before = self.tree.evicted_by_memory
        assert self.tree.insert(slot, prompt) == self.reference.insert(slot, prompt)
        self.evicted_alike(before)

    @rule(data=st.data())
    def match(self, data: st.DataObject) -> None:
        prompt = self.prompt(data)
        longest = self.tree.match(prompt)
        assert longest == self.reference.match(prompt)
        assert self.tree.matched == self.reference.matched
        assert longest == max(self.tree.matched)
        for slot in self.slots:
            assert (
                self.tree.match_one(slot, prompt) == self.tree.matched[slot] == self.reference.match_one(slot, prompt)
            )

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def forget_after(self, data: st.DataObject) -> None:
        slot, prompt = data.draw(st.sampled_from(self.slots)), self.prompt(data)
        keep = data.draw(st.integers(0, len(prompt) + 1))
        assert self.tree.forget_after(slot, prompt, keep) == self.reference.forget_after(slot, prompt, keep)
        assert self.tree.match_one(slot, prompt) <= keep

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), capacity=st.integers(0, 20))
    def set_capacity(self, data: st.DataObject, capacity: int) -> None:
        slot = data.draw(st.sampled_from(self.slots))
        self.tree.set_capacity(slot, capacity)
        self.reference.set_capacity(slot, capacity)

    @precondition(lambda self: len(self.slots) < 5)
    @rule()
    def add_backend(self) -> None:
        before = self.tree.evicted_by_memory
        slot = self.tree.add_backend()
        assert slot == self.reference.add_backend()
        self.evicted_alike(before)
        self.slots.append(slot)

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def remove_backend(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.slots))
        self.slots.remove(slot)
        self.tree.remove_backend(slot)
        self.reference.remove_backend(slot)

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def clear_backend(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.slots))
        self.tree.clear_backend(slot)
        self.reference.clear_backend(slot)

    @rule(data=st.data(), after=st.integers(1, 6))
    def run_out_of_memory(self, data: st.DataObject, after: int) -> None:
        if not self.slots:
            return
        slot, prompt = data.draw(st.sampled_from(self.slots)), self.prompt(data)
        before = self.tree.evicted_by_memory
        self.tree._fail_allocation(after)
        try:
            fresh = self.tree.insert(slot, prompt)
        except MemoryError:
            return  # the invariants see to it that nothing changed
        finally:
            self.tree._fail_allocation(0)
        assert fresh == self.reference.insert(slot, prompt)
        self.evicted_alike(before)

    @invariant()
    def the_tree_is_sound(self) -> None:
        self.tree.check()
        self.reference.check()

    @invariant()
    def both_hold_the_same(self) -> None:
        assert len(self.tree) == len(self.reference)
        for slot in self.slots:
            assert self.tree.blocks_of(slot) == self.reference.blocks_of(slot)
            assert self.tree.evicted(slot) == self.reference.evicted(slot)
        held = self.tree.holdings()
        wanted = self.reference.holdings()
        for slot in self.slots:
            assert held[slot] == wanted[slot]

    def teardown(self) -> None:
        for slot in self.slots:
            self.tree.remove_backend(slot)
        self.tree.check()
        assert (len(self.tree), self.tree.node_count, self.tree.entry_count) == (0, 0, 0)
        fresh = PrefixTree(AMPLE)
        fresh.add_backend()  # the array of backends is the one that never shrinks
        assert self.tree.memory_bytes() == fresh.memory_bytes()


class CrowdedIndices(Indices):
    """The same at the smallest memory limit, with prompts that exceed it many times over."""

    memory_limit_bytes = MIN_MEMORY_LIMIT_BYTES
    longest_tail = 4000
    hashes = 2**32


Indices.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
CrowdedIndices.TestCase.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)

TestTreeAgainstReference = Indices.TestCase
TestTreeAgainstReferenceAtTheMemoryLimit = CrowdedIndices.TestCase
