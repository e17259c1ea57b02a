"""What `kvaware` knows beyond the mirror: the engines' KV events in an index, and the token ids to ask it by.

Runs only while that strategy does, since nobody else reads it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

import aiohttp

from router.backends.backend import Backend
from router.backends.registry import Registry
from router.clock import Clock
from router.index.kv_holdings import KvHoldings
from router.kv_events.intake import KvEventIntake
from router.kv_events.rank_feed import FeedState
from router.kv_events.relearn import Relearner, RelearnSettings
from router.kv_events.settings import IntakeSettings
from router.l2.following import FleetL2
from router.l2.l2 import L2
from router.l2.settings import L2Settings
from router.learning.standing import Level
from router.metrics import Metrics
from router.metrics_exporter import L2Figures, TokenFigures
from router.strategies.kv_aware import KvAware, adapter_name
from router.strategies.strategy import RoutingRequest, Strategy
from router.tls import ClientContexts
from router.tokens.following import FleetTokens
from router.tokens.tokens import Tokens, TokensSettings

logger = logging.getLogger(__name__)

NOT_FOLLOWED: Final = "KV events are read where the strategy is kvaware"
OUT_OF_MEMORY: Final = "the index is full, and blocks of this backend were left out: raise index.kv_memory_limit_bytes"


class EngineCaches:
    """`use` says for which strategy, at the start and after each change; `start` and `stop` enclose the rest."""

    def __init__(
        self,
        registry: Registry,
        clock: Clock,
        metrics: Metrics,
        session_factory: Callable[[], aiohttp.ClientSession],
        settings: IntakeSettings,
        token_settings: TokensSettings,
        contexts: ClientContexts,
        memory_limit_bytes: int,
        relearns: bool,
        use_tokens: Callable[[Tokens | None], object],
        l2_settings: L2Settings | None,
        use_l2: Callable[[L2 | None], object],
    ) -> None:
        self.holdings = KvHoldings(memory_limit_bytes)
        self._metrics = metrics
        self._make_session = session_factory
        self._relearns = relearns
        self._make_intake: Callable[[], KvEventIntake] = lambda: KvEventIntake(
            registry, clock, session_factory, self.holdings, settings, metrics, contexts, self._on_state
        )
        self._intake: KvEventIntake | None = None
        self._relearner: Relearner | None = None
        self._make_relearner: Callable[[KvEventIntake, aiohttp.ClientSession], Relearner] = lambda intake, session: (
            Relearner(registry, clock, intake, session, RelearnSettings(enabled=self._relearns), metrics, contexts)
        )
        self._relearn_session: aiohttp.ClientSession | None = None
        self._token_settings = token_settings
        self._make_tokens: Callable[[], FleetTokens] = lambda: FleetTokens(
            registry, clock, asyncio.get_running_loop(), session_factory, contexts, self._token_settings
        )
        self._use_tokens = use_tokens
        self._tokens: FleetTokens | None = None
        self._l2: FleetL2 | None = None
        self._make_l2: Callable[[], FleetL2 | None] = lambda: (
            FleetL2(registry, clock, asyncio.get_running_loop(), l2_settings) if l2_settings is not None else None
        )
        self._use_l2 = use_l2
        self._strategy: KvAware | None = None
        self._changing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._started = False

    # --- life

    async def start(self) -> None:
        self._started = True
        await self._follow_or_not()

    async def stop(self) -> None:
        self._started = False
        self._strategy = None
        await self._follow_or_not()

    def use(self, strategy: Strategy, token_settings: TokensSettings) -> None:
        self._token_settings = token_settings
        self._strategy = strategy if isinstance(strategy, KvAware) else None
        if self._started:
            task = asyncio.get_running_loop().create_task(self._follow_or_not())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _follow_or_not(self) -> None:
        async with self._changing:
            wanted = self._strategy is not None
            if not wanted and self._tokens is not None:
                self._use_tokens(None)
                tokens, self._tokens = self._tokens, None
                await tokens.close()
            elif wanted and self._tokens is not None:
                self._tokens.configure(self._token_settings)
            elif wanted:
                self._tokens = self._make_tokens()
                self._use_tokens(self._tokens.tokens)
            if wanted and self._l2 is None:
                self._l2 = self._make_l2()
                self._use_l2(self._l2.l2 if self._l2 is not None else None)
            elif not wanted and self._l2 is not None:
                self._use_l2(None)
                self._l2.close()
                self._l2 = None
            if wanted and self._intake is None:
                self._intake = self._make_intake()
                await self._intake.start()
                self._relearn_session = self._make_session()
                self._relearner = self._make_relearner(self._intake, self._relearn_session)
            elif not wanted and self._intake is not None:
                if self._relearner is not None:
                    await self._relearner.stop()
                    self._relearner = None
                if self._relearn_session is not None:
                    await self._relearn_session.close()
                    self._relearn_session = None
                await self._intake.stop()
                self._intake = None

    # --- what is heard

    def restarted(self, backend: Backend) -> None:
        if self._relearner is not None:
            self._relearner.restarted(backend)
        if self._intake is not None:
            self._intake.engine_restarted(backend)
        if self._tokens is not None:
            self._tokens.restarted(backend)

    def resync(self, backend: Backend) -> None:
        """Its reports contradict its events: they are heard anew."""
        logger.warning("backend %s: its reports contradict its KV events, which are heard anew", backend.name)
        self._metrics.kv_resyncs[backend.name] += 1
        if self._intake is not None:
            self._intake.resync(backend)

    def untold(self, backend: Backend, request: RoutingRequest, cached_tokens: int) -> None:
        """An engine that does not tell all it holds has shown some of that: it may tell when it is asked."""
        if self._relearner is not None and request.ids is not None:
            adapter = adapter_name(backend, request.model)
            self._relearner.offer(backend, request.model, request.ids, cached_tokens, adapter, request.salt)

    def level_changed(self, backend: Backend, before: Level, after: Level) -> None:
        self._metrics.kv_levels[backend.name, after.value] += 1
        logger.log(
            logging.INFO if after is Level.EVENTS else logging.WARNING,
            "backend %s: requests are placed by %s, before by %s (%s)",
            backend.name,
            _BY[after],
            _BY[before],
            self._why(backend),
        )

    def _on_state(self, backend: Backend) -> None:
        ranks = self._intake.ranks_of(backend) if self._intake is not None else ()
        states = {state for _, state in ranks}
        followed = bool(states) and states <= {FeedState.LIVE, FeedState.INCOMPLETE}
        self.holdings.set_followed(backend, followed, complete=states == {FeedState.LIVE})
        if self._strategy is not None:
            self._strategy.knowledge_changed(backend)

    # --- what is told

    def describe(self, backend: Backend) -> dict[str, Any]:
        """For GET /backends: `state`, `why`, `blocks`, `block_tokens` and the ranks."""
        if self._intake is None:
            return {"state": "off", "why": NOT_FOLLOWED, "blocks": 0, "block_tokens": None, "ranks": []}
        ranks = self._intake.describe(backend)
        worst = min(ranks, key=lambda rank: _ORDER.index(FeedState(rank["state"])), default=None)
        state = worst["state"] if worst is not None else FeedState.CONNECTING.value
        why = worst["why"] if worst is not None else "not asked yet"
        if self.holdings.out_of_memory(backend):
            state, why = FeedState.INCOMPLETE.value, OUT_OF_MEMORY
        return {
            "state": state,
            "why": why,
            "blocks": self.holdings.held_blocks(backend),
            "block_tokens": self.holdings.block_tokens(backend) or None,
            "ranks": [rank for rank in ranks if rank["rank"] is not None],
        }

    def token_figures(self) -> TokenFigures | None:
        """For the metrics; None while nobody counts tokens."""
        return self._tokens.tokens.figures() if self._tokens is not None else None

    def l2_figures(self) -> L2Figures | None:
        """For the metrics; None while no shared store is asked."""
        return self._l2.l2.figures() if self._l2 is not None else None

    def _why(self, backend: Backend) -> str:
        told = self.describe(backend)
        return f"KV events: {told['state']}" + (f", {told['why']}" if told["why"] else "")


_BY: Final = {Level.EVENTS: "its KV events", Level.MIRROR: "the mirror of its cache", Level.LOAD: "its load alone"}
# What a backend is called of which ranks differ: the first of these.
_ORDER: Final = (
    FeedState.OFF,
    FeedState.CONNECTING,
    FeedState.STALE,
    FeedState.REPLAYING,
    FeedState.INCOMPLETE,
    FeedState.LIVE,
)
