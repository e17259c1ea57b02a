"""KV events of the simulated engine as a subscriber sees them, in today's and in older releases' format."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq

from tests.support.sim_process import SimProcess, running_sim

FAST = ("--step-ms", "1", "--decode-ms", "1", "--decode-ms-per-seq", "0", "--server-dev-mode")
TIMEOUT_MS = 20_000


@contextmanager
def sockets(sim: SimProcess, kind: int, field: str) -> Iterator[zmq.Socket[bytes]]:
    source = sim.request("GET", "/kv_event_sources").json()["0"]
    context = zmq.Context()
    socket = context.socket(kind)
    socket.linger = 0
    socket.rcvtimeo = TIMEOUT_MS
    socket.connect(source[field].replace("*", "127.0.0.1"))
    try:
        yield socket
    finally:
        socket.close()
        context.term()


def complete(sim: SimProcess, prompt: Any, **fields: Any) -> None:
    assert sim.request("POST", "/v1/completions", {"prompt": prompt, "max_tokens": 1, **fields}).status == 200


def replay(sim: SimProcess, start: int = 0) -> list[list[bytes]]:
    """All frames of a replay, the end included."""
    answers: list[list[bytes]] = []
    with sockets(sim, zmq.DEALER, "replay_endpoint") as dealer:
        dealer.send_multipart([b"", start.to_bytes(8, "big")])
        while not answers or answers[-1][-2] != b"\xff" * 8:
            answers.append(dealer.recv_multipart())
    return answers


def decoded(payload: bytes) -> Any:
    return msgspec.msgpack.decode(payload)


def test_events_reach_a_subscriber_and_replay_gives_them_again() -> None:
    with running_sim(*FAST, "--kv-events-topic", "kv@pod") as sim, sockets(sim, zmq.SUB, "endpoint") as subscriber:
        subscriber.setsockopt(zmq.SUBSCRIBE, b"kv@")
        # A subscription takes a moment: prompts are sent until the first one is seen, none by the clock.
        subscriber.rcvtimeo = 200
        first: list[bytes] = []
        sent = 0
        while not first:
            sent += 1
            complete(sim, [1000 + sent] * 40)
            try:
                first = subscriber.recv_multipart()
            except zmq.Again:
                continue
        subscriber.rcvtimeo = TIMEOUT_MS
        topic, sequence, payload = first
        assert topic == b"kv@pod"
        timestamp, events, rank = decoded(payload)
        token = 1001 + int.from_bytes(sequence, "big")
        assert timestamp > 1e9
        assert rank == 0
        assert [event["type"] for event in events] == ["BlockStored"]
        event = events[0]
        assert event["token_ids"] == [token] * 32
        assert len(event["block_hashes"]) == 2
        assert event["parent_block_hash"] is None
        assert (event["block_size"], event["medium"], event["extra_keys"]) == (16, "GPU", [None, None])
        replayed = replay(sim)
        assert [frame[1] for frame in replayed[:-1]] == [b"kv@pod"] * sent
        assert [int.from_bytes(frame[2], "big") for frame in replayed[:-1]] == list(range(sent))
        assert replayed[-1] == [b"", b"", b"\xff" * 8, b""]
        position = int.from_bytes(sequence, "big")
        assert replayed[position][3] == payload
        assert [int.from_bytes(frame[2], "big") for frame in replay(sim, sent - 1)[:-1]] == [sent - 1]


def test_a_full_hit_emits_nothing_and_a_reset_leads_the_next_batch() -> None:
    with running_sim(*FAST) as sim:
        complete(sim, [7] * 40)
        complete(sim, [7] * 40)
        assert sim.stats()["kv_event_sequence"] == 1
        assert sim.request("POST", "/reset_prefix_cache").json() == {"success": True}
        assert sim.stats()["kv_event_sequence"] == 1
        complete(sim, [7] * 40)
        batches = [decoded(frame[3])[1] for frame in replay(sim)[:-1]]
        assert [[event["type"] for event in batch] for batch in batches] == [
            ["BlockStored"],
            ["AllBlocksCleared", "BlockStored"],
        ]
        assert batches[0][0]["block_hashes"] == batches[1][1]["block_hashes"]


def test_eviction_removes_one_hash_an_event_deepest_first() -> None:
    with running_sim(*FAST, "--num-gpu-blocks-override", "9") as sim:
        complete(sim, [1] * 63, cache_salt="tenant")
        complete(sim, [2] * 110)
        stored, evicting = (decoded(frame[3])[1] for frame in replay(sim)[:-1])
        assert stored[0]["extra_keys"] == [["tenant"], None, None]
        removed = [event["block_hashes"] for event in evicting if event["type"] == "BlockRemoved"]
        assert removed == [[value] for value in reversed(stored[0]["block_hashes"])][: len(removed)]
        assert len(removed) == 2


def test_arrays_and_the_older_replay_framing() -> None:
    with running_sim(*FAST, "--kv-events-encoding", "array") as sim:
        complete(sim, [5] * 20)
        first, end = replay(sim)
        assert first[:2] == [b"", (0).to_bytes(8, "big")]
        assert end == [b"", b"\xff" * 8, b""]
        event = decoded(first[2])[1][0]
        assert event[0] == "BlockStored"
        assert event[2:7] == [None, [5] * 16, 16, None, "GPU"]
        assert event[7:] == [None, [None], 0, "full_attention", None]


def test_byte_hashes() -> None:
    with running_sim(*FAST, "--kv-events-hashes", "bytes") as sim:
        complete(sim, [5] * 40)
        event = decoded(replay(sim)[0][3])[1][0]
        assert [len(value) for value in event["block_hashes"]] == [32, 32]


def test_the_ring_is_bounded() -> None:
    with running_sim(*FAST, "--kv-events-buffer-steps", "3") as sim:
        for number in range(5):
            complete(sim, [10 + number] * 20)
        assert [int.from_bytes(frame[2], "big") for frame in replay(sim)[:-1]] == [2, 3, 4]


def test_switched_off() -> None:
    with running_sim(*FAST, "--no-kv-events") as sim:
        complete(sim, [5] * 40)
        assert sim.request("GET", "/kv_event_sources").json() == {}
        assert sim.stats()["kv_event_sequence"] is None


def test_vllms_own_flag() -> None:
    config = '{"enable_kv_cache_events": true, "endpoint": "tcp://*:0", "topic": "t", "buffer_steps": 5}'
    with running_sim(*FAST, "--kv-events-config", config) as sim:
        source = sim.request("GET", "/kv_event_sources").json()["0"]
        assert (source["topic"], source["buffer_steps"], source["replay_endpoint"]) == ("t", 5, None)
    with running_sim(*FAST, "--kv-events-config", "{}") as sim:
        assert sim.request("GET", "/kv_event_sources").json() == {}


@pytest.mark.parametrize("frames", [[b"x"], [b"", b"short"], [b"", b"1" * 8, b"more"]])
def test_what_is_no_replay_request_is_ignored(frames: list[bytes]) -> None:
    with running_sim(*FAST) as sim:
        complete(sim, [5] * 40)
        with sockets(sim, zmq.DEALER, "replay_endpoint") as dealer:
            dealer.send_multipart(frames)
            dealer.send_multipart([b"", (0).to_bytes(8, "big")])
            assert len(dealer.recv_multipart()) == 4
