"""The access log: one line an exchange, whatever a client puts into it; and its reader may be slow or gone."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from threading import Thread

import pytest

from router.clock import VirtualClock
from router.metrics import Metrics
from router.proxy.access_log import BATCH_S, PENDING_LIMIT_BYTES, AccessLine, AccessLog

LINE = AccessLine(
    client=b"10.0.0.1",
    method=b"POST",
    path=b"/v1/chat/completions",
    status=200,
    ended="upstream@done",
    model="m",
    backend="e0",
    reason="prefix",
    matched=128,
    load=3,
    attempts=1,
    queue_s=0.0,
    ttft_s=0.25,
    total_s=1.5,
    bytes_out=999,
    id=b"abc",
    key="team-a",
)
UNSERVED = replace(
    LINE, status=499, ended="client@queued", backend="", reason="", matched=None, ttft_s=None, model="", key=""
)


def written(*lines: AccessLine, json_lines: bool) -> list[bytes]:
    reading, writing = os.pipe()
    log = AccessLog(Metrics(), VirtualClock(), writing, json_lines)
    for line in lines:
        log.write(line)
    log.close()
    os.close(writing)
    with os.fdopen(reading, "rb") as out:
        return out.read().splitlines()


def test_a_text_line_tells_who_ended_what_where() -> None:
    (line,) = written(LINE, json_lines=False)
    words = line.decode().split(" ")
    assert words[1] == "access"
    fields = dict(word.split("=", 1) for word in words[2:])
    assert fields["ended"] == "upstream@done"
    assert (fields["status"], fields["backend"], fields["reason"], fields["matched"]) == ("200", "e0", "prefix", "128")
    assert (fields["load"], fields["attempts"], fields["ttft_s"], fields["id"]) == ("3", "1", "0.2500", "abc")
    assert fields["key"] == "team-a"


def test_a_json_line_tells_the_same() -> None:
    (line,) = written(LINE, json_lines=True)
    fields = json.loads(line)
    assert fields["kind"] == "access"
    for name, value in asdict(LINE).items():
        assert fields[name] == (value.decode() if isinstance(value, bytes) else value)


@pytest.mark.parametrize("json_lines", [False, True])
def test_what_is_not_known_is_left_out(json_lines: bool) -> None:
    (line,) = written(UNSERVED, json_lines=json_lines)
    assert b"client@queued" in line
    for name in (b"backend", b"reason", b"matched", b"ttft_s", b"model", b"key"):
        assert name not in line


@pytest.mark.parametrize("json_lines", [False, True])
@pytest.mark.parametrize("text", [b"/a\nstatus=200", b"/a b=c", b"/\x1b[2J", b"/\xff\xfe", b"/" + b"x" * 70_000])
def test_no_client_breaks_a_line_adds_a_field_or_makes_it_long(text: bytes, json_lines: bool) -> None:
    (line,) = written(replace(LINE, path=text, id=text), json_lines=json_lines)
    assert len(line) < 1000
    assert line.decode().isprintable()
    if not json_lines:
        assert line.count(b"=") == written(LINE, json_lines=False)[0].count(b"=") + 2 * text.count(b"=")
        assert line.count(b" ") == written(LINE, json_lines=False)[0].count(b" ")


def test_no_engine_breaks_a_line_by_the_name_of_its_model() -> None:
    (line,) = written(replace(LINE, model="m\nstatus=500 x"), json_lines=False)
    assert b"model=m?status=500?x " in line


def test_lines_come_in_order_and_none_is_lost_at_the_end() -> None:
    lines = [replace(LINE, load=number) for number in range(500)]
    assert [json.loads(line)["load"] for line in written(*lines, json_lines=True)] == list(range(500))


def test_lines_over_the_bound_are_dropped_and_counted() -> None:
    metrics, clock = Metrics(), VirtualClock()
    reading, writing = os.pipe()  # that nobody reads: it takes 64 KiB, the writer holds what follows
    log = AccessLog(metrics, clock, writing, True)
    long = replace(LINE, path=b"/" + b"x" * 255)
    batches = 0
    while not metrics.access_lines_dropped:
        for _ in range(1000):
            log.write(long)
        clock.advance(BATCH_S)
        batches += 1
        assert batches * 1000 * 300 < 2 * PENDING_LIMIT_BYTES
    assert metrics.access_lines_dropped == 1000
    assert clock.pending == 0
    drained = 0
    closing = Thread(target=log.close, args=(30.0,))
    closing.start()
    ending = Thread(target=lambda: (closing.join(), os.close(writing)))
    ending.start()
    while chunk := os.read(reading, 1 << 20):
        drained += chunk.count(b"\n")
    ending.join()
    assert drained == batches * 1000 - 1000
    os.close(reading)


def test_lines_are_written_in_batches_by_the_clock() -> None:
    clock = VirtualClock()
    reading, writing = os.pipe()
    log = AccessLog(Metrics(), clock, writing, True)
    log.write(LINE)
    log.write(LINE)
    assert clock.pending == 1
    clock.advance(BATCH_S)
    assert os.read(reading, 1 << 16).count(b"\n") == 2  # waits for the writer, and for nothing else
    assert clock.pending == 0
    log.close()
    os.close(writing)
    os.close(reading)


def test_a_reader_that_is_gone_costs_lines_and_nothing_else() -> None:
    metrics = Metrics()
    reading, writing = os.pipe()
    os.close(reading)
    log = AccessLog(metrics, VirtualClock(), writing, True)
    log.write(LINE)
    log.close()
    assert metrics.access_lines_dropped == 1
    os.close(writing)


def test_lines_of_another_kind_keep_their_place_among_the_others() -> None:
    reading, writing = os.pipe()
    log = AccessLog(Metrics(), VirtualClock(), writing, True)
    log.write(LINE)
    log.append(b"another\n")
    log.json_lines = False  # a reload
    log.write(LINE)
    log.close()
    os.close(writing)
    with os.fdopen(reading, "rb") as out:
        first, second, third = out.read().splitlines()
    assert json.loads(first)["kind"] == "access"
    assert second == b"another"
    assert b" access client=" in third


def test_lines_that_nobody_read_are_counted_while_the_log_goes_on() -> None:
    metrics, clock = Metrics(), VirtualClock()
    reading, writing = os.pipe()
    os.close(reading)
    log = AccessLog(metrics, clock, writing, True)
    batches = 0
    while not metrics.access_lines_dropped:  # the thread has its own time, and the next batch counts what it lost
        log.write(LINE)
        clock.advance(BATCH_S)
        batches += 1
        assert batches < 1_000_000
    log.close()
    assert metrics.access_lines_dropped == batches
    os.close(writing)
