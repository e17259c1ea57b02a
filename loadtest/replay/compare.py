"""loadtest/compare TRACE [--engines URL,URL ...] [--strategies S,...] [--speed X] [--rounds N]

The same trace through each strategy in turn, then a table. Without --engines before simulated engines, which begin
cold each time; with them before yours, with prompts that are new to their caches each time. The gateway is started
here, on loopback, fresh for each strategy. Exit codes as those of python -m loadtest.replay.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import aiohttp
import orjson
import uvloop

from loadtest.replay.__main__ import announce, raise_file_limit, until_told
from loadtest.replay.bodies import read_body
from loadtest.replay.cache_aware import CacheAware
from loadtest.replay.engine_counters import ScrapeFailed
from loadtest.replay.options import add_trace_flags, positive, urls, whole
from loadtest.replay.progress import Progress
from loadtest.replay.replay import Settings, measure_rate, new_salt, replay
from loadtest.replay.report import Report, milliseconds, percent
from loadtest.replay.target import TargetFailed
from loadtest.replay.trace import Trace, TraceError, load_trace
from router.sim.demo_processes import Child, ChildFailed, ProcessTree

STRATEGIES: Final = ("roundrobin", "leastload", "session", "prefixaware", "kvaware")
CACHE_AWARE: Final = "sglang"  # no strategy of a gateway: cache_aware.py
SIM_BLOCK_TOKENS: Final = 16
GATEWAY_CONFIG: Final = """
[server]
port = 0
[admin]
port = 0
[timeouts]
lame_duck_s = 0.0
[log]
level = "warning"
access = false
"""
READY_TIMEOUT_S: Final = 20.0
POLL_S: Final = 0.05
MAX_ANSWER_BYTES: Final = 16 << 20
HEADINGS: Final = (
    "strategy",
    "hit ratio",
    "TTFT mean",
    "TTFT p50",
    "TTFT p90",
    "TTFT p99",
    "E2E p50",
    "imbalance",
    "failed",
)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="loadtest/compare", description=str(__doc__).partition("\n\n")[2])
    add_trace_flags(parser)
    parser.add_argument("--strategies", type=_strategies, default=STRATEGIES, metavar="S,...")
    parser.add_argument("--rounds", type=whole(1, 100), default=1, metavar="N", help="all strategies N times in turn")
    parser.add_argument(
        "--turns-wait", action="store_true", help="a session's turn waits for the end of the one before"
    )
    parser.add_argument(
        "--reset",
        action="store_true",
        help="POST /reset_prefix_cache to --engines before each run (VLLM_SERVER_DEV_MODE)",
    )
    parser.add_argument("--tokenizer", metavar="FOLDER", help="the model's, for kvaware; default: engines are asked")
    parser.add_argument(
        "--share-of-closed",
        type=positive,
        metavar="X",
        help="instead of --speed: so much of the rate that --clients reach who wait for each answer, measured first",
    )
    parser.add_argument("--clients", type=whole(1, 10_000), default=20, metavar="N", help="default: 20")
    parser.add_argument("--measure-s", type=positive, default=60.0, metavar="S", help="for how long; default: 60")
    parser.add_argument("--engines", type=urls, default=(), metavar="URL,...", help="yours; default: simulated ones")
    parser.add_argument("--sims", type=whole(1, 64), default=4, metavar="N", help="simulated engines; default: 4")
    parser.add_argument(
        "--sim-kv-tokens",
        type=whole(256, 1 << 30),
        default=65_536,
        metavar="N",
        help="KV cache of each; default: 65536",
    )
    parser.add_argument(
        "--sim-flags",
        type=shlex.split,
        default=[],
        metavar="'...'",
        help="further flags of kvgate sim for each of them",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    try:
        trace = load_trace(arguments.trace, arguments.block_tokens)
    except (TraceError, OSError) as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return 2
    raise_file_limit()
    announce(Progress(sys.stderr), trace, arguments.speed, arguments.spread)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            reports = runner.run(until_told(lambda stop: _compare(trace, arguments, stop)))
    except (ChildFailed, TargetFailed, ScrapeFailed, OSError) as failed:
        sys.stderr.write(f"{parser.prog}: {failed}\n")
        return 1
    if arguments.json != "-":
        print(table(reports))
        if told := ratios(reports):
            print(f"\n{told}")
    if arguments.json is not None:
        text = json.dumps({name: [report.as_json() for report in rounds] for name, rounds in reports.items()}, indent=2)
        if arguments.json == "-":
            print(text)
        else:
            Path(arguments.json).write_text(f"{text}\n")
    return 0 if all(report.clean for rounds in reports.values() for report in rounds) else 1


def _strategies(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in (*STRATEGIES, CACHE_AWARE):
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join((*STRATEGIES, CACHE_AWARE))}")
    return names


async def _compare(trace: Trace, arguments: argparse.Namespace, stop: asyncio.Event) -> dict[str, list[Report]]:
    """Reports by strategy, one a round; fewer when it was stopped."""
    reports: dict[str, list[Report]] = {}
    async with ProcessTree() as tree, aiohttp.ClientSession() as session:
        engines = arguments.engines or await _start_sims(tree, arguments)
        if arguments.share_of_closed is not None:
            arguments.speed = await _measured_speed(tree, session, trace, arguments, engines)
        for number in range(arguments.rounds):
            first = number % len(arguments.strategies)  # another one in each round
            for strategy in (*arguments.strategies[first:], *arguments.strategies[:first]):
                if stop.is_set():
                    return reports
                if not arguments.engines:
                    await asyncio.gather(*(_empty(session, engine) for engine in engines))
                elif arguments.reset:
                    await asyncio.gather(*(_reset(session, engine) for engine in engines))
                gateway = None
                if strategy != CACHE_AWARE:
                    gateway = await _start_gateway(tree, session, strategy, engines, arguments.tokenizer)
                label = strategy if arguments.rounds == 1 else f"{strategy} {number + 1}"
                settings = _settings(arguments, gateway.url if gateway is not None else engines[0], engines)
                if arguments.rounds > 1:
                    settings = replace(settings, seed=number)
                if gateway is None:
                    settings = replace(settings, straight=CacheAware(engines))
                report = await replay(trace, settings, Progress(sys.stderr, label), stop)
                reports.setdefault(strategy, []).append(report)
                sys.stderr.write(f"\n---- {label}\n{report.as_text()}\n")
                if gateway is not None:
                    await tree.stop(gateway)
    return reports


async def _measured_speed(
    tree: ProcessTree,
    session: aiohttp.ClientSession,
    trace: Trace,
    arguments: argparse.Namespace,
    engines: Sequence[str],
) -> float:
    """The speed of the trace at the wanted share of what clients reach through prefixaware who wait for answers."""
    gateway = await _start_gateway(tree, session, "prefixaware", engines, None)
    settings = replace(_settings(arguments, gateway.url, engines), speed=1.0, limit_s=None, salt=new_salt())
    reached = await measure_rate(trace, settings, clients=arguments.clients, seconds=arguments.measure_s)
    await tree.stop(gateway)
    wanted = arguments.share_of_closed * reached
    speed = speed_of(trace, wanted, arguments.limit_s)
    sys.stderr.write(
        f"{arguments.clients} clients who wait reach {reached:.2f} requests/s: the trace is replayed {speed:.2f} times"
        f" as fast as recorded, {wanted:.2f} requests/s\n"
    )
    return speed


def speed_of(trace: Trace, wanted_per_s: float, limit_s: float | None) -> float:
    """The speed at which the part of the trace that is due within `limit_s` (all of it) comes at this rate."""
    times = [request.at_s for request in trace.requests]
    if limit_s is None or len(times) < 2:
        return wanted_per_s * times[-1] / max(len(times) - 1, 1) if times[-1] else 1.0
    count = min(max(round(wanted_per_s * limit_s), 2), len(times))
    return times[count - 1] / limit_s or 1.0


def _settings(arguments: argparse.Namespace, url: str, engines: Sequence[str]) -> Settings:
    return Settings(
        target=url,
        engines=tuple(engines),
        speed=arguments.speed,
        spread=arguments.spread,
        limit_s=arguments.limit_s,
        max_in_flight=arguments.max_in_flight,
        max_output_tokens=arguments.max_output_tokens,
        request_timeout_s=arguments.request_timeout_s,
        # Simulated engines begin cold: the same prompts for each strategy.
        salt=new_salt() if arguments.engines else "",
        sessions=not arguments.no_sessions,
        turns_wait=arguments.turns_wait,
    )


async def _start_sims(tree: ProcessTree, arguments: argparse.Namespace) -> tuple[str, ...]:
    # One block of a pool is vLLM's null block, which holds nothing.
    blocks = arguments.sim_kv_tokens // SIM_BLOCK_TOKENS + 1
    flags = (
        *("--port", "0", "--block-size", str(SIM_BLOCK_TOKENS), "--num-gpu-blocks-override", str(blocks)),
        "--enable-prompt-tokens-details",
        *arguments.sim_flags,
    )
    sims = [await tree.start(f"engine-{number}", ("sim", *flags)) for number in range(arguments.sims)]
    await asyncio.gather(*(sim.wait_until_listening() for sim in sims))
    return tuple(sim.url for sim in sims)


async def _empty(session: aiohttp.ClientSession, engine: str) -> None:
    """As after a restart: no cached block, all counters at 0."""
    async with session.post(f"{engine}/sim/fault", data=orjson.dumps({"kind": "cold-restart"})) as response:
        if response.status != 200:
            raise TargetFailed(f"{engine} does not restart cold: status {response.status}")


async def _reset(session: aiohttp.ClientSession, engine: str) -> None:
    async with session.post(f"{engine}/reset_prefix_cache") as response:
        if response.status != 200:
            raise TargetFailed(f"{engine} does not reset its prefix cache: status {response.status}")


async def _start_gateway(
    tree: ProcessTree, session: aiohttp.ClientSession, strategy: str, engines: Sequence[str], tokenizer: str | None
) -> Child:
    """A gateway that has every engine up, has read its figures, and with kvaware follows the KV events of those that
    have any. ChildFailed or TargetFailed where not."""
    kvaware = f"[routing.kvaware]\ntokenizer = {json.dumps(tokenizer)}\n" if tokenizer is not None else ""
    backends = "".join(f"[[backends]]\nurl = {json.dumps(engine)}\n" for engine in engines)
    gateway = await tree.start(
        f"gateway ({strategy})",
        ("serve", "-c", "/dev/stdin", "--strategy", strategy),
        stdin=(GATEWAY_CONFIG + kvaware + backends).encode(),
        announces=("listening", "admin"),
    )
    await gateway.wait_until_listening()
    give_up = time.monotonic() + READY_TIMEOUT_S
    while True:
        async with session.get(f"{gateway.announced['admin']}/backends") as response:
            told = orjson.loads(await read_body(response, MAX_ANSWER_BYTES))
        known = told["backends"]
        missing = [backend["name"] for backend in known if not (backend["serving"] and backend["report"])]
        if strategy == "kvaware":
            missing += [
                f"{b['name']}'s events" for b in known if b["kv_events"]["state"] in ("connecting", "replaying")
            ]
            missing += [name for name, state in told["tokens"].items() if state["source"] in ("loading", "testing")]
        if not missing:
            return gateway
        if time.monotonic() > give_up:
            raise TargetFailed(f"{gateway.name} does not find {', '.join(missing)} up:\n{gateway.last_words}")
        await asyncio.sleep(POLL_S)


def table(reports: dict[str, list[Report]]) -> str:
    """A row a strategy, in Markdown: medians over the rounds, in brackets the least and greatest of several."""
    rows = [HEADINGS, *(_row(strategy, rounds) for strategy, rounds in reports.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def ratios(reports: dict[str, list[Report]]) -> str:
    """Mean TTFT of each placement by prefix as times that of each other one: means over the rounds of mean TTFT."""
    rounds_of = {len(rounds) for rounds in reports.values()}
    if len(rounds_of) != 1 or any(report.interrupted for rounds in reports.values() for report in rounds):
        return ""  # stopped in between: they did not get the same
    means: dict[str, float] = {}
    for name, rounds in reports.items():
        known = [report.ttft.mean for report in rounds if report.ttft.mean is not None]
        if len(known) == len(rounds):
            means[name] = statistics.fmean(known)
    lines = []
    for ours in ("prefixaware", "kvaware"):
        others = [name for name in means if name not in ("prefixaware", "kvaware")]
        if ours in means and others:
            shown = ", ".join(f"{means[ours] / means[name]:.2f} of {name}'s" for name in others)
            lines.append(f"{ours}: mean TTFT {shown}")
    return "\n".join(lines)


def _row(strategy: str, rounds: Sequence[Report]) -> tuple[str, ...]:
    def over(values: list[float | None], shown: Any) -> str:
        known = [value for value in values if value is not None]
        if not known:
            return "-"
        middle = str(shown(statistics.median(known)))
        return middle if len(known) == 1 else f"{middle} ({shown(min(known))} to {shown(max(known))})"

    return (
        strategy,
        over([report.hit_ratio for report in rounds], percent),
        over([report.ttft.mean for report in rounds], milliseconds),
        over([report.ttft.p50 for report in rounds], milliseconds),
        over([report.ttft.p90 for report in rounds], milliseconds),
        over([report.ttft.p99 for report in rounds], milliseconds),
        over([report.e2e.p50 for report in rounds], milliseconds),
        over([report.imbalance for report in rounds], lambda value: f"{value:.2f}"),
        str(sum(report.tally.failed + report.not_sent for report in rounds)),
    )


if __name__ == "__main__":
    sys.exit(main())
