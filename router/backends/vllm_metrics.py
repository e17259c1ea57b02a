"""What the router needs of an engine's /metrics, under every name that vLLM gave it since 0.8.

No full parse of the exposition format: one pass over the lines, which looks closer at some twenty of six hundred
(measured: 150 us for the 53 KB of a real engine, where the full parse of prometheus_client takes 10 ms).

Series are summed over their labels: one engine process exports a series per data-parallel rank, and a router has
the sum of them before it. Versions: 0.9.2 to 0.10 export new and old names side by side, so names are alternatives,
never summands.
"""

from __future__ import annotations

import math
import re

from router.backends.backend import EngineReport

BODY_LIMIT_BYTES = 4 * 1024 * 1024  # for the caller: longer bodies are not to be read
LINES_LIMIT = 65_536  # 4 MB of a real engine are about 45,000; empty lines alone could hold the loop for half a second

# The first one that is there counts. A counter has `_total` on the wire unless an exporter dropped it.
_RUNNING = (b"vllm:num_requests_running",)
_WAITING = (b"vllm:num_requests_waiting",)
_KV_USAGE = (b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc")
_QUERIES = (b"vllm:prefix_cache_queries_total", b"vllm:prefix_cache_queries")
_HITS = (b"vllm:prefix_cache_hits_total", b"vllm:prefix_cache_hits")
_OLD_QUERIES = (b"vllm:gpu_prefix_cache_queries_total", b"vllm:gpu_prefix_cache_queries")
_OLD_HITS = (b"vllm:gpu_prefix_cache_hits_total", b"vllm:gpu_prefix_cache_hits")
_EXTERNAL_QUERIES = (b"vllm:external_prefix_cache_queries_total", b"vllm:external_prefix_cache_queries")
_EXTERNAL_HITS = (b"vllm:external_prefix_cache_hits_total", b"vllm:external_prefix_cache_hits")
_PREFILL_SUM = (b"vllm:request_prefill_time_seconds_sum",)
_PREFILL_COUNT = (b"vllm:request_prefill_time_seconds_count",)
_PROMPT_TOKENS = (b"vllm:prompt_tokens_total", b"vllm:prompt_tokens")
_STARTED_AT = (b"process_start_time_seconds",)
_CONFIG = b"vllm:cache_config_info"

_WANTED = frozenset(
    (
        *_RUNNING,
        *_WAITING,
        *_KV_USAGE,
        *_QUERIES,
        *_HITS,
        *_OLD_QUERIES,
        *_OLD_HITS,
        *_EXTERNAL_QUERIES,
        *_EXTERNAL_HITS,
        *_PREFILL_SUM,
        *_PREFILL_COUNT,
        *_PROMPT_TOKENS,
        *_STARTED_AT,
    )
)
# One cheap test that leaves few lines: the first bytes, as many as the shortest wanted name has.
_START_BYTES = min(len(name) for name in _WANTED)
_STARTS = frozenset(name[:_START_BYTES] for name in (*_WANTED, _CONFIG))

# Possessive throughout: a label value without its closing quote costs one pass, not one per start.
_LABELS = rb'\{[^"}]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"[^"}]*+)*+\}'
_SAMPLE = re.compile(rb"([a-zA-Z_:][a-zA-Z0-9_:]*+)(" + _LABELS + rb")?+[ \t]*+([-+.0-9a-zA-Z]{1,64})(?=[ \t\r]|$)")
_LABEL = re.compile(
    rb"(?<=[{, ])(block_size|num_gpu_blocks|kv_cache_size_tokens|enable_prefix_caching|engine)="
    rb'"((?:[^"\\]|\\.){0,64}+)"'
)
_COUNT = re.compile(rb"[0-9]{1,9}")  # their product stays far below 2^63


class _Series:
    """Sum and number of the finite, non-negative samples of one name."""

    __slots__ = ("count", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0


class _CacheConfig:
    """What the label values of vllm:cache_config_info say, over the ranks."""

    def __init__(self) -> None:
        self.block_size: int | None = None
        self.num_gpu_blocks: int | None = None
        self.prefix_caching: bool | None = None
        self.tokens_by_engine: dict[bytes, int] = {}

    def read(self, labels: bytes) -> None:
        values = dict(_LABEL.findall(labels))
        self.block_size = self.block_size or _positive(values.get(b"block_size"))
        # vLLM writes the sum over all ranks into each rank's series (recorded: two ranks of 64 blocks say 128 each).
        blocks = _positive(values.get(b"num_gpu_blocks"))
        if blocks is not None:
            self.num_gpu_blocks = max(blocks, self.num_gpu_blocks or 0)
        # This one is a rank's own (recorded: the same two say 2,048 tokens each, 64 blocks of 32).
        tokens = _positive(values.get(b"kv_cache_size_tokens"))
        if tokens is not None:
            self.tokens_by_engine[values.get(b"engine", b"")] = tokens
        caching = {b"True": True, b"False": False}.get(values.get(b"enable_prefix_caching", b""))
        if caching is not None:
            self.prefix_caching = caching and self.prefix_caching is not False

    @property
    def kv_cache_tokens(self) -> int | None:
        return sum(self.tokens_by_engine.values()) if self.tokens_by_engine else None


def parse(text: bytes) -> EngineReport:
    """The report in an answer to /metrics; `at` is the caller's to set.

    What is not there, or only in lines that do not parse, is None, never 0: a renamed gauge must not make a busy
    engine look idle. Never raises. Linear in the length of the text, which the caller bounds (BODY_LIMIT_BYTES); a
    text of more than LINES_LIMIT lines is no engine's, and gives a report that knows nothing.
    """
    series: dict[bytes, _Series] = {}
    config = _CacheConfig()
    lines = text.split(b"\n", LINES_LIMIT)
    if len(lines) > LINES_LIMIT:
        lines = []
    for line in lines:
        if line[:_START_BYTES] not in _STARTS:
            continue
        sample = _SAMPLE.match(line)
        if sample is None:
            continue
        name, labels, figure = sample.groups()
        if name in _WANTED:
            _add(series, name, figure)
        elif name == _CONFIG and labels is not None:
            config.read(labels)
    queries, hits = _sum(series, _QUERIES), _sum(series, _HITS)
    if queries is None and hits is None:
        queries, hits = _old_prefix_counters(text, series, config.block_size)
    return EngineReport(
        running=_sum(series, _RUNNING),
        waiting=_sum(series, _WAITING),
        kv_usage=_mean_share(series, _KV_USAGE),
        prefix_queries=queries,
        prefix_hits=hits,
        external_queries=_sum(series, _EXTERNAL_QUERIES),
        external_hits=_sum(series, _EXTERNAL_HITS),
        prefill_seconds_sum=_sum(series, _PREFILL_SUM),
        prefill_count=_sum(series, _PREFILL_COUNT),
        block_size_tokens=config.block_size,
        num_gpu_blocks=config.num_gpu_blocks,
        prefix_caching=config.prefix_caching,
        kv_cache_tokens=config.kv_cache_tokens,
        prompt_tokens=_sum(series, _PROMPT_TOKENS),
        started_at=_sum(series, _STARTED_AT),
    )


def _add(series: dict[bytes, _Series], name: bytes, figure: bytes) -> None:
    try:
        value = float(figure)
    except ValueError:
        return
    if not (math.isfinite(value) and value >= 0):
        return
    found = series.get(name)
    if found is None:
        found = series[name] = _Series()
    found.count += 1
    found.total += value


def _find(series: dict[bytes, _Series], names: tuple[bytes, ...]) -> _Series | None:
    for name in names:
        found = series.get(name)
        if found is not None and math.isfinite(found.total):
            return found
    return None


def _sum(series: dict[bytes, _Series], names: tuple[bytes, ...]) -> float | None:
    found = _find(series, names)
    return None if found is None else found.total


def _mean_share(series: dict[bytes, _Series], names: tuple[bytes, ...]) -> float | None:
    found = _find(series, names)
    return None if found is None else min(found.total / found.count, 1.0)


def _old_prefix_counters(
    text: bytes, series: dict[bytes, _Series], block_size: int | None
) -> tuple[float | None, float | None]:
    """The gpu_ counters, in tokens. 0.8 counted blocks and says so in the HELP line, later ones count tokens."""
    queries, hits = _sum(series, _OLD_QUERIES), _sum(series, _OLD_HITS)
    if queries is None and hits is None:
        return None, None
    start = text.find(b"# HELP vllm:gpu_prefix_cache_queries")
    help_line = text[start : text.find(b"\n", start)] if start >= 0 else b""
    if b"blocks" not in help_line:
        return queries, hits
    if block_size is None:
        return None, None
    return (
        None if queries is None else queries * block_size,
        None if hits is None else hits * block_size,
    )


def _positive(value: bytes | None) -> int | None:
    """An integer above 0 written in digits; the engine writes None for what it does not know."""
    if value is None or not _COUNT.fullmatch(value):
        return None
    return int(value) or None
