"""A request that waits for its token ids before it is placed: it gets them, or goes on without, or leaves."""

from __future__ import annotations

from array import array

import pytest

from router.metrics import Metrics
from router.strategies.strategy import RoutingRequest
from router.tokens.answers import NoTokens, TokenIds, Why
from tests.support.scripted import Client, EngineConnection, Received, request, response_head
from tests.support.world import Rules, ScriptedTokens, World

JSON = b"content-type: application/json"
BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"cache_salt":"s"}'
CHAT = request(b"POST", b"/v1/chat/completions?x=1", JSON, body=BODY)
IDS = TokenIds(array("I", [1, 2, 3]), "local", salt="s")


def answer(connection: EngineConnection, received: Received) -> None:
    connection.write(response_head(200, JSON, b"content-length: 2") + b"{}")


class Waiting:
    """A gateway whose strategy is kvaware and whose tokens are scripted."""

    def __init__(self, **rules: object) -> None:
        self.world = World(Rules(strategy="kvaware", **rules))  # type: ignore[arg-type]
        self.world.on_engine_requests(answer)
        self.tokens = ScriptedTokens(self.world)
        self.world.services.tokens = self.tokens

    def send(self, raw: bytes = CHAT) -> Client:
        client = self.world.client()
        client.send(raw)
        self.world.run(0.05)
        return client

    @property
    def placed(self) -> list[RoutingRequest]:
        return [choice.request for choice, _ in self.world.strategy.outcomes]

    @property
    def received(self) -> int:
        return sum(len(engine.received) for engine in self.world.engines.values())


def ended(metrics: Metrics) -> list[str]:
    return [f"{who}@{phase}" for (who, phase), count in metrics.ended.items() for _ in range(count)]


def test_ids_that_are_there_at_once_are_placed_by() -> None:
    waiting = Waiting()
    waiting.tokens.at_once = IDS
    client = waiting.send()
    assert client.reader.responses[0].status == 200
    assert waiting.tokens.asked == [("m", "/v1/chat/completions", BODY)]
    (placed,) = waiting.placed
    assert (placed.ids, placed.salt, placed.prompt_tokens) == (IDS.ids, "s", 3)
    waiting.world.check()


def test_nothing_is_sent_before_the_ids_are_there() -> None:
    waiting = Waiting()
    client = waiting.send()
    assert (waiting.received, len(waiting.tokens.open)) == (0, 1)
    assert waiting.world.admission.depth == 0  # it waits for nobody's place
    waiting.tokens.answer(IDS)
    waiting.world.run(0.05)
    assert client.reader.responses[0].status == 200
    assert waiting.placed[0].ids == IDS.ids
    waiting.world.check()


@pytest.mark.parametrize("late", [False, True])
def test_without_ids_it_is_placed_by_what_else_is_known(late: bool) -> None:
    waiting = Waiting()
    client = waiting.send()
    if not late:
        waiting.tokens.answer(NoTokens(Why.ENGINE))
    waiting.world.run(1.1)
    assert client.reader.responses[0].status == 200
    assert waiting.placed[0].ids is None
    waiting.world.check()


def test_a_client_that_leaves_withdraws_its_question() -> None:
    waiting = Waiting()
    client = waiting.send()
    client.close()
    waiting.world.run(0.05)
    assert (waiting.tokens.open, waiting.received) == ([], 0)
    assert ended(waiting.world.metrics) == ["client@queued"]
    assert not waiting.world.services.exchanges
    waiting.world.check()


def test_the_end_of_the_gateway_withdraws_questions() -> None:
    waiting = Waiting()
    waiting.send()
    for exchange in list(waiting.world.services.exchanges):
        exchange.on_shutdown()
    waiting.world.run(0.05)
    assert (waiting.tokens.open, waiting.received) == ([], 0)
    assert not waiting.world.services.exchanges


def test_longer_than_the_queue_s_time_nobody_waits() -> None:
    waiting = Waiting(queue_timeout_s=0.5)
    client = waiting.send()
    waiting.world.run(0.6)
    assert (client.reader.responses[0].status, waiting.tokens.open) == (429, [])
    waiting.world.check()


def test_who_cannot_use_ids_does_not_wait() -> None:
    waiting = Waiting()
    waiting.world.strategy.patience_s = 0.0
    assert waiting.send().reader.responses[0].status == 200
    assert waiting.send(request(b"GET", b"/v1/models", JSON)).reader.responses[0].status == 200
    assert waiting.tokens.asked == []


def test_a_repeat_keeps_the_ids() -> None:
    waiting = Waiting()
    waiting.tokens.at_once = IDS
    for engine in list(waiting.world.engines.values())[:1]:
        engine.accepts = "refuse"
    clients = [waiting.send() for _ in range(3)]
    assert [client.reader.responses[0].status for client in clients] == [200] * 3
    assert all(placed.ids == IDS.ids for placed in waiting.placed)
    assert len(waiting.tokens.asked) == 3
    waiting.world.check()
