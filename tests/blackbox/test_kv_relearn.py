"""Relearning from announcements: bounded, only where it is exact, and each block counts once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from native.token_hash import block_hashes
from router.clock import SystemClock
from router.index.kv_holdings import KvHoldings
from router.kv_events import FeedState
from router.kv_events.relearn import UNHEARD_LIMIT, Announcement, Relearner, RelearnSettings
from tests.support.kv_following import Following, following, run
from tests.support.kv_frames import batch, removed, stored
from tests.support.kv_publisher import Publisher, publishing

SIZE = 16
PROMPT = list(range(1000, 1000 + 4 * SIZE + 5))
CACHED = 4 * SIZE
NOW = RelearnSettings(interval_s=0.0, announcement_limit_s=0.02)


class Rig:
    """One engine without replay, of which nothing was heard yet."""

    def __init__(self, publisher: Publisher, rig: Following, relearner: Relearner, holdings: KvHoldings) -> None:
        self.publisher = publisher
        self.engine = publisher.ranks[0]
        self.rig = rig
        self.relearner = relearner
        self.holdings = holdings

    def offer(self, ids: list[int] = PROMPT, cached: int = CACHED, salt: str | None = None) -> bool:
        return self.relearner.offer(self.rig.backend, "m", ids, cached, salt=salt)

    def references(self) -> set[int]:
        held = self.holdings.index.holdings(self.rig.index_rank())
        return {count for _, counts in held.values() for count in counts.values()}

    def known(self, ids: list[int] = PROMPT) -> int:
        index = self.holdings.index
        index.match(block_hashes(ids, SIZE), SIZE)
        return int(index.matched_gpu[self.rig.index_rank()])

    async def announce(self, sequence: int, *events: dict[str, object]) -> None:
        self.engine.send(sequence, batch(*events))
        await self.rig.until(lambda: self.rig.rank()["sequence"] == sequence)


@asynccontextmanager
async def incomplete(settings: RelearnSettings = NOW, ranks: int = 1, replays: bool = False) -> AsyncIterator[Rig]:
    holdings = KvHoldings(1 << 24)
    async with (
        publishing(ranks, replays=replays) as publisher,
        following(publisher.url, holdings) as rig,
        aiohttp.ClientSession() as session,
    ):
        clock = SystemClock(asyncio.get_running_loop())
        relearner = Relearner(rig.registry, clock, rig.intake, session, settings, rig.metrics)
        for number, engine in enumerate(publisher.ranks):
            await engine.subscribed.wait()
            engine.ring[7] = b"\x93\xcb\0\0\0\0\0\0\0\0\x90\0"  # an empty batch
            if not replays:
                engine.send(7, engine.ring[7])
            await rig.until(lambda number=number: rig.state(number) == FeedState.INCOMPLETE)
        try:
            yield Rig(publisher, rig, relearner, holdings)
        finally:
            if publisher.completion_pause is not None:
                publisher.completion_pause.set()
            await relearner.stop()
        holdings.index.check()


def test_what_is_asked_is_the_cached_part_and_one_token_more() -> None:
    async def test() -> None:
        async with incomplete() as rig:
            assert rig.offer(salt="tenant-a")
            assert await rig.publisher.completions.get() == {
                "model": "m",
                "prompt": PROMPT[: CACHED + 1],
                "max_tokens": 1,
                "vllm_xargs": {"kv_cache_report_mode": "full"},
                "cache_salt": "tenant-a",
            }

    run(test)


def test_known_and_waiting_blocks_have_as_many_references_after_an_announcement_as_before() -> None:
    async def test() -> None:
        async with incomplete(RelearnSettings(interval_s=0.0)) as rig:
            # The first two are known; the fourth waits for the third.
            await rig.rig.until(lambda: rig.rig.state() == FeedState.INCOMPLETE)
            await rig.announce(8, stored(PROMPT[: 2 * SIZE], SIZE))
            await rig.announce(9, stored(PROMPT, SIZE, start=3 * SIZE))
            assert (rig.known(), rig.holdings.index.orphans_of(rig.rig.index_rank())) == (2, 1)
            assert rig.offer()
            await rig.publisher.completions.get()
            await rig.announce(10, stored(PROMPT, SIZE))
            await rig.relearner.idle()
            assert (rig.known(), rig.references(), rig.relearner.announced) == (4, {1}, 1)
            assert rig.holdings.index.orphans_of(rig.rig.index_rank()) == 0
            await rig.announce(11, removed(PROMPT[:SIZE]))
            assert rig.known() == 0
            # Not asked for: a second copy is one.
            await rig.announce(12, stored(PROMPT, SIZE))
            assert rig.references() == {1, 2}

    run(test)


def test_one_request_an_engine_at_a_time_and_a_rest_between_them() -> None:
    async def test() -> None:
        async with incomplete(RelearnSettings(interval_s=3600.0, announcement_limit_s=0.01)) as rig:
            rig.publisher.completion_pause = asyncio.Event()
            assert rig.offer()
            assert not rig.offer()
            await rig.publisher.completions.get()
            rig.publisher.completion_pause.set()
            await rig.relearner.idle()
            assert not rig.offer()
            assert rig.relearner.asked == 1

    run(test)


def test_requests_of_all_engines_together_are_bounded() -> None:
    async def test() -> None:
        async with incomplete(RelearnSettings(open_limit=1)) as rig, publishing(replays=False) as other:
            second = rig.rig.registry.add("f", other.url)
            await rig.rig.until(lambda: rig.rig.intake.relearns(second))
            rig.publisher.completion_pause = asyncio.Event()
            assert rig.offer()
            assert not rig.relearner.offer(second, "m", PROMPT, CACHED)
            rig.publisher.completion_status = 503  # then there is no announcement to wait for
            rig.publisher.completion_pause.set()
            await rig.relearner.idle()
            assert rig.relearner.offer(second, "m", PROMPT, CACHED)

    run(test)


def test_an_engine_that_does_not_announce_is_not_asked_again_until_another_process_answers_for_it() -> None:
    async def test() -> None:
        async with incomplete() as rig:
            for _ in range(UNHEARD_LIMIT):
                assert rig.offer()
                await rig.relearner.idle()
            assert not rig.offer()
            assert (rig.relearner.asked, rig.relearner.announced) == (UNHEARD_LIMIT, 0)
            assert rig.rig.metrics.kv_events["e", "relearn_asked"] == UNHEARD_LIMIT
            rig.relearner.restarted(rig.rig.backend)
            assert rig.offer()

    run(test)


@pytest.mark.parametrize("status", [400, 401, 404, 500, 503])
def test_a_request_that_fails_says_nothing_about_announcements(status: int) -> None:
    async def test() -> None:
        async with incomplete() as rig:
            rig.publisher.completion_status = status
            for _ in range(UNHEARD_LIMIT + 1):
                assert rig.offer()
                await rig.relearner.idle()

    run(test)


@pytest.mark.parametrize(
    ("settings", "cached"),
    [
        (RelearnSettings(enabled=False), CACHED),
        (NOW, 0),
        (NOW, len(PROMPT)),
        (RelearnSettings(prompt_limit_tokens=CACHED), CACHED),
    ],
)
def test_offers_that_are_not_taken(settings: RelearnSettings, cached: int) -> None:
    async def test() -> None:
        async with incomplete(settings) as rig:
            assert not rig.offer(cached=cached)
            assert rig.publisher.completions.empty()

    run(test)


def test_neither_several_ranks_nor_one_with_replay_nor_a_complete_one_are_asked() -> None:
    async def test() -> None:
        async with incomplete(ranks=2) as rig:
            assert not rig.offer()
        async with incomplete(replays=True) as rig:
            assert not rig.offer()
        async with incomplete() as rig:
            await rig.announce(8, {"type": "AllBlocksCleared"})
            assert rig.rig.state() == FeedState.LIVE
            assert not rig.offer()

    run(test)


def test_a_backend_that_leaves_takes_its_request_with_it() -> None:
    async def test() -> None:
        async with incomplete() as rig:
            rig.publisher.completion_pause = asyncio.Event()
            assert rig.offer()
            await rig.publisher.completions.get()
            rig.rig.registry.remove("e")
            await rig.relearner.idle()
            assert not rig.offer()

    run(test)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x90",
        batch(),
        batch(stored([9, *PROMPT[1:]], SIZE)),
        batch(stored(PROMPT, SIZE, start=SIZE)),
        batch(stored(PROMPT, SIZE, lora="other")),
        batch({"type": "BlockStored"}),
        batch({"type": "BlockStored", "token_ids": 7}),
        batch(removed(PROMPT[:SIZE])),
    ],
)
def test_batches_that_announce_nothing_stay_byte_for_byte(payload: bytes) -> None:
    announcement = Announcement(PROMPT, None)
    assert announcement.taken_out_first(payload) is payload
    assert not announcement.heard.is_set()
