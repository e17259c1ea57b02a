"""The flags that every command of the replay has."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from urllib.parse import urlsplit


def add_trace_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a trace: JSON lines, .gz or not")
    parser.add_argument("--block-tokens", type=whole(1, 1 << 20), metavar="N", help="tokens a block, where unclear")
    parser.add_argument("--speed", type=positive, default=1.0, metavar="X", help="2: twice as fast as recorded")
    parser.add_argument(
        "--limit-s", type=positive, metavar="N", help="only what is due within the first N seconds of the replay"
    )
    parser.add_argument("--spread", action="store_true", help="space requests that share a time up to the next one")
    parser.add_argument(
        "--max-in-flight", type=whole(1, 100_000), default=1000, metavar="N", help="what is due beyond is not sent"
    )
    parser.add_argument(
        "--max-output-tokens", type=whole(1, 1 << 20), metavar="N", help="cut longer answers of the trace"
    )
    parser.add_argument("--request-timeout-s", type=positive, default=600.0, metavar="S", help="for one whole answer")
    parser.add_argument("--no-sessions", action="store_true", help="send no x-session-id")
    parser.add_argument("--json", metavar="FILE", help="the report as JSON too; -: on standard output, in its place")


def whole(least: int, most: int):  # type: ignore[no-untyped-def]
    """An argument's type: a whole number from `least` to `most`."""

    def number(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{value} is not within {least} to {most}")
        return value

    return number


def positive(text: str) -> float:
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def url(text: str) -> str:
    """http(s)://host[:port], as it is used: without a trailing slash."""
    try:
        parts = urlsplit(text)
        complete = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        complete = False
    if not complete or parts.path not in ("", "/") or parts.query or parts.fragment or parts.username:
        raise argparse.ArgumentTypeError(f"{text!r}: expected http://host:port")
    return f"{parts.scheme}://{parts.netloc}"


def urls(text: str) -> tuple[str, ...]:
    return tuple(url(part.strip()) for part in text.split(","))
