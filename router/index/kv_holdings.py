"""What the engines hold by their own account: KV events of every rank, and the prompts that are on their way to them.

Written by the intake of KV events (kv_events/rank_feed.py calls it a sink) and by the strategy that sends; read by it.
"""

from __future__ import annotations

from array import array

from native.kv_index import Applied, KvIndex
from native.sent_prompts import SentPrompts
from native.token_hash import block_hashes
from router.backends.backend import Backend


class EngineKv:
    """One engine's ranks in the index. `followed`: its events are up to date, so that what they tell is there.
    `complete`: what they do not tell is not there."""

    __slots__ = ("complete", "followed", "ranks")

    def __init__(self) -> None:
        self.ranks: tuple[int, ...] = ()
        self.followed = self.complete = False


class KvHoldings:
    def __init__(self, memory_limit_bytes: int) -> None:
        """ValueError for less than native.kv_index.MIN_MEMORY_LIMIT_BYTES."""
        self.index = KvIndex(memory_limit_bytes)
        self.sent = SentPrompts()
        self._engines: dict[Backend, EngineKv] = {}
        self._owners: dict[int, Backend] = {}

    # --- the sink of the intake

    def add_rank(self, backend: Backend, number: int) -> int:
        """ValueError where the index has no number left."""
        rank = self.index.add_rank()
        engine = self._engines.get(backend)
        if engine is None:
            engine = self._engines[backend] = EngineKv()
        engine.ranks = (*engine.ranks, rank)
        engine.followed = engine.complete = False  # until somebody says so of all of them
        self._owners[rank] = backend
        return rank

    def clear(self, rank: int) -> None:
        self.index.clear_rank(rank)

    def apply(self, rank: int, payload: bytes) -> Applied:
        return self.index.apply(rank, payload)

    def remove(self, rank: int) -> None:
        backend = self._owners.pop(rank)
        engine = self._engines[backend]
        engine.ranks = tuple(other for other in engine.ranks if other != rank)
        if not engine.ranks:
            del self._engines[backend]
        self.index.remove_rank(rank)

    def blocks_of(self, rank: int) -> int:
        return self.index.blocks_of(rank)

    # --- who is known how well

    def set_followed(self, backend: Backend, followed: bool, complete: bool) -> None:
        """Of all of its ranks."""
        engine = self._engines.get(backend)
        if engine is not None:
            engine.followed, engine.complete = followed, followed and complete

    def told(self, backend: Backend) -> EngineKv | None:
        """The engine where all that it holds is known here: what is not in the index is not in the engine. Else None,
        be it for want of events or of memory."""
        engine = self._engines.get(backend)
        if engine is None or not engine.complete:
            return None
        for rank in engine.ranks:
            if self.index.incomplete(rank):
                return None
        return engine

    def heard(self, backend: Backend) -> EngineKv | None:
        """The engine where at least what the index has of it is there."""
        engine = self._engines.get(backend)
        return engine if engine is not None and engine.followed else None

    def out_of_memory(self, backend: Backend) -> bool:
        """Whether blocks of it had to be left out."""
        engine = self._engines.get(backend)
        return engine is not None and any(self.index.incomplete(rank) for rank in engine.ranks)

    def block_tokens(self, backend: Backend) -> int:
        """The block size of its events; before its first one that which it reports, 0 for none."""
        engine = self._engines.get(backend)
        if engine is not None:
            for rank in engine.ranks:
                size = self.index.rank_block_size(rank)
                if size:
                    return size
        return backend.report.block_size_tokens or 0

    def leading_tokens(self, backend: Backend, ids: array[int]) -> int:
        """How many tokens of a prompt without salt and adapter one of its ranks holds, from the beginning."""
        engine, size = self._engines.get(backend), self.block_tokens(backend)
        if engine is None or not size:
            return 0
        self.index.match(block_hashes(ids, size), size)
        return size * max(self.index.matched_any[rank] for rank in engine.ranks)

    def held_blocks(self, backend: Backend) -> int:
        engine = self._engines.get(backend)
        return 0 if engine is None else sum(self.index.blocks_of(rank) for rank in engine.ranks)
