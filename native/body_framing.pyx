"""Where an HTTP/1.1 body ends, to the byte, while its bytes pass untouched. See body_framing.pyi."""

cimport cython

from enum import IntEnum

from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE, PyByteArray_Resize
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint64_t
from libc.string cimport memcpy


cdef extern from "string.h" nogil:
    # GNU; declared in string.h under _GNU_SOURCE, which Python.h sets
    void* memmem(const void* haystack, size_t size, const void* needle, size_t needle_size)


class Framing(IntEnum):
    NONE = 0
    LENGTH = 1
    CHUNKED = 2
    UNTIL_CLOSE = 3


class BadFraming(ValueError):
    pass


cdef enum:
    NONE = 0
    LENGTH = 1
    CHUNKED = 2
    UNTIL_CLOSE = 3

# States of the chunked grammar.
cdef enum:
    SIZE = 0            # hex digits of a chunk's size
    EXTENSION = 1       # after ';' up to CR
    SIZE_LF = 2         # the LF of the size line
    DATA = 3
    DATA_CR = 4
    DATA_LF = 5
    TRAILER_START = 6   # the first byte of a trailer line, or the last CR
    TRAILER = 7
    TRAILER_LF = 8
    LAST_LF = 9
    BROKEN = 10         # for good

# States of the search for usage.
cdef enum:
    SEARCH = 0
    COLON = 1
    OPEN = 2
    CAPTURE = 3

cdef const char* USAGE = b'"usage"'
cdef enum:
    USAGE_SIZE = 7


cdef inline int hex_value(unsigned char c) noexcept nogil:
    if c >= 48 and c <= 57:
        return c - 48
    c |= 32
    if c >= 97 and c <= 102:
        return c - 87
    return -1


@cython.final
cdef class BodyFramer:
    def __cinit__(self, int framing, object length=0, bint watch_usage=False):
        if framing < NONE or framing > UNTIL_CLOSE:
            raise ValueError(f"no such framing: {framing}")
        if length < 0 or (length and framing != LENGTH):
            raise ValueError("a length goes with Framing.LENGTH and is not negative")
        self.framing = framing
        self.left = length
        self.state = SIZE
        self.done = framing == NONE or (framing == LENGTH and length == 0)
        self.watching = watch_usage

    def feed(self, bytes data not None, Py_ssize_t start=0):
        if start < 0 or start > PyBytes_GET_SIZE(data):
            raise ValueError("start is outside of data")
        return self._walk(PyBytes_AS_STRING(data), start, PyBytes_GET_SIZE(data), None)

    def feed_into(self, bytes data not None, bytearray out not None, Py_ssize_t start=0):
        if start < 0 or start > PyBytes_GET_SIZE(data):
            raise ValueError("start is outside of data")
        return self._walk(PyBytes_AS_STRING(data), start, PyBytes_GET_SIZE(data), out)

    @property
    def until_close(self):
        return self.framing == UNTIL_CLOSE

    def at_boundary(self):
        return self.framing == CHUNKED and self.state == SIZE and self.digits == 0 and not self.done

    cdef Py_ssize_t _fail(self, str what) except -1:
        self.state = BROKEN    # what was taken since the last return was seen by nobody: no position is known any more
        raise BadFraming(what)

    cdef Py_ssize_t _walk(self, const char* data, Py_ssize_t start, Py_ssize_t end, bytearray out) except -1:
        cdef Py_ssize_t at = start, take, had
        cdef unsigned char c
        cdef int value
        if self.done:
            return 0
        while at < end:
            if self.state == DATA or self.framing != CHUNKED:
                take = end - at
                if self.framing != UNTIL_CLOSE and <uint64_t>take > self.left:
                    take = <Py_ssize_t>self.left
                if self.watching:
                    self._watch(data + at, take)
                if out is not None and take:
                    had = PyByteArray_GET_SIZE(out)
                    PyByteArray_Resize(out, had + take)
                    memcpy(PyByteArray_AS_STRING(out) + had, data + at, take)
                self.payload_bytes += take
                at += take
                if self.framing == UNTIL_CLOSE:
                    break
                self.left -= take
                if self.left:
                    break
                if self.framing == LENGTH:
                    self.done = True
                    break
                self.state = DATA_CR
                continue
            c = <unsigned char>data[at]
            at += 1
            if self.state == SIZE:
                value = hex_value(c)
                if value >= 0:
                    if self.digits == 15:    # 60 bits: no overflow, and no body is that long
                        self._fail("a chunk size of more than 15 digits")
                    self.left = (self.left << 4) | <uint64_t>value
                    self.digits += 1
                elif self.digits == 0:
                    self._fail("a chunk without a size")
                elif c == 13:
                    self.state = SIZE_LF
                elif c == 59:
                    self.state = EXTENSION
                    self.line_bytes = 0
                else:
                    self._fail("a bad character in a chunk size")
            elif self.state == EXTENSION:
                self.line_bytes += 1
                if c == 13:
                    self.state = SIZE_LF
                elif (c < 32 and c != 9) or c == 127:
                    self._fail("a control byte in a chunk extension")
                elif self.line_bytes > LINE_LIMIT:
                    self._fail("a chunk extension that is too long")
            elif self.state == SIZE_LF:
                if c != 10:
                    self._fail("a chunk size line that does not end in CRLF")
                self.digits = 0
                if self.left:
                    self.state = DATA
                else:
                    self.state = TRAILER_START
                    self.line_bytes = 0
            elif self.state == DATA_CR:
                if c != 13:
                    self._fail("a chunk that is longer than its size")
                self.state = DATA_LF
            elif self.state == DATA_LF:
                if c != 10:
                    self._fail("a chunk that does not end in CRLF")
                self.state = SIZE
            elif self.state == TRAILER_START:
                if c == 13:
                    self.state = LAST_LF
                elif c <= 32 or c == 127 or c == 58:
                    self._fail("a bad trailer")
                else:
                    self.state = TRAILER
                    self.line_bytes += 1
            elif self.state == TRAILER:
                self.line_bytes += 1
                if c == 13:
                    self.state = TRAILER_LF
                elif (c < 32 and c != 9) or c == 127:
                    self._fail("a control byte in a trailer")
                elif self.line_bytes > TRAILER_LIMIT:
                    self._fail("trailers that are too long")
            elif self.state == TRAILER_LF:
                if c != 10:
                    self._fail("a trailer that does not end in CRLF")
                self.state = TRAILER_START
            elif self.state == BROKEN:
                self._fail("a body that was broken before")
            else:    # LAST_LF
                if c != 10:
                    self._fail("a last chunk that does not end in CRLF")
                self.done = True
                break
        return at - start

    cdef void _watch(self, const char* data, Py_ssize_t size):
        # An escaped quotation mark inside of a JSON string is \" on the wire, so the bytes "usage": can only be a key.
        cdef Py_ssize_t at = 0, take
        cdef const char* hit
        cdef char joint[16]
        cdef char c
        while at < size:
            if self.usage_state == SEARCH:
                if self.carried:    # the key may begin in the piece before
                    take = size - at if size - at < USAGE_SIZE - 1 else USAGE_SIZE - 1
                    memcpy(joint, self.carry, self.carried)
                    memcpy(joint + self.carried, data + at, take)
                    hit = <const char*>memmem(joint, self.carried + take, USAGE, USAGE_SIZE)
                    if hit != NULL:
                        at += (hit - joint) + USAGE_SIZE - self.carried
                        self.carried = 0
                        self.usage_state = COLON
                        continue
                    if size - at < USAGE_SIZE - 1:    # a very short piece: carry both
                        take = self.carried + (size - at)
                        if take > USAGE_SIZE - 1:
                            memcpy(self.carry, joint + take - (USAGE_SIZE - 1), USAGE_SIZE - 1)
                            self.carried = USAGE_SIZE - 1
                        else:
                            memcpy(self.carry, joint, take)
                            self.carried = <int>take
                        return
                    self.carried = 0
                hit = <const char*>memmem(data + at, size - at, USAGE, USAGE_SIZE)
                if hit == NULL:
                    take = size - at if size - at < USAGE_SIZE - 1 else USAGE_SIZE - 1
                    memcpy(self.carry, data + size - take, take)
                    self.carried = <int>take
                    return
                at = (hit - data) + USAGE_SIZE
                self.usage_state = COLON
                continue
            c = data[at]
            if self.usage_state == CAPTURE:
                at += 1
                if self.captured == USAGE_LIMIT:
                    self.usage_state = SEARCH
                    continue
                self.capture[self.captured] = c
                self.captured += 1
                if self.in_string:
                    if self.escaped:
                        self.escaped = False
                    elif c == 92:
                        self.escaped = True
                    elif c == 34:
                        self.in_string = False
                elif c == 34:
                    self.in_string = True
                elif c == 123:
                    self.depth += 1
                elif c == 125:
                    self.depth -= 1
                    if self.depth == 0:
                        self.usage = PyBytes_FromStringAndSize(self.capture, self.captured)
                        self.usage_state = SEARCH
            elif c == 32 or c == 9 or c == 10 or c == 13:
                at += 1
            elif self.usage_state == COLON and c == 58:
                at += 1
                self.usage_state = OPEN
            elif self.usage_state == OPEN and c == 123:
                at += 1
                self.capture[0] = c
                self.captured = 1
                self.depth = 1
                self.in_string = False
                self.escaped = False
                self.usage_state = CAPTURE
            else:    # "usage": null, or a string that reads "usage"
                self.usage_state = SEARCH
