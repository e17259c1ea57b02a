"""What one simulated engine is."""

from __future__ import annotations

from dataclasses import dataclass, field

from router.sim.engine_metrics import Names
from router.sim.engine_model import EngineConfig
from router.sim.kv_publisher import KVEventsConfig


@dataclass(frozen=True, slots=True)
class SimConfig:
    """Everything about one simulated engine. Lengths in tokens, times in seconds."""

    engine: EngineConfig
    host: str = "127.0.0.1"
    port: int = 0
    served_model_names: tuple[str, ...] = ("sim-8b",)
    model_root: str = "sim-8b"
    max_model_len: int = 131_072
    default_output_tokens: int = 128
    prompt_tokens_details: bool = False
    auto_tool_choice: bool = False
    request_id_headers: bool = False
    load_tracking: bool = False
    scale_out: bool = False
    dev_mode: bool = False
    lora: bool = False
    pooling: bool = False
    realtime: bool = False
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    max_num_queued_reqs: int | None = None
    sse_keep_alive_s: float | None = None
    kv_events: KVEventsConfig | None = field(default_factory=KVEventsConfig)
    metrics_names: Names = Names.NEW
    max_body_bytes: int = 268_435_456
    control_port: int | None = None
    seed: int = 0
