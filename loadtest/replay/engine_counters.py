"""The engines' own prefix cache counters, before and after: the hit ratio that does not depend on whom one asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from loadtest.replay.bodies import read_body
from router.backends import vllm_metrics


class ScrapeFailed(Exception):
    """An engine's /metrics tell nothing about its prefix cache; the text says which engine, and why."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals since the engine started, in tokens."""

    queries: float
    hits: float
    started_at: float | None  # of the process, Unix seconds by the engine's clock


@dataclass(frozen=True, slots=True)
class EngineShare:
    """What one engine did in between, in tokens: prompts it was asked for, and what of them its cache had."""

    url: str
    queried_tokens: int
    hit_tokens: int

    @property
    def computed_tokens(self) -> int:
        return self.queried_tokens - self.hit_tokens

    @property
    def hit_ratio(self) -> float | None:
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else None


async def scrape(session: aiohttp.ClientSession, url: str) -> Counters:
    try:
        async with session.get(f"{url}/metrics", timeout=aiohttp.ClientTimeout(total=10.0)) as response:
            text = await read_body(response, vllm_metrics.BODY_LIMIT_BYTES)
            status = response.status
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise ScrapeFailed(f"{url}/metrics: {error or type(error).__name__}") from None
    if status != 200:
        raise ScrapeFailed(f"{url}/metrics: status {status}")
    report = vllm_metrics.parse(text)
    if report.prefix_queries is None or report.prefix_hits is None:
        raise ScrapeFailed(f"{url}/metrics: no vllm:prefix_cache_queries_total; is this an engine of vLLM?")
    return Counters(report.prefix_queries, report.prefix_hits, report.started_at)


def share(url: str, before: Counters, after: Counters) -> EngineShare:
    """ScrapeFailed if the engine started anew in between: then its counters say nothing about before."""
    queries, hits = after.queries - before.queries, after.hits - before.hits
    if queries < 0 or hits < 0 or after.started_at != before.started_at:
        raise ScrapeFailed(f"{url}: the engine was restarted during the replay")
    return EngineShare(url, int(queries), int(hits))


def imbalance(computed_tokens: Sequence[int]) -> float | None:
    """Prompt tokens that the busiest engine computed, by the mean of all: 1 is even. None if nothing was computed."""
    total = sum(computed_tokens)
    return max(computed_tokens) * len(computed_tokens) / total if total > 0 else None
