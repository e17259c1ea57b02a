"""Batches of KV events as vLLM 0.24 and later write them, for prompts of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

CLEARED = {"type": "AllBlocksCleared"}


def engine_hash(tokens: Sequence[int], salt: str | None = None) -> int:
    """Some number that a prompt's last block has alone: what an engine hashes is its own affair."""
    return hash((tuple(tokens), salt)) % 2**64


def stored(
    tokens: Sequence[int],
    size: int,
    *,
    salt: str | None = None,
    lora: str | None = None,
    medium: str = "GPU",
    start: int = 0,
) -> dict[str, Any]:
    """The full blocks of a prompt from its token `start` on, whose blocks before it are held."""
    full = len(tokens) // size * size
    count = (full - start) // size
    event: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": [engine_hash(tokens[:end], salt) for end in range(start + size, full + 1, size)],
        "parent_block_hash": engine_hash(tokens[:start], salt) if start else None,
        "token_ids": list(tokens[start:full]),
        "block_size": size,
        "lora_id": None,
        "medium": medium,
        "lora_name": lora,
    }
    if salt is not None or lora is not None:
        extra = [key for key in (lora, salt) if key is not None]
        event["extra_keys"] = [extra, *([[lora]] if lora else [None]) * (count - 1)] if not start else [None] * count
    return event


def removed(tokens: Sequence[int], *, salt: str | None = None, medium: str = "GPU") -> dict[str, Any]:
    """The block that ends these tokens."""
    return {"type": "BlockRemoved", "block_hashes": [engine_hash(tokens, salt)], "medium": medium}


def batch(*events: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), 0])
