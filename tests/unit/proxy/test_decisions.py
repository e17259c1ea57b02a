"""router/proxy/decisions.py: what was chosen lately stays bounded, and keeps nothing of the request alive."""

import json
import re
import time

import pytest

from router.backends.backend import Backend
from router.proxy.decisions import KEPT, DecisionLines, Decisions
from router.strategies.strategy import Choice, Reason, RoutingRequest


def choice(**figures: int) -> Choice:
    backend = Backend("gpu-0", "http://a:1", "a", 1)
    return Choice(RoutingRequest("llama", 0.0), backend, Reason.PREFIX, **figures)


def test_a_decision_tells_what_was_known_at_the_choice():
    decisions = Decisions()
    decisions.add(b"id", 2, 3, 0.5, choice(matched_tokens=64, prompt_tokens=100))
    (only,) = decisions.recent()
    told = (only.request_id, only.attempt, only.load, only.took_s, only.model, only.backend, only.url, only.reason)
    assert told == (b"id", 2, 3, 0.5, "llama", "gpu-0", "http://a:1", "prefix")
    assert (only.matched_tokens, only.prompt_tokens) == (64, 100)


def test_the_oldest_go_first_at_the_bound():
    decisions = Decisions()
    for n in range(KEPT + 3):
        decisions.add(b"%d" % n, 1, 0, 0.0, choice())
    assert [d.request_id for d in decisions.recent()] == [b"%d" % n for n in range(3, KEPT + 3)]


def written(
    *, session_key: bytes | None = None, request_id: bytes = b"r-1", model: str = "llama", **how: bool
) -> bytes:
    lines: list[bytes] = []
    decisions = Decisions()
    decisions.lines = DecisionLines(lines.append, "prefixaware", **how)
    backend = Backend("gpu-0", "http://10.0.0.7:8000", "10.0.0.7", 8000)
    request = RoutingRequest(model, 0.0, session_key=session_key)
    decisions.add(request_id, 2, 3, 0.0123456, Choice(request, backend, Reason.PREFIX, matched_tokens=64))
    (line,) = lines
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    return line[:-1]


def test_a_line_in_text_has_every_figure():
    stamp, kind, *fields = written(json_lines=False, production_stack=False).decode().split(" ")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", stamp)
    assert kind == "decision"
    assert dict(field.split("=") for field in fields) == {
        "id": "r-1",
        "attempt": "2",
        "strategy": "prefixaware",
        "reason": "prefix",
        "backend": "gpu-0",
        "model": "llama",
        "matched": "64",
        "prompt_tokens": "0",
        "load": "3",
        "took_s": "0.012345",
    }


def test_a_line_in_json_has_the_same():
    told = json.loads(written(json_lines=True, production_stack=False))
    assert abs(told.pop("time") - time.time()) < 3600
    assert told == {
        "kind": "decision",
        "id": "r-1",
        "attempt": 2,
        "strategy": "prefixaware",
        "reason": "prefix",
        "backend": "gpu-0",
        "model": "llama",
        "matched": 64,
        "prompt_tokens": 0,
        "load": 3,
        "took_s": 0.012346,
    }


MESSAGE = re.compile(r"Routing request (\S+) with session id (\S+) to (\S+) at (\d+\.\d+), process time = (\d+\.\d{4})")
PREFIX = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}\] INFO: ")


@pytest.mark.parametrize("key", [None, b"alice"])
def test_production_stack_s_line_is_theirs_to_the_space(key):
    line = written(session_key=key, json_lines=False, production_stack=True).decode()
    prefix = PREFIX.match(line)
    assert prefix is not None
    found = MESSAGE.fullmatch(line[prefix.end() :])
    assert found is not None
    assert found.groups()[:3] == ("r-1", "alice" if key else "None", "http://10.0.0.7:8000")
    assert abs(float(found[4]) - time.time()) < 3600
    assert found[5] == "0.0123"


def test_production_stack_s_line_is_the_message_in_json():
    told = json.loads(written(session_key=b"alice", json_lines=True, production_stack=True))
    assert told["kind"] == "decision"
    assert MESSAGE.fullmatch(told["message"])


@pytest.mark.parametrize("text", [b"a\nRouting request x", b"a b", b"\x1b[2J", b"\xff", b"k" * 5000, b'"} {'])
@pytest.mark.parametrize(
    ("json_lines", "production_stack"), [(False, False), (True, False), (False, True), (True, True)]
)
def test_no_client_breaks_a_line_or_makes_it_long(text, json_lines, production_stack):
    line = written(session_key=text, request_id=text, json_lines=json_lines, production_stack=production_stack)
    assert len(line) < 700
    assert line.decode().isprintable()
    if json_lines:
        json.loads(line)
    elif production_stack:
        assert MESSAGE.fullmatch(line.decode().partition("INFO: ")[2])
    else:
        assert line.count(b" ") == 11


@pytest.mark.parametrize("model", ["a b=c", "a\nb", "\ud800", "模型"])
def test_no_engine_breaks_a_line_by_the_name_of_its_model(model):
    line = written(model=model, json_lines=False, production_stack=False)
    assert line.count(b" ") == 11
    assert line.decode().isprintable()


def test_without_lines_nothing_is_written():
    decisions = Decisions()
    assert decisions.lines is None
    decisions.add(b"id", 1, 0, 0.0, choice())
    assert len(decisions.recent()) == 1
