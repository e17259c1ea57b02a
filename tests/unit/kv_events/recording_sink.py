"""A sink that remembers what it was given, for tests of the order."""

from __future__ import annotations

from dataclasses import dataclass

from router.backends.backend import Backend


@dataclass
class Done:
    stored: int = 1
    removed: int = 0
    cleared: int = 0
    unknown: int = 0
    malformed: bool = False


class RecordingSink:
    """`held` are a rank's payloads since its last clear; `seen` every one ever applied."""

    def __init__(self) -> None:
        self.held: dict[int, list[bytes]] = {}
        self.seen: dict[int, list[bytes]] = {}
        self.numbers: dict[tuple[Backend | str, int], int] = {}
        self.clears = 0
        self.limit = 1_000  # ranks at once
        self.on_apply = lambda rank: None

    def add_rank(self, backend: Backend | str, number: int) -> int:
        if len(self.held) == self.limit:
            raise ValueError
        rank = len(self.seen)
        self.numbers[backend, number] = rank
        self.held[rank], self.seen[rank] = [], []
        return rank

    def clear(self, rank: int) -> None:
        self.clears += bool(self.held[rank])
        self.held[rank] = []

    def apply(self, rank: int, payload: bytes) -> Done:
        self.held[rank].append(payload)
        self.seen[rank].append(payload)
        self.on_apply(rank)
        return Done(cleared=int(payload == b"cleared"), malformed=payload == b"broken")

    def remove(self, rank: int) -> None:
        del self.held[rank]

    def blocks_of(self, rank: int) -> int:
        return len(self.held[rank])
