"""The caps and the queue, with waiters that do as they are told."""

from __future__ import annotations

import pytest

from router.backends.backend import Backend, State
from router.backends.registry import Pool, Registry
from router.clock import VirtualClock
from router.errors import RouterError
from router.proxy.admission import HELD_TRIES, Admission

REGISTRY = Registry(VirtualClock())
for _name, _models in (("e0", ["m"]), ("e1", ["other"]), ("e2", ["third"])):
    REGISTRY.set_state(REGISTRY.add(_name, f"http://{_name}.test:1", models=_models), State.UP, "")
POOL, OTHER, THIRD = (pool for name in ("m", "other", "third") if (pool := REGISTRY.pool(name)) is not None)
NOBODY = Pool(REGISTRY, "nobody", lambda backend: False)


class Waiting:
    """A Waiter. `room`: whether a backend would take it."""

    def __init__(self, desk: Desk, name: str, pool: Pool) -> None:
        self.desk = desk
        self.name = name
        self.pool = pool
        self.room = True
        self.queued_at = desk.now
        self.held_s: float | None = None
        self.held_for: Backend | None = None
        self.best = POOL.candidates[0]  # the backend that it is held for
        self.busy_s: float | None = None  # the work for which it is held; None: its backend has time for it
        self.error: RouterError | None = None

    def try_place(self) -> bool:
        self.held_s = self.busy_s if self.room else None
        self.held_for = self.best
        if not self.room or self.held_s is not None:
            return False
        self.desk.admission.taken(self.desk.now)
        self.desk.placed.append(self.name)
        return True

    def still_held(self) -> bool:
        return self.held_for is self.best and self.busy_s is not None

    def on_rejected(self, error: RouterError) -> None:
        self.error = error


class Desk:
    def __init__(self, max_in_flight: int = 0, max_queue: int = 100) -> None:
        self.admission = Admission(max_in_flight, max_queue)
        self.placed: list[str] = []
        self.now = 1000.0

    def waiting(self, name: str, *, room: bool = True, pool: Pool = POOL) -> Waiting:
        waiter = Waiting(self, name, pool)
        waiter.room = room
        return waiter

    def enter(self, name: str, *, room: bool = True, pool: Pool = POOL) -> Waiting:
        waiter = self.waiting(name, room=room, pool=pool)
        self.admission.enter(waiter, self.now)
        return waiter

    def release(self, after_s: float = 0.0) -> None:
        self.now += after_s
        self.admission.released(self.now)

    def set_limits(self, max_in_flight: int, max_queue: int) -> None:
        self.admission.set_limits(max_in_flight, max_queue)
        self.pump()

    def pump(self) -> None:
        self.admission.pump(self.now)


def refusal(waiter: Waiting) -> tuple[int, str, int]:
    """Status, code and Retry-After."""
    error = waiter.error
    assert error is not None
    assert error.retry_after_s is not None
    return error.status, error.code, error.retry_after_s


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
    desk.release()
    assert desk.placed == ["a", "b", "c"]
    desk.release()
    assert desk.placed == ["a", "b", "c", "d"]
    assert desk.admission.in_flight == 2
    assert not desk.admission.queued_by_model()


def test_nobody_overtakes_those_of_the_same_model() -> None:
    desk = Desk()
    first = desk.enter("a", room=False)
    desk.enter("b")
    assert desk.placed == []
    first.room = True
    desk.pump()
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
        desk.release()
    assert desk.placed == ["x", "a", "b", "c"]


def test_the_queue_is_bounded_over_all_models_and_says_when_to_come_back() -> None:
    desk = Desk(max_in_flight=1, max_queue=2)
    desk.enter("x")
    desk.enter("a")
    desk.enter("b", pool=OTHER)
    late = desk.enter("c")
    assert refusal(late)[:2] == (429, "queue_full")
    assert desk.admission.depth == 2


# -- when to come back ------------------------------------------------------------------------------------------------


def full_desk(max_queue: int) -> Desk:
    """One place, and a full queue before it."""
    desk = Desk(max_in_flight=1, max_queue=max_queue)
    for number in range(max_queue + 1):
        desk.enter(f"w{number}")
    return desk


@pytest.mark.parametrize(("place_s", "expected"), [(0.2, 2), (1.0, 8), (2.5, 21), (30.0, 60)])
def test_retry_after_is_the_time_in_which_those_before_would_have_been_placed(place_s: float, expected: int) -> None:
    """As measured: each place was held for `place_s`, and eight wait."""
    desk = full_desk(8)
    for _ in range(5):
        desk.release(after_s=place_s)
        desk.enter("next")
    seconds = refusal(desk.enter("late"))[2]
    assert abs(seconds - expected) <= 1
    assert 1 <= seconds <= 60


def test_the_rate_of_long_ago_is_forgotten() -> None:
    desk = full_desk(8)
    for place_s in (0.1, 4.0):
        for _ in range(1000):
            desk.release(after_s=place_s)
            desk.enter("next")
    assert refusal(desk.enter("late"))[2] in range(28, 35)


def test_a_queue_that_stands_still_says_so() -> None:
    desk = full_desk(1)
    assert refusal(desk.enter("late"))[2] == 1
    desk.now += 20.0
    assert refusal(desk.enter("late"))[2] in range(20, 24)
    desk.now += 3600.0
    assert refusal(desk.enter("late"))[2] == 60


def test_without_a_queue_a_place_is_free_after_as_long_as_places_are_held() -> None:
    desk = Desk(max_in_flight=2, max_queue=0)
    for _ in range(10):
        desk.enter("a")
        desk.enter("b")
        desk.now += 8.0
        desk.release()
        desk.release()
    desk.enter("a")
    desk.enter("b")
    assert refusal(desk.enter("late"))[2] in (4, 5)


def test_each_model_s_line_has_its_own_rate() -> None:
    desk = Desk(max_queue=6)
    slow = [desk.enter(f"s{number}", room=False) for number in range(3)]
    fast = [desk.enter(f"f{number}", room=False, pool=OTHER) for number in range(3)]
    for number in range(20):
        desk.now += 1.0
        fast[0].room = True
        desk.pump()
        fast = [*fast[1:], desk.enter(f"g{number}", room=False, pool=OTHER)]
    slow[0].room = True
    desk.pump()
    desk.enter("s3", room=False)
    assert refusal(desk.enter("late", pool=OTHER))[2] in (3, 4)
    assert refusal(desk.enter("late"))[2] == 60


# -- fair between models ----------------------------------------------------------------------------------------------


def test_where_the_queue_is_full_the_longest_line_makes_room_for_a_shorter_one() -> None:
    desk = Desk(max_in_flight=1, max_queue=3)
    desk.enter("x")
    crowd = [desk.enter(f"a{number}") for number in range(3)]
    other = desk.enter("b", pool=OTHER)
    assert refusal(crowd[2])[:2] == (429, "queue_full")
    assert other.error is None
    assert desk.admission.queued_by_model() == {"m": 2, "other": 1}
    assert refusal(desk.enter("c", pool=OTHER))[:2] == (429, "queue_full")  # two and one, or one and two: no better
    third = desk.enter("d", pool=THIRD)
    assert refusal(crowd[1])[1] == "queue_full"
    assert third.error is None
    for _ in range(3):
        desk.release()
    assert desk.placed == ["x", "a0", "b", "d"]


def test_one_whose_model_nobody_serves_is_tried_at_once_though_all_places_are_taken() -> None:
    """It takes none: perhaps it is told that there is nothing to wait for."""
    desk = Desk(max_in_flight=1, max_queue=2)
    desk.enter("x")
    desk.enter("gone", pool=NOBODY)
    assert desk.placed == ["x", "gone"]


def test_one_who_waits_for_nobody_any_more_is_tried_though_all_places_are_taken() -> None:
    desk = Desk(max_in_flight=1, max_queue=2)
    desk.enter("x")
    desk.enter("a")
    waiter = desk.enter("gone", room=False, pool=NOBODY)
    desk.pump()
    assert desk.admission.depth == 2
    waiter.room = True
    desk.pump()
    assert desk.placed == ["x", "gone"]
    assert desk.admission.depth == 1


def test_one_whose_model_becomes_known_keeps_its_turn_in_the_line_of_that_model() -> None:
    desk = Desk(max_queue=10)
    first = desk.enter("first", room=False)
    late = desk.waiting("late", room=False, pool=Pool(REGISTRY, "", lambda backend: False))
    desk.admission.enter(late, desk.now)
    last = desk.enter("last", room=False)

    class Moves(Waiting):
        def try_place(self) -> bool:
            self.pool = POOL
            return super().try_place()

    late.__class__ = Moves
    desk.pump()
    assert desk.admission.queued_by_model() == {"m": 3}
    assert desk.admission.depth == 3
    for waiter in (first, late, last):
        waiter.room = True
    desk.pump()
    assert desk.placed == ["first", "late", "last"]
    assert not desk.admission.queued_by_model()


def test_a_place_given_back_asks_nobody_whose_model_nobody_serves() -> None:
    """A thousand requests for a model that is still loading must cost those nothing that run."""
    desk = Desk(max_queue=10)
    desk.enter("x")
    tries: list[str] = []

    class Counts(Waiting):
        def try_place(self) -> bool:
            tries.append(self.name)
            return super().try_place()

    waiter = Counts(desk, "gone", NOBODY)
    waiter.room = False
    desk.admission.enter(waiter, desk.now)
    assert tries == ["gone"]
    desk.release()
    assert tries == ["gone"]
    desk.pump()
    assert tries == ["gone", "gone"]


# -- other caps -------------------------------------------------------------------------------------------------------


def test_a_higher_cap_lets_those_in_who_wait() -> None:
    desk = Desk(max_in_flight=1)
    for name in "abcd":
        desk.enter(name)
    desk.set_limits(3, 100)
    assert desk.placed == ["a", "b", "c"]
    desk.set_limits(0, 100)
    assert desk.placed == ["a", "b", "c", "d"]


def test_lower_caps_send_nobody_away_and_let_nobody_in_until_there_are_fewer() -> None:
    desk = Desk(max_in_flight=4, max_queue=4)
    for name in "abcdefgh":
        desk.enter(name)
    desk.set_limits(1, 1)
    assert (desk.admission.in_flight, desk.admission.depth) == (4, 4)
    assert refusal(desk.enter("late", pool=OTHER))[1] == "queue_full"
    for _ in range(3):
        desk.release()
    assert desk.placed == list("abcd")
    desk.release()
    assert desk.placed == list("abcde")
    assert desk.admission.depth == 3


def test_without_a_queue_nobody_waits() -> None:
    desk = Desk(max_in_flight=1, max_queue=0)
    desk.enter("x")
    assert desk.enter("a").error is not None
    assert desk.admission.depth == 0


def test_a_repeat_takes_the_place_that_its_failed_attempt_gives_back() -> None:
    desk = Desk(max_in_flight=1, max_queue=1)
    desk.enter("x")
    desk.enter("a")
    repeat = desk.waiting("r")
    desk.admission.queue_repeat(repeat)
    assert repeat.error is None
    assert desk.admission.queued_by_model() == {POOL.model: 2}
    desk.release()
    assert desk.placed == ["x", "r"]
    desk.release()
    assert desk.placed == ["x", "r", "a"]


def test_a_repeat_that_has_to_wait_holds_up_nobody() -> None:
    """It avoids the backends that failed it; others do not."""
    desk = Desk()
    stuck, other = (desk.waiting(name) for name in ("stuck", "other"))
    stuck.room = False
    desk.admission.queue_repeat(stuck)
    desk.admission.queue_repeat(other)
    desk.enter("fresh")
    desk.pump()
    assert desk.placed == ["fresh", "other"]
    assert desk.admission.depth == 1
    desk.admission.leave(stuck)
    assert desk.admission.depth == 0


def test_a_closed_admission_places_nobody() -> None:
    desk = Desk(max_in_flight=1)
    desk.enter("x")
    desk.enter("a")
    desk.admission.close()
    desk.release()
    desk.enter("b")
    assert desk.placed == ["x"]


def test_one_who_leaves_is_not_placed_and_leaving_twice_changes_nothing() -> None:
    desk = Desk(max_in_flight=1)
    desk.enter("x")
    waiter = desk.enter("a")
    desk.admission.leave(waiter)
    desk.admission.leave(waiter)
    assert desk.admission.depth == 0
    desk.release()
    assert desk.placed == ["x"]


def test_one_whose_placing_frees_a_place_lets_the_next_in_without_nesting() -> None:
    desk = Desk(max_in_flight=1)
    desk.enter("x")
    depth: list[int] = []

    class EndsAtOnce(Waiting):
        def try_place(self) -> bool:
            depth.append(len(depth))
            assert super().try_place()
            desk.release()
            return True

    for name in ("a", "b", "c"):
        desk.admission.enter(EndsAtOnce(desk, name, POOL), desk.now)
    desk.release()
    assert desk.placed == ["x", "a", "b", "c"]
    assert desk.admission.in_flight == 0
    assert desk.admission.depth == 0


def test_those_whose_model_nobody_has_told_yet_give_way_to_a_known_one() -> None:
    desk = Desk(max_in_flight=1, max_queue=3)
    desk.enter("runs")
    unknown = [desk.enter(f"unknown {n}", room=False, pool=REGISTRY.waiting_pool()) for n in range(3)]
    known = desk.enter("known")
    assert known.error is None
    assert [waiter.error is not None for waiter in unknown] == [False, False, True]
    assert desk.admission.depth == 3
    another = desk.enter("unknown 4", room=False, pool=REGISTRY.waiting_pool())
    assert another.error is not None
    desk.release()
    assert desk.placed == ["runs", "known"]


# --- the held line


def held(desk: Desk, name: str, work_s: float, pool: Pool = POOL) -> Waiting:
    waiter = desk.waiting(name, pool=pool)
    waiter.busy_s = work_s
    desk.admission.enter(waiter, desk.now)
    return waiter


def test_one_that_is_held_waits_and_holds_up_nobody() -> None:
    desk = Desk()
    waiter = held(desk, "held", 1.0)
    desk.enter("free")
    assert (desk.placed, desk.admission.depth, desk.admission.holds) == (["free"], 1, True)
    assert desk.admission.queued_by_model() == {"m": 1}
    desk.admission.work_done(desk.now)
    assert desk.placed == ["free"]
    waiter.busy_s = None
    desk.admission.work_done(desk.now)
    assert (desk.placed, desk.admission.depth, desk.admission.holds) == (["free", "held"], 0, False)


def test_of_those_held_the_shortest_goes_first_and_waiting_makes_up_for_length() -> None:
    desk = Desk()
    old = held(desk, "long and old", 3.0)
    desk.now += 10.0  # worth 2.5 s
    waiters = [old, held(desk, "long", 3.0), held(desk, "short", 0.4), held(desk, "middle", 1.0)]
    for _ in range(4):
        desk.admission.work_done(desk.now)
    assert desk.placed == []
    for waiter in waiters:
        waiter.busy_s = None
    desk.admission.work_done(desk.now)
    assert desk.placed == ["short", "long and old", "middle", "long"]


def test_one_that_is_held_again_keeps_its_time() -> None:
    desk = Desk()
    old = held(desk, "old", 2.0)
    desk.now += 20.0
    desk.admission.work_done(desk.now)
    young = held(desk, "young", 1.0)
    old.busy_s = young.busy_s = None
    desk.admission.work_done(desk.now)
    assert desk.placed == ["old", "young"]


def test_the_held_line_is_bounded_by_the_queue_and_gives_way_to_a_shorter_one() -> None:
    desk = Desk(max_queue=2)
    waiters = [held(desk, name, 1.0) for name in "abc"]
    assert [waiter.error is not None for waiter in waiters] == [False, False, True]
    other = held(desk, "other", 1.0, OTHER)
    assert other.error is None
    assert waiters[1].error is not None  # the youngest of the longest line
    assert desk.admission.depth == 2


def test_one_that_leaves_the_held_line_is_not_placed() -> None:
    desk = Desk()
    waiter = held(desk, "gone", 1.0)
    waiter.busy_s = None
    desk.admission.leave(waiter)
    desk.admission.leave(waiter)
    desk.admission.work_done(desk.now)
    assert (desk.placed, desk.admission.depth, desk.admission.holds) == ([], 0, False)


def test_the_held_keep_to_the_cap_and_to_the_end() -> None:
    desk = Desk(max_in_flight=1)
    waiter = held(desk, "held", 1.0)
    desk.enter("running")
    waiter.busy_s = None
    desk.admission.work_done(desk.now)
    assert desk.placed == ["running"]
    desk.release()
    assert desk.placed == ["running", "held"]
    second = held(desk, "second", 1.0)
    second.busy_s = None
    desk.admission.close()
    desk.release()
    assert desk.placed == ["running", "held"]


def test_only_the_first_few_are_tried_at_each_chance() -> None:
    desk = Desk()
    tried: list[str] = []

    class Counting(Waiting):
        def try_place(self) -> bool:
            tried.append(self.name)
            return super().try_place()

    for number in range(HELD_TRIES + 5):
        waiter = Counting(desk, str(number), POOL)
        waiter.busy_s = float(number)
        desk.admission.enter(waiter, desk.now)
    tried.clear()
    desk.admission.work_done(desk.now)
    assert tried == [str(number) for number in range(HELD_TRIES)]


def test_one_held_whose_backends_are_full_waits_with_the_others() -> None:
    desk = Desk()
    waiter = held(desk, "held", 1.0)
    waiter.room = False
    desk.admission.work_done(desk.now)
    assert (desk.admission.holds, desk.admission.depth) == (False, 1)
    waiter.room, waiter.busy_s = True, None
    desk.admission.pump(desk.now)
    assert desk.placed == ["held"]


def test_all_that_their_backends_have_time_for_are_placed_at_one_chance() -> None:
    desk = Desk()
    waiters = [held(desk, str(number), float(number)) for number in range(3 * HELD_TRIES)]
    for waiter in waiters:
        waiter.busy_s = None
    desk.admission.work_done(desk.now)
    assert desk.placed == [waiter.name for waiter in waiters]
    assert (desk.admission.depth, desk.admission.holds) == (0, False)


def test_those_held_for_one_backend_do_not_keep_others_from_another() -> None:
    desk = Desk()
    other_backend = THIRD.candidates[0]
    for number in range(2 * HELD_TRIES):
        held(desk, str(number), 0.1)
    last = desk.waiting("last")
    last.busy_s, last.best = 9.0, other_backend
    desk.admission.enter(last, desk.now)
    last.busy_s = None
    desk.admission.work_done(desk.now)
    assert desk.placed == ["last"]


def test_choices_in_vain_are_bounded_where_backends_look_free() -> None:
    desk = Desk()
    tried: list[str] = []

    class Fickle(Waiting):
        def try_place(self) -> bool:
            tried.append(self.name)
            return super().try_place()

        def still_held(self) -> bool:
            return False

    for number in range(10 * HELD_TRIES):
        waiter = Fickle(desk, str(number), POOL)
        waiter.busy_s = float(number)
        desk.admission.enter(waiter, desk.now)
    tried.clear()
    desk.admission.work_done(desk.now)
    assert len(tried) == 2 * HELD_TRIES
    assert desk.admission.depth == 10 * HELD_TRIES


def test_the_youngest_makes_room_whoever_was_tried_last() -> None:
    desk = Desk(max_queue=3)
    waiters = [held(desk, name, work_s) for name, work_s in (("old", 3.0), ("middle", 2.0), ("young", 1.0))]
    desk.admission.work_done(desk.now)  # each is held again
    held(desk, "other", 1.0, OTHER)
    assert [waiter.name for waiter in waiters if waiter.error is not None] == ["young"]


def test_the_youngest_of_a_model_makes_room_be_it_held_or_in_line() -> None:
    desk = Desk(max_queue=4)
    first = held(desk, "held", 1.0)
    line = [desk.enter(name, room=False) for name in "ab"]
    last = desk.waiting("held later")
    last.busy_s = 1.0
    desk.admission.enter(last, desk.now)  # waits in line, behind those of its model
    for waiter in line:
        waiter.room, waiter.busy_s = True, 1.0
    desk.pump()
    assert desk.admission.queued_by_model() == {"m": 4}
    held(desk, "other", 1.0, OTHER)
    assert [w.name for w in (first, *line, last) if w.error is not None] == ["held later"]


def test_one_that_is_held_is_not_overtaken_for_ever_by_those_who_wait_for_a_place() -> None:
    desk = Desk(max_in_flight=1)
    waiter = held(desk, "held", 5.0)
    desk.enter("running")
    for name in "ab":
        desk.enter(name)
    waiter.busy_s = None
    desk.admission.work_done(desk.now)  # its backend has time, but there is no place
    assert desk.placed == ["running"]
    desk.release()
    assert desk.placed == ["running", "held"]
    assert (desk.admission.depth, desk.admission.holds) == (2, False)


def test_what_was_waited_in_line_counts_when_it_is_held() -> None:
    desk = Desk()
    old = desk.enter("old", room=False)
    desk.now += 20.0  # worth 5 s
    old.room, old.busy_s = True, 4.0
    desk.pump()
    young = held(desk, "young", 1.0)
    old.busy_s = young.busy_s = None
    desk.admission.work_done(desk.now)
    assert desk.placed == ["old", "young"]


def test_one_held_whose_backends_are_full_keeps_its_place_before_those_who_came_later() -> None:
    desk = Desk()
    waiter = held(desk, "held", 1.0)
    later = desk.enter("later", room=False)
    waiter.room = False
    desk.admission.work_done(desk.now)
    waiter.room, waiter.busy_s, later.room = True, None, True
    desk.pump()
    assert desk.placed == ["held", "later"]
