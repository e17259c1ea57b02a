"""XXH64 equals the xxhash package; chained hashes name whole prefixes; no memory is lost."""

from __future__ import annotations

import gc
import sys
import tracemalloc

import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from native.block_hash import BlockHashes, xxh64_digest

SEEDS = st.integers(0, 2**64 - 1)


def chain(data: bytes, block_bytes: int, seed: int) -> list[int]:
    hashes = []
    for start in range(0, len(data) - block_bytes + 1, block_bytes):
        seed = xxhash.xxh64_intdigest(data[start : start + block_bytes], seed)
        hashes.append(seed)
    return hashes


@given(st.binary(max_size=300), SEEDS)
def test_the_digest_is_that_of_the_xxhash_package(data: bytes, seed: int) -> None:
    assert xxh64_digest(data, seed) == xxhash.xxh64_intdigest(data, seed)


def test_every_length_through_all_tail_paths_agrees_with_the_xxhash_package() -> None:
    data = bytes((i * 131 + 7) & 0xFF for i in range(200))
    for n in range(len(data) + 1):
        assert xxh64_digest(data[:n], 2**64 - n - 1) == xxhash.xxh64_intdigest(data[:n], 2**64 - n - 1), n


def test_unaligned_bytes_hash_like_aligned_ones() -> None:
    data = bytes(range(256))
    for offset in range(9):
        assert xxh64_digest(memoryview(data)[offset:]) == xxhash.xxh64_intdigest(data[offset:])


def test_a_known_value_of_the_specification() -> None:
    # So that this suite does not stand on one foreign build alone.
    assert xxh64_digest(b"") == 0xEF46DB3751D8E999


@given(st.binary(max_size=600), st.integers(1, 70), SEEDS)
@example(b"", 1, 0)
@example(b"x" * 64, 64, 0)
@example(b"x" * 63, 64, 0)
@settings(max_examples=200)
def test_blocks_are_chained_and_the_tail_is_left_out(data: bytes, block_bytes: int, seed: int) -> None:
    blocks = BlockHashes.from_bytes(data, block_bytes, seed)
    assert blocks.tolist() == chain(data, block_bytes, seed)
    assert len(blocks) == len(data) // block_bytes


@given(st.binary(min_size=64, max_size=600), st.integers(0, 599))
def test_a_changed_byte_changes_its_block_and_all_after_it_and_none_before(data: bytes, at: int) -> None:
    at %= len(data)
    changed = bytearray(data)
    changed[at] ^= 0x40
    before, after = BlockHashes.from_bytes(data, 32), BlockHashes.from_bytes(bytes(changed), 32)
    for i, (a, b) in enumerate(zip(before.tolist(), after.tolist(), strict=True)):
        assert (a == b) == (i < at // 32)


@given(st.lists(SEEDS, max_size=40))
def test_ready_hashes_come_back_as_they_went_in(hashes: list[int]) -> None:
    blocks = BlockHashes.from_list(hashes)
    assert blocks.tolist() == hashes == [blocks[i] for i in range(len(blocks))]
    assert [blocks[-i - 1] for i in range(len(blocks))] == hashes[::-1]
    assert blocks == BlockHashes.from_list(hashes)
    assert hash(blocks) == hash(BlockHashes.from_list(hashes))
    assert blocks != BlockHashes.from_list([*hashes, 1])
    assert blocks != hashes


def test_an_index_outside_raises() -> None:
    blocks = BlockHashes.from_list([1, 2])
    for i in (2, -3, 2**40):
        with pytest.raises(IndexError):
            blocks[i]


def test_wrong_arguments_raise() -> None:
    for block_bytes in (0, -1):
        with pytest.raises(ValueError, match="block_bytes"):
            BlockHashes.from_bytes(b"abc", block_bytes)
    for seed in (-1, 2**64):
        with pytest.raises(OverflowError):
            BlockHashes.from_bytes(b"abc", 1, seed)
        with pytest.raises(OverflowError):
            BlockHashes.from_list([seed])
    for data in (None, "abc", bytearray(b"abc")):
        with pytest.raises(TypeError):
            BlockHashes.from_bytes(data, 1)  # type: ignore[arg-type]
    for hashes in (None, (1, 2), ["a"], [1.5]):
        with pytest.raises(TypeError):
            BlockHashes.from_list(hashes)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        BlockHashes()


def test_hashing_keeps_no_reference_and_no_memory() -> None:
    data = bytes(4096)
    references = sys.getrefcount(data)
    kept = BlockHashes.from_bytes(data, 16)
    assert sys.getrefcount(data) == references
    tracemalloc.start()
    try:
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(200):
            BlockHashes.from_bytes(data, 16)
            with pytest.raises(OverflowError):
                BlockHashes.from_list([1] * 256 + [-1])
        gc.collect()
        # 400 arrays of 2 KB came and went; PyMem_RawMalloc is traced, so one that stayed would show.
        assert tracemalloc.get_traced_memory()[0] - before < 50_000
    finally:
        tracemalloc.stop()
    assert len(kept) == 256
