"""Where an HTTP/1.1 body ends, to the byte, while its bytes pass untouched."""

from enum import IntEnum
from typing import Self, final

class Framing(IntEnum):
    NONE = 0  # no body: HEAD, 204, 304, 1xx
    LENGTH = 1  # Content-Length
    CHUNKED = 2
    UNTIL_CLOSE = 3  # ends with the connection

class BadFraming(ValueError):
    """The peer broke the chunked grammar (RFC 9112 section 7.1). Nothing after it can be trusted."""

@final
class BodyFramer:
    """One body. Costs one call for each piece received, whatever the number of chunks in it.

    The chunked grammar is strict: 1 to 15 hex digits, CRLF and nothing less, no control bytes in extensions and
    trailers, both bounded.
    """

    done: bool
    payload_bytes: int
    usage: bytes | None
    def __new__(cls, framing: int, length: int = 0, watch_usage: bool = False) -> Self:
        """`length`: bytes, for LENGTH alone. `watch_usage`: keep the last `"usage": {...}` object that passes."""

    def feed(self, data: bytes, start: int = 0) -> int:
        """How many bytes of data[start:] belong to this body. Fewer than all only when `done`.

        Raises BadFraming.
        """

    def feed_into(self, data: bytes, out: bytearray, start: int = 0) -> int:
        """As feed(), and appends the payload without its framing to `out`."""

    @property
    def until_close(self) -> bool:
        """Whether the end of the connection is the proper end of this body."""

    def at_boundary(self) -> bool:
        """Whether another chunk could be inserted here without being taken for payload."""
