"""RESP2, the protocol of Redis and Valkey: commands to bytes, bytes to replies. No I/O.

Written out because a question is one write of up to some hundred EXISTS and one read of as many `:1`: the client
library took 20 us of the event loop for each of 128 keys on that, router/l2 as a whole takes 5 us.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, TypeAlias

Reply: TypeAlias = "int | bytes | list[Reply] | ServerError | None"

LINE_LIMIT: Final = 4096
BULK_LIMIT: Final = 65_536  # a key is at most some hundred bytes; values are never asked for
ARRAY_LIMIT: Final = 100_000
DEPTH_LIMIT: Final = 4
_NUMBER: Final = re.compile(rb"-?[0-9]{1,19}")


class BadReply(Exception):
    """The server does not speak RESP2, or more of it than was asked for."""


class ServerError(Exception):
    """An error that the server answered with. `kind` is its first word, such as WRONGPASS; the rest may show values."""

    def __init__(self, line: bytes) -> None:
        word = line.split(b" ", 1)[0][:32].decode("ascii", "replace")
        self.kind = word if word.isalpha() and word.isupper() else "an error"
        super().__init__(self.kind)


def command(*parts: bytes) -> bytes:
    return b"*%d\r\n%s" % (len(parts), b"".join([b"$%d\r\n%s\r\n" % (len(part), part) for part in parts]))


def exists(keys: Iterable[bytes]) -> bytes:
    """One EXISTS per key: each reply is 0 or 1."""
    return b"".join([b"*2\r\n$6\r\nEXISTS\r\n$%d\r\n%s\r\n" % (len(key), key) for key in keys])


class Replies:
    """Cuts a stream of bytes into replies, in time linear in its length however it is cut."""

    __slots__ = ("_buffer", "_bulk", "_open", "_searched")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched = 0  # bytes that are known to hold no line's end
        self._bulk = -1  # length of the string whose bytes come next, -1: a line comes next
        self._open: list[tuple[list[Reply], int]] = []  # arrays begun, and how many members each will have

    def feed(self, data: bytes) -> list[Reply]:
        """The replies that ended with these bytes. Raises BadReply; nothing can be read after that."""
        buffer = self._buffer
        buffer += data
        at = 0
        found: list[Reply] = []
        while True:
            value: Reply
            if self._bulk >= 0:
                end = at + self._bulk
                if len(buffer) < end + 2:
                    break
                if buffer[end : end + 2] != b"\r\n":
                    raise BadReply("a string is longer than it says")
                value = bytes(buffer[at:end])
                at, self._bulk = end + 2, -1
            else:
                end = buffer.find(b"\r\n", max(at, self._searched))
                if end < 0:
                    if len(buffer) - at > LINE_LIMIT:
                        raise BadReply("a line is too long")
                    self._searched = max(len(buffer) - 1, at)
                    break
                if end - at > LINE_LIMIT:
                    raise BadReply("a line is too long")
                kind, rest = buffer[at : at + 1], bytes(buffer[at + 1 : end])
                at = end + 2
                self._searched = at
                if kind == b":":
                    value = _number(rest)
                elif kind == b"+":
                    value = rest
                elif kind == b"-":
                    value = ServerError(rest)
                elif kind == b"$":
                    length = _number(rest)
                    if length >= 0:
                        if length > BULK_LIMIT:
                            raise BadReply("a string is too long")
                        self._bulk = length
                        continue
                    value = None
                elif kind == b"*":
                    length = _number(rest)
                    if length > ARRAY_LIMIT or len(self._open) >= DEPTH_LIMIT:
                        raise BadReply("an array is too long or too deep")
                    if length > 0:
                        self._open.append(([], length))
                        continue
                    value = [] if length == 0 else None
                else:
                    raise BadReply("this is not RESP2")
            while self._open:
                members, length = self._open[-1]
                members.append(value)
                if len(members) < length:
                    break
                self._open.pop()
                value = members
            else:
                found.append(value)
        if at:
            del buffer[:at]
            self._searched = max(self._searched - at, 0)
        return found


def _number(text: bytes) -> int:
    if not _NUMBER.fullmatch(text):
        raise BadReply("a number was expected")
    return int(text)
