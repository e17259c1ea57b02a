"""Answers to /v1/models: what is taken, and that each rule refuses."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.backends.models import BODY_LIMIT_BYTES, ENTRIES_LIMIT, NAME_LIMIT_CHARS, BadModels, read_models
from router.backends.registry import Registry
from router.clock import VirtualClock

FIXTURES = Path(__file__).parents[2] / "fixtures" / "vllm"


def body(*entries: Any) -> bytes:
    return orjson.dumps({"object": "list", "data": entries})


def test_a_recorded_answer_keeps_every_field() -> None:
    recorded = (FIXTURES / "http" / "models.resp.http").read_bytes().partition(b"\r\n\r\n")[2]
    assert read_models(recorded) == orjson.loads(recorded)["data"]


def test_no_models_are_an_answer() -> None:
    assert read_models(body()) == []


def test_the_first_of_two_with_one_id_counts() -> None:
    assert read_models(body({"id": "m", "n": 1}, {"id": "m", "n": 2})) == [{"id": "m", "n": 1}]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"", "not JSON"),
        (b"<html>", "not JSON"),
        (b'{"data": [', "not JSON"),
        (b'{"data": [{"id": "\xff"}]}', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "no list"),
        (b"null", "no list"),
        (b'{"error": "Unauthorized"}', "no list"),
        (b'{"data": {"id": "m"}}', "no list"),
        (body("m"), "without a string"),
        (body({"name": "m"}), "without a string"),
        (body({"id": 1}), "without a string"),
        (body({"id": ""}), "without a string"),
        (body(None, [], 7, "m", {"id": ["m"]}), "without a string"),
        (b'{"data": [{"id": "m", "x": ' + b"[" * 400 + b"]" * 400 + b"}]}", "deeply"),
    ],
)
def test_what_is_no_list_of_models_is_refused(answer: bytes, why: str) -> None:
    with pytest.raises(BadModels, match=why):
        read_models(answer)


def nested(depth: int) -> bytes:
    return b'{"data": [{"id": "m", "x": ' + b"[" * depth + b"]" * depth + b"}]}"


def test_an_entry_that_cannot_be_used_is_left_out_and_told() -> None:
    faults: list[str] = []
    entries = read_models(body({"id": "a"}, None, {"id": 1}, {"id": "x" * 1000}, {"id": "b"}), faults)
    assert [entry["id"] for entry in entries] == ["a", "b"]
    assert faults == [
        "an entry without a string `id` (2 of 5 left out)",
        f"an `id` of more than {NAME_LIMIT_CHARS} characters (1 of 5 left out)",
    ]


@pytest.mark.parametrize("depth", range(245, 260))
def test_what_is_taken_can_be_listed_however_deep_it_is(depth: int) -> None:
    """JSON is read deeper than it is written; our listing is one level deeper than the engine's list."""
    if depth > 251:
        with pytest.raises(BadModels, match="deeply"):
            read_models(nested(depth))
        return
    entries = read_models(nested(depth))
    registry = Registry(VirtualClock())
    registry.set_aliases({"alias": "m"})
    registry.set_models(registry.add("e", "http://e.test:1"), entries)
    assert [entry["id"] for entry in orjson.loads(registry.listing())["data"]] == ["m", "alias"]


def test_names_up_to_the_limit() -> None:
    assert len(read_models(body({"id": "é" * NAME_LIMIT_CHARS}))) == 1
    with pytest.raises(BadModels, match="characters"):
        read_models(body({"id": "é" * (NAME_LIMIT_CHARS + 1)}))


def test_entries_up_to_the_limit() -> None:
    entries = [{"id": f"m{number}"} for number in range(ENTRIES_LIMIT)]
    assert len(read_models(body(*entries))) == ENTRIES_LIMIT
    with pytest.raises(BadModels, match="entries"):
        read_models(body(*entries, {"id": "one more"}))


def test_bodies_up_to_the_limit() -> None:
    answer = body({"id": "m"})
    assert len(read_models(answer + b" " * (BODY_LIMIT_BYTES - len(answer)))) == 1
    with pytest.raises(BadModels, match="bytes"):
        read_models(answer + b" " * (BODY_LIMIT_BYTES - len(answer) + 1))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["id", "data", "x"]), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(json_values)
def test_any_json_is_taken_or_refused(value: Any) -> None:
    try:
        entries = read_models(orjson.dumps({"data": value}))
    except BadModels:
        return
    assert all(isinstance(entry["id"], str) and entry["id"] for entry in entries)


entry_like = st.dictionaries(
    st.sampled_from(["id", "root", "parent", "created", "permission", "max_model_len"]), json_values, max_size=5
) | st.fixed_dictionaries(
    {"id": st.sampled_from(["a", "b", "c"])},
    optional={"root": json_values, "parent": json_values, "owned_by": json_values},
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(entry_like | json_values, max_size=4), min_size=1, max_size=4), st.data())
def test_whatever_engines_tell_the_union_is_a_list_of_what_is_known(answers: list[Any], data: st.DataObject) -> None:
    registry = Registry(VirtualClock())
    registry.set_aliases({"alias": "a", "b": "c"})
    backends = [registry.add(f"e{number}", f"http://e{number}.test:1") for number in range(len(answers))]
    for answer in answers:
        backend = data.draw(st.sampled_from(backends))
        with suppress(BadModels):
            registry.set_models(backend, read_models(orjson.dumps({"data": answer})))
        listing = orjson.loads(registry.listing())
        assert listing["object"] == "list"
        assert sorted(entry["id"] for entry in listing["data"]) == registry.known_models()
        registry.default_pool()
        seeds = registry.prompt_seeds()
        assert set(seeds.names or {}) <= set(registry.known_models())
