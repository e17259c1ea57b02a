"""Whole answers of bounded length."""

from __future__ import annotations

import aiohttp


async def read_body(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    """All of the body; ValueError if it is longer than `limit_bytes`."""
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > limit_bytes:
            raise ValueError(f"an answer above {limit_bytes:,} bytes")
    return b"".join(parts)
