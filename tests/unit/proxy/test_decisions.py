"""router/proxy/decisions.py: what was chosen lately stays bounded, and keeps nothing of the request alive."""

from router.backends.backend import Backend
from router.proxy.decisions import KEPT, Decisions
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
