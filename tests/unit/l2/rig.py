"""L2 on a clock that stands still, before a real Redis server or a scripted one, and keys as LMCache writes them."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import cast

import redis

from router.clock import VirtualClock
from router.l2.answers import L2Answer, Lookup
from router.l2.chunk_hash import Chain, ChunkHasher, as_hex, in_process_chains, multi_process_chains
from router.l2.l2 import L2
from router.l2.resp import Replies, Reply
from router.l2.settings import L2Settings

LIMIT_S = 20.0
MODEL, ROOT = "served", "/models/llama"
BUILTIN = in_process_chains("0")[0]
BLAKE3 = multi_process_chains("0")[0]


def prompt(tokens: int, seed: int = 1) -> array[int]:
    rng = Random(seed)
    return array("I", [rng.randrange(151_936) for _ in range(tokens)])


def stored(
    ids: array[int],
    *,
    chain: Chain = BUILTIN,
    chunk_tokens: int = 256,
    head: str = f"{ROOT}@1@0@",
    tail: str = "@bfloat16",
    endings: tuple[str, ...] = ("kv_bytes", "metadata"),
) -> list[bytes]:
    """The keys that an engine writes for the whole chunks of a prompt."""
    hashes = ChunkHasher().hashes(chain, ids, chunk_tokens, 10_000)
    return [(head + as_hex(one).decode() + tail + ending).encode() for one in hashes for ending in endings]


def write(server_port: int, keys: list[bytes]) -> None:
    with redis.Redis(port=server_port) as client:
        client.mset(dict.fromkeys(keys, b"kv"))


class Rig:
    """`ask` gives the answer whenever it comes; time passes by `clock` alone."""

    def __init__(self, **settings: object) -> None:
        self.clock = VirtualClock()
        self.settings = L2Settings(**settings)  # type: ignore[arg-type]
        self.l2 = L2(self.settings, self.clock, asyncio.get_running_loop())
        self.came: list[L2Answer] = []  # what `done` was called with

    def lookup(
        self, ids: array[int], *, salt: str | None = None, lora: str | None = None, within_s: float = 1.0
    ) -> Lookup:
        return self.l2.ask(MODEL, ids, salt, lora, self.clock.now() + within_s, self.came.append)

    async def ask(self, ids: array[int], *, salt: str | None = None, lora: str | None = None) -> L2Answer:
        before = len(self.came)
        lookup = self.lookup(ids, salt=salt, lora=lora)
        if lookup.answer is not None:
            return lookup.answer
        await until(lambda: len(self.came) > before)
        return self.came[-1]

    async def ready(self) -> None:
        """The connection stands, and the first look at the keys is over."""
        await until(lambda: self.l2.state()["store"] == "ready")
        await self.quiet()

    async def quiet(self) -> None:
        await until(lambda: self.l2.counters()["open_keys"] == 0)

    def model_state(self) -> dict[str, object]:
        state: dict[str, object] = self.l2.state()["models"][MODEL]
        return state


@contextmanager
def rig(url: str, *, learn: bool = True, **settings: object) -> Iterator[Rig]:
    made = Rig(url=url, **settings)
    if learn:
        made.l2.learn(MODEL, ROOT)
    made.l2.start()
    try:
        yield made
    finally:
        made.l2.close()
        assert made.clock.pending == 0


async def until(true: Callable[[], bool]) -> None:
    """Lets the loop turn until it is: what is waited for comes from a socket, and the thing under test has no event."""
    async with asyncio.timeout(LIMIT_S):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0)


class ScriptedStore(asyncio.Protocol):
    """A server that hears commands and says what its script says: bytes, or None for nothing yet."""

    def __init__(self, script: Callable[[list[bytes]], bytes | None]) -> None:
        self.script = script
        self.heard: list[list[bytes]] = []
        self.transports: list[asyncio.Transport] = []
        self.closed = 0

    def accept(self) -> asyncio.Protocol:
        return _Accepted(self)

    def say(self, data: bytes) -> None:
        self.transports[-1].write(data)


class _Accepted(asyncio.Protocol):
    def __init__(self, store: ScriptedStore) -> None:
        self._store = store
        self._commands = Replies()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._store.transports.append(cast(asyncio.Transport, transport))  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        for words in self._commands.feed(data):
            self._store.heard.append(_words(words))
            said = self._store.script(_words(words))
            if said is not None:
                self._store.say(said)

    def connection_lost(self, exc: Exception | None) -> None:
        self._store.closed += 1


def _words(reply: Reply) -> list[bytes]:
    assert isinstance(reply, list)
    return [word for word in reply if isinstance(word, bytes)]


async def scripted(script: Callable[[list[bytes]], bytes | None]) -> tuple[asyncio.Server, ScriptedStore, str]:
    store = ScriptedStore(script)
    server = await asyncio.get_running_loop().create_server(store.accept, "127.0.0.1", 0)
    return server, store, f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
