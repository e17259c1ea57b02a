"""KV events out of msgpack: a reader that builds no objects. The story is in kv_events.pyx."""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

cdef enum EventKind:
    EVENT_UNKNOWN = 0  # of a type or shape that we do not know; well-formed
    EVENT_STORED = 1
    EVENT_REMOVED = 2
    EVENT_CLEARED = 3

cdef enum:
    MEDIUM_GPU = 0
    MEDIUM_CPU = 1
    MEDIUM_STORAGE = 2
    MEDIA = 3


cdef struct Reader:
    const uint8_t* p
    const uint8_t* end


# A growing array of one event's hashes and tokens, kept for the next. A frame of n bytes makes at most 12 n bytes.
cdef struct Scratch:
    uint64_t* hashes
    uint32_t* tokens
    size_t hash_room
    size_t token_room


cdef struct Event:
    int kind
    const uint64_t* hashes  # into the scratch, valid until the next event is read
    const uint32_t* tokens
    size_t hash_count
    size_t token_count
    uint64_t parent
    bint has_parent
    uint32_t block_size
    uint32_t medium
    uint32_t group
    int64_t adapter_id
    bint has_adapter_id
    const uint8_t* adapter  # name in UTF-8, NULL for none
    size_t adapter_size
    const uint8_t* extras  # the array of one entry a block, NULL for none
    const uint8_t* extras_end
    const uint8_t* begin  # the event's own bytes
    const uint8_t* end


cdef struct Batch:
    double timestamp
    int64_t rank  # data-parallel rank, -1 for none
    uint64_t events


# False where the bytes are not (or no longer) msgpack of the shape that is asked for; the reader then is of no use.
cdef bint read_batch_head(Reader* reader, Batch* batch, uint32_t* more) noexcept nogil
cdef bint read_batch_tail(Reader* reader, Batch* batch, uint32_t more) noexcept nogil
# 0 malformed, 1 read, -1 no memory for the scratch.
cdef int read_event(Reader* reader, Scratch* scratch, Event* event) noexcept nogil
cdef void free_scratch(Scratch* scratch) noexcept nogil
# Chains the extras of the next block of `extras` (see Event) into `chain`.
cdef uint64_t mix_block_extras(Reader* extras, uint64_t chain, const Event* event) noexcept nogil
