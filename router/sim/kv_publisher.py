"""KV events as vLLM publishes them: a ZMQ PUB socket of [topic, sequence, payload], a ROUTER socket for the past.

Payloads are msgpack: an array [time, events, rank], each event a map (releases from 0.24) or an array with its tag
first (up to 0.23). Replay: the client sends [empty, start sequence]; it gets every batch from there that is still in
the ring, then the sequence -1. Releases from 0.27 put the topic into each reply, older ones do not.

Nothing polls: PUB never blocks (a slow subscriber loses messages), ROUTER is served when its descriptor wakes the loop.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import msgspec
import zmq

from router.sim.block_pool import Cleared, PoolEvent, Removed, Stored

MEDIUM = "GPU"
SPEC_KIND = "full_attention"
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


class Encoding(StrEnum):
    """How events are written, and which replay framing goes with it."""

    MAP = "map"  # 0.27 and later
    ARRAY = "array"  # up to 0.23


class HashFormat(StrEnum):
    INT = "int"
    BYTES = "bytes"  # 32 bytes, as with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0 and sha256


class Sequenced(Protocol):
    """What the owner of stored blocks must offer."""

    def event_tokens(self, start: int, end: int) -> list[int]: ...

    def event_extra_keys(self, block: int) -> list[Any] | None:
        """Adapter and cache_salt of the block at this position, None without any."""
        ...

    @property
    def event_adapter(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class KVEventsConfig:
    """Names and defaults as in --kv-events-config; ports 0 mean any free one, None no socket."""

    host: str = "127.0.0.1"
    port: int = 0
    replay_port: int | None = 0
    topic: str = ""
    encoding: Encoding = Encoding.MAP
    hashes: HashFormat = HashFormat.INT
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000


def _integer_option(socket: zmq.Socket[bytes], option: int) -> int:
    value = socket.getsockopt(option)
    assert isinstance(value, int)
    return value


class KVPublisher:
    """`owner_of` gives the Sequenced behind a pool event's owner; `wall_time` stamps the batches (Unix seconds)."""

    def __init__(
        self,
        config: KVEventsConfig,
        block_size: int,
        loop: asyncio.AbstractEventLoop,
        wall_time: Callable[[], float],
        owner_of: Callable[[Any], Sequenced],
        lose: Callable[[], bool] = lambda: False,
    ) -> None:
        self._lose = lose  # asked per batch: True keeps it from subscribers, as a full queue does
        self.config = config
        self.sequence = 0
        self._block_size = block_size
        self._loop = loop
        self._wall_time = wall_time
        self._owner_of = owner_of
        self._encode = msgspec.msgpack.Encoder().encode
        self._topic = config.topic.encode()
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._context = zmq.Context(io_threads=1)
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.set_hwm(config.hwm)
        self._publisher.linger = 0
        self.port = self._bind(self._publisher, config.port)
        self._replay: zmq.Socket[bytes] | None = None
        self.replay_port: int | None = None
        if config.replay_port is not None:
            self._replay = self._context.socket(zmq.ROUTER)
            self._replay.linger = 0
            # Room for the whole ring and its end; a reader that does not read loses the rest instead of our memory.
            self._replay.sndhwm = 2 * (config.buffer_steps + 1)
            self.replay_port = self._bind(self._replay, config.replay_port)
            loop.add_reader(_integer_option(self._replay, zmq.FD), self._serve_replay)

    def sources(self) -> dict[str, dict[str, Any]]:
        """The body of GET /kv_event_sources: resolved endpoints, with the engine's `*` for the host."""
        replay = f"tcp://*:{self.replay_port}" if self.replay_port is not None else None
        return {
            "0": {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://*:{self.port}",
                "replay_endpoint": replay,
                "buffer_steps": self.config.buffer_steps,
                "hwm": self.config.hwm,
                "max_queue_size": self.config.max_queue_size,
                "topic": self.config.topic,
            }
        }

    def publish(self, events: Sequence[PoolEvent]) -> None:
        """One batch, if there is anything in it."""
        if not events:
            return
        payload = self._encode([self._wall_time(), [self._render(event) for event in events], 0])
        frames = (self._topic, self.sequence.to_bytes(8, "big"), payload)
        self._ring.append((self.sequence, payload))
        self.sequence += 1
        if self._lose():
            return
        try:
            self._publisher.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return  # over the high-water mark: lost to the subscriber, but in the ring

    def restart(self) -> None:
        """Sequence and ring of a new process."""
        self.sequence = 0
        self._ring.clear()

    def close(self) -> None:
        if self._replay is not None:
            self._loop.remove_reader(_integer_option(self._replay, zmq.FD))
            self._replay.close()
            self._replay = None
        self._publisher.close()
        self._context.term()

    def _bind(self, socket: zmq.Socket[bytes], port: int) -> int:
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        if ":" in self.config.host:
            socket.ipv6 = True
        try:
            socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"KV events on {host}:{port}: {error}") from None
        endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return int(endpoint.rstrip(b"\0").rsplit(b":", 1)[1])

    def _hash(self, value: int) -> int | bytes:
        if self.config.hashes is HashFormat.INT:
            return value
        return hashlib.sha256(value.to_bytes(8, "big")).digest()

    def _render(self, event: PoolEvent) -> dict[str, Any] | list[Any]:
        as_map = self.config.encoding is Encoding.MAP
        if isinstance(event, Stored):
            owner = self._owner_of(event.owner)
            count, size = len(event.hashes), self._block_size
            hashes = [self._hash(value) for value in event.hashes]
            parent = None if event.parent is None else self._hash(event.parent)
            tokens = owner.event_tokens(event.first * size, (event.first + count) * size)
            extra = [owner.event_extra_keys(event.first + offset) for offset in range(count)]
            adapter = owner.event_adapter
            if as_map:
                return {
                    "type": "BlockStored",
                    "block_hashes": hashes,
                    "parent_block_hash": parent,
                    "token_ids": tokens,
                    "block_size": size,
                    "lora_id": None if adapter is None else 1,
                    "medium": MEDIUM,
                    "lora_name": adapter,
                    "extra_keys": extra,
                    "group_idx": 0,
                    "kv_cache_spec_kind": SPEC_KIND,
                }
            lora_id = None if adapter is None else 1
            return ["BlockStored", hashes, parent, tokens, size, lora_id, MEDIUM, adapter, extra, 0, SPEC_KIND, None]
        if isinstance(event, Removed):
            removed = [self._hash(event.hash)]
            if as_map:
                return {"type": "BlockRemoved", "block_hashes": removed, "medium": MEDIUM, "group_idx": 0}
            return ["BlockRemoved", removed, MEDIUM, 0]
        assert isinstance(event, Cleared)
        return {"type": "AllBlocksCleared"} if as_map else ["AllBlocksCleared"]

    def _serve_replay(self) -> None:
        # The descriptor is edge-triggered: everything that is there must be read now.
        socket = self._replay
        while socket is not None and _integer_option(socket, zmq.EVENTS) & zmq.POLLIN:
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            # A REQ socket's envelope and a DEALER's [empty, start] look alike from here: [identity, empty, start].
            if len(frames) != 3 or len(frames[2]) != 8:
                continue
            self._answer_replay(socket, frames[0], int.from_bytes(frames[2], "big"))

    def _answer_replay(self, socket: zmq.Socket[bytes], client: bytes, start: int) -> None:
        modern = self.config.encoding is Encoding.MAP
        middle = (b"", self._topic) if modern else (b"",)
        try:
            for sequence, payload in self._ring:
                if sequence >= start:
                    socket.send_multipart((client, *middle, sequence.to_bytes(8, "big"), payload), zmq.NOBLOCK)
            end = (b"", b"") if modern else (b"",)
            socket.send_multipart((client, *end, END_OF_REPLAY, b""), zmq.NOBLOCK)
        except zmq.Again:
            return  # it does not read; it will notice that the end is missing
