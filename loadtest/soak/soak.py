"""Runs random traffic through a real gateway and simulated engines, and prints what it held before and after."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict

from loadtest.soak.traffic import Holdings, Traffic, holdings
from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.sim_process import SimProcess, running_sim

ENGINES = 3
SIM = ("--step-ms", "1", "--decode-ms", "0.2", "--decode-ms-per-seq", "0", "--prefill-tokens-per-s", "1000000")


@contextmanager
def fleet(strategy: str) -> Iterator[tuple[GatewayProcess, list[SimProcess]]]:
    """A gateway that forgives and forgets quickly, before simulated engines."""
    with ExitStack() as stack:
        flags = (*SIM, "--sim-control-port", "0", "--enable-prompt-tokens-details")
        sims = [stack.enter_context(running_sim(*flags)) for _ in range(ENGINES)]
        gateway = stack.enter_context(
            running_gateway(
                [sim.url for sim in sims],
                routing={"strategy": strategy},
                limits={"max_in_flight_per_backend": 8, "max_queue": 100, "queue_timeout_s": 10.0},
                timeouts={"first_byte_s": 1.0, "idle_s": 1.0, "upstream_keepalive_s": 0.5},
                health={"interval_s": 0.2, "silence_s": 5.0, "ejection_s": 0.2, "ejection_max_s": 0.5},
                retry={"budget": 1.0},
            )
        )
        yield gateway, sims


def settled(gateway: GatewayProcess, sims: list[SimProcess]) -> Holdings:
    """What it holds once all that was under way has ended and idle connections were closed."""
    gateway.until_metric("connections", 0)
    gateway.until_metric("open_exchanges", 0)
    gateway.until_metric("upstream_connections", 0)
    gateway.until_metric("backend_up", len(sims))
    gateway.until(lambda: sum(sim.stats()["open"] for sim in sims) == 0, "the engines have nothing to do")
    return holdings(gateway)


def main() -> int:
    parser = argparse.ArgumentParser(prog="loadtest/soak/run", description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--strategy", default="prefixaware")
    arguments = parser.parse_args()
    with fleet(arguments.strategy) as (gateway, sims):
        warm_up = Traffic(gateway, sims, seed=arguments.seed + 1, clients=arguments.clients)
        asyncio.run(warm_up.run(arguments.requests // 10))
        before = settled(gateway, sims)
        ended_before = gateway.metric("ended_total")
        traffic = Traffic(gateway, sims, seed=arguments.seed, clients=arguments.clients)
        started_at = time.monotonic()
        asyncio.run(traffic.run(arguments.requests, lambda left: print(f"{left} requests to go", file=sys.stderr)))
        took_s = time.monotonic() - started_at
        after = settled(gateway, sims)
        figures = gateway.metrics()
    ended = figures.sum("ended_total") - ended_before
    print(f"{arguments.requests} requests, seed {arguments.seed}, {arguments.strategy}, {took_s:.0f} s")
    for outcome, count in traffic.outcomes.ended.most_common():
        print(f"  {count:7d} {outcome}")
    reasons = sorted(
        (labels["reason"], int(count)) for labels, count in figures.samples.get("kvgate_retries_total", [])
    )
    print("repeats:", ", ".join(f"{reason} {count}" for reason, count in reasons))
    print(f"{'':22}{'before':>14}{'after':>14}")
    for name, value in asdict(before).items():
        print(f"{name:22}{value:14,d}{asdict(after)[name]:14,d}")
    print(f"sent {traffic.outcomes.sent}, ended by the gateway's count {ended:.0f}")
    same = all(
        getattr(before, name) == getattr(after, name) == 0
        for name in ("in_flight", "queue_depth", "open_exchanges", "connections", "upstream_connections")
    )
    return 0 if same and ended == traffic.outcomes.sent and after.open_files <= before.open_files + 2 else 1


if __name__ == "__main__":
    sys.exit(main())
