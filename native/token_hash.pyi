"""The identity of a KV block: one definition for what engines report and for what requests ask.

A block is named by 64 bits that name everything before it as well:

    chain = 0 without an adapter, else xxh3_64(adapter name in UTF-8, seed of adapters)
    for each block: for each of its extras in order: chain = xxh3_64(extra, chain ^ seed of extras)
                    chain = xxh3_64(token ids as u32 little endian, chain)      <- the block's hash

Extras are what the engine mixes into a block beside its tokens, as UTF-8 or raw bytes: the identifiers of the
multimodal items that overlap the block, in prompt order; the cache_salt, after them, on the first block only; digests
of prompt embeddings. They are alike here because events tell them apart by nothing: before 0.20 an identifier stands as
bare as a salt. The offset that later releases put beside an identifier is left out, as the tokens say where an item
lies: only two items with one placeholder that trade lengths within a block would differ by it.
"""

from collections.abc import Sequence

from native.block_hash import BlockHashes

def xxh3_digest(data: bytes, seed: int = 0) -> int:
    """XXH3's 64-bit digest, equal to the xxhash package's `xxh3_64_intdigest`. `seed` is unsigned 64-bit
    (OverflowError otherwise)."""

def block_hashes(
    tokens: Sequence[int],
    block_size: int,
    lora: str | None = None,
    salt: str | None = None,
    mm: Sequence[tuple[str, int, int]] = (),
) -> BlockHashes:
    """The hashes of a prompt's full blocks of `block_size` tokens, in prompt order, as the index knows them.

    `tokens`: a list of ids, or a contiguous buffer of unsigned 32-bit ones (`array("I")`), which is read in place.
    `lora`: the adapter's name, as events have it. `salt`: the request's cache_salt. `mm`: each multimodal item as
    (identifier, first token, tokens), ordered by place. A partial tail is left out, so the result may be empty.
    ValueError for a block size below 1 or above 65,536, OverflowError for an id that is no unsigned 32-bit number,
    TypeError for other shapes, MemoryError where there is none.
    """
