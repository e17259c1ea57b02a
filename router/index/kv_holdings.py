"""What the engines hold by their own account: KV events of every rank, and the prompts that are on their way to them.

Written by the intake of KV events (kv_events/rank_feed.py calls it a sink) and by the strategy that sends; read by it.
"""

from __future__ import annotations

from native.kv_index import Applied, KvIndex
from native.sent_prompts import SentPrompts
from router.backends.backend import Backend


class EngineKv:
    """One engine's ranks in the index. `told`: its events are complete and up to date, so what is not there is not in
    the engine either."""

    __slots__ = ("ranks", "told")

    def __init__(self) -> None:
        self.ranks: tuple[int, ...] = ()
        self.told = False


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
        engine.told = False  # until somebody says so of all of them
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

    def set_told(self, backend: Backend, told: bool) -> None:
        """Whether all of its ranks are followed without a gap."""
        engine = self._engines.get(backend)
        if engine is not None:
            engine.told = told

    def engine(self, backend: Backend) -> EngineKv | None:
        """None where nothing is known of it by events."""
        return self._engines.get(backend)

    def block_tokens(self, backend: Backend) -> int:
        """The block size of its events; before its first one that which it reports, 0 for none."""
        engine = self._engines.get(backend)
        if engine is not None:
            for rank in engine.ranks:
                size = self.index.rank_block_size(rank)
                if size:
                    return size
        return backend.report.block_size_tokens or 0

    def held_blocks(self, backend: Backend) -> int:
        engine = self._engines.get(backend)
        return 0 if engine is None else sum(self.index.blocks_of(rank) for rank in engine.ranks)
