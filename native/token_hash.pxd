"""XXH3 (64 bits), and the one definition of a KV block's identity."""

from libc.stdint cimport uint8_t, uint32_t, uint64_t

# XXH3_64bits_withSeed of n bytes, equal to the reference implementation's for every length. `data` may be NULL where
# n is 0.
cdef uint64_t xxh3(const uint8_t* data, size_t n, uint64_t seed) noexcept nogil

# The three steps of the identity; what they mean is in the .pyi.
cdef uint64_t root_chain(const uint8_t* adapter, size_t n) noexcept nogil
cdef uint64_t mix_extra(uint64_t chain, const uint8_t* extra, size_t n) noexcept nogil
cdef uint64_t chain_block(uint64_t chain, const uint32_t* tokens, size_t n) noexcept nogil
