"""From a request's bytes to what a strategy may know of it, and to the pool that may serve it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from router.backends.backend import Backend
from router.backends.registry import Pool, Registry
from router.errors import NAMED_MODELS, RouterError, bad_request, model_not_found, no_backend
from router.proxy.services import Services
from router.strategies.strategy import RoutingRequest
from router.wire.http_head import RequestHead
from router.wire.openai_request import RequestBody, read_request, with_model
from router.wire.paths import PathKind

OUTAGE_RETRY_MAX_S: Final = 60

_INFERENCE: Final = PathKind.INFERENCE


class ModelsAwaited(RouterError):
    """Nobody serves it yet, but a backend that is just starting may: worth waiting for."""


def read_routing(
    services: Services, head: RequestHead, kind: PathKind, body: bytes, now: float
) -> tuple[Pool, RoutingRequest, bytes]:
    """The pool that may serve a request, what a strategy may know of it, and the body as it goes to an engine: an alias
    is replaced by the model's name, and nothing else. Raises RouterError where no backend could be asked."""
    registry = services.registry
    settings = services.settings
    if kind is not _INFERENCE:
        request = RoutingRequest("", now, session_key=_session_key(services, head, None))
        return registry.any_pool(), request, body
    seeds = registry.prompt_seeds()
    seen = read_request(
        head.content_type,
        head.path,
        body,
        settings.block_bytes,
        settings.session_fields if services.need_session else (),
        services.need_prefix,
        seeds.names,
        seeds.default,
    )
    aliases = registry.aliases
    model = aliases.get(seen.model) if aliases and seen.model is not None else None
    pool = _pool_of(registry, seen, seen.model if model is None else model)
    if model is not None:
        body = with_model(body, seen, model)
    request = RoutingRequest(
        pool.model,
        now,
        blocks=seen.blocks,
        prefix_bytes=seen.prefix_bytes,
        prompt_tokens=seen.prompt_tokens,
        session_key=_session_key(services, head, seen),
        max_tokens=seen.max_tokens,
        stream=seen.stream,
        readable=seen.readable,
    )
    return pool, request, body


def _pool_of(registry: Registry, seen: RequestBody, model: str | None) -> Pool:
    """`model`: the fleet's name for the one that the body names."""
    if model is not None:
        pool = registry.pool(model)
        if pool is not None:
            return pool
        if not registry.backends:
            raise no_backend("There is no backend.", retry_after_s=outage_retry_s(registry, ()))
        asked = seen.model or ""
        why = f"No backend that has told its models serves `{asked[:200]}`; others are starting."
        _raise_if_awaited(registry, why)
        if registry.models_unknown:
            raise no_backend(why, retry_after_s=outage_retry_s(registry, registry.backends))
        raise model_not_found(asked, registry.known_models())
    pool = registry.default_pool()
    if pool is not None:
        return pool
    known = registry.known_models()
    if not known:
        why = "No backend has told its models yet." if registry.backends else "There is no backend."
        _raise_if_awaited(registry, why)
        raise no_backend(why, retry_after_s=outage_retry_s(registry, registry.backends))
    if seen.malformed:
        raise bad_request("The body is not valid JSON, and a model is needed to choose a backend.", code="invalid_json")
    raise bad_request(
        f"The body names no model; one of these is needed: {', '.join(known[:NAMED_MODELS])}.", param="model"
    )


def _raise_if_awaited(registry: Registry, why: str) -> None:
    if registry.models_awaited():
        raise ModelsAwaited(503, "no_backend", why, retry_after_s=outage_retry_s(registry, registry.backends))


def _session_key(services: Services, head: RequestHead, seen: RequestBody | None) -> bytes | None:
    if not services.need_session:
        return None
    settings = services.settings
    for name in settings.session_headers:
        value = head.request_id if name == b"x-request-id" else head.header(name)
        if value:
            return value
    if seen is not None:
        for value in seen.session_values:
            if value:
                return value
    return _cookie(head, settings.session_cookie) if settings.session_cookie else None


def _cookie(head: RequestHead, name: bytes) -> bytes | None:
    for pair in (head.header(b"cookie") or b"").split(b";"):
        key, separator, value = pair.strip().partition(b"=")
        if separator and key == name and value:
            return value
    return None


def describe_outage(registry: Registry, pool: Pool) -> RouterError:
    """Why nobody of a pool serves."""
    states = sorted({b.state.value if not b.draining else "draining" for b in pool.members})
    what = f"model `{pool.model}`" if pool.model else "this request"
    return no_backend(
        f"No backend can serve {what} now ({', '.join(states) or 'none configured'}).",
        retry_after_s=outage_retry_s(registry, pool.members),
    )


def outage_retry_s(registry: Registry, members: Sequence[Backend]) -> int:
    """When to ask again while none of these serves: after as long as it has lasted already. Nothing better is known,
    and whoever comes back so asks seldom in a long outage and soon in a short one."""
    return max(1, min(int(registry.outage_s(members)), OUTAGE_RETRY_MAX_S))
