"""How a strategy plugs into the proxy: one protocol, no sockets, no I/O, no waiting."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import Final, Protocol

from native.block_hash import BlockHashes
from native.token_hash import block_hashes
from router.backends.backend import Backend, EngineReport
from router.learning.trust import Trust

NEVER: Final = float("-inf")


class Need(Enum):
    """What the proxy computes before a choice; nothing else is computed."""

    PREFIX_BLOCKS = auto()
    SESSION_KEY = auto()
    TOKENS = auto()


class Reason(StrEnum):
    """Why a backend was chosen. INTERFACE.md section 3 says what each means; also a metric label."""

    __hash__ = str.__hash__  # Enum's own is a Python function

    ROUNDROBIN = "roundrobin"
    LEASTLOAD = "leastload"
    SESSION = "session"
    PREFIX = "prefix"
    KV = "kv"
    LOAD = "load"
    UNTRUSTED = "fallback-untrusted"
    NO_TOKENS = "fallback-no-tokens"
    NO_EVENTS = "fallback-no-events"
    SHAPE = "fallback-shape"
    RETRY = "retry"


class RoutingRequest:
    """What a strategy may know of a request."""

    __slots__ = (
        "_kv_block_tokens",
        "_kv_blocks",
        "arrived_at",
        "blocks",
        "ids",
        "ids_in_body",
        "max_tokens",
        "model",
        "prefix_bytes",
        "prompt_tokens",
        "readable",
        "salt",
        "session_key",
        "shared_tokens",
        "stream",
    )

    def __init__(
        self,
        model: str,
        arrived_at: float,
        *,
        blocks: BlockHashes | None = None,
        prefix_bytes: int = 0,
        prompt_tokens: int | None = None,
        session_key: bytes | None = None,
        max_tokens: int | None = None,
        readable: bool = True,
        stream: bool = True,
    ) -> None:
        self.model = model
        self.arrived_at = arrived_at  # clock.now()
        self.blocks = blocks  # chained hashes of the routing prefix; None where not needed or not readable
        self.prefix_bytes = prefix_bytes  # length of the whole routing prefix, the unhashed tail included
        self.prompt_tokens = prompt_tokens  # where they were counted, else None
        self.ids_in_body = prompt_tokens is not None  # its prefix is ids, and tells nothing of text
        self.session_key = session_key
        self.max_tokens = max_tokens
        self.readable = readable  # False: a body of unknown shape, routed by load
        self.stream = stream  # False: the first byte comes with the last token, and does not tell when prefill ended
        self.ids: array[int] | None = None  # the prompt as the engine will see it: array("I"); see take_ids
        self.salt: str | None = None
        self.shared_tokens: int | None = None  # leading ones that a store shared by all engines has; None: not known
        self._kv_blocks: BlockHashes | None = None
        self._kv_block_tokens = 0

    def take_ids(self, ids: array[int], salt: str | None, shared_tokens: int | None = None) -> None:
        """The prompt's token ids, its cache_salt, and how much of it a store has that all engines share."""
        self.ids = ids
        self.salt = salt
        self.shared_tokens = shared_tokens
        self.prompt_tokens = len(ids)

    def kv_blocks(self, block_tokens: int, adapter: str | None) -> BlockHashes:
        """The hashes by which the engines' blocks are known, of a prompt whose ids are there. The last block size is
        remembered: a fleet has one, and so has a model its adapter."""
        known = self._kv_blocks
        if known is None or self._kv_block_tokens != block_tokens:
            assert self.ids is not None
            known = self._kv_blocks = block_hashes(self.ids, block_tokens, lora=adapter, salt=self.salt)
            self._kv_block_tokens = block_tokens
        return known


class Choice:
    """One backend for one attempt, with what a log line needs to explain it."""

    __slots__ = (
        "backend",
        "best_prefix",
        "cpu_tokens",
        "far_tokens",
        "first_byte_at",
        "kv_blocks",
        "kv_tokens",
        "match_blocks",
        "matched_tokens",
        "missing_tokens",
        "placed_at",
        "prompt_tokens",
        "quiet",
        "reason",
        "request",
        "spared_s",
        "uncached_s",
        "uncached_tokens",
    )

    def __init__(
        self,
        request: RoutingRequest,
        backend: Backend,
        reason: Reason,
        *,
        match_blocks: int = 0,
        matched_tokens: int = 0,
        prompt_tokens: int = 0,
        uncached_tokens: int = 0,
        uncached_s: float = 0.0,
    ) -> None:
        self.request = request
        self.backend = backend
        self.reason = reason
        self.match_blocks = match_blocks  # of the mirror
        self.matched_tokens = matched_tokens  # predicted hit
        self.prompt_tokens = prompt_tokens  # estimated where they were not counted
        self.uncached_tokens = uncached_tokens
        self.uncached_s = uncached_s  # the prefill that this request brings
        self.best_prefix: int | None = None  # the hash that names the longest match that any backend has
        self.missing_tokens = 0.0  # how much shorter this backend's is
        self.spared_s = 0.0  # how much shorter the shortest wait of the candidates was
        self.kv_tokens: int | None = None  # the hit by the engine's KV events, believed or not; None: it tells none
        self.cpu_tokens = 0  # of the predicted hit, those that the engine loads from its CPU memory
        self.far_tokens = 0  # and from farther away
        self.kv_blocks: BlockHashes | None = None  # as the engine's events would name them
        self.placed_at = NEVER  # clock.now(); written by the strategy
        self.first_byte_at = NEVER
        self.quiet = False  # whether it had the backend for itself until its first byte; written by the strategy


class Terms:
    """What a choice saw of one candidate.

    `score_s` is the price in seconds where choices are priced, the sum of the `terms` whose names end in `_s`. Other
    strategies compare one of the `terms` (Explanation.decided_by). Figures are named with their units.
    """

    __slots__ = ("backend", "match_blocks", "matched_tokens", "score_s", "terms")

    def __init__(self, backend: Backend, match_blocks: int = 0, matched_tokens: int = 0) -> None:
        self.backend = backend
        self.match_blocks = match_blocks  # of the index
        self.matched_tokens = matched_tokens  # what they are counted as, distrust included
        self.score_s: float | None = None
        self.terms: dict[str, float | bool] = {}


class Explanation:
    """A choice that nobody takes, with what it was made from. `candidates` are in the order in which they were given;
    `terms` are the figures that all of them share; `decided_by` says what is compared, in words."""

    __slots__ = ("candidates", "choice", "decided_by", "terms")

    def __init__(self, decided_by: str) -> None:
        self.choice: Choice | None = None
        self.candidates: list[Terms] = []
        self.terms: dict[str, float | bool] = {}
        self.decided_by = decided_by


class End(Enum):
    """How an attempt ended."""

    COMPLETE = auto()  # the whole answer of the engine was seen
    FAILED = auto()  # the backend's doing
    CANCELLED = auto()  # the client's doing, or ours


@dataclass(slots=True)
class Outcome:
    """What an attempt taught. Token counts as the engine's `usage` reported them, None where it did not."""

    end: End
    at: float
    status: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None


class Strategy(Protocol):
    """Clock and random.Random come through the constructor. `candidates` is a snapshot, never with a backend in it
    that is down, draining or at its cap: a strategy does not ask the registry."""

    needs: frozenset[Need]

    def choose(self, request: RoutingRequest, candidates: Sequence[Backend]) -> Choice | None:
        """The backend for one attempt, None only for no candidates. Changes nothing but generators and rotation."""
        ...

    def explain(self, request: RoutingRequest, candidates: Sequence[Backend]) -> Explanation:
        """What `choose` would answer now, and from which figures: the same code, and nothing changes, generators and
        rotation included. For people: it may cost more than a choice."""
        ...

    def match_of(self, request: RoutingRequest, backend: Backend) -> tuple[int, int]:
        """Index blocks and tokens of this prompt that a backend likely holds, a candidate or not. Changes nothing."""
        ...

    def known_of(self, backend: Backend) -> Mapping[str, float | bool | str | None]:
        """What was learned of a backend, for the admin listing, each figure named with its unit. Empty where nothing
        is learned."""
        ...

    def placed(self, choice: Choice) -> None:
        """The choice was taken: its blocks count as coming, its work as waiting."""
        ...

    def first_byte(self, choice: Choice) -> None:
        """The prefill is over. At most once per choice."""
        ...

    def observe(self, choice: Choice, outcome: Outcome) -> None:
        """The attempt ended. Exactly once per placed choice."""
        ...

    def reported(self, backend: Backend, before: EngineReport, now: EngineReport) -> None:
        """The engine answered a poll."""
        ...

    def joined(self, backend: Backend) -> None:
        """A backend was added to the fleet."""
        ...

    def forget(self, backend: Backend) -> None:
        """Its cache is gone: it was removed, or restarted. Attempts on it may still be open."""
        ...

    def trust_of(self, backend: Backend) -> Trust | None:
        """How far the backend's reports bear our predictions out, for the admin listing and the metrics. None where
        nothing is compared."""
        ...


class TokenStrategy(Strategy, Protocol):
    """One with Need.TOKENS."""

    def token_patience_s(self, request: RoutingRequest, candidates: Sequence[Backend]) -> float:
        """How long this request may wait for its token ids before it is placed; 0 where they would not help."""
        ...
