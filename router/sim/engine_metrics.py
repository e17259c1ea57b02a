"""/metrics of the simulated engine: vLLM's names, label order and text, from counters that the model keeps anyway.

Rendering is string work on a scrape; between scrapes a request costs a handful of additions, a step one.
"""

from __future__ import annotations

import gc
import os
import platform
import resource
from bisect import bisect_left
from collections.abc import Mapping
from enum import StrEnum

from router.sim.engine_model import EngineModel, EngineRequest, Finish


class Names(StrEnum):
    NEW = "new"  # 0.11 and later
    OLD = "old"  # gpu_* names, no external cache


HELP = {
    "estimated_flops_per_gpu": (
        "Estimated number of floating point operations per GPU (for Model Flops Utilization calculations)."
    ),
    "estimated_read_bytes_per_gpu": (
        "Estimated number of bytes read from memory per GPU (for Model Flops Utilization calculations)."
    ),
    "estimated_write_bytes_per_gpu": (
        "Estimated number of bytes written to memory per GPU (for Model Flops Utilization calculations)."
    ),
    "num_requests_running": "Number of requests in model execution batches.",
    "num_requests_waiting": "Number of requests waiting to be processed.",
    "num_requests_waiting_by_reason": (
        "Number of waiting requests by reason. Reason labels: 'capacity' = waiting for scheduling capacity; "
        "'deferred' = deferred by transient constraints (LoRA budget, KV transfer, blocked status). Sum of "
        "all reasons equals vllm:num_requests_waiting."
    ),
    "engine_sleep_state": (
        "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake; "
        "weights_offloaded = 1 means sleep level 1; discard_all = 1 means sleep level 2."
    ),
    "kv_cache_usage_perc": "KV-cache usage. 1 means 100 percent usage.",
    "prefix_cache_queries": "Prefix cache queries, in terms of number of queried tokens.",
    "prefix_cache_hits": "Prefix cache hits, in terms of number of cached tokens.",
    "external_prefix_cache_queries": (
        "External prefix cache queries from KV connector cross-instance cache sharing, in terms of number of "
        "queried tokens."
    ),
    "external_prefix_cache_hits": (
        "External prefix cache hits from KV connector cross-instance cache sharing, in terms of number of "
        "cached tokens."
    ),
    "mm_cache_queries": "Multi-modal cache queries, in terms of number of queried items.",
    "mm_cache_hits": "Multi-modal cache hits, in terms of number of cached items.",
    "num_preemptions": "Cumulative number of preemption from the engine.",
    "prompt_tokens": "Number of prefill tokens processed.",
    "prompt_tokens_by_source": "Number of prompt tokens by source.",
    "prompt_tokens_cached": "Number of cached prompt tokens (local + external).",
    "prompt_tokens_cached_by_source": (
        "Prefix-cache hit tokens by the cache tier that supplied them: device (local HBM), host (offloaded to "
        "DRAM), disk, p2p (transferred from another vLLM instance) or external_unspecified. Counted at "
        "admission; sums to vllm:prefix_cache_hits + vllm:external_prefix_cache_hits."
    ),
    "generation_tokens": "Number of generation tokens processed.",
    "request_success": "Count of successfully processed requests.",
    "admission_rejections": "Number of admission attempts rejected by a queue limit, by reason.",
    "request_prompt_tokens": "Number of prefill tokens processed.",
    "request_generation_tokens": "Number of generation tokens processed.",
    "iteration_tokens_total": "Histogram of number of tokens per engine_step.",
    "request_max_num_generation_tokens": "Histogram of maximum number of requested generation tokens.",
    "request_params_n": "Histogram of the n request parameter.",
    "request_params_max_tokens": "Histogram of the max_tokens request parameter.",
    "time_to_first_token_seconds": "Histogram of time to first token in seconds.",
    "inter_token_latency_seconds": "Histogram of inter-token latency in seconds.",
    "request_time_per_output_token_seconds": "Histogram of time_per_output_token_seconds per request.",
    "e2e_request_latency_seconds": "Histogram of e2e request latency in seconds.",
    "request_queue_time_seconds": "Histogram of time spent in WAITING phase for request.",
    "request_inference_time_seconds": "Histogram of time spent in RUNNING phase for request.",
    "request_prefill_time_seconds": "Histogram of time spent in PREFILL phase for request.",
    "request_decode_time_seconds": "Histogram of time spent in DECODE phase for request.",
    "request_num_preemptions": "Histogram of the number of times a request was preempted.",
    "request_prefill_kv_computed_tokens": (
        "Histogram of new KV tokens computed during prefill (excluding cached tokens)."
    ),
    "cache_config_info": "Information of the LLMEngine CacheConfig",
}
OLD_HELP = {
    "gpu_cache_usage_perc": "GPU KV-cache usage. 1 means 100 percent usage.",
    "gpu_prefix_cache_queries": "GPU prefix cache queries, in terms of number of queried tokens.",
    "gpu_prefix_cache_hits": "GPU prefix cache hits, in terms of number of cached tokens.",
}

TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
    *(960.0, 1920.0, 7680.0),
)
STEP_TOKENS = tuple(float(2**power) for power in (0, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14))
CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)
PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)


def one_two_five(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, ... up to `limit`: vLLM's buckets for token counts, limit being the model's length."""
    bounds: list[float] = []
    decade = 1
    while True:
        for step in (1, 2, 5):
            if step * decade > limit:
                return tuple(bounds)
            bounds.append(float(step * decade))
        decade *= 10


def number(value: float) -> str:
    """A float as Prometheus' text format writes it: 3.0, 0.25, 1.796e+09."""
    text = repr(float(value))
    point = text.find(".")
    if value > 0 and point > 6 and "e" not in text:
        mantissa = f"{text[0]}.{text[1:point]}{text[point + 1 :]}".rstrip("0").rstrip(".")
        return f"{mantissa}e+{point - 1:02d}"
    return text


class Histogram:
    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class EngineMetrics:
    """`cache_config` is vLLM's CacheConfig as label values; `created` is Unix time."""

    def __init__(self, model: EngineModel, model_name: str, max_model_len: int, created: float, names: Names) -> None:
        self.created = created
        self._model = model
        self._model_name = model_name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        self._names = names
        self._max_model_len = max_model_len
        tokens = one_two_five(max_model_len)
        self.http_requests: dict[tuple[str, str, str], int] = {}  # handler, method, status class: a handful
        self.success = dict.fromkeys(("stop", "length", "abort", "error", "repetition"), 0)
        self.queue_rejections = 0
        self.sleep_level = 0
        self.histograms = {
            "request_prompt_tokens": Histogram(tokens),
            "request_generation_tokens": Histogram(tokens),
            "iteration_tokens_total": Histogram(STEP_TOKENS),
            "request_max_num_generation_tokens": Histogram(tokens),
            "request_params_n": Histogram(CHOICES),
            "request_params_max_tokens": Histogram(tokens),
            "time_to_first_token_seconds": Histogram(TTFT_S),
            "inter_token_latency_seconds": Histogram(TOKEN_S),
            "request_time_per_output_token_seconds": Histogram(TOKEN_S),
            "e2e_request_latency_seconds": Histogram(REQUEST_S),
            "request_queue_time_seconds": Histogram(REQUEST_S),
            "request_inference_time_seconds": Histogram(REQUEST_S),
            "request_prefill_time_seconds": Histogram(REQUEST_S),
            "request_decode_time_seconds": Histogram(REQUEST_S),
            "request_num_preemptions": Histogram(PREEMPTIONS),
            "request_prefill_kv_computed_tokens": Histogram(tokens),
        }

    def first_token(self, ttft_s: float) -> None:
        self.histograms["time_to_first_token_seconds"].observe(ttft_s)

    def step(self, tokens: int) -> None:
        self.histograms["iteration_tokens_total"].observe(tokens)

    def finished(self, request: EngineRequest, finish: Finish) -> None:
        """A request got its last token. Client aborts are not counted, as in vLLM."""
        self.success[finish.value] += 1
        scheduled, first, end = request.scheduled_at, request.first_token_at, request.finished_at
        if scheduled is None or first is None or end is None:
            return
        observe = self.histograms
        decode_s = end - first
        observe["request_prompt_tokens"].observe(request.prompt_tokens)
        observe["request_generation_tokens"].observe(request.generated)
        observe["request_params_max_tokens"].observe(request.output_tokens)
        observe["e2e_request_latency_seconds"].observe(end - request.arrived_at)
        observe["request_queue_time_seconds"].observe(scheduled - request.arrived_at)
        observe["request_inference_time_seconds"].observe(end - scheduled)
        observe["request_prefill_time_seconds"].observe(first - scheduled)
        observe["request_decode_time_seconds"].observe(decode_s)
        observe["request_num_preemptions"].observe(request.preemptions)
        observe["request_prefill_kv_computed_tokens"].observe(request.prompt_tokens - (request.cached_tokens or 0))
        if request.generated > 1:
            gap_s = decode_s / (request.generated - 1)
            observe["request_time_per_output_token_seconds"].observe(gap_s)
            # Each gap is known only as their mean: sum and count are exact, the buckets are the mean's.
            observe["inter_token_latency_seconds"].observe(gap_s, request.generated - 1)

    def call(self, choices: int, max_tokens: int) -> None:
        """One API call with `n` choices ended."""
        self.histograms["request_params_n"].observe(choices)
        self.histograms["request_max_num_generation_tokens"].observe(max_tokens)

    def http(self, handler: str, method: str, status: int) -> None:
        key = (handler, method, f"{status // 100}xx")
        self.http_requests[key] = self.http_requests.get(key, 0) + 1

    def render(self) -> bytes:
        model, stats = self._model, self._model.stats
        old = self._names is Names.OLD
        out: list[str] = []
        self._process(out)
        labels = f'engine="0",model_name="{self._model_name}"'
        created = number(self.created)

        def head(name: str, kind: str) -> str:
            text = OLD_HELP.get(name) or HELP[name]
            full = f"vllm:{name}_total" if kind == "counter" else f"vllm:{name}"
            out.append(f"# HELP {full} {text}\n# TYPE {full} {kind}\n")
            return text

        def born(name: str, text: str, rows: list[str]) -> None:
            out.append(f"# HELP vllm:{name}_created {text}\n# TYPE vllm:{name}_created gauge\n")
            out.extend(f"vllm:{name}_created{{{row}}} {created}\n" for row in rows)

        def gauge(name: str, values: Mapping[str, float]) -> None:
            head(name, "gauge")
            out.extend(f"vllm:{name}{{{row}}} {number(value)}\n" for row, value in values.items())

        def counter(name: str, values: Mapping[str, float]) -> None:
            text = head(name, "counter")
            out.extend(f"vllm:{name}_total{{{row}}} {number(value)}\n" for row, value in values.items())
            born(name, text, list(values))

        def one(value: float) -> dict[str, float]:
            return {labels: value}

        def by(label: str, values: Mapping[str, float]) -> dict[str, float]:
            return {f'{labels},{label}="{key}"': value for key, value in values.items()}

        for name in ("estimated_flops_per_gpu", "estimated_read_bytes_per_gpu", "estimated_write_bytes_per_gpu"):
            if not old:
                counter(name, one(0))
        waiting = len(model.waiting)
        gauge("num_requests_running", one(len(model.running)))
        gauge("num_requests_waiting", one(waiting))
        if old:
            gauge("gpu_cache_usage_perc", one(model.pool.usage))
            counter("gpu_prefix_cache_queries", one(stats.prefix_queries))
            counter("gpu_prefix_cache_hits", one(stats.prefix_hits))
        else:
            gauge("num_requests_waiting_by_reason", by("reason", {"capacity": waiting, "deferred": 0}))
            awake, level = self.sleep_level == 0, self.sleep_level
            states = {"awake": awake, "weights_offloaded": level == 1, "discard_all": level == 2}
            gauge("engine_sleep_state", by("sleep_state", states))
            gauge("kv_cache_usage_perc", one(model.pool.usage))
            counter("prefix_cache_queries", one(stats.prefix_queries))
            counter("prefix_cache_hits", one(stats.prefix_hits))
            for name in ("external_prefix_cache_queries", "external_prefix_cache_hits"):
                counter(name, one(0))
            for name in ("mm_cache_queries", "mm_cache_hits"):
                counter(name, one(0))
        counter("num_preemptions", one(stats.preemptions))
        counter("prompt_tokens", one(stats.prompt_tokens))
        cached = stats.prompt_tokens - stats.computed_prompt_tokens
        if not old:
            sources = {"local_compute": stats.computed_prompt_tokens, "local_cache_hit": cached}
            counter("prompt_tokens_by_source", by("source", {**sources, "external_kv_transfer": 0}))
            counter("prompt_tokens_cached", one(cached))
            tiers = {"device": stats.prefix_hits, "host": 0, "p2p": 0, "disk": 0, "external_unspecified": 0}
            counter("prompt_tokens_cached_by_source", by("source", tiers))
        counter("generation_tokens", one(stats.generation_tokens))
        reasons = {
            f'engine="0",finished_reason="{reason}",model_name="{self._model_name}"': float(count)
            for reason, count in self.success.items()
        }
        counter("request_success", reasons)
        if not old:
            name = f'model_name="{self._model_name}"'
            rejections: dict[str, float] = {
                f'{name},reason="max_num_queued_reqs"': self.queue_rejections,
                f'{name},reason="max_num_queued_tokens"': 0,
            }
            counter("admission_rejections", rejections)
        for name, histogram in self.histograms.items():
            text = head(name, "histogram")
            total = 0
            for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
                total += count
                edge = "+Inf" if bound == float("inf") else number(bound)
                row = f'engine="0",le="{edge}",model_name="{self._model_name}"'
                out.append(f"vllm:{name}_bucket{{{row}}} {number(total)}\n")
            out.append(f"vllm:{name}_count{{{labels}}} {number(total)}\n")
            out.append(f"vllm:{name}_sum{{{labels}}} {number(histogram.sum)}\n")
            born(name, text, [labels])
        gauge("cache_config_info", {self._cache_config(): 1.0})
        self._http(out)
        return "".join(out).encode()

    def _cache_config(self) -> str:
        config = self._model.config
        tokens = config.num_blocks * config.block_size
        values = {
            "_block_size_resolved": "True",
            "block_size": config.block_size,
            "cache_dtype": "auto",
            "cache_hit_alignment_tokens": None,
            "effective_attention_block_size": config.block_size,
            "enable_mamba_shared_prefix_checkpoint": False,
            "enable_prefix_caching": config.prefix_caching,
            "engine": 0,
            "gpu_memory_utilization": 0.92,
            "hash_block_size": None,
            "is_attention_free": False,
            "kv_cache_dtype_skip_layers": "[]",
            "kv_cache_layout": None,
            "kv_cache_max_concurrency": tokens / self._max_model_len,
            "kv_cache_memory_bytes": None,
            "kv_cache_size_tokens": tokens,
            "kv_offloading_backend": "native",
            "kv_offloading_size": None,
            "kv_sharing_fast_prefill": False,
            "mamba_block_size": None,
            "mamba_cache_dtype": "auto",
            "mamba_cache_mode": "none",
            "mamba_page_size_padded": None,
            "mamba_ssm_cache_dtype": "float32",
            "num_cpu_blocks": None,
            "num_gpu_blocks": config.num_blocks,
            "num_gpu_blocks_override": config.num_blocks,
            "prefix_cache_retention_interval": 0,
            "prefix_caching_hash_algo": "sha256",
            "prefix_match_unit": None,
            "replayssm_buffer_len": 16,
            "skip_page_size_padded": None,
            "sliding_window": None,
            "swa_bounded_replay": True,
            "use_kda_recoverssm": False,
            "use_replayssm": False,
            "user_specified_block_size": True,
        }
        return ",".join(f'{key}="{value}"' for key, value in values.items())

    def _process(self, out: list[str]) -> None:
        def family(name: str, kind: str, text: str, rows: Mapping[str, float]) -> None:
            out.append(f"# HELP {name} {text}\n# TYPE {name} {kind}\n")
            out.extend(f"{name}{row} {number(value)}\n" for row, value in rows.items())

        generations = gc.get_stats()
        for name, key, text in (
            ("python_gc_objects_collected_total", "collected", "Objects collected during gc"),
            ("python_gc_objects_uncollectable_total", "uncollectable", "Uncollectable objects found during GC"),
            ("python_gc_collections_total", "collections", "Number of times this generation was collected"),
        ):
            rows = {f'{{generation="{level}"}}': float(found[key]) for level, found in enumerate(generations)}
            family(name, "counter", text, rows)
        major, minor, patch = platform.python_version_tuple()
        version = f'major="{major}",minor="{minor}",patchlevel="{patch}",version="{platform.python_version()}"'
        python = f'{{implementation="{platform.python_implementation()}",{version}}}'
        family("python_info", "gauge", "Python platform information", {python: 1.0})
        pages = [int(field) * resource.getpagesize() for field in _read("/proc/self/statm").split()[:2]] or [0, 0]
        usage = resource.getrusage(resource.RUSAGE_SELF)
        cpu_s = round(usage.ru_utime + usage.ru_stime, 2)
        started = "Start time of the process since unix epoch in seconds."
        family("process_virtual_memory_bytes", "gauge", "Virtual memory size in bytes.", {"": pages[0]})
        family("process_resident_memory_bytes", "gauge", "Resident memory size in bytes.", {"": pages[1]})
        family("process_start_time_seconds", "gauge", started, {"": self.created})
        family("process_cpu_seconds_total", "counter", "Total user and system CPU time spent in seconds.", {"": cpu_s})
        fds = len(os.listdir("/proc/self/fd"))
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        family("process_open_fds", "gauge", "Number of open file descriptors.", {"": fds})
        family("process_max_fds", "gauge", "Maximum number of open file descriptors.", {"": limit})

    def _http(self, out: list[str]) -> None:
        text = "Total number of requests by method, status and handler."
        rows = [
            f'{{handler="{handler}",method="{method}",status="{status}"}}'
            for handler, method, status in self.http_requests
        ]
        out.append(f"# HELP http_requests_total {text}\n# TYPE http_requests_total counter\n")
        counts = self.http_requests.values()
        out.extend(f"http_requests_total{row} {number(count)}\n" for row, count in zip(rows, counts, strict=True))
        if rows:
            out.append(f"# HELP http_requests_created {text}\n# TYPE http_requests_created gauge\n")
            out.extend(f"http_requests_created{row} {number(self.created)}\n" for row in rows)


def _read(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read()
