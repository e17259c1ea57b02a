"""What arrives: a trace made ready for a fleet, and the hit ratio that one pooled cache would reach on it."""

from __future__ import annotations

import statistics
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Final, Literal

from loadtest.replay.trace import TraceRequest, load_trace
from router.index.prefix_index import BlockHashes

WARM: Final = 0.1  # the first part of the requests warms the caches and is not counted
FITS: Final = 0.8  # of an engine's pool: larger requests are left out
SHARED_USES: Final = 20  # requests (in session traces: more than two sessions) that make a block a common one
MAX_SPREAD: Final = 4.0  # usual ticks, over which requests of one timestamp are spread at most
BYTES_PER_TOKEN: Final = 4
COPY: Final = 1 << 40  # apart from each other are the block ids of a trace's copies by so much
_MIX = (1 << 64) - 1

Arrivals = Literal["open", "poisson", "session"]


class Arrival:
    """One request of a workload. `at_s`: from the first one, at the trace's own speed. `follows`: the arrival whose
    answer it waits for, -1 for none; `gap_s` is then the time between the two arrivals in the trace."""

    __slots__ = ("at_s", "blocks", "follows", "gap_s", "ids", "output_tokens", "prompt_tokens", "session")

    def __init__(self, at_s: float, source: TraceRequest, ids: tuple[int, ...], session: bytes | None) -> None:
        self.at_s = at_s
        self.prompt_tokens = source.prompt_tokens
        self.output_tokens = source.output_tokens
        self.ids = ids  # of the full blocks
        self.blocks = BlockHashes.from_list([mixed(block) for block in ids])
        self.session = session
        self.follows = -1
        self.gap_s = 0.0

    def cacheable_blocks(self, block_tokens: int) -> int:
        """Full blocks that a cache can serve: the last token is always computed."""
        return min(len(self.ids), (self.prompt_tokens - 1) // block_tokens)


class Workload:
    __slots__ = ("arrivals", "block_tokens", "left_out", "name", "session")

    def __init__(self, name: str, block_tokens: int, arrivals: list[Arrival], left_out: int, session: bool) -> None:
        self.name = name
        self.block_tokens = block_tokens
        self.arrivals = arrivals
        self.left_out = left_out  # requests too large for the engines
        self.session = session
        if not arrivals:
            raise ValueError(f"{name}: no request fits the engines")

    @property
    def span_s(self) -> float:
        return self.arrivals[-1].at_s - self.arrivals[0].at_s

    @property
    def first_counted(self) -> int:
        return int(len(self.arrivals) * WARM)

    def pooled_hit_ratio(self, capacity_blocks: int | None) -> float:
        """Token hit ratio of one LRU cache that all share (None: one that forgets nothing), in order of arrival."""
        cached: OrderedDict[int, None] = OrderedDict()
        hits = tokens = 0
        first = self.first_counted
        for number, arrival in enumerate(self.arrivals):
            known = 0
            for block in arrival.ids[: arrival.cacheable_blocks(self.block_tokens)]:
                if block not in cached:
                    break
                known += 1
            if number >= first:
                hits += known * self.block_tokens
                tokens += arrival.prompt_tokens
            for block in reversed(arrival.ids):  # the head of a prompt stays longer than its tail
                cached[block] = None
                cached.move_to_end(block)
            if capacity_blocks is not None:
                while len(cached) > capacity_blocks:
                    cached.popitem(last=False)
        return hits / tokens

    def times(self, seconds_per_request: float, rng: Random) -> list[float]:
        """When each arrives, in seconds, at this mean distance. Each is moved by up to the mean distance, so that seeds
        differ where a policy draws no lots; a request that follows another waits for that besides."""
        scale = seconds_per_request * (len(self.arrivals) - 1) / self.span_s if self.span_s else 1.0
        start = self.arrivals[0].at_s
        return [(arrival.at_s - start) * scale + rng.random() * seconds_per_request for arrival in self.arrivals]


def load_workload(
    path: Path, *, block_tokens: int, arrivals: Arrivals, copies: int = 1, pool_tokens: int, limit: int | None = None
) -> Workload:
    """The trace `copies` times over, without what is too large for a pool of `pool_tokens`.

    A copy keeps the blocks that many share, system and tool prompts, and gets names of its own for the rest. Copies
    follow each other; in session traces they run at once, their sessions starting between each other's. "poisson":
    the trace's order at times of our own. `limit`: only so many requests of the file. TraceError, OSError.
    """
    trace = load_trace(path, block_tokens)
    requests = trace.requests[:limit]
    spread = _spread([request.at_s for request in requests])
    session = arrivals == "session"
    if arrivals == "poisson":
        rng, at = Random(7), 0.0
        for position in range(len(spread)):
            at += rng.expovariate(1.0)
            spread[position] = at
    common = _common(requests, session)
    every_s = 0.37 * statistics.fmean(spread) / copies if session else spread[-1] + spread[-1] / len(spread)
    made: list[Arrival] = []
    left_out = 0
    for copy in range(copies):
        for at_s, request in zip(spread, requests, strict=True):
            if request.prompt_tokens + request.output_tokens > FITS * pool_tokens:
                left_out += 1
                continue
            ids = request.block_ids[: request.prompt_tokens // block_tokens]
            if copy:
                ids = tuple(block if block in common else block + copy * COPY for block in ids)
            key = None if request.session is None else f"{copy}:{request.session}".encode()
            made.append(Arrival(at_s + copy * every_s, request, ids, key))
    made.sort(key=lambda arrival: arrival.at_s)
    if session:
        _follow(made)
    return Workload(trace.name, block_tokens, made, left_out, session)


def _follow(arrivals: Sequence[Arrival]) -> None:
    last: dict[bytes, int] = {}
    for number, arrival in enumerate(arrivals):
        if arrival.session is None:
            continue
        before = last.get(arrival.session)
        if before is not None:
            arrival.follows = before
            arrival.gap_s = arrival.at_s - arrivals[before].at_s
        last[arrival.session] = number


def _spread(times: Sequence[float]) -> list[float]:
    """Requests that share a timestamp, apart from each other up to the next timestamp."""
    ticks = sorted(set(times))
    gaps = [after - before for before, after in pairwise(ticks)]
    usual = statistics.median(gaps) if gaps else 1.0
    gap_after = dict(zip(ticks, [*gaps, usual], strict=True))
    same, seen = Counter(times), Counter[float]()
    spread = []
    for at in times:
        spread.append(at + min(gap_after[at], MAX_SPREAD * usual) * seen[at] / same[at])
        seen[at] += 1
    return spread


def _common(requests: Sequence[TraceRequest], session: bool) -> set[int]:
    if session:
        users: defaultdict[int, set[str | None]] = defaultdict(set)
        for request in requests:
            for block in request.block_ids:
                users[block].add(request.session)
        return {block for block, sessions in users.items() if len(sessions) > 2}
    uses = Counter(block for request in requests for block in request.block_ids)
    return {block for block, count in uses.items() if count >= SHARED_USES}


def mixed(block: int) -> int:
    """64 well mixed bits of a block's number (splitmix64): the ids of a trace are small and dense."""
    mixed = (block + 0x9E3779B97F4A7C15) & _MIX
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MIX
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MIX
    return mixed ^ (mixed >> 31)
