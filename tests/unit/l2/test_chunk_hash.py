"""Names of chunks, compared with those that LMCache 0.5.6 made in an environment with vLLM 0.32."""

from __future__ import annotations

import subprocess
import sys
from array import array

import pytest

from router.l2 import chunk_hash
from router.l2.chunk_hash import Chain, ChunkHasher, as_hex, in_process_chains, multi_process_chains, python_hash

IDS = array("I", [(i * 2654435761) % 151936 for i in range(600)])
# ChunkedTokenDatabase.process_tokens(IDS), chunk_size 256, by PYTHONHASHSEED ("" where it was not set)
IN_PROCESS = {
    ("builtin", "0"): ["-1e9a9b550ec7febe", "afaa8d2f21f482"],
    ("sha256_cbor", "0"): ["e2d3732d1a524c5e", "706382ee346c9161"],
    ("sha256", "0"): ["c7b813757a294623", "9962352f7d0e20ef"],
    ("xxhash_cbor", "0"): ["31804ec542e64ffb", "fa24e6d9bf8ae2e0"],
    ("xxhash", "0"): ["540333dcdab19862", "5f39880479f4a20"],
    ("builtin", "7"): ["-21f20b4aced43364", "-782bb000c33a65a0"],
    ("sha256_cbor", "7"): ["d6780faef09bde4d", "fdb33f1ee16e443"],
    ("sha256", "7"): ["dbcdf775c0b1134", "9b470e54ccc2553a"],
    ("xxhash_cbor", "7"): ["3c5afa0aca8c58eb", "8e72c961cae1cb9f"],
    ("xxhash", "7"): ["567341a14db24fa7", "d4680e23241a17d9"],
    ("sha256_cbor", ""): ["b491d2659aab9dff", "741f82b5adf463f7"],
    ("sha256", ""): ["f534928782e694b1", "1e2dc0089a99a53e"],
}
# TokenHasher.compute_chunk_hashes(IDS)
MULTI_PROCESS = {
    ("blake3", ""): [
        "5d7c605550abfe32390ca96346fc78be550a33ce6dc8151d1a9da07ecebc490b",
        "a3b9f68cd3efa51cce5237f394d7eb8b5c3d0bae1aa7b9089f2cfc79feeff251",
    ],
    ("sha256_cbor", "0"): [
        "9465306f3104f8595ba5bfdfcfc99e928de16280034f3fd916c12eec3d99e47d",
        "038c020de8cf8dafbe25dde24d090b70279c8cf7f4fb88480c357a3e56dc08da",
    ],
    ("sha256_cbor", ""): [
        "080cd456f46ea415717521eed00d556616af3ce35d827eb5badb4c6cee24a029",
        "1bf3b114b4cb002e01e26a02e936a4d8e2db11ffc419af374420e049e44856ab",
    ],
}


def named(chains: list[Chain], algorithm: str, seed: str) -> Chain:
    name = f"{algorithm}, PYTHONHASHSEED={seed}" if seed else algorithm
    return next(chain for chain in chains if chain.name == name)


def names_of(chain: Chain) -> list[str]:
    return [as_hex(chunk).decode() for chunk in ChunkHasher().hashes(chain, IDS, 256, 99)]


@pytest.mark.parametrize(("algorithm", "seed"), IN_PROCESS)
def test_the_in_process_form_names_chunks_as_lmcache_does(algorithm: str, seed: str) -> None:
    chain = named(in_process_chains(seed or "0"), algorithm, seed)
    assert names_of(chain) == IN_PROCESS[algorithm, seed]


@pytest.mark.parametrize(("algorithm", "seed"), MULTI_PROCESS)
def test_the_multi_process_form_names_chunks_as_lmcache_does(algorithm: str, seed: str) -> None:
    chain = named(multi_process_chains(seed or "0"), algorithm, seed)
    assert names_of(chain) == MULTI_PROCESS[algorithm, seed]


def test_every_way_has_its_own_names() -> None:
    chains = in_process_chains("0") + multi_process_chains("0")
    assert len({names_of(chain)[0] for chain in chains}) == len(chains)


def test_without_blake3_the_other_ways_are_left_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not chunk_hash.blake3_missing()
    monkeypatch.setitem(sys.modules, "blake3", None)
    assert chunk_hash.blake3_missing()
    assert [chain.name for chain in multi_process_chains("0")] == ["sha256_cbor, PYTHONHASHSEED=0", "sha256_cbor"]


@pytest.mark.parametrize("seed", [0, 7, 4294967295])
def test_the_hash_of_a_string_is_that_of_a_python_with_this_seed(seed: int) -> None:
    texts = ["", "0", str(seed), "vllm-none-hash", "eight by", "more than eight bytes"]
    script = f"print([hash(text) for text in {texts!r}])"
    seeded = subprocess.run(
        [sys.executable, "-c", script],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONHASHSEED": str(seed)},
    )
    ours = [python_hash(text, seed) if text else 0 for text in texts]  # CPython gives the empty string 0
    assert seeded.stdout == f"{ours}\n"


@pytest.mark.parametrize(
    ("number", "encoded"),
    [
        (0, "00"),
        (23, "17"),
        (24, "1818"),
        (255, "18ff"),
        (256, "190100"),
        (65_535, "19ffff"),
        (65_536, "1a00010000"),
        (2**32 - 1, "1affffffff"),
    ],
)
def test_token_ids_take_the_shortest_cbor(number: int, encoded: str) -> None:
    """RFC 8949, section 3.1 and appendix A."""
    for _ in range(2):  # the second time it is remembered
        assert chunk_hash._cbor_ids(array("I", [number])).hex() == "81" + encoded


def test_only_whole_chunks_count_and_no_more_than_asked_for() -> None:
    chain = in_process_chains("0")[0]
    hasher = ChunkHasher()
    assert hasher.hashes(chain, IDS[:255], 256, 9) == []
    assert len(hasher.hashes(chain, IDS[:512], 256, 9)) == 2
    assert len(hasher.hashes(chain, IDS, 64, 3)) == 3


def test_what_was_hashed_is_remembered_up_to_a_bound_and_right_either_way() -> None:
    hasher = ChunkHasher(limit=4)
    calls = []
    chain = in_process_chains("0")[0]

    def counting(before: chunk_hash.Hash, ids: array[int]) -> chunk_hash.Hash:
        calls.append(len(ids))
        return chain.link(before, ids)

    counted = Chain("counted", chain.root, counting)
    first = hasher.hashes(counted, IDS[:512], 256, 9)
    again = hasher.hashes(counted, IDS[:512] + IDS[:256], 256, 9)
    assert again[:2] == first
    assert len(calls) == 3
    for n in range(10):
        hasher.hashes(counted, array("I", [n] * 256), 256, 9)
    assert len(hasher) == 4
    assert hasher.hashes(counted, IDS[:512], 256, 9) == first
