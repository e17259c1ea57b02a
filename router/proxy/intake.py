"""From a request's bytes to what a strategy may know of it, and to the pool that may serve it."""

from __future__ import annotations

from typing import Final

from router.backends.registry import Pool, Registry
from router.errors import RouterError, bad_request, model_not_found, no_backend
from router.proxy.services import Services
from router.strategies.strategy import RoutingRequest
from router.wire.http_head import RequestHead
from router.wire.openai_request import RequestBody, read_request
from router.wire.paths import PathKind

_INFERENCE: Final = PathKind.INFERENCE


def read_routing(
    services: Services, head: RequestHead, kind: PathKind, body: bytes, now: float
) -> tuple[Pool, RoutingRequest]:
    """Raises RouterError where no backend could be asked."""
    registry = services.registry
    settings = services.settings
    if kind is not _INFERENCE:
        request = RoutingRequest("", now, session_key=_session_key(services, head, None))
        return registry.any_pool(), request
    seen = read_request(
        head.content_type,
        head.path,
        body,
        settings.block_bytes,
        settings.session_fields if services.need_session else (),
        services.need_prefix,
    )
    pool = _pool_of(registry, seen)
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
    return pool, request


def _pool_of(registry: Registry, seen: RequestBody) -> Pool:
    if seen.model is not None:
        pool = registry.pool(seen.model)
        if pool is not None:
            return pool
        if not registry.backends:
            raise no_backend("There is no backend.")
        if registry.models_unknown:
            raise no_backend(f"No backend that has told its models serves `{seen.model[:200]}`; others are starting.")
        raise model_not_found(seen.model, registry.known_models())
    pool = registry.default_pool()
    if pool is not None:
        return pool
    known = registry.known_models()
    if not known:
        raise no_backend("No backend has told its models yet." if registry.backends else "There is no backend.")
    if seen.malformed:
        raise bad_request("The body is not valid JSON, and a model is needed to choose a backend.", code="invalid_json")
    raise bad_request(f"The body names no model; one of these is needed: {', '.join(known)}.", param="model")


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


def describe_outage(pool: Pool) -> RouterError:
    """Why nobody of a pool serves."""
    states = sorted({b.state.value if not b.draining else "draining" for b in pool.members})
    what = f"model `{pool.model}`" if pool.model else "this request"
    return no_backend(f"No backend can serve {what} now ({', '.join(states) or 'none configured'}).")
