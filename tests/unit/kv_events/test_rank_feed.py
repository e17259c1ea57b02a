"""Each batch exactly once and in order, or the rank is forgotten and says so."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.clock import VirtualClock
from router.kv_events.rank_feed import ATTEMPTS, FeedState, HeldBytes, RankFeed
from router.kv_events.settings import IntakeSettings
from router.metrics import Metrics
from tests.unit.kv_events.recording_sink import RecordingSink

SETTINGS = IntakeSettings(held_frames=4, held_bytes=1000, stale_limit_s=30.0)


class Engine:
    """A publisher with a ring, without sockets. `name` is in its payloads, as an engine's time stamp is."""

    def __init__(self, name: str = "a", ring: int = 1000) -> None:
        self.name = name
        self.ring = ring
        self.sent: list[bytes] = []

    def batch(self) -> tuple[int, bytes]:
        self.sent.append(f"{self.name}{len(self.sent)}".encode())
        return len(self.sent) - 1, self.sent[-1]

    def replay(self, start: int) -> list[tuple[int, bytes]]:
        first = max(len(self.sent) - self.ring, start)
        return [(sequence, self.sent[sequence]) for sequence in range(first, len(self.sent))]


class Rig:
    def __init__(self, settings: IntakeSettings = SETTINGS, capacity: int | None = None) -> None:
        self.clock = VirtualClock()
        self.sink = RecordingSink()
        self.metrics = Metrics()
        self.held = HeldBytes(settings.held_bytes)
        self.rank = self.sink.add_rank("e", 0)
        self.feed = RankFeed("e", self.rank, self.sink, self.clock, settings, self.metrics, self.held, lambda: capacity)

    @property
    def has(self) -> list[bytes]:
        return self.sink.held[self.rank]

    def answer(self, engine: Engine) -> None:
        """Every replay that is wanted, to the end, and all held frames."""
        for _ in range(20):
            while self.feed.receive_one():
                pass
            if self.feed.replay_from is None:
                return
            start, self.feed.replay_from = self.feed.replay_from, None
            for frame in engine.replay(start):
                self.feed.replayed(*frame)
                if self.feed.replay_from is not None:
                    break
            else:
                self.feed.replay_ended()
        raise AssertionError("replays without end")

    def join(self, engine: Engine, can_replay: bool = True) -> None:
        self.feed.connected(can_replay)
        self.answer(engine)


def test_a_late_start_gets_everything_by_replay_and_live_frames_once() -> None:
    rig, engine = Rig(), Engine()
    for _ in range(3):
        engine.batch()
    rig.feed.connected(True)
    assert rig.feed.state is FeedState.REPLAYING
    rig.feed.live(*engine.batch())  # in the replay too
    rig.answer(engine)
    rig.feed.live(*engine.batch())
    assert rig.has == engine.sent
    assert (rig.feed.state, rig.feed.gaps, rig.feed.resyncs, rig.held.used) == (FeedState.LIVE, 0, 0, 0)


def test_a_gap_is_filled_by_replay() -> None:
    rig, engine = Rig(), Engine()
    rig.join(engine)
    rig.feed.live(*engine.batch())
    engine.batch()
    rig.feed.live(*engine.batch())
    assert rig.feed.replay_from == 0
    rig.answer(engine)
    assert rig.has == engine.sent
    assert (rig.feed.state, rig.feed.gaps, rig.feed.resyncs, rig.sink.clears) == (FeedState.LIVE, 0, 1, 0)


def test_a_gap_that_the_ring_lost_costs_all_knowledge_but_the_rings() -> None:
    rig, engine = Rig(capacity=4), Engine(ring=2)
    rig.join(engine)
    rig.feed.live(*engine.batch())
    for _ in range(4):
        engine.batch()
    rig.feed.live(*engine.batch())
    rig.answer(engine)
    assert rig.has == engine.sent[-2:]
    assert (rig.feed.state, rig.feed.gaps, rig.metrics.kv_event_gaps) == (FeedState.INCOMPLETE, 1, 1)
    assert "replay buffer" in rig.feed.why
    rig.feed.live(*engine.batch())
    assert rig.feed.state is FeedState.INCOMPLETE
    rig.feed.live(*engine.batch())  # the fourth block since: as many as the cache has
    assert rig.feed.state is FeedState.LIVE


def test_a_gap_of_exactly_the_ring_is_filled_on_one_connection() -> None:
    rig, engine = Rig(), Engine(ring=2)
    rig.join(engine)
    rig.feed.live(*engine.batch())
    engine.batch()
    rig.feed.live(*engine.batch())
    rig.answer(engine)
    assert rig.has == engine.sent
    assert rig.feed.state is FeedState.LIVE


def test_sequence_zero_again_is_another_process_and_forgets_at_once() -> None:
    rig, engine = Rig(), Engine()
    rig.join(engine)
    for _ in range(3):
        rig.feed.live(*engine.batch())
    other = Engine("b")
    rig.feed.live(*other.batch())
    assert rig.has == []
    rig.answer(other)
    assert rig.has == other.sent
    assert (rig.feed.state, rig.feed.gaps) == (FeedState.LIVE, 0)


def test_another_process_behind_a_broken_stream_is_known_by_its_payload_not_by_its_sequence() -> None:
    rig, engine = Rig(), Engine()
    rig.join(engine)
    for _ in range(3):
        rig.feed.live(*engine.batch())
    rig.feed.disconnected("cut")
    assert (rig.feed.state, len(rig.has)) == (FeedState.STALE, 3)
    other = Engine("b")
    for _ in range(9):
        other.batch()
    rig.join(other)
    assert rig.has == other.sent
    assert rig.feed.state is FeedState.LIVE


def test_another_process_with_fewer_batches_is_noticed_too() -> None:
    rig, engine = Rig(), Engine()
    rig.join(engine)
    for _ in range(3):
        rig.feed.live(*engine.batch())
    rig.feed.disconnected("cut")
    rig.join(Engine("b"))
    assert rig.has == []
    assert rig.feed.state is FeedState.LIVE


def test_the_same_process_after_a_broken_stream_goes_on_where_it_was() -> None:
    rig, engine = Rig(), Engine()
    rig.join(engine)
    rig.feed.live(*engine.batch())
    rig.feed.disconnected("cut")
    engine.batch()
    rig.join(engine)
    assert rig.has == engine.sent
    assert rig.sink.clears == 0
    assert rig.clock.pending == 0


def test_a_stream_that_stays_broken_is_forgotten_after_its_limit() -> None:
    rig, engine = Rig(), Engine()
    rig.join(engine)
    rig.feed.live(*engine.batch())
    rig.feed.disconnected("cut")
    rig.clock.advance(29.9)
    assert rig.has
    rig.clock.advance(0.2)
    assert rig.has == []
    assert rig.feed.state is FeedState.CONNECTING


def test_held_frames_are_bounded_and_those_dropped_come_by_another_replay() -> None:
    rig, engine = Rig(), Engine()
    rig.feed.connected(True)
    start, rig.feed.replay_from = rig.feed.replay_from, None
    assert start == 0
    for _ in range(10):
        rig.feed.live(*engine.batch())
    assert rig.feed.dropped == 10 - SETTINGS.held_frames
    assert rig.metrics.kv_events["e", "dropped_frame"] == rig.feed.dropped
    rig.feed.replay_ended()
    rig.answer(engine)
    assert rig.has == engine.sent
    assert (rig.feed.state, rig.held.used) == (FeedState.LIVE, 0)


def test_held_bytes_are_bounded_over_all_ranks() -> None:
    rig = Rig(IntakeSettings(held_frames=100, held_bytes=10))
    rig.feed.connected(True)
    rig.feed.live(0, b"x" * 10)
    rig.feed.live(1, b"x")
    assert (rig.held.used, rig.feed.dropped) == (10, 1)
    rig.feed.disconnected("cut")
    assert rig.held.used == 0


def test_a_replay_that_fails_leaves_the_rank_incomplete_with_what_came_live() -> None:
    rig, engine = Rig(), Engine()
    engine.batch()
    rig.feed.connected(True)
    rig.feed.replay_from = None
    live = engine.batch()
    rig.feed.live(*live)
    rig.feed.replay_failed("too slow")
    while rig.feed.receive_one():
        pass
    assert rig.has == [live[1]]
    assert (rig.feed.state, rig.feed.gaps, rig.feed.why) == (FeedState.INCOMPLETE, 1, "too slow")


def test_a_replay_cut_short_is_continued_where_it_got_to() -> None:
    rig, engine = Rig(), Engine()
    for _ in range(4):
        engine.batch()
    rig.feed.connected(True)
    rig.feed.replay_from = None
    for frame in engine.replay(0)[:2]:
        rig.feed.replayed(*frame)
    rig.feed.replay_failed("stood still")
    assert rig.feed.replay_from == 1
    rig.answer(engine)
    assert rig.has == engine.sent
    assert rig.feed.state is FeedState.LIVE


def test_replays_that_bring_nothing_end() -> None:
    rig = Rig()
    rig.feed.connected(True)
    rig.feed.live(7, b"x7")
    rig.answer(Engine())  # an engine without a ring: it always answers with the end alone
    assert rig.feed.state is FeedState.INCOMPLETE
    assert rig.has == [b"x7"]
    assert rig.feed.resyncs <= ATTEMPTS


def test_without_replay_it_is_incomplete_unless_it_sees_the_first_batch() -> None:
    rig, engine = Rig(), Engine()
    rig.join(engine, can_replay=False)
    assert rig.feed.state is FeedState.INCOMPLETE
    assert "replay_endpoint" in rig.feed.why
    rig.feed.live(5, b"x5")
    assert rig.feed.state is FeedState.INCOMPLETE
    rig.feed.live(7, b"x7")
    assert rig.has == [b"x7"]
    assert rig.feed.gaps == 1
    rig.feed.live(8, b"cleared")
    assert rig.feed.state is FeedState.LIVE


def test_without_replay_the_first_batch_of_all_makes_it_complete() -> None:
    rig, engine = Rig(), Engine()
    rig.join(engine, can_replay=False)
    rig.feed.live(*engine.batch())
    assert (rig.feed.state, rig.feed.why) == (FeedState.LIVE, "")


def test_a_malformed_batch_forgets_the_rank() -> None:
    rig, engine = Rig(), Engine()
    rig.join(engine)
    rig.feed.live(*engine.batch())
    rig.feed.live(1, b"broken")
    assert rig.has == []
    assert (rig.feed.malformed, rig.feed.malformed_in_a_row) == (1, 1)
    assert rig.feed.state is FeedState.INCOMPLETE
    rig.feed.live(2, b"good")
    assert rig.feed.malformed_in_a_row == 0


@given(st.lists(st.sampled_from(["send", "lose", "cut", "restart"]), max_size=40), st.sampled_from([2, 5, 1000]))
def test_whatever_happens_what_is_held_is_a_tail_of_what_the_engine_sent(steps: list[str], ring: int) -> None:
    rig, engine, lives = Rig(), Engine("0.", ring), 0
    rig.join(engine)
    for step in steps:
        if step == "restart":
            lives += 1
            engine = Engine(f"{lives}.", ring)
        if step in ("cut", "restart"):
            rig.feed.disconnected("cut")
            rig.join(engine)
        elif step == "lose":
            engine.batch()
        else:
            rig.feed.live(*engine.batch())
            rig.answer(engine)
    rig.feed.live(*engine.batch())
    rig.answer(engine)
    assert rig.has == engine.sent[len(engine.sent) - len(rig.has) :]
    assert rig.has
    if ring == 1000:
        assert rig.has == engine.sent
        assert rig.feed.state is FeedState.LIVE
    assert rig.held.used == 0


@pytest.mark.parametrize("sequence", [0, 1])
def test_a_lower_sequence_without_replay_is_another_process_too(sequence: int) -> None:
    rig, engine = Rig(), Engine()
    rig.join(engine, can_replay=False)
    for _ in range(3):
        rig.feed.live(*engine.batch())
    rig.feed.live(sequence, b"new")
    assert rig.has == [b"new"]
    assert rig.feed.state is (FeedState.LIVE if sequence == 0 else FeedState.INCOMPLETE)


def test_a_resync_forgets_all_and_hears_it_again_from_the_beginning() -> None:
    rig, engine = Rig(), Engine()
    rig.join(engine)
    for _ in range(3):
        rig.feed.live(*engine.batch())
    rig.feed.resync("wrong")
    assert (rig.has, rig.feed.state, rig.feed.replay_from) == ([], FeedState.REPLAYING, 0)
    rig.feed.live(*engine.batch())
    rig.answer(engine)
    assert rig.has == engine.sent
    assert (rig.feed.state, rig.feed.gaps, rig.held.used) == (FeedState.LIVE, 0, 0)


def test_a_resync_during_a_resync_changes_nothing() -> None:
    rig, engine = Rig(), Engine()
    rig.join(engine)
    for _ in range(3):
        rig.feed.live(*engine.batch())
    rig.feed.resync("wrong")
    asked, rig.feed.replay_from = rig.feed.resyncs, None
    first, *rest = engine.replay(0)
    rig.feed.replayed(*first)
    rig.feed.resync("wrong")
    assert (rig.has, rig.feed.replay_from, rig.feed.resyncs) == ([first[1]], None, asked)
    for frame in rest:
        rig.feed.replayed(*frame)
    rig.feed.replay_ended()
    rig.answer(engine)
    assert rig.has == engine.sent


def test_a_resync_while_a_gap_is_filled_keeps_nothing_of_before() -> None:
    rig, engine = Rig(), Engine()
    rig.join(engine)
    rig.feed.live(*engine.batch())
    engine.batch()
    rig.feed.live(*engine.batch())
    assert rig.feed.state is FeedState.REPLAYING
    rig.feed.resync("wrong")
    assert (rig.has, rig.feed.replay_from) == ([], 0)
    rig.answer(engine)
    assert rig.has == engine.sent
    assert rig.feed.state is FeedState.LIVE


def test_a_resync_of_a_broken_stream_forgets_at_once_and_the_next_one_brings_all() -> None:
    rig, engine = Rig(), Engine()
    rig.join(engine)
    rig.feed.live(*engine.batch())
    rig.feed.disconnected("cut")
    rig.feed.resync("wrong")
    assert (rig.has, rig.feed.state, rig.feed.why, rig.clock.pending) == ([], FeedState.CONNECTING, "cut", 0)
    rig.join(engine)
    assert rig.has == engine.sent
    assert rig.feed.state is FeedState.LIVE


def test_a_resync_without_replay_leaves_the_rank_incomplete_and_is_no_gap() -> None:
    rig, engine = Rig(), Engine()
    rig.join(engine, can_replay=False)
    rig.feed.live(*engine.batch())
    assert rig.feed.state is FeedState.LIVE
    rig.feed.resync("it lied")
    assert (rig.has, rig.feed.state, rig.feed.why, rig.feed.gaps) == ([], FeedState.INCOMPLETE, "it lied", 0)
    rig.feed.live(*engine.batch())
    assert rig.has == engine.sent[1:]


def test_a_switched_off_rank_has_nothing_to_resync() -> None:
    rig, engine = Rig(), Engine()
    rig.join(engine)
    rig.feed.forget(FeedState.OFF, "no events")
    rig.feed.resync("wrong")
    assert (rig.feed.state, rig.feed.why, rig.feed.replay_from) == (FeedState.OFF, "no events", None)
