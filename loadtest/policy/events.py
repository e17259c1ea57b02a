"""The engines' KV events as the gateway takes them: batches in vLLM's encoding, into the native index.

A trace names blocks and not their tokens, so each token of a block is made of the block's name.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from loadtest.policy.fleet import Fleet
from loadtest.policy.workload import Arrival, mixed
from router.backends.backend import Backend
from router.index.kv_holdings import KvHoldings
from router.sim.block_pool import Cleared, PoolEvent, Removed

MEMORY_BYTES: Final = 2 << 30
_TOKEN_MASK: Final = (1 << 32) - 1


class Told:
    def __init__(self, fleet: Fleet) -> None:
        self.holdings = KvHoldings(MEMORY_BYTES)
        self._fleet = fleet
        self._ranks: dict[int, int] = {}
        self._encode = msgspec.msgpack.Encoder().encode

    def follow(self, engine: int, backend: Backend) -> None:
        """From now on, and what is in its cache by now."""
        self._ranks[engine] = self.holdings.add_rank(backend, 0)
        self.holdings.set_followed(backend, True, complete=True)
        self.hear(engine, self._fleet.engines[engine].model.take_events())

    def hear(self, engine: int, events: Iterable[PoolEvent]) -> None:
        rank = self._ranks.get(engine)
        if rank is None:
            return
        applied = self.holdings.apply(rank, self._encode([0.0, [self._written(event) for event in events], 0]))
        assert not applied.malformed

    def ids_of(self, arrival: Arrival) -> array[int]:
        """The prompt's token ids: those of its blocks, and zeros in the last one that is not full."""
        size = self._fleet.block_tokens
        ids = array("I")
        for block in arrival.ids:
            ids.extend(array("I", [mixed(block) & _TOKEN_MASK]) * size)
        ids.extend(array("I", [0]) * (arrival.prompt_tokens - len(ids)))
        return ids

    def _written(self, event: PoolEvent) -> dict[str, Any]:
        if isinstance(event, Cleared):
            return {"type": "AllBlocksCleared"}
        if isinstance(event, Removed):
            return {"type": "BlockRemoved", "block_hashes": [mixed(event.hash)], "medium": "GPU"}
        size = self._fleet.block_tokens
        tokens: list[int] = []
        for block in event.hashes:
            tokens += [mixed(block) & _TOKEN_MASK] * size
        return {
            "type": "BlockStored",
            "block_hashes": [mixed(block) for block in event.hashes],
            "parent_block_hash": None if event.parent is None else mixed(event.parent),
            "token_ids": tokens,
            "block_size": size,
            "lora_id": None,
            "medium": "GPU",
        }
