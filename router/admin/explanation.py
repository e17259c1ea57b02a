"""POST /explain: where a request would go now, and why. Nothing is sent, counted or changed.

The request is read and its candidates are found by the code of the data port, and the figures come out of the
strategy's own choice (Strategy.explain), so that an explanation cannot differ from what would be done.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from router.backends.backend import Backend
from router.backends.registry import Pool
from router.errors import RouterError, bad_request
from router.proxy.candidates import fit_candidates, why_unfit, worth_waiting
from router.proxy.intake import describe_outage, read_routing
from router.proxy.prompt_question import PromptQuestion
from router.proxy.services import Services
from router.strategies.strategy import Explanation, RoutingRequest, Terms
from router.wire.http_head import RequestHead, parse_request_head
from router.wire.multipart import is_multipart
from router.wire.paths import path_kind

TOKENS_WITHIN_S: Final = 2.0
# Of the request to the admin port, not of the one that is explained.
_NOT_ITS_OWN: Final = frozenset((b"content-length", b"transfer-encoding", b"connection", b"upgrade", b"expect", b"te"))
_PATH: Final = re.compile(r"/[!-~]*")


@dataclass(frozen=True, slots=True)
class Explained:
    """The answer; with `error` where the data port would answer that instead of asking a backend."""

    answer: dict[str, Any]
    error: RouterError | None = None


async def explain(
    services: Services, path: str | None, headers: Iterable[tuple[bytes, bytes]], body: bytes
) -> Explained:
    """Of a POST to `path` on the data port, guessed from the body's type where it is None. RouterError, as on the data
    port, where there is no pool of backends that could be asked."""
    head = _head(path, headers)
    kind = path_kind(head.method, head.path)
    pool, request, as_sent = read_routing(services, head, kind, body, services.now())
    without_ids = await _take_ids(services, head, pool, request, as_sent)
    candidates = fit_candidates(services, pool, ())
    told = services.strategy.explain(request, candidates)
    error = None
    if told.choice is None and not worth_waiting(pool, ()):
        error = describe_outage(services.registry, pool)
    return Explained(_render(services, head, pool, request, candidates, told, without_ids), error)


async def _take_ids(
    services: Services, head: RequestHead, pool: Pool, request: RoutingRequest, body: bytes
) -> str | None:
    """As the data port does before a choice, but with time: nobody waits for a first token here. Why there are none,
    None where there are, or where the strategy does not ask for them."""
    strategy = services.token_strategy
    if strategy is None or services.tokens is None or not strategy.token_patience_s(request, pool.candidates):
        return None
    known = asyncio.Event()
    question = PromptQuestion(services, pool, request, known.set)
    if question.ask(head.path.decode("ascii", "replace"), body, services.now() + TOKENS_WITHIN_S):
        try:
            await known.wait()
        finally:
            question.cancel()
    lacking = question.without_ids
    if lacking is None:
        return None
    return f"{lacking.why.value}: {lacking.detail}" if lacking.detail else lacking.why.value


def _head(path: str | None, headers: Iterable[tuple[bytes, bytes]]) -> RequestHead:
    lines = [(name, value) for name, value in headers if name.lower() not in _NOT_ITS_OWN]
    if path is None:
        form = any(name.lower() == b"content-type" and is_multipart(value) for name, value in lines)
        path = "/v1/audio/transcriptions" if form else "/v1/chat/completions"
    elif not _PATH.fullmatch(path):
        raise bad_request("`path` is a path of the data port, such as /v1/chat/completions.", param="path")
    if not any(name.lower() == b"host" for name, _ in lines):
        lines.append((b"host", b"localhost"))
    raw = b"POST %b HTTP/1.1\r\n" % path.encode()
    return parse_request_head(raw + b"".join(b"%b: %b\r\n" % line for line in lines) + b"\r\n")


def _render(
    services: Services,
    head: RequestHead,
    pool: Pool,
    request: RoutingRequest,
    candidates: Sequence[Backend],
    told: Explanation,
    without_ids: str | None,
) -> dict[str, Any]:
    choice = told.choice
    blocks = request.blocks
    terms_of = {terms.backend: terms for terms in told.candidates}
    chosen = choice.backend if choice is not None else None
    return {
        "model": pool.model,
        "path": head.path.decode("ascii", "replace"),
        "strategy": services.settings.strategy_name,
        "prompt": {
            "readable": request.readable,
            "bytes": request.prefix_bytes,
            "blocks": None if blocks is None else len(blocks),
            "block_bytes": services.settings.block_bytes,
            "tokens": choice.prompt_tokens if choice is not None and choice.prompt_tokens else request.prompt_tokens,
            "tokens_exact": request.prompt_tokens is not None,
            "without_ids": without_ids,
            "shared_tokens": request.shared_tokens,
            "max_tokens": request.max_tokens,
            "stream": request.stream,
        },
        "session_key_present": bool(request.session_key) if services.need_session else None,
        "decided_by": told.decided_by,
        "figures": told.terms,
        "waits": _why_it_waits(services, pool, candidates),
        "choice": None
        if choice is None
        else {"backend": choice.backend.name, "reason": choice.reason.value, "match_tokens": choice.matched_tokens},
        "candidates": [
            _candidate(services, request, backend, terms_of.get(backend), chosen) for backend in pool.members
        ],
    }


def _candidate(
    services: Services, request: RoutingRequest, backend: Backend, terms: Terms | None, chosen: Backend | None
) -> dict[str, Any]:
    """One that may not be chosen is told with its match: what is lost by that."""
    if terms is not None:
        match_blocks, match_tokens = terms.match_blocks, terms.matched_tokens
    else:
        match_blocks, match_tokens = services.strategy.match_of(request, backend)
    return {
        "backend": backend.name,
        "state": "draining" if backend.draining else backend.state,
        "eligible": terms is not None,
        "why_not": "" if terms is not None else why_unfit(services, backend),
        "weight": backend.weight,
        "in_flight": backend.in_flight,
        "load": backend.in_flight / backend.weight,
        "match_blocks": match_blocks,
        "match_tokens": match_tokens,
        "score_s": None if terms is None else terms.score_s,
        "terms": {} if terms is None else terms.terms,
        "chosen": backend is chosen,
    }


def _why_it_waits(services: Services, pool: Pool, candidates: Sequence[Backend]) -> str | None:
    """Why it would wait before the choice, None if it would not. The choice is then that of the present moment."""
    if services.admission.full:
        return "the gateway is at its cap of requests in flight (limits.max_in_flight)"
    waiting = services.admission.queued_by_model().get(pool.model, 0)
    if waiting:
        return f"{waiting} that came before it wait"
    if candidates or not worth_waiting(pool, ()):
        return None
    return "nobody has room" if pool.candidates else "those that could serve it are starting"
