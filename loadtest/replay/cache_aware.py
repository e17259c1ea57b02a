"""A placement to compare with that needs no router: the client itself sends each request straight to an engine.

It is sglang's cache_aware as its router describes it: where the engines' outstanding requests differ by more than 32
and by more than a tenth, the one with the fewest; else the engine that was sent the longest part of the prompt before,
if that is more than half of it; else the one that was sent the least text. Its tree is by characters, ours by blocks of
16 of them. It saves a router's own time, and knows of all its requests at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from router.index.prefix_index import BlockHashes, build_index

THRESHOLD: Final = 0.5
APART: Final = 32
RATIO: Final = 1.1
BLOCK_BYTES: Final = 16
TREE_BYTES: Final = 256 << 20


class CacheAware:
    def __init__(self, engines: Sequence[str]) -> None:
        self._engines = list(engines)
        self._tree = build_index("native", TREE_BYTES)
        self._slots = [self._tree.add_backend() for _ in engines]
        self._outstanding = [0] * len(self._engines)

    def choose(self, prompt: str) -> str:
        """The engine's URL; it counts as outstanding until `ended`."""
        blocks = BlockHashes.from_bytes(prompt.encode(), BLOCK_BYTES)
        least, most = min(self._outstanding), max(self._outstanding)
        if most - least > APART and most > RATIO * least:
            chosen = self._outstanding.index(least)
        else:
            longest = self._tree.match(blocks)
            matched = [self._tree.matched[slot] for slot in self._slots]
            if len(blocks) and longest > THRESHOLD * len(blocks):
                chosen = matched.index(longest)
            else:
                sizes = [self._tree.blocks_of(slot) for slot in self._slots]
                chosen = sizes.index(min(sizes))
        self._tree.insert(self._slots[chosen], blocks)
        self._outstanding[chosen] += 1
        return self._engines[chosen]

    def ended(self, engine: str) -> None:
        self._outstanding[self._engines.index(engine)] -= 1
