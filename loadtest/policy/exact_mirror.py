"""The priced choice on an exact index: what it would do if it knew each engine's cache as KV events tell it.

In the place of the mirror stands the engines' own prefix caches, joined with what is on its way to them. It shows what
`kvaware` can reach before its index of events is there, and what a mirror costs.
"""

from __future__ import annotations

from array import array
from collections import Counter

from loadtest.policy.fleet import Fleet, Job
from loadtest.policy.workload import Arrival
from router.index.prefix_index import BlockHashes

GONE = -1  # in the place of the engine of a slot whose backend left


class ExactMirror:
    """`current`: whose blocks the next call is about; the caller sets it, as hashes do not lead back to the trace."""

    def __init__(self, fleet: Fleet) -> None:
        self.current: Arrival | None = None
        self.matched = array("q", [0] * len(fleet.engines))
        self._fleet = fleet
        self._coming: list[Counter[int]] = [Counter() for _ in fleet.engines]
        self._engine_of: list[int] = []
        self.joins = 0  # the engine that the next slot is for

    def arrived(self, job: Job) -> None:
        """Its prefill is over: its blocks are in the cache itself."""
        coming = self._coming[job.engine]
        for block in job.arrival.ids:
            if coming[block] > 1:
                coming[block] -= 1
            else:
                del coming[block]

    def add_backend(self) -> int:
        self._engine_of.append(self.joins)
        return len(self._engine_of) - 1

    def insert(self, slot: int, blocks: BlockHashes) -> int:
        assert self.current is not None
        self._coming[self._engine_of[slot]].update(self.current.ids)
        return len(blocks)

    def match(self, blocks: BlockHashes) -> int:
        longest = 0
        for slot, number in enumerate(self._engine_of):
            if number == GONE:
                continue
            found = self.match_one(slot, blocks)
            self.matched[slot] = found
            if found > longest:
                longest = found
        return longest

    def match_one(self, slot: int, blocks: BlockHashes) -> int:
        assert self.current is not None
        number, ids = self._engine_of[slot], self.current.ids
        engine, coming = self._fleet.engines[number], self._coming[number]
        found = engine.cached_blocks(self.current)
        if coming:
            while found < len(ids) and (ids[found] in coming or engine.model.pool.is_cached(ids[found])):
                found += 1
        return found

    def blocks_of(self, slot: int) -> int:
        return self._fleet.engines[self._engine_of[slot]].model.pool.cached_blocks

    # An engine's cache is what it is, whatever a router thinks of it.
    def set_capacity(self, slot: int, blocks: int) -> None: ...

    def clear_backend(self, slot: int) -> None: ...

    def remove_backend(self, slot: int) -> None:
        self._engine_of[slot] = GONE
        self.matched[slot] = 0

    def forget_after(self, slot: int, blocks: BlockHashes, keep: int) -> int:
        return 0
