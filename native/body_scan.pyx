"""What routing needs of a JSON request body, read in one pass and without building objects for it.

The routing prefix is a canonical byte string, in the order in which an engine builds its prompt whatever the order of
the keys in the body. It is never stored: its pieces go straight from the body into the chained block hashes, so the
memory is two blocks and the hashes. Its encoding:

    seed    xxh64(model, 0); with a cache_salt, xxh64(cache_salt, xxh64(model, 0)). Both UTF-8, escapes decoded. The
            caller may name another seed for a model, so that an alias, or no name at all, shares its prefix
    record  one tag byte, then its payload up to the next tag
    text    a JSON string's inside as it stands, escapes kept; another value's bytes as they stand ("raw")

Inside valid JSON no byte below 0x20 but white space occurs, so a tag (below 0x20, no white space) cannot be part of a
text, and neither role nor content can imitate a boundary. Two payloads are binary and say their length by themselves:
a reference is 8 bytes, and token ids are 4 bytes each (little endian) up to an ffffffff that stands only where another
record follows. Nothing marks the end, nor the number of messages: a longer conversation starts with the bytes of the
shorter one.

Records in order; what is absent or null leaves no byte:
    with `messages` or `input`: TOOLS raw, CHAT_TEMPLATE text, TEMPLATE_KWARGS raw; with `messages`: DOCUMENTS raw
    `system`, `instructions`: a message of role system each
    `messages`, then after the prompts `input`: for each element
        object with a role     MESSAGE role, NAME, CALL_ID tool_call_id, REASONING reasoning (or reasoning_content),
                               content, TOOL_CALLS raw
        string                 a message of role user
        list of ids            as for `prompt`
        other list             BATCH, then its elements likewise (chat/completions/batch)
        anything else          ITEM raw; a reference where its type is a medium
    `prompt`, `token_ids`: PROMPT for each prompt, then its text, or IDS and ids, or ITEM raw
    `prompt_embeds`: a reference;  `texts`: as prompt
    `query`, `queries`, `text_1`, `data_1`: as prompt with FIRST; `documents`, `text_2`, `data_2`, `items` with SECOND
Content: a string, or a part with a text, is TEXT text; a thinking part REASONING text; tool_use CALL_ID id, NAME,
TOOL_CALLS input; tool_result RESULT tool_use_id and its content. Every other part is a reference: PART and the sum of
xxh64(member) over its members from key to value, without cache_control, which clients move from turn to turn. In ITEM
and DOCUMENTS a string that starts with data: and is longer than 256 bytes is replaced by PART xxh64 likewise: the bytes
of an image are no measure of its prompt.
"""

cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc, PyMem_RawRealloc
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memchr, memcmp, memcpy, memset, strlen

from native.block_hash cimport BlockHashes, xxh64


# A body is looked at 64 bytes at a time, one bit a byte. SSE2 is part of every x86-64; elsewhere the compiler makes what
# it can of the loop.
cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>
    #if defined(__SSE2__) && !defined(KVGATE_PORTABLE)
    #include <emmintrin.h>

    static inline uint64_t kvgate_mask(__m128i a, __m128i b, __m128i c, __m128i d) {
        return (uint64_t)(uint32_t)_mm_movemask_epi8(a) | (uint64_t)(uint32_t)_mm_movemask_epi8(b) << 16
            | (uint64_t)(uint32_t)_mm_movemask_epi8(c) << 32 | (uint64_t)(uint32_t)_mm_movemask_epi8(d) << 48;
    }

    static inline uint64_t kvgate_matches(const uint8_t *p, char byte) {
        const __m128i wanted = _mm_set1_epi8(byte);
        __m128i a = _mm_cmpeq_epi8(_mm_loadu_si128((const __m128i *)p), wanted);
        __m128i b = _mm_cmpeq_epi8(_mm_loadu_si128((const __m128i *)(p + 16)), wanted);
        __m128i c = _mm_cmpeq_epi8(_mm_loadu_si128((const __m128i *)(p + 32)), wanted);
        __m128i d = _mm_cmpeq_epi8(_mm_loadu_si128((const __m128i *)(p + 48)), wanted);
        if (!_mm_movemask_epi8(_mm_or_si128(_mm_or_si128(a, b), _mm_or_si128(c, d))))
            return 0;
        return kvgate_mask(a, b, c, d);
    }

    static inline __m128i kvgate_bracket_lane(const uint8_t *p) {
        __m128i folded = _mm_or_si128(_mm_loadu_si128((const __m128i *)p), _mm_set1_epi8(0x20));
        return _mm_or_si128(_mm_cmpeq_epi8(folded, _mm_set1_epi8('{')), _mm_cmpeq_epi8(folded, _mm_set1_epi8('}')));
    }

    /* All four brackets: 0x20 maps the square ones, and nothing else, onto the curly ones. */
    static inline uint64_t kvgate_brackets(const uint8_t *p) {
        return kvgate_mask(kvgate_bracket_lane(p), kvgate_bracket_lane(p + 16), kvgate_bracket_lane(p + 32),
                           kvgate_bracket_lane(p + 48));
    }
    #else
    static inline uint64_t kvgate_matches(const uint8_t *p, char byte) {
        uint64_t found = 0;
        for (int i = 0; i < 64; i++)
            found |= (uint64_t)(p[i] == (uint8_t)byte) << i;
        return found;
    }

    static inline uint64_t kvgate_brackets(const uint8_t *p) {
        uint64_t found = 0;
        for (int i = 0; i < 64; i++)
            found |= (uint64_t)((p[i] | 0x20) == '{' || (p[i] | 0x20) == '}') << i;
        return found;
    }
    #endif

    /* Which bytes a backslash escapes; `carry` is 1 where the first one is. Subtracting the first backslash of each
       escape lets the borrow run to its run's end, so even and odd runs are told apart without a loop. */
    static inline uint64_t kvgate_escaped(uint64_t backslashes, uint64_t carry) {
        const uint64_t odd = 0xAAAAAAAAAAAAAAAAULL;
        uint64_t starters = backslashes & ~carry;
        uint64_t codes = (((starters << 1) | odd) - starters) ^ odd;
        return codes ^ (backslashes | carry);
    }

    /* Bit i of the result is the parity of bits 0 to i. */
    static inline uint64_t kvgate_parity_up_to(uint64_t bits) {
        bits ^= bits << 1;
        bits ^= bits << 2;
        bits ^= bits << 4;
        bits ^= bits << 8;
        bits ^= bits << 16;
        return bits ^ bits << 32;
    }

    /* The number at p, of which 8 bytes must be readable: how many digits it has (8: perhaps more, and no value). */
    static inline int kvgate_number(const uint8_t *p, uint32_t *value) {
        uint64_t word, other;
        memcpy(&word, p, 8);
    #if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
        word = __builtin_bswap64(word);
    #endif
        /* The top bit of each byte that is no digit; a carry can only spoil the bytes above one of those. */
        other = ((word + 0x4646464646464646ULL) | (word - 0x3030303030303030ULL)) & 0x8080808080808080ULL;
        if (!other)
            return 8;
        int digits = __builtin_ctzll(other) >> 3;
        if (!digits)
            return 0;
        word = (word << (64 - 8 * digits)) & 0x0F0F0F0F0F0F0F0FULL;  /* as if zeros stood before it */
        word = (word * 10 + (word >> 8)) & 0x00FF00FF00FF00FFULL;
        word = (word * 100 + (word >> 16)) & 0x0000FFFF0000FFFFULL;
        *value = (uint32_t)(word * 10000 + (word >> 32));
        return digits;
    }

    static inline int kvgate_lowest(uint64_t bits) { return __builtin_ctzll(bits); }
    static inline int kvgate_highest(uint64_t bits) { return 63 - __builtin_clzll(bits); }
    """
    uint64_t matches "kvgate_matches"(const uint8_t* p, char byte) noexcept nogil
    uint64_t brackets_in "kvgate_brackets"(const uint8_t* p) noexcept nogil
    uint64_t escaped "kvgate_escaped"(uint64_t backslashes, uint64_t carry) noexcept nogil
    uint64_t parity_up_to "kvgate_parity_up_to"(uint64_t bits) noexcept nogil
    int short_number "kvgate_number"(const uint8_t* p, uint32_t* value) noexcept nogil
    int lowest "kvgate_lowest"(uint64_t bits) noexcept nogil  # the lowest bit set, of bits that are not 0
    int highest "kvgate_highest"(uint64_t bits) noexcept nogil


OK = 0
UNKNOWN_SHAPE = 1
MALFORMED = 2

cdef enum:
    _OK = 0
    _UNKNOWN_SHAPE = 1
    _MALFORMED = 2

cdef enum:
    DEPTH_LIMIT = 10_000
    DEPTH_WORDS = 157  # a bit for each level
    KEY_BYTES = 256  # no key that we look for is longer, decoded
    FIELDS_LIMIT = 16
    VALUE_BYTES = 4096  # a longer wanted value is nobody's session
    BLOCK_BYTES_LIMIT = 1 << 20
    DATA_URL_BYTES = 256
    FIRST_ROOM = 64  # hashes; long strings
    LONG_STRING = 256  # bytes, a multiple of 64

cdef enum:
    TAG_MESSAGE = 0x01
    TAG_TEXT = 0x02
    TAG_PART = 0x03
    TAG_NAME = 0x04
    TAG_CALL_ID = 0x05
    TAG_REASONING = 0x06
    TAG_TOOL_CALLS = 0x07
    TAG_RESULT = 0x08
    TAG_TOOLS = 0x0B
    TAG_CHAT_TEMPLATE = 0x0C
    TAG_TEMPLATE_KWARGS = 0x0E
    TAG_DOCUMENTS = 0x0F
    TAG_PROMPT = 0x10
    TAG_IDS = 0x11
    TAG_ITEM = 0x12
    TAG_FIRST = 0x13
    TAG_SECOND = 0x14
    TAG_BATCH = 0x15


cdef struct Span:
    const uint8_t* start  # NULL: absent
    const uint8_t* end


cdef Span ABSENT
ABSENT.start = ABSENT.end = NULL


cdef struct Body:
    const uint8_t* end
    # Strings of LONG_STRING bytes and more, in order: found on the way to the end of the body, jumped over afterwards.
    # At most an eighth of the body, and only a shortcut: without memory they are scanned again.
    Span* strings
    size_t n
    size_t room
    size_t next  # the one that is likely asked for next
    bint recording


# ---- JSON, as far as routing reads it. Every function stays in front of body.end; NULL or -1 says malformed. The first
# walk, over the whole body, makes sure that brackets pair and strings end, so a later one cannot leave its value.

cdef inline const uint8_t* skip_space(const uint8_t* p, const uint8_t* end) noexcept nogil:
    while p < end and p[0] <= 0x20 and (p[0] == 0x20 or p[0] == 0x0A or p[0] == 0x0D or p[0] == 0x09):
        p += 1
    return p


cdef inline uint64_t odd_backslashes(const uint8_t* p, const uint8_t* floor) noexcept nogil:
    """1 where an odd number of backslashes stands right before p, not counting below `floor`."""
    cdef const uint8_t* back = p
    while back > floor and (back - 1)[0] == c'\\':
        back -= 1
    return <uint64_t>(p - back) & 1


cdef const uint8_t* find_close(const uint8_t* start, const uint8_t* end) noexcept nogil:
    """The first quotation mark in [start, end) that is not escaped, NULL without one.

    Backslashes are looked for only where there is a mark. Runs of them before one step's 64 bytes are counted in steps
    with a mark alone, so no run is counted twice, and all of it stays linear.
    """
    cdef const uint8_t* p = start
    cdef const uint8_t* bytes_
    cdef uint8_t[64] padded
    cdef uint64_t quotes
    while p < end:
        bytes_ = p
        if end - p < 64:
            memset(padded, 0, 64)
            memcpy(padded, p, <size_t>(end - p))
            bytes_ = padded
        quotes = matches(bytes_, c'"')
        if quotes != 0:
            quotes &= ~escaped(matches(bytes_, c'\\'), odd_backslashes(p, start))
            if quotes != 0:
                return p + lowest(quotes)
        p += 64
    return NULL


cdef void remember(Body* body, const uint8_t* start, const uint8_t* close) noexcept nogil:
    cdef Span* grown
    cdef size_t room
    if body.n == body.room:
        room = body.room * 2 if body.room > 0 else FIRST_ROOM
        grown = <Span*>PyMem_RawRealloc(body.strings, room * sizeof(Span))
        if grown == NULL:
            return
        body.strings = grown
        body.room = room
    body.strings[body.n].start = start
    body.strings[body.n].end = close
    body.n += 1


cdef const uint8_t* recall(Body* body, const uint8_t* start) noexcept nogil:
    """The closing mark of the long string whose inside begins at `start`, NULL where none was remembered."""
    cdef size_t low = 0, high = body.n, middle = body.next
    if middle < high and body.strings[middle].start < start:
        low = middle + 1
        if low < high and body.strings[low].start > start:
            return NULL
    elif middle > 0 and body.strings[middle - 1].start < start:
        low = middle
        if middle == high or body.strings[middle].start > start:
            return NULL
    while low < high:
        if middle < low or middle >= high:
            middle = low + (high - low) // 2
        if body.strings[middle].start == start:
            body.next = middle + 1
            return body.strings[middle].end
        if body.strings[middle].start < start:
            low = middle + 1
        else:
            high = middle
    body.next = low
    return NULL


cdef inline const uint8_t* close_string(Body* body, const uint8_t* start) noexcept nogil:
    """The closing quotation mark of the string whose inside begins at `start`."""
    cdef const uint8_t* close
    if body.recording:
        close = find_close(start, body.end)
        if close != NULL and close - start >= LONG_STRING:
            remember(body, start, close)
        return close
    if body.end - start <= LONG_STRING:
        return find_close(start, body.end)
    close = find_close(start, start + LONG_STRING)
    if close == NULL:
        close = recall(body, start)
    return close if close != NULL else find_close(start, body.end)


cdef const uint8_t* skip_scalar(const uint8_t* p, const uint8_t* end) noexcept nogil:
    """Past a number (JSON's grammar) or a literal (Python's NaN and Infinity too)."""
    cdef size_t left = <size_t>(end - p)
    cdef const uint8_t* digits
    if left >= 4 and (memcmp(p, b"true", 4) == 0 or memcmp(p, b"null", 4) == 0):
        return p + 4
    if left >= 5 and memcmp(p, b"false", 5) == 0:
        return p + 5
    if left >= 3 and memcmp(p, b"NaN", 3) == 0:
        return p + 3
    if p < end and p[0] == c'-':
        p += 1
    if end - p >= 8 and memcmp(p, b"Infinity", 8) == 0:
        return p + 8
    digits = p
    while p < end and c'0' <= p[0] <= c'9':
        p += 1
    if p == digits or (p - digits > 1 and digits[0] == c'0'):
        return NULL
    if p < end and p[0] == c'.':
        p += 1
        digits = p
        while p < end and c'0' <= p[0] <= c'9':
            p += 1
        if p == digits:
            return NULL
    if p < end and (p[0] == c'e' or p[0] == c'E'):
        p += 1
        if p < end and (p[0] == c'+' or p[0] == c'-'):
            p += 1
        digits = p
        while p < end and c'0' <= p[0] <= c'9':
            p += 1
        if p == digits:
            return NULL
    return p


cdef const uint8_t* skip_nested(Body* body, const uint8_t* start) noexcept nogil:
    """Past the object or array at `start`: brackets must pair by kind; the rest is the engine's to judge.

    One bit a level says which bracket is open, so there is no recursion to exhaust.
    """
    cdef const uint8_t* p = start
    cdef const uint8_t* bytes_
    cdef const uint8_t* close
    cdef const uint8_t* opened = NULL  # the inside of the string that p is in
    cdef uint8_t[64] padded
    cdef uint64_t[DEPTH_WORDS] curly
    cdef uint64_t quotes, inside, brackets, backslashes, bit
    cdef uint32_t depth = 0
    cdef uint8_t c
    while p < body.end:
        bytes_ = p
        if body.end - p < 64:
            memset(padded, 0, 64)
            memcpy(padded, p, <size_t>(body.end - p))
            bytes_ = padded
        quotes = matches(bytes_, c'"')
        inside = 0
        if quotes != 0:
            backslashes = matches(bytes_, c'\\')
            quotes &= ~escaped(backslashes, odd_backslashes(p, start))
            inside = parity_up_to(quotes)  # from an opening mark to before the closing one
        if opened != NULL:
            inside = ~inside
            if quotes != 0:
                close = p + lowest(quotes)
                if body.recording and close - opened >= LONG_STRING:
                    remember(body, opened, close)
        if inside != ~<uint64_t>0:
            brackets = brackets_in(bytes_) & ~inside
            while brackets != 0:
                c = bytes_[lowest(brackets)]
                if c == c'{' or c == c'[':
                    if depth == DEPTH_LIMIT:
                        return NULL
                    bit = <uint64_t>1 << (depth & 63)
                    if depth & 63 == 0:
                        curly[depth >> 6] = 0
                    if c == c'{':
                        curly[depth >> 6] |= bit
                    else:
                        curly[depth >> 6] &= ~bit
                    depth += 1
                else:
                    depth -= 1
                    bit = <uint64_t>1 << (depth & 63)
                    if (c == c'}') != ((curly[depth >> 6] & bit) != 0):
                        return NULL
                    if depth == 0:
                        return p + lowest(brackets) + 1
                brackets &= brackets - 1
        if inside >> 63 == 0:
            opened = NULL
        elif quotes != 0:
            opened = p + highest(quotes) + 1
            if not body.recording:
                close = recall(body, opened)
                if close != NULL:
                    opened = NULL
                    p = close + 1
                    continue
        p += 64
    return NULL


cdef inline const uint8_t* skip_value(Body* body, const uint8_t* p) noexcept nogil:
    if p == body.end:
        return NULL
    if p[0] == c'"':
        p = close_string(body, p + 1)
        return p + 1 if p != NULL else NULL
    if p[0] == c'{' or p[0] == c'[':
        return skip_nested(body, p)
    return skip_scalar(p, body.end)


cdef inline int hex_quad(const uint8_t* p) noexcept nogil:
    """The value of four hexadecimal digits, -1 for anything else."""
    cdef int value = 0, i
    cdef uint8_t c
    for i in range(4):
        c = p[i]
        if c'0' <= c <= c'9':
            value = value * 16 + c - c'0'
        elif c'a' <= (c | 0x20) <= c'f':
            value = value * 16 + (c | 0x20) - c'a' + 10
        else:
            return -1
    return value


cdef Py_ssize_t unescape(const uint8_t* p, const uint8_t* end, uint8_t* out, size_t room) noexcept nogil:
    """Decode a string's inside to UTF-8; as many bytes as the inside has always suffice. A surrogate without its half
    becomes U+FFFD, since UTF-8 has none. Returns the length, -1 for an escape that JSON lacks, -2 for want of room."""
    cdef size_t n = 0
    cdef int code, low
    cdef uint8_t c
    while p < end:
        if room - n < 4 and room - n < <size_t>(end - p):
            return -2
        c = p[0]
        if c != c'\\':
            out[n] = c
            n += 1
            p += 1
            continue
        if end - p < 2:
            return -1
        c = p[1]
        p += 2
        if c == c'u':
            if end - p < 4:
                return -1
            code = hex_quad(p)
            if code < 0:
                return -1
            p += 4
            if 0xD800 <= code < 0xE000:
                low = -1
                if code < 0xDC00 and end - p >= 6 and p[0] == c'\\' and p[1] == c'u':
                    low = hex_quad(p + 2)
                if 0xDC00 <= low < 0xE000:
                    code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
                    p += 6
                else:
                    code = 0xFFFD
            if code < 0x80:
                out[n] = <uint8_t>code
                n += 1
            elif code < 0x800:
                out[n] = <uint8_t>(0xC0 | (code >> 6))
                out[n + 1] = <uint8_t>(0x80 | (code & 0x3F))
                n += 2
            elif code < 0x10000:
                out[n] = <uint8_t>(0xE0 | (code >> 12))
                out[n + 1] = <uint8_t>(0x80 | ((code >> 6) & 0x3F))
                out[n + 2] = <uint8_t>(0x80 | (code & 0x3F))
                n += 3
            else:
                out[n] = <uint8_t>(0xF0 | (code >> 18))
                out[n + 1] = <uint8_t>(0x80 | ((code >> 12) & 0x3F))
                out[n + 2] = <uint8_t>(0x80 | ((code >> 6) & 0x3F))
                out[n + 3] = <uint8_t>(0x80 | (code & 0x3F))
                n += 4
            continue
        if c == c'n':
            c = 0x0A
        elif c == c't':
            c = 0x09
        elif c == c'r':
            c = 0x0D
        elif c == c'b':
            c = 0x08
        elif c == c'f':
            c = 0x0C
        elif c != c'"' and c != c'\\' and c != c'/':
            return -1
        out[n] = c
        n += 1
    return <Py_ssize_t>n


cdef int next_member(Body* body, const uint8_t** at, bint first, uint8_t* scratch, Span* key, Span* value,
                     Span* member) noexcept nogil:
    """The next member of the object that *at is in: 1 and its decoded key (perhaps in `scratch`, KEY_BYTES long; empty
    where it is longer than that), value and whole; 0 at the closing bracket; -1 malformed. *at moves past it."""
    cdef const uint8_t* end = body.end
    cdef const uint8_t* p = skip_space(at[0], end)
    cdef const uint8_t* close
    cdef Py_ssize_t n
    if p == end:
        return -1
    if p[0] == c'}':
        at[0] = p + 1
        return 0
    if not first:
        if p[0] != c',':
            return -1
        p = skip_space(p + 1, end)
    if p == end or p[0] != c'"':
        return -1
    member.start = p
    close = close_string(body, p + 1)
    if close == NULL:
        return -1
    key.start = p + 1
    key.end = close
    if memchr(key.start, c'\\', <size_t>(close - key.start)) != NULL:
        n = unescape(key.start, close, scratch, KEY_BYTES)
        if n == -1:
            return -1
        key.start = scratch
        key.end = scratch + (n if n >= 0 else 0)
    p = skip_space(close + 1, end)
    if p == end or p[0] != c':':
        return -1
    value.start = skip_space(p + 1, end)
    p = skip_value(body, value.start)
    if p == NULL:
        return -1
    value.end = member.end = at[0] = p
    return 1


cdef int next_element(Body* body, const uint8_t** at, bint first) noexcept nogil:
    """1 with *at moved to the start of the array's next element (which is there), 0 with *at past the closing bracket,
    -1 malformed. The caller moves *at past the element."""
    cdef const uint8_t* end = body.end
    cdef const uint8_t* p = skip_space(at[0], end)
    if p == end:
        return -1
    if p[0] == c']':
        at[0] = p + 1
        return 0
    if not first:
        if p[0] != c',':
            return -1
        p = skip_space(p + 1, end)
        if p == end or p[0] == c']':
            return -1
    at[0] = p
    return 1


cdef inline bint is_given(Span span) noexcept nogil:
    """There, and not null."""
    return span.start != NULL and span.start[0] != c'n'


cdef inline bint is_string(Span span) noexcept nogil:
    return span.start != NULL and span.start[0] == c'"'


cdef inline bint equals(Span span, const char* word, size_t n) noexcept nogil:
    return <size_t>(span.end - span.start) == n and memcmp(span.start, word, n) == 0


cdef inline bint is_word(Span value, const char* word, size_t n) noexcept nogil:
    """The value is this string. `word` stands in its quotation marks."""
    return value.start != NULL and equals(value, word, n)


cdef bint starts_with_number(Span array) noexcept nogil:
    """The array's first element is a number, so it ought to be a list of token ids."""
    cdef const uint8_t* p = skip_space(array.start + 1, array.end)
    return p < array.end and (p[0] == c'-' or c'0' <= p[0] <= c'9')


cdef bint names_medium(Span type_) noexcept nogil:
    """A part's type (image_url, input_audio, video, input_file ...) says that it holds no text."""
    cdef const uint8_t* p
    cdef size_t left
    if not is_string(type_):
        return False
    p = type_.start
    if type_.end - p > 64:
        return True
    while p < type_.end:
        left = <size_t>(type_.end - p)
        if left >= 5 and (memcmp(p, b"image", 5) == 0 or memcmp(p, b"audio", 5) == 0 or memcmp(p, b"video", 5) == 0):
            return True
        if left >= 4 and memcmp(p, b"file", 4) == 0:
            return True
        p += 1
    return False


# ---- The chain: canonical bytes go in, block hashes come out.

cdef struct Mark:
    uint64_t last
    size_t fill
    size_t n
    uint64_t total
    uint64_t ids
    bint ids_open


cdef struct Chain:
    Body* body
    uint64_t last  # the hash of the last full block, at first the seed
    size_t block_bytes  # 0: only lengths are counted
    uint8_t* partial  # the block that is not full; a second one behind it, for `mark`
    size_t fill
    uint64_t* hashes
    size_t n
    size_t room
    uint64_t total  # canonical bytes so far
    uint64_t ids  # token ids so far
    bint has_text  # something other than token ids
    bint ids_open  # the record before is token ids, and needs its end if another follows
    bint out_of_memory
    Mark mark


cdef void push_block(Chain* chain, const uint8_t* block) noexcept nogil:
    cdef size_t room
    cdef uint64_t* grown
    if chain.n == chain.room:
        if chain.out_of_memory:
            return
        room = chain.room * 2 if chain.room > 0 else FIRST_ROOM
        grown = <uint64_t*>PyMem_RawRealloc(chain.hashes, room * sizeof(uint64_t))
        if grown == NULL:
            chain.out_of_memory = True
            return
        chain.hashes = grown
        chain.room = room
    chain.last = xxh64(block, chain.block_bytes, chain.last)
    chain.hashes[chain.n] = chain.last
    chain.n += 1


cdef void put(Chain* chain, const uint8_t* data, size_t n) noexcept nogil:
    cdef size_t missing
    chain.total += n
    if chain.block_bytes == 0:
        return
    missing = chain.block_bytes - chain.fill
    if n < missing:
        memcpy(chain.partial + chain.fill, data, n)
        chain.fill += n
        return
    if chain.fill > 0:
        memcpy(chain.partial + chain.fill, data, missing)
        push_block(chain, chain.partial)
        data += missing
        n -= missing
    while n >= chain.block_bytes:
        push_block(chain, data)
        data += chain.block_bytes
        n -= chain.block_bytes
    memcpy(chain.partial, data, n)
    chain.fill = n


cdef inline void put_byte(Chain* chain, uint8_t byte) noexcept nogil:
    put(chain, &byte, 1)


cdef inline void write_uint32(uint8_t* out, uint32_t value) noexcept nogil:
    """Little endian."""
    out[0] = <uint8_t>value
    out[1] = <uint8_t>(value >> 8)
    out[2] = <uint8_t>(value >> 16)
    out[3] = <uint8_t>(value >> 24)


cdef inline void put_uint32(Chain* chain, uint32_t value) noexcept nogil:
    cdef uint8_t[4] little
    write_uint32(little, value)
    put(chain, little, 4)


cdef inline void put_tag(Chain* chain, uint8_t tag) noexcept nogil:
    """The start of a record: the only way to one."""
    if chain.ids_open:
        chain.ids_open = False
        put_uint32(chain, 0xFFFFFFFF)
    put_byte(chain, tag)


cdef inline void put_text(Chain* chain, Span value) noexcept nogil:
    """A string's inside, another value as it stands."""
    if value.start[0] == c'"':
        put(chain, value.start + 1, <size_t>(value.end - value.start) - 2)
    else:
        put(chain, value.start, <size_t>(value.end - value.start))
    chain.has_text = True


cdef inline void put_record(Chain* chain, uint8_t tag, Span value) noexcept nogil:
    if is_given(value):
        put_tag(chain, tag)
        put_text(chain, value)


cdef inline void put_raw(Chain* chain, uint8_t tag, Span value) noexcept nogil:
    """The value as it stands, a string's quotation marks included."""
    if is_given(value):
        put_tag(chain, tag)
        put(chain, value.start, <size_t>(value.end - value.start))
        chain.has_text = True


cdef void put_reference(Chain* chain, uint64_t digest) noexcept nogil:
    put_tag(chain, TAG_PART)
    put_uint32(chain, <uint32_t>digest)
    put_uint32(chain, <uint32_t>(digest >> 32))
    chain.has_text = True


cdef inline uint64_t digest_of(Chain* chain, const uint8_t* start, const uint8_t* end) noexcept nogil:
    return xxh64(start, <size_t>(end - start), 0) if chain.block_bytes > 0 else 0


cdef void put_item(Chain* chain, uint8_t tag, Span value) noexcept nogil:
    """As put_raw, but a long data URL counts as a reference. `value` was skipped as a whole before: its strings end."""
    cdef const uint8_t* p = value.start
    cdef const uint8_t* pending = value.start
    cdef const uint8_t* close
    if not is_given(value):
        return
    put_tag(chain, tag)
    chain.has_text = True
    while value.end - p > DATA_URL_BYTES:
        p = find_close(p, value.end)
        close = close_string(chain.body, p + 1) if p != NULL else NULL
        if close == NULL:
            break
        if close - p > DATA_URL_BYTES and memcmp(p + 1, b"data:", 5) == 0:
            put(chain, pending, <size_t>(p + 1 - pending))
            put_reference(chain, digest_of(chain, p + 1, close))
            pending = close
        p = close + 1
    put(chain, pending, <size_t>(value.end - pending))


cdef void set_mark(Chain* chain) noexcept nogil:
    """Remember this point, for back_to_mark. One at a time."""
    chain.mark.last = chain.last
    chain.mark.fill = chain.fill
    chain.mark.n = chain.n
    chain.mark.total = chain.total
    chain.mark.ids = chain.ids
    chain.mark.ids_open = chain.ids_open
    if chain.block_bytes > 0:
        memcpy(chain.partial + chain.block_bytes, chain.partial, chain.fill)


cdef void back_to_mark(Chain* chain) noexcept nogil:
    chain.last = chain.mark.last
    chain.fill = chain.mark.fill
    chain.n = chain.mark.n
    chain.total = chain.mark.total
    chain.ids = chain.mark.ids
    chain.ids_open = chain.mark.ids_open
    if chain.block_bytes > 0:
        memcpy(chain.partial, chain.partial + chain.block_bytes, chain.fill)


# ---- The prompt's shapes. 0, or -1 for malformed.

cdef bint put_plain_ids(Chain* chain, Span array) noexcept nogil:
    """The ids of a list of integers from 0 to 2^31 - 1; False at the first element that is anything else."""
    cdef const uint8_t* p = skip_space(array.start + 1, array.end)
    cdef const uint8_t* digits
    cdef uint8_t[256] batch
    cdef size_t filled = 0
    cdef uint64_t value
    cdef uint32_t short_value = 0
    cdef int n
    if p[0] == c']':
        return True
    while True:
        digits = p
        n = short_number(p, &short_value) if array.end - p >= 8 else 8
        value = short_value
        if n < 8:
            p += n
        else:
            value = 0
            while c'0' <= p[0] <= c'9' and p - digits < 11:
                value = value * 10 + p[0] - c'0'
                p += 1
        if p == digits or value > 0x7FFFFFFF or (p - digits > 1 and digits[0] == c'0'):
            return False
        write_uint32(batch + filled, <uint32_t>value)
        filled += 4
        chain.ids += 1
        p = skip_space(p, array.end)
        if p[0] == c']':
            put(chain, batch, filled)
            return True
        if p[0] != c',':
            return False
        if filled == 256:
            put(chain, batch, filled)
            filled = 0
        p = skip_space(p + 1, array.end)


cdef void put_ids(Chain* chain, uint8_t tag, Span array) noexcept nogil:
    """One prompt of token ids. A list that is not one after all goes in as it stands; the engine judges it."""
    set_mark(chain)
    put_tag(chain, tag)
    put_byte(chain, TAG_IDS)
    if put_plain_ids(chain, array):
        chain.ids_open = True
        return
    back_to_mark(chain)
    put_tag(chain, tag)
    put_item(chain, TAG_ITEM, array)


cdef int put_prompts(Chain* chain, uint8_t tag, Span value) noexcept nogil:
    """One prompt or a list of them: strings, lists of token ids, objects."""
    cdef const uint8_t* p
    cdef Span element
    cdef bint first = True
    cdef int step
    if not is_given(value):
        return 0
    if value.start[0] == c'[':
        if starts_with_number(value):
            put_ids(chain, tag, value)
            return 0
        p = value.start + 1
        while True:
            step = next_element(chain.body, &p, first)
            if step <= 0:
                return step
            first = False
            element.start = p
            p = skip_value(chain.body, p)
            if p == NULL:
                return -1
            element.end = p
            put_prompt(chain, tag, element)
    put_prompt(chain, tag, value)
    return 0


cdef void put_prompt(Chain* chain, uint8_t tag, Span value) noexcept nogil:
    if is_string(value):
        put_record(chain, tag, value)
    elif value.start[0] == c'[':
        put_ids(chain, tag, value)
    else:
        put_tag(chain, tag)
        put_item(chain, TAG_ITEM, value)


cdef int put_content(Chain* chain, Span content, bint in_result) noexcept nogil:
    """A message's content: a string, or parts. `in_result`: the content of a tool_result, which holds no other."""
    cdef const uint8_t* p
    cdef Span element
    cdef bint first = True
    cdef int step
    if not is_given(content):
        return 0
    if content.start[0] != c'[':
        put_record(chain, TAG_TEXT, content)
        return 0
    p = content.start + 1
    while True:
        step = next_element(chain.body, &p, first)
        if step <= 0:
            return step
        first = False
        if p[0] == c'{':
            if put_part(chain, &p, in_result) < 0:
                return -1
            continue
        element.start = p
        p = skip_value(chain.body, p)
        if p == NULL:
            return -1
        element.end = p
        put_record(chain, TAG_TEXT, element)


cdef uint64_t members_digest(Body* body, Span part) noexcept nogil:
    """The same for any order of the members; cache_control is left out."""
    cdef const uint8_t* p = part.start + 1
    cdef uint8_t[KEY_BYTES] scratch
    cdef Span key, value, member
    cdef uint64_t digest = 0
    cdef bint first = True
    while next_member(body, &p, first, scratch, &key, &value, &member) == 1:
        first = False
        if not equals(key, "cache_control", 13):
            digest += xxh64(member.start, <size_t>(member.end - member.start), 0)
    return digest


cdef int put_part(Chain* chain, const uint8_t** at, bint in_result) noexcept nogil:
    """The part object at *at, which moves past it."""
    cdef const uint8_t* p = at[0] + 1
    cdef uint8_t[KEY_BYTES] scratch
    cdef Span key, value, member, part
    cdef Span type_, text, thinking, refusal, id_, name, input_, result_of, content
    cdef bint first = True
    cdef int step
    type_ = text = thinking = refusal = id_ = name = input_ = result_of = content = ABSENT
    while True:
        step = next_member(chain.body, &p, first, scratch, &key, &value, &member)
        if step < 0:
            return -1
        if step == 0:
            break
        first = False
        if equals(key, "type", 4):
            type_ = value
        elif equals(key, "text", 4):
            text = value
        elif equals(key, "thinking", 8):
            thinking = value
        elif equals(key, "refusal", 7):
            refusal = value
        elif equals(key, "id", 2):
            id_ = value
        elif equals(key, "name", 4):
            name = value
        elif equals(key, "input", 5):
            input_ = value
        elif equals(key, "tool_use_id", 11):
            result_of = value
        elif equals(key, "content", 7):
            content = value
    part.start = at[0]
    part.end = p
    at[0] = p
    if is_string(text) and not names_medium(type_):
        put_record(chain, TAG_TEXT, text)
    elif is_string(thinking) and is_word(type_, b'"thinking"', 10):
        put_record(chain, TAG_REASONING, thinking)
    elif is_string(refusal) and is_word(type_, b'"refusal"', 9):
        put_record(chain, TAG_TEXT, refusal)
    elif is_word(type_, b'"tool_use"', 10):
        put_record(chain, TAG_CALL_ID, id_)
        put_record(chain, TAG_NAME, name)
        put_raw(chain, TAG_TOOL_CALLS, input_)
    elif is_word(type_, b'"tool_result"', 13) and not in_result:
        put_tag(chain, TAG_RESULT)
        if is_given(result_of):
            put_text(chain, result_of)
        return put_content(chain, content, True)
    else:
        put_reference(chain, members_digest(chain.body, part) if chain.block_bytes > 0 else 0)
    return 0


cdef inline void put_role(Chain* chain, const char* role, size_t n) noexcept nogil:
    put_tag(chain, TAG_MESSAGE)
    put(chain, <const uint8_t*>role, n)


cdef int put_message(Chain* chain, const uint8_t** at) noexcept nogil:
    """The message, or other object in its place, at *at, which moves past it."""
    cdef const uint8_t* p = at[0] + 1
    cdef uint8_t[KEY_BYTES] scratch
    cdef Span key, value, member, whole
    cdef Span role, type_, name, call_id, reasoning, reasoning_content, content, tool_calls
    cdef bint first = True
    cdef int step
    role = type_ = name = call_id = reasoning = reasoning_content = content = tool_calls = ABSENT
    while True:
        step = next_member(chain.body, &p, first, scratch, &key, &value, &member)
        if step < 0:
            return -1
        if step == 0:
            break
        first = False
        if equals(key, "role", 4):
            role = value
        elif equals(key, "content", 7):
            content = value
        elif equals(key, "type", 4):
            type_ = value
        elif equals(key, "name", 4):
            name = value
        elif equals(key, "tool_calls", 10):
            tool_calls = value
        elif equals(key, "tool_call_id", 12):
            call_id = value
        elif equals(key, "reasoning", 9):
            reasoning = value
        elif equals(key, "reasoning_content", 17):
            reasoning_content = value
    whole.start = at[0]
    whole.end = p
    at[0] = p
    if is_given(role):
        put_record(chain, TAG_MESSAGE, role)
        put_record(chain, TAG_NAME, name)
        put_record(chain, TAG_CALL_ID, call_id)
        put_record(chain, TAG_REASONING, reasoning if is_given(reasoning) else reasoning_content)
        if put_content(chain, content, False) < 0:
            return -1
        put_raw(chain, TAG_TOOL_CALLS, tool_calls)
    elif names_medium(type_):
        put_reference(chain, members_digest(chain.body, whole) if chain.block_bytes > 0 else 0)
    else:
        put_item(chain, TAG_ITEM, whole)
    return 0


cdef int put_conversation(Chain* chain, Span value) noexcept nogil:
    """`messages` or `input`: a string, token ids, or a list of messages, items, strings, lists of ids and, one level
    deep, of conversations."""
    cdef const uint8_t* p
    cdef Span element
    cdef bint first = True, in_batch = False
    cdef int step
    if not is_given(value):
        return 0
    if value.start[0] != c'[':
        put_role(chain, "user", 4)
        put_record(chain, TAG_TEXT, value)
        return 0
    if starts_with_number(value):
        put_ids(chain, TAG_PROMPT, value)
        return 0
    p = value.start + 1
    while True:
        step = next_element(chain.body, &p, first)
        if step < 0:
            return -1
        first = False
        if step == 0:
            if not in_batch:
                return 0
            in_batch = False
            continue
        if p[0] == c'{':
            if put_message(chain, &p) < 0:
                return -1
            continue
        element.start = p
        p = skip_value(chain.body, p)
        if p == NULL:
            return -1
        element.end = p
        if element.start[0] == c'"':
            put_role(chain, "user", 4)
            put_record(chain, TAG_TEXT, element)
        elif element.start[0] != c'[':
            put_item(chain, TAG_ITEM, element)
        elif starts_with_number(element):
            put_ids(chain, TAG_PROMPT, element)
        elif in_batch:
            put_item(chain, TAG_ITEM, element)
        else:
            put_tag(chain, TAG_BATCH)
            in_batch = True
            first = True
            p = element.start + 1


# ---- The body.

cdef enum:  # the top-level keys that we know, in the order of NAMES
    MODEL
    STREAM
    CACHE_SALT
    MAX_TOKENS
    MAX_COMPLETION_TOKENS
    MAX_OUTPUT_TOKENS
    TOOLS
    CHAT_TEMPLATE
    CHAT_TEMPLATE_KWARGS
    DOCUMENTS
    SYSTEM
    INSTRUCTIONS
    MESSAGES
    PROMPT
    TOKEN_IDS
    PROMPT_EMBEDS
    INPUT
    TEXTS
    QUERY
    QUERIES
    TEXT_1
    DATA_1
    TEXT_2
    DATA_2
    ITEMS
    FIELD_COUNT

cdef const char* NAMES[FIELD_COUNT]
cdef size_t NAME_LENGTHS[FIELD_COUNT]
NAMES[:] = [
    b"model",
    b"stream",
    b"cache_salt",
    b"max_tokens",
    b"max_completion_tokens",
    b"max_output_tokens",
    b"tools",
    b"chat_template",
    b"chat_template_kwargs",
    b"documents",
    b"system",
    b"instructions",
    b"messages",
    b"prompt",
    b"token_ids",
    b"prompt_embeds",
    b"input",
    b"texts",
    b"query",
    b"queries",
    b"text_1",
    b"data_1",
    b"text_2",
    b"data_2",
    b"items",
]
for _field in range(FIELD_COUNT):
    NAME_LENGTHS[_field] = strlen(NAMES[_field])


cdef bint is_prompt(Span value) noexcept nogil:
    return is_given(value) and (value.start[0] == c'"' or value.start[0] == c'[')


cdef bint is_list(Span value) noexcept nogil:
    return value.start != NULL and value.start[0] == c'['


cdef int put_prefix(Chain* chain, Span* known) noexcept nogil:
    """The whole routing prefix: OK, UNKNOWN_SHAPE or MALFORMED. A field of a type that no engine reads is no prompt."""
    cdef bint chat = is_list(known[MESSAGES])
    cdef bint responses = is_prompt(known[INPUT])
    cdef bint pairs = False
    cdef bint found = chat or responses
    cdef int bad = 0, field
    if chat or responses:
        put_raw(chain, TAG_TOOLS, known[TOOLS])
        put_record(chain, TAG_CHAT_TEMPLATE, known[CHAT_TEMPLATE])
        put_raw(chain, TAG_TEMPLATE_KWARGS, known[CHAT_TEMPLATE_KWARGS])
        if chat:
            put_item(chain, TAG_DOCUMENTS, known[DOCUMENTS])
        for field in range(SYSTEM, INSTRUCTIONS + 1):
            if is_given(known[field]):
                put_role(chain, "system", 6)
                bad |= put_content(chain, known[field], False)
    if chat:
        bad |= put_conversation(chain, known[MESSAGES])
    for field in range(PROMPT, TOKEN_IDS + 1):
        if is_prompt(known[field]):
            found = True
            bad |= put_prompts(chain, TAG_PROMPT, known[field])
    if is_prompt(known[PROMPT_EMBEDS]):
        found = True
        put_reference(chain, digest_of(chain, known[PROMPT_EMBEDS].start, known[PROMPT_EMBEDS].end))
    if responses:
        bad |= put_conversation(chain, known[INPUT])
    if is_prompt(known[TEXTS]):
        found = True
        bad |= put_prompts(chain, TAG_PROMPT, known[TEXTS])
    for field in range(QUERY, DATA_1 + 1):
        if is_prompt(known[field]) or (is_given(known[field]) and known[field].start[0] == c'{'):
            found = pairs = True
            bad |= put_prompts(chain, TAG_FIRST, known[field])
    if pairs:
        if not chat:
            bad |= put_prompts(chain, TAG_SECOND, known[DOCUMENTS])
        for field in range(TEXT_2, ITEMS + 1):
            bad |= put_prompts(chain, TAG_SECOND, known[field])
    if bad:
        return _MALFORMED
    return _OK if found else _UNKNOWN_SHAPE


cdef object decoded(Span value):
    """The bytes of a string, decoded; None where an escape is none of JSON's."""
    cdef const uint8_t* start = value.start + 1
    cdef Py_ssize_t n = value.end - value.start - 2
    cdef uint8_t* room
    if memchr(start, c'\\', <size_t>n) == NULL:
        return PyBytes_FromStringAndSize(<const char*>start, n)
    room = <uint8_t*>PyMem_RawMalloc(<size_t>n)
    if room == NULL:
        raise MemoryError
    try:
        n = unescape(start, start + n, room, <size_t>n)
        return PyBytes_FromStringAndSize(<const char*>room, n) if n >= 0 else None
    finally:
        PyMem_RawFree(room)


cdef int64_t natural(Span value) noexcept nogil:
    """A non-negative integer of at most 15 digits, -1 for anything else."""
    cdef const uint8_t* p = value.start
    cdef int64_t number = 0
    if p == NULL or value.end - p > 15:
        return -1
    while p < value.end:
        if not c'0' <= p[0] <= c'9':
            return -1
        number = number * 10 + p[0] - c'0'
        p += 1
    return number


cdef bint is_integer(Span value) noexcept nogil:
    cdef const uint8_t* p = value.start
    if p[0] == c'-':
        p += 1
    while p < value.end:
        if not c'0' <= p[0] <= c'9':
            return False
        p += 1
    return True


@cython.final
cdef class ScannedBody:
    cdef readonly int status
    cdef readonly object model
    cdef readonly object model_span
    cdef readonly bint stream
    cdef readonly object max_tokens
    cdef readonly tuple values
    cdef readonly BlockHashes blocks
    cdef readonly Py_ssize_t prefix_bytes
    cdef readonly object prompt_tokens

    def __init__(self):
        raise TypeError("a ScannedBody comes from scan_json()")


cdef ScannedBody nothing_read(int status, Py_ssize_t fields):
    cdef ScannedBody scanned = ScannedBody.__new__(ScannedBody)
    scanned.status = status
    scanned.values = (None,) * fields
    return scanned


cdef object wanted_value(Span value):
    """What scan_json gives for one of its `fields`; False for a bad escape."""
    if value.start == NULL or value.end - value.start > VALUE_BYTES:
        return None
    if value.start[0] == c'"':
        found = decoded(value)
        return found if found is not None else False
    if (value.start[0] == c'-' or c'0' <= value.start[0] <= c'9') and is_integer(value):
        return PyBytes_FromStringAndSize(<const char*>value.start, value.end - value.start)
    return None


def scan_json(bytes body not None, Py_ssize_t block_bytes, tuple fields not None=(), bint hash_prefix=True,
              dict seeds=None, bytes default_seed not None=b""):
    # The contract is in the .pyi.
    cdef const uint8_t* start = <const uint8_t*>body
    cdef const uint8_t* end = start + len(body)
    cdef const uint8_t* p
    cdef Span[FIELD_COUNT] known
    cdef Body whole
    cdef Span[FIELDS_LIMIT] wanted, values
    cdef uint8_t[KEY_BYTES] scratch
    cdef Span key, value, member
    cdef Py_ssize_t n_fields = len(fields), i
    cdef size_t n
    cdef int step, field
    cdef bint first = True
    cdef bytes name
    if not 1 <= block_bytes <= BLOCK_BYTES_LIMIT:
        raise ValueError(f"block_bytes must be from 1 to {BLOCK_BYTES_LIMIT}, not {block_bytes}")
    if n_fields > FIELDS_LIMIT:
        raise ValueError(f"at most {FIELDS_LIMIT} fields can be read, not {n_fields}")
    for i in range(n_fields):
        name = fields[i]
        if name is None or not 1 <= len(name) <= KEY_BYTES:
            raise ValueError(f"a field's name has 1 to {KEY_BYTES} bytes")
        wanted[i].start = <const uint8_t*>name
        wanted[i].end = wanted[i].start + len(name)
        values[i].start = NULL
    memset(known, 0, sizeof(known))
    memset(&whole, 0, sizeof(whole))
    whole.end = end
    whole.recording = True
    try:
        p = skip_space(start, end)
        if p == end or p[0] != c'{':
            p = skip_value(&whole, p)
            if p != NULL and skip_space(p, end) == end:
                return nothing_read(_UNKNOWN_SHAPE, n_fields)
            return nothing_read(_MALFORMED, n_fields)
        p += 1
        while True:
            step = next_member(&whole, &p, first, scratch, &key, &value, &member)
            if step < 0:
                return nothing_read(_MALFORMED, n_fields)
            if step == 0:
                break
            first = False
            n = <size_t>(key.end - key.start)
            for field in range(FIELD_COUNT):
                if NAME_LENGTHS[field] == n and memcmp(key.start, NAMES[field], n) == 0:
                    known[field] = value
                    break
            for i in range(n_fields):
                if equals(key, <const char*>wanted[i].start, <size_t>(wanted[i].end - wanted[i].start)):
                    values[i] = value
        if skip_space(p, end) != end:
            return nothing_read(_MALFORMED, n_fields)
        whole.recording = False
        return read_known(start, &whole, known, values, n_fields, <size_t>block_bytes if hash_prefix else 0, seeds,
                          default_seed)
    finally:
        PyMem_RawFree(whole.strings)


cdef ScannedBody read_known(const uint8_t* start, Body* body, Span* known, Span* values, Py_ssize_t n_fields,
                            size_t block_bytes, dict seeds, bytes default_seed):
    cdef ScannedBody scanned = nothing_read(_OK, n_fields)
    cdef uint64_t seed
    cdef int64_t limit
    cdef int field
    cdef Py_ssize_t i
    cdef bytes text, seeding = default_seed
    if is_string(known[MODEL]):
        text = decoded(known[MODEL])
        if text is None:
            return nothing_read(_MALFORMED, n_fields)
        scanned.model = PyUnicode_DecodeUTF8(<const char*>text, len(text), b"replace")
        scanned.model_span = (known[MODEL].start - start, known[MODEL].end - start)
        seeding = text
        if seeds is not None:
            seeding = seeds.get(scanned.model, text)
    seed = xxh64(<const uint8_t*>seeding, <size_t>len(seeding), 0)
    if is_string(known[CACHE_SALT]):
        text = decoded(known[CACHE_SALT])
        if text is None:
            return nothing_read(_MALFORMED, n_fields)
        seed = xxh64(<const uint8_t*>text, <size_t>len(text), seed)
    scanned.stream = is_word(known[STREAM], b"true", 4)
    for field in (MAX_COMPLETION_TOKENS, MAX_OUTPUT_TOKENS, MAX_TOKENS):
        limit = natural(known[field])
        if limit >= 0:
            scanned.max_tokens = limit
            break
    if n_fields > 0:
        found = tuple([wanted_value(values[i]) for i in range(n_fields)])
        if False in found:
            return nothing_read(_MALFORMED, n_fields)
        scanned.values = found
    hash_into(scanned, body, known, seed, block_bytes)
    return scanned if scanned.status != _MALFORMED else nothing_read(_MALFORMED, n_fields)


cdef int hash_into(ScannedBody scanned, Body* body, Span* known, uint64_t seed, size_t block_bytes) except -1:
    cdef Chain chain
    cdef uint64_t* fitted
    cdef BlockHashes blocks
    memset(&chain, 0, sizeof(chain))
    chain.body = body
    chain.last = seed
    chain.block_bytes = block_bytes
    if block_bytes > 0:
        chain.partial = <uint8_t*>PyMem_RawMalloc(2 * block_bytes)
        if chain.partial == NULL:
            raise MemoryError
    try:
        scanned.status = put_prefix(&chain, known)
        if chain.out_of_memory:
            raise MemoryError
        if scanned.status != _OK:
            return 0
        scanned.prefix_bytes = <Py_ssize_t>chain.total
        if chain.ids > 0 and not chain.has_text:
            scanned.prompt_tokens = chain.ids
        if block_bytes > 0:
            blocks = BlockHashes.__new__(BlockHashes)
            if chain.n > 0:
                fitted = <uint64_t*>PyMem_RawRealloc(chain.hashes, chain.n * sizeof(uint64_t))
                blocks.data = fitted if fitted != NULL else chain.hashes
                blocks.n = <Py_ssize_t>chain.n
                chain.hashes = NULL  # theirs now; they free it with PyMem_RawFree
            scanned.blocks = blocks
        return 0
    finally:
        PyMem_RawFree(chain.hashes)
        PyMem_RawFree(chain.partial)
