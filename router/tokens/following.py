"""Tokens for the models that a fleet serves: learned as they come, forgotten as they go, asked of its engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

import aiohttp

from router.backends.backend import Backend
from router.backends.registry import BackendRemoved, FleetEvent, ModelsChanged, Registry
from router.clock import Clock
from router.tls import ClientContexts
from router.tokens.tokens import Tokens, TokensSettings

ANSWER_LIMIT_BYTES: Final = 32 * 1024 * 1024  # a million ids, as JSON
ADAPTERS_DEEP: Final = 4  # adapters have their base model for a parent; an engine may say anything


class FleetTokens:
    """Until `close`. `tokens` is what requests ask."""

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
        self.settings = settings
        self._session = session_factory()
        self.tokens = Tokens(settings, clock, loop, self._post, self._backends_of)
        self._unsubscribe = registry.subscribe(self._fleet_changed)
        for model in registry.known_models():
            self._learn(model)

    async def close(self) -> None:
        self._unsubscribe()
        self.tokens.close()
        await self._session.close()

    def restarted(self, backend: Backend) -> None:
        self.tokens.restarted(backend)

    def _fleet_changed(self, event: FleetEvent) -> None:
        if isinstance(event, ModelsChanged):
            names = event.gained | event.lost
            for model in names or event.backend.models:  # none: a field of some entry is another, perhaps a root
                self._learn(model)
        elif isinstance(event, BackendRemoved):
            for model in event.backend.models:
                self._learn(model)

    def _learn(self, model: str) -> None:
        root = self._root_of(model)
        if root is None:
            self.tokens.forget(model)
        else:
            self.tokens.learn(model, root)

    def _root_of(self, model: str) -> str | None:
        """Where the engines have it from, by the entry of whoever serves it; an adapter's is its base model's. None
        where nobody serves it."""
        pool = self._registry.pool(model)
        if pool is None:
            return None
        for backend in pool.members:
            name, entry = model, backend.models.get(model)
            for _ in range(ADAPTERS_DEEP):
                parent = entry.get("parent") if entry is not None else None
                if not isinstance(parent, str) or parent not in backend.models:
                    break
                name, entry = parent, backend.models[parent]
            if entry is not None:
                root = entry.get("root")
                return root if isinstance(root, str) else name
        return None

    def _backends_of(self, model: str) -> Sequence[Backend]:
        pool = self._registry.pool(model)
        return () if pool is None else pool.candidates

    async def _post(self, backend: Backend, path: str, body: bytes, time_limit_s: float) -> tuple[int, bytes]:
        """The caller limits the time."""
        headers = {"Content-Type": "application/json"}
        if backend.api_key:
            headers["Authorization"] = f"Bearer {backend.api_key}"
        tls: Any = True
        if backend.url.startswith("https:"):
            tls = self._contexts.of(backend.tls_ca, backend.tls_verify)
        async with self._session.post(
            backend.url + path, data=body, headers=headers, allow_redirects=False, ssl=tls
        ) as response:
            content = bytearray()
            async for part in response.content.iter_any():
                content += part
                if len(content) > ANSWER_LIMIT_BYTES:
                    raise ValueError(f"more than {ANSWER_LIMIT_BYTES} bytes")
            return response.status, bytes(content)
