"""The intake against real processes of the simulated engine, and against a publisher that is none."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from router.kv_events import FeedState, IntakeSettings
from tests.support import kv_following
from tests.support.kv_following import Following, run
from tests.support.kv_publisher import Publisher, publishing
from tests.support.sim_process import SimProcess, running_sim
from tests.unit.kv_events.recording_sink import RecordingSink

FAST = ("--step-ms", "1", "--decode-ms", "1", "--decode-ms-per-seq", "0")


class Rig:
    """What follows, and what it gave to its sink."""

    def __init__(self, rig: Following, sink: RecordingSink) -> None:
        self.intake, self.backend, self.states = rig.intake, rig.backend, rig.states
        self.registry = rig.registry
        self.rank, self.state, self.until = rig.rank, rig.state, rig.until
        self.sink = sink

    def configure(self, kv_events: str) -> None:
        self.registry.reconfigure(self.backend, 1.0, None, None, kv_events)

    def held(self, number: int = 0) -> list[bytes]:
        return self.sink.held[self.sink.numbers[self.backend, number]]


@asynccontextmanager
async def following(url: str, settings: IntakeSettings | None = None, kv_events: str = "auto") -> AsyncIterator[Rig]:
    sink = RecordingSink()
    async with kv_following.following(url, sink, settings, kv_events) as rig:
        yield Rig(rig, sink)


async def complete(sim: SimProcess, first: int, count: int) -> None:
    def send() -> None:
        for number in range(first, first + count):
            body = {"prompt": [1000 + number] * 40, "max_tokens": 1}
            assert sim.request("POST", "/v1/completions", body).status == 200

    await asyncio.get_running_loop().run_in_executor(None, send)


@pytest.mark.parametrize("encoding", ["map", "array"])
def test_a_late_start_a_gap_and_a_restart_of_a_simulated_engine(encoding: str) -> None:
    async def test() -> None:
        with running_sim(*FAST, "--kv-events-topic", "kv@a", "--kv-events-encoding", encoding) as sim:
            await complete(sim, 0, 3)
            async with following(sim.url) as rig:
                await rig.until(lambda: rig.state() == FeedState.LIVE and len(rig.held()) == 3)
                sim.fault("lose-kv-events", True, 2)
                await complete(sim, 10, 3)
                await rig.until(lambda: rig.state() == FeedState.LIVE and len(rig.held()) == 6)
                assert (rig.rank()["gaps"], rig.rank()["resyncs"], rig.rank()["sequence"]) == (0, 1, 5)
                sim.fault("cold-restart")
                await complete(sim, 20, 1)
                await rig.until(lambda: rig.state() == FeedState.LIVE and rig.rank()["sequence"] == 0)
                assert len(rig.held()) == 1
                assert len(rig.sink.seen[0]) == 7

    run(test)


def test_a_gap_beyond_the_ring_leaves_the_rank_incomplete() -> None:
    async def test() -> None:
        with running_sim(*FAST, "--kv-events-buffer-steps", "2") as sim:
            async with following(sim.url) as rig:
                await rig.until(lambda: rig.state() == FeedState.LIVE)
                await complete(sim, 0, 2)
                await rig.until(lambda: len(rig.held()) == 2)
                sim.fault("lose-kv-events", True, 4)
                await complete(sim, 10, 5)
                await rig.until(lambda: rig.state() == FeedState.INCOMPLETE)
                assert rig.rank()["gaps"] == 1
                assert len(rig.held()) == 2

    run(test)


def test_a_killed_engine_is_stale_and_one_that_comes_back_is_another() -> None:
    async def test() -> None:
        with running_sim(*FAST) as sim:
            async with following(sim.url) as rig:
                await rig.until(lambda: rig.state() == FeedState.LIVE)
                await complete(sim, 0, 2)
                await rig.until(lambda: len(rig.held()) == 2)
                sim.process.kill()
                await rig.until(lambda: rig.state() == FeedState.STALE)
                with running_sim(*FAST, "--port", str(sim.port)) as successor:
                    await rig.until(lambda: rig.state() == FeedState.LIVE)
                    await complete(successor, 5, 1)
                    await rig.until(lambda: len(rig.held()) == 1)

    run(test)


def test_an_engine_without_events_says_what_cures_it() -> None:
    async def test() -> None:
        with running_sim(*FAST, "--no-kv-events") as sim:
            async with following(sim.url) as rig:
                await rig.until(lambda: rig.intake.describe(rig.backend)[0]["state"] == FeedState.OFF)
                assert "--kv-events-config" in rig.intake.describe(rig.backend)[0]["why"]

    run(test)


async def subscribed(rig: Rig, publisher: Publisher, rank: int) -> None:
    """And the first batch heard."""
    await publisher.ranks[rank].subscribed.wait()
    await rig.until(lambda: rig.state(rank) == FeedState.INCOMPLETE)
    publisher.ranks[rank].send(0, b"first")
    await rig.until(lambda: bool(rig.held(rank)))


def test_ten_thousand_batches_on_each_of_two_ranks_arrive_once_and_in_order() -> None:
    async def test() -> None:
        settings = IntakeSettings(frames_per_s=1_000_000)
        async with publishing(2, replays=False) as publisher, following(publisher.url, settings) as rig:
            for rank in range(2):
                await subscribed(rig, publisher, rank)
            for sequence in range(1, 10_001):
                for rank in range(2):
                    publisher.ranks[rank].send(sequence, b"%d/%d" % (rank, sequence))
            await rig.until(lambda: all(rig.rank(rank)["sequence"] == 10_000 for rank in range(2)))
            for rank in range(2):
                assert rig.held(rank)[-10_000:] == [b"%d/%d" % (rank, sequence) for sequence in range(1, 10_001)]
                assert (rig.rank(rank)["gaps"], rig.state(rank)) == (0, FeedState.LIVE)

    run(test)


@pytest.mark.parametrize(
    "frames",
    [[b"", b"short", b"x"], [b"other", b"\0" * 8, b"x"], [b"", b"\xff" * 8, b"x"], [b"", b"\0" * 8], [b""] * 50],
)
def test_garbage_is_counted_and_ends_in_a_pause(frames: list[bytes]) -> None:
    async def test() -> None:
        async with publishing(replays=False) as publisher, following(publisher.url) as rig:
            await subscribed(rig, publisher, 0)
            for _ in range(3):
                publisher.ranks[0].send_parts(*frames)
            await rig.until(lambda: rig.state() == FeedState.OFF)
            assert str(rig.rank()["why"]).startswith("malformed: ")
            assert rig.held() == []

    run(test)


def test_a_flood_ends_in_a_pause() -> None:
    async def test() -> None:
        settings = IntakeSettings(frames_per_s=50)
        async with publishing(replays=False) as publisher, following(publisher.url, settings) as rig:
            await subscribed(rig, publisher, 0)
            for sequence in range(1, 5_000):
                publisher.ranks[0].send(sequence, b"x%d" % sequence)
            await rig.until(lambda: rig.state() == FeedState.OFF)
            assert "flood" in str(rig.rank()["why"])

    run(test)


def test_a_frame_beyond_the_bound_breaks_the_stream_and_is_never_applied() -> None:
    async def test() -> None:
        settings = IntakeSettings(max_payload_bytes=1000, retry_s=0.05)
        async with publishing(replays=False) as publisher, following(publisher.url, settings) as rig:
            await subscribed(rig, publisher, 0)
            publisher.ranks[0].send(1, b"x" * 1001)
            await rig.until(lambda: rig.state() == FeedState.STALE)
            assert b"x" * 1001 not in rig.sink.seen[0]

    run(test)


async def connected(publisher: Publisher) -> None:
    for rank in publisher.ranks:
        await rank.subscribed.wait()


def test_a_configured_endpoint_serves_an_engine_that_does_not_tell_and_its_ranks_follow_by_port() -> None:
    async def test() -> None:
        async with publishing(2, topic=b"kv@a", tells=False) as publisher:
            endpoint = f"tcp://127.0.0.1:{publisher.ranks[0].port}"
            async with following(publisher.url, kv_events=endpoint) as rig:
                await connected(publisher)
                await rig.until(lambda: [rig.state(number) for number in (0, 1)] == [FeedState.INCOMPLETE] * 2)
                assert "replay_endpoint" in rig.rank()["why"]
                publisher.ranks[1].send(0, b"first")
                publisher.ranks[0].send(7, b"seventh")
                await rig.until(lambda: rig.held(0) == [b"seventh"] and rig.held(1) == [b"first"])
                assert [rig.state(number) for number in (0, 1)] == [FeedState.INCOMPLETE, FeedState.LIVE]
                publisher.ranks[0].send(8, b"cleared")
                await rig.until(lambda: rig.state(0) == FeedState.LIVE)
                assert rig.rank(1)["endpoint"] == f"tcp://127.0.0.1:{publisher.ranks[1].port}"

    run(test)


def test_a_configured_endpoint_by_name_is_looked_up() -> None:
    async def test() -> None:
        async with publishing(tells=False) as publisher:
            endpoint = f"tcp://localhost:{publisher.ranks[0].port}"
            async with following(publisher.url, kv_events=endpoint) as rig:
                await rig.until(lambda: rig.state() == FeedState.INCOMPLETE)
                assert rig.rank()["endpoint"] == endpoint

    run(test)


def test_each_address_of_a_name_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that binds IPv4 alone, behind a name whose first address is none of its own."""
    found = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", (address, 0)) for address in ("::1", "127.0.0.1")]
    real = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *more, **kw: found if host == "engine.test" else real(host, *more, **kw)
    )

    async def test() -> None:
        async with publishing(tells=False) as publisher:
            endpoint = f"tcp://engine.test:{publisher.ranks[0].port}"
            async with following(publisher.url, kv_events=endpoint) as rig:
                await rig.until(lambda: rig.state() == FeedState.INCOMPLETE)

    asyncio.run(test())  # a loop that asks Python for addresses


def test_a_reload_switches_a_backends_events_on_to_another_endpoint_and_off() -> None:
    async def test() -> None:
        async with publishing(2, tells=False) as publisher, following(publisher.url, kv_events="off") as rig:
            await rig.until(lambda: rig.intake.describe(rig.backend)[0]["state"] == FeedState.OFF)
            publisher.told_ranks = 1
            for rank in publisher.ranks:
                rig.configure(f"tcp://127.0.0.1:{rank.port}")
                await rank.subscribed.wait()
                await rig.until(lambda: rig.state() == FeedState.INCOMPLETE and rig.held() == [])
                rank.send(0, b"%d" % rank.port)
                await rig.until(lambda rank=rank: rig.held() == [b"%d" % rank.port])
                assert rig.state() == FeedState.LIVE
            rig.configure("off")
            await rig.until(lambda: rig.intake.ranks_of(rig.backend) == ())
            assert rig.sink.held == {}

    run(test)


def test_without_a_configured_endpoint_an_engine_that_does_not_tell_is_off_and_named() -> None:
    async def test() -> None:
        async with publishing(tells=False) as publisher, following(publisher.url) as rig:
            await rig.until(lambda: rig.intake.describe(rig.backend)[0]["state"] == FeedState.OFF)
            assert 'kv_events = "tcp://host:5557"' in rig.intake.describe(rig.backend)[0]["why"]
            assert rig.intake.ranks_of(rig.backend) == ()

    run(test)


def test_an_engine_that_restarts_during_a_replay_leaves_nothing_of_what_was_replayed() -> None:
    async def test() -> None:
        async with publishing() as publisher:
            engine = publisher.ranks[0]
            engine.hold_replays = True
            engine.ring.update({0: b"old 0", 1: b"old 1"})
            async with following(publisher.url) as rig:
                who, start = await engine.asked.get()
                assert start == 0
                engine.answer(who, 0)
                await rig.until(lambda: rig.held() == [b"old 0"])
                rig.intake.engine_restarted(rig.backend)
                assert (rig.held(), rig.state()) == ([], FeedState.CONNECTING)
                engine.ring = {0: b"new 0"}
                another, start = await engine.asked.get()
                assert (another != who, start) == (True, 0)
                engine.end(who)  # too late: nobody waits for it
                engine.answer(another, 0)
                engine.end(another)
                await rig.until(lambda: rig.state() == FeedState.LIVE)
                assert rig.held() == [b"new 0"]

    run(test)


def test_what_is_published_during_a_slow_replay_is_applied_after_it_once() -> None:
    async def test() -> None:
        async with publishing() as publisher:
            engine = publisher.ranks[0]
            engine.hold_replays = True
            engine.ring.update({0: b"0", 1: b"1"})
            async with following(publisher.url) as rig:
                who, _ = await engine.asked.get()
                await engine.subscribed.wait()
                engine.answer(who, 0)
                for sequence in (2, 3):
                    engine.publish(sequence, b"%d" % sequence)
                await rig.until(lambda: rig.held() == [b"0"])
                for sequence in (1, 2):  # the ring has what was published meanwhile
                    engine.answer(who, sequence)
                await rig.until(lambda: len(rig.held()) == 3)
                assert rig.state() == FeedState.REPLAYING
                engine.end(who)
                await rig.until(lambda: rig.state() == FeedState.LIVE)
                assert rig.held() == [b"0", b"1", b"2", b"3"]
                assert (rig.rank()["gaps"], rig.rank()["resyncs"]) == (0, 0)

    run(test)


def test_a_replay_that_stands_still_is_asked_for_again_from_where_it_got_to() -> None:
    async def test() -> None:
        settings = IntakeSettings(replay_stall_s=0.05)
        async with publishing() as publisher:
            engine = publisher.ranks[0]
            engine.hold_replays = True
            engine.ring.update({number: b"%d" % number for number in range(4)})
            async with following(publisher.url, settings) as rig:
                who, _ = await engine.asked.get()
                engine.answer(who, 0)
                engine.answer(who, 1)
                again, start = await engine.asked.get()
                assert start == 1
                for sequence in (1, 2, 3):
                    engine.answer(again, sequence)
                engine.end(again)
                await rig.until(lambda: rig.state() == FeedState.LIVE)
                assert rig.held() == [b"0", b"1", b"2", b"3"]

    run(test)


def test_a_resync_by_order_replays_all_and_state_changes_are_told() -> None:
    async def test() -> None:
        async with publishing() as publisher:
            engine = publisher.ranks[0]
            engine.ring.update({0: b"0", 1: b"1"})
            async with following(publisher.url) as rig:
                await rig.until(lambda: rig.state() == FeedState.LIVE)
                before = len(rig.states)
                rig.intake.resync(rig.backend)
                rig.intake.resync(rig.backend)
                assert rig.held() == []
                await rig.until(lambda: rig.state() == FeedState.LIVE)
                assert rig.held() == [b"0", b"1"]
                assert rig.states[before:] == [(FeedState.REPLAYING,), (FeedState.LIVE,)]
                assert engine.asked.qsize() == 2

    run(test)


def test_an_index_without_room_for_a_rank_leaves_the_engine_off() -> None:
    async def test() -> None:
        async with publishing(2) as publisher:
            sink = RecordingSink()
            sink.limit = 1
            async with kv_following.following(publisher.url, sink) as rig:
                await rig.until(lambda: rig.intake.describe(rig.backend)[0]["state"] == FeedState.OFF)
                assert "no room" in rig.intake.describe(rig.backend)[0]["why"]
                assert (rig.intake.ranks_of(rig.backend), sink.held) == ((), {})

    run(test)
