"""Invariant: no frame crashes the reader or leaves the index unsound; one that msgspec decodes to a
batch is not malformed, one that is cut short is; the memory limit holds."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from native.kv_events import read_events
from native.kv_index import MIN_MEMORY_LIMIT_BYTES, KvIndex
from native.token_hash import block_hashes

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

FOLDER = Path(__file__).parents[1] / "fixtures" / "vllm" / "kv-events"


def payload_of(line: dict[str, Any]) -> list[bytes]:
    found = line.get("payload_hex") or (line["frames_hex"][-1] if "frames_hex" in line else None)
    return [bytes.fromhex(found)] if found else []


RECORDED = [
    payload
    for path in sorted(FOLDER.glob("*.jsonl"))
    for line in path.read_text().splitlines()
    for payload in payload_of(json.loads(line))
]
# Short ones, where a changed byte more often means something, and some of each file.
SEEDS = sorted({payload for payload in RECORDED if len(payload) < 700} | set(RECORDED[::5]), key=len)
STRUCTURE = bytes(
    [0x80, 0x81, 0x90, 0x91, 0x92, 0x93, 0xA0, 0xA4, 0xC0, 0xC1, 0xC2, 0xC4, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB]
)
STRUCTURE += bytes(
    [0xCC, 0xCD, 0xCE, 0xCF, 0xD0, 0xD3, 0xD4, 0xD8, 0xD9, 0xDB, 0xDC, 0xDD, 0xDE, 0xDF, 0xE0, 0xFF, 0, 1]
)


def is_batch(payload: bytes) -> bool | None:
    """None: msgspec has rules of its own here (text that is no UTF-8, keys that are no keys, depth)."""
    try:
        value = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, RecursionError, TypeError, UnicodeDecodeError, ValueError):
        return None
    return (
        isinstance(value, list)
        and len(value) >= 2
        and type(value[0]) in (int, float)
        and value[0] >= 0
        and isinstance(value[1], list)
    )


class Subject:
    """One small index that lives through all frames, so that they meet what others left."""

    def __init__(self) -> None:
        self.index = KvIndex(MIN_MEMORY_LIMIT_BYTES)
        self.ranks = [self.index.add_rank() for _ in range(3)]
        self.turn = 0

    def feed(self, payload: bytes) -> None:
        self.turn += 1
        applied = self.index.apply(self.ranks[self.turn % 3], payload)
        timestamp, rank, events, malformed = read_events(payload)
        assert applied.malformed is malformed
        if is_batch(payload):
            assert not malformed
        assert applied.data_parallel_rank == rank
        assert str(applied.timestamp) == str(timestamp)  # nan too
        unknown = sum(event["kind"] == "unknown" or event.get("group", 0) >= 16 for event in events)
        assert applied.unknown == unknown
        assert applied.cleared == sum(event["kind"] == "cleared" for event in events)
        if self.turn % 50 == 0:
            self.index.check()
            assert self.index.memory_bytes() <= MIN_MEMORY_LIMIT_BYTES
            for size in (4, 32):
                self.index.match(block_hashes([1, 2, 3, 4] * 40, size), size)
        if self.turn % 500 == 0:
            self.index.remove_rank(self.ranks[0])
            assert self.index.add_rank() == self.ranks[0]


SUBJECT = Subject()


@unhurried
@given(st.binary(max_size=300))
@example(b"")
@example(b"\x93\x00\x91\x91")
@example(b"\x92\x00\xdd\xff\xff\xff\xff")
def test_any_bytes(payload: bytes) -> None:
    SUBJECT.feed(payload)
    SUBJECT.feed(b"\x93\x00\x91" + payload)
    SUBJECT.feed(b"\x93\x00\x92\x99\xabBlockStored" + payload)
    SUBJECT.feed(b"\x93\x00\x92\x83\xa4type\xabBlockStored\xacblock_hashes" + payload)


@unhurried
@given(st.lists(st.sampled_from(list(STRUCTURE)), max_size=120))
def test_any_structure(payload: list[int]) -> None:
    SUBJECT.feed(b"\x93\x00\x92\x8a\xa9token_ids" + bytes(payload))
    SUBJECT.feed(b"\x93\x00\x92\x8a\xaaextra_keys" + bytes(payload))


@unhurried
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary() | st.text(max_size=70),
        lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
        max_leaves=20,
    ),
    st.sampled_from(
        [
            "type",
            "block_hashes",
            "parent_block_hash",
            "token_ids",
            "block_size",
            "lora_id",
            "medium",
            "lora_name",
            "extra_keys",
            "group_idx",
            "other",
        ]
    ),
)
def test_any_value_in_any_field(value: Any, name: str) -> None:
    event = {
        "type": "BlockStored",
        "block_hashes": [1, 2],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4] * 2,
        "block_size": 4,
        "lora_name": "a",
        "extra_keys": [["a", "s"], None],
    }
    SUBJECT.feed(msgspec.msgpack.encode([0.5, [event | {name: value}], 0]))
    SUBJECT.feed(msgspec.msgpack.encode([0.5, [["BlockStored", *[value] * 9], value], value]))


@pytest.mark.parametrize("seed", range(0, len(SEEDS), 4))
def test_mutations_of_recorded_frames(seed: int) -> None:
    generator = random.Random(seed)
    for payload in SEEDS[seed : seed + 4]:
        for _ in range(40):
            frame = bytearray(payload)
            for _ in range(generator.randint(1, 4)):
                at = generator.randrange(len(frame))
                match generator.randrange(4):
                    case 0:
                        frame[at] = generator.choice(STRUCTURE)
                    case 1:
                        frame[at] ^= 1 << generator.randrange(8)
                    case 2:
                        del frame[at : at + generator.choice((1, 2, 9))]
                    case 3:
                        frame[at:at] = frame[at : at + generator.choice((1, 2, 9, 70))]
                if not frame:
                    break
            SUBJECT.feed(bytes(frame))
    SUBJECT.index.check()


@pytest.mark.parametrize("seed", range(0, len(SEEDS), 4))
def test_a_frame_cut_short_is_malformed(seed: int) -> None:
    for payload in SEEDS[seed : seed + 4]:
        ends = range(len(payload)) if len(payload) < 400 else random.Random(seed).sample(range(len(payload)), 150)
        for end in ends:
            SUBJECT.feed(payload[:end])
            assert read_events(payload[:end])[3]
        assert not read_events(payload)[3]
