"""Token ids of parts of prompts, least recently used out first, within a bound of bytes.

The key is a hash of the part alone, seeded at random: at a seam (seams.py) the ids of a part do not depend on what is
before it. So a growing conversation finds all of its turns again, and a turn that many conversations share is kept
once, also behind a system prompt that carries the time of day. (A hash chained over the whole prefix would keep it
once for each conversation, and find nothing behind the first difference.)
"""

from __future__ import annotations

import secrets
import sys
import threading
from array import array
from collections import OrderedDict
from typing import Final

import xxhash

# An entry without its ids: key, array header, their slots in the ordered dict and its list (CPython 3.11, 64 bits).
ENTRY_BYTES: Final = sys.getsizeof(b"0" * 16) + sys.getsizeof(array("I")) + 176


class SegmentCache:
    """Shared by the threads that tokenize and by all models of a process; `limit_bytes` counts keys and ids."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._seed = secrets.randbits(64)
        self._entries: OrderedDict[bytes, array[int]] = OrderedDict()
        self._bytes = 0
        self._spaces = 0
        self._lock = threading.Lock()
        self.hit_tokens = 0
        self.missed_tokens = 0
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._entries)

    def memory_bytes(self) -> int:
        return self._bytes

    def new_space(self) -> int:
        """A number for one tokenizer: key() keeps its parts from those of others."""
        self._spaces += 1
        return self._spaces

    def key(self, space: int, part: bytes) -> bytes:
        """128 bits; `space` is of new_space()."""
        return xxhash.xxh3_128_digest(part, self._seed ^ space)

    def find(self, keys: list[bytes]) -> list[array[int] | None]:
        """In the order of `keys`. The arrays are shared: not to be changed."""
        with self._lock:
            found = []
            for key in keys:
                ids = self._entries.get(key)
                if ids is not None:
                    self._entries.move_to_end(key)
                    self.hit_tokens += len(ids)
                found.append(ids)
            return found

    def keep(self, fresh: list[tuple[bytes, array[int]]]) -> None:
        """What is larger than an eighth of the cache is not kept: it would drive out all others."""
        with self._lock:
            for key, ids in fresh:
                self.missed_tokens += len(ids)
                size = ENTRY_BYTES + ids.itemsize * len(ids)
                if size > self._limit_bytes // 8 or key in self._entries:
                    continue
                self._entries[key] = ids
                self._bytes += size
                while self._bytes > self._limit_bytes:
                    _, oldest = self._entries.popitem(last=False)
                    self._bytes -= ENTRY_BYTES + oldest.itemsize * len(oldest)
                    self.evicted += 1

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._bytes = 0

    def check(self) -> None:
        """Raises AssertionError with the detail where the sums are wrong."""
        with self._lock:
            size = sum(ENTRY_BYTES + ids.itemsize * len(ids) for ids in self._entries.values())
            assert size == self._bytes, f"{size} bytes held, {self._bytes} counted"
            assert size <= self._limit_bytes, f"{size} bytes held, {self._limit_bytes} allowed"
