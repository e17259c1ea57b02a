"""Random arrivals, leaves, changes of the caps and of the fleet, from one seed: who may start, and in which order.

After each event: no cap is exceeded but by what ran before it was lowered, nobody waits for whom there is room, and
whoever is placed is the oldest of those who could be. World checks that places and waiters are counted right.
"""

from __future__ import annotations

import json
from collections import Counter
from random import Random

import pytest

from router.backends.backend import Backend, State
from router.proxy.exchange import Exchange
from router.proxy.phases import Phase
from router.strategies.strategy import Choice
from tests.support.scripted import Client, EngineConnection, Received, chunked, request, response_head
from tests.support.world import Rules, World

JSON = b"content-type: application/json"
SSE = b"content-type: text/event-stream"
MODELS = ("a", "b", "c")


class Crowd:
    """Numbered requests, whose numbers travel as max_tokens: so a choice tells whose it is."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)
        self.world = World(
            Rules(
                max_in_flight=rng.choice((0, 3, 6)),
                max_in_flight_per_backend=rng.choice((0, 1, 2)),
                max_queue=rng.choice((0, 1, 5, 30)),
                queue_timeout_s=rng.choice((0.5, 3.0)),
                retry_budget=1.0,
            ),
            backends=0,
            seed=seed,
        )
        for number, models in enumerate((("a",), ("a", "b"), ("b",), ("c",))):
            self.world.add_backend(f"e{number}", models=models)
        self.world.on_engine_requests(self._answer)
        self.number = 0
        self.placed = 0
        self.waited = 0
        self.clients: list[Client] = []
        self.statuses: Counter[int] = Counter()
        self.world.strategy.placed = self._placed(self.world.strategy.placed)  # type: ignore[method-assign]

    # -- what happens

    def arrive(self) -> None:
        self.number += 1
        client = self.world.client()
        self.clients.append(client)
        body = {"model": self.rng.choice(("a", "a", "a", "b", "c")), "messages": [], "max_tokens": self.number}
        client.send(request(b"POST", b"/v1/chat/completions", JSON, body=json.dumps(body).encode()))

    def leave(self) -> None:
        there = [client for client in self.clients if not client.lost]
        if there:
            self.rng.choice(there).abort()

    def change_caps(self) -> None:
        rng = self.rng
        self.world.set_limits(rng.choice((0, 1, 3, 8)), rng.choice((0, 1, 5, 30)), rng.choice((0, 1, 2, 4)))

    def change_fleet(self) -> None:
        world, rng = self.world, self.rng
        backend = rng.choice(world.registry.backends)
        what = rng.choice(("down", "up", "up", "starting", "drain", "undrain", "undrain"))
        if what in ("drain", "undrain"):
            (world.registry.drain if what == "drain" else world.registry.undrain)(backend.name)
        else:
            world.registry.set_state(backend, State(what), "" if what == "up" else "because")

    def _answer(self, connection: EngineConnection, received: Received) -> None:
        later, rng = self.world.clock.call_later, self.rng
        if rng.random() < 0.1:
            later(0.01, connection.write, response_head(503, b"content-length: 0"))
        elif rng.random() < 0.5:
            later(rng.uniform(0.0, 0.8), connection.write, response_head(200, JSON, b"content-length: 2") + b"{}")
        else:
            head = response_head(200, SSE, b"transfer-encoding: chunked")
            connection.write(head + chunked([b"data: {}\n\n"], last=False))
            later(rng.uniform(0.1, 1.0), connection.write, b"0\r\n\r\n")

    # -- what must hold

    def _waiting(self) -> list[Exchange]:
        """Those who wait for their first attempt; a repeat has backends to avoid."""
        return [e for e in self.world.services.exchanges if e._phase is Phase.QUEUED and not e._attempts]

    def _room_for(self, exchange: Exchange, taken: Backend | None = None) -> bool:
        cap = self.world.rules.max_in_flight_per_backend
        return any(not cap or b.in_flight - (b is taken) < cap for b in exchange.pool.candidates)

    def _placed(self, real):  # type: ignore[no-untyped-def]
        def placed(choice: Choice) -> None:
            self.placed += 1
            if choice.reason != "retry":
                number = choice.request.max_tokens
                assert number is not None
                for other in self._waiting():
                    theirs = other._request.max_tokens if other._request is not None else None
                    if theirs is not None and theirs < number:
                        self.waited += 1
                        assert not self._room_for(other, choice.backend), f"{number} was placed before {theirs}"
            real(choice)

        return placed

    def check(self) -> None:
        if self.world.admission.full:
            return
        for exchange in self._waiting():
            assert not self._room_for(exchange), f"{exchange.pool} has room and somebody waits"


def play(seed: int, steps: int) -> Crowd:
    crowd = Crowd(seed)
    actions = (crowd.arrive, crowd.leave, crowd.change_caps, crowd.change_fleet)
    for _ in range(steps):
        crowd.rng.choices(actions, weights=(30, 4, 1, 2))[0]()
        until = crowd.world.clock.now() + crowd.rng.expovariate(30.0)
        while (due := crowd.world.clock.next_due()) is not None and due <= until:
            crowd.world.clock.advance_to(due)
            crowd.world.check()
            crowd.check()
        crowd.world.clock.advance_to(until)
    for backend in crowd.world.registry.backends:
        crowd.world.registry.undrain(backend.name)
        crowd.world.registry.set_state(backend, State.UP, "")
    crowd.world.run(20.0)
    assert crowd.world.admission.in_flight == crowd.world.admission.depth == 0, (
        "all was answered without anybody leaving"
    )
    for client in crowd.clients:
        for response in client.responses:
            crowd.statuses[response.status] += 1
            if response.status in (429, 503):
                retry_after = response.header(b"retry-after")
                assert (retry_after is None and not response.ours) or 1 <= int(retry_after or 0) <= 60
    crowd.world.rest()
    return crowd


@pytest.mark.parametrize("seed", range(12))
def test_every_crowd_is_let_in_by_the_rules(seed: int) -> None:
    crowd = play(seed, 250)
    assert crowd.placed > 40


def test_the_crowds_meet_every_refusal_and_overtake_only_the_blocked() -> None:
    statuses: Counter[int] = Counter()
    ends: Counter[tuple[str, str]] = Counter()
    waited = 0
    for seed in range(100, 106):
        crowd = play(seed, 200)
        statuses.update(crowd.statuses)
        ends.update(crowd.world.metrics.ended)
        waited += crowd.waited
    assert {200, 429, 503} <= set(statuses)
    assert ends["client", "queued"]
    assert ends["gateway", "queued"]
    assert waited > 50
