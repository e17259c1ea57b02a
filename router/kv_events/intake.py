"""Follows the fleet: finds each engine's KV events, subscribes to every rank, starts again after whatever broke.

One task a backend asks where the events are, one task a rank holds the stream. Whoever wants to know what came of it
asks `describe`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import socket
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import zmq

from router.backends.asking import TooLong, ask
from router.backends.backend import Backend, State
from router.backends.cures import PUBLISH_EVENTS
from router.backends.registry import BackendAdded, BackendRemoved, FleetEvent, Reconfigured, Registry, StateChanged
from router.backends.vllm_metrics import BODY_LIMIT_BYTES as METRICS_LIMIT_BYTES
from router.clock import Clock
from router.kv_events.frame_pump import FramePump
from router.kv_events.rank_feed import FeedState, FrameSink, HeldBytes, RankFeed
from router.kv_events.rank_stream import RankStream, StreamEnded
from router.kv_events.settings import ASKED_AT_ONCE, PAUSE_LIMIT_S, REPLAYS_AT_ONCE, RETRY_LIMIT_S, IntakeSettings
from router.kv_events.sources import (
    ANSWER_LIMIT_BYTES,
    NoSource,
    Source,
    configured_sources,
    ranks_in_metrics,
    read_sources,
)
from router.metrics import Metrics
from router.tls import ClientContexts

logger = logging.getLogger(__name__)

SOCKETS_LIMIT: Final = 65_000  # of the ZMQ context, whose default of 1,023 ends at some 340 ranks


class _NotNow(Exception):
    """The engine could not be asked; the text says why."""


class _NoRoom(NoSource):
    """The sink takes no more ranks."""


class _Rank:
    """One rank: its feed for as long as the rank is known, its stream while there is one."""

    def __init__(self, feed: RankFeed) -> None:
        self.feed = feed
        self.source: Source | None = None
        self.task: asyncio.Task[None] | None = None
        self.retry_at = float("-inf")
        self.failures = 0
        self.pauses = 0


class _Follower:
    """One backend."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.wake = asyncio.Event()
        self.ranks: dict[int, _Rank] = {}
        self.state = FeedState.CONNECTING  # while no rank is known
        self.why = "not asked yet"
        self.failures = 0


class KvEventIntake:
    """From `start` to `stop`, on the loop's thread. `sink` gets the batches; `on_state(backend)` is called after
    each change of the state of one of its ranks, or of the backend as a whole where it has none."""

    def __init__(
        self,
        registry: Registry,
        clock: Clock,
        session_factory: Callable[[], aiohttp.ClientSession],
        sink: FrameSink,
        settings: IntakeSettings,
        metrics: Metrics | None = None,
        contexts: ClientContexts | None = None,
        on_state: Callable[[Backend], object] = lambda backend: None,
    ) -> None:
        self._registry = registry
        self._clock = clock
        self._make_session = session_factory
        self._sink = sink
        self._settings = settings
        self._metrics = metrics or Metrics()
        self._contexts = contexts or ClientContexts()
        self._on_state = on_state
        self._followers: dict[Backend, _Follower] = {}
        self._held_bytes = HeldBytes(settings.held_bytes)
        self._session: aiohttp.ClientSession | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._pump: FramePump | None = None
        self._replays = asyncio.Semaphore(REPLAYS_AT_ONCE)
        self._asks = asyncio.Semaphore(ASKED_AT_ONCE)
        self._ending: set[asyncio.Task[None]] = set()
        self._unsubscribe: Callable[[], None] | None = None

    # --- life

    async def start(self) -> None:
        self._session = self._make_session()
        self._context = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, SOCKETS_LIMIT)
        self._pump = FramePump(asyncio.get_running_loop(), self._clock)
        self._unsubscribe = self._registry.subscribe(self._fleet_changed)
        for backend in self._registry.backends:
            self._follow(backend)

    async def stop(self) -> None:
        """No task, socket or timer is left. The sink's ranks are removed."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        for backend in tuple(self._followers):
            self._leave(backend)
        while self._ending:
            await asyncio.gather(*self._ending, return_exceptions=True)
        if self._pump is not None:
            self._pump.close()
        if self._context is not None:
            self._context.term()
            self._context = None
        if self._session is not None:
            await self._session.close()
            self._session = None

    def engine_restarted(self, backend: Backend) -> None:
        """Another process answers for this backend: what its ranks held is forgotten at once, and it is asked anew."""
        follower = self._followers.get(backend)
        if follower is None:
            return
        for rank in follower.ranks.values():
            self._end_stream(rank)
            rank.failures = rank.pauses = 0
            rank.retry_at = float("-inf")
            rank.feed.malformed_in_a_row = 0
            rank.feed.forget(FeedState.CONNECTING, "the engine restarted")
        follower.failures = 0
        follower.wake.set()

    def resync(self, backend: Backend) -> None:
        """What its events told is wrong: it is forgotten, and heard again from the first batch that the engine still
        has. Nothing happens to a rank that does so already."""
        follower = self._followers.get(backend)
        if follower is not None:
            for rank in follower.ranks.values():
                rank.feed.resync("what they told was wrong, and there is no replay endpoint to hear it again")

    def ranks_of(self, backend: Backend) -> tuple[tuple[int, FeedState], ...]:
        """The sink's number and the state of each of its ranks; none while there are no events."""
        follower = self._followers.get(backend)
        if follower is None:
            return ()
        return tuple((rank.feed.index_rank, rank.feed.state) for rank in follower.ranks.values())

    def relearns(self, backend: Backend) -> bool:
        """Whether it follows one rank that lacks what was cached before, and has no replay to hear of it.

        Not with several ranks, since a request of ours may reach another one than the client's did; not with a replay:
        one would bring blocks twice that were announced twice, and their removal once."""
        follower = self._followers.get(backend)
        if follower is None or len(follower.ranks) != 1:
            return False
        (rank,) = follower.ranks.values()
        return (
            rank.feed.state is FeedState.INCOMPLETE and rank.source is not None and rank.source.replay_endpoint is None
        )

    def rewrite(self, backend: Backend, rewrite: Callable[[bytes], bytes] | None) -> None:
        """What becomes of its batches before they are applied, until told otherwise."""
        follower = self._followers.get(backend)
        if follower is not None:
            for rank in follower.ranks.values():
                rank.feed.rewrite = rewrite

    def describe(self, backend: Backend) -> list[dict[str, Any]]:
        """Per rank: state, why, endpoint, sequence, last_event_age_s, gaps, resyncs, malformed, dropped, blocks.
        One entry with rank None while no rank is known."""
        follower = self._followers.get(backend)
        if follower is None:
            return []
        if not follower.ranks:
            return [{"rank": None, "state": follower.state.value, "why": follower.why}]
        now = self._clock.now()
        told = []
        for number in sorted(follower.ranks):
            rank = follower.ranks[number]
            feed = rank.feed
            age_s = now - feed.last_event_at
            told.append(
                {
                    "rank": number,
                    "state": feed.state.value,
                    "why": feed.why,
                    "endpoint": rank.source.endpoint if rank.source is not None else None,
                    "sequence": feed.sequence if feed.sequence >= 0 else None,
                    "last_event_age_s": round(age_s, 3) if age_s != float("inf") else None,
                    "gaps": feed.gaps,
                    "resyncs": feed.resyncs,
                    "malformed": feed.malformed,
                    "dropped": feed.dropped,
                    "blocks": self._sink.blocks_of(feed.index_rank),
                }
            )
        return told

    # --- the fleet

    def _fleet_changed(self, event: FleetEvent) -> None:
        backend = event.backend
        if isinstance(event, BackendAdded):
            self._follow(backend)
        elif isinstance(event, BackendRemoved):
            self._leave(backend)
        elif isinstance(event, Reconfigured) or (isinstance(event, StateChanged) and event.after is State.UP):
            follower = self._followers.get(backend)
            if follower is not None:
                follower.failures = 0
                for rank in follower.ranks.values():
                    if not rank.pauses:  # one that sent garbage waits, however healthy its engine says it is
                        rank.retry_at = float("-inf")
                follower.wake.set()

    def _follow(self, backend: Backend) -> None:
        follower = self._followers[backend] = _Follower()
        follower.task = asyncio.create_task(self._rounds(backend, follower), name=f"kv events {backend.name}")

    def _leave(self, backend: Backend) -> None:
        follower = self._followers.pop(backend, None)
        if follower is None:
            return
        if follower.task is not None:
            self._end_task(follower.task)
        for rank in follower.ranks.values():
            self._drop_rank(rank)

    def _drop_rank(self, rank: _Rank) -> None:
        self._end_stream(rank)
        rank.feed.forget(FeedState.OFF, "the engine has this rank no more")
        self._sink.remove(rank.feed.index_rank)

    def _end_stream(self, rank: _Rank) -> None:
        if rank.task is not None:
            self._end_task(rank.task)
            rank.task = None

    def _end_task(self, task: asyncio.Task[None]) -> None:
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        task.cancel()

    # --- one backend

    async def _rounds(self, backend: Backend, follower: _Follower) -> None:
        while True:
            follower.wake.clear()
            pause_s: float | None = None
            try:
                async with self._asks:
                    sources = await self._ask(backend)
                follower.failures = 0
                await self._connect(backend, follower, sources)
            except NoSource as reason:
                self._switch_off(backend, follower, str(reason))
                if isinstance(reason, _NoRoom):
                    pause_s = RETRY_LIMIT_S  # another backend may leave
            except _NotNow as failure:
                pause_s = min(self._settings.retry_s * 2.0**follower.failures, RETRY_LIMIT_S)
                follower.failures = min(follower.failures + 1, 16)
                follower.why = str(failure)
            due = [r.retry_at for r in follower.ranks.values() if r.task is None and r.source is not None]
            if pause_s is None and due:
                pause_s = max(min(due) - self._clock.now(), 0.0)
            await self._pause(follower.wake, pause_s)

    def _switch_off(self, backend: Backend, follower: _Follower, why: str) -> None:
        if follower.why != why:
            logger.warning("KV events of %s are off: %s", backend.name, why)
        follower.state, follower.why = FeedState.OFF, why
        ranks, follower.ranks = follower.ranks, {}
        for rank in ranks.values():
            self._drop_rank(rank)
        self._on_state(backend)

    async def _connect(self, backend: Backend, follower: _Follower, sources: dict[int, Source | NoSource]) -> None:
        changed = follower.ranks.keys() ^ sources.keys()
        for number in [number for number in follower.ranks if number not in sources]:
            self._drop_rank(follower.ranks.pop(number))
        # All of them before the first is followed: an engine of which a rank is missing would look like a whole one.
        for number in sources:
            if number not in follower.ranks:
                follower.ranks[number] = self._new_rank(backend, number, len(sources))
        if changed:
            self._on_state(backend)
        now = self._clock.now()
        for number, source in sources.items():
            rank = follower.ranks[number]
            if isinstance(source, NoSource):
                self._end_stream(rank)
                rank.source = None
                rank.feed.forget(FeedState.OFF, str(source))
                continue
            if rank.task is not None and rank.source == source:
                continue
            if rank.source is not None and rank.source.endpoint != source.endpoint:
                self._end_stream(rank)
                rank.feed.forget(FeedState.CONNECTING, "the engine publishes elsewhere than before")
            rank.source = source
            if rank.retry_at > now:
                continue
            self._end_stream(rank)
            rank.task = asyncio.create_task(
                self._stream(follower, rank, await self._addressed(source, rank.failures)),
                name=f"kv events {backend.name}/{number}",
            )

    def _new_rank(self, backend: Backend, number: int, ranks: int) -> _Rank:
        def capacity() -> int | None:
            blocks = backend.report.num_gpu_blocks  # of all ranks together
            return None if blocks is None else max(blocks // ranks, 1)

        try:
            index_rank = self._sink.add_rank(backend, number)
        except ValueError:
            raise _NoRoom("the index has no room for more ranks of engines") from None
        return _Rank(
            RankFeed(
                backend.name,
                index_rank,
                self._sink,
                self._clock,
                self._settings,
                self._metrics,
                self._held_bytes,
                capacity,
                lambda: self._on_state(backend),
            )
        )

    async def _stream(self, follower: _Follower, rank: _Rank, source: Source) -> None:
        assert self._context is not None
        assert self._pump is not None
        feed, settings = rank.feed, self._settings
        stream = RankStream(
            asyncio.get_running_loop(),
            self._clock,
            self._context,
            self._pump,
            self._replays,
            feed,
            source,
            settings,
        )
        try:
            await stream.run()
        except StreamEnded as end:
            why, hostile = str(end), end.hostile
        except Exception:
            logger.exception("the KV event stream of %s failed", feed.backend)
            why, hostile = "a fault of the gateway, see its log", False
        now = self._clock.now()
        if hostile:
            pause_s = min(settings.malformed_pause_s * 2.0**rank.pauses, PAUSE_LIMIT_S)
            rank.pauses = min(rank.pauses + 1, 16)
            feed.malformed_in_a_row = 0
            logger.warning("KV events of %s are off for %g s: %s", feed.backend, pause_s, why)
            feed.forget(FeedState.OFF, f"malformed: {why}; asked again after a pause")
        else:
            if stream.frames:
                rank.failures = rank.pauses = 0
            pause_s = min(settings.retry_s * 2.0**rank.failures, RETRY_LIMIT_S)
            rank.failures = min(rank.failures + 1, 16)
            feed.disconnected(why)
        rank.retry_at = now + pause_s
        rank.task = None
        follower.wake.set()

    # --- questions

    async def _ask(self, backend: Backend) -> dict[int, Source | NoSource]:
        """NoSource: the engine has none, and says so. _NotNow: it could not be asked."""
        configured = backend.kv_events
        if configured == "off":
            raise NoSource('switched off: kv_events = "off" for this backend')
        status, body = await self._get(backend, "/kv_event_sources", ANSWER_LIMIT_BYTES)
        if status == 200 and (configured == "auto" or body.strip() != b"{}"):
            return read_sources(body, backend.host)
        if status in (401, 403):
            raise NoSource(f"/kv_event_sources answers {status}: give this backend an api_key_env")
        if status not in (200, 404, 405, 501):
            raise _NotNow(f"/kv_event_sources answers {status}")
        if configured == "auto":
            raise NoSource(
                "the engine does not tell where its KV events are (/kv_event_sources came with vLLM 0.31): "
                f'{PUBLISH_EVENTS} and set kv_events = "tcp://host:5557" for this backend'
            )
        _, metrics = await self._get(backend, "/metrics", METRICS_LIMIT_BYTES)
        return configured_sources(configured, ranks_in_metrics(metrics))

    async def _get(self, backend: Backend, path: str, limit_bytes: int) -> tuple[int, bytes]:
        assert self._session is not None
        try:
            async with asyncio.timeout(None) as limit:
                timer = self._clock.call_later(self._settings.ask_timeout_s, limit.reschedule, 0)
                try:
                    return await ask(self._session, self._contexts, backend, path, limit_bytes=limit_bytes)
                finally:
                    timer.cancel()
        except TooLong as error:
            raise _NotNow(f"{path} answers with {error}") from None
        except TimeoutError:
            raise _NotNow(f"{path} does not answer within {self._settings.ask_timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _NotNow(f"{path} fails: {type(error).__name__}") from None

    async def _addressed(self, source: Source, attempt: int) -> Source:
        """The same with addresses for names: ZMQ would look them up in its only I/O thread. Each attempt in a row takes
        the next address of a name: an engine that binds IPv4 alone may have another one first."""
        replay = source.replay_endpoint
        return dataclasses.replace(
            source,
            endpoint=await self._address(source.endpoint, attempt),
            replay_endpoint=None if replay is None else await self._address(replay, attempt),
        )

    async def _address(self, endpoint: str, attempt: int) -> str:
        if not endpoint.startswith("tcp://"):
            return endpoint
        parts = urlsplit(endpoint)
        host, port = parts.hostname or "", parts.port or 0
        if ":" in host or host.replace(".", "").isdigit():
            return endpoint
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise _NotNow(f"{host} has no address: {error.strerror or type(error).__name__}") from None
        address = str(found[attempt % len(found)][4][0])
        return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"

    async def _pause(self, wake: asyncio.Event, delay_s: float | None) -> None:
        timer = None if delay_s is None else self._clock.call_later(delay_s, wake.set)
        with contextlib.ExitStack() as stack:
            if timer is not None:
                stack.callback(timer.cancel)
            await wake.wait()
