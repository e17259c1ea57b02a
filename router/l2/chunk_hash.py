"""How LMCache (0.5) names a chunk of a prompt by its tokens: a chain of hashes from a root.

The in-process form hashes (hash before, tokens, ()) by vLLM's function of the configured name and keeps the first eight
bytes of a digest as an unsigned number; `builtin`, its default, is Python's own hash() and stays signed. The
multi-process form keeps whole digests and hashes (hash before, tokens, None). The root is vLLM's NONE_HASH: the hash of
PYTHONHASHSEED as a string; without one, of a fixed string (vLLM 0.29 and later, the sha256 functions only), else
random, and then no two engines share anything. Checked against LMCache's own keys: tests/unit/l2/test_chunk_hash.py.
"""

from __future__ import annotations

import hashlib
import pickle
import struct
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import xxhash

VLLM_SEED: Final = "vllm-none-hash"
MEMORY_LIMIT: Final = 32_768  # chunks whose hash is remembered, about 240 bytes each
_CBOR_LIMIT: Final = 131_072  # token ids whose encoding is remembered, about 110 bytes each

Hash = int | bytes


_WIDE: Final = struct.Struct(">BI").pack


class _CborNumbers(dict[int, bytes]):
    """The canonical CBOR of token ids, 32 bits each."""

    def __missing__(self, number: int) -> bytes:
        encoded = _WIDE(0x1A, number) if number > 0xFFFF else _cbor_head(0, number)
        if len(self) < _CBOR_LIMIT:
            self[number] = encoded
        return encoded


def _cbor_head(major: int, number: int) -> bytes:
    """A type of CBOR with its number or its length, in the shortest form."""
    if number < 24:
        return bytes((major << 5 | number,))
    for code, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if number < 1 << 8 * size:
            return bytes((major << 5 | code,)) + number.to_bytes(size, "big")
    raise ValueError("more than 64 bits")


_NUMBERS: Final = _CborNumbers()


def _cbor_text(text: str) -> bytes:
    encoded = text.encode()
    return _cbor_head(3, len(encoded)) + encoded


def _cbor_ids(ids: Sequence[int]) -> bytes:
    return _cbor_head(4, len(ids)) + b"".join(map(_NUMBERS.__getitem__, ids))


def _fold(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big")


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _pickled(value: object) -> bytes:
    return pickle.dumps(value, protocol=5)  # the highest of every Python from 3.8 on


def python_hash(text: str, seed: int, *, rounds: int = 1) -> int:
    """hash(text) in a 64-bit CPython with PYTHONHASHSEED=seed, for ASCII. `rounds` of SipHash per word: 1 from Python
    3.11 on, 2 before."""
    state = seed
    secret = bytearray(16)
    if seed:
        for i in range(16):
            state = (state * 214_013 + 2_531_011) & 0xFFFFFFFF
            secret[i] = state >> 16 & 0xFF
    data = text.encode("ascii")
    words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data) & ~7, 8)]
    words.append(len(data) << 56 & _MASK | int.from_bytes(data[len(data) & ~7 :], "little"))
    k0, k1 = int.from_bytes(secret[:8], "little"), int.from_bytes(secret[8:], "little")
    v = [k0 ^ 0x736F6D6570736575, k1 ^ 0x646F72616E646F6D, k0 ^ 0x6C7967656E657261, k1 ^ 0x7465646279746573]
    for word in words:
        v[3] ^= word
        for _ in range(rounds):
            _sip_round(v)
        v[0] ^= word
    v[2] ^= 0xFF
    for _ in range(rounds + 2):
        _sip_round(v)
    result = v[0] ^ v[1] ^ v[2] ^ v[3]
    signed = result - (1 << 64) if result >> 63 else result
    return -2 if signed == -1 else signed


_MASK: Final = (1 << 64) - 1


def _rotated(word: int, by: int) -> int:
    return (word << by | word >> 64 - by) & _MASK


def _sip_round(v: list[int]) -> None:
    v[0] = v[0] + v[1] & _MASK
    v[1] = _rotated(v[1], 13) ^ v[0]
    v[0] = _rotated(v[0], 32)
    v[2] = v[2] + v[3] & _MASK
    v[3] = _rotated(v[3], 16) ^ v[2]
    v[0] = v[0] + v[3] & _MASK
    v[3] = _rotated(v[3], 21) ^ v[0]
    v[2] = v[2] + v[1] & _MASK
    v[1] = _rotated(v[1], 17) ^ v[2]
    v[2] = _rotated(v[2], 32)


@dataclass(frozen=True, slots=True)
class Chain:
    """One way to name chunks: a function with its root. `name` is for people."""

    name: str
    root: Hash
    link: Callable[[Hash, array[int]], Hash]


def _builtin(before: Hash, ids: array[int]) -> Hash:
    return hash((before, tuple(ids), ()))  # of numbers alone: the same in every 64-bit CPython from 3.8 on


def _folded_cbor(digest: Callable[[bytes], bytes]) -> Callable[[Hash, array[int]], Hash]:
    def link(before: Hash, ids: array[int]) -> Hash:
        assert isinstance(before, int)
        return _fold(digest(b"\x83" + _cbor_head(0, before) + _cbor_ids(ids) + b"\x80"))

    return link


def _folded_pickle(digest: Callable[[bytes], bytes]) -> Callable[[Hash, array[int]], Hash]:
    def link(before: Hash, ids: array[int]) -> Hash:
        return _fold(digest(_pickled((before, tuple(ids), ()))))

    return link


def _whole_sha256_cbor(before: Hash, ids: array[int]) -> Hash:
    assert isinstance(before, bytes)
    return _sha256(b"\x83" + _cbor_head(2, len(before)) + before + _cbor_ids(ids) + b"\xf6")


_xxh3: Final[Callable[[bytes], bytes]] = xxhash.xxh3_128_digest
_sha256_cbor: Final = _folded_cbor(_sha256)
_sha256_pickle: Final = _folded_pickle(_sha256)
_xxhash_cbor: Final = _folded_cbor(_xxh3)
_xxhash_pickle: Final = _folded_pickle(_xxh3)


def in_process_chains(seed: str) -> list[Chain]:
    """The ways of the in-process form, the likely ones first. `seed`: the engines' PYTHONHASHSEED, a number."""
    said = f"PYTHONHASHSEED={seed}"
    return [
        Chain(f"builtin, {said}", python_hash(seed, int(seed)), _builtin),
        Chain(f"sha256_cbor, {said}", _fold(_sha256(_cbor_text(seed))), _sha256_cbor),
        Chain("sha256_cbor", _fold(_sha256(_cbor_text(VLLM_SEED))), _sha256_cbor),
        Chain(f"sha256, {said}", _fold(_sha256(_pickled(seed))), _sha256_pickle),
        Chain("sha256", _fold(_sha256(_pickled(VLLM_SEED))), _sha256_pickle),
        Chain("builtin, before vLLM 0.10", 0, _builtin),
        Chain(f"builtin, {said}, Python 3.10", python_hash(seed, int(seed), rounds=2), _builtin),
        Chain(f"xxhash_cbor, {said}", _fold(_xxh3(_cbor_text(seed))), _xxhash_cbor),
        Chain(f"xxhash, {said}", _fold(_xxh3(_pickled(seed))), _xxhash_pickle),
    ]


def multi_process_chains(seed: str) -> list[Chain]:
    """The ways of the multi-process form; without blake3 (blake3_missing) its default is not among them."""
    chains = [
        Chain(f"sha256_cbor, PYTHONHASHSEED={seed}", _sha256(_cbor_text(seed)), _whole_sha256_cbor),
        Chain("sha256_cbor", _sha256(_cbor_text(VLLM_SEED)), _whole_sha256_cbor),
    ]
    blake3 = _blake3()
    if blake3 is not None:

        def link(before: Hash, ids: array[int]) -> Hash:
            assert isinstance(before, bytes)
            return digest(before + _big_endian(ids))

        def digest(data: bytes) -> bytes:
            return bytes(blake3(data).digest())

        chains.insert(0, Chain("blake3", digest(bytes(12)), link))  # the root: a zero of 8 bytes, then token 0
    return chains


def blake3_missing() -> bool:
    return _blake3() is None


def _blake3() -> Any:
    try:
        from blake3 import blake3
    except ImportError:
        return None
    return blake3


def _big_endian(ids: array[int]) -> bytes:
    words = array("I", ids)
    words.byteswap()
    return words.tobytes()


def as_hex(chunk: Hash) -> bytes:
    """As it stands in a key: a negative number with its sign."""
    return chunk.hex().encode() if isinstance(chunk, bytes) else b"%x" % chunk


class ChunkHasher:
    """Hashes of a prompt's whole chunks, in order. What was hashed before is remembered by a digest of its tokens, so a
    growing conversation costs its new chunks: 256 tokens take 4 us (blake3), 6 us (builtin) or 23 us (cbor) at first,
    then 1 us."""

    __slots__ = ("_limit", "_remembered")

    def __init__(self, limit: int = MEMORY_LIMIT) -> None:
        self._limit = limit
        self._remembered: OrderedDict[tuple[Hash, bytes], Hash] = OrderedDict()

    def __len__(self) -> int:
        return len(self._remembered)

    def hashes(self, chain: Chain, ids: array[int], chunk_tokens: int, most: int) -> list[Hash]:
        """Of at most the first `most` whole chunks. `ids` are array("I")."""
        remembered = self._remembered
        before = chain.root
        name = chain.name.encode()
        found: list[Hash] = []
        for at in range(0, min(len(ids) // chunk_tokens, most) * chunk_tokens, chunk_tokens):
            part = ids[at : at + chunk_tokens]
            key = (before, xxhash.xxh3_128_digest(part.tobytes() + name))
            known = remembered.get(key)
            if known is None:
                known = remembered[key] = chain.link(before, part)
                if len(remembered) > self._limit:
                    remembered.popitem(last=False)
            else:
                remembered.move_to_end(key)
            found.append(known)
            before = known
        return found
