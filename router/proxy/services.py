"""What every exchange uses and none of them owns. Built once, in app.py."""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from router.backends.backend import Backend
from router.backends.registry import Registry
from router.clock import Clock, TimerHandle
from router.l2.answers import L2Answer, Lookup
from router.metrics import Metrics
from router.net.exchange_api import Connector
from router.net.upstream_pool import UpstreamPool
from router.proxy.admission import Admission
from router.proxy.api_keys import ApiKeys
from router.proxy.decisions import Decisions
from router.proxy.retry import RetryBudget
from router.proxy.trace import Tracer
from router.strategies.held_line import HeldLine
from router.strategies.strategy import Need, Strategy, TokenStrategy
from router.tokens.answers import Answer
from router.tokens.tokens import Question

if TYPE_CHECKING:
    from router.proxy.access_log import AccessLine
    from router.proxy.exchange import Exchange


WAKE_LEAST_S: Final = 0.005  # between two looks at those who are held


class PassiveHealth(Protocol):
    """What exchanges tell of a backend's behaviour."""

    busy_until: float  # clock.now(): before it some backend has been too busy a moment ago

    def started(self, backend: Backend) -> None: ...

    def connect_failed(self, backend: Backend) -> None: ...

    def attempt_failed(self, backend: Backend) -> None: ...

    def answered(self, backend: Backend, status: int) -> None: ...


class AccessSink(Protocol):
    def write(self, line: AccessLine) -> None: ...


class TokenSource(Protocol):
    """Who counts prompts: router/tokens/tokens.py."""

    def ask(self, model: str, path: str, body: bytes, deadline: float, done: Callable[[Answer], None]) -> Question: ...

    def states(self) -> dict[str, dict[str, Any]]: ...


class L2Source(Protocol):
    """Who knows what the engines' shared store holds: router/l2/l2.py."""

    def ask(
        self,
        model: str,
        ids: array[int],
        salt: str | None,
        lora: str | None,
        deadline: float,
        done: Callable[[L2Answer], None],
    ) -> Lookup: ...

    def state(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class ExchangeSettings:
    """The part of the configuration that the request path reads."""

    strategy_name: str
    block_bytes: int
    session_headers: tuple[bytes, ...]  # lower case
    session_fields: tuple[str, ...]
    session_cookie: bytes
    connect_s: float
    first_byte_s: float
    idle_s: float
    queue_timeout_s: float
    retry_attempts: int
    max_in_flight_per_backend: int
    metrics_on_data_port: bool


class HttpDate:
    """The Date header's value, made once a second."""

    __slots__ = ("_second", "_value")

    def __init__(self) -> None:
        self._second = -1
        self._value = b""

    def now(self) -> bytes:
        second = int(time.time())
        if second != self._second:
            self._second = second
            self._value = formatdate(second, usegmt=True).encode()
        return self._value


@dataclass(slots=True)
class Services:
    clock: Clock
    settings: ExchangeSettings
    registry: Registry
    strategy: Strategy
    admission: Admission
    budget: RetryBudget
    pool: UpstreamPool
    connector: Connector
    passive_health: PassiveHealth
    check_engine: Callable[[Backend, Callable[[bool], None]], Callable[[], object]]  # ask it now; returns what cancels
    metrics: Metrics
    access_log: AccessSink | None
    scrape: Callable[[Callable[[bytes | None], object]], object]  # tells the text of /metrics soon; None: it failed
    version_body: bytes
    # Ask it for its models now, likewise; None: nobody does, and the next look at them tells.
    ask_models: Callable[[Backend, Callable[[bool], None]], Callable[[], object]] | None = None
    api_keys: ApiKeys | None = None  # None: open
    tracer: Tracer | None = None
    tokens: TokenSource | None = None  # None: nobody counts them
    line: HeldLine | None = None  # None: nobody is held back from a busy backend
    l2: L2Source | None = None  # None: there is none, or nobody asks
    decisions: Decisions = field(default_factory=Decisions)
    date: HttpDate = field(default_factory=HttpDate)
    exchanges: set[Exchange] = field(default_factory=set)  # begun and not ended
    draining: bool = False
    on_idle: Callable[[], object] | None = None  # called when the last exchange ends
    now: Callable[[], float] = field(init=False)
    need_prefix: bool = field(init=False)
    need_session: bool = field(init=False)
    token_strategy: TokenStrategy | None = field(init=False)
    _id_prefix: bytes = field(default_factory=lambda: os.urandom(8).hex().encode())
    _id_count: int = 0
    _wake: TimerHandle | None = None
    _wake_at: float = 0.0

    def __post_init__(self) -> None:
        self.now = self.clock.now  # asked ten times a request
        self.use_strategy(self.strategy)

    def use_strategy(self, strategy: Strategy) -> None:
        """For the choices to come; attempts under way end with the strategy that chose."""
        self.strategy = strategy
        self.need_prefix = Need.PREFIX_BLOCKS in strategy.needs
        self.need_session = Need.SESSION_KEY in strategy.needs
        self.token_strategy = cast(TokenStrategy, strategy) if Need.TOKENS in strategy.needs else None

    def wake_held(self, delay_s: float) -> None:
        """Somebody is held until a backend has less to do, in so many seconds if all goes as it is expected. Of several
        the earliest counts: whoever is still held then says anew how long."""
        delay_s = max(delay_s, WAKE_LEAST_S)
        at = self.clock.now() + delay_s
        if self._wake is not None:
            if self._wake_at <= at:
                return
            self._wake.cancel()
        self._wake_at = at
        self._wake = self.clock.call_later(delay_s, self._wake_now)

    def _wake_now(self) -> None:
        self._wake = None
        self.admission.work_done(self.now())

    def next_request_id(self) -> bytes:
        self._id_count += 1
        return b"%b%08x" % (self._id_prefix, self._id_count)
