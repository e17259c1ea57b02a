"""One question to one engine over HTTP, beside the request path: with its key, its certificate, and a bound."""

from __future__ import annotations

from typing import Any

import aiohttp

from router.backends.backend import Backend
from router.tls import ClientContexts


class TooLong(ValueError):
    """The answer is longer than was wanted; it was not read to its end."""


async def ask(
    session: aiohttp.ClientSession,
    contexts: ClientContexts,
    backend: Backend,
    path: str,
    *,
    limit_bytes: int,
    body: bytes | None = None,
) -> tuple[int, bytes]:
    """Status and body of a GET, or of a POST of JSON. The caller limits the time. Raises TooLong, and what aiohttp and
    the system raise."""
    headers = {} if body is None else {"Content-Type": "application/json"}
    if backend.api_key:
        headers["Authorization"] = f"Bearer {backend.api_key}"
    tls: Any = True
    if backend.url.startswith("https:"):
        tls = contexts.of(backend.tls_ca, backend.tls_verify)
    method = "GET" if body is None else "POST"
    async with session.request(
        method, backend.url + path, data=body, headers=headers, allow_redirects=False, ssl=tls
    ) as response:
        content = bytearray()
        async for part in response.content.iter_any():
            content += part
            if len(content) > limit_bytes:
                raise TooLong(f"more than {limit_bytes} bytes")
        return response.status, bytes(content)
