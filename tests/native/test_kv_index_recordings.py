"""Every recorded and encoded file of KV events leaves exactly the blocks that it tells of."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from native.kv_events import read_events
from native.kv_index import KvIndex
from native.token_hash import block_hashes, xxh3_digest
from router.index.kv_reference import KvReference

FOLDER = Path(__file__).parents[1] / "fixtures" / "vllm" / "kv-events"
AMPLE = 1 << 24


def recorded(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / name).read_text().splitlines()]


def payloads(name: str) -> list[tuple[dict[str, Any], bytes]]:
    return [(line, bytes.fromhex(line["frames_hex"][-1])) for line in recorded(name) if "frames_hex" in line]


def name_of(value: Any) -> int:
    return xxh3_digest(bytes.fromhex(value["bytes"])) if isinstance(value, dict) else int(value) % 2**64


def told(batches: list[list[Any]]) -> Counter[int]:
    """Engine hashes with their references, straight from the decoded side of the recording."""
    held: Counter[int] = Counter()
    for _, events, _ in batches:
        for event in events:
            if event["type"] == "AllBlocksCleared":
                held.clear()
            elif event["type"] == "BlockStored":
                held.update(name_of(value) for value in event["block_hashes"])
            else:
                held.subtract(name_of(value) for value in event["block_hashes"])
    return +held


def decoded(payload: bytes) -> Any:
    """As the recordings have it: bytes as {"bytes": hex}."""

    def plain(value: Any) -> Any:
        if isinstance(value, bytes):
            return {"bytes": value.hex()}
        if isinstance(value, list):
            return [plain(each) for each in value]
        return {key: plain(each) for key, each in value.items()} if isinstance(value, dict) else value

    return plain(msgspec.msgpack.decode(payload))


def references(index: KvIndex, rank: int) -> Counter[int]:
    return Counter({name: sum(refs.values()) for name, (_, refs) in index.holdings(rank).items()})


@pytest.mark.parametrize("name", ["int-hashes.jsonl", "bytes-hashes-topic-connect.jsonl"])
def test_a_recording_leaves_what_it_tells_at_every_step(name: str) -> None:
    index, reference = KvIndex(AMPLE), KvReference()
    rank = index.add_rank()
    reference.add_rank()
    batches = []
    lines = payloads(name)
    if name.startswith("bytes"):
        # The recording begins with sequence 1; the replay that was asked of this server has what came before.
        before = json.loads((FOLDER / "replay-dealer.json").read_text())["received_hex"][0]
        payload = bytes.fromhex(before[3])
        lines.insert(0, ({"decoded": decoded(payload)}, payload))
    for line, payload in lines:
        applied = index.apply(rank, payload)
        reference.apply(rank, payload)
        batches.append(line["decoded"])
        assert (applied.malformed, applied.unknown, applied.absent, applied.orphans) == (False, 0, 0, 0)
        assert applied.timestamp == line["decoded"][0]
        assert applied.data_parallel_rank == line["decoded"][2]
        assert references(index, rank) == told(batches)
        assert index.holdings(rank) == reference.holdings(rank)
        index.check()
    assert index.rank_block_size(rank) == 32
    assert len(batches) > 4


def test_prompts_of_the_int_recording_match_as_the_engine_said() -> None:
    index = KvIndex(AMPLE)
    rank = index.add_rank()
    steps: dict[str, list[int]] = {}

    def match(tokens: list[int], salt: str | None = None) -> int:
        found = index.match(block_hashes(tokens, 32, salt=salt), 32)
        assert index.matched_gpu[rank] == index.matched_cpu[rank] == index.matched_any[rank] == found
        return found

    for line, payload in payloads("int-hashes.jsonl"):
        index.apply(rank, payload)
        for event in line["decoded"][1]:
            if event["type"] == "BlockStored":
                steps.setdefault(line["step"], event["token_ids"])
        if line["step"] == "extend":
            # 160 tokens are stored, then 64 more: seven blocks of one prompt, cut where tokens differ.
            prompt = steps["store"] + steps["extend"]
            assert [match(prompt[:n]) for n in (31, 32, 160, 191, 224)] == [0, 1, 5, 5, 7]
            assert match([*prompt[:96], 0, *prompt[97:]]) == 3
            assert match(prompt, "tenant-b") == 0
        if line["step"] == "cache-salt":
            assert match(steps["cache-salt"], "tenant-b") == 5
            assert match(steps["cache-salt"], "tenant-a") == 0
            assert match(steps["store"]) == 5
    # Evictions took it, the reset all else, and then it was stored again.
    assert match(steps["store"] + steps["extend"]) == 5
    assert [match(steps[step]) for step in ("chat", "exact-multiple", "fill-10", "fill-11")] == [0, 0, 0, 0]
    assert match(steps["cache-salt"], "tenant-b") == 0
    assert index.blocks_of(rank) == 5


def test_two_data_parallel_ranks_are_kept_apart() -> None:
    index = KvIndex(AMPLE)
    ranks = [index.add_rank(), index.add_rank()]
    batches: dict[int, list[Any]] = {0: [], 1: []}
    for line, payload in payloads("data-parallel-2.jsonl"):
        number = line["decoded"][2]
        assert index.apply(ranks[number], payload).data_parallel_rank == number
        batches[number].append(line["decoded"])
        first = block_hashes(line["decoded"][1][0]["token_ids"], 32)
        index.match(first, 32)
        assert index.matched_gpu[ranks[number]] == 3
    for number, rank in enumerate(ranks):
        assert references(index, rank) == told(batches[number])
        assert index.blocks_of(rank) == 6
    # Both engines have one seed: six blocks in all, each with two holders.
    assert index.block_count == 6
    index.check()


def test_a_replay_is_read_like_the_live_stream() -> None:
    replay = json.loads((FOLDER / "replay-dealer.json").read_text())
    index = KvIndex(AMPLE)
    rank = index.add_rank()
    stored = 0
    for frames in replay["received_hex"]:
        if bytes.fromhex(frames[2]) != b"\xff" * 8:
            stored += index.apply(rank, bytes.fromhex(frames[3])).stored
    assert stored == index.blocks_of(rank) == 3


OLDER = recorded("older-releases-encoded.jsonl")
RELEASES = sorted({line["vllm"] for line in OLDER})


@pytest.mark.parametrize("release", RELEASES)
def test_batches_of_older_releases_leave_what_they_tell(release: str) -> None:
    batch = {line["what"]: bytes.fromhex(line["payload_hex"]) for line in OLDER if line["vllm"] == release}
    index = KvIndex(AMPLE)
    rank = index.add_rank()
    a, b, c = 9404692668555055472, 492711949926993281, 8754737187132871212
    own = block_hashes(list(range(300, 312)), 4).tolist()
    gpu = {(0, 0): 1}

    index.apply(rank, batch["stored"])
    assert index.holdings(rank) == {a: (own[0], gpu), b: (own[1], gpu)}
    index.apply(rank, batch["stored-child"])
    assert index.holdings(rank) == {a: (own[0], gpu), b: (own[1], gpu), c: (own[2], gpu)}
    assert index.match(block_hashes(list(range(300, 312)), 4), 4) == 3
    index.apply(rank, batch["removed"])
    assert index.holdings(rank) == {a: (own[0], gpu)}
    index.apply(rank, batch["cleared-no-rank"])
    assert index.holdings(rank) == {}

    index.apply(rank, batch["stored-lora-salt"])
    before_names = release == "0.10.2"  # only the adapter's number
    before_extras = before_names or release == "0.16.0"  # no salt
    lora = "\x003" if before_names else "sql-lora"
    with_salt = None if before_extras else "tenant-b"
    assert index.match(block_hashes([1, 2, 3, 4], 4, lora, with_salt), 4) == 1
    assert index.match(block_hashes([1, 2, 3, 4], 4), 4) == 0
    index.apply(rank, batch["cleared-then-stored"])
    assert index.holdings(rank) == {a: (block_hashes([5, 6, 7, 8], 4)[0], gpu)}
    index.clear_rank(rank)
    index.apply(rank, batch["stored-bytes-hash"])
    assert [own for own, _ in index.holdings(rank).values()] == block_hashes([1, 2, 3, 4], 4).tolist()
    index.check()


def test_the_reader_sees_what_the_recordings_decode_to() -> None:
    lines = [
        line
        for name in ("int-hashes.jsonl", "bytes-hashes-topic-connect.jsonl", "data-parallel-2.jsonl")
        for line in payloads(name)
    ]
    for line, payload in lines:
        timestamp, rank, events, malformed = read_events(payload)
        assert (timestamp, rank, malformed) == (line["decoded"][0], line["decoded"][2], False)
        for event, wanted in zip(events, line["decoded"][1], strict=True):
            if event["kind"] == "cleared":
                assert wanted == {"type": "AllBlocksCleared"}
                continue
            assert event["hashes"] == [name_of(value) for value in wanted["block_hashes"]]
            if event["kind"] == "stored":
                assert event["tokens"] == wanted["token_ids"]
                assert event["block_size"] == wanted["block_size"]
