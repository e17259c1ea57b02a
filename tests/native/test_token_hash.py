"""The identity of a block: XXH3 against the xxhash package, and the chain as its definition says, written out here."""

from __future__ import annotations

import random
import struct
from array import array

import pytest
import xxhash

from native.token_hash import block_hashes, xxh3_digest

ADAPTERS = 0x6164617074657273
EXTRAS = 0xA5E1C3B7985F2D61


def block(chain: int, tokens: list[int], *extras: bytes) -> int:
    for extra in extras:
        chain = xxhash.xxh3_64_intdigest(extra, chain ^ EXTRAS)
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(tokens)}I", *tokens), chain)


def test_xxh3_equals_the_reference_at_every_length_up_to_the_third_long_block() -> None:
    data = random.Random(1).randbytes(3300)
    seeds = [0, 1, 2**64 - 1, 0x0123456789ABCDEF]
    lengths = [*range(600), *range(1000, 1100), *range(2040, 2060), 3071, 3072, 3073, 3300]
    for n in lengths:
        for seed in seeds:
            assert xxh3_digest(data[:n], seed) == xxhash.xxh3_64_intdigest(data[:n], seed), (n, seed)


def test_a_seed_is_an_unsigned_64_bit_number() -> None:
    with pytest.raises(OverflowError):
        xxh3_digest(b"", 1 << 64)
    with pytest.raises(OverflowError):
        xxh3_digest(b"", -1)


def test_blocks_are_chained_from_the_root_and_a_partial_tail_is_left_out() -> None:
    tokens = list(range(1000, 1011))
    one = block(0, tokens[:4])
    assert block_hashes(tokens, 4).tolist() == [one, block(one, tokens[4:8])]
    assert block_hashes(tokens[:3], 4).tolist() == []
    assert block_hashes([], 16).tolist() == []


@pytest.mark.parametrize("block_size", [1, 3, 4, 16, 32, 64, 128, 784])
def test_a_buffer_and_a_list_give_the_same(block_size: int) -> None:
    generator = random.Random(block_size)
    tokens = [generator.randrange(200_000) for _ in range(3 * block_size + block_size // 2)]
    from_list = block_hashes(tokens, block_size)
    assert len(from_list) == 3
    assert block_hashes(array("I", tokens), block_size) == from_list
    assert block_hashes(tuple(tokens), block_size) == from_list


def test_adapter_and_salt_keep_equal_tokens_apart() -> None:
    tokens = list(range(8))
    adapter = xxhash.xxh3_64_intdigest(b"sql-lora", ADAPTERS)
    first = block(adapter, tokens[:4], b"tenant-b")
    assert block_hashes(tokens, 4, "sql-lora", "tenant-b").tolist() == [first, block(first, tokens[4:])]
    variants = [
        block_hashes(tokens, 4, lora, salt).tolist()
        for lora, salt in [(None, None), ("a", None), (None, "a"), ("a", "a"), ("b", "a")]
    ]
    assert len({hash_ for hashes in variants for hash_ in hashes}) == 10
    assert block_hashes(tokens, 4, "", "") == block_hashes(tokens, 4)


def test_a_salt_that_spells_tokens_does_not_name_their_block() -> None:
    spelled = struct.pack("<4I", 65, 66, 67, 68)
    plain = block_hashes([65, 66, 67, 68, 1, 2, 3, 4], 4).tolist()
    assert block_hashes([1, 2, 3, 4], 4, salt=spelled.decode()).tolist()[0] not in plain


def test_each_multimodal_item_goes_into_every_block_that_it_overlaps() -> None:
    tokens = list(range(20))
    # a: tokens 2 to 9, in blocks 0 to 2; b: 10 and 11, in block 2; c: 12, in block 3.
    hashes = block_hashes(tokens, 4, salt="s", mm=[("a", 2, 8), ("b", 10, 2), ("c", 12, 1)]).tolist()
    extras = [(b"a", b"s"), (b"a",), (b"a", b"b"), (b"c",), ()]
    chain, expected = 0, []
    for i in range(5):
        chain = block(chain, tokens[4 * i : 4 * i + 4], *extras[i])
        expected.append(chain)
    assert hashes == expected


@pytest.mark.parametrize("block_size", [0, -1, 65537])
def test_a_block_size_out_of_range_is_refused(block_size: int) -> None:
    with pytest.raises(ValueError, match="block_size"):
        block_hashes([1], block_size)


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        ([1, -1], OverflowError),
        ([1, 1 << 32], OverflowError),
        ([1, 1 << 70], OverflowError),
        ([1, "2"], TypeError),
        ([1, 2.0], TypeError),
        (b"12345678", TypeError),
        (array("i", [1, 2]), TypeError),
        (array("Q", [1, 2]), TypeError),
        (None, TypeError),
    ],
)
def test_tokens_of_another_shape_are_refused(tokens: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        block_hashes(tokens, 2)  # type: ignore[arg-type]
