"""Passive health on a virtual clock: out by failures and by silence, back by a trial, never out altogether."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.backends.backend import Backend, EngineReport, State
from router.backends.ejection import ATTEMPTS_FAIL, CONNECTIONS_FAIL, SILENT, Ejector
from router.backends.in_flight import InFlight
from router.backends.registry import FleetEvent, Registry, StateChanged
from router.clock import VirtualClock


@dataclass(frozen=True)
class Settings:
    connect_failures: int = 2
    failed_attempts: int = 5
    interval_s: float = 2.0
    unhealthy_after: int = 3
    silence_s: float = 30.0
    ejection_s: float = 5.0
    ejection_max_s: float = 60.0


class Fleet:
    """A registry with an ejector, and attempts made as the proxy makes them."""

    def __init__(self, *names: str, models: dict[str, list[str]] | None = None) -> None:
        self.clock = VirtualClock()
        self.registry = Registry(self.clock)
        self.ejector = Ejector(self.registry, self.clock, Settings())
        self.changes: list[tuple[str, State, str]] = []
        self.registry.subscribe(self._note)
        self.backends = [self.add(name, (models or {}).get(name, ["m"])) for name in names]

    def _note(self, event: FleetEvent) -> None:
        if isinstance(event, StateChanged):
            self.changes.append((event.backend.name, event.after, event.backend.why))

    def add(self, name: str, models: list[str]) -> Backend:
        backend = self.registry.add(name, f"http://{name}", models=models)
        self.registry.set_state(backend, State.UP, "")
        return backend

    def start(self, backend: Backend) -> InFlight:
        guard = InFlight(backend)
        backend.trial_open = backend.state is State.TRIAL
        self.ejector.started(backend)
        return guard

    def refuse(self, backend: Backend) -> None:
        guard = self.start(backend)
        self.ejector.connect_failed(backend)
        guard.release()

    def answer(self, backend: Backend) -> None:
        guard = self.start(backend)
        self.ejector.answered(backend, 200)
        guard.release()

    def keep_answering(self, backend: Backend, seconds: int) -> None:
        for _ in range(seconds):
            self.clock.advance(1)
            self.answer(backend)

    def candidates(self, model: str = "m") -> list[str]:
        pool = self.registry.pool(model)
        assert pool is not None
        return [backend.name for backend in pool.candidates]


# --- connections that fail


def test_failures_in_a_row_eject() -> None:
    fleet = Fleet("a", "b")
    a = fleet.backends[0]
    fleet.refuse(a)
    assert a.state is State.UP
    fleet.refuse(a)
    assert a.state is State.EJECTED
    assert a.why == CONNECTIONS_FAIL
    assert fleet.candidates() == ["b"]


def test_an_answer_between_failures_starts_the_count_anew() -> None:
    fleet = Fleet("a", "b")
    a = fleet.backends[0]
    for _ in range(5):
        fleet.refuse(a)
        fleet.answer(a)
    assert a.state is State.UP


def test_an_ejection_ends_in_a_trial_that_an_answer_passes() -> None:
    fleet = Fleet("a", "b")
    a = fleet.backends[0]
    fleet.refuse(a)
    fleet.refuse(a)
    fleet.clock.advance(4.9)
    assert a.state is State.EJECTED
    fleet.clock.advance(0.2)
    assert a.state is State.TRIAL
    pool = fleet.registry.pool("m")
    assert pool is not None
    assert pool.needs_filter
    fleet.answer(a)
    assert a.state is State.UP
    assert a.why == ""


def ejection_length(fleet: Fleet, backend: Backend) -> float:
    """Seconds until its trial, to the half second."""
    assert backend.state is State.EJECTED
    start = fleet.clock.now()
    while backend.state is State.EJECTED:
        fleet.clock.advance(0.5)
    assert backend.state is State.TRIAL
    return fleet.clock.now() - start


def test_each_failed_trial_doubles_the_ejection_up_to_the_most() -> None:
    fleet = Fleet("a", "b")
    a = fleet.backends[0]
    fleet.refuse(a)
    fleet.refuse(a)
    lengths = []
    for _ in range(6):
        lengths.append(ejection_length(fleet, a))
        fleet.refuse(a)
    assert lengths == [5, 10, 20, 40, 60, 60]


@pytest.mark.parametrize("calm_s", [50, 70])
def test_only_a_calm_time_makes_the_next_ejection_short_again(calm_s: float) -> None:
    fleet = Fleet("a", "b")
    a = fleet.backends[0]
    fleet.refuse(a)
    fleet.refuse(a)
    assert ejection_length(fleet, a) == 5
    fleet.answer(a)
    fleet.clock.advance(calm_s)
    fleet.refuse(a)
    fleet.refuse(a)
    assert ejection_length(fleet, a) == (10 if calm_s < 60 else 5)


def test_a_trial_that_ends_without_a_byte_has_failed() -> None:
    fleet = Fleet("a", "b")
    a = fleet.backends[0]
    fleet.refuse(a)
    fleet.refuse(a)
    fleet.clock.advance(5)
    fleet.ejector.attempt_failed(a)
    assert a.state is State.EJECTED
    assert ejection_length(fleet, a) == 10


def test_attempts_that_fail_in_a_row_eject_a_backend_while_another_serves() -> None:
    fleet = Fleet("a", "b")
    a = fleet.backends[0]
    for _ in range(4):
        fleet.ejector.attempt_failed(a)
    fleet.answer(a)  # not in a row
    for _ in range(4):
        fleet.ejector.attempt_failed(a)
    assert a.state is State.UP
    fleet.ejector.attempt_failed(a)
    assert (a.state, a.why) == (State.EJECTED, ATTEMPTS_FAIL)


def test_server_errors_in_a_row_count_as_failed_attempts() -> None:
    fleet = Fleet("a", "b")
    a = fleet.backends[0]
    for _ in range(5):
        fleet.ejector.answered(a, 500)
    assert a.state is State.EJECTED


@pytest.mark.parametrize("status", [400, 404, 422, 429, 503])
def test_what_an_engine_says_of_a_request_or_of_its_own_limits_ejects_nobody(status: int) -> None:
    fleet = Fleet("a", "b")
    for _ in range(100):
        fleet.ejector.answered(fleet.backends[0], status)
    assert fleet.backends[0].state is State.UP


def test_where_all_fail_alike_it_is_what_the_clients_send_and_nobody_more_is_ejected() -> None:
    fleet = Fleet("a", "b", "c")
    for _ in range(4):
        for backend in fleet.backends:
            fleet.ejector.answered(backend, 500)
    for backend in fleet.backends:
        fleet.ejector.answered(backend, 500)
    assert sum(backend.serving for backend in fleet.backends) >= 1


def test_the_only_backend_of_a_model_is_not_ejected_for_its_errors() -> None:
    fleet = Fleet("a", "b", models={"a": ["m"], "b": ["other"]})
    for _ in range(100):
        fleet.ejector.answered(fleet.backends[0], 500)
    assert fleet.backends[0].state is State.UP


def test_requests_that_break_every_engine_take_out_a_minority() -> None:
    fleet = Fleet("a", "b", "c", "d", "e")
    for _ in range(20):
        for backend in fleet.backends:
            fleet.ejector.attempt_failed(backend)
    assert sum(b.state is State.UP for b in fleet.backends) >= 3


def test_an_engine_whose_reports_show_work_is_not_silent() -> None:
    """A long answer that is not streamed has no byte until its end."""
    fleet = Fleet("a", "b")
    a, b = fleet.backends
    guard = fleet.start(a)
    for _ in range(100):
        fleet.clock.advance(1)
        a.progressed_at = fleet.clock.now()
        fleet.answer(b)
    assert a.state is State.UP
    guard.release()


def test_a_report_shows_work_by_what_changed() -> None:
    idle = EngineReport(running=1.0, kv_usage=0.1, prompt_tokens=10.0)
    assert not EngineReport(running=1.0, kv_usage=0.1, prompt_tokens=10.0, at=5.0).shows_work_since(idle)
    assert EngineReport(running=1.0, kv_usage=0.2, prompt_tokens=10.0).shows_work_since(idle)


def test_where_nobody_else_serves_the_one_that_answered_its_last_check_does() -> None:
    """It was down, and waits for a second good check; then the last one that served dies."""
    fleet = Fleet("a", "b")
    a, b = fleet.backends
    fleet.registry.set_state(a, State.DOWN, "its health checks fail")
    a.check_ok = True
    for _ in range(2):
        fleet.refuse(b)
    assert a.state is State.UP
    assert b.state is State.EJECTED  # and no request goes to it for now


def test_a_backend_whose_last_check_failed_is_not_called_back() -> None:
    fleet = Fleet("a", "b")
    a, b = fleet.backends
    fleet.registry.set_state(a, State.DOWN, "its health checks fail")
    for _ in range(2):
        fleet.refuse(b)
    assert a.state is State.DOWN
    assert b.state is State.TRIAL


def test_of_the_ejected_the_one_that_answers_its_checks_goes_on_trial() -> None:
    fleet = Fleet("a", "b")
    a, b = fleet.backends
    a.check_ok, b.check_ok = True, False
    for backend in (a, b):
        for _ in range(2):
            fleet.refuse(backend)
    assert a.state is State.TRIAL
    assert b.state is State.EJECTED


def test_a_trial_that_is_answered_with_an_error_is_over() -> None:
    fleet = Fleet("a", "b")
    a = fleet.backends[0]
    fleet.registry.set_state(a, State.TRIAL, "on trial")
    fleet.ejector.answered(a, 500)
    assert a.state is State.EJECTED


def test_after_a_busy_answer_others_come_first_for_longer_each_time_in_a_row() -> None:
    fleet = Fleet("a", "b")
    a = fleet.backends[0]
    waits = []
    for _ in range(8):
        fleet.ejector.answered(a, 503)
        waits.append(a.busy_until - fleet.clock.now())
    assert waits == [0.25, 0.5, 1.0, 2.0, 4.0, 4.0, 4.0, 4.0]
    assert fleet.ejector.busy_until == a.busy_until
    fleet.answer(a)
    fleet.ejector.answered(a, 429)
    assert a.busy_until - fleet.clock.now() == 0.25


def test_what_waits_on_a_backend_that_is_down_and_silent_is_let_go() -> None:
    fleet = Fleet("a", "b")
    a = fleet.backends[0]
    told: list[Backend] = []
    fleet.ejector.on_silent = told.append
    guard = fleet.start(a)
    fleet.clock.advance(5)
    fleet.registry.set_state(a, State.DOWN, "its health checks fail")
    assert told == []  # its health was asked three times in six seconds: until then nobody knows
    fleet.clock.advance(2.5)
    assert told
    assert set(told) == {a}
    guard.release()
    told.clear()
    fleet.clock.advance(60)
    assert told == []


def test_what_still_sends_though_its_health_checks_fail_is_left_alone() -> None:
    fleet = Fleet("a", "b")
    a = fleet.backends[0]
    told: list[Backend] = []
    fleet.ejector.on_silent = told.append
    guard = fleet.start(a)
    fleet.registry.set_state(a, State.DOWN, "its health checks fail")
    for _ in range(20):
        fleet.clock.advance(1)
        a.last_byte_at = fleet.clock.now()
    assert told == []
    guard.release()


def test_failures_of_attempts_begun_before_the_ejection_do_not_lengthen_it() -> None:
    fleet = Fleet("a", "b")
    a = fleet.backends[0]
    for _ in range(50):
        fleet.refuse(a)
    assert ejection_length(fleet, a) == 5


def test_an_answer_during_an_ejection_does_not_end_it() -> None:
    fleet = Fleet("a", "b")
    a = fleet.backends[0]
    fleet.refuse(a)
    fleet.refuse(a)
    fleet.answer(a)
    assert a.state is State.EJECTED


def test_failures_never_set_a_starting_or_dead_backend_free() -> None:
    fleet = Fleet("b")
    a = fleet.registry.add("a", "http://a", models=["m"])
    fleet.refuse(a)
    fleet.refuse(a)
    assert a.state is State.STARTING
    fleet.registry.set_state(a, State.DOWN, "dead")
    fleet.refuse(a)
    fleet.answer(a)
    assert a.state is State.DOWN


# --- silence


def test_a_silent_backend_is_ejected_while_another_answers() -> None:
    fleet = Fleet("a", "b")
    a, b = fleet.backends
    fleet.start(a)
    fleet.keep_answering(b, 29)
    assert a.state is State.UP
    fleet.keep_answering(b, 3)
    assert a.state is State.EJECTED
    assert fleet.changes[-1] == ("a", State.EJECTED, SILENT)


def test_steady_traffic_to_a_hung_backend_does_not_hide_its_silence() -> None:
    fleet = Fleet("a", "b")
    a, b = fleet.backends
    for _ in range(32):
        fleet.start(a)
        fleet.keep_answering(b, 1)
    assert a.state is State.EJECTED


def test_each_byte_starts_the_silence_anew() -> None:
    fleet = Fleet("a", "b")
    a, b = fleet.backends
    fleet.start(a)
    for _ in range(5):
        fleet.keep_answering(b, 25)
        a.last_byte_at = fleet.clock.now()
    assert a.state is State.UP


def test_an_idle_backend_is_not_silent() -> None:
    fleet = Fleet("a", "b")
    a, b = fleet.backends
    fleet.keep_answering(b, 100)
    assert a.state is State.UP
    fleet.start(a)
    fleet.keep_answering(b, 25)
    assert a.state is State.UP


def test_silence_of_all_ejects_nobody() -> None:
    fleet = Fleet("a", "b")
    for backend in fleet.backends:
        fleet.start(backend)
    fleet.clock.advance(300)
    assert fleet.changes[2:] == []


def test_an_answer_of_another_model_is_no_measure() -> None:
    fleet = Fleet("a", "b", models={"a": ["m"], "b": ["n"]})
    a, b = fleet.backends
    fleet.start(a)
    fleet.keep_answering(b, 100)
    assert a.state is State.UP


def test_a_draining_backend_that_falls_silent_is_ejected_too() -> None:
    fleet = Fleet("a", "b")
    a, b = fleet.backends
    fleet.start(a)
    fleet.registry.drain("a")
    fleet.keep_answering(b, 32)
    assert a.state is State.EJECTED


def test_a_trial_that_falls_silent_is_ejected_for_longer() -> None:
    fleet = Fleet("a", "b")
    a, b = fleet.backends
    fleet.refuse(a)
    fleet.refuse(a)
    fleet.keep_answering(b, 6)
    assert a.state is State.TRIAL
    guard = fleet.start(a)
    fleet.keep_answering(b, 32)
    assert a.state is State.EJECTED
    guard.release()
    fleet.keep_answering(b, 8)
    assert a.state is State.EJECTED
    fleet.keep_answering(b, 3)
    assert a.state is State.TRIAL


def test_attempts_of_a_silent_backend_can_be_repeated_by_a_subscriber() -> None:
    fleet = Fleet("a", "b")
    a, b = fleet.backends
    open_attempts = [fleet.start(a), fleet.start(a)]
    repeated: list[str] = []

    def repeat_elsewhere(event: FleetEvent) -> None:
        if isinstance(event, StateChanged) and event.after is State.EJECTED and event.backend.why == SILENT:
            for guard in open_attempts:
                guard.release()
                repeated.extend(fleet.candidates())

    fleet.registry.subscribe(repeat_elsewhere)
    fleet.keep_answering(b, 32)
    assert repeated == ["b", "b"]
    assert a.in_flight == 0


# --- with the active checks


def test_an_active_check_that_finds_it_dead_ends_the_ejection() -> None:
    fleet = Fleet("a", "b")
    a = fleet.backends[0]
    fleet.refuse(a)
    fleet.refuse(a)
    fleet.registry.set_state(a, State.DOWN, "dead")
    fleet.clock.advance(100)
    assert a.state is State.DOWN
    fleet.registry.set_state(a, State.UP, "")
    fleet.refuse(a)
    assert a.state is State.UP


# --- never locked out


def test_the_last_backend_goes_on_trial_instead_of_out() -> None:
    fleet = Fleet("a")
    a = fleet.backends[0]
    fleet.refuse(a)
    fleet.refuse(a)
    assert a.state is State.TRIAL
    for _ in range(100):
        fleet.refuse(a)
        assert fleet.candidates() == ["a"]
    fleet.answer(a)
    assert a.state is State.UP


def test_when_all_are_out_the_least_bad_go_on_trial() -> None:
    fleet = Fleet("a", "b", "c")
    a, b, c = fleet.backends
    fleet.refuse(a)
    fleet.refuse(a)
    fleet.clock.advance(5)
    fleet.refuse(a)  # twice in a row now
    for backend in (b, c):
        fleet.refuse(backend)
        fleet.refuse(backend)
    assert fleet.candidates() == ["b", "c"]
    assert a.state is State.EJECTED


def test_a_model_of_which_only_ejected_and_dead_backends_are_left_is_rescued() -> None:
    fleet = Fleet("a", "b", "c", models={"a": ["m"], "b": ["m"], "c": ["other"]})
    a, b, _ = fleet.backends
    fleet.refuse(a)
    fleet.refuse(a)
    assert a.state is State.EJECTED
    fleet.registry.set_state(b, State.DOWN, "dead")
    assert a.state is State.TRIAL


@pytest.mark.parametrize("operation", ["drain", "remove"])
def test_taking_the_last_serving_backend_away_rescues_the_ejected_one(operation: str) -> None:
    fleet = Fleet("a", "b")
    a = fleet.backends[0]
    fleet.refuse(a)
    fleet.refuse(a)
    getattr(fleet.registry, operation)("b")
    assert a.state is State.TRIAL


def test_an_adapter_that_only_the_ejected_backend_has_keeps_it_on_trial() -> None:
    fleet = Fleet("a", "b", models={"a": ["m", "lora"], "b": ["m"]})
    a = fleet.backends[0]
    fleet.refuse(a)
    fleet.refuse(a)
    assert a.state is State.TRIAL
    assert fleet.candidates("lora") == ["a"]


def test_a_draining_backend_is_not_rescued() -> None:
    fleet = Fleet("a")
    a = fleet.backends[0]
    fleet.registry.drain("a")
    fleet.refuse(a)
    fleet.refuse(a)
    assert a.state is State.EJECTED


# --- nothing left behind


def test_a_removed_backend_leaves_nothing() -> None:
    fleet = Fleet("a", "b")
    a = fleet.backends[0]
    fleet.refuse(a)
    fleet.refuse(a)
    before = fleet.clock.pending
    fleet.registry.remove("a")
    assert fleet.clock.pending == before - 1
    fleet.ejector.connect_failed(a)
    fleet.clock.advance(100)
    assert a.state is State.EJECTED


def test_stop_leaves_no_timer() -> None:
    fleet = Fleet("a", "b")
    fleet.refuse(fleet.backends[0])
    fleet.refuse(fleet.backends[0])
    assert fleet.clock.pending == 2
    fleet.ejector.stop()
    assert fleet.clock.pending == 0


steps = st.lists(st.tuples(st.sampled_from(["refuse", "answer", "lose", "wait", "die", "live"]), st.integers(0, 2)))


@given(steps)
def test_a_pool_with_a_backend_that_is_not_dead_always_has_a_candidate(script: list[tuple[str, int]]) -> None:
    fleet = Fleet("a", "b", "c")
    actions: dict[str, Any] = {
        "refuse": fleet.refuse,
        "answer": fleet.answer,
        "lose": fleet.ejector.attempt_failed,
        "wait": lambda backend: fleet.clock.advance(7),
        "die": lambda backend: fleet.registry.set_state(backend, State.DOWN, "dead"),
        "live": lambda backend: backend.state is State.DOWN and fleet.registry.set_state(backend, State.UP, ""),
    }
    for action, number in script:
        actions[action](fleet.backends[number])
        dead = all(backend.state is State.DOWN for backend in fleet.backends)
        assert dead or fleet.candidates()
    fleet.ejector.stop()
    assert fleet.clock.pending == 0
