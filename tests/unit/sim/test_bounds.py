"""Every table of the simulated engine has a bound, and keeps it."""

from __future__ import annotations

from typing import Any

import pytest

from router.clock import VirtualClock
from router.sim import adapters, observations
from router.sim.adapters import Adapters
from router.sim.calls import ApiError
from router.sim.http_protocol import Exchange
from router.sim.observations import Observations
from router.sim.tokenizer import TokenTexts


class Unconnected:
    """A protocol that keeps what is written."""

    writable = True

    def __init__(self) -> None:
        self.written = b""

    def date(self) -> str:
        return "DATE"

    def write(self, data: bytes) -> None:
        self.written += data

    def exchange_ended(self, exchange: Exchange) -> None:
        pass


def exchange(request_id: str = "") -> tuple[Exchange, Unconnected]:
    protocol = Unconnected()
    headers = {"x-request-id": request_id} if request_id else {}
    return Exchange(protocol, "GET", "/x", "", headers), protocol  # type: ignore[arg-type]


def counting(gauges: dict[str, Any] | None = None) -> tuple[Observations, VirtualClock]:
    clock = VirtualClock()
    return Observations(clock, lambda: gauges or {}), clock


def test_token_texts_forget_the_oldest() -> None:
    texts = TokenTexts(limit=3)
    texts.learn(b"aaaabbbbccccdddd")
    assert len(texts) == 3
    texts.learn(b"bbbb")
    texts.learn(b"eeee")
    assert len(texts) == 3


def test_records_forget_the_oldest_id_and_the_latest_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observations, "MAX_RECORDS", 2)
    monkeypatch.setattr(observations, "MAX_TRIES_PER_ID", 2)
    seen, _ = counting()
    for request_id in ("a", "b", "b", "b", "c"):
        seen.note_request(exchange(request_id)[0])
    assert seen.counts.requests == 5
    assert seen.tries("a")["tries"] == []
    assert len(seen.tries("b")["tries"]) == 2


def test_waiters_are_limited_and_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observations, "MAX_WAITERS", 1)
    seen, clock = counting({"name": "text"})
    first, protocol = exchange()
    seen.wait(first, {"aborted": 1}, 5.0)
    with pytest.raises(ValueError, match="more than 1"):
        seen.wait(exchange()[0], {"aborted": 1}, 5.0)
    with pytest.raises(ValueError, match="not a count"):
        seen.wait(exchange()[0], {"name": 1}, 5.0)
    clock.advance(4.9)
    assert protocol.written == b""
    clock.advance(0.2)
    assert protocol.written.startswith(b"HTTP/1.1 408")
    assert protocol.written.endswith(b'{"aborted":0}')


def test_a_waiter_hears_of_its_count_once() -> None:
    seen, clock = counting()
    first, protocol = exchange()
    seen.wait(first, {"aborted": 2}, 5.0)
    for _ in range(3):
        seen.counts.aborted += 1
        seen.changed()
    clock.advance(10.0)
    assert protocol.written.count(b"HTTP/1.1") == 1
    assert protocol.written.endswith(b'{"aborted":2}')


def test_adapters_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "MAX_ADAPTERS", 1)
    names = Adapters(("base",))
    names.load({"lora_name": "a", "lora_path": "/a"})
    with pytest.raises(ApiError, match="No more than 1"):
        names.load({"lora_name": "b", "lora_path": "/b"})
    names.unload({"lora_name": "a"})
    with pytest.raises(ApiError, match="cannot be found"):
        names.unload({"lora_name": "a"})
