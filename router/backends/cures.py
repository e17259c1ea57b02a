"""What an engine may lack of what the gateway builds on, and the flag that cures it, in the same words everywhere."""

from __future__ import annotations

from typing import Final

CACHING_OFF: Final = ("prefix caching is off", "start it with --enable-prefix-caching")
NO_CACHED_TOKENS: Final = ("answers carry no cached_tokens", "start it with --enable-prompt-tokens-details")
PUBLISH_EVENTS: Final = (
    """start it with --kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq", """
    """"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}'"""
)
