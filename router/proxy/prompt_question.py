"""What is asked of a prompt before it is placed: its token ids, then what a store that engines share has of it."""

from __future__ import annotations

from collections.abc import Callable

from router.backends.registry import Pool
from router.l2.answers import L2Answer, Lookup
from router.proxy.services import Services
from router.strategies.kv_aware import adapter_name
from router.strategies.strategy import RoutingRequest
from router.tokens.answers import Answer, NoTokens
from router.tokens.tokens import Question


class PromptQuestion:
    """Fills a routing request with what comes back. `done` is called on the loop, once, at the deadline at the latest,
    unless `ask` said that all was there, or it was cancelled."""

    __slots__ = ("_deadline", "_done", "_lookup", "_pool", "_question", "_request", "_services", "without_ids")

    def __init__(self, services: Services, pool: Pool, request: RoutingRequest, done: Callable[[], None]) -> None:
        self._services = services
        self._pool = pool
        self._request = request
        self._done = done
        self._deadline = 0.0
        self._question: Question | None = None
        self._lookup: Lookup | None = None
        self.without_ids: NoTokens | None = None  # why there are none

    def ask(self, path: str, body: bytes, deadline: float) -> bool:
        """Whether there is something to wait for. `deadline`: an instant of the clock."""
        tokens = self._services.tokens
        assert tokens is not None
        self._deadline = deadline
        question = tokens.ask(self._pool.model, path, body, deadline, self._on_tokens)
        if question.answer is None:
            self._question = question
            return True
        return self._take(question.answer)

    def cancel(self) -> None:
        if self._question is not None:
            self._question.cancel()
            self._question = None
        if self._lookup is not None:
            self._lookup.cancel()
            self._lookup = None

    def _on_tokens(self, answer: Answer) -> None:
        self._question = None
        if not self._take(answer):
            self._done()

    def _take(self, answer: Answer) -> bool:
        """The ids, and whether the store is asked about them."""
        if isinstance(answer, NoTokens):
            self.without_ids = answer
            return False
        self._request.take_ids(answer.ids, answer.salt)
        store = self._services.l2
        members = self._pool.members
        if store is None or not members:
            return False
        adapter = adapter_name(members[0], self._pool.model)
        lookup = store.ask(self._pool.model, answer.ids, answer.salt, adapter, self._deadline, self._on_store)
        if lookup.answer is None:
            self._lookup = lookup
            return True
        self._request.shared_tokens = lookup.answer.tokens
        return False

    def _on_store(self, answer: L2Answer) -> None:
        self._lookup = None
        self._request.shared_tokens = answer.tokens
        self._done()
