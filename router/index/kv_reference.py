"""The KV index at its plainest: dicts of what each rank said, hashed by the xxhash package, read by msgspec.

The contract is in native/kv_index.pyi; nothing here is clever, so that a difference is the native index's mistake. It
has no memory limit, and takes well-formed batches only.
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass, field
from typing import Any

import msgspec
import xxhash

from native.block_hash import BlockHashes

MAX_RANKS = 4096
MAX_GROUPS = 16
MAX_ORPHANS_PER_RANK = 1024
ADAPTER_SEED = 0x6164617074657273
EXTRA_SEED = 0xA5E1C3B7985F2D61
FIELDS = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
MEDIA = {"gpu": 0, "cpu": 1}

Place = tuple[int, int]  # medium, group


@dataclass
class Counts:
    """As native Applied."""

    stored: int = 0
    removed: int = 0
    cleared: int = 0
    unknown: int = 0
    orphans: int = 0
    joined: int = 0
    orphans_dropped: int = 0
    duplicates: int = 0
    retiered: int = 0
    absent: int = 0
    other_size: int = 0
    block_size_changed: bool = False


@dataclass
class _Stored:
    hashes: list[int]
    parent: int | None
    tokens: list[int]
    block_size: int
    place: Place
    adapter: bytes
    extras: list[list[bytes]]


@dataclass
class _Rank:
    block_size: int = 0
    main_group: int = 0
    groups: set[int] = field(default_factory=set)
    held: dict[int, tuple[int, dict[Place, int]]] = field(default_factory=dict)  # engine hash -> own, references
    orphans: list[_Stored] = field(default_factory=list)  # the oldest first

    def forget(self) -> None:
        self.groups.clear()
        self.held.clear()
        self.orphans.clear()


def engine_hash(value: int | bytes) -> int:
    return value % 2**64 if isinstance(value, int) else xxhash.xxh3_64_intdigest(value)


def place_of(event: dict[str, Any]) -> Place:
    medium = event.get("medium")
    return 0 if medium is None else MEDIA.get(medium.lower(), 2), event.get("group_idx") or 0


def extras_of(entry: Any, adapter: bytes) -> list[bytes]:
    found = []
    for extra in entry if isinstance(entry, list) else [entry]:
        first = extra[0] if isinstance(extra, list) and extra else extra
        raw = first.encode() if isinstance(first, str) else first
        if isinstance(raw, bytes) and (not adapter or raw != adapter):
            found.append(raw)
    return found


class KvReference:
    """See native/kv_index.pyi."""

    def __init__(self) -> None:
        self.matched_gpu = array("I", bytes(4 * MAX_RANKS))
        self.matched_cpu = array("I", bytes(4 * MAX_RANKS))
        self.matched_any = array("I", bytes(4 * MAX_RANKS))
        self._ranks: dict[int, _Rank] = {}

    def add_rank(self) -> int:
        rank = next(rank for rank in range(MAX_RANKS) if rank not in self._ranks)
        self._ranks[rank] = _Rank()
        return rank

    def remove_rank(self, rank: int) -> None:
        del self._ranks[rank]
        self.matched_gpu[rank] = self.matched_cpu[rank] = self.matched_any[rank] = 0

    def clear_rank(self, rank: int) -> None:
        self._ranks[rank].forget()

    def apply(self, rank: int, payload: bytes) -> Counts:
        counts = Counts()
        for event in msgspec.msgpack.decode(payload)[1]:
            if isinstance(event, list):
                names = FIELDS.get(event[0], ())
                event = {"type": event[0], **dict(zip(names, event[1:], strict=False))}
            kind = event.get("type")
            if kind not in FIELDS or (kind != "AllBlocksCleared" and place_of(event)[1] >= MAX_GROUPS):
                counts.unknown += 1
            elif kind == "AllBlocksCleared":
                counts.cleared += 1
                self._ranks[rank].forget()
            elif kind == "BlockRemoved":
                self._remove(self._ranks[rank], event, counts)
            else:
                self._store_and_join(self._ranks[rank], event, counts)
        return counts

    def match(self, blocks: BlockHashes, block_size: int) -> int:
        hashes = blocks.tolist()
        longest = 0
        for number, rank in self._ranks.items():
            places: dict[int, set[Place]] = {}
            for own, refs in rank.held.values():
                places.setdefault(own, set()).update(refs)
            for media, matched in (
                ({0}, self.matched_gpu),
                ({0, 1}, self.matched_cpu),
                ({0, 1, 2}, self.matched_any),
            ):
                run = 0
                if rank.block_size == block_size:
                    for own in hashes:
                        here = places.get(own, set())
                        if not here or {group for medium, group in here if medium in media} != rank.groups:
                            break
                        run += 1
                matched[number] = run
                longest = max(longest, run)
        return longest

    def blocks_of(self, rank: int) -> int:
        return len({own for own, _ in self._ranks[rank].held.values()})

    def orphans_of(self, rank: int) -> int:
        return len(self._ranks[rank].orphans)

    def rank_block_size(self, rank: int) -> int:
        return self._ranks[rank].block_size

    def holdings(self, rank: int) -> dict[int, tuple[int, dict[Place, int]]]:
        return self._ranks[rank].held

    def _remove(self, rank: _Rank, event: dict[str, Any], counts: Counts) -> None:
        place = place_of(event)
        for value in event["block_hashes"]:
            name = engine_hash(value)
            refs = rank.held[name][1] if name in rank.held else {}
            if place in refs:
                counts.removed += 1
                refs[place] -= 1
                if not refs[place]:
                    del refs[place]
                if not refs:
                    del rank.held[name]
                continue
            orphan = next((each for each in rank.orphans if name in each.hashes and each.place == place), None)
            if orphan is None:
                counts.absent += 1
                continue
            counts.removed += 1
            del orphan.hashes[orphan.hashes.index(name) :]
            if not orphan.hashes:
                rank.orphans.remove(orphan)
                counts.orphans_dropped += 1

    def _store_and_join(self, rank: _Rank, event: dict[str, Any], counts: Counts) -> None:
        name = event.get("lora_name")
        number = event.get("lora_id")
        adapter = name.encode() if name else b"" if number is None else b"\0%d" % number
        extras = event.get("extra_keys") or []
        stored = _Stored(
            hashes=[engine_hash(value) for value in event["block_hashes"]],
            parent=None if event.get("parent_block_hash") is None else engine_hash(event["parent_block_hash"]),
            tokens=event["token_ids"],
            block_size=event["block_size"],
            place=place_of(event),
            adapter=adapter,
            extras=[extras_of(entry, name.encode() if name else b"") for entry in extras],
        )
        if stored.hashes and not stored.tokens:
            self._retier(rank, stored, counts)
            return
        work = [stored] if stored.hashes else []
        for each in work:  # grows as orphans find their parents
            if each is not stored:
                counts.joined += 1
            self._store(rank, each, counts)
            joining = [orphan for orphan in rank.orphans if orphan.parent in each.hashes and orphan.parent in rank.held]
            for orphan in joining:
                rank.orphans.remove(orphan)
            work += joining

    def _retier(self, rank: _Rank, stored: _Stored, counts: Counts) -> None:
        for name in stored.hashes:
            if name not in rank.held:
                counts.absent += 1
                continue
            rank.groups.add(stored.place[1])
            refs = rank.held[name][1]
            if stored.place in refs:
                counts.duplicates += 1
            else:
                counts.retiered += 1
            refs[stored.place] = refs.get(stored.place, 0) + 1

    def _right_size(self, rank: _Rank, stored: _Stored, counts: Counts) -> bool:
        medium, group = stored.place
        if stored.block_size == rank.block_size:
            rank.main_group = min(rank.main_group, group)
            return True
        if rank.held and (
            group > rank.main_group or medium != 0 or (len(stored.hashes) == 1 and stored.block_size < rank.block_size)
        ):
            counts.other_size += 1
            return False
        if rank.block_size:
            counts.block_size_changed |= group == rank.main_group
            rank.forget()
        rank.block_size = stored.block_size
        rank.main_group = group
        return True

    def _store(self, rank: _Rank, stored: _Stored, counts: Counts) -> None:
        if not self._right_size(rank, stored, counts):
            return
        chain = 0
        if stored.parent is None:
            if stored.adapter:
                chain = xxhash.xxh3_64_intdigest(stored.adapter, ADAPTER_SEED)
        elif stored.parent in rank.held:
            chain = rank.held[stored.parent][0]
        elif stored.hashes[0] not in rank.held:
            self._keep_orphan(rank, stored, counts)
            return
        rank.groups.add(stored.place[1])
        for i, name in enumerate(stored.hashes):
            if name in rank.held:
                chain, refs = rank.held[name]
            else:
                for extra in stored.extras[i] if i < len(stored.extras) else ():
                    chain = xxhash.xxh3_64_intdigest(extra, chain ^ EXTRA_SEED)
                tokens = stored.tokens[i * stored.block_size : (i + 1) * stored.block_size]
                chain = xxhash.xxh3_64_intdigest(struct.pack(f"<{len(tokens)}I", *tokens), chain)
                refs = {}
                rank.held[name] = (chain, refs)
            if stored.place in refs:
                counts.duplicates += 1
            else:
                counts.stored += 1
            refs[stored.place] = refs.get(stored.place, 0) + 1

    def _keep_orphan(self, rank: _Rank, stored: _Stored, counts: Counts) -> None:
        waiting = {name for orphan in rank.orphans for name in orphan.hashes}
        if waiting.intersection(stored.hashes):
            counts.duplicates += 1
            return
        counts.orphans += 1
        if len(rank.orphans) >= MAX_ORPHANS_PER_RANK:
            del rank.orphans[0]
            counts.orphans_dropped += 1
        kept = next((i for i, name in enumerate(stored.hashes) if name in stored.hashes[:i]), len(stored.hashes))
        del stored.hashes[kept:]
        rank.orphans.append(stored)
