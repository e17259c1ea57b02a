"""The intake against real processes of the simulated engine, and against a publisher that is none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq
from aiohttp import web

from router.kv_events import FeedState, IntakeSettings
from tests.support import kv_following
from tests.support.kv_following import TIMEOUT_S, Following, run
from tests.support.sim_process import SimProcess, running_sim
from tests.unit.kv_events.recording_sink import RecordingSink

FAST = ("--step-ms", "1", "--decode-ms", "1", "--decode-ms-per-seq", "0")


class Rig:
    """What follows, and what it gave to its sink."""

    def __init__(self, rig: Following, sink: RecordingSink) -> None:
        self.intake, self.backend, self.rank, self.state, self.until = (
            rig.intake,
            rig.backend,
            rig.rank,
            rig.state,
            rig.until,
        )
        self.sink = sink

    def held(self, number: int = 0) -> list[bytes]:
        return self.sink.held[self.sink.numbers[self.backend, number]]


@asynccontextmanager
async def following(url: str, settings: IntakeSettings | None = None) -> AsyncIterator[Rig]:
    sink = RecordingSink()
    async with kv_following.following(url, sink, settings) as rig:
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


class Publisher:
    """Two ranks' PUB and ROUTER sockets behind an HTTP port that tells where they are."""

    def __init__(self, ranks: int) -> None:
        self.context = zmq.Context()
        self.pubs = [self.bound(zmq.PUB) for _ in range(ranks)]
        self.runner: web.AppRunner | None = None

    def bound(self, kind: int) -> tuple[zmq.Socket[bytes], int]:
        socket = self.context.socket(kind)
        socket.linger = 0
        socket.set_hwm(0)
        return socket, socket.bind_to_random_port("tcp://127.0.0.1")

    async def start(self) -> str:
        sources = {
            str(rank): {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://*:{port}",
                "replay_endpoint": None,
                "topic": "",
            }
            for rank, (_, port) in enumerate(self.pubs)
        }

        async def answer(request: web.Request) -> web.Response:
            return web.json_response(sources)

        app = web.Application()
        app.router.add_get("/kv_event_sources", answer)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def stop(self) -> None:
        assert self.runner is not None
        await self.runner.cleanup()
        for socket, _ in self.pubs:
            socket.close()
        self.context.term()

    def send(self, rank: int, sequence: int, payload: bytes) -> None:
        self.pubs[rank][0].send_multipart([b"", sequence.to_bytes(8, "big"), payload])


@asynccontextmanager
async def publishing(ranks: int) -> AsyncIterator[tuple[Publisher, str]]:
    publisher = Publisher(ranks)
    url = await publisher.start()
    try:
        yield publisher, url
    finally:
        await publisher.stop()


async def subscribed(rig: Rig, publisher: Publisher, rank: int) -> None:
    """A subscription takes a moment to reach the publisher: the first batch is sent until it arrives."""
    await rig.until(lambda: rig.state(rank) == FeedState.INCOMPLETE)
    async with asyncio.timeout(TIMEOUT_S):
        while not rig.held(rank):
            publisher.send(rank, 0, b"first")
            await asyncio.sleep(0)


def test_ten_thousand_batches_on_each_of_two_ranks_arrive_once_and_in_order() -> None:
    async def test() -> None:
        settings = IntakeSettings(frames_per_s=1_000_000)
        async with publishing(2) as (publisher, url), following(url, settings) as rig:
            for rank in range(2):
                await subscribed(rig, publisher, rank)
            for sequence in range(1, 10_001):
                for rank in range(2):
                    publisher.send(rank, sequence, b"%d/%d" % (rank, sequence))
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
        async with publishing(1) as (publisher, url), following(url) as rig:
            await subscribed(rig, publisher, 0)
            for _ in range(3):
                publisher.pubs[0][0].send_multipart(frames)
            await rig.until(lambda: rig.state() == FeedState.OFF)
            assert str(rig.rank()["why"]).startswith("malformed: ")
            assert rig.held() == []

    run(test)


def test_a_flood_ends_in_a_pause() -> None:
    async def test() -> None:
        settings = IntakeSettings(frames_per_s=50)
        async with publishing(1) as (publisher, url), following(url, settings) as rig:
            await subscribed(rig, publisher, 0)
            for sequence in range(1, 5_000):
                publisher.send(0, sequence, b"x%d" % sequence)
            await rig.until(lambda: rig.state() == FeedState.OFF)
            assert "flood" in str(rig.rank()["why"])

    run(test)


def test_a_frame_beyond_the_bound_breaks_the_stream_and_is_never_applied() -> None:
    async def test() -> None:
        settings = IntakeSettings(max_payload_bytes=1000, retry_s=0.05)
        async with publishing(1) as (publisher, url), following(url, settings) as rig:
            await subscribed(rig, publisher, 0)
            publisher.send(0, 1, b"x" * 1001)
            await rig.until(lambda: rig.state() == FeedState.STALE)
            assert b"x" * 1001 not in rig.sink.seen[0]

    run(test)
