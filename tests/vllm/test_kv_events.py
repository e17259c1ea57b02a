"""KV events of a real engine through the whole intake into the native index: what it knows is what the engine has."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from native.token_hash import block_hashes
from router.clock import SystemClock
from router.index.kv_holdings import KvHoldings
from router.kv_events import FeedState, IntakeSettings
from router.kv_events.relearn import Relearner, RelearnSettings
from tests.support.kv_following import Following, following, run
from tests.vllm.conftest import TARGET
from tests.vllm.engines import BLOCK_TOKENS, MODEL, Engine, ask
from tests.vllm.gateway import free_port

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(bool(TARGET), reason="kills its engine")]

BLOCKS = 64  # of the engine: few, so that it evicts
MEMORY = 1 << 24
SETTINGS = IntakeSettings(retry_s=0.1)
WITHIN_S = 120.0


@pytest.fixture(scope="module")
def engine(vllm_environment: Path, logs: Path) -> Iterator[Engine]:
    """Its ports stay the same over a restart: only what it publishes tells one process from another."""
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{free_port()}",
        "replay_endpoint": f"tcp://*:{free_port()}",
    }
    flags = ["--num-gpu-blocks-override", str(BLOCKS), "--max-model-len", "1024"]
    engine = Engine(
        "events",
        f"http://127.0.0.1:{free_port()}",
        vllm_environment,
        logs / "events.log",
        [*flags, "--kv-events-config", json.dumps(events)],
    )
    try:
        engine.start()
        engine.wait_until_up()
        yield engine
    finally:
        engine.stop()


class Known:
    """What is known of one engine, and a client of it."""

    def __init__(self, engine: Engine, rig: Following, holdings: KvHoldings) -> None:
        self.engine = engine
        self.rig = rig
        self.holdings = holdings

    def blocks(self, ids: Sequence[int], salt: str | None = None) -> int:
        """Leading blocks of this prompt that the index has."""
        index = self.holdings.index
        index.match(block_hashes(list(ids), BLOCK_TOKENS, salt=salt), BLOCK_TOKENS)
        return int(index.matched_gpu[self.rig.index_rank()])

    async def send(self, ids: Sequence[int], **more: object) -> int:
        """One token for this prompt; the blocks that the engine had of it."""
        return await complete(self.engine, ids, **more)

    async def send_and_hear(self, ids: Sequence[int], salt: str | None = None) -> int:
        """The same, and all of its blocks are known then."""
        cached = await self.send(ids, **({"cache_salt": salt} if salt else {}))
        await self.until_known(ids, len(ids) // BLOCK_TOKENS, salt)
        return cached

    async def until_known(self, ids: Sequence[int], blocks: int, salt: str | None = None) -> None:
        await self.rig.until(lambda: self.blocks(ids, salt) == blocks, WITHIN_S)

    async def until_live(self) -> None:
        await self.rig.until(lambda: self.rig.state() == FeedState.LIVE, WITHIN_S)


async def complete(engine: Engine, ids: Sequence[int], **more: object) -> int:
    body = {"model": MODEL, "prompt": list(ids), "max_tokens": 1, "temperature": 0, **more}
    status, text = await asyncio.to_thread(ask, f"{engine.url}/v1/completions", "POST", body, 60.0)
    assert status == 200, text
    details = json.loads(text)["usage"]["prompt_tokens_details"]
    return int(details["cached_tokens"] if details else 0) // BLOCK_TOKENS


@asynccontextmanager
async def knowing(engine: Engine, kv_events: str = "auto") -> AsyncIterator[Known]:
    holdings = KvHoldings(MEMORY)
    async with following(engine.url, holdings, SETTINGS, kv_events) as rig:
        known = Known(engine, rig, holdings)
        if kv_events == "auto":
            await known.until_live()
        yield known
        holdings.index.check()


def prompt(seed: object, blocks: int) -> list[int]:
    """Full blocks and a rest, so that a full hit is one."""
    rng = random.Random(str(seed))
    return [rng.randrange(100, 4000) for _ in range(blocks * BLOCK_TOKENS + 7)]


def test_a_late_start_knows_what_was_sent_before_by_ids_by_text_and_by_salt(engine: Engine) -> None:
    async def test() -> None:
        ids, salted = prompt("ids", 5), prompt("salted", 4)
        text = "How many angels can dance on the head of a pin? " * 12
        await complete(engine, ids)
        await complete(engine, salted, cache_salt="tenant-a")
        body = {"model": MODEL, "prompt": text, "max_tokens": 1}
        assert (await asyncio.to_thread(ask, f"{engine.url}/v1/completions", "POST", body))[0] == 200
        _, told = await asyncio.to_thread(
            ask, f"{engine.url}/tokenize", "POST", {"model": MODEL, "prompt": text, "add_special_tokens": True}
        )
        tokens = json.loads(told)["tokens"]
        async with knowing(engine) as known:
            assert known.blocks(ids) == 5
            assert (known.blocks(salted, "tenant-a"), known.blocks(salted, "tenant-b"), known.blocks(salted)) == (
                4,
                0,
                0,
            )
            assert known.blocks(tokens) == len(tokens) // BLOCK_TOKENS > 3
            assert known.blocks([*ids[:70], 5, *ids[71:]]) == 2
            assert (known.rig.rank()["gaps"], known.rig.rank()["malformed"]) == (0, 0)
            assert await known.send(salted, cache_salt="tenant-b") == 0
            assert await known.send(salted, cache_salt="tenant-a") == 4

    run(test)


def test_under_eviction_each_prediction_is_what_the_engine_reports(engine: Engine, figures: list[str]) -> None:
    async def test() -> None:
        rng = random.Random(7)
        prompts = [[*prompt("shared", 3)[: 3 * BLOCK_TOKENS], *prompt(number, 9)] for number in range(16)]
        async with knowing(engine) as known:
            seen = []
            for _ in range(40):
                ids = rng.choice(prompts)
                predicted = known.blocks(ids)
                seen.append((predicted, await known.send_and_hear(ids)))
            removals = known.rig.metrics.kv_events["e", "removed"]
            figures.append(
                f"eviction: {sum(predicted for predicted, _ in seen)} blocks predicted, "
                f"{sum(reported for _, reported in seen)} reported of 40 prompts, {removals} removals heard"
            )
            assert [predicted for predicted, _ in seen] == [reported for _, reported in seen]
            assert removals > BLOCKS
            assert len({reported for _, reported in seen}) >= 3  # misses, the shared part, full hits
            assert known.holdings.index.blocks_of(known.rig.index_rank()) < BLOCKS

    run(test)


def test_a_reset_is_told_with_the_next_request_and_until_then_what_was_known_stands(engine: Engine) -> None:
    async def test() -> None:
        before, after = prompt("before", 6), prompt("after", 6)
        async with knowing(engine) as known:
            await known.send_and_hear(before)
            await asyncio.to_thread(engine.reset_prefix_cache)
            # Nothing comes of itself, and neither would a replay: vLLM queues the clear for its next step.
            known.rig.intake.resync(known.rig.backend)
            await known.rig.until(lambda: known.rig.state() == FeedState.LIVE)
            assert known.blocks(before) == 6
            assert await known.send_and_hear(after) == 0
            assert (known.blocks(before), known.rig.metrics.kv_events["e", "cleared"] > 0) == (0, True)
            assert known.holdings.index.blocks_of(known.rig.index_rank()) == 6

    run(test)


def test_forgotten_by_order_it_is_known_again_by_replay(engine: Engine) -> None:
    async def test() -> None:
        ids = prompt("order", 6)
        async with knowing(engine) as known:
            await known.send_and_hear(ids)
            held = known.holdings.index.holdings(known.rig.index_rank())
            for order in (known.rig.intake.resync, known.rig.intake.engine_restarted):
                order(known.rig.backend)
                assert known.blocks(ids) == 0
                assert known.rig.state() != FeedState.LIVE
                await known.until_live()
                assert known.holdings.index.holdings(known.rig.index_rank()) == held

    run(test)


def test_an_engine_that_tells_is_followed_there_whatever_is_configured(engine: Engine) -> None:
    async def test() -> None:
        async with knowing(engine, "tcp://127.0.0.1:1") as known:
            await known.until_live()
            ids = prompt("configured", 4)
            await known.send_and_hear(ids)

    run(test)


@asynccontextmanager
async def without_replay(engine: Engine) -> AsyncIterator[str]:
    """The URL of the same engine, which tells of no replay endpoint there."""
    async with aiohttp.ClientSession() as session:

        async def forward(request: web.Request) -> web.Response:
            async with session.request(
                request.method,
                engine.url + request.raw_path,
                data=await request.read(),
                headers={"Content-Type": request.content_type},
            ) as answer:
                content = await answer.read()
                if request.path == "/kv_event_sources":
                    ranks = json.loads(content)
                    content = json.dumps(
                        {rank: told | {"replay_endpoint": None} for rank, told in ranks.items()}
                    ).encode()
                return web.Response(status=answer.status, body=content, content_type=answer.content_type)

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", forward)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


def test_what_was_cached_before_is_relearned_from_announcements_and_each_block_counts_once(
    engine: Engine, figures: list[str]
) -> None:
    async def test() -> None:
        await asyncio.to_thread(engine.reset_prefix_cache)
        shared = prompt("relearn", 3)[: 3 * BLOCK_TOKENS]
        first, second = ([*shared, *prompt(name, 5)] for name in ("first", "second"))
        salted = prompt("relearn salted", 4)
        await complete(engine, first)
        await complete(engine, second)
        await complete(engine, salted, cache_salt="tenant-a")
        holdings = KvHoldings(MEMORY)
        async with (
            without_replay(engine) as url,
            following(url, holdings, SETTINGS) as rig,
            aiohttp.ClientSession() as session,
        ):
            known = Known(engine, rig, holdings)
            await rig.until(lambda: rig.state() == FeedState.INCOMPLETE, WITHIN_S)
            relearner = Relearner(
                rig.registry,
                SystemClock(asyncio.get_running_loop()),
                rig.intake,
                session,
                RelearnSettings(interval_s=0),
            )
            # A turn that follows is stored below what nobody knows: it waits, and must not count twice when it joins.
            longer = [*first[: 8 * BLOCK_TOKENS], *prompt("turn", 2)]
            assert await known.send(longer) == 8
            for ids, salt in ((longer, None), (second, None), (salted, "tenant-a"), (first, None)):
                cached = await known.send(ids, **({"cache_salt": salt} if salt else {}))
                offered = relearner.offer(rig.backend, MODEL, ids, cached * BLOCK_TOKENS, salt=salt)
                assert offered
                await known.until_known(ids, cached, salt)
                await relearner.idle()
            assert [known.blocks(longer), known.blocks(second), known.blocks(salted, "tenant-a")] == [10, 8, 4]
            assert (relearner.asked, relearner.announced) == (4, 4)
            held = holdings.index.holdings(rig.index_rank())
            assert {count for _, references in held.values() for count in references.values()} == {1}
            figures.append(f"relearned {len(held)} blocks by {relearner.asked} requests without replay")
            # And so they go with one eviction each.
            for number in range(8):
                await known.send_and_hear(prompt(("evicts", number), 9))
            assert [known.blocks(longer), known.blocks(second), known.blocks(salted, "tenant-a")] == [0, 0, 0]
            assert await known.send(second) == 0
            await relearner.stop()

    run(test)


def test_a_killed_engine_is_stale_and_its_successor_on_the_same_ports_starts_empty(engine: Engine) -> None:
    async def test() -> None:
        ids, others = prompt("killed", 6), prompt("successor", 3)
        async with knowing(engine) as known:
            await known.send_and_hear(ids)
            engine.kill_engine_core()
            await known.rig.until(lambda: known.rig.state() == FeedState.STALE, WITHIN_S)
            assert known.blocks(ids) == 6
            engine.stop()
            engine.start()
            await asyncio.to_thread(engine.wait_until_up)
            await known.until_live()
            assert known.blocks(ids) == 0
            assert await known.send_and_hear(others) == 0
            assert await known.send(ids) == 0

    run(test)
