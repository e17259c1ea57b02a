"""The paths that the gateway answers by itself on the data port (INTERFACE.md section 3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from router.errors import no_backend
from router.proxy.services import Services

JSON_TYPE = b"application/json"


class LocalAnswer(NamedTuple):
    status: int
    content_type: bytes
    body: bytes
    is_error: bool = False


SCRAPE: Final = LocalAnswer(200, b"", b"")  # stands for the metrics, which are rendered beside other work


def _ok() -> LocalAnswer:
    return LocalAnswer(200, JSON_TYPE, b'{"status":"ok"}')


def _health(services: Services) -> LocalAnswer:
    return _ok() if services.registry.any_pool().candidates else _unready("No backend can serve.")


def _live(services: Services) -> LocalAnswer:
    return _ok()


def _ready(services: Services) -> LocalAnswer:
    return _unready("The gateway is draining.") if services.draining else _health(services)


def _unready(why: str) -> LocalAnswer:
    return LocalAnswer(503, JSON_TYPE, no_backend(why).body(), is_error=True)


def _models(services: Services) -> LocalAnswer:
    return LocalAnswer(200, JSON_TYPE, services.registry.listing())


def _metrics(services: Services) -> LocalAnswer:
    return SCRAPE


def _version(services: Services) -> LocalAnswer:
    return LocalAnswer(200, JSON_TYPE, services.version_body)


_ANSWERS: dict[bytes, Callable[[Services], LocalAnswer]] = {
    b"/health": _health,
    b"/ping": _health,
    b"/livez": _live,
    b"/readyz": _ready,
    b"/v1/models": _models,
    b"/metrics": _metrics,
    b"/version": _version,
}


def local_answer(method: bytes, path: bytes, services: Services) -> LocalAnswer | None:
    """None: the request is for a backend. SCRAPE: ask `services.scrape`. SageMaker also asks POST /ping."""
    answer = _ANSWERS.get(path)
    if answer is None or (method not in (b"GET", b"HEAD") and path != b"/ping"):
        return None
    if path == b"/metrics" and not services.settings.metrics_on_data_port:
        return None
    return answer(services)
