"""`kvgate sim`: arguments -> SimConfig -> a server that runs until it is told to stop.

Flags that vLLM has keep its names; values that vLLM would refuse are refused.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from urllib.parse import urlsplit

import uvloop

from router.sim.engine_metrics import Names
from router.sim.engine_model import EngineConfig
from router.sim.faults import FaultKind, parse_value
from router.sim.kv_publisher import Encoding, HashFormat, KVEventsConfig
from router.sim.server import SimServer
from router.sim.sim_config import SimConfig

DEFAULT_MODEL_LEN = 131_072


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All flags of `kvgate sim`."""
    defaults = EngineConfig()
    server = parser.add_argument_group("server")
    server.add_argument("--host", default="127.0.0.1")
    server.add_argument("--port", type=int, default=8000, help="0: any free one, printed at start")
    server.add_argument("--served-model-name", nargs="+", default=["sim-8b"])
    server.add_argument("--api-key", nargs="+", default=[], help="keys that /v1 paths ask for")
    server.add_argument("--enable-request-id-headers", action="store_true")
    server.add_argument("--enable-server-load-tracking", action="store_true")
    server.add_argument("--enable-scale-out", action="store_true", help="the render routes")
    server.add_argument("--enable-lora", action="store_true", help="load and unload adapters at run time")
    server.add_argument(
        "--server-dev-mode",
        action="store_true",
        default=os.environ.get("VLLM_SERVER_DEV_MODE") == "1",
        help="/reset_prefix_cache, /sleep, /wake_up, /is_sleeping; also by VLLM_SERVER_DEV_MODE=1",
    )
    server.add_argument("--enable-prompt-tokens-details", action="store_true", help="cached_tokens in usage")
    server.add_argument("--enable-auto-tool-choice", action="store_true")
    server.add_argument("--tool-call-parser", help="accepted; answers need no parser")
    server.add_argument("--sse-keep-alive-interval", type=float, help="seconds between comments in streams")
    server.add_argument("--max-body-bytes", type=int, default=268_435_456)
    server.add_argument("--runner", choices=("generate", "pooling"), default="generate", help="pooling: embeddings")
    server.add_argument("--realtime", action="store_true", help="an audio model: the websocket /v1/realtime")
    engine = parser.add_argument_group("engine")
    engine.add_argument("--max-model-len", type=int, help=f"tokens; default: what fits, up to {DEFAULT_MODEL_LEN}")
    engine.add_argument("--block-size", type=int, default=defaults.block_size, help="tokens a KV block")
    engine.add_argument("--num-gpu-blocks-override", type=int, default=defaults.num_blocks, help="KV blocks")
    engine.add_argument("--max-num-seqs", type=int, default=defaults.max_num_seqs, help="requests that run at once")
    engine.add_argument(
        "--max-num-batched-tokens", type=int, default=defaults.max_num_batched_tokens, help="tokens a step"
    )
    engine.add_argument("--max-num-queued-reqs", type=int, help="waiting requests; 503 beyond")
    engine.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    engine.add_argument("--step-ms", type=float, default=1e3 * defaults.step_s, help="cost of each step")
    engine.add_argument(
        "--prefill-tokens-per-s", type=float, default=round(1 / defaults.prefill_token_s), help="prompt tokens"
    )
    engine.add_argument("--decode-ms", type=float, default=1e3 * defaults.decode_s, help="more in a step that decodes")
    engine.add_argument(
        "--decode-ms-per-seq", type=float, default=1e3 * defaults.decode_seq_s, help="and for each that decodes"
    )
    engine.add_argument(
        "--default-output-tokens", type=int, default=128, help="of a chat answer that no max_tokens limits"
    )
    engine.add_argument("--seed", type=int, default=0, help="changes the answers")
    events = parser.add_argument_group("KV events")
    events.add_argument("--kv-events", action=argparse.BooleanOptionalAction, default=True)
    events.add_argument("--kv-events-port", type=int, default=0, help="0: any free one, see /kv_event_sources")
    events.add_argument("--kv-events-replay-port", type=int, default=0, help="-1: no replay")
    events.add_argument("--kv-events-topic", default="")
    events.add_argument("--kv-events-buffer-steps", type=int, default=10_000, help="batches that replay keeps")
    events.add_argument("--kv-events-config", help="vLLM's JSON; wins over the flags above")
    events.add_argument(
        "--kv-events-encoding", choices=[*Encoding], default=Encoding.MAP, help="array: as releases up to 0.23"
    )
    events.add_argument("--kv-events-hashes", choices=[*HashFormat], default=HashFormat.INT)
    tests = parser.add_argument_group("tests")
    tests.add_argument("--metrics-names", choices=[*Names], default=Names.NEW, help="old: gpu_* as before 0.11")
    tests.add_argument("--sim-control-port", type=int, help="/sim/ paths on a port of their own too; 0: any free one")
    kinds = ", ".join(kind.value for kind in FaultKind)
    tests.add_argument(
        "--fault", action="append", default=[], metavar="KIND[=VALUE[:COUNT]]", help=f"on from the start: {kinds}"
    )


def _events_config(arguments: argparse.Namespace) -> KVEventsConfig | None:
    replay = arguments.kv_events_replay_port
    port, topic, steps, enabled = (
        arguments.kv_events_port,
        arguments.kv_events_topic,
        arguments.kv_events_buffer_steps,
        arguments.kv_events,
    )
    if arguments.kv_events_config is not None:
        try:
            given = json.loads(arguments.kv_events_config)
            if not isinstance(given, dict):
                raise ValueError("expected an object")
            enabled = bool(given.get("enable_kv_cache_events", False)) and given.get("publisher", "zmq") == "zmq"
            port = _endpoint_port(given.get("endpoint", "tcp://*:5557"))
            replay = _endpoint_port(given["replay_endpoint"]) if given.get("replay_endpoint") else -1
            topic = str(given.get("topic", ""))
            steps = int(given.get("buffer_steps", 10_000))
        except ValueError as error:
            raise ValueError(f"--kv-events-config: {error}") from None
    if not enabled:
        return None
    for name, value in (("--kv-events-port", port), ("--kv-events-replay-port", max(replay, 0))):
        if not 0 <= value <= 65_535:
            raise ValueError(f"{name}: {value} is not a port")
    if steps < 1:
        raise ValueError(f"--kv-events-buffer-steps: {steps} is below 1")
    return KVEventsConfig(
        host=arguments.host,
        port=port,
        replay_port=None if replay < 0 else replay,
        topic=topic,
        encoding=Encoding(arguments.kv_events_encoding),
        hashes=HashFormat(arguments.kv_events_hashes),
        buffer_steps=steps,
    )


def _endpoint_port(endpoint: object) -> int:
    parts = urlsplit(str(endpoint).replace("*", "0.0.0.0"))
    if parts.scheme != "tcp" or parts.port is None:
        raise ValueError(f"endpoint {endpoint!r}: expected tcp://*:PORT")
    return parts.port


def config_from(arguments: argparse.Namespace) -> SimConfig:
    """ValueError names the flag that cannot be."""
    if arguments.prefill_tokens_per_s <= 0:
        raise ValueError(f"--prefill-tokens-per-s: {arguments.prefill_tokens_per_s} is not above 0")
    engine = EngineConfig(
        block_size=arguments.block_size,
        num_blocks=arguments.num_gpu_blocks_override,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        prefix_caching=arguments.enable_prefix_caching,
        step_s=arguments.step_ms / 1e3,
        prefill_token_s=1.0 / arguments.prefill_tokens_per_s,
        decode_s=arguments.decode_ms / 1e3,
        decode_seq_s=arguments.decode_ms_per_seq / 1e3,
    )
    length = arguments.max_model_len
    if length is None:
        length = min(DEFAULT_MODEL_LEN, engine.capacity_tokens)
    elif not 2 <= length <= engine.capacity_tokens:
        raise ValueError(
            f"--max-model-len: {length} tokens do not fit into the KV cache of {engine.capacity_tokens} tokens"
        )
    for name in ("port", "sim_control_port"):
        value = getattr(arguments, name)
        if value is not None and not 0 <= value <= 65_535:
            raise ValueError(f"--{name.replace('_', '-')}: {value} is not a port")
    if arguments.default_output_tokens < 1:
        raise ValueError(f"--default-output-tokens: {arguments.default_output_tokens} is below 1")
    interval = arguments.sse_keep_alive_interval
    if interval is not None and interval <= 0:
        raise ValueError(f"--sse-keep-alive-interval: {interval} is not above 0")
    return SimConfig(
        engine=engine,
        host=arguments.host,
        port=arguments.port,
        served_model_names=tuple(arguments.served_model_name),
        model_root=arguments.served_model_name[0],
        max_model_len=length,
        default_output_tokens=arguments.default_output_tokens,
        prompt_tokens_details=arguments.enable_prompt_tokens_details,
        auto_tool_choice=arguments.enable_auto_tool_choice,
        request_id_headers=arguments.enable_request_id_headers,
        load_tracking=arguments.enable_server_load_tracking,
        scale_out=arguments.enable_scale_out,
        dev_mode=arguments.server_dev_mode,
        lora=arguments.enable_lora,
        pooling=arguments.runner == "pooling",
        realtime=arguments.realtime,
        api_keys=tuple(arguments.api_key),
        max_num_queued_reqs=arguments.max_num_queued_reqs,
        sse_keep_alive_s=interval,
        kv_events=_events_config(arguments),
        metrics_names=Names(arguments.metrics_names),
        max_body_bytes=arguments.max_body_bytes,
        control_port=arguments.sim_control_port,
        seed=arguments.seed,
    )


def parse_fault(text: str) -> tuple[FaultKind, str | bool, int | None]:
    """KIND[=VALUE[:COUNT]]. ValueError says what is wrong."""
    name, _, rest = text.partition("=")
    value, _, count = rest.partition(":")
    try:
        kind = FaultKind(name)
    except ValueError:
        raise ValueError(f"--fault: {name!r} is none of {', '.join(kind.value for kind in FaultKind)}") from None
    if count and not count.isdecimal():
        raise ValueError(f"--fault {name}: count {count!r} is not a whole number")
    return kind, value or True, int(count) if count else None


async def serve(config: SimConfig, faults: list[tuple[FaultKind, str | bool, int | None]]) -> None:
    """Run until SIGINT or SIGTERM; a second one ends at once."""
    loop = asyncio.get_running_loop()
    server = SimServer(config, loop, time.time)
    stopping = asyncio.Event()

    def stop() -> None:
        if stopping.is_set():
            os._exit(0)
        stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    port = await server.start()
    for kind, value, count in faults:
        server.faults.set(kind, value, count)
    await server.apply_faults()
    host = f"[{config.host}]" if ":" in config.host else config.host
    if server.control_port is not None:
        sys.stdout.write(f"control on http://{host}:{server.control_port}\n")
    sys.stdout.write(f"listening on http://{host}:{port}\n")
    sys.stdout.flush()
    await stopping.wait()
    await server.stop()


def run(arguments: argparse.Namespace) -> int:
    """0 after a stop as asked, 1 if the port cannot be had, 2 for values that cannot be."""
    try:
        config = config_from(arguments)
        faults = [parse_fault(text) for text in arguments.fault]
        for kind, value, _ in faults:
            parse_value(kind, value)
    except ValueError as error:
        sys.stderr.write(f"kvgate sim: {error}\n")
        return 2
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(config, faults))
    except OSError as error:
        sys.stderr.write(f"kvgate sim: {error}\n")
        return 1
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="kvgate sim", description="One simulated vLLM engine.")
    add_arguments(parser)
    return run(parser.parse_args())
