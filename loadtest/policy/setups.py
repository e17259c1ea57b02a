"""The set-ups of the bench: trace, number of engines, size of a KV pool, and load."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from loadtest.policy.workload import Arrivals, Workload, load_workload
from router.sim.engine_model import EngineConfig

SEATS: Final = 128  # max_num_seqs

# Requests per second at which the reference policy (least predicted time to first token, exact index) keeps prefill, or
# the KV pools, busy for the set-up's share of the time: what `find-rates` found.
RATES: Final[dict[str, float]] = {
    "mooncake_conversation 8S 65%": 4.32,
    "mooncake_conversation 8M 65%": 5.249,
    "mooncake_conversation 8L 65%": 5.828,
    "mooncake_conversation 4M 65%": 2.392,
    "mooncake_conversation 16M 65%": 11.29,
    "mooncake_conversation 8M 85%": 6.575,
    "mooncake_synthetic 8S 65%": 3.987,
    "mooncake_synthetic 8M 65%": 6.194,
    "mooncake_synthetic 8L 65%": 7.999,
    "mooncake_synthetic 4M 65%": 2.395,
    "mooncake_synthetic 16M 65%": 15.22,
    "mooncake_synthetic 8M 85%": 7.457,
    "mooncake_arxiv_x10 8S 65%": 7.052,
    "mooncake_arxiv_x10 8M 65%": 7.863,
    "mooncake_arxiv_x10 8L 65%": 7.863,
    "mooncake_arxiv_x10 4M 65%": 3.906,
    "mooncake_arxiv_x10 16M 65%": 15.73,
    "mooncake_arxiv_x10 8M 85%": 10.09,
    "claude_code 4M 65%": 0.6429,
    "claude_code 8M 65%": 3.93,
    "claude_code 8S 65%": 0.6445,
    "lmcache_agents 4M 65%": 6.74,
    "taubench 4S 65%": 15.62,
    "taubench 4M 65%": 32.88,
    "taubench 4L 65%": 87.88,
    "ragpulse 4M 65%": 11.2,
    "ragpulse 8S 65%": 16.04,
    "ragpulse 8M 65%": 22.25,
    "ragpulse 8L 65%": 22.24,
}


@dataclass(frozen=True, slots=True)
class Source:
    """A trace file and how it is replayed. `pools`: KV tokens of an engine by size."""

    file: str
    block_tokens: int
    pools: dict[str, int]
    arrivals: Arrivals
    copies: int = 1


MOONCAKE_POOLS: Final = {"S": 200_000, "M": 1_000_000, "L": 3_000_000}
SOURCES: Final[dict[str, Source]] = {
    "mooncake_conversation": Source("mooncake_conversation", 512, MOONCAKE_POOLS, "open"),
    "mooncake_synthetic": Source("mooncake_synthetic", 512, MOONCAKE_POOLS, "open"),
    "mooncake_arxiv_x10": Source("mooncake_arxiv_1000", 512, MOONCAKE_POOLS, "open", 10),
    "claude_code": Source("claude_code_agentic", 512, {"S": 400_000, "M": 1_000_000}, "session"),
    "lmcache_agents": Source("lmcache_agents", 16, {"M": 64_000}, "session", 4),
    "taubench": Source("taubench_airline", 16, {"S": 32_000, "M": 64_000, "L": 200_000}, "session", 4),
    "ragpulse": Source("ragpulse", 64, {"S": 64_000, "M": 200_000, "L": 1_000_000}, "poisson"),
}


@dataclass(frozen=True, slots=True)
class SetUp:
    source: str
    engines: int
    size: str
    load_percent: int = 65

    @property
    def name(self) -> str:
        return f"{self.source} {self.engines}{self.size} {self.load_percent}%"

    @property
    def pool_tokens(self) -> int:
        return SOURCES[self.source].pools[self.size]

    @property
    def pooled_blocks(self) -> int:
        return self.engines * (self.pool_tokens // SOURCES[self.source].block_tokens)

    def engine_config(self, **changes: Any) -> EngineConfig:
        """The engines' default speeds, with blocks as large as the trace's."""
        block = SOURCES[self.source].block_tokens
        config = EngineConfig(block_size=block, num_blocks=self.pool_tokens // block + 1, max_num_seqs=SEATS)
        return replace(config, **changes)

    def workload(self, folder: Path, limit: int | None = None) -> Workload:
        return _workload(folder, self.source, self.pool_tokens, limit)


@lru_cache(maxsize=2)
def _workload(folder: Path, source: str, pool_tokens: int, limit: int | None) -> Workload:
    known = SOURCES[source]
    return load_workload(
        folder / f"{known.file}.jsonl.gz",
        block_tokens=known.block_tokens,
        arrivals=known.arrivals,
        copies=known.copies,
        pool_tokens=pool_tokens,
        limit=limit,
    )


def _full() -> tuple[SetUp, ...]:
    found = []
    for source in ("mooncake_conversation", "mooncake_synthetic", "mooncake_arxiv_x10"):
        found += [SetUp(source, 8, size) for size in "SML"]
        found += [SetUp(source, 4, "M"), SetUp(source, 16, "M"), SetUp(source, 8, "M", 85)]
    found += [SetUp("claude_code", 4, "M"), SetUp("claude_code", 8, "M"), SetUp("claude_code", 8, "S")]
    found += [SetUp("lmcache_agents", 4, "M")]
    found += [SetUp("taubench", 4, size) for size in "SML"]
    found += [SetUp("ragpulse", 4, "M"), *(SetUp("ragpulse", 8, size) for size in "SML")]
    return tuple(found)


FULL: Final = _full()
QUICK: Final = (
    SetUp("mooncake_conversation", 8, "M", 85),
    SetUp("mooncake_synthetic", 8, "M"),
    SetUp("claude_code", 8, "M"),
    SetUp("lmcache_agents", 4, "M"),
    SetUp("taubench", 4, "M"),
    SetUp("ragpulse", 8, "M"),
)
