"""The strategies by the names that configuration knows them by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from router.backends.backend import Backend
from router.clock import Clock
from router.index.kv_holdings import KvHoldings
from router.learning.standing import Level
from router.strategies.held_line import HeldLine
from router.strategies.kv_aware import KvAware
from router.strategies.least_load import LeastLoad
from router.strategies.prefix_affinity import PrefixAffinity, PrefixMirror
from router.strategies.round_robin import RoundRobin
from router.strategies.session import Session
from router.strategies.strategy import RoutingRequest, Strategy


@dataclass(slots=True)
class Dependencies:
    """What strategies are built from. The mirror belongs to their placement alone from then on, which is one object for
    all strategies that are built from these: a change of strategy keeps what is known of the engines."""

    clock: Clock
    rng: Random
    mirror: PrefixMirror
    block_bytes: int
    assumed_kv_tokens: int  # capacity of an engine until it reports one
    holdings: KvHoldings | None = None  # what engines tell of their caches; None: nobody listens
    token_wait_share: float = 0.25
    resync: Callable[[Backend], object] = field(default=lambda backend: None)
    level_changed: Callable[[Backend, Level, Level], object] = field(default=lambda backend, before, after: None)
    untold: Callable[[Backend, RoutingRequest, int], object] = field(default=lambda backend, request, cached: None)
    placement: PrefixAffinity | None = None


def _placement(deps: Dependencies) -> PrefixAffinity:
    if deps.placement is None:
        deps.placement = PrefixAffinity(
            deps.clock,
            deps.rng,
            deps.mirror,
            block_bytes=deps.block_bytes,
            assumed_kv_tokens=deps.assumed_kv_tokens,
        )
    deps.placement.trust_all()  # whoever trusts less says so again
    return deps.placement


def _kv_aware(deps: Dependencies) -> KvAware:
    return KvAware(
        deps.clock,
        _placement(deps),
        deps.holdings,
        token_wait_share=deps.token_wait_share,
        resync=deps.resync,
        level_changed=deps.level_changed,
        untold=deps.untold,
    )


def held_line(deps: Dependencies, strategy: Strategy, batch_tokens: int) -> HeldLine | None:
    """For a strategy that prices its choices in seconds; None for others."""
    if deps.placement is None or not isinstance(strategy, PrefixAffinity | KvAware):
        return None
    return HeldLine(deps.clock, deps.placement, batch_tokens)


FACTORIES: dict[str, Callable[[Dependencies], Strategy]] = {
    "prefixaware": _placement,
    "kvaware": _kv_aware,
    "session": lambda deps: Session(_placement(deps)),
    "roundrobin": lambda deps: RoundRobin(),
    "leastload": lambda deps: LeastLoad(deps.clock, deps.rng),
}


def build(name: str, config_routing: object, deps: Dependencies) -> Strategy:
    """The strategy of that name; ValueError names the known ones. `[routing]` holds nothing that these read yet."""
    factory = FACTORIES.get(name)
    if factory is None:
        raise ValueError(f"unknown strategy {name!r} (known: {', '.join(FACTORIES)})")
    return factory(deps)
