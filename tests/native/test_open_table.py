"""The open-addressing table behaves as a dict, whatever the clustering; check() sees what a walk must see."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from native.open_table import OpenTable, new_secret

# With the secret (0, 0) a key of owner 1 has its hash's low bits as its home, and all keys of owner 0 have home 0.
PLAIN = (0, 0)

# Few hashes around the wrap of small tables, so that clusters form, touch and cross the end.
KEYS = st.tuples(st.one_of(st.integers(0, 9), st.integers(2**64 - 6, 2**64 - 1)), st.sampled_from([0, 1]))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), KEYS, st.integers(0, 2**32 - 2)),
        st.tuples(st.just("erase"), KEYS, st.just(0)),
        st.tuples(st.just("clear"), st.just((0, 0)), st.just(0)),
    ),
    max_size=80,
)


@given(STEPS, st.sampled_from([4, 8, 64]), st.sampled_from([PLAIN, (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93)]))
@settings(max_examples=400)
def test_it_does_what_a_dict_does(
    steps: list[tuple[str, tuple[int, int], int]], capacity: int, secret: tuple[int, int]
) -> None:
    table = OpenTable(capacity, secret=secret)
    model: dict[tuple[int, int], int] = {}
    for step, key, value in steps:
        if step == "put":
            table.put(*key, value)
            model[key] = value
        elif step == "erase":
            assert table.erase(*key) == (model.pop(key, None) is not None)
        else:
            table.clear()
            model.clear()
        table.check()
        assert len(table) == len(model)
        assert table.find(*key) == model.get(key)
    assert dict(table.items()) == model
    for key, value in model.items():
        assert table.find(*key) == value


def test_erasing_inside_a_cluster_that_crosses_the_end_keeps_all_others() -> None:
    keys = [6, 7, 14, 15, 22, 0]  # homes 6, 7, 6, 7, 6, 0 of 8 slots
    for gone in keys:
        table = OpenTable(8, secret=PLAIN)
        for key in keys:
            table.put(key, 1, key)
        assert table.erase(gone, 1)
        table.check()
        assert {key for (key, _), _ in table.items()} == set(keys) - {gone}
        assert all(table.find(key, 1) == key for key in keys if key != gone)
        assert table.find(gone, 1) is None


def test_the_same_hash_under_two_owners_is_two_keys() -> None:
    table = OpenTable()
    table.put(5, 0, 10)
    table.put(5, 1, 11)
    assert (table.find(5, 0), table.find(5, 1), table.find(5, 2)) == (10, 11, None)
    assert table.erase(5, 0)
    assert (table.find(5, 0), table.find(5, 1)) == (None, 11)


def test_it_grows_at_three_quarters_and_not_before() -> None:
    table = OpenTable(8)
    for key in range(6):
        table.put(key, 0, key)
    assert table.capacity == 8
    table.put(3, 0, 33)  # no new key
    assert table.capacity == 8
    table.put(6, 0, 6)
    assert table.capacity == 16
    table.check()
    assert sorted(key for (key, _), _ in table.items()) == list(range(7))


def test_coming_and_going_leaves_no_tombstones() -> None:
    table = OpenTable(64)
    for key in range(10_000):
        table.put(key, 0, key)
        if key >= 40:
            assert table.erase(key - 40, 0)
    assert (table.capacity, len(table)) == (64, 40)
    table.check()


def test_hashes_that_agree_in_their_low_or_high_bits_spread_under_a_secret() -> None:
    # A client can make such hashes; it must not make one long cluster of them.
    for shift in (0, 16, 32, 40):
        table = OpenTable(4096, secret=(0x243F6A8885A308D3, 0x13198A2E03707345))
        for i in range(2000):
            table.put(i << shift, 0xFFFFFFFF, i)
        assert table.longest_probe() < 64, shift


def test_secrets_differ_between_tables() -> None:
    assert new_secret() != new_secret()


def test_wrong_arguments_raise() -> None:
    for capacity in (0, 1, 2, 3, 12, 2**33):
        with pytest.raises(ValueError, match="power of two"):
            OpenTable(capacity)
    table = OpenTable()
    with pytest.raises(ValueError, match="no value"):
        table.put(1, 1, 2**32 - 1)
    for hash_, owner in ((-1, 0), (2**64, 0), (0, -1), (0, 2**32)):
        with pytest.raises(OverflowError):
            table.find(hash_, owner)
    assert len(table) == 0


def test_memory_is_counted() -> None:
    assert OpenTable(1024).memory_bytes() - OpenTable(512).memory_bytes() == 512 * 16
