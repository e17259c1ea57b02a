"""Clients that send chat requests one after another, from a thread of their own, and write down how each ended."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp

CLIENTS = 12
CHAT = "/v1/chat/completions"


class SteadyLoad:
    """`ended` counts the ends: `ok`, `cut` (after the first byte), or what went wrong before it."""

    def __init__(self, url: str, model: str, max_tokens: int) -> None:
        self._url = url
        self._model = model
        self._max_tokens = max_tokens
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self.ended: Counter[str] = Counter()
        self.begun = 0
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def start(self) -> None:
        self._thread.start()

    def move_to(self, url: str) -> None:
        """Later requests go there."""
        self._url = url

    def wait_more(self, count: int) -> None:
        """Until so many further requests have ended."""
        with self._changed:
            wanted = self.ended.total() + count
            assert self._changed.wait_for(lambda: self.ended.total() >= wanted, 60), self.ended

    def stop(self) -> Counter[str]:
        """No new requests; the ends of all."""
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        assert self.ended.total() == self.begun
        return self.ended

    async def _run(self) -> None:
        async with aiohttp.ClientSession() as session:
            await asyncio.gather(*(self._client(session, number) for number in range(CLIENTS)))

    async def _client(self, session: aiohttp.ClientSession, number: int) -> None:
        turn = 0
        while not self._stop.is_set():
            turn += 1
            self.begun += 1
            end = await self._request(session, f"client {number} says " + f"turn {turn} " * 20, stream=turn % 2 == 0)
            with self._changed:
                self.ended[end] += 1
                self._changed.notify_all()

    async def _request(self, session: aiohttp.ClientSession, text: str, stream: bool) -> str:
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": self._max_tokens,
            "stream": stream,
        }
        received = b""
        try:
            async with session.post(self._url + CHAT, json=body) as response:
                async for piece in response.content.iter_any():
                    received += piece
            if response.status != 200:
                return f"{response.status}: {received[:200].decode()}"
        except aiohttp.ClientError as error:
            return "cut" if received else f"{type(error).__name__} before the first byte"
        whole = received.endswith(b"data: [DONE]\n\n") if stream else received.endswith(b"}")
        return "ok" if whole else "cut"


@contextmanager
def steady_load(url: str, model: str, max_tokens: int = 4) -> Iterator[SteadyLoad]:
    load = SteadyLoad(url, model, max_tokens)
    load.start()
    try:
        yield load
    finally:
        load.stop()
