"""Random traffic over a random fleet with random faults, all from one seed.

Engines stamp their answers, so a client knows whose answer to which request it reads. See Traffic.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from random import Random

from router.backends.backend import EngineReport, State
from tests.support.scripted import (
    ERROR_EVENT,
    Client,
    Dechunker,
    EngineConnection,
    Received,
    Response,
    Timers,
    chunked,
    request,
    response_head,
)
from tests.support.world import MODEL, HealthSettings, Rules, ScriptedEngine, World

JSON = b"content-type: application/json"
SSE = b"content-type: text/event-stream; charset=utf-8"

FAULTS = {
    "none": 60,
    "stall_before_head": 2,
    "stall_after_head": 2,
    "reset_before_head": 3,
    "close_before_head": 2,
    "reset_after_head": 3,
    "reset_midway": 3,
    "close_midway": 3,
    "stall_midway": 2,
    "drip": 3,
    "busy_429": 3,
    "busy_503": 3,
    "broken_500_alive": 2,
    "broken_500_dead": 1,
    "error_event_first": 3,
    "comments_first": 3,
    "bytes_after_the_end": 3,
    "bad_chunk": 3,
    "two_framings": 2,
    "bad_head": 2,
    "interim_head": 3,
    "die": 1,
    "close_when_idle": 6,
    "connection_close": 3,
    "huge": 3,
}
BAD_HEADS = (
    b"HTTP/1.1 200 OK\r\nx: 1\n\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nx: a\r\n folded: b\r\n\r\n",
    b"HTTP/3.7 200 OK\r\n\r\n",
    b"no http at all\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nx: \x01\r\n\r\n",
)


@dataclass
class Answer:
    """What one engine set out to answer to one request."""

    stamp: str
    test_id: bytes
    payload: bytes
    finished: bool = False  # its last byte, properly framed, left the engine
    forbidden: bool = False  # broken so that no byte of it may reach a client


class Traffic:
    """`run` plays the schedule and then waits until everybody has gone."""

    def __init__(self, seed: int, strategy: str, *, hold_batch_tokens: int = 0) -> None:
        self.rng = rng = Random(seed)
        rules = Rules(
            strategy=strategy,
            hold_batch_tokens=hold_batch_tokens,
            max_in_flight=rng.choice((0, 0, 6, 15)),
            max_in_flight_per_backend=rng.choice((0, 0, 2, 5)),
            max_queue=rng.choice((3, 20, 200)),
            retry_attempts=rng.choice((0, 1, 2, 2, 2)),
            retry_budget=rng.choice((0.0, 0.2, 1.0, 1.0)),
            health=HealthSettings(),
        )
        self.world = World(rules, backends=rng.choice((1, 2, 4, 5)), seed=seed, chop=True)
        self.world.connect_gap_s = rng.choice((0.0, 0.002))
        for engine in self.world.engines.values():
            engine.handler = self._handler(engine)
        self.answers: dict[str, Answer] = {}
        self.faults: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.whole_answers = 0
        self.failures_in_a_row: Counter[str] = Counter()
        self._serial = 0
        self._added = 0

    def run(self, exchanges: int) -> None:
        end = self._schedule(exchanges)
        self.world.run(end + 1.0)
        self.world.clock.call_later(0.0, self._heal)
        self.world.run(40.0)
        self._rest()

    def run_into_a_drain(self, exchanges: int, drain_s: float) -> None:
        """In mid-traffic the gateway drains, as app.py does it, and ends what is open after `drain_s`."""
        world = self.world
        world.run(self._schedule(exchanges) / 2)
        world.services.draining = True
        begun = world.begun
        for connection in list(world.connections):
            connection.drain()
        world.run(drain_s)
        assert world.begun - begun <= len(world.clients), "at most what a connection had begun to send"
        while world.services.exchanges:
            next(iter(world.services.exchanges)).on_shutdown()
        world.check()
        self._rest()

    def _schedule(self, exchanges: int) -> float:
        """Clients, faults and health checks for all of the run. Returns the time of the last of them but the checks."""
        world, rng = self.world, self.rng
        start = at = 0.0
        planned = 0
        while planned < exchanges:
            at += rng.expovariate(12.0)
            count = rng.choice((1, 1, 1, 2, 3, 5))
            planned += count
            world.clock.call_later(at, self._open_client, count)
        end = at + 10.0
        while start < end:
            start += rng.expovariate(0.5)
            world.clock.call_later(start, self._change_the_fleet)
        for second in range(int(end) + 30):
            world.clock.call_later(float(second), self._probe)
        return end

    def _rest(self) -> None:
        self.world.rest(90.0)
        for client in self.world.clients:
            assert isinstance(client, RandomClient)
            client.verify()
            self.statuses.update(response.status for response in client.responses)

    # -- engines ------------------------------------------------------------------------------------------------------

    def _handler(self, engine: ScriptedEngine):  # type: ignore[no-untyped-def]
        return lambda connection, received: self._answer(engine, connection, received)

    def _answer(self, engine: ScriptedEngine, connection: EngineConnection, received: Received) -> None:
        rng = self.rng
        self._serial += 1
        stamp = f"{engine.name}-{self._serial}"
        test_id = received.header(b"x-test-id")
        assert test_id is not None
        fault = rng.choices(list(FAULTS), weights=list(FAULTS.values()))[0]
        stream = b'"stream":true' in received.body
        if fault in ("error_event_first", "comments_first", "bad_chunk") and not stream:
            fault = "none"
        self.faults[fault] += 1
        script = _Script(self, connection, Answer(stamp, test_id, b""))
        self.answers[stamp] = script.answer
        script.play(engine, received, fault, stream)

    # -- the fleet ----------------------------------------------------------------------------------------------------

    def _change_the_fleet(self) -> None:
        world, rng = self.world, self.rng
        kept = [b for b in world.registry.backends if not b.deleted]
        backend = rng.choice(kept)
        engine = world.engines[backend.name]
        change = rng.choice(("drain", "undrain", "undrain", "refuse", "blackhole", "reset", "up", "up", "die", "swap"))
        if change == "drain" and sum(b.serving for b in kept) > 1:
            world.registry.drain(backend.name)
        elif change == "undrain":
            for b in kept:
                world.registry.undrain(b.name)
        elif change in ("refuse", "blackhole", "reset", "up"):
            if engine.alive:
                engine.accepts = change
                world.clock.call_later(rng.uniform(0.1, 4.0), self._accept_again, engine)
        elif change == "die":
            self.die(engine)
        elif change == "swap":
            self._added += 1
            name = f"n{self._added}"
            world.add_backend(name, weight=rng.choice((0.5, 1.0, 2.0)))
            world.engines[name].handler = self._handler(world.engines[name])
            world.registry.remove(backend.name)

    def _accept_again(self, engine: ScriptedEngine) -> None:
        if engine.alive:
            engine.accepts = "up"

    def die(self, engine: ScriptedEngine) -> None:
        if engine.alive:
            engine.die()
            self.world.clock.call_later(self.rng.uniform(0.5, 5.0), self._restart, engine)

    def _restart(self, engine: ScriptedEngine) -> None:
        engine.restart()
        backend = self.world.registry.get(engine.name)
        if backend is not None:  # as health.py does when it sees another process
            self.world.strategy.forget(backend)
            self.world.strategy.joined(backend)

    def _probe(self) -> None:
        """As health.py: three failures in a row take a backend out, a success ends that."""
        world = self.world
        for backend in world.registry.backends:
            engine = world.engines[backend.name]
            if engine.alive:
                self.failures_in_a_row[backend.name] = 0
                if backend.state in (State.DOWN, State.STARTING):
                    world.registry.set_state(backend, State.UP, "")
                before = backend.report
                backend.report = EngineReport(
                    at=world.clock.now(),
                    running=float(self.rng.randrange(4)),
                    waiting=float(self.rng.randrange(2)),
                    block_size_tokens=16,
                    num_gpu_blocks=64,
                )
                world.strategy.reported(backend, before, backend.report)
            else:
                self.failures_in_a_row[backend.name] += 1
                if self.failures_in_a_row[backend.name] >= 3 and backend.state is not State.DOWN:
                    world.registry.set_state(backend, State.DOWN, "health checks fail")

    def _heal(self) -> None:
        for backend in self.world.registry.backends:
            if not backend.deleted:
                self.world.registry.undrain(backend.name)
        for engine in self.world.engines.values():
            if engine.alive:
                engine.accepts = "up"

    # -- clients ------------------------------------------------------------------------------------------------------

    def _open_client(self, count: int) -> None:
        if self.world.services.draining:
            return  # nobody listens any more
        client = RandomClient(self, count)
        self.world.add_client(client)
        client.begin()


class _Script:
    """One answer on its way from one engine."""

    def __init__(self, traffic: Traffic, connection: EngineConnection, answer: Answer) -> None:
        self.traffic = traffic
        self.connection = connection
        self.answer = answer
        self.timers = Timers(traffic.world.clock)
        connection.on_lost = self.timers.cancel

    def play(self, engine: ScriptedEngine, received: Received, fault: str, stream: bool) -> None:
        rng, answer = self.traffic.rng, self.answer
        stamp_line = b"x-stamp: " + answer.stamp.encode()
        delay = rng.choice((0.0, 0.01, 0.2, 0.8))
        if fault == "stall_before_head":
            return
        if fault in ("reset_before_head", "close_before_head"):
            action = self.connection.reset if fault.startswith("reset") else self.connection.close
            self.timers.later(delay, action)
            return
        if fault == "die":
            self.timers.later(delay, self.traffic.die, engine)
            return
        if fault == "bad_head":
            answer.forbidden = True
            self._later(delay, rng.choice(BAD_HEADS))
            return
        if fault == "two_framings":
            answer.forbidden = True
            self._later(delay, response_head(200, stamp_line, b"content-length: 3", b"transfer-encoding: chunked"))
            self._later(delay, b"3\r\nabc\r\n0\r\n\r\n")
            return
        status = {"busy_429": 429, "busy_503": 503, "broken_500_alive": 500, "broken_500_dead": 500}.get(fault, 200)
        if status != 200:
            stream = False
        head: list[bytes] = [stamp_line]
        if stream:
            pieces = self._events(fault)
            head.append(SSE)
        else:
            size = 300_000 if fault == "huge" else rng.choice((0, 10, 3000))
            usage = {"prompt_tokens": 20, "prompt_tokens_details": {"cached_tokens": rng.choice((0, 16, 20, 999))}}
            body = json.dumps({"id": answer.stamp, "text": "x" * size, "usage": usage}).encode()
            pieces = [body[at : at + 7000] for at in range(0, len(body), 7000)]
            head.append(JSON)
        answer.payload = b"".join(pieces)
        ending = "stay"
        framing = rng.choice(("chunked", "chunked", "length", "until_close"))
        if stream:
            framing = rng.choice(("chunked", "chunked", "chunked", "until_close"))
        if fault in ("bad_chunk", "drip"):
            framing = "chunked"
        if received.method == b"HEAD":
            head.append(b"content-length: %d" % len(answer.payload))
            pieces, answer.payload = [], b""
        elif not stream and status == 200 and fault == "none" and rng.random() < 0.05:
            status, pieces, answer.payload = 204, [], b""
            head.remove(JSON)
        elif framing == "chunked":
            head.append(b"transfer-encoding: chunked")
            pieces = [chunked([piece], last=False) for piece in pieces] + [b"0\r\n\r\n"]
        elif framing == "length":
            head.append(b"content-length: %d" % len(answer.payload))
        else:
            ending = "close"
        if fault == "connection_close":
            head.append(b"connection: close")
            ending = "close"
        raw_head = response_head(status, *head)
        if fault == "interim_head":
            raw_head = rng.choice((b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early\r\nx: 1\r\n\r\n")) + raw_head
        if fault == "bad_chunk":
            cut = rng.randrange(len(pieces))
            bad = rng.choice((b"zz\r\n", b"-1\r\n", b"1 \r\na\r\n", b"1\r\nab\r\n", b"\r\n", b"1\na\r\n"))
            before = Dechunker()
            before.feed(b"".join(pieces[:cut]))
            # a chunk longer than its size is broken behind its first byte, which is a byte of the answer
            answer.payload = bytes(before.payload) + (b"a" if bad.startswith(b"1\r\n") else b"")
            pieces = [*pieces[:cut], bad]
            ending = "broken"
        elif fault == "stall_after_head":
            pieces, ending = [], "stall"
        elif fault == "reset_after_head":
            pieces, ending = [], "reset"
        elif fault in ("reset_midway", "stall_midway", "close_midway"):
            body = b"".join(pieces)
            body = body[: rng.randrange(max(len(body), 1))]
            pieces = [body[at : at + 50] for at in range(0, len(body), 50)][:20]
            ending = fault.partition("_")[0]
            if ending == "close" and (framing == "until_close" or received.method == b"HEAD"):
                ending = "reset"  # else nobody could tell that it was not the end
        elif fault == "drip":
            body = b"".join(pieces)
            pieces = [body[at : at + 1] for at in range(len(body))] if len(body) < 1000 else [body]
        bodiless = received.method == b"HEAD" or status == 204
        self._later(delay, raw_head, finishes=bodiless or (not pieces and ending in ("stay", "close")))
        pause = 0.0005 if fault == "drip" else rng.choice((0.0, 0.0, 0.003, 0.02))
        at = delay + rng.choice((0.0, 0.0, 0.05, 0.5))
        for number, piece in enumerate(pieces):
            last = number == len(pieces) - 1
            if last and fault == "bytes_after_the_end":
                piece += b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nx-stamp: intruder\r\n\r\nXXXXX"[
                    : rng.randrange(1, 70)
                ]
                if framing == "until_close":
                    piece = pieces[-1]
            self._later(at, piece, finishes=last and ending in ("stay", "close"))
            at += pause
        if fault == "broken_500_dead":
            self.timers.later(at, self.traffic.die, engine)
        if ending in ("close", "reset"):
            self.timers.later(at, self.connection.close if ending == "close" else self.connection.reset)
        elif fault == "close_when_idle":
            self.timers.later(at + rng.uniform(0.0, 0.01), self._close_if_idle, len(self.connection.received))

    def _close_if_idle(self, answered: int) -> None:
        """A request may be on its way to it, but none has arrived."""
        if len(self.connection.received) == answered:
            self.connection.close()

    def _events(self, fault: str) -> list[bytes]:
        rng, stamp = self.traffic.rng, self.answer.stamp
        pieces = []
        if fault == "comments_first":
            pieces.extend([b": ping\n\n"] * rng.randrange(1, 4))
        if fault == "error_event_first":
            pieces.append(b'data: {"error": {"message": "%b"}}\n\n' % stamp.encode())
        else:
            count = 400 if fault == "huge" else rng.randrange(1, 12)
            text = "y" * (1000 if fault == "huge" else 20)
            for number in range(count):
                event = {"id": stamp, "n": number, "text": text}
                pieces.append(b"data: " + json.dumps(event).encode() + b"\n\n")
        pieces.append(b"data: [DONE]\n\n")
        return pieces

    def _later(self, delay_s: float, data: bytes, *, finishes: bool = False) -> None:
        self.timers.later(delay_s, self._write, data, finishes)

    def _write(self, data: bytes, finishes: bool) -> None:
        self.connection.write(data)
        self.answer.finished |= finishes


class RandomClient(Client):
    """Sends `count` requests on one connection, in one of many manners, and judges each answer as it comes."""

    def __init__(self, traffic: Traffic, count: int) -> None:
        super().__init__()
        self.traffic = traffic
        self.number = len(traffic.world.clients)
        self.test_ids: list[bytes] = []
        self.timers = Timers(traffic.world.clock)
        self.on_data = self._judge
        self._left_to_send = count
        self._waiting_for = 0
        self.left = False
        self.protocol_error = False
        self._unsent: list[bytes] = []

    def begin(self) -> None:
        rng = self.traffic.rng
        manner = rng.random()
        if rng.random() < 0.3:
            while self._left_to_send:
                self._send_one()
        else:
            self._send_one()
        if rng.random() < 0.25:
            leave = rng.choice((self.abort, self.close, self.half_close))
            self.timers.later(rng.choice((0.001, 0.02, 0.3, 1.0, 3.0)) * rng.random(), self._leave, leave)
        assert self.transport is not None
        if manner < 0.06:
            self.transport.pause_reading()  # for ever
        elif manner < 0.2:
            self._read_slowly()
        self.timers.later(25.0, self._leave, self.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self.timers.cancel()
        super().connection_lost(exc)

    def _leave(self, how) -> None:  # type: ignore[no-untyped-def]
        if not self.lost:
            self.left = True
            how()
            self.timers.later(1.0, self._make_sure)

    def _make_sure(self) -> None:
        if not self.lost:
            self.abort()

    def _read_slowly(self) -> None:
        assert self.transport is not None
        if self.lost:
            return
        if self.transport.is_reading():
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()
        self.timers.later(self.traffic.rng.uniform(0.01, 0.8), self._read_slowly)

    def _send_one(self) -> None:
        rng = self.traffic.rng
        self._left_to_send -= 1
        raw = self._make_request()
        while rng.random() < 0.3 and len(raw) > 1:
            cut = rng.randrange(1, len(raw))
            self._unsent.append(raw[:cut])
            raw = raw[cut:]
        self._unsent.append(raw)
        self._push_next()

    def _push_next(self) -> None:
        """Pieces go out in order with pauses between."""
        if self.lost or not self._unsent or self.left:
            return
        self.push(self._unsent.pop(0))
        if self._unsent:
            self.timers.later(self.traffic.rng.choice((0.0, 0.001, 0.1)), self._push_next)

    def _make_request(self) -> bytes:
        rng = self.traffic.rng
        test_id = b"t%d-%d" % (self.number, len(self.test_ids))
        self.test_ids.append(test_id)
        lines = [b"x-test-id: " + test_id, b"content-type: application/json"]
        if rng.random() < 0.4:
            lines.append(b"x-session-id: s%d" % rng.randrange(6))
        version = b"HTTP/1.0" if rng.random() < 0.05 else b"HTTP/1.1"
        if rng.random() < 0.05:
            lines.append(b"connection: close")
        kind = rng.choices(
            ("stream", "plain", "get", "head", "change", "local", "unknown_model", "odd_body", "bad_head"),
            weights=(40, 30, 6, 3, 5, 4, 2, 3, 2),
        )[0]
        if kind == "bad_head":
            self.methods.append(b"GET")
            return request(b"GET", b"/x", *lines, b"bad name: x")
        if kind in ("get", "head", "local"):
            method = b"HEAD" if kind == "head" else b"GET"
            self.methods.append(method)
            return request(method, b"/health" if kind == "local" else b"/v1/other", *lines, version=version)
        self.methods.append(b"POST")
        if kind == "change":
            return request(b"POST", b"/unknown", *lines, body=b"{}", version=version)
        if kind == "odd_body":
            return request(b"POST", b"/v1/chat/completions", *lines, body=b"{odd", version=version)
        group = rng.randrange(5)
        text = f"system {group} " * 40 + "word " * rng.randrange(200)
        body: dict[str, object] = {
            "model": "nobody" if kind == "unknown_model" else MODEL,
            "messages": [{"role": "user", "content": text}],
        }
        if kind == "stream":
            body["stream"] = True
        raw = json.dumps(body, separators=(",", ":")).encode()
        if rng.random() < 0.05:
            raw = raw[:-1] + b',"pad":"' + b"p" * 150_000 + b'"}'
        if version == b"HTTP/1.1" and rng.random() < 0.2:
            middle = rng.randrange(len(raw) + 1)
            return request(b"POST", b"/v1/chat/completions", *lines, chunks=[raw[:middle], raw[middle:]])
        if version == b"HTTP/1.1" and rng.random() < 0.05:
            lines.append(b"expect: 100-continue")
        return request(b"POST", b"/v1/chat/completions", *lines, body=raw, version=version)

    # -- judging ------------------------------------------------------------------------------------------------------

    def _judge(self) -> None:
        responses = self.responses
        for number in range(self._waiting_for, len(responses)):
            self._judge_one(number, responses[number])
        while self._waiting_for < len(responses) and responses[self._waiting_for].complete:
            self._waiting_for += 1
            if self._left_to_send and self._waiting_for == len(self.test_ids):
                self.timers.later(self.traffic.rng.choice((0.0, 0.005, 0.5)), self._go_on)

    def _go_on(self) -> None:
        if not self.lost and not self.left and self._left_to_send:
            self._send_one()

    def _judge_one(self, number: int, response: Response) -> None:
        stamp = response.header(b"x-stamp")
        if stamp is None:
            if response.complete and self.methods[number] != b"HEAD":
                body = response.json()
                assert response.ours is ("error" in body or response.status == 503)
            return
        answer = self.traffic.answers[stamp.decode()]
        assert answer.test_id == self.test_ids[number], "an answer to another request"
        assert not answer.forbidden
        backend = response.header(b"x-kvgate-backend")
        assert backend is not None
        assert stamp.startswith(backend + b"-")
        payload, sent = response.payload, answer.payload
        if payload == sent[: len(payload)]:
            if response.complete:
                assert answer.finished, "half an answer was passed on as a whole one"
                assert payload == sent
            return
        common = next(
            (at for at, (a, b) in enumerate(zip(payload, sent, strict=False)) if a != b), min(len(payload), len(sent))
        )
        tails = [payload[at:] for at in range(max(common - len(ERROR_EVENT), 0), common + 1)]
        cut = any(tail.startswith(ERROR_EVENT) or ERROR_EVENT.startswith(tail) for tail in tails)
        assert cut, "bytes that this engine never sent"
        assert response.header(b"content-type") == SSE.partition(b": ")[2]
        assert not response.complete or b"transfer-encoding" not in response.headers

    def verify(self) -> None:
        """After the end."""
        assert self.lost
        for number, response in enumerate(self.responses):
            self._judge_one(number, response)
            if response.complete and response.header(b"x-stamp") is not None and not response.cut:
                self.traffic.whole_answers += 1
