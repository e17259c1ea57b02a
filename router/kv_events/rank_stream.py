"""One connection to one rank's publisher, from its opening to its end, with the replays that its feed asks for."""

from __future__ import annotations

import asyncio
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from router.clock import Clock, TimerHandle
from router.kv_events.frame_pump import FramePump, FrameSocket
from router.kv_events.rank_feed import RankFeed
from router.kv_events.settings import IntakeSettings
from router.kv_events.sources import TOPIC_LIMIT_BYTES, Source

END: Final = b"\xff" * 8  # -1: the last message of a replay
SEQUENCE_LIMIT: Final = 1 << 63
HEARTBEAT_MS: Final = 5_000
SILENCE_MS: Final = 15_000  # a peer that answers no heartbeat for so long is gone
_EVENTS: Final = int(
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class StreamEnded(Exception):
    """Why; `hostile`: it sent what no engine sends."""

    def __init__(self, why: str, hostile: bool = False) -> None:
        super().__init__(why)
        self.hostile = hostile


class RankStream:
    """`run` once. `endpoint` and `replay_endpoint` of the source hold addresses, not names."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        context: zmq.Context[zmq.Socket[bytes]],
        pump: FramePump,
        replays: asyncio.Semaphore,
        feed: RankFeed,
        source: Source,
        settings: IntakeSettings,
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._context = context
        self._pump = pump
        self._replays = replays
        self._feed = feed
        self._source = source
        self._settings = settings
        self._changed = asyncio.Event()
        self._connected = False
        self._ended: StreamEnded | None = None
        self._sockets: list[FrameSocket] = []
        self._subscriber: zmq.Socket[bytes] | None = None
        self._replay_over = False
        self._replayed = 0
        self._timer: TimerHandle | None = None  # of the connection, then of a whole replay
        self._stall_timer: TimerHandle | None = None
        self._late = ""
        self._window_begun = float("-inf")
        self._window_frames = 0
        self.frames = 0

    async def run(self) -> None:
        """Until it breaks: raises StreamEnded. Leaves no socket and no timer."""
        feed = self._feed
        try:
            self._open()
            self._timer = self._clock.call_later(
                self._settings.connect_timeout_s, self._end, f"cannot connect within the time limit{self._hint()}"
            )
            while not self._connected:
                await self._wait()
            self._cancel_timers()
            feed.on_wanted = self._changed.set
            feed.on_work = self._work
            feed.connected(self._source.replay_endpoint is not None)
            while True:
                await self._wait()
                while feed.replay_from is not None:
                    await self._replay()
        except zmq.ZMQError as error:
            raise StreamEnded(f"{error.strerror or error}") from None
        finally:
            feed.on_wanted = feed.on_work = _nothing
            self._pump.drop(feed)
            self._close()

    # --- events of the sockets

    def _open(self) -> None:
        socket = self._socket(zmq.SUB, self._settings.receive_frames)
        self._subscriber = socket
        monitor: zmq.Socket[bytes] = socket.get_monitor_socket(_EVENTS)
        self._sockets.append(FrameSocket(self._loop, self._pump, monitor, 2, self._on_monitor, self._end))
        socket.setsockopt(zmq.SUBSCRIBE, self._source.topic or b"")
        socket.connect(self._source.endpoint)
        self._sockets.append(FrameSocket(self._loop, self._pump, socket, 3, self._on_live, self._end_hostile))

    def _socket(self, kind: int, frames: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.rcvhwm = frames
        socket.setsockopt(zmq.MAXMSGSIZE, self._settings.max_payload_bytes)
        # One that broke is opened anew by us, who then ask where it is, and whether it is the same process.
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
        socket.setsockopt(zmq.IPV6, 1)
        return socket

    def _on_monitor(self, message: list[bytes]) -> None:
        event = parse_monitor_message(message)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._connected = True
            self._changed.set()
        elif event == zmq.EVENT_CLOSED:
            self._end(f"cannot connect to {self._source.endpoint}{self._hint()}")
        elif event == zmq.EVENT_DISCONNECTED:
            self._end("the connection to the publisher broke")
        else:
            self._end_hostile(f"{self._source.endpoint} does not speak ZMQ")

    def _on_live(self, parts: list[bytes]) -> None:
        self.frames += 1
        now = self._clock.now()
        if now - self._window_begun >= 1.0:
            self._window_begun, self._window_frames = now, 0
        self._window_frames += 1
        if self._window_frames > self._settings.frames_per_s:
            self._feed.count_malformed()
            self._end_hostile(f"a flood of more than {self._settings.frames_per_s} batches a second")
            return
        if len(parts) != 3 or len(parts[1]) != 8 or len(parts[0]) > TOPIC_LIMIT_BYTES:
            self._malformed("a message that is not topic, sequence and payload")
            return
        topic, sequence = self._source.topic, int.from_bytes(parts[1], "big")
        if topic is not None and parts[0] != topic:
            self._malformed("a message of another topic")
            return
        if sequence >= SEQUENCE_LIMIT or not parts[2]:
            self._malformed("a message without a sequence or a payload")
            return
        self._feed.live(sequence, parts[2])
        self._look_at_payload()

    def _on_replayed(self, parts: list[bytes]) -> None:
        if self._replay_over:
            return
        # (empty, sequence, payload) until 0.26, (empty, topic, sequence, payload) from 0.27
        if len(parts) not in (3, 4) or parts[0] or len(parts[-2]) != 8:
            self._malformed("a replay that is not sequence and payload")
            return
        self._replayed += 1
        if parts[-2] == END:
            self._replay_over = True
            self._feed.replay_ended()
            self._changed.set()
            return
        sequence = int.from_bytes(parts[-2], "big")
        if sequence >= SEQUENCE_LIMIT:
            self._malformed("a replay with a sequence that is none")
            return
        self._feed.replayed(sequence, parts[-1])
        self._look_at_payload()

    def _malformed(self, what: str) -> None:
        self._feed.count_malformed()
        self._look_at_payload(what)

    def _look_at_payload(self, what: str = "batches that are not msgpack as an engine writes it") -> None:
        if self._feed.malformed_in_a_row >= self._settings.malformed_limit:
            self._end_hostile(what)

    # --- replays

    async def _replay(self) -> None:
        feed, settings = self._feed, self._settings
        async with self._replays:
            start, feed.replay_from = feed.replay_from, None
            if self._ended is not None or start is None or self._source.replay_endpoint is None:
                return
            self._replay_over, self._late, self._replayed = False, "", 0
            dealer = self._socket(zmq.DEALER, settings.receive_frames)
            dealer.connect(self._source.replay_endpoint)
            socket = FrameSocket(self._loop, self._pump, dealer, 4, self._on_replayed, self._end_hostile)
            self._sockets.append(socket)
            self._timer = self._clock.call_later(settings.replay_timeout_s, self._is_late, "the replay took")
            self._watch_stall(-1)
            try:
                socket.send([b"", start.to_bytes(8, "big")])
                while not self._replay_over and feed.replay_from is None:
                    if self._late:
                        feed.replay_failed(self._late)
                        break
                    await self._wait()
            finally:
                self._replay_over = True
                self._sockets.remove(socket)
                socket.close()
                self._cancel_timers()

    def _watch_stall(self, seen: int) -> None:
        if self._replayed == seen:
            self._is_late("the replay stood still")
            return
        self._stall_timer = self._clock.call_later(self._settings.replay_stall_s, self._watch_stall, self._replayed)

    def _is_late(self, what: str) -> None:
        self._late = f"{what} longer than its time limit"
        self._changed.set()

    def _work(self) -> None:
        self._pump.ready(self._feed)

    # --- the end

    async def _wait(self) -> None:
        await self._changed.wait()
        self._changed.clear()
        if self._ended is not None:
            raise self._ended

    def _end(self, why: str, hostile: bool = False) -> None:
        if self._ended is None:
            self._ended = StreamEnded(why, hostile)
        self._changed.set()

    def _end_hostile(self, why: str) -> None:
        self._end(why, hostile=True)
        for socket in self._sockets:  # nothing more of it is read
            socket.close()

    def _hint(self) -> str:
        return f" ({self._source.hint})" if self._source.hint else ""

    def _cancel_timers(self) -> None:
        for timer in (self._timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        self._timer = self._stall_timer = None

    def _close(self) -> None:
        self._cancel_timers()
        if self._subscriber is not None and not self._subscriber.closed:
            self._subscriber.disable_monitor()
        for socket in self._sockets:
            socket.close()
        self._sockets.clear()


def _nothing() -> None:
    return None
