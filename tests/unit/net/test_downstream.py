"""A client's connection: what it reads, when it closes, and what it holds for a client that does not read."""

from __future__ import annotations

from tests.support.scripted import Client, EngineConnection, Received, chunked, request, response_head
from tests.support.world import World

JSON = b"content-type: application/json"
CHAT = request(b"POST", b"/v1/chat/completions", JSON, body=b'{"model":"m","messages":[]}')


def answering(body: bytes = b"{}") -> World:
    """A world whose engines answer at once with `body`."""
    world = World()
    raw = response_head(200, JSON, b"content-length: %d" % len(body)) + body
    world.on_engine_requests(lambda connection, received: connection.write(raw))
    return world


def ask(world: World, raw: bytes, *, seconds: float = 0.5) -> Client:
    client = world.client()
    client.send(raw)
    world.run(seconds)
    return client


# -- leaving ----------------------------------------------------------------------------------------------------------


def test_a_client_that_half_closes_in_mid_answer_is_reset_so_that_it_takes_nothing_for_the_whole() -> None:
    world = World()

    def stream_until_close(connection: EngineConnection, received: Received) -> None:
        connection.write(response_head(200, b"content-type: text/event-stream") + b"data: 1\n\n")

    world.on_engine_requests(stream_until_close)
    client = ask(world, CHAT)
    assert client.responses[0].payload == b"data: 1\n\n"
    client.half_close()
    world.run(0.5)
    assert client.lost
    assert not client.eof
    assert not client.responses[0].complete
    assert not world.engines["e0"].open_connections
    world.rest()


def test_a_client_that_half_closes_after_its_answer_still_gets_all_of_it() -> None:
    world = answering(b"x" * 90_000)
    client = world.client()
    assert client.transport is not None
    client.transport.pause_reading()
    client.send(CHAT)
    world.run(0.5)
    assert not world.services.exchanges
    client.half_close()
    world.run(0.5)
    client.transport.resume_reading()
    world.run(0.5)
    assert client.responses[0].complete
    world.rest()


def test_a_client_that_half_closes_and_never_reads_is_cut_after_a_while() -> None:
    world = answering(b"x" * 90_000)
    client = world.client()
    assert client.transport is not None
    client.transport.pause_reading()
    client.send(CHAT)
    world.run(0.5)
    client.half_close()
    world.run(40.0)
    assert not world.connections
    world.rest()
