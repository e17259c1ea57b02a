"""A Python face for the open-addressing table, so that it is tested alone."""

from typing import Self, final

@final
class OpenTable:
    """A map from (hash: 64 bits, owner: 32 bits) to a value of 32 bits, 2**32 - 1 excepted.

    `capacity` (slots) is a power of two, at least 4, and doubles when three slots in four are full; 16 bytes a slot.
    `secret` fixes the two words that keep clients from choosing slots, for tests.
    """

    def __new__(cls, capacity: int = 8, *, secret: tuple[int, int] | None = None) -> Self: ...
    def __len__(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    def memory_bytes(self) -> int: ...
    def find(self, hash: int, owner: int) -> int | None: ...
    def put(self, hash: int, owner: int, value: int) -> None: ...
    def erase(self, hash: int, owner: int) -> bool:
        """True where the key was there."""

    def clear(self) -> None: ...
    def items(self) -> list[tuple[tuple[int, int], int]]:
        """In slot order, which means nothing."""

    def longest_probe(self) -> int:
        """Slots that a find of the worst placed key reads; 0 without keys."""

    def check(self) -> None:
        """Walk every slot; AssertionError where a key could not be found, is there twice, or the count is wrong."""

def new_secret() -> tuple[int, int]:
    """Two random words from the operating system, the second odd."""
