"""The header lines of a head, sorted in one pass. See head_lines.pyi."""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t
from libc.string cimport memchr, memcpy


cdef enum:
    LENGTH_DIGITS = 18    # of a Content-Length: a longer one than an exabyte is nobody's

cdef enum Field:
    PASSES = 0
    DROPPED
    CONNECTION
    TRANSFER_ENCODING
    UPGRADE
    CONTENT_LENGTH
    REQUEST_ID
    HOST
    EXPECT
    FORWARDED_FOR
    CONTENT_TYPE
    DATE


cdef inline bint same(const char* name, const char* lower, Py_ssize_t size) noexcept nogil:
    cdef Py_ssize_t i
    cdef char c
    for i in range(size):
        c = name[i]
        if c >= 65 and c <= 90:
            c |= 32
        if c != lower[i]:
            return False
    return True


cdef Field classify(const char* name, Py_ssize_t size, bint of_request) noexcept nogil:
    if not of_request and size > 9 and same(name, b"x-kvgate-", 9):
        return DROPPED
    if size == 2:
        return DROPPED if same(name, b"te", 2) else PASSES
    if size == 4:
        if same(name, b"host", 4):
            return HOST if of_request else PASSES
        return DATE if not of_request and same(name, b"date", 4) else PASSES
    if size == 6:
        return EXPECT if of_request and same(name, b"expect", 6) else PASSES
    if size == 7:
        if same(name, b"upgrade", 7):
            return UPGRADE
        return DROPPED if same(name, b"trailer", 7) else PASSES
    if size == 10:
        if same(name, b"connection", 10):
            return CONNECTION
        return DROPPED if same(name, b"keep-alive", 10) else PASSES
    if size == 12:
        if same(name, b"content-type", 12):
            return CONTENT_TYPE
        return REQUEST_ID if same(name, b"x-request-id", 12) else PASSES
    if size == 14:
        if same(name, b"content-length", 14):
            return CONTENT_LENGTH
        return DROPPED if same(name, b"http2-settings", 14) else PASSES
    if size == 15 and of_request and same(name, b"x-forwarded-for", 15):
        return FORWARDED_FOR
    if size == 16 and same(name, b"proxy-connection", 16):
        return DROPPED
    if size == 17 and same(name, b"transfer-encoding", 17):
        return TRANSFER_ENCODING
    if size == 18 and same(name, b"proxy-authenticate", 18):
        return DROPPED
    if size == 19 and same(name, b"proxy-authorization", 19):
        return DROPPED
    return PASSES


cdef bytes value_of(const char* line, Py_ssize_t colon, Py_ssize_t size):
    """The value of a line of `size` bytes, its CRLF apart."""
    cdef Py_ssize_t start = colon + 1, end = size
    while start < end and (line[start] == 32 or line[start] == 9):
        start += 1
    while end > start and (line[end - 1] == 32 or line[end - 1] == 9):
        end -= 1
    return PyBytes_FromStringAndSize(line + start, end - start)


cdef bytes joined(bytes before, bytes value):
    return value if before is None else before + b", " + value


cdef int64_t length_of(bytes value) except -2:
    cdef const char* digits = PyBytes_AS_STRING(value)
    cdef Py_ssize_t size = PyBytes_GET_SIZE(value), i
    cdef int64_t length = 0
    if size == 0 or size > LENGTH_DIGITS:
        raise ValueError("a Content-Length out of bounds")
    for i in range(size):
        if digits[i] < 48 or digits[i] > 57:
            raise ValueError("a Content-Length that is no number")
        length = length * 10 + (digits[i] - 48)
    return length


@cython.final
cdef class HeadLines:
    cdef readonly bytes kept
    cdef readonly int64_t content_length
    cdef readonly bytes connection
    cdef readonly bytes transfer_encoding
    cdef readonly bytes upgrade
    cdef readonly bytes host
    cdef readonly int hosts
    cdef readonly bytes expect
    cdef readonly bytes request_id
    cdef readonly bytes forwarded_for
    cdef readonly bytes content_type
    cdef readonly bytes date

    def __cinit__(self):
        self.content_length = -1

    cdef bint take(self, Field field, bytes value) except -1:
        """Keep a value that is read; True if its line passes on all the same."""
        if field == CONTENT_TYPE:
            if self.content_type is None:
                self.content_type = value
            return True
        if field == DATE:
            if self.date is not None:
                return False
            self.date = value
            return True
        if field == CONTENT_LENGTH:
            if self.content_length >= 0:
                raise ValueError("two Content-Length lines")
            self.content_length = length_of(value)
        elif field == HOST:
            self.host = value
            self.hosts += 1
        elif field == CONNECTION:
            self.connection = joined(self.connection, value.lower())
        elif field == TRANSFER_ENCODING:
            self.transfer_encoding = joined(self.transfer_encoding, value.lower())
        elif field == UPGRADE:
            self.upgrade = value
        elif field == EXPECT:
            self.expect = value.lower()
        elif field == REQUEST_ID:
            if self.request_id is None:
                self.request_id = value
        elif field == FORWARDED_FOR:
            self.forwarded_for = joined(self.forwarded_for, value)
        return False


cdef const char* line_end(const char* line, const char* end) except NULL:
    """The CR of the CRLF that ends a line."""
    cdef const char* lf = <const char*>memchr(line, 10, end - line)
    if lf == NULL or lf == line or (lf - 1)[0] != 13:
        raise ValueError("a line that does not end in CRLF")
    return lf - 1


def sort_lines(bytes head not None, bint of_request):
    cdef const char* line = PyBytes_AS_STRING(head)
    cdef const char* end = line + PyBytes_GET_SIZE(head)
    cdef const char* stop
    cdef const char* colon
    cdef Field field
    cdef HeadLines lines = HeadLines()
    cdef object kept = PyBytes_FromStringAndSize(NULL, end - line)
    cdef char* out = PyBytes_AS_STRING(kept)
    cdef Py_ssize_t used = 0, size
    line = line_end(line, end) + 2    # past the start line
    while line < end:
        stop = line_end(line, end)
        size = stop - line
        if size == 0:
            break
        colon = <const char*>memchr(line, 58, size)
        if colon == NULL or colon == line:
            raise ValueError("a header line without a name")
        field = classify(line, colon - line, of_request)
        if field == PASSES or (field != DROPPED and lines.take(field, value_of(line, colon - line, size))):
            memcpy(out + used, line, size + 2)
            used += size + 2
        line = stop + 2
    lines.kept = (<bytes>kept)[:used]
    return lines


def find_header(bytes kept not None, bytes name not None):
    cdef const char* line = PyBytes_AS_STRING(kept)
    cdef const char* end = line + PyBytes_GET_SIZE(kept)
    cdef const char* stop
    cdef Py_ssize_t size = PyBytes_GET_SIZE(name)
    while line < end:
        stop = line_end(line, end)
        if stop - line > size and line[size] == 58 and same(line, PyBytes_AS_STRING(name), size):
            return value_of(line, size, stop - line)
        line = stop + 2
    return None


def drop_headers(bytes kept not None, names):
    return b"".join([
        line + b"\r\n" for line in kept.split(b"\r\n") if line and line.partition(b":")[0].lower() not in names
    ])
