"""What other routers do, from their published descriptions, each with what it may know.

All of them are given more than they have: their own bookkeeping is current to the instant, and the predicted times of
llm-d come from a predictor that knows the engine's true prefill speed instead of learning it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import inf, sqrt
from typing import Final

import xxhash

from loadtest.policy.fleet import Fleet, Job
from router.index.prefix_index import PrefixTree
from router.sim.block_pool import PoolEvent

INDEX_MEMORY_BYTES: Final = 1 << 30  # never the bound here: the policies have their own


class Peer(ABC):
    """What a router knows without asking: which requests it sent where, and which of them gave a first token."""

    def __init__(self, fleet: Fleet) -> None:
        engines = fleet.engines
        config = engines[0].model.config
        self.fleet = fleet
        self.count = len(engines)
        self.block_tokens = fleet.block_tokens
        self.present = [engine for engine in range(self.count) if engine not in fleet.absent]
        self.token_s = config.prefill_token_s
        self.fixed_s = config.step_s
        self.outstanding = [0] * self.count
        self.pending_tokens = [0.0] * self.count  # uncached, of those before their first token
        self.pending = [0] * self.count
        self.taken_at = [0.0] * self.count  # when the engine took the oldest of those
        self.active_tokens = [0] * self.count  # prompts of those outstanding
        self.waiting = [0] * self.count  # by the engine's metrics
        self.kv_usage = [0.0] * self.count

    @abstractmethod
    def choose(self, job: Job) -> int:
        """The number of an engine that is present."""

    def route(self, job: Job) -> int:
        engine = self.choose(job)
        now = self.fleet.clock.now()
        if not self.pending[engine]:
            self.taken_at[engine] = now
        self.pending[engine] += 1
        self.pending_tokens[engine] += job.uncached_tokens
        self.outstanding[engine] += 1
        self.active_tokens[engine] += job.arrival.prompt_tokens
        return engine

    def told(self, engine: int, events: list[PoolEvent]) -> None:
        return  # those whose description says exact look into the caches themselves

    def first_token(self, job: Job) -> None:
        engine = job.engine
        self.pending[engine] -= 1
        self.pending_tokens[engine] -= job.uncached_tokens
        self.taken_at[engine] = self.fleet.clock.now()

    def finished(self, job: Job) -> None:
        self.outstanding[job.engine] -= 1
        self.active_tokens[job.engine] -= job.arrival.prompt_tokens

    def scraped(self) -> None:
        for number, engine in enumerate(self.fleet.engines):
            self.waiting[number] = len(engine.model.waiting)
            self.kv_usage[number] = engine.model.pool.usage

    def joined(self, engine: int) -> None:
        self.present = sorted({*self.present, engine})

    # -- for the choices

    def least(self, cost: Sequence[float], among: Sequence[int] | None = None) -> int:
        """The engine of the least cost; equal ones by lot."""
        best, ties = inf, []
        for engine in self.present if among is None else among:
            if cost[engine] < best:
                best, ties = cost[engine], [engine]
            elif cost[engine] == best:
                ties.append(engine)
        return ties[0] if len(ties) == 1 else self.fleet.rng.choice(ties)

    def exact(self, job: Job) -> list[int]:
        """Cached blocks of the prompt by engine, as KV events tell."""
        return [engine.cached_blocks(job.arrival) for engine in self.fleet.engines]

    def uncached(self, job: Job, blocks: int) -> int:
        return max(job.arrival.prompt_tokens - blocks * self.block_tokens, 1)

    def backlog_s(self, engine: int) -> float:
        if not self.pending[engine]:
            return 0.0
        ahead = self.pending_tokens[engine] * self.token_s + self.fixed_s * self.pending[engine]
        return max(ahead - (self.fleet.clock.now() - self.taken_at[engine]), 0.0)

    def ttft_s(self, job: Job, matched: Sequence[int]) -> list[float]:
        """Predicted by engine: what is ahead of it and its own prefill."""
        return [
            self.backlog_s(engine) + self.uncached(job, matched[engine]) * self.token_s for engine in range(self.count)
        ]


class History:
    """Which engine was sent which prefix: an approximate index, least recently used out where it has a capacity."""

    def __init__(self, count: int, capacity_blocks: int = 0) -> None:
        self._tree = PrefixTree(INDEX_MEMORY_BYTES)
        for _ in range(count):
            slot = self._tree.add_backend()
            if capacity_blocks:
                self._tree.set_capacity(slot, capacity_blocks)
        self._count = count

    def match(self, job: Job) -> list[int]:
        self._tree.match(job.arrival.blocks)
        return list(self._tree.matched[: self._count])

    def add(self, engine: int, job: Job) -> None:
        self._tree.insert(engine, job.arrival.blocks)

    def size(self, engine: int) -> int:
        return self._tree.blocks_of(engine)


class RoundRobin(Peer):
    turn = -1

    def choose(self, job: Job) -> int:
        self.turn = (self.turn + 1) % len(self.present)
        return self.present[self.turn]


class LeastLoaded(Peer):
    def choose(self, job: Job) -> int:
        return self.least(self.outstanding)


class SessionHash(Peer):
    """The session picks the engine whatever its load; without one the sixth block (or the last) stands in."""

    def choose(self, job: Job) -> int:
        arrival = job.arrival
        key = arrival.session or (str(arrival.ids[min(5, len(arrival.ids) - 1)]).encode() if arrival.ids else b"")
        return self.present[xxhash.xxh64_intdigest(key) % len(self.present)]


class SglangCacheAware(Peer):
    """cache_aware as its command line has it: 64 requests and half as many again apart, the least loaded; else the
    longest match of what was sent, from three tenths of the prompt; else the smallest tree. Never evicts in so short a
    time."""

    threshold, apart, ratio = 0.3, 64, 1.5

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self.history = History(self.count)

    def choose(self, job: Job) -> int:
        load = [self.outstanding[engine] for engine in self.present]
        matched = self.history.match(job)
        if max(load) - min(load) > self.apart and max(load) > self.ratio * min(load):
            engine = self.least(self.outstanding)
        else:
            longest = max(matched[engine] for engine in self.present)
            if longest > self.threshold * max(len(job.arrival.ids), 1):
                engine = next(engine for engine in self.present if matched[engine] == longest)
            else:
                engine = self.least([self.history.size(engine) for engine in range(self.count)])
        self.history.add(engine, job)
        job.uncached_tokens = self.uncached(job, matched[engine])
        return engine


class SglangTight(SglangCacheAware):
    """The same with the thresholds of its library's defaults."""

    threshold, apart, ratio = 0.5, 32, 1.1


class AibrixPrefixCache(Peer):
    """prefix-cache: more than 16 requests apart, the fewest running; else the longest match whose requests are at most
    the mean and two standard deviations; else the fewest running. Its table holds 200,000 blocks of 128 bytes."""

    apart, deviations, table_bytes = 16, 2.0, 200_000 * 128

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self.history = History(self.count, self.table_bytes // 4 // self.block_tokens)

    def choose(self, job: Job) -> int:
        load = [self.outstanding[engine] for engine in self.present]
        matched = self.history.match(job)
        engine = None
        if max(load) - min(load) <= self.apart:
            mean = sum(load) / len(load)
            bound = mean + self.deviations * sqrt(sum((one - mean) ** 2 for one in load) / len(load))
            for candidate in sorted(self.present, key=lambda number: (-matched[number], self.outstanding[number])):
                if not matched[candidate]:
                    break
                if self.outstanding[candidate] <= bound:
                    engine = candidate
                    break
        if engine is None:
            engine = self.least(self.outstanding)
        self.history.add(engine, job)
        job.uncached_tokens = self.uncached(job, matched[engine])
        return engine


class Dynamo(Peer):
    """The KV router: blocks to prefill there, this prompt's among them, less the overlap, and blocks being decoded.
    Temperature 0; its index is exact."""

    prefill_scale = 1.0

    def choose(self, job: Job) -> int:
        matched, block = self.exact(job), self.block_tokens
        cost = [
            self.prefill_scale * (self.pending_tokens[engine] + self.uncached(job, matched[engine])) / block
            + (self.active_tokens[engine] + job.arrival.prompt_tokens) / block
            for engine in range(self.count)
        ]
        engine = self.least(cost)
        job.uncached_tokens = self.uncached(job, matched[engine])
        return engine


class DynamoOverlap(Dynamo):
    """The same, tuned for long prompts as its documentation advises: prefill counts 32 times."""

    prefill_scale = 32.0


class LlmdPrecise(Peer):
    """llm-d with precise prefix scoring: prefix twice, queue and KV use once each, all of them in 0 to 1."""

    weights = (2.0, 1.0, 1.0)

    def choose(self, job: Job) -> int:
        matched, waiting = self.exact(job), self.waiting
        shortest = min(waiting[engine] for engine in self.present)
        spread = max(waiting[engine] for engine in self.present) - shortest
        prefix, queue, kv = self.weights
        blocks = max(len(job.arrival.ids), 1)
        cost = [
            -prefix * matched[engine] / blocks
            - queue * (1.0 - (waiting[engine] - shortest) / spread if spread else 1.0)
            - kv * (1.0 - self.kv_usage[engine])
            for engine in range(self.count)
        ]
        engine = self.least(cost)
        job.uncached_tokens = self.uncached(job, matched[engine])
        return engine


class LlmdLatency(Peer):
    """llm-d with its latency predictor: those that hold 99 % of the prompt, else 80 %, are kept unless the best of them
    is 5 s slower to the first token than the best of all; the least predicted time of the kept. In one choice of a
    hundred nobody is kept apart, as its default has it."""

    shares, penalty_s, explore = (0.99, 0.80), 5.0, 0.01

    def choose(self, job: Job) -> int:
        matched = self.exact(job)
        ttft = self.ttft_s(job, matched)
        kept = self.present
        blocks = len(job.arrival.ids)
        if blocks and self.fleet.rng.random() >= self.explore:
            for share in self.shares:
                sticky = [engine for engine in kept if matched[engine] >= share * blocks]
                if sticky and min(ttft[e] for e in sticky) - min(ttft[e] for e in kept) <= self.penalty_s:
                    kept = sticky
        engine = self.least(ttft, kept)
        job.uncached_tokens = self.uncached(job, matched[engine])
        return engine


class LeastTtft(Peer):
    """Least predicted time to first token on an exact index, as Mooncake's conductor; what fixes the rates of the
    set-ups."""

    def choose(self, job: Job) -> int:
        matched = self.exact(job)
        engine = self.least(self.ttft_s(job, matched))
        job.uncached_tokens = self.uncached(job, matched[engine])
        return engine


PEERS: dict[str, Callable[[Fleet], Peer]] = {
    "round robin": RoundRobin,
    "least loaded": LeastLoaded,
    "session hash": SessionHash,
    "sglang .3/64/1.5": SglangCacheAware,
    "sglang .5/32/1.1": SglangTight,
    "aibrix": AibrixPrefixCache,
    "dynamo": Dynamo,
    "dynamo x32": DynamoOverlap,
    "llm-d exact 2:1:1": LlmdPrecise,
    "llm-d latency": LlmdLatency,
    "least ttft": LeastTtft,
}
