"""The bounds of the intake. Times in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class IntakeSettings:
    """How much of an engine's events is held, and how long anything may take."""

    max_payload_bytes: int = 4 * 1024 * 1024  # a re-announced context of a million tokens fits twice over many blocks
    receive_frames: int = 32  # held by ZMQ for one socket; beyond it TCP holds the engine back
    held_frames: int = 20_000  # live ones of one rank while it replays
    held_bytes: int = 64 * 1024 * 1024  # of all ranks together
    frames_per_s: int = 10_000  # of one rank, live: an engine has a few hundred steps a second
    malformed_limit: int = 3  # in a row, then the rank is off for a while
    malformed_pause_s: float = 30.0  # doubles up to PAUSE_LIMIT_S
    connect_timeout_s: float = 5.0
    replay_stall_s: float = 5.0  # without a frame
    replay_timeout_s: float = 60.0  # for one replay
    stale_limit_s: float = 30.0  # a broken stream keeps what it knew for so long
    ask_timeout_s: float = 5.0
    retry_s: float = 0.5  # after a broken stream; doubles up to RETRY_LIMIT_S


PAUSE_LIMIT_S = 600.0
RETRY_LIMIT_S = 30.0
REPLAYS_AT_ONCE = 8  # over all engines: what they may hold is receive_frames x max_payload_bytes each
ASKED_AT_ONCE = 32
RANKS_LIMIT = 256  # of one engine
