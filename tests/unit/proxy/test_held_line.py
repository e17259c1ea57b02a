"""Requests that are held back, through whole exchanges: when they are looked at again, and what ends their waiting."""

from __future__ import annotations

import json

from router.strategies.held_line import LATE_S
from tests.support.scripted import Client, EngineConnection, Received, chunked, request, response_head
from tests.support.world import HealthSettings, Rules, World

BATCH_TOKENS = 64
JSON = b"content-type: application/json"
SSE = b"content-type: text/event-stream"
FIRST = response_head(200, SSE, b"transfer-encoding: chunked") + chunked([b"data: {}\n\n"], last=False)
WHOLE = response_head(200, JSON, b"content-length: 2") + b"{}"


class Watched(World):
    """One engine that keeps what it gets in `taken`, and a count of the choices."""

    def __init__(self, engines: int = 1, **rules: object) -> None:
        super().__init__(
            Rules(
                strategy="prefixaware",
                hold_batch_tokens=BATCH_TOKENS,
                health=HealthSettings(silence_s=1e6),
                queue_timeout_s=1000.0,
                first_byte_s=1000.0,
                idle_s=1000.0,
                **rules,  # type: ignore[arg-type]
            ),
            backends=engines,
        )
        self.taken: list[tuple[EngineConnection, Received]] = []
        self.choices = 0
        self.on_engine_requests(lambda connection, received: self.taken.append((connection, received)))
        choose = self.strategy.choose

        def counted(request, candidates):  # type: ignore[no-untyped-def]
            self.choices += 1
            return choose(request, candidates)

        self.strategy.choose = counted  # type: ignore[method-assign]

    def ask(self, name: str, words: int, *, stream: bool = True) -> Client:
        client = self.client()
        text = " ".join(f"{name} {at}" for at in range(words))
        body = {"model": "m", "messages": [{"role": "user", "content": text}], "stream": stream}
        client.send(request(b"POST", b"/v1/chat/completions", JSON, body=json.dumps(body).encode()))
        self.run(0.03)
        return client

    def names(self) -> list[str]:
        return [json.loads(received.body)["messages"][0]["content"].split()[0] for _, received in self.taken]

    def end_all(self) -> None:
        while self.taken:
            connection, _ = self.taken.pop()
            connection.write(WHOLE)
            self.run(0.1)


def test_an_engine_that_hangs_is_looked_at_when_it_is_late_and_not_all_the_time() -> None:
    world = Watched()
    for name, words in (("first", 20), ("second", 200), ("held", 200)):
        world.ask(name, words)
    assert (world.names(), world.admission.depth) == (["first", "second"], 1)
    before = world.choices
    world.run(LATE_S / 2.0)
    assert world.admission.depth == 1
    world.run(LATE_S)
    assert (world.names(), world.admission.depth) == (["first", "second", "held"], 0)
    assert world.choices - before <= 2
    world.end_all()
    world.rest()


def test_all_who_are_held_for_an_engine_that_hangs_reach_it_when_it_is_late() -> None:
    world = Watched()
    world.ask("first", 20)
    world.ask("second", 200)
    for number in range(20):
        world.ask(f"held-{number}", 100)
    assert world.admission.depth == 20
    world.run(2.0 * LATE_S)
    assert (len(world.taken), world.admission.depth) == (22, 0)
    world.end_all()
    world.rest()


def test_of_several_engines_the_one_that_is_free_first_is_looked_at_first() -> None:
    """No first token tells of answers in one piece: time alone does."""
    world = Watched(engines=2)
    world.ask("long", 15_000, stream=False)
    world.ask("short", 5_000, stream=False)
    assert len(world.taken) == 2
    world.ask("long", 15_000, stream=False)  # its prompt will be where the first one is
    world.ask("new", 5_000, stream=False)
    assert (len(world.taken), world.admission.depth) == (2, 2)
    waits = sorted(float(world.strategy.known_of(b)["prefill_pending_s"] or 0.0) for b in world.registry.backends)
    assert waits[0] < waits[1] / 2.0
    world.run(waits[0] + 0.1)
    assert world.names() == ["long", "short", "new"]
    world.run(waits[1])
    assert world.names() == ["long", "short", "new", "long"]
    world.end_all()
    world.rest()


def test_of_several_times_to_look_again_the_earliest_counts_and_one_timer_is_kept() -> None:
    world = Watched()
    now, pending = world.clock.now(), world.clock.pending
    for delay_s in (0.9, 0.25, 0.5):
        world.services.wake_held(delay_s)
    assert world.clock.pending == pending + 1
    assert world.clock.next_due() == now + 0.25
    world.run(0.25)
    world.services.wake_held(0.125)
    assert world.clock.next_due() == now + 0.375
    world.rest()


def test_an_engine_that_goes_is_waited_for_by_nobody() -> None:
    world = Watched(engines=2)
    world.registry.drain("e1")
    world.ask("first", 15_000)
    for number in range(20):
        world.ask(f"held-{number}", 2)
    assert (len(world.taken), world.admission.depth) == (1, 20)
    world.registry.undrain("e1")
    world.registry.drain("e0")
    world.run(0.1)
    assert world.admission.depth < 20
    world.run(30.0)
    assert world.admission.depth == 0
    assert [len(world.engines[name].received) for name in ("e0", "e1")] == [1, 20]
    world.end_all()
    world.rest()


def test_a_line_that_is_switched_off_lets_everybody_go() -> None:
    world = Watched()
    world.ask("first", 15_000)
    for number in range(20):
        world.ask(f"held-{number}", 2_000)
    assert world.admission.depth == 20
    world.services.line = None
    world.admission.pump(world.clock.now())
    world.run(0.1)
    assert (len(world.taken), world.admission.depth) == (21, 0)
    world.end_all()
    world.rest()


def test_the_client_has_its_first_byte_before_the_next_request_is_placed() -> None:
    world = Watched()
    first = world.ask("first", 15_000)
    world.ask("held", 200)
    written: list[int] = []
    placed = world.strategy.placed

    def watched(choice):  # type: ignore[no-untyped-def]
        written.append(sum(t.written_final_bytes for t in world._transports.values()))
        placed(choice)

    world.strategy.placed = watched  # type: ignore[method-assign]
    world.taken[0][0].write(FIRST)
    world.run(0.1)
    assert len(written) == 1
    assert written[0] > 0
    assert first.responses or world.admission.depth == 0
    world.taken[0][0].write(b"0\r\n\r\n")
    world.taken = world.taken[1:]
    world.end_all()
    world.rest()
