"""The phases of an exchange and the moves between them: the only machine in proxy/, as a table.

    READ_HEAD -> READ_BODY -> QUEUED -> CONNECTING -> SENDING -> AWAIT_HEAD -> STREAMING -> DONE

A repeat moves back to QUEUED. AWAIT_HEAD lasts until the first body byte, because an engine's head says nothing: vLLM
sends it at acceptance, before queueing and prefill. Every phase may end in DONE.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class Phase(StrEnum):
    __hash__ = str.__hash__  # Enum's own is a Python function, and phases are looked up several times a request

    READ_HEAD = "read_head"
    READ_BODY = "read_body"
    QUEUED = "queued"
    CONNECTING = "connecting"
    SENDING = "sending"
    AWAIT_HEAD = "await_head"
    STREAMING = "streaming"
    DONE = "done"


class EndedBy(StrEnum):
    __hash__ = str.__hash__

    CLIENT = "client"
    UPSTREAM = "upstream"
    GATEWAY = "gateway"


MOVES: Final[dict[Phase, frozenset[Phase]]] = {
    Phase.READ_HEAD: frozenset((Phase.READ_BODY, Phase.DONE)),
    Phase.READ_BODY: frozenset((Phase.QUEUED, Phase.DONE)),
    # straight to SENDING on an idle connection
    Phase.QUEUED: frozenset((Phase.CONNECTING, Phase.SENDING, Phase.DONE)),
    Phase.CONNECTING: frozenset((Phase.SENDING, Phase.QUEUED, Phase.DONE)),
    # an engine may answer before it has read the whole request; a reused connection may turn out dead
    Phase.SENDING: frozenset((Phase.AWAIT_HEAD, Phase.STREAMING, Phase.CONNECTING, Phase.QUEUED, Phase.DONE)),
    Phase.AWAIT_HEAD: frozenset((Phase.STREAMING, Phase.CONNECTING, Phase.QUEUED, Phase.DONE)),
    Phase.STREAMING: frozenset((Phase.DONE,)),
    Phase.DONE: frozenset(),
}
