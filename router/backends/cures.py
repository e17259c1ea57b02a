"""What an engine may lack of what the gateway builds on, and the flag that cures it, in the same words everywhere."""

from __future__ import annotations

from typing import Final

CACHING_OFF: Final = ("prefix caching is off", "start it with --enable-prefix-caching")
NO_CACHED_TOKENS: Final = ("answers carry no cached_tokens", "start it with --enable-prompt-tokens-details")
PUBLISH_EVENTS: Final = (
    """start it with --kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq", """
    """"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}'"""
)
EVENTS_CONTRADICTED: Final = (
    "its answers contradict its KV events, so these place no requests",
    "does something between it and the gateway change prompts, or publish at the same endpoint?",
)
SAME_BLOCK_SIZE: Final = "start both with the same --block-size"
