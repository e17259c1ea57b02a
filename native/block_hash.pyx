"""XXH64, and the chained block hashes of a prompt.

A block's hash is seeded with the hash of the block before it, so that one 64-bit number names a block together with
everything in front of it: two prompts that share hash i share their first i + 1 blocks. A partial tail is not hashed,
because a longer prompt cannot share it.

The algorithm is that of the xxHash specification (XXH64), written from it: four lanes of 8 bytes over each stripe of
32, then the rest in steps of 8, 4 and 1, then an avalanche.
"""

cimport cython
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp


# The constants are C macros for want of 64-bit unsigned literals in Cython; the reads go through memcpy, so that no
# alignment is assumed, and are little endian, as the specification has it.
cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>

    #define KVGATE_XXH_P1 0x9E3779B185EBCA87ULL
    #define KVGATE_XXH_P2 0xC2B2AE3D27D4EB4FULL
    #define KVGATE_XXH_P3 0x165667B19E3779F9ULL
    #define KVGATE_XXH_P4 0x85EBCA77C2B2AE63ULL
    #define KVGATE_XXH_P5 0x27D4EB2F165667C5ULL

    static inline uint64_t kvgate_read64(const uint8_t *p) {
        uint64_t word;
        memcpy(&word, p, sizeof word);
    #if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
        word = __builtin_bswap64(word);
    #endif
        return word;
    }

    static inline uint32_t kvgate_read32(const uint8_t *p) {
        uint32_t word;
        memcpy(&word, p, sizeof word);
    #if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
        word = __builtin_bswap32(word);
    #endif
        return word;
    }
    """
    const uint64_t P1 "KVGATE_XXH_P1"
    const uint64_t P2 "KVGATE_XXH_P2"
    const uint64_t P3 "KVGATE_XXH_P3"
    const uint64_t P4 "KVGATE_XXH_P4"
    const uint64_t P5 "KVGATE_XXH_P5"
    uint64_t read64 "kvgate_read64"(const uint8_t* p) noexcept nogil
    uint32_t read32 "kvgate_read32"(const uint8_t* p) noexcept nogil


cdef inline uint64_t rotate_left(uint64_t x, int bits) noexcept nogil:
    return (x << bits) | (x >> (64 - bits))


cdef inline uint64_t lane_round(uint64_t lane, uint64_t word) noexcept nogil:
    return rotate_left(lane + word * P2, 31) * P1


cdef inline uint64_t merge_lane(uint64_t acc, uint64_t lane) noexcept nogil:
    return (acc ^ lane_round(0, lane)) * P1 + P4


cdef uint64_t xxh64(const uint8_t* data, size_t n, uint64_t seed) noexcept nogil:
    cdef const uint8_t* p = data
    cdef size_t left = n
    cdef uint64_t lane_1, lane_2, lane_3, lane_4, acc
    if left >= 32:
        lane_1 = seed + P1 + P2
        lane_2 = seed + P2
        lane_3 = seed
        lane_4 = seed - P1
        while left >= 32:
            lane_1 = lane_round(lane_1, read64(p))
            lane_2 = lane_round(lane_2, read64(p + 8))
            lane_3 = lane_round(lane_3, read64(p + 16))
            lane_4 = lane_round(lane_4, read64(p + 24))
            p += 32
            left -= 32
        acc = rotate_left(lane_1, 1) + rotate_left(lane_2, 7) + rotate_left(lane_3, 12) + rotate_left(lane_4, 18)
        acc = merge_lane(acc, lane_1)
        acc = merge_lane(acc, lane_2)
        acc = merge_lane(acc, lane_3)
        acc = merge_lane(acc, lane_4)
    else:
        acc = seed + P5
    acc += <uint64_t>n
    while left >= 8:
        acc = rotate_left(acc ^ lane_round(0, read64(p)), 27) * P1 + P4
        p += 8
        left -= 8
    if left >= 4:
        acc = rotate_left(acc ^ (<uint64_t>read32(p) * P1), 23) * P2 + P3
        p += 4
        left -= 4
    while left > 0:
        acc = rotate_left(acc ^ (<uint64_t>p[0] * P5), 11) * P1
        p += 1
        left -= 1
    acc = (acc ^ (acc >> 33)) * P2
    acc = (acc ^ (acc >> 29)) * P3
    return acc ^ (acc >> 32)


def xxh64_digest(const uint8_t[::1] data not None, uint64_t seed=0):
    # The C function's face for Python: tests, and small keys. Its contract is in the .pyi, like all below.
    cdef Py_ssize_t n = data.shape[0]
    return xxh64(&data[0] if n > 0 else NULL, <size_t>n, seed)


@cython.final
cdef class BlockHashes:
    def __cinit__(self):
        self.data = NULL
        self.n = 0

    def __init__(self):
        raise TypeError("BlockHashes come from from_bytes() or from_list()")

    def __dealloc__(self):
        PyMem_RawFree(self.data)

    @staticmethod
    def from_bytes(bytes data not None, Py_ssize_t block_bytes, uint64_t seed=0):
        if block_bytes < 1:
            raise ValueError(f"block_bytes must be at least 1, not {block_bytes}")
        return hash_blocks(<const uint8_t*>data, <size_t>len(data), <size_t>block_bytes, seed)

    @staticmethod
    def from_list(list hashes not None):
        cdef BlockHashes blocks = with_room(len(hashes))
        cdef Py_ssize_t i
        for i in range(blocks.n):
            # Cython's conversion alone would call __int__, and so take 1.5 for 1.
            if not isinstance(hashes[i], int):
                raise TypeError(f"a hash must be int, not {type(hashes[i]).__name__}")
            blocks.data[i] = hashes[i]
        return blocks

    def __len__(self):
        return self.n

    def __getitem__(self, Py_ssize_t i):
        if i < 0:
            i += self.n
        if not 0 <= i < self.n:
            raise IndexError("block index out of range")
        return self.data[i]

    def __eq__(self, other):
        if not isinstance(other, BlockHashes):
            return NotImplemented
        cdef BlockHashes that = <BlockHashes>other
        if self.n != that.n:
            return False
        return self.n == 0 or memcmp(self.data, that.data, <size_t>self.n * sizeof(uint64_t)) == 0

    def __hash__(self):
        # The last hash names the whole chain.
        return hash(self.data[self.n - 1]) if self.n > 0 else 0

    def __repr__(self):
        return f"<BlockHashes of {self.n} blocks>"

    def tolist(self):
        cdef Py_ssize_t i
        return [self.data[i] for i in range(self.n)]


cdef BlockHashes with_room(Py_ssize_t n):
    cdef BlockHashes blocks = BlockHashes.__new__(BlockHashes)
    if n > 0:
        blocks.data = <uint64_t*>PyMem_RawMalloc(<size_t>n * sizeof(uint64_t))
        if blocks.data == NULL:
            raise MemoryError
        blocks.n = n
    return blocks


cdef BlockHashes hash_blocks(const uint8_t* data, size_t n, size_t block_bytes, uint64_t seed):
    if block_bytes == 0:
        raise ValueError("block_bytes must be at least 1")
    cdef BlockHashes blocks = with_room(<Py_ssize_t>(n // block_bytes))
    cdef uint64_t chain = seed
    cdef Py_ssize_t i
    for i in range(blocks.n):
        chain = xxh64(data + <size_t>i * block_bytes, block_bytes, chain)
        blocks.data[i] = chain
    return blocks
