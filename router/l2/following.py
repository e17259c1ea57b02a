"""The shared store for the models that a fleet serves: learned as they come, forgotten as they go."""

from __future__ import annotations

import asyncio
from typing import Final

from router.backends.registry import BackendRemoved, FleetEvent, ModelsChanged, Registry
from router.clock import Clock
from router.l2.l2 import L2
from router.l2.settings import L2Settings

ADAPTER: Final = "parent"  # the field of a /v1/models entry that names an adapter's base model


class FleetL2:
    """Until `close`. `l2` is what requests ask."""

    def __init__(self, registry: Registry, clock: Clock, loop: asyncio.AbstractEventLoop, settings: L2Settings) -> None:
        self._registry = registry
        self.l2 = L2(settings, clock, loop)
        self._unsubscribe = registry.subscribe(self._fleet_changed)
        for model in registry.known_models():
            self._learn(model)
        self.l2.start()

    def close(self) -> None:
        self._unsubscribe()
        self.l2.close()

    def _fleet_changed(self, event: FleetEvent) -> None:
        if isinstance(event, ModelsChanged):
            for model in event.gained | event.lost | event.backend.models.keys():  # a root may be another
                self._learn(model)
        elif isinstance(event, BackendRemoved):
            for model in event.backend.models:
                self._learn(model)

    def _learn(self, model: str) -> None:
        root = self._root_of(model)
        if root is None:
            self.l2.forget(model)
        else:
            self.l2.learn(model, root)

    def _root_of(self, model: str) -> str | None:
        """By the entry of whoever serves it. None where nobody does, and for an adapter: the names that LMCache has for
        chunks do not tell it from its base model."""
        pool = self._registry.pool(model)
        for backend in pool.members if pool is not None else ():
            entry = backend.models.get(model)
            if entry is not None:
                if isinstance(entry.get(ADAPTER), str):
                    return None
                root = entry.get("root")
                return root if isinstance(root, str) else model
        return None
