"""XXH64, and the chained block hashes of a prompt."""

cimport cython
from libc.stdint cimport uint8_t, uint64_t

# The digest of n bytes, equal to the reference implementation's for every length and seed, on either byte order.
# `data` may be NULL where n is 0.
cdef uint64_t xxh64(const uint8_t* data, size_t n, uint64_t seed) noexcept nogil


@cython.final
cdef class BlockHashes:
    cdef uint64_t* data  # n hashes in prompt order; NULL where n is 0; never changed after construction
    cdef Py_ssize_t n


# The hashes of the full blocks of data[0:n]: h_0 = xxh64(block_0, seed), h_i = xxh64(block_i, h_(i-1)).
# ValueError for block_bytes of 0, MemoryError where the array cannot be had.
cdef BlockHashes hash_blocks(const uint8_t* data, size_t n, size_t block_bytes, uint64_t seed)
