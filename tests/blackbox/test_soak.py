"""Some thousand requests with aborts, deaths and repeats: each ends once, and everything returns to where it was.

loadtest/soak/run does the same with any number of requests.
"""

from __future__ import annotations

import asyncio
import random

from loadtest.soak.soak import fleet, settled
from loadtest.soak.traffic import Traffic
from tests.support.gateway_process import Lines

WARM_UP, REQUESTS = 300, 2000
# Allocators keep some of what was freed; a leak of each exchange with its body (6 KB and more) would be beyond it.
MEMORY_SLACK_BYTES = 8 << 20


def test_everything_returns_to_where_it_was() -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")  # pytest shows it where the test fails
    with fleet("prefixaware") as (gateway, sims):
        warm_up = Traffic(gateway, sims, seed=seed + 1)
        asyncio.run(warm_up.run(WARM_UP))
        before = settled(gateway, sims)
        traffic = Traffic(gateway, sims, seed=seed)
        asyncio.run(traffic.run(REQUESTS))
        after = settled(gateway, sims)

        for name in ("in_flight", "queue_depth", "open_exchanges", "connections", "upstream_connections"):
            assert (getattr(before, name), getattr(after, name)) == (0, 0), name
        assert after.open_files <= before.open_files + 2  # the health checks' own may be open or not
        assert after.memory_bytes <= before.memory_bytes + MEMORY_SLACK_BYTES

        ended = traffic.outcomes.ended
        assert sum(ended.values()) == traffic.outcomes.sent == REQUESTS
        assert ended["whole"] > REQUESTS / 2
        assert ended["left in the answer"] > 0
        assert ended["left at once"] > 0
        figures = gateway.metrics()
        assert figures.sum("ended_total") == figures.sum("requests_total") == WARM_UP + REQUESTS
        assert figures.sum("ended_total", ended_by="client") > 0
        assert figures.sum("retries_total") > 0
        assert figures.sum("broken_exchanges_total") == 0
        assert figures.sum("access_lines_dropped_total") == 0
        for at, sim in enumerate(sims):
            assert figures.sum("in_flight", backend=f"gpu-{at}") == 0
            stats = sim.stats()
            assert (stats["running"], stats["waiting"]) == (0, 0)
        assert gateway.stop() == 0
        _assert_one_line_each(gateway.out, WARM_UP + REQUESTS)


def _assert_one_line_each(lines: Lines, requests: int) -> None:
    ids = [line for line in lines.wait_end() if '"kind":"access"' in line]
    assert len(ids) == requests
