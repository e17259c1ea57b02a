"""The held line in a running gateway: what a busy engine would only queue waits in the gateway."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tests.blackbox.raw_engine import MODEL, RawEngine, raw_engine
from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.sim_process import Connection

CHAT = "/v1/chat/completions"
HELD = {"strategy": "prefixaware", "line": {"hold": "on", "batch_tokens": 64}}
LONG, SHORT = 60_000, 600  # words: a quarter of a minute of prefill as it is assumed, and a moment


@contextmanager
def holding() -> Iterator[tuple[GatewayProcess, RawEngine]]:
    with raw_engine() as engine, running_gateway([engine.url], routing=HELD) as gateway:
        yield gateway, engine


def ask(gateway: GatewayProcess, name: str, words: int) -> Connection:
    text = " ".join(f"{name} {at}" for at in range(words))
    body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": text}], "stream": True}
    return gateway.send("POST", CHAT, body)


def test_what_a_busy_engine_would_queue_waits_here_and_is_answered_shortest_first() -> None:
    with holding() as (gateway, engine), ExitStack() as stack:
        clients = [stack.enter_context(ask(gateway, "first", LONG))]
        first = engine.take()
        for at, words in enumerate((4 * SHORT, 2 * SHORT, SHORT), 1):
            clients.append(stack.enter_context(ask(gateway, f"other-{at}", words)))
            gateway.until_metric("queue_depth", at)
        assert (gateway.metric("held_total"), gateway.metric("in_flight"), engine.waiting()) == (3, 1, 0)
        first.answer()
        lengths = []
        for _ in range(3):
            following = engine.take()
            lengths.append(len(following.body))
            following.answer()
        assert lengths == sorted(lengths)
        assert [client.read().status for client in clients] == [200] * 4
        gateway.until_metric("queue_depth", 0)
        assert gateway.metric("in_flight") == 0


def test_a_client_that_leaves_while_it_is_held_is_forgotten() -> None:
    with holding() as (gateway, engine), ask(gateway, "first", LONG) as client:
        first = engine.take()
        held = ask(gateway, "held", SHORT)
        gateway.until_metric("queue_depth", 1)
        held.socket.close()
        gateway.until_metric("queue_depth", 0)
        first.answer()
        assert client.read().status == 200
        assert gateway.metric("ended_total", ended_by="client", phase="queued") == 1
        assert engine.waiting() == 0


def test_a_reload_without_the_line_releases_all() -> None:
    with holding() as (gateway, engine), ExitStack() as stack:
        clients = [stack.enter_context(ask(gateway, "first", LONG))]
        requests = [engine.take()]
        for at in (1, 2):
            clients.append(stack.enter_context(ask(gateway, f"other-{at}", SHORT)))
            gateway.until_metric("queue_depth", at)
        gateway.write_config([engine.url], routing={"strategy": "prefixaware", "line": {"hold": "off"}})
        gateway.reload()
        requests += [engine.take(), engine.take()]
        for request in requests:
            request.answer()
        assert [client.read().status for client in clients] == [200] * 3


def test_nobody_waits_for_an_engine_that_was_removed() -> None:
    with holding() as (gateway, engine), raw_engine() as other, ExitStack() as stack:
        clients = [stack.enter_context(ask(gateway, "first", LONG))]
        first = engine.take()
        clients.append(stack.enter_context(ask(gateway, "held", SHORT)))
        gateway.until_metric("queue_depth", 1)
        assert gateway.admin("POST", "/backends", {"url": other.url, "name": "other"}).status in (200, 201)
        other.take().answer()  # the newcomer has nothing to do
        first.answer()
        assert [client.read().status for client in clients] == [200] * 2
