"""Server-sent events, as far as a router must look into them: what is the first thing that a stream says?"""

from __future__ import annotations

import re
from enum import Enum, auto

_ERROR_DATA = re.compile(rb'data: ?\s*\{\s*("type"\s*:\s*"error"|"error"\s*:|"object"\s*:\s*"error")')
_UNDECIDED = (b"data:", b"event:", b"id:", b"retry:", b":")  # a line that begins so tells nothing before its end
_SHORTEST_VERDICT = 32  # bytes of a data line after which an error can no longer begin


class First(Enum):
    """What a stream has said so far."""

    NOTHING = auto()  # comments, blank lines, or too little to tell
    ERROR = auto()  # its first event is an error
    DATA = auto()


def first_event(payload: bytes) -> First:
    """Looks at the beginning of a stream's payload (chunk framing removed)."""
    at = 0
    while at < len(payload):
        end = payload.find(b"\n", at)
        line = payload[at:] if end < 0 else payload[at:end]
        if line.startswith(b"data:"):
            if _ERROR_DATA.match(line):
                return First.ERROR
            return First.DATA if end >= 0 or len(line) >= _SHORTEST_VERDICT else First.NOTHING
        if end < 0:
            undecided = any(word.startswith(line[: len(word)]) for word in _UNDECIDED)
            return First.NOTHING if undecided or line == b"\r" else First.DATA
        if line.startswith(b"event:"):
            if line[6:].strip() == b"error":
                return First.ERROR
        elif line.strip() and not line.startswith((b":", b"id:", b"retry:")):
            return First.DATA
        at = end + 1
    return First.NOTHING
