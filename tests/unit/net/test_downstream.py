"""A client's connection: what it reads, when it closes, and what it holds for a client that does not read."""

from __future__ import annotations

from tests.support.scripted import Client, EngineConnection, Received, request, response_head
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


# -- slow readers -----------------------------------------------------------------------------------------------------


def test_one_who_does_not_read_its_answers_gets_no_further_ones_made() -> None:
    world = answering()
    world.services.scrape = lambda tell: tell(b"m" * 50_000)
    client = world.client()
    assert client.transport is not None
    client.transport.pause_reading()
    client.send(request(b"GET", b"/metrics") * 40, *[b"GET"] * 40)
    world.run(1.0)  # world.check() bounds what is held for it
    assert 2 <= world.begun <= 5
    client.transport.resume_reading()
    world.run(1.0)
    assert [len(response.payload) for response in client.responses] == [50_000] * 40
    world.rest()


def test_a_stream_behind_an_answer_that_is_not_read_waits_too() -> None:
    world = World()

    def answer(connection: EngineConnection, received: Received) -> None:
        # the last bytes of the first answer are those that make the connection slow
        body = b"x" * (98_150 if received.header(b"x-first") else 900_000)
        connection.write(response_head(200, b"content-length: %d" % len(body)) + body)

    world.on_engine_requests(answer)
    client = world.client()
    assert client.transport is not None
    client.transport.pause_reading()
    client.send(request(b"GET", b"/a", b"x-first: 1") + request(b"GET", b"/b"), b"GET", b"GET")
    world.run(2.0)  # world.check() bounds what is held for it
    assert world.begun == 1
    client.transport.resume_reading()
    world.run(2.0)
    assert [len(response.payload) for response in client.responses] == [98_150, 900_000]
    world.rest()


def test_what_is_sent_ahead_of_an_answer_that_is_not_read_is_bounded() -> None:
    world = answering(b"x" * 150_000)
    client = world.client()
    assert client.transport is not None
    client.transport.pause_reading()
    client.send(CHAT, b"POST")
    world.run(0.2)
    client.send(request(b"GET", b"/livez") * 8000, *[b"GET"] * 8000)
    world.run(0.5)
    assert client.transport.get_write_buffer_size() > 0, "the gateway stopped reading"
    client.transport.resume_reading()
    world.run(30.0)
    assert len(client.responses) == 8001
    world.rest()


def test_one_who_never_reads_is_closed_after_its_keep_alive_time() -> None:
    world = answering(b"x" * 100_000)
    client = world.client()
    assert client.transport is not None
    client.transport.pause_reading()
    client.send(CHAT * 2, b"POST", b"POST")
    world.run(60.0)
    assert not world.connections
    world.rest()
