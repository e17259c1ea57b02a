"""The caps and the queue, with waiters that do as they are told."""

from __future__ import annotations

from router.backends.registry import Pool, Registry
from router.clock import VirtualClock
from router.errors import RouterError
from router.proxy.admission import Admission

REGISTRY = Registry(VirtualClock())
POOL = Pool(REGISTRY, "m", lambda backend: True)
OTHER = Pool(REGISTRY, "other", lambda backend: True)


class Waiting:
    """A Waiter. `room`: whether a backend would take it."""

    def __init__(self, admission: Admission, name: str, log: list[str], pool: Pool = POOL) -> None:
        self.admission = admission
        self.name = name
        self.log = log
        self.pool = pool
        self.room = True
        self.error: RouterError | None = None

    def try_place(self) -> bool:
        if not self.room:
            return False
        self.admission.taken()
        self.log.append(self.name)
        return True

    def on_rejected(self, error: RouterError) -> None:
        self.error = error


class Desk:
    def __init__(self, max_in_flight: int = 0, max_queue: int = 100) -> None:
        self.admission = Admission(max_in_flight, max_queue)
        self.placed: list[str] = []

    def enter(self, name: str, *, room: bool = True, pool: Pool = POOL) -> Waiting:
        waiter = Waiting(self.admission, name, self.placed, pool)
        waiter.room = room
        self.admission.enter(waiter)
        return waiter


def test_without_a_cap_everybody_is_placed_at_once() -> None:
    desk = Desk()
    for name in "abc":
        desk.enter(name)
    assert desk.placed == ["a", "b", "c"]
    assert desk.admission.in_flight == 3
    assert desk.admission.depth == 0


def test_the_cap_is_never_exceeded_and_a_free_place_goes_to_the_oldest() -> None:
    desk = Desk(max_in_flight=2)
    for name in "abcd":
        desk.enter(name)
    assert desk.placed == ["a", "b"]
    assert desk.admission.depth == 2
    desk.admission.released()
    assert desk.placed == ["a", "b", "c"]
    desk.admission.released()
    assert desk.placed == ["a", "b", "c", "d"]
    assert desk.admission.in_flight == 2
    assert not desk.admission.queued_by_model()


def test_nobody_overtakes_those_of_the_same_model() -> None:
    desk = Desk()
    first = desk.enter("a", room=False)
    desk.enter("b")
    assert desk.placed == []
    first.room = True
    desk.admission.pump()
    assert desk.placed == ["a", "b"]


def test_a_model_without_room_does_not_hold_up_another() -> None:
    desk = Desk()
    desk.enter("a", room=False)
    desk.enter("b", pool=OTHER)
    assert desk.placed == ["b"]
    assert desk.admission.queued_by_model() == {"m": 1}


def test_over_models_the_oldest_goes_first() -> None:
    desk = Desk(max_in_flight=1)
    desk.enter("x")
    desk.enter("a", pool=OTHER)
    desk.enter("b")
    desk.enter("c", pool=OTHER)
    for _ in range(3):
        desk.admission.released()
    assert desk.placed == ["x", "a", "b", "c"]


def test_the_queue_is_bounded_over_all_models_and_says_when_to_come_back() -> None:
    desk = Desk(max_in_flight=1, max_queue=2)
    desk.enter("x")
    desk.enter("a")
    desk.enter("b", pool=OTHER)
    late = desk.enter("c")
    assert late.error is not None
    assert (late.error.status, late.error.code) == (429, "queue_full")
    assert late.error.retry_after_s == 2
    assert desk.admission.depth == 2


def test_retry_after_is_between_a_second_and_a_minute() -> None:
    desk = Desk(max_in_flight=1, max_queue=500)
    desk.enter("x")
    for _ in range(500):
        desk.enter("a")
    late = desk.enter("late")
    assert late.error is not None
    assert late.error.retry_after_s == 60


def test_without_a_queue_nobody_waits() -> None:
    desk = Desk(max_in_flight=1, max_queue=0)
    desk.enter("x")
    assert desk.enter("a").error is not None
    assert desk.admission.depth == 0


def test_a_repeat_takes_the_place_that_its_failed_attempt_gives_back() -> None:
    desk = Desk(max_in_flight=1, max_queue=1)
    desk.enter("x")
    desk.enter("a")
    repeat = Waiting(desk.admission, "r", desk.placed)
    desk.admission.queue_repeat(repeat)
    assert repeat.error is None
    assert desk.admission.queued_by_model() == {POOL.model: 2}
    desk.admission.released()
    assert desk.placed == ["x", "r"]
    desk.admission.released()
    assert desk.placed == ["x", "r", "a"]


def test_a_repeat_that_has_to_wait_holds_up_nobody() -> None:
    """It avoids the backends that failed it; others do not."""
    desk = Desk()
    stuck, other = (Waiting(desk.admission, name, desk.placed) for name in ("stuck", "other"))
    stuck.room = False
    desk.admission.queue_repeat(stuck)
    desk.admission.queue_repeat(other)
    desk.enter("fresh")
    desk.admission.pump()
    assert desk.placed == ["fresh", "other"]
    assert desk.admission.depth == 1
    desk.admission.leave(stuck)
    assert desk.admission.depth == 0


def test_a_closed_admission_places_nobody() -> None:
    desk = Desk(max_in_flight=1)
    desk.enter("x")
    desk.enter("a")
    desk.admission.close()
    desk.admission.released()
    desk.enter("b")
    assert desk.placed == ["x"]


def test_one_who_leaves_is_not_placed_and_leaving_twice_changes_nothing() -> None:
    desk = Desk(max_in_flight=1)
    desk.enter("x")
    waiter = desk.enter("a")
    desk.admission.leave(waiter)
    desk.admission.leave(waiter)
    assert desk.admission.depth == 0
    desk.admission.released()
    assert desk.placed == ["x"]


def test_one_whose_placing_frees_a_place_lets_the_next_in_without_nesting() -> None:
    desk = Desk(max_in_flight=1)
    desk.enter("x")
    depth: list[int] = []

    class EndsAtOnce(Waiting):
        def try_place(self) -> bool:
            depth.append(len(depth))
            assert super().try_place()
            self.admission.released()
            return True

    for name in ("a", "b", "c"):
        desk.admission.enter(EndsAtOnce(desk.admission, name, desk.placed))
    desk.admission.released()
    assert desk.placed == ["x", "a", "b", "c"]
    assert desk.admission.in_flight == 0
    assert desk.admission.depth == 0
