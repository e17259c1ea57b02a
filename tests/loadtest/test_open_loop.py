"""The schedule on a virtual clock: requests go at their instants, whatever becomes of those before."""

from __future__ import annotations

import pytest

from loadtest.replay.open_loop import OpenLoop, due_times
from router.clock import VirtualClock


class Sent:
    """What a loop sent: number, due, and when, relative to its start. Nothing is answered unless told."""

    def __init__(self, times: list[float], *, max_in_flight: int = 100, busy_s: float = 0.0) -> None:
        self.clock = VirtualClock()
        self.start = self.clock.now()
        self.requests: list[tuple[int, float, float]] = []
        self.overs = 0
        self._busy_s = busy_s
        self.loop = OpenLoop(times, self.clock, self._send, self._over, max_in_flight=max_in_flight)
        self.loop.start()

    def _send(self, number: int, due: float) -> None:
        self.requests.append((number, due - self.start, self.clock.now() - self.start))
        self.clock.advance(self._busy_s)

    def _over(self) -> None:
        self.overs += 1


def test_each_request_goes_at_its_time_though_none_is_ever_answered():
    sent = Sent([0.0, 0.5, 0.5, 2.0])
    assert sent.requests == [(0, 0.0, 0.0)]
    sent.clock.advance(0.49)
    assert len(sent.requests) == 1
    sent.clock.advance(0.01)
    assert sent.requests[1:] == [(1, 0.5, 0.5), (2, 0.5, 0.5)]
    assert sent.overs == 0
    sent.clock.advance(10.0)
    assert sent.requests[3:] == [(3, 2.0, 2.0)]
    assert (sent.loop.sent, sent.loop.in_flight, sent.overs, sent.clock.pending) == (4, 4, 1, 0)


def test_what_is_due_at_the_bound_is_left_out_counted_and_not_sent_later():
    sent = Sent([0.0, 1.0, 2.0, 3.0, 4.0], max_in_flight=2)
    sent.clock.advance(2.5)
    assert [number for number, *_ in sent.requests] == [0, 1]
    assert (sent.loop.not_sent, sent.loop.in_flight) == (1, 2)
    sent.loop.ended()
    assert len(sent.requests) == 2
    sent.clock.advance(5.0)
    assert [number for number, *_ in sent.requests] == [0, 1, 3]
    assert (sent.loop.sent, sent.loop.not_sent, sent.overs) == (3, 2, 1)


def test_a_client_that_is_too_slow_says_so_and_keeps_the_instants():
    sent = Sent([0.0, 0.01, 0.02, 1.0], busy_s=0.04)
    sent.clock.advance(3.0)
    assert [due for _, due, _ in sent.requests] == pytest.approx([0.0, 0.01, 0.02, 1.0])
    assert [at for *_, at in sent.requests] == pytest.approx([0.0, 0.04, 0.08, 1.0])
    # 30 ms late is within what a timer may take, 60 ms is not.
    assert sent.loop.late == 1
    assert sent.loop.latest_s == pytest.approx(0.06)


def test_stopping_sends_nothing_more_and_leaves_no_timer():
    sent = Sent([0.0, 1.0, 2.0])
    sent.loop.stop()
    sent.clock.advance(5.0)
    assert (len(sent.requests), sent.overs, sent.clock.pending) == (1, 0, 0)


def test_no_request_at_all_is_over_at_once():
    assert Sent([]).overs == 1


def test_speed_scales_the_times():
    assert due_times([0.0, 3.0, 6.0], 2.0, spread=False) == [0.0, 1.5, 3.0]


def test_spreading_spaces_those_that_share_a_time_up_to_the_next():
    times = due_times([0.0, 0.0, 0.0, 3.0, 9.0, 9.0], 1.0, spread=True)
    # The last ones have no next: as wide as the gap before them.
    assert times == [0.0, 1.0, 2.0, 3.0, 9.0, 12.0]
    assert due_times([4.0, 4.0], 1.0, spread=True) == [4.0, 4.0]
    assert due_times([], 1.0, spread=True) == []
