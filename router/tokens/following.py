"""Tokens for the models that a fleet serves: learned as they come, forgotten as they go, asked of its engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import aiohttp

from router.backends.asking import ask
from router.backends.backend import Backend, State
from router.backends.registry import BackendRemoved, FleetEvent, ModelsChanged, Registry, StateChanged
from router.clock import Clock
from router.tls import ClientContexts
from router.tokens.tokens import Tokens, TokensSettings

ANSWER_LIMIT_BYTES: Final = 32 * 1024 * 1024  # a million ids, as JSON
ADAPTERS_DEEP: Final = 4  # a parent is a base model; a chain of them is no fleet's, but may be some engine's answer

_AWAY: Final = (State.STARTING, State.DOWN)  # it may come back as another engine


class FleetTokens:
    """From its construction, on the loop, to `close`. `tokens` is what requests ask."""

    def __init__(
        self,
        registry: Registry,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        session_factory: Callable[[], aiohttp.ClientSession],
        contexts: ClientContexts,
        settings: TokensSettings,
    ) -> None:
        self._registry = registry
        self._contexts = contexts
        self._session = session_factory()
        self.tokens = Tokens(settings, clock, loop, self._post, self._backends_of)
        self._unsubscribe = registry.subscribe(self._fleet_changed)
        for model in registry.known_models():
            self._learn(model)

    def configure(self, settings: TokensSettings) -> None:
        """Other settings: see Tokens.configure."""
        self.tokens.configure(settings)

    async def close(self) -> None:
        self._unsubscribe()
        self.tokens.close()
        await self._session.close()

    def restarted(self, backend: Backend) -> None:
        self.tokens.restarted(backend)

    def _fleet_changed(self, event: FleetEvent) -> None:
        if isinstance(event, ModelsChanged):
            for model in event.gained | event.lost | event.backend.models.keys():  # also one whose root is another
                self._learn(model)
        elif isinstance(event, BackendRemoved):
            self.tokens.left(event.backend)
            for model in event.backend.models:
                self._learn(model)
        elif isinstance(event, StateChanged) and event.after is State.UP and event.before in _AWAY:
            self.tokens.joined(event.backend)

    def _learn(self, model: str) -> None:
        origin = self._origin_of(model)
        if origin is None:
            self.tokens.forget(model)
        else:
            self.tokens.learn(model, *origin)

    def _origin_of(self, model: str) -> tuple[str, str] | None:
        """Where the engines have the weights from, and the base model's name; None where nobody serves the model. Of
        engines that differ the first one that names a folder counts: others have the same weights from elsewhere."""
        pool = self._registry.pool(model)
        found = None
        for backend in pool.members if pool is not None else ():
            name, entry = model, backend.models[model]
            for _ in range(ADAPTERS_DEEP):
                parent = entry.get("parent")
                if not isinstance(parent, str) or parent not in backend.models:
                    break
                name, entry = parent, backend.models[parent]
            root = entry.get("root")
            if isinstance(root, str) and root.startswith("/"):
                return root, name
            found = found or (root if isinstance(root, str) else name, name)
        return found

    def _backends_of(self, model: str) -> Sequence[Backend]:
        pool = self._registry.pool(model)
        return () if pool is None else pool.candidates

    async def _post(self, backend: Backend, path: str, body: bytes, time_limit_s: float) -> tuple[int, bytes]:
        """The caller limits the time."""
        return await ask(self._session, self._contexts, backend, path, limit_bytes=ANSWER_LIMIT_BYTES, body=body)
