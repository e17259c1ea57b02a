"""The fleet's own bookkeeping: what may be chosen, what is known, who is told."""

from __future__ import annotations

import logging
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.backends.backend import Backend, State
from router.backends.in_flight import InFlight
from router.backends.registry import (
    BACKENDS_LIMIT,
    START_PATIENCE_S,
    BackendAdded,
    BackendRemoved,
    DrainChanged,
    FleetEvent,
    ModelsChanged,
    Reconfigured,
    Registry,
    StateChanged,
    split_url,
)
from router.clock import VirtualClock


def entry(model: str, *, root: str | None = None, parent: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"id": model, "object": "model", "created": 1, "root": root, "parent": parent, **fields}


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def registry(clock: VirtualClock) -> Registry:
    return Registry(clock)


def serving(registry: Registry, name: str, *models: str, **options: Any) -> Backend:
    """A backend that is up and listed `models`."""
    backend = registry.add(name, f"http://{name}:8000", **options)
    registry.set_state(backend, State.UP, "")
    registry.set_models(backend, [entry(model) for model in models])
    return backend


def pool_names(registry: Registry, model: str) -> list[str]:
    pool = registry.pool(model)
    assert pool is not None
    return [backend.name for backend in pool.candidates]


# --- pools


def test_a_pool_holds_the_backends_that_serve_and_list_the_model(registry: Registry) -> None:
    serving(registry, "a", "m")
    b = serving(registry, "b", "m", "other")
    assert pool_names(registry, "m") == ["a", "b"]
    assert pool_names(registry, "other") == ["b"]
    registry.set_state(b, State.DOWN, "3 health checks failed")
    assert pool_names(registry, "m") == ["a"]
    pool = registry.pool("other")
    assert pool is not None
    assert pool.candidates == ()
    assert pool.members == (b,)


def test_a_held_pool_follows_every_change(registry: Registry) -> None:
    a = serving(registry, "a", "m")
    pool = registry.pool("m")
    assert pool is not None
    registry.drain("a")
    assert pool.candidates == ()
    registry.undrain("a")
    b = serving(registry, "b", "m")
    assert pool.candidates == (a, b)
    registry.set_models(b, [entry("n")])
    assert pool.candidates == (a,)
    assert registry.pool("m") is pool
    registry.remove("a")
    assert pool.candidates == ()
    assert pool.members == ()
    assert registry.pool("m") is None


def test_candidates_are_the_same_tuple_until_the_fleet_changes(registry: Registry) -> None:
    serving(registry, "a", "m")
    pool = registry.pool("m")
    assert pool is not None
    assert pool.candidates is pool.candidates


def test_a_backend_on_trial_is_a_candidate_that_needs_the_filter(registry: Registry) -> None:
    a = serving(registry, "a", "m")
    pool = registry.pool("m")
    assert pool is not None
    assert not pool.needs_filter
    registry.set_state(a, State.TRIAL, "half-open")
    assert pool.needs_filter
    assert pool.candidates == (a,)
    registry.drain("a")
    assert not pool.needs_filter


def test_starting_and_ejected_backends_are_no_candidates(registry: Registry) -> None:
    a = registry.add("a", "http://a", models=["m"])
    assert pool_names(registry, "m") == []
    registry.set_state(a, State.UP, "")
    assert pool_names(registry, "m") == ["a"]
    registry.set_state(a, State.EJECTED, "silent")
    assert pool_names(registry, "m") == []


def test_an_adapter_has_its_own_pool(registry: Registry) -> None:
    a = serving(registry, "a")
    registry.set_models(a, [entry("base"), entry("lora", parent="base")])
    serving(registry, "b", "base")
    assert pool_names(registry, "lora") == ["a"]
    assert pool_names(registry, "base") == ["a", "b"]


def test_the_pool_of_all_backends_has_those_without_models_too(registry: Registry) -> None:
    serving(registry, "a", "m")
    b = registry.add("b", "http://b")
    registry.set_state(b, State.UP, "")
    assert [backend.name for backend in registry.any_pool().candidates] == ["a", "b"]
    assert registry.any_pool() is registry.any_pool()


# --- a body without a model


def default_names(registry: Registry) -> list[str] | None:
    pool = registry.default_pool()
    return None if pool is None else [backend.name for backend in pool.candidates]


def test_one_base_model_with_adapters_is_the_default(registry: Registry) -> None:
    a = serving(registry, "a")
    registry.set_models(
        a, [entry("base", root="/w"), entry("l1", root="/l1", parent="base"), entry("l2", parent="base")]
    )
    serving(registry, "b", "base")
    assert default_names(registry) == ["a", "b"]


def test_further_names_of_one_root_are_one_model(registry: Registry) -> None:
    a = serving(registry, "a")
    registry.set_models(a, [entry("x", root="/w"), entry("y", root="/w")])
    b = serving(registry, "b")
    registry.set_models(b, [entry("y", root="/elsewhere")])
    c = serving(registry, "c")
    registry.set_models(c, [entry("z", root="/elsewhere")])
    assert default_names(registry) == ["a", "b", "c"]
    assert registry.default_pool() is registry.default_pool()


def test_models_linked_only_by_a_later_entry_are_one_model(registry: Registry) -> None:
    serving(registry, "a", "x")
    serving(registry, "b", "y")
    assert default_names(registry) is None
    c = serving(registry, "c")
    registry.set_models(c, [entry("x", root="/w"), entry("y", root="/w")])
    assert default_names(registry) == ["a", "b", "c"]


def test_two_base_models_give_no_default(registry: Registry) -> None:
    serving(registry, "a", "m")
    serving(registry, "b", "n")
    assert default_names(registry) is None
    registry.remove("b")
    assert default_names(registry) == ["a"]


def test_an_empty_fleet_has_no_default(registry: Registry) -> None:
    assert registry.default_pool() is None
    registry.add("a", "http://a")
    assert registry.default_pool() is None


def test_the_default_stays_while_its_backend_is_down(registry: Registry) -> None:
    a = serving(registry, "a", "m")
    registry.set_state(a, State.DOWN, "dead")
    assert default_names(registry) == []


def test_a_default_pool_follows_a_model_that_went_and_came_back(registry: Registry) -> None:
    a = serving(registry, "a", "m")
    assert default_names(registry) == ["a"]
    registry.set_models(a, [])
    assert default_names(registry) is None
    registry.set_models(a, [entry("m")])
    assert default_names(registry) == ["a"]
    assert registry.default_pool() is registry.pool("m")


# --- what is known


def test_a_model_of_a_backend_that_is_down_stays_known(registry: Registry) -> None:
    a = serving(registry, "a", "zebra", "ant")
    registry.set_state(a, State.DOWN, "dead")
    assert registry.known_models() == ["ant", "zebra"]
    registry.set_models(a, [entry("ant")])
    assert registry.known_models() == ["ant"]
    registry.remove("a")
    assert registry.known_models() == []


def test_models_are_unknown_until_each_backend_told_them(registry: Registry) -> None:
    assert not registry.models_unknown
    a = registry.add("a", "http://a")
    registry.add("b", "http://b", models=["m"])
    assert registry.models_unknown
    registry.set_models(a, [])
    assert not registry.models_unknown


def test_a_backend_that_never_told_and_is_being_removed_hides_no_model(registry: Registry) -> None:
    a = registry.add("a", "http://a")
    guard = InFlight(a)
    registry.remove("a")
    assert not registry.models_unknown
    guard.release()


# --- the listing


def listed(registry: Registry) -> list[dict[str, Any]]:
    answer = orjson.loads(registry.listing())
    assert answer["object"] == "list"
    data = answer["data"]
    assert isinstance(data, list)
    return data


def test_the_listing_is_the_union_and_the_first_engine_wins(registry: Registry) -> None:
    a = serving(registry, "a")
    registry.set_models(a, [entry("m", max_model_len=1024, permission=[{"id": "p"}])])
    b = serving(registry, "b")
    registry.set_models(b, [entry("m", max_model_len=2048), entry("n", extra={"deep": [1, None]})])
    assert listed(registry) == [
        entry("m", max_model_len=1024, permission=[{"id": "p"}]),
        entry("n", extra={"deep": [1, None]}),
    ]


def test_the_listing_survives_a_dead_and_a_silent_backend(registry: Registry) -> None:
    a = serving(registry, "a", "m")
    registry.set_state(a, State.DOWN, "dead")
    registry.add("b", "http://b")
    assert [e["id"] for e in listed(registry)] == ["m"]


def test_an_alias_is_listed_with_its_model_s_entry_while_that_is_known(registry: Registry) -> None:
    a = serving(registry, "a")
    registry.set_models(a, [entry("m", max_model_len=1024), entry("gpt", root="other")])
    registry.set_aliases({"x": "m", "gpt": "m", "lost": "nobody"})
    aliased = [entry("m", max_model_len=1024), entry("gpt", max_model_len=1024), entry("x", max_model_len=1024)]
    assert listed(registry) == aliased
    assert registry.known_models() == ["gpt", "m", "x"]
    registry.set_aliases({})
    assert listed(registry) == [aliased[0], entry("gpt", root="other")]
    registry.set_aliases({"x": "m"})
    registry.remove("a")
    assert listed(registry) == []
    assert registry.known_models() == []


# --- what seeds a prompt's hashes


def seeds_of(registry: Registry, *names: str) -> list[str]:
    seeds = registry.prompt_seeds()
    return [(seeds.names or {}).get(name, name.encode()).decode() for name in names]


def test_all_names_of_one_base_model_have_one_seed_and_an_adapter_its_own(registry: Registry) -> None:
    a, b = serving(registry, "a"), serving(registry, "b")
    registry.set_models(a, [entry("m", root="/w"), entry("m-too", root="/w"), entry("sql", root="/l", parent="m")])
    registry.set_models(b, [entry("m", root="/elsewhere"), entry("third", root="/elsewhere")])
    registry.set_aliases({"x": "m-too", "y": "sql", "lost": "nobody"})
    assert seeds_of(registry, "m", "m-too", "third", "x", "sql", "y") == ["m", "m", "m", "m", "sql", "sql"]
    assert registry.prompt_seeds().default == b"m"
    serving(registry, "c", "another")
    assert registry.prompt_seeds().default == b""
    assert seeds_of(registry, "m-too", "another") == ["m", "another"]


def test_one_name_alone_needs_no_map(registry: Registry) -> None:
    serving(registry, "a", "m")
    serving(registry, "b", "m")
    assert registry.prompt_seeds().names is None
    assert registry.prompt_seeds().default == b"m"


def test_a_name_that_stands_for_others_stands_on_when_the_fleet_changes(registry: Registry) -> None:
    a, b = serving(registry, "a"), serving(registry, "b")
    registry.set_models(a, [entry("m", root="/w"), entry("m-too", root="/w")])
    registry.set_models(b, [entry("m-too", root="/w"), entry("m", root="/w")])
    assert seeds_of(registry, "m-too") == ["m"]
    registry.remove("a")
    assert seeds_of(registry, "m-too", "m") == ["m", "m"]


# --- how long nobody has served, and whether somebody is coming


def test_an_outage_lasts_since_the_last_one_stopped_serving(registry: Registry, clock: VirtualClock) -> None:
    assert registry.outage_s(()) == 0.0
    a, b = serving(registry, "a", "m"), serving(registry, "b", "m")
    clock.advance(10.0)
    registry.set_state(a, State.DOWN, "dead")
    clock.advance(5.0)
    registry.drain("b")
    clock.advance(2.0)
    registry.set_state(a, State.DOWN, "still dead")
    registry.set_state(a, State.EJECTED, "and silent")
    assert registry.outage_s([a, b]) == 2.0
    assert registry.outage_s([a]) == 7.0
    registry.undrain("b")
    clock.advance(1.0)
    registry.remove("b")
    registry.remove("a")
    clock.advance(4.0)
    assert registry.backends == ()
    assert registry.outage_s(()) == 4.0


def test_models_are_awaited_from_those_that_are_just_starting(registry: Registry, clock: VirtualClock) -> None:
    assert not registry.models_awaited()
    a = registry.add("a", "http://a")
    registry.add("b", "http://b", models=["m"])
    assert registry.models_awaited()
    registry.drain("a")
    assert not registry.models_awaited()
    registry.undrain("a")
    clock.advance(START_PATIENCE_S)
    assert not registry.models_awaited()
    registry.add("c", "http://c")
    assert registry.models_awaited()
    registry.set_models(a, [])
    registry.set_state(registry.get("c") or a, State.DOWN, "dead")
    assert not registry.models_awaited()


def test_the_listing_is_rendered_once_per_version(registry: Registry) -> None:
    a = serving(registry, "a", "m")
    first = registry.listing()
    assert registry.listing() is first
    registry.set_models(a, [entry("m"), entry("n")])
    assert registry.listing() is not first


def test_configured_models_are_known_at_once_and_filled_in_later(registry: Registry) -> None:
    a = registry.add("a", "http://a", models=["m", "ghost"])
    assert registry.known_models() == ["ghost", "m"]
    assert [e["owned_by"] for e in listed(registry)] == ["kvgate", "kvgate"]
    registry.set_models(a, [entry("m", owned_by="vllm", max_model_len=7), entry("not-configured")])
    assert registry.known_models() == ["ghost", "m"]
    assert listed(registry)[0]["max_model_len"] == 7


def test_an_engines_entry_wins_over_a_configured_name(registry: Registry) -> None:
    registry.add("a", "http://a", models=["m"])
    b = serving(registry, "b")
    registry.set_models(b, [entry("m", owned_by="vllm")])
    assert [e["owned_by"] for e in listed(registry)] == ["vllm"]


def test_fields_that_an_engine_makes_anew_each_time_are_no_change(registry: Registry) -> None:
    a = serving(registry, "a")
    assert registry.set_models(a, [entry("m", permission=[{"id": "modelperm-1"}])])
    version = registry.version
    again = entry("m", permission=[{"id": "modelperm-2"}])
    again["created"] = 2
    assert not registry.set_models(a, [again])
    assert registry.version == version
    assert registry.set_models(a, [entry("m", max_model_len=1)])
    assert registry.version == version + 1


def test_an_empty_answer_counts_as_told_once(registry: Registry) -> None:
    a = registry.add("a", "http://a")
    assert registry.set_models(a, [])
    assert not registry.set_models(a, [])


# --- adding and removing


def test_a_name_defaults_to_host_and_port(registry: Registry) -> None:
    assert registry.add("", "http://h:81").name == "h:81"
    v6 = registry.add("", "https://[::1]/")
    assert (v6.name, v6.host, v6.port, v6.url) == ("[::1]:443", "::1", 443, "https://[::1]:443")


@pytest.mark.parametrize(
    "url",
    [
        "h:80",
        "ftp://h",
        "http://",
        "http://h:x",
        "http://h:70000",
        "http://h:0",
        "http://h/v1",
        "http://h?q",
        "http://[::1",
    ],
)
def test_a_bad_url_is_refused(registry: Registry, url: str) -> None:
    with pytest.raises(ValueError, match="url"):
        registry.add("a", url)
    assert registry.backends == ()


def test_a_password_in_a_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(ValueError) as caught:
        split_url("http://user:secret@h:1")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_bad_weight_is_refused(registry: Registry, weight: float) -> None:
    with pytest.raises(ValueError, match="weight"):
        registry.add("a", "http://a", weight)


def test_a_name_is_free_as_soon_as_its_backend_leaves(registry: Registry) -> None:
    a = registry.add("a", "http://a")
    with pytest.raises(ValueError, match="exists"):
        registry.add("a", "http://other")
    guard = InFlight(a)
    registry.remove("a")
    assert registry.get("a") is a
    successor = registry.add("a", "http://other")
    assert registry.get("a") is successor
    assert a in registry
    assert registry.backends == (a, successor)
    registry.drain("a")
    assert successor.draining
    guard.release()
    registry.reap()
    assert registry.backends == (successor,)
    assert a not in registry
    assert successor in registry


def test_a_backend_that_stays_gets_other_values_and_keeps_the_rest(registry: Registry) -> None:
    a = serving(registry, "a", "m")
    told: list[FleetEvent] = []
    registry.subscribe(told.append)
    assert not registry.reconfigure(a, 1.0, None, None)
    assert told == []
    assert registry.reconfigure(a, 2.0, "key", ["n"])
    assert (a.weight, a.api_key, list(a.models), a.state) == (2.0, "key", ["n"], State.UP)
    assert told[-1] == Reconfigured(a)
    assert registry.pool("m") is None
    assert registry.reconfigure(a, 2.0, "key", None)
    registry.set_models(a, [entry("m"), entry("n")])
    assert registry.known_models() == ["m", "n"]
    registry.remove("a")
    assert not registry.reconfigure(a, 3.0, None, None)


def test_the_fleet_has_a_limit(registry: Registry) -> None:
    for number in range(BACKENDS_LIMIT):
        registry.add(f"b{number}", "http://h")
    with pytest.raises(ValueError, match="limit"):
        registry.add("one more", "http://h")
    registry.remove("b0")
    registry.add("one more", "http://h")


def test_an_idle_backend_leaves_at_once(registry: Registry, clock: VirtualClock) -> None:
    a = serving(registry, "a", "m")
    registry.remove("a")
    assert registry.backends == ()
    assert registry.get("a") is None
    assert a not in registry
    assert clock.pending == 0


def test_a_busy_backend_leaves_when_its_last_attempt_ended(registry: Registry, clock: VirtualClock) -> None:
    a = serving(registry, "a", "m")
    guards = [InFlight(a), InFlight(a)]
    registry.remove("a")
    registry.remove("a")
    assert registry.pool("m") is None
    clock.advance(10)
    assert registry.backends == (a,)
    guards[0].release()
    clock.advance(10)
    assert registry.backends == (a,)
    guards[1].release()
    clock.advance(1)
    assert registry.backends == ()
    assert clock.pending == 0


def test_a_removed_backend_is_never_revived(registry: Registry) -> None:
    a = serving(registry, "a", "m")
    guard = InFlight(a)
    registry.remove("a")
    with pytest.raises(ValueError, match="being removed"):
        registry.undrain("a")
    registry.drain("a")
    registry.set_models(a, [entry("m"), entry("n")])
    assert registry.known_models() == []
    guard.release()
    registry.reap()
    version = registry.version
    assert not registry.set_state(a, State.DOWN, "late")
    assert not registry.set_models(a, [entry("m")])
    assert registry.version == version
    assert registry.known_models() == []


@pytest.mark.parametrize("operation", ["remove", "drain", "undrain"])
def test_an_unknown_name_is_a_key_error(registry: Registry, operation: str) -> None:
    with pytest.raises(KeyError):
        getattr(registry, operation)("nobody")


def test_why_is_empty_while_up(registry: Registry) -> None:
    a = registry.add("a", "http://a")
    assert a.why
    registry.set_state(a, State.UP, "ignored")
    assert a.why == ""
    registry.set_state(a, State.DOWN, "refused")
    assert not registry.set_state(a, State.DOWN, "timed out")
    assert a.why == "timed out"


# --- telling


def test_each_change_is_told_once_and_raises_the_version(registry: Registry) -> None:
    events: list[FleetEvent] = []
    registry.subscribe(events.append)
    versions = [registry.version]

    def step() -> None:
        versions.append(registry.version)

    a = registry.add("a", "http://a")
    step()
    registry.set_state(a, State.UP, "")
    registry.set_state(a, State.UP, "")
    step()
    registry.set_models(a, [entry("m")])
    step()
    registry.set_models(a, [entry("n")])
    step()
    registry.drain("a")
    registry.drain("a")
    step()
    registry.remove("a")
    step()
    assert events == [
        BackendAdded(a),
        StateChanged(a, State.STARTING, State.UP),
        ModelsChanged(a, frozenset({"m"}), frozenset()),
        ModelsChanged(a, frozenset({"n"}), frozenset({"m"})),
        DrainChanged(a),
        DrainChanged(a),
        BackendRemoved(a),
    ]
    assert versions == sorted(set(versions))


def test_a_subscriber_that_raises_keeps_nobody_from_knowing(
    registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[FleetEvent] = []

    def broken(event: FleetEvent) -> None:
        raise RuntimeError("bug")

    registry.subscribe(broken)
    registry.subscribe(events.append)
    with caplog.at_level(logging.ERROR):
        a = registry.add("a", "http://a")
    assert events == [BackendAdded(a)]
    assert "BackendAdded of a" in caplog.text
    assert registry.backends == (a,)


def test_changes_made_by_a_subscriber_are_told_in_order_to_all(registry: Registry) -> None:
    first: list[str] = []
    second: list[str] = []

    def reacting(event: FleetEvent) -> None:
        first.append(type(event).__name__)
        if isinstance(event, BackendAdded):
            registry.set_state(event.backend, State.UP, "")

    registry.subscribe(reacting)
    registry.subscribe(lambda event: second.append(type(event).__name__))
    registry.add("a", "http://a")
    assert first == second == ["BackendAdded", "StateChanged"]


def test_a_change_of_state_carries_its_own_reason(registry: Registry) -> None:
    seen: list[tuple[str, str]] = []

    def reacting(event: FleetEvent) -> None:
        if isinstance(event, StateChanged) and event.after is State.EJECTED:
            registry.set_state(event.backend, State.TRIAL, "on trial")

    registry.subscribe(reacting)
    registry.subscribe(lambda e: seen.append((e.why, e.backend.why)) if isinstance(e, StateChanged) else None)
    registry.set_state(registry.add("a", "http://a"), State.EJECTED, "silent")
    assert seen == [("silent", "on trial"), ("on trial", "on trial")]


def test_an_ended_subscription_hears_no_more(registry: Registry) -> None:
    events: list[FleetEvent] = []
    unsubscribe = registry.subscribe(events.append)
    unsubscribe()
    unsubscribe()
    registry.add("a", "http://a")
    assert events == []


def test_close_leaves_no_timer(registry: Registry, clock: VirtualClock) -> None:
    a = registry.add("a", "http://a")
    guard = InFlight(a)
    registry.remove("a")
    assert clock.pending == 1
    registry.close()
    assert clock.pending == 0
    guard.release()


NAMES = ["a", "b", "c"]
operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from(NAMES), st.sampled_from([None, ["m"], ["n", "x"]])),
        st.tuples(st.just("models"), st.sampled_from(NAMES), st.sets(st.sampled_from(["m", "n", "x"]))),
        st.tuples(st.just("state"), st.sampled_from(NAMES), st.sampled_from(list(State))),
        st.tuples(st.sampled_from(["drain", "undrain", "remove", "use", "free"]), st.sampled_from(NAMES), st.none()),
    ),
    max_size=30,
)


@given(operations)
def test_whatever_happens_the_pools_are_what_a_scan_of_the_fleet_gives(script: list[tuple[str, str, Any]]) -> None:
    clock = VirtualClock()
    registry = Registry(clock)
    held: dict[str, list[InFlight]] = {name: [] for name in NAMES}
    for operation, name, argument in script:
        backend = registry.get(name)
        if operation == "add":
            if backend is None or backend.deleted:
                registry.add(name, f"http://{name}", models=argument)
        elif backend is None:
            continue
        elif operation == "models":
            registry.set_models(backend, [entry(model) for model in sorted(argument)])
        elif operation == "state":
            registry.set_state(backend, argument, "because")
        elif operation == "use":
            held[name].append(InFlight(backend))
        elif operation == "free":
            while held[name]:
                held[name].pop().release()
        elif operation != "undrain" or not backend.deleted:
            getattr(registry, operation)(name)
        clock.advance(1)
        staying = [b for b in registry.backends if not b.deleted]
        known = sorted({model for b in staying for model in b.models})
        assert registry.known_models() == known
        assert [e["id"] for e in sorted(listed(registry), key=lambda e: str(e["id"]))] == known
        for model in ("m", "n", "x"):
            pool = registry.pool(model)
            members = [b for b in staying if model in b.models]
            assert (pool is not None) == bool(members)
            if pool is not None:
                assert list(pool.members) == members
                assert list(pool.candidates) == [b for b in members if b.serving]
                assert pool.needs_filter == any(b.state is State.TRIAL for b in pool.candidates)
                assert pool.listed_by == len(members)
        assert list(registry.any_pool().members) == staying
        assert all(b.in_flight or not b.deleted for b in registry.backends)
        default = registry.default_pool()
        assert (default is not None) == (len(known) == 1)
    for guards in held.values():
        for guard in guards:
            guard.release()
    for name in NAMES:
        if registry.get(name) is not None:
            registry.remove(name)
    clock.advance(1)
    assert registry.backends == ()
    assert registry.known_models() == []
    assert clock.pending == 0
