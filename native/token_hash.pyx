"""XXH3 (64 bits), and the one definition of a KV block's identity: token_hash.pyi says what it is.

XXH3 is written from the xxHash specification, all five ranges of length. It is chosen over the XXH64 of block_hash
for its latency: a block's hash seeds the next, so nothing overlaps, and of 64 bytes (16 tokens) it needs a third of the
time (measured: 6 ns against 16).
"""

from cpython.buffer cimport PyBUF_CONTIG_RO, PyBUF_FORMAT, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer
from cpython.long cimport PyLong_AsUnsignedLong
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from libc.stdint cimport uint8_t, uint32_t, uint64_t

from native.block_hash cimport BlockHashes


cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>

    #define X3_P32_1 0x9E3779B1ULL
    #define X3_P32_2 0x85EBCA77ULL
    #define X3_P32_3 0xC2B2AE3DULL
    #define X3_P64_1 0x9E3779B185EBCA87ULL
    #define X3_P64_2 0xC2B2AE3D27D4EB4FULL
    #define X3_P64_3 0x165667B19E3779F9ULL
    #define X3_P64_4 0x85EBCA77C2B2AE63ULL
    #define X3_P64_5 0x27D4EB2F165667C5ULL
    #define X3_MX1 0x165667919E3779F9ULL
    #define X3_MX2 0x9FB21C651E98DF25ULL

    static const uint8_t x3_secret[192] = {
        0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
        0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
        0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
        0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
        0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
        0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
        0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
        0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
        0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
        0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
        0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
        0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
    };

    static inline uint64_t x3_read64(const uint8_t *p) {
        uint64_t word;
        memcpy(&word, p, sizeof word);
    #if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
        word = __builtin_bswap64(word);
    #endif
        return word;
    }
    static inline uint64_t x3_read32(const uint8_t *p) {
        uint32_t word;
        memcpy(&word, p, sizeof word);
    #if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
        word = __builtin_bswap32(word);
    #endif
        return word;
    }
    static inline void x3_write64(uint8_t *p, uint64_t word) {
    #if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
        word = __builtin_bswap64(word);
    #endif
        memcpy(p, &word, sizeof word);
    }
    static inline uint64_t x3_rotl(uint64_t x, int bits) { return (x << bits) | (x >> (64 - bits)); }
    static inline uint64_t x3_fold(uint64_t a, uint64_t b) {
        unsigned __int128 product = (unsigned __int128)a * b;
        return (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    static inline uint64_t x3_avalanche(uint64_t h) {
        h ^= h >> 37;
        h *= X3_MX1;
        return h ^ (h >> 32);
    }
    static inline uint64_t x3_avalanche64(uint64_t h) {
        h = (h ^ (h >> 33)) * X3_P64_2;
        h = (h ^ (h >> 29)) * X3_P64_3;
        return h ^ (h >> 32);
    }
    static inline uint64_t x3_mix16(const uint8_t *in, const uint8_t *secret, uint64_t seed) {
        return x3_fold(x3_read64(in) ^ (x3_read64(secret) + seed), x3_read64(in + 8) ^ (x3_read64(secret + 8) - seed));
    }

    static uint64_t x3_upto16(const uint8_t *in, size_t n, uint64_t seed) {
        if (n > 8) {
            uint64_t flip_1 = (x3_read64(x3_secret + 24) ^ x3_read64(x3_secret + 32)) + seed;
            uint64_t flip_2 = (x3_read64(x3_secret + 40) ^ x3_read64(x3_secret + 48)) - seed;
            uint64_t low = x3_read64(in) ^ flip_1, high = x3_read64(in + n - 8) ^ flip_2;
            return x3_avalanche(n + __builtin_bswap64(low) + high + x3_fold(low, high));
        }
        if (n >= 4) {
            seed ^= (uint64_t)__builtin_bswap32((uint32_t)seed) << 32;
            uint64_t h = x3_read32(in + n - 4) + (x3_read32(in) << 32);
            h ^= (x3_read64(x3_secret + 8) ^ x3_read64(x3_secret + 16)) - seed;
            h ^= x3_rotl(h, 49) ^ x3_rotl(h, 24);
            h *= X3_MX2;
            h ^= (h >> 35) + n;
            h *= X3_MX2;
            return h ^ (h >> 28);
        }
        if (n > 0) {
            uint64_t word = ((uint64_t)in[0] << 16) | ((uint64_t)in[n >> 1] << 24) | in[n - 1] | ((uint64_t)n << 8);
            return x3_avalanche64(word ^ ((x3_read32(x3_secret) ^ x3_read32(x3_secret + 4)) + seed));
        }
        return x3_avalanche64(seed ^ x3_read64(x3_secret + 56) ^ x3_read64(x3_secret + 64));
    }

    static uint64_t x3_upto240(const uint8_t *in, size_t n, uint64_t seed) {
        uint64_t acc = n * X3_P64_1, last;
        size_t i;
        for (i = 0; i < 8; i++)
            acc += x3_mix16(in + 16 * i, x3_secret + 16 * i, seed);
        last = x3_mix16(in + n - 16, x3_secret + 136 - 17, seed);
        acc = x3_avalanche(acc);
        for (i = 8; i < n / 16; i++)
            last += x3_mix16(in + 16 * i, x3_secret + 16 * (i - 8) + 3, seed);
        return x3_avalanche(acc + last);
    }

    static inline void x3_stripe(uint64_t *acc, const uint8_t *in, const uint8_t *secret) {
        for (int i = 0; i < 8; i++) {
            uint64_t word = x3_read64(in + 8 * i), keyed = word ^ x3_read64(secret + 8 * i);
            acc[i ^ 1] += word;
            acc[i] += (keyed & 0xFFFFFFFFULL) * (keyed >> 32);
        }
    }

    static uint64_t x3_long(const uint8_t *in, size_t n, uint64_t seed) {
        uint64_t acc[8] = {X3_P32_3, X3_P64_1, X3_P64_2, X3_P64_3, X3_P64_4, X3_P32_2, X3_P64_5, X3_P32_1};
        uint8_t secret[192];
        size_t blocks = (n - 1) / 1024, block, i;
        for (i = 0; i < 12; i++) {
            x3_write64(secret + 16 * i, x3_read64(x3_secret + 16 * i) + seed);
            x3_write64(secret + 16 * i + 8, x3_read64(x3_secret + 16 * i + 8) - seed);
        }
        for (block = 0; block < blocks; block++) {
            for (i = 0; i < 16; i++)
                x3_stripe(acc, in + 1024 * block + 64 * i, secret + 8 * i);
            for (i = 0; i < 8; i++)
                acc[i] = (acc[i] ^ (acc[i] >> 47) ^ x3_read64(secret + 128 + 8 * i)) * X3_P32_1;
        }
        for (i = 0; i < (n - 1 - 1024 * blocks) / 64; i++)
            x3_stripe(acc, in + 1024 * blocks + 64 * i, secret + 8 * i);
        x3_stripe(acc, in + n - 64, secret + 192 - 64 - 7);
        uint64_t h = n * X3_P64_1;
        for (i = 0; i < 4; i++)
            h += x3_fold(acc[2 * i] ^ x3_read64(secret + 11 + 16 * i), acc[2 * i + 1] ^ x3_read64(secret + 19 + 16 * i));
        return x3_avalanche(h);
    }

    static inline uint64_t x3_hash(const uint8_t *in, size_t n, uint64_t seed) {
        if (n > 16 && n <= 128) {
            uint64_t acc = n * X3_P64_1;
            if (n > 32) {
                if (n > 64) {
                    if (n > 96) {
                        acc += x3_mix16(in + 48, x3_secret + 96, seed);
                        acc += x3_mix16(in + n - 64, x3_secret + 112, seed);
                    }
                    acc += x3_mix16(in + 32, x3_secret + 64, seed);
                    acc += x3_mix16(in + n - 48, x3_secret + 80, seed);
                }
                acc += x3_mix16(in + 16, x3_secret + 32, seed);
                acc += x3_mix16(in + n - 32, x3_secret + 48, seed);
            }
            acc += x3_mix16(in, x3_secret, seed);
            acc += x3_mix16(in + n - 16, x3_secret + 16, seed);
            return x3_avalanche(acc);
        }
        if (n <= 16)
            return x3_upto16(in, n, seed);
        return n <= 240 ? x3_upto240(in, n, seed) : x3_long(in, n, seed);
    }
    #define X3_ADAPTERS 0x6164617074657273ULL
    #define X3_EXTRAS 0xA5E1C3B7985F2D61ULL
    """
    uint64_t x3_hash(const uint8_t* data, size_t n, uint64_t seed) noexcept nogil
    # Seeds that keep the three uses apart: without them, a salt that spells tokens would name their block.
    const uint64_t X3_ADAPTERS
    const uint64_t X3_EXTRAS

cdef enum:
    # vLLM's largest unit, of hybrid models, is some thousands.
    BLOCK_SIZE_AT_MOST = 65536


cdef uint64_t xxh3(const uint8_t* data, size_t n, uint64_t seed) noexcept nogil:
    return x3_hash(data, n, seed)


cdef uint64_t root_chain(const uint8_t* adapter, size_t n) noexcept nogil:
    return x3_hash(adapter, n, X3_ADAPTERS) if n > 0 else 0


cdef uint64_t mix_extra(uint64_t chain, const uint8_t* extra, size_t n) noexcept nogil:
    return x3_hash(extra, n, chain ^ X3_EXTRAS)


cdef uint64_t chain_block(uint64_t chain, const uint32_t* tokens, size_t n) noexcept nogil:
    return x3_hash(<const uint8_t*>tokens, n * sizeof(uint32_t), chain)


def xxh3_digest(bytes data not None, uint64_t seed=0):
    return x3_hash(<const uint8_t*>data, <size_t>len(data), seed)


def block_hashes(tokens, Py_ssize_t block_size, str lora=None, str salt=None, mm=()):
    if not 1 <= block_size <= BLOCK_SIZE_AT_MOST:
        raise ValueError(f"block_size must be from 1 to {BLOCK_SIZE_AT_MOST}, not {block_size}")
    cdef bytes adapter = b"" if lora is None else lora.encode()
    cdef list items = [(name.encode(), <Py_ssize_t>start, <Py_ssize_t>length) for name, start, length in mm]
    cdef bytes salt_bytes = None if salt is None or not salt else salt.encode()
    cdef uint64_t chain = root_chain(<const uint8_t*>adapter, <size_t>len(adapter))
    cdef Py_buffer view
    if PyObject_CheckBuffer(tokens):
        PyObject_GetBuffer(tokens, &view, PyBUF_CONTIG_RO | PyBUF_FORMAT)
        try:
            if view.itemsize != 4 or view.format == NULL or view.format[0] not in (c"I", c"L"):
                raise TypeError("a buffer of tokens must hold unsigned 32-bit numbers")
            return chained(<const uint32_t*>view.buf, view.len // 4, block_size, chain, salt_bytes, items)
        finally:
            PyBuffer_Release(&view)
    cdef list ids = tokens if type(tokens) is list else list(tokens)
    # Only full blocks are read, so only their ids are converted.
    cdef Py_ssize_t n = len(ids) // block_size * block_size
    cdef uint32_t* data = <uint32_t*>PyMem_RawMalloc(<size_t>max(n, 1) * sizeof(uint32_t))
    cdef Py_ssize_t i
    cdef unsigned long value
    if data == NULL:
        raise MemoryError
    try:
        for i in range(n):
            value = PyLong_AsUnsignedLong(ids[i])
            if value > 0xFFFFFFFF:
                raise OverflowError(f"token {value} is no unsigned 32-bit number")
            data[i] = <uint32_t>value
        return chained(data, n, block_size, chain, salt_bytes, items)
    finally:
        PyMem_RawFree(data)


cdef BlockHashes chained(
    const uint32_t* tokens, Py_ssize_t n, Py_ssize_t block_size, uint64_t chain, bytes salt, list items
):
    cdef BlockHashes blocks = BlockHashes.__new__(BlockHashes)
    cdef Py_ssize_t count = n // block_size
    cdef Py_ssize_t i, begin, start, length
    cdef Py_ssize_t first = 0  # items before it end before the block
    cdef Py_ssize_t k
    cdef Py_ssize_t item_count = len(items)
    cdef bytes name
    if count == 0:
        return blocks
    blocks.data = <uint64_t*>PyMem_RawMalloc(<size_t>count * sizeof(uint64_t))
    if blocks.data == NULL:
        raise MemoryError
    blocks.n = count
    for i in range(count):
        begin = i * block_size
        k = first
        while k < item_count:
            name, start, length = items[k]
            if start >= begin + block_size:
                break
            if start + length > begin:
                chain = mix_extra(chain, <const uint8_t*>name, <size_t>len(name))
            elif k == first:
                first += 1
            k += 1
        if i == 0 and salt is not None:
            chain = mix_extra(chain, <const uint8_t*>salt, <size_t>len(salt))
        chain = chain_block(chain, tokens + begin, <size_t>block_size)
        blocks.data[i] = chain
    return blocks
