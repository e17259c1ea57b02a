"""python -m loadtest.replay TRACE --target URL [--engines URL,URL ...] [--speed X] [--limit-s N]

Sends the requests of a trace at its times, without waiting for answers, and reports what came of them. Exit codes:
0 ended as asked, by Ctrl-C too; 1 a request failed or was not sent, or it could not begin; 2 wrong arguments or trace.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import uvloop

from loadtest.replay.engine_counters import ScrapeFailed
from loadtest.replay.options import add_trace_flags, url, urls
from loadtest.replay.progress import Progress
from loadtest.replay.replay import Settings, new_salt, replay
from loadtest.replay.report import Report
from loadtest.replay.target import TargetFailed
from loadtest.replay.trace import Trace, TraceError, load_trace

Result = TypeVar("Result")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest.replay", description=str(__doc__).partition("\n\n")[2])
    add_trace_flags(parser)
    parser.add_argument("--target", type=url, required=True, metavar="URL", help="the gateway, or one engine")
    parser.add_argument(
        "--engines", type=urls, default=(), metavar="URL,...", help="their /metrics give the hit ratio and imbalance"
    )
    parser.add_argument("--model", metavar="NAME", help="default: the first of /v1/models")
    parser.add_argument("--api-key-env", metavar="VAR", help="the variable that holds the target's key")
    parser.add_argument(
        "--salt", metavar="TEXT", help="the same one, the same prompts; default: a new one, which no cache knows"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    api_key = None
    if arguments.api_key_env is not None:
        api_key = os.environ.get(arguments.api_key_env)
        if not api_key:
            parser.error(f"--api-key-env: the variable {arguments.api_key_env} is not set")
    try:
        trace = load_trace(arguments.trace, arguments.block_tokens)
    except (TraceError, OSError) as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return 2
    settings = Settings(
        target=arguments.target,
        engines=arguments.engines,
        model=arguments.model,
        api_key=api_key,
        speed=arguments.speed,
        spread=arguments.spread,
        limit_s=arguments.limit_s,
        max_in_flight=arguments.max_in_flight,
        max_output_tokens=arguments.max_output_tokens,
        request_timeout_s=arguments.request_timeout_s,
        salt=new_salt() if arguments.salt is None else arguments.salt,
        sessions=not arguments.no_sessions,
    )
    raise_file_limit()
    progress = Progress(sys.stderr)
    announce(progress, trace, settings.speed, settings.spread)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            report = runner.run(until_told(lambda stop: replay(trace, settings, progress, stop)))
    except (TargetFailed, ScrapeFailed) as failed:
        sys.stderr.write(f"{parser.prog}: {failed}\n")
        return 1
    _write(report, arguments.json)
    return 0 if report.clean else 1


def raise_file_limit() -> None:
    """Each request under way is an open file, and the usual limit of 1,024 is a soft one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def announce(progress: Progress, trace: Trace, speed: float, spread: bool) -> None:
    progress.say(
        f"{trace.name}: {len(trace.requests)} requests in {trace.span_s / speed:.0f} s, blocks of {trace.block_tokens} "
        f"tokens; a cache that forgets nothing would serve {trace.endless_hit_ratio():.1%} of the prompts"
    )
    if trace.crowded * 5 > len(trace.requests) and not spread:
        progress.say(f"{trace.crowded} requests share their time with the one before; --spread would space them")


async def until_told(work: Callable[[asyncio.Event], Awaitable[Result]]) -> Result:
    """`work`, whose event SIGINT and SIGTERM set so that it ends with what it has; a second one ends it at once."""
    stop = asyncio.Event()

    def told() -> None:
        if stop.is_set():
            os._exit(130)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, told)
    return await work(stop)


def _write(report: Report, file: str | None) -> None:
    text = json.dumps(report.as_json(), indent=2)
    if file == "-":
        print(text)
        return
    print(report.as_text())
    if file is not None:
        Path(file).write_text(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
