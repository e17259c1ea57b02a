"""XXH64, and the chained block hashes of a prompt."""

from typing import Never, final

def xxh64_digest(data: bytes | bytearray | memoryview, seed: int = 0) -> int:
    """The XXH64 digest of contiguous bytes, equal to the xxhash package's `xxh64_intdigest`.

    `seed` is an unsigned 64-bit number (OverflowError otherwise).
    """

@final
class BlockHashes:
    """The hashes of a prompt's full blocks, in prompt order: h_0 = xxh64(block_0, seed), h_i = xxh64(block_i, h_(i-1)).

    Immutable; 8 bytes a block. Equal where all hashes are equal. Not made by calling the class (TypeError).
    """

    def __init__(self, *args: Never, **kwargs: Never) -> None: ...
    @staticmethod
    def from_bytes(data: bytes, block_bytes: int, seed: int = 0) -> BlockHashes:
        """Hash the full blocks of `block_bytes` bytes; a partial tail is left out, so the result may be empty.

        `seed` (unsigned 64 bits) keeps apart what must not share: the caller hashes the model's name or a salt into
        it. ValueError for block_bytes below 1. What it costs by block size: docs/decisions/0001-block-size.md.
        """

    @staticmethod
    def from_list(hashes: list[int]) -> BlockHashes:
        """Take ready hashes (unsigned 64 bits each, OverflowError otherwise), for tests and simulators."""

    def tolist(self) -> list[int]:
        """The hashes as Python integers."""

    def __len__(self) -> int: ...
    def __getitem__(self, i: int, /) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
