"""One engine at one address: who it is, whether it may serve, what it reported, and what of ours it carries."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class State(StrEnum):
    """Whether a backend may be chosen. Only `UP` and `TRIAL` are candidates."""

    STARTING = "starting"  # never answered a health check yet
    UP = "up"
    TRIAL = "trial"  # half-open after an ejection: one request at a time shows whether it is back
    EJECTED = "ejected"  # its connections fail, or it is silent while others answer
    DOWN = "down"  # its health checks fail


SERVING_STATES = (State.UP, State.TRIAL)  # looked up once: a member of an enum costs more to name than to compare


@dataclass(slots=True)
class EngineReport:
    """What the engine last said in /metrics, summed over its `engine` labels. Counters are totals, in tokens.

    None: the engine does not export it (another version, another server). Only a report that was never taken
    (`at` is -inf) has zeros that nobody measured.
    """

    at: float = float("-inf")  # clock.now() of the answer
    running: float | None = 0.0
    waiting: float | None = 0.0
    kv_usage: float | None = 0.0  # 0 to 1, blocks in use; 0 when idle, even with a full prefix cache
    prefix_queries: float | None = None  # None: the engine does not export it
    prefix_hits: float | None = None
    external_queries: float | None = None  # tokens that its own cache lacked, where it has a connector to another
    external_hits: float | None = None  # those of them that came from there
    prefill_seconds_sum: float | None = None  # vllm:request_prefill_time_seconds
    prefill_count: float | None = None
    block_size_tokens: int | None = None
    num_gpu_blocks: int | None = None  # of all ranks together
    prefix_caching: bool | None = None
    kv_cache_tokens: int | None = None  # the engine's own figure, of all ranks together
    prompt_tokens: float | None = None  # prompt tokens served, cached ones included
    started_at: float | None = None  # the process's start, Unix seconds by the engine's own clock

    def shows_work_since(self, before: EngineReport) -> bool:
        """Whether the engine did something between two reports. A hung one reports the same figures for ever."""
        return (self.kv_usage, self.prompt_tokens, self.prefill_count, self.running, self.waiting) != (
            before.kv_usage,
            before.prompt_tokens,
            before.prefill_count,
            before.running,
            before.waiting,
        )

    @property
    def kv_capacity_tokens(self) -> int | None:
        """Tokens that the KV cache holds. The engine's own figure where it tells one: blocks x block size is wrong
        for hybrid models, whose layers share a block."""
        if self.kv_cache_tokens is not None:
            return self.kv_cache_tokens
        if self.block_size_tokens is None or self.num_gpu_blocks is None:
            return None
        return self.block_size_tokens * self.num_gpu_blocks


@dataclass(eq=False, slots=True)
class Backend:
    """Identity is the object: one that is leaving may share its name with its successor, and is never revived.

    `slot` is its small number in the index, `in_flight` is written by InFlight alone, `state` by the registry alone.
    """

    name: str
    url: str  # scheme://host:port, no path
    host: str
    port: int
    weight: float = 1.0
    api_key: str | None = field(default=None, repr=False)
    configured_models: tuple[str, ...] | None = None
    tls_ca: str | None = None  # a PEM file in place of the system's CAs
    tls_verify: bool = True
    kv_events: str = "auto"  # or off, or tcp://host:port, where its KV events are
    slot: int = -1
    state: State = State.STARTING
    draining: bool = False
    why: str = "no health check answered yet"  # why it is out of rotation; empty while it serves
    models: dict[str, dict[str, Any]] = field(default_factory=dict)  # id -> its /v1/models entry, every field kept
    in_flight: int = 0
    last_byte_at: float = float("-inf")  # clock.now() of the last response byte on any of its attempts
    progressed_at: float = float("-inf")  # clock.now() of the last report that showed work
    check_ok: bool = False  # its last health check was answered well
    trial_open: bool = False  # the one request of its trial is under way
    waiting_since: float = float("-inf")  # clock.now() of the last start of an attempt on it
    connect_failures: int = 0  # in a row
    failures: int = 0  # attempts in a row without an answer, or answered with an error of the engine's own making
    busy_in_a_row: int = 0  # answers 429 and 503
    busy_until: float = float("-inf")  # clock.now(): others are asked before it
    deleted: bool = False  # leaves the fleet when its last attempt ends
    out_since: float = float("-inf")  # clock.now() when it came, or last stopped serving
    report: EngineReport = field(default_factory=EngineReport)

    @property
    def serving(self) -> bool:
        return not self.draining and self.state in SERVING_STATES

    def __repr__(self) -> str:
        return f"<Backend {self.name} {self.state.value} in_flight={self.in_flight}>"
