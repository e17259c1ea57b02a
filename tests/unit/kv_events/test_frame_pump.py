"""Frames in turns: fair, no turn longer than its bounds, and time for everybody else between two of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from router.clock import VirtualClock
from router.kv_events import frame_pump
from router.kv_events.frame_pump import REST_S, TURN_FRAMES, TURN_S, FramePump


class Source:
    def __init__(self, name: str, frames: int, read: list[str], on_read: Callable[[], object] = lambda: None) -> None:
        self.name = name
        self.frames = frames
        self.read = read
        self.on_read = on_read

    def receive_one(self) -> bool:
        if not self.frames:
            return False
        self.frames -= 1
        self.read.append(self.name)
        self.on_read()
        return True


class Rig:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.clock = VirtualClock()
        self.pump = FramePump(loop, self.clock)
        self.read: list[str] = []

    def source(self, name: str, frames: int, on_read: Callable[[], object] = lambda: None) -> Source:
        return Source(name, frames, self.read, on_read)

    def turn(self) -> None:
        """What is due now, and nothing that comes after a rest."""
        self.loop.call_soon(self.loop.stop)
        self.loop.run_forever()


@pytest.fixture
def rig() -> Iterator[Rig]:
    loop = asyncio.new_event_loop()
    yield Rig(loop)
    loop.close()


def test_sources_are_read_in_turn_until_they_are_empty(rig: Rig) -> None:
    for source in (rig.source("a", 3), rig.source("b", 1), rig.source("c", 2)):
        rig.pump.ready(source)
    rig.turn()
    assert rig.read == ["a", "b", "c", "a", "c", "a"]
    assert rig.clock.pending == 0


def test_a_turn_ends_at_its_number_of_frames_and_goes_on_after_a_rest(rig: Rig) -> None:
    flood, quiet = rig.source("flood", TURN_FRAMES + 5), rig.source("quiet", 1)
    rig.pump.ready(flood)
    rig.turn()
    assert len(rig.read) == TURN_FRAMES
    rig.pump.ready(quiet)
    rig.turn()
    assert len(rig.read) == TURN_FRAMES  # whoever comes waits for the rest too
    rig.clock.advance(REST_S)
    assert rig.read[TURN_FRAMES:].count("flood") == 5
    assert rig.read[TURN_FRAMES + 1] == "quiet"
    assert rig.clock.pending == 0


def test_a_turn_ends_when_its_time_is_up_however_few_frames_it_took(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(frame_pump.time, "perf_counter", lambda: now)

    def take_long() -> None:
        nonlocal now
        now += TURN_S * 0.6

    rig.pump.ready(rig.source("slow", 5, take_long))
    rig.turn()
    assert len(rig.read) == 2
    rig.clock.advance(REST_S)
    assert len(rig.read) == 4
    rig.clock.advance(REST_S)
    assert len(rig.read) == 5
    assert rig.pump.longest_turn_s == pytest.approx(TURN_S * 1.2)


def test_one_that_is_ready_twice_is_read_once_a_round(rig: Rig) -> None:
    twice, other = rig.source("twice", 2), rig.source("other", 2)
    for source in (twice, twice, other, twice):
        rig.pump.ready(source)
    rig.turn()
    assert rig.read == ["twice", "other", "twice", "other"]


def test_one_that_reads_itself_ready_keeps_its_place_in_the_round(rig: Rig) -> None:
    again = rig.source("again", 2, lambda: rig.pump.ready(again))
    rig.pump.ready(again)
    rig.pump.ready(rig.source("other", 1))
    rig.turn()
    assert rig.read == ["again", "other", "again"]


def test_one_that_is_dropped_is_not_read(rig: Rig) -> None:
    gone, other = rig.source("gone", 1), rig.source("other", 1)
    rig.pump.ready(gone)
    rig.pump.ready(other)
    rig.pump.drop(gone)
    rig.pump.drop(gone)
    rig.turn()
    assert rig.read == ["other"]


def test_a_closed_pump_reads_nothing_and_leaves_no_timer(rig: Rig) -> None:
    rig.pump.ready(rig.source("flood", TURN_FRAMES + 1))
    rig.turn()
    rig.pump.close()
    rig.clock.advance(10.0)
    assert (len(rig.read), rig.clock.pending) == (TURN_FRAMES, 0)
