"""`kvgate demo`: four simulated engines, a gateway, and the same conversations through each strategy in turn.

Every strategy begins with cold caches and a gateway that knows nothing. The hit ratio and the imbalance are what the
engines count themselves; TTFT is what a client sees. The children are real processes (`kvgate sim`, `kvgate serve`) on
free ports of the loopback interface.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Final

import aiohttp
import orjson
import uvloop

from router.clock import Clock, SystemClock
from router.sim.demo_load import Plan, Tally, hold_conversations, make_plan
from router.sim.demo_processes import Child, ChildFailed, ProcessTree
from router.sim.demo_view import Result, View, table

STRATEGIES: Final = ("roundrobin", "leastload", "session", "prefixaware", "kvaware")
MODEL: Final = "sim-8b"
ENGINES: Final = 4
BLOCK_TOKENS: Final = 16
POOL_SHARE: Final = 0.5  # of all that is said, what the engines can hold together
# Quicker in steps and tokens than the 8B model that `kvgate sim` stands for, so that the demo is short; the load is
# sized to it: without a cached prefix the engines are nearly saturated.
ENGINE_FLAGS: Final = (
    "--served-model-name",
    MODEL,
    "--block-size",
    str(BLOCK_TOKENS),
    "--prefill-tokens-per-s",
    "24000",
    "--step-ms",
    "5",
    "--decode-ms",
    "2",
    "--enable-prompt-tokens-details",
    "--no-kv-events",
)
GATEWAY_CONFIG: Final = """
[server]
port = 0
[admin]
port = 0
[log]
level = "warning"
access = false
"""
QUERIES: Final = "vllm:prefix_cache_queries_total"
HITS: Final = "vllm:prefix_cache_hits_total"
READY_TIMEOUT_S: Final = 15.0
CALL_TIMEOUT_S: Final = 10.0
POLL_S: Final = 0.05
FRAME_S: Final = 0.2


class DemoFailed(Exception):
    """The demo cannot go on; the text says why."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All flags of `kvgate demo`."""
    parser.add_argument(
        "--strategies", type=_strategies, default=STRATEGIES, metavar="S,...", help=f"default: {','.join(STRATEGIES)}"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the load: the same one, the same conversations")
    parser.add_argument("--hold", action="store_true", help="keep the last gateway and the engines until Ctrl-C")
    parser.add_argument("--engines", type=_positive(64), default=ENGINES, help=f"default: {ENGINES}")
    parser.add_argument("--conversations", type=_positive(1000), default=60, help="default: 60")
    parser.add_argument("--turns", type=_positive(50), default=6, help="of each conversation; default: 6")


def _strategies(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in STRATEGIES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(STRATEGIES)}")
    return names


class _positive:
    """An argument's type: a whole number from 1 to `most`."""

    __name__ = "number"  # argparse names it so in its error

    def __init__(self, most: int) -> None:
        self._most = most

    def __call__(self, text: str) -> int:
        value = int(text)
        if not 1 <= value <= self._most:
            raise argparse.ArgumentTypeError(f"{value} is not within 1 to {self._most}")
        return value


def run(arguments: argparse.Namespace) -> int:
    """0 when it ended as asked, by Ctrl-C too; 1 when a part failed or a request got no answer."""
    view = View(sys.stdout)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_until_told(arguments, view))
    except (ChildFailed, DemoFailed, OSError, aiohttp.ClientError, TimeoutError) as error:
        view.close()
        sys.stderr.write(f"kvgate demo: {error or type(error).__name__}\n")
        return 1


async def _until_told(arguments: argparse.Namespace, view: View) -> int:
    """The demo, ended early by SIGINT or SIGTERM. Its children are gone when this returns, however it does."""
    loop = asyncio.get_running_loop()
    demo = loop.create_task(_demo(arguments, view, SystemClock(loop)))
    told = False

    def stop() -> None:
        nonlocal told
        told = True
        demo.cancel()

    # Handlers of ours from the start: no moment in which Ctrl-C would leave a child behind.
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        return await demo
    except asyncio.CancelledError:
        if not told:
            raise
        view.say("stopped")
        return 0


async def _demo(arguments: argparse.Namespace, view: View, clock: Clock) -> int:
    plan = make_plan(arguments.seed, arguments.conversations, arguments.turns)
    pool_blocks = _pool_blocks(plan, arguments.engines)
    view.say(_describe(plan, arguments, pool_blocks))
    results: list[Result] = []
    timeout = aiohttp.ClientTimeout(total=CALL_TIMEOUT_S)
    async with ProcessTree() as tree, aiohttp.ClientSession(timeout=timeout) as session:
        # One block of a pool is vLLM's null block, which holds nothing.
        flags = ("--port", "0", "--num-gpu-blocks-override", str(pool_blocks + 1), *ENGINE_FLAGS)
        engines = [await tree.start(f"engine-{number}", ("sim", *flags)) for number in range(arguments.engines)]
        await asyncio.gather(*(engine.wait_until_listening() for engine in engines))
        gateway: Child | None = None
        for strategy in arguments.strategies:
            if gateway is not None:
                await tree.stop(gateway)
                await asyncio.gather(*(_empty(session, engine) for engine in engines))
            gateway = await _start_gateway(tree, strategy, engines)
            trial = _Trial(session, strategy, gateway, engines, plan, view, clock)
            results.append(await _guarded(tree, trial.run()))
        view.say(f"\n{table(results)}\n{_verdict(results)}")
        if arguments.hold and gateway is not None:
            view.say(_invitation(gateway))
            await tree.watch()
    return 1 if any(result.errors for result in results) else 0


def _pool_blocks(plan: Plan, engines: int) -> int:
    """KV blocks of one engine: its part of POOL_SHARE, but room for two conversations at least."""
    share = int(POOL_SHARE * plan.distinct_tokens / engines)
    return -(-max(share, 2 * plan.longest_tokens) // BLOCK_TOKENS)


def _describe(plan: Plan, arguments: argparse.Namespace, pool_blocks: int) -> str:
    held = pool_blocks * BLOCK_TOKENS * arguments.engines
    return (
        f"{len(plan.conversations)} conversations of {arguments.turns} turns over {len(plan.systems)} system prompts "
        f"(seed {arguments.seed}): {plan.requests} streamed requests.\n"
        f"{arguments.engines} simulated engines with {pool_blocks * BLOCK_TOKENS:,} tokens of KV cache each, "
        f"{held:,} together: {held / plan.distinct_tokens:.0%} of the {plan.distinct_tokens:,} tokens that are said.\n"
        "Each strategy gets the same load, with cold caches and a fresh gateway."
    )


async def _guarded(tree: ProcessTree, work: Coroutine[None, None, Result]) -> Result:
    """The work's result; ChildFailed as soon as a child ends by itself."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(tree.watch())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            watching.result()
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _start_gateway(tree: ProcessTree, strategy: str, engines: Sequence[Child]) -> Child:
    backends = "".join(f'[[backends]]\nname = "{engine.name}"\nurl = "{engine.url}"\n' for engine in engines)
    return await tree.start(
        f"gateway ({strategy})",
        ("serve", "-c", "/dev/stdin", "--strategy", strategy),
        stdin=(GATEWAY_CONFIG + backends).encode(),
        announces=("listening", "admin"),
    )


async def _empty(session: aiohttp.ClientSession, engine: Child) -> None:
    """As after a restart: no cached block, all counters at 0."""
    body = orjson.dumps({"kind": "cold-restart"})
    async with session.post(f"{engine.url}/sim/fault", data=body) as response:
        if response.status != 200:
            raise DemoFailed(f"{engine.name} does not restart cold: status {response.status}")


@dataclass(frozen=True, slots=True)
class _Trial:
    """One strategy: its gateway has been started, its engines are cold."""

    session: aiohttp.ClientSession
    strategy: str
    gateway: Child
    engines: Sequence[Child]
    plan: Plan
    view: View
    clock: Clock

    async def run(self) -> Result:
        """ChildFailed or DemoFailed if the gateway does not get ready; failed requests are counted."""
        await self._wait_until_ready()
        tally = Tally()
        took_s = await self._load(tally)
        counts = await asyncio.gather(*(_counters(self.session, engine) for engine in self.engines))
        spread = "/".join(str(tally.by_backend[engine.name]) for engine in self.engines)
        self.view.say(f"{self.strategy:<12}{tally.answered} answers in {took_s:.1f} s, by engine {spread}")
        for what, times in tally.errors.most_common():
            self.view.say(f"{'':<12}{times} times: {what}")
        return Result(
            self.strategy,
            queried_tokens=tuple(count[QUERIES] for count in counts),
            hit_tokens=tuple(count[HITS] for count in counts),
            ttfts_s=tuple(tally.ttfts),
            errors=tally.failed,
            took_s=took_s,
        )

    async def _wait_until_ready(self) -> None:
        await self.gateway.wait_until_listening()
        give_up = self.clock.now() + READY_TIMEOUT_S
        while True:
            async with self.session.get(f"{self.gateway.announced['admin']}/backends") as response:
                known = orjson.loads(await response.read())["backends"]
            # Up, and asked for the size of its cache: both come with the first checks.
            missing = [backend["name"] for backend in known if not (backend["serving"] and backend["report"])]
            if not missing:
                return
            if self.clock.now() > give_up:
                raise DemoFailed(
                    f"{self.gateway.name} does not find {', '.join(missing)} up:\n{self.gateway.last_words}"
                )
            await asyncio.sleep(POLL_S)

    async def _load(self, tally: Tally) -> float:
        """Hold all conversations, showing how far they are; seconds that it took."""
        self.view.begin()
        started = self.clock.now()
        load = asyncio.create_task(hold_conversations(self.plan, self.gateway.url, MODEL, self.clock, tally))
        try:
            while not load.done():
                await asyncio.wait((load,), timeout=FRAME_S)
                elapsed_s = self.clock.now() - started
                self.view.progress(self.strategy, tally.done, self.plan.requests, elapsed_s, tally.cached_share)
            load.result()
        finally:
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)
        return self.clock.now() - started


async def _counters(session: aiohttp.ClientSession, engine: Child) -> dict[str, int]:
    """The engine's prefix cache counters, in tokens."""
    sums = {QUERIES: 0, HITS: 0}
    async with session.get(f"{engine.url}/metrics") as response:
        for line in (await response.text()).splitlines():
            name = line.partition("{")[0]
            if name in sums:
                sums[name] += int(float(line.rpartition(" ")[2]))
    return sums


def _verdict(results: Sequence[Result]) -> str:
    by_name = {result.strategy: result for result in results}
    plain, aware = by_name.get("roundrobin"), by_name.get("prefixaware")
    lines = ["Hit ratio and imbalance (prompt tokens computed, busiest engine by mean) are the engines' own counts."]
    if plain and aware and plain.hit_ratio:
        lines.append(f"prefixaware's hit ratio is {aware.hit_ratio / plain.hit_ratio:.1f} times roundrobin's.")
    return "\n".join(lines)


def _invitation(gateway: Child) -> str:
    body = f'{{"model": "{MODEL}", "max_tokens": 16, "messages": [{{"role": "user", "content": "Hello"}}]}}'
    return (
        f"\n{gateway.name} stays: {gateway.url}\n"
        f"  curl -i {gateway.url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'\n"
        f"  curl {gateway.announced['admin']}/backends\n"
        f"  curl {gateway.announced['admin']}/metrics\n"
        "Ctrl-C ends it."
    )
