"""Two simulated engines behind one gateway, for tests with real clients; in the end nothing of theirs may be left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.sim_process import SimProcess, running_sim

MODEL = "sim-8b"
FAST = ("--step-ms", "1", "--decode-ms", "0", "--decode-ms-per-seq", "0")
FLAGS = (*FAST, "--enable-prompt-tokens-details", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
# More tokens than any test waits for: an answer that is left or cut.
ENDLESS = 100_000
UNDER_WAY = ("running", "waiting", "open")  # of an engine's counts


@dataclass(frozen=True)
class ClientFleet:
    gateway: GatewayProcess
    sims: list[SimProcess]

    def routed(self, headers: Mapping[str, str]) -> str:
        """The backend that an answer names, which must be one of the two; that the other headers are there."""
        backend = headers["x-kvgate-backend"]
        assert backend in [f"gpu-{at}" for at in range(len(self.sims))]
        assert headers["x-kvgate-reason"] in ("load", "prefix")
        assert int(headers["x-kvgate-matched"]) >= 0
        assert headers["x-request-id"]
        return backend

    def fault(self, kind: str, value: Any = True, count: int | None = None) -> None:
        """On both engines, since either may be asked."""
        for sim in self.sims:
            sim.fault(kind, value, count)

    def until_idle(self) -> None:
        """Until the gateway and the engines say that nothing is under way."""
        for name in ("in_flight", "queue_depth", "open_exchanges"):
            self.gateway.until_metric(name, 0)
        for sim in self.sims:
            self.gateway.until(lambda stats=sim.stats: not any(map(stats().get, UNDER_WAY)), "the engines are idle")  # type: ignore[misc]


@contextmanager
def client_fleet(*flags: str, count: int = 2, **tables: Any) -> Iterator[ClientFleet]:
    """`flags` for each engine beyond FLAGS, `tables` for the gateway."""
    with ExitStack() as stack:
        sims = [stack.enter_context(running_sim(*FLAGS, *flags)) for _ in range(count)]
        gateway = stack.enter_context(running_gateway([sim.url for sim in sims], **tables))
        fleet = ClientFleet(gateway, sims)
        yield fleet
        fleet.until_idle()
        figures = gateway.metrics()
        assert figures.sum("broken_exchanges_total") == 0
        # one access line and one counted end for each request that came
        assert len(gateway.access_lines()) <= figures.sum("ended_total")
        assert figures.sum("requests_total") == figures.sum("ended_total")


@contextmanager
def full_gateway(fleet: ClientFleet) -> Iterator[tuple[GatewayProcess, Any]]:
    """A gateway with one place, which a request to a stalled engine holds, and no queue; with it the function that
    frees the place."""
    sim = fleet.sims[0]
    sim.fault("stall", True, 1)
    stalled = sim.stats()["stalled"]
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hold"}]}
    with running_gateway([sim.url], limits={"max_in_flight": 1, "max_queue": 0}) as gateway:
        holder = gateway.send("POST", "/v1/chat/completions", body)
        sim.wait(stalled=stalled + 1)

        def free() -> None:
            holder.socket.close()
            gateway.until_metric("in_flight", 0)

        try:
            yield gateway, free
        finally:
            free()
