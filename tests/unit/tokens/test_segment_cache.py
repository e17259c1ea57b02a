from __future__ import annotations

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from router.tokens.segment_cache import ENTRY_BYTES, SegmentCache


def ids(*values):
    return array("I", values)


def test_what_was_kept_is_found():
    cache = SegmentCache(1 << 20)
    key, other = cache.key(1, b"part"), cache.key(1, b"other")
    cache.keep([(key, ids(1, 2))])
    assert cache.find([key, other]) == [ids(1, 2), None]
    assert (cache.hit_tokens, cache.missed_tokens) == (2, 2)


def test_tokenizers_do_not_share_parts():
    cache = SegmentCache(1 << 20)
    one, two = cache.new_space(), cache.new_space()
    cache.keep([(cache.key(one, b"part"), ids(1))])
    assert cache.find([cache.key(two, b"part")]) == [None]


def test_keys_of_two_processes_differ():
    assert SegmentCache(1).key(1, b"part") != SegmentCache(1).key(1, b"part")


def test_the_least_recently_used_part_goes_first():
    size = ENTRY_BYTES + 4
    cache = SegmentCache(8 * size)
    keys = [cache.key(1, bytes([n])) for n in range(9)]
    cache.keep([(key, ids(n)) for n, key in enumerate(keys[:8])])
    cache.find(keys[:1])
    cache.keep([(keys[8], ids(8))])
    assert len(cache) == 8
    assert cache.evicted == 1
    assert cache.find([keys[0], keys[1]]) == [ids(0), None]
    assert cache.memory_bytes() == 8 * size
    cache.check()


def test_a_part_that_would_drive_out_the_others_is_not_kept():
    cache = SegmentCache(8 * (ENTRY_BYTES + 40))
    cache.keep([(cache.key(1, b"a"), ids(*range(10)))])
    cache.keep([(cache.key(1, b"b"), ids(*range(11)))])
    assert len(cache) == 1
    cache.check()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 30), st.booleans()), max_size=80))
def test_any_use_keeps_the_bound_and_the_sums(steps):
    cache = SegmentCache(8 * (ENTRY_BYTES + 80))
    for name, length, read in steps:
        key = cache.key(1, bytes([name]))
        if read:
            cache.find([key])
        else:
            cache.keep([(key, array("I", range(length)))])
        cache.check()
    cache.clear()
    assert (len(cache), cache.memory_bytes()) == (0, 0)
    cache.check()
