"""KV events out of msgpack: a reader that builds no objects.

A batch is [timestamp, events, data-parallel rank]. An event is a map with "type" (vLLM 0.24 and later) or an array with
the tag first (up to 0.23); both may lack fields at the end and have more than we know. Hashes are integers (negative
ones of the built-in hash become their two's complement) or 1 to 64 raw bytes, folded to 64 bits by XXH3.

Nothing here trusts a length: a container that announces more elements than bytes are left is malformed at once, and
values of no interest are skipped by counting what is still to come, without recursion. So a frame costs time in
proportion to its size, however deep it nests, and the scratch is at most 12 times its size.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcmp, memcpy, memset

from native.token_hash cimport mix_extra, xxh3

cdef enum:
    # vLLM publishes some hundred kilobytes at most; a frame beyond this is refused unread.
    FRAME_BYTES_AT_MOST = 1 << 26
    HASH_BYTES_AT_MOST = 64
    NIL = 0xC0

MAX_FRAME_BYTES = FRAME_BYTES_AT_MOST


cdef extern from *:
    """
    #include <stdint.h>
    static inline uint64_t kve_be(const uint8_t *p, int n) {
        uint64_t word = 0;
        while (n-- > 0)
            word = word << 8 | *p++;
        return word;
    }
    static inline uint32_t kve_be32(const uint8_t *p) {
        return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
    }
    """
    uint32_t load_be32 "kve_be32"(const uint8_t* p) noexcept nogil
    uint64_t big_endian "kve_be"(const uint8_t* p, int n) noexcept nogil


cdef inline size_t left(const Reader* reader) noexcept nogil:
    return <size_t>(reader.end - reader.p)


# One head of a value: what kind, and its length or number. `size` bytes of payload follow for strings and the like.
cdef enum:
    T_BROKEN = 0
    T_UINT = 1
    T_NEGATIVE = 2
    T_ARRAY = 3
    T_MAP = 4
    T_STRING = 5
    T_BYTES = 6
    T_NIL = 7
    T_FLOAT = 8
    T_OTHER = 9


# Reads one value's head; of scalars, strings and extensions the whole value. `number` is the number, the count of
# elements, or the size of the bytes that end at reader.p.
cdef int read_head(Reader* reader, uint64_t* number) noexcept nogil:
    cdef uint32_t tag
    cdef int width
    if reader.p >= reader.end:
        return T_BROKEN
    tag = reader.p[0]
    reader.p += 1
    if tag < 0x80:
        number[0] = tag
        return T_UINT
    if tag >= 0xE0:
        number[0] = <uint64_t><int64_t>(<int>tag - 256)
        return T_NEGATIVE
    if tag >= 0xA0 and tag < 0xC0:
        return read_bytes(reader, tag & 31, T_STRING, number)
    if tag >= 0x90 and tag < 0xA0:
        return read_count(reader, tag & 15, T_ARRAY, number)
    if tag < 0x90:
        return read_count(reader, tag & 15, T_MAP, number)
    if tag == NIL:
        return T_NIL
    if tag == 0xC2 or tag == 0xC3:
        number[0] = tag & 1
        return T_OTHER
    if tag >= 0xD4 and tag <= 0xD8:  # extension of 1, 2, 4, 8, 16 bytes and its type
        return read_bytes(reader, 1 + (<uint64_t>1 << (tag - 0xD4)), T_OTHER, number)
    if tag == 0xC1:
        return T_BROKEN
    # All others have a big-endian number of 1, 2, 4 or 8 bytes behind the tag.
    if tag <= 0xC6:
        width = 1 << (tag - 0xC4)
    elif tag <= 0xC9:
        width = 1 << (tag - 0xC7)
    elif tag <= 0xCB:
        width = 4 << (tag - 0xCA)
    elif tag <= 0xCF:
        width = 1 << (tag - 0xCC)
    elif tag <= 0xD3:
        width = 1 << (tag - 0xD0)
    elif tag <= 0xDB:
        width = 1 << (tag - 0xD9)
    elif tag <= 0xDD:
        width = 2 << (tag - 0xDC)
    else:
        width = 2 << (tag - 0xDE)
    if left(reader) < <size_t>width:
        return T_BROKEN
    number[0] = big_endian(reader.p, width)
    reader.p += width
    if tag >= 0xCC and tag <= 0xCF:
        return T_UINT
    if tag <= 0xC6:
        return read_bytes(reader, number[0], T_BYTES, number)
    if tag <= 0xC9:
        return read_bytes(reader, number[0] + 1, T_OTHER, number)
    if tag <= 0xCB:
        return T_FLOAT
    if tag <= 0xD3:
        # Sign extension. A positive number in a signed encoding is an unsigned one.
        if width < 8 and (number[0] >> (8 * width - 1)) & 1:
            number[0] |= ~<uint64_t>0 << (8 * width)
        return T_NEGATIVE if number[0] >> 63 else T_UINT
    if tag <= 0xDB:
        return read_bytes(reader, number[0], T_STRING, number)
    return read_count(reader, number[0], T_ARRAY if tag <= 0xDD else T_MAP, number)


cdef inline int read_bytes(Reader* reader, uint64_t size, int kind, uint64_t* number) noexcept nogil:
    if size > left(reader):
        return T_BROKEN
    reader.p += size
    number[0] = size
    return kind


cdef inline int read_count(Reader* reader, uint64_t count, int kind, uint64_t* number) noexcept nogil:
    # Every element takes a byte at least.
    if (2 * count if kind == T_MAP else count) > left(reader):
        return T_BROKEN
    number[0] = count
    return kind


cdef bint skip_values(Reader* reader, uint64_t todo) noexcept nogil:
    cdef uint64_t number = 0
    cdef int kind
    while todo > 0:
        if todo > left(reader):
            return False
        kind = read_head(reader, &number)
        todo -= 1
        if kind == T_BROKEN:
            return False
        if kind == T_ARRAY:
            todo += number
        elif kind == T_MAP:
            todo += 2 * number
    return True


# Skips what is left of a value whose head was read.
cdef inline bint skip_rest(Reader* reader, int kind, uint64_t number) noexcept nogil:
    if kind == T_ARRAY:
        return skip_values(reader, number)
    if kind == T_MAP:
        return skip_values(reader, 2 * number)
    return kind != T_BROKEN


cdef bint read_batch_head(Reader* reader, Batch* batch, uint32_t* more) noexcept nogil:
    cdef uint64_t count = 0
    cdef uint64_t number = 0
    cdef double as_double
    cdef float as_float
    cdef uint32_t word
    cdef int kind
    cdef const uint8_t* begin
    batch.timestamp = 0.0
    batch.rank = -1
    batch.events = 0
    if left(reader) > FRAME_BYTES_AT_MOST or read_head(reader, &count) != T_ARRAY or count < 2:
        return False
    begin = reader.p
    kind = read_head(reader, &number)
    if kind == T_FLOAT and begin[0] == 0xCB:
        memcpy(&as_double, &number, 8)
        batch.timestamp = as_double
    elif kind == T_FLOAT:
        word = <uint32_t>number
        memcpy(&as_float, &word, 4)
        batch.timestamp = as_float
    elif kind == T_UINT:
        batch.timestamp = <double>number
    else:
        return False
    more[0] = <uint32_t>(count - 2)
    return read_head(reader, &batch.events) == T_ARRAY


cdef bint read_batch_tail(Reader* reader, Batch* batch, uint32_t more) noexcept nogil:
    cdef uint64_t number = 0
    cdef int kind
    if more > 0:
        kind = read_head(reader, &number)
        if kind == T_UINT and (number >> 31) == 0:
            batch.rank = <int64_t>number
        if not skip_rest(reader, kind, number) or not skip_values(reader, more - 1):
            return False
    return reader.p == reader.end


cdef enum Field:
    F_NONE = 0
    F_TYPE = 1
    F_HASHES = 2
    F_PARENT = 3
    F_TOKENS = 4
    F_BLOCK_SIZE = 5
    F_ADAPTER_ID = 6
    F_MEDIUM = 7
    F_ADAPTER = 8
    F_EXTRAS = 9
    F_GROUP = 10


cdef inline Field field_named(const uint8_t* name, uint64_t size) noexcept nogil:
    if size == 12 and memcmp(name, "block_hashes", 12) == 0:
        return F_HASHES
    if size == 9:
        if memcmp(name, "token_ids", 9) == 0:
            return F_TOKENS
        if memcmp(name, "lora_name", 9) == 0:
            return F_ADAPTER
        if memcmp(name, "group_idx", 9) == 0:
            return F_GROUP
    elif size == 4 and memcmp(name, "type", 4) == 0:
        return F_TYPE
    elif size == 6 and memcmp(name, "medium", 6) == 0:
        return F_MEDIUM
    elif size == 10:
        if memcmp(name, "block_size", 10) == 0:
            return F_BLOCK_SIZE
        if memcmp(name, "extra_keys", 10) == 0:
            return F_EXTRAS
    elif size == 7 and memcmp(name, "lora_id", 7) == 0:
        return F_ADAPTER_ID
    elif size == 17 and memcmp(name, "parent_block_hash", 17) == 0:
        return F_PARENT
    return F_NONE


cdef inline Field field_at(int kind, uint64_t i) noexcept nogil:
    # Where arrays have them (up to 0.23), the tag being 0.
    if kind == EVENT_STORED and i <= 9:
        if i == 1:
            return F_HASHES
        if i == 2:
            return F_PARENT
        if i == 3:
            return F_TOKENS
        if i == 4:
            return F_BLOCK_SIZE
        if i == 5:
            return F_ADAPTER_ID
        if i == 6:
            return F_MEDIUM
        if i == 7:
            return F_ADAPTER
        if i == 8:
            return F_EXTRAS
        if i == 9:
            return F_GROUP
    elif kind == EVENT_REMOVED:
        if i == 1:
            return F_HASHES
        if i == 2:
            return F_MEDIUM
        if i == 3:
            return F_GROUP
    return F_NONE


cdef inline int kind_named(const uint8_t* name, uint64_t size) noexcept nogil:
    if size == 11 and memcmp(name, "BlockStored", 11) == 0:
        return EVENT_STORED
    if size == 12 and memcmp(name, "BlockRemoved", 12) == 0:
        return EVENT_REMOVED
    if size == 16 and memcmp(name, "AllBlocksCleared", 16) == 0:
        return EVENT_CLEARED
    return EVENT_UNKNOWN


cdef inline uint8_t lower(uint8_t letter) noexcept nogil:
    return letter | 0x20 if 0x41 <= letter <= 0x5A else letter


cdef uint32_t medium_named(const uint8_t* name, uint64_t size) noexcept nogil:
    # Engines and connectors write GPU, CPU, cpu, FS, OBJ, STORAGE, disk; what is not memory of the engine is storage.
    if size == 3 and lower(name[1]) == c"p" and lower(name[2]) == c"u":
        if lower(name[0]) == c"g":
            return MEDIUM_GPU
        if lower(name[0]) == c"c":
            return MEDIUM_CPU
    return MEDIUM_STORAGE


# A block hash in any of its forms. 0 malformed, 1 read, 2 well-formed but no hash.
cdef inline int read_hash(Reader* reader, uint64_t* value) noexcept nogil:
    cdef uint64_t number = 0
    cdef int kind
    if left(reader) >= 9 and reader.p[0] == 0xCF:
        value[0] = big_endian(reader.p + 1, 8)
        reader.p += 9
        return 1
    kind = read_head(reader, &number)
    if kind == T_UINT or kind == T_NEGATIVE:
        value[0] = number
        return 1
    if (kind == T_BYTES or kind == T_STRING) and 1 <= number <= HASH_BYTES_AT_MOST:
        value[0] = xxh3(reader.p - number, number, 0)
        return 1
    return 2 if skip_rest(reader, kind, number) else 0


cdef int grow(void** memory, size_t* room, uint64_t need, size_t size) noexcept nogil:
    cdef size_t target = max(<size_t>need, max(<size_t>256, 2 * room[0]))
    cdef void* grown
    if need <= room[0]:
        return 1
    grown = realloc(memory[0], target * size)
    if grown == NULL:
        return -1
    memory[0] = grown
    room[0] = target
    return 1


cdef int read_hashes(Reader* reader, Scratch* scratch, Event* event, bint* bad) noexcept nogil:
    cdef uint64_t count = 0
    cdef uint64_t i
    cdef int kind = read_head(reader, &count)
    cdef int found
    event.hash_count = 0
    if kind != T_ARRAY:
        bad[0] = True
        return skip_rest(reader, kind, count)
    if grow(<void**>&scratch.hashes, &scratch.hash_room, count, sizeof(uint64_t)) < 0:
        return -1
    for i in range(count):
        found = read_hash(reader, &scratch.hashes[i])
        if found == 0:
            return 0
        if found == 2:
            bad[0] = True
    event.hash_count = count
    return 1


cdef int read_tokens(Reader* reader, Scratch* scratch, Event* event, bint* bad) noexcept nogil:
    cdef uint64_t count = 0
    cdef uint64_t number = 0
    cdef uint64_t i = 0
    cdef int kind = read_head(reader, &count)
    cdef const uint8_t* p
    cdef const uint8_t* end
    cdef uint32_t* tokens
    cdef uint32_t wide
    event.token_count = 0
    if kind != T_ARRAY:
        bad[0] = True
        return skip_rest(reader, kind, count)
    if grow(<void**>&scratch.tokens, &scratch.token_room, count, sizeof(uint32_t)) < 0:
        return -1
    tokens = scratch.tokens
    p = reader.p
    end = reader.end
    while i < count:
        # The forms that token ids have, without a check per byte while five bytes are left. Of 16 and 32 bits without
        # a branch: ids of a large vocabulary mix them as if by chance, and a wrong guess costs more than a token.
        while i < count and end - p >= 5:
            if p[0] == 0xCD or p[0] == 0xCE:
                wide = p[0] & 2
                tokens[i] = load_be32(p + 1) >> (16 - 8 * wide)
                p += 3 + wide
            elif p[0] < 0x80:
                tokens[i] = p[0]
                p += 1
            elif p[0] == 0xCC:
                tokens[i] = p[1]
                p += 2
            else:
                break
            i += 1
        if i == count:
            break
        reader.p = p
        kind = read_head(reader, &number)
        if kind != T_UINT or (number >> 32) != 0:
            bad[0] = True
            if not skip_rest(reader, kind, number):
                return 0
        tokens[i] = <uint32_t>number
        i += 1
        p = reader.p
    reader.p = p
    event.token_count = count
    return 1


cdef int read_field(Reader* reader, Scratch* scratch, Event* event, Field field, bint* bad) noexcept nogil:
    # 0 malformed, 1 read or of a wrong shape (then `bad`), -1 no memory.
    cdef uint64_t number = 0
    cdef const uint8_t* begin = reader.p
    cdef int kind
    if field == F_HASHES:
        return read_hashes(reader, scratch, event, bad)
    if field == F_TOKENS:
        return read_tokens(reader, scratch, event, bad)
    if field == F_PARENT:
        if reader.p < reader.end and reader.p[0] == NIL:
            reader.p += 1
            event.has_parent = False
            return 1
        event.has_parent = True
        kind = read_hash(reader, &event.parent)
        if kind == 2:
            bad[0] = True
        return kind != 0
    kind = read_head(reader, &number)
    if field == F_TYPE:
        event.kind = kind_named(reader.p - number, number) if kind == T_STRING else EVENT_UNKNOWN
    elif field == F_BLOCK_SIZE:
        if kind == T_UINT and number <= 65536:
            event.block_size = <uint32_t>number
        else:
            bad[0] = True
    elif field == F_ADAPTER_ID:
        event.has_adapter_id = kind == T_UINT
        event.adapter_id = <int64_t>number
        if kind != T_UINT and kind != T_NIL:
            bad[0] = True
    elif field == F_MEDIUM:
        if kind == T_STRING:
            event.medium = medium_named(reader.p - number, number)
        elif kind != T_NIL:
            bad[0] = True
    elif field == F_ADAPTER:
        event.adapter = NULL
        if kind == T_STRING and number > 0:
            event.adapter = reader.p - number
            event.adapter_size = number
        elif kind != T_STRING and kind != T_NIL:
            bad[0] = True
    elif field == F_GROUP:
        if kind == T_UINT and number <= 0xFFFF:
            event.group = <uint32_t>number
        elif kind != T_NIL:
            bad[0] = True
    elif field == F_EXTRAS:
        if kind == T_ARRAY:
            event.extras = begin
        elif kind != T_NIL:
            bad[0] = True
    if not skip_rest(reader, kind, number):
        return 0
    if event.extras == begin:
        event.extras_end = reader.p
    return 1


cdef int read_event(Reader* reader, Scratch* scratch, Event* event) noexcept nogil:
    cdef uint64_t count = 0
    cdef uint64_t number = 0
    cdef uint64_t i
    cdef bint bad = False
    cdef int kind, done
    memset(event, 0, sizeof(Event))
    event.begin = reader.p
    kind = read_head(reader, &count)
    if kind == T_MAP:
        for i in range(count):
            kind = read_head(reader, &number)
            if kind == T_STRING:
                done = read_field(reader, scratch, event, field_named(reader.p - number, number), &bad)
                if done != 1:
                    return done
            elif not skip_rest(reader, kind, number) or not skip_values(reader, 1):
                return 0
    elif kind == T_ARRAY and count > 0:
        done = read_field(reader, scratch, event, F_TYPE, &bad)
        if done != 1:
            return done
        kind = event.kind
        for i in range(1, count):
            done = read_field(reader, scratch, event, field_at(kind, i), &bad)
            if done != 1:
                return done
    elif not skip_rest(reader, kind, count):
        return 0
    # Without tokens it tells that known hashes are in another tier, whatever the block size.
    if event.kind == EVENT_STORED and event.token_count not in (0, event.hash_count * event.block_size):
        bad = True
    if bad:
        event.kind = EVENT_UNKNOWN
    event.hashes = scratch.hashes
    event.tokens = scratch.tokens
    event.end = reader.p
    return 1


cdef void free_scratch(Scratch* scratch) noexcept nogil:
    free(scratch.hashes)
    free(scratch.tokens)
    memset(scratch, 0, sizeof(Scratch))


cdef uint64_t mix_block_extras(Reader* extras, uint64_t chain, const Event* event) noexcept nogil:
    # The bytes were walked once: heads cannot be broken. An entry is nil or an array of extras; an extra is a string,
    # raw bytes, or an array that begins with one (an identifier and its offset). The adapter's name is in the chain.
    cdef uint64_t count = 0
    cdef uint64_t inner = 0
    cdef uint64_t number = 0
    cdef uint64_t i
    cdef int kind
    if extras.p >= extras.end:
        return chain
    kind = read_head(extras, &count)
    if kind != T_ARRAY:
        if kind == T_STRING or kind == T_BYTES:
            return mix_one(extras, chain, event, count)
        skip_rest(extras, kind, count)
        return chain
    for i in range(count):
        kind = read_head(extras, &number)
        inner = 0
        if kind == T_ARRAY and number > 0:
            inner = number - 1
            kind = read_head(extras, &number)
        if kind == T_STRING or kind == T_BYTES:
            chain = mix_one(extras, chain, event, number)
        else:
            skip_rest(extras, kind, number)
        skip_values(extras, inner)
    return chain


cdef inline uint64_t mix_one(const Reader* extras, uint64_t chain, const Event* event, uint64_t size) noexcept nogil:
    cdef const uint8_t* extra = extras.p - size
    if event.adapter != NULL and size == event.adapter_size and memcmp(extra, event.adapter, size) == 0:
        return chain
    return mix_extra(chain, extra, size)


def read_events(bytes payload not None):
    cdef Reader reader
    cdef Scratch scratch
    cdef Batch batch
    cdef Event event
    cdef uint32_t more = 0
    cdef uint64_t i
    cdef size_t k
    cdef int done = 1
    cdef list events = []
    reader.p = <const uint8_t*>payload
    reader.end = reader.p + len(payload)
    memset(&scratch, 0, sizeof(Scratch))
    if not read_batch_head(&reader, &batch, &more):
        return batch.timestamp, batch.rank, events, True
    try:
        for i in range(batch.events):
            done = read_event(&reader, &scratch, &event)
            if done < 0:
                raise MemoryError
            if done == 0:
                return batch.timestamp, batch.rank, events, True
            events.append(as_object(&event))
    finally:
        free_scratch(&scratch)
    malformed = not read_batch_tail(&reader, &batch, more)
    return batch.timestamp, batch.rank, events, malformed


cdef dict as_object(const Event* event):
    cdef size_t k
    if event.kind == EVENT_UNKNOWN:
        return {"kind": "unknown"}
    if event.kind == EVENT_CLEARED:
        return {"kind": "cleared"}
    found = {
        "kind": "removed",
        "hashes": [event.hashes[k] for k in range(event.hash_count)],
        "medium": event.medium,
        "group": event.group,
    }
    if event.kind == EVENT_STORED:
        found["kind"] = "stored"
        found["parent"] = event.parent if event.has_parent else None
        found["tokens"] = [event.tokens[k] for k in range(event.token_count)]
        found["block_size"] = event.block_size
        found["adapter"] = event.adapter[: event.adapter_size].decode("utf-8", "replace") if event.adapter else None
    return found
