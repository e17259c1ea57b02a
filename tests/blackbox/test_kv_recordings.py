"""Recorded KV events through the whole intake, over real sockets: they leave exactly the blocks that they tell of."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

import pytest

from native.kv_index import KvIndex
from router.index.kv_holdings import KvHoldings
from router.kv_events import FeedState
from tests.native.test_kv_index_recordings import FOLDER, OLDER, RELEASES, decoded, payloads, references, told
from tests.support.kv_following import Following, following, run
from tests.support.kv_publisher import Rank, publishing

MEMORY = 1 << 24
Batches = Sequence[tuple[int, bytes]]


async def publish(rig: Following, rank: Rank, batches: Batches) -> None:
    """And hear it."""
    await rank.subscribed.wait()
    for sequence, payload in batches:
        rank.publish(sequence, payload)
    if batches:
        await rig.until(lambda: rig.rank()["sequence"] == batches[-1][0])


def batches_of(name: str) -> list[tuple[int, bytes]]:
    return [(line["seq"], payload) for line, payload in payloads(name)]


@pytest.mark.parametrize("live", [0, 1, 6], ids=lambda live: f"{live} live")
@pytest.mark.parametrize("name", ["int-hashes.jsonl", "bytes-hashes-topic-connect.jsonl"])
def test_a_recording_leaves_what_it_tells_however_much_of_it_came_by_replay(name: str, live: int) -> None:
    async def test() -> None:
        topic = payloads(name)[0][0]["topic"].encode()
        batches = batches_of(name)
        if name.startswith("bytes"):  # it begins with sequence 1; the replay that was asked has what came before
            before = json.loads((FOLDER / "replay-dealer.json").read_text())["received_hex"][0]
            batches.insert(0, (0, bytes.fromhex(before[3])))
        holdings = KvHoldings(MEMORY)
        async with publishing(topic=topic) as publisher:
            publisher.ranks[0].ring.update(batches[: len(batches) - live])
            async with following(publisher.url, holdings) as rig:
                await rig.until(lambda: rig.state() == FeedState.LIVE)
                await publish(rig, publisher.ranks[0], batches[len(batches) - live :])
                assert rig.state() == FeedState.LIVE
                assert references(holdings.index, rig.index_rank()) == told([decoded(p) for _, p in batches])
                assert (rig.rank()["gaps"], rig.rank()["resyncs"], rig.rank()["malformed"]) == (0, 0, 0)
                assert rig.rank()["blocks"] > 0

    run(test)


def test_recorded_ranks_are_followed_apart() -> None:
    async def test() -> None:
        wanted: dict[int, list[bytes]] = {0: [], 1: []}
        holdings = KvHoldings(MEMORY)
        async with publishing(2) as publisher:
            for line, payload in payloads("data-parallel-2.jsonl"):
                number = line["publisher_port_of_rank"]
                publisher.ranks[number].ring[line["seq"]] = payload
                wanted[number].append(payload)
            async with following(publisher.url, holdings) as rig:
                await rig.until(lambda: [rig.state(number) for number in (0, 1)] == [FeedState.LIVE] * 2)
                for number, batches in wanted.items():
                    held = references(holdings.index, rig.index_rank(number))
                    assert held == told([decoded(payload) for payload in batches])
                    assert held
                assert holdings.index.block_count == 6

    run(test)


def encoded(release: str) -> list[bytes]:
    """What was encoded for a release, in an order in which each batch changes something; ends with blocks held."""
    batch = {line["what"]: bytes.fromhex(line["payload_hex"]) for line in OLDER if line["vllm"] == release}
    order = ("cleared-no-rank", "stored", "stored-child", "removed", "cleared-then-stored", "stored-bytes-hash")
    return [batch[what] for what in order if what in batch]


@pytest.mark.parametrize("replayed", [0, 3, 6])
@pytest.mark.parametrize("release", RELEASES)
def test_older_releases_leave_what_they_tell_with_the_replay_framing_of_their_time(release: str, replayed: int) -> None:
    async def test() -> None:
        batches = list(enumerate(encoded(release)))
        alone = KvIndex(MEMORY)
        rank = alone.add_rank()
        for _, payload in batches:
            assert not alone.apply(rank, payload).malformed
        holdings = KvHoldings(MEMORY)
        modern = tuple(map(int, release.split("."))) >= (0, 27)
        async with publishing(modern=modern) as publisher:
            publisher.ranks[0].ring.update(batches[:replayed])
            async with following(publisher.url, holdings) as rig:
                await rig.until(lambda: rig.state() == FeedState.LIVE)
                await publish(rig, publisher.ranks[0], batches[replayed:])
                assert rig.state() == FeedState.LIVE
                assert holdings.index.holdings(rig.index_rank()) == alone.holdings(rank)
                assert Counter(references(holdings.index, rig.index_rank())).total() == 2
                assert (rig.rank()["gaps"], rig.rank()["resyncs"]) == (0, 0)

    run(test)
