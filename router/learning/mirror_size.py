"""How many blocks of ours an engine's KV pool holds."""

from __future__ import annotations

from typing import Final

TOLERANCE: Final = 0.05  # below it a change is not worth an eviction


class MirrorSize:
    """The capacity of one engine's mirror in index blocks, kept until the wanted one differs by over 5 %.

    A mirror of the wrong size costs dearly: too big it promises what is evicted, too small it forgets what is there.
    """

    __slots__ = ("_assumed_kv_tokens", "_block_bytes", "blocks")

    def __init__(self, block_bytes: int, assumed_kv_tokens: int) -> None:
        if block_bytes < 1 or assumed_kv_tokens < 1:
            raise ValueError("block_bytes and assumed_kv_tokens must be at least 1")
        self.blocks = 0  # as applied last; 0: never
        self._block_bytes = block_bytes
        self._assumed_kv_tokens = assumed_kv_tokens

    def update(self, kv_capacity_tokens: int | None, bytes_per_token: float) -> bool:
        """True if `blocks` changed and is to be applied. None: the engine does not report its capacity."""
        tokens = kv_capacity_tokens or self._assumed_kv_tokens
        wanted = max(int(tokens * bytes_per_token / self._block_bytes), 1)
        if abs(wanted - self.blocks) <= TOLERANCE * self.blocks:
            return False
        self.blocks = wanted
        return True
