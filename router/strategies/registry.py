"""The strategies by the names that configuration knows them by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from router.clock import Clock
from router.strategies.kv_aware import KvAware
from router.strategies.least_load import LeastLoad
from router.strategies.prefix_affinity import PrefixAffinity, PrefixMirror
from router.strategies.round_robin import RoundRobin
from router.strategies.session import Session
from router.strategies.strategy import Strategy


@dataclass(slots=True)
class Dependencies:
    """What strategies are built from. The mirror belongs to their placement alone from then on, which is one object for
    all strategies that are built from these: a change of strategy keeps what is known of the engines."""

    clock: Clock
    rng: Random
    mirror: PrefixMirror
    block_bytes: int
    assumed_kv_tokens: int  # capacity of an engine until it reports one
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


FACTORIES: dict[str, Callable[[Dependencies], Strategy]] = {
    "prefixaware": _placement,
    "kvaware": lambda deps: KvAware(deps.clock, _placement(deps)),
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
