from libc.stdint cimport uint64_t

cdef enum:
    USAGE_LIMIT = 1024       # bytes of one usage object (vLLM: about 200)
    LINE_LIMIT = 4096        # bytes of a chunk-size line, extensions included
    TRAILER_LIMIT = 16384    # bytes of all trailers

cdef class BodyFramer:
    cdef int framing                 # a Framing
    cdef int state                   # a State of the chunked grammar
    cdef uint64_t left               # payload bytes left in this chunk, or in the whole of a LENGTH body
    cdef int digits                  # hex digits of the size so far
    cdef Py_ssize_t line_bytes       # bytes of the current size line, or of all trailers
    cdef readonly bint done          # the last byte of the body was seen
    cdef readonly uint64_t payload_bytes
    # the usage object of an OpenAI answer, looked for while the payload passes
    cdef bint watching
    cdef int usage_state
    cdef int depth
    cdef bint in_string
    cdef bint escaped
    cdef char carry[8]
    cdef int carried
    cdef char capture[USAGE_LIMIT]
    cdef Py_ssize_t captured
    cdef readonly bytes usage

    cdef Py_ssize_t _walk(self, const char* data, Py_ssize_t start, Py_ssize_t end, bytearray out) except -1
    cdef Py_ssize_t _fail(self, str what) except -1
    cdef void _watch(self, const char* data, Py_ssize_t size)
