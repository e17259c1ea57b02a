"""The admin port: health, metrics and the fleet, on a listener of its own and away from the request path."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any

import orjson
from aiohttp import web

from router.backends.backend import Backend
from router.backends.registry import Registry
from router.clock import Clock, SystemClock
from router.errors import RouterError, bad_request, no_backend

logger = logging.getLogger(__name__)

BODY_LIMIT_BYTES = 1024 * 1024
CLOSE_TIMEOUT_S = 1.0  # for answers under way when the port closes

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class AdminServer:
    """`render_metrics` gives the body of /metrics in the type `metrics_content_type`; `hit_accounting` the figures of
    one backend that its listing shows under `hits`, by name. Both are called for each answer, on the event loop."""

    def __init__(
        self,
        host: str,
        port: int,
        registry: Registry,
        *,
        render_metrics: Callable[[], bytes],
        metrics_content_type: str,
        hit_accounting: Callable[[Backend], Mapping[str, object]],
        clock: Clock | None = None,
    ) -> None:
        self._host = host
        self._port = port
        self._registry = registry
        self._render_metrics = render_metrics
        self._metrics_content_type = metrics_content_type
        self._hit_accounting = hit_accounting
        self._clock = clock
        self._runner: web.AppRunner | None = None

    async def start(self) -> int:
        """Listen; returns the port, which matters where port 0 asked for any. OSError: it is taken."""
        self._clock = self._clock or SystemClock(asyncio.get_running_loop())
        app = web.Application(middlewares=[_errors_as_json], client_max_size=BODY_LIMIT_BYTES)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/backends", self._backends)
        runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=CLOSE_TIMEOUT_S)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._port, reuse_address=True).start()
        except BaseException:
            await runner.cleanup()
            raise
        self._runner = runner
        port: int = runner.addresses[0][1]
        return port

    async def stop(self) -> None:
        """Close the port and its connections. Harmless when it is not open."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        """As on the data port: 200 while at least one backend can serve."""
        if not self._registry.any_pool().candidates:
            raise _Answered(no_backend("No backend can serve."))
        return _json({"status": "ok"})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._render_metrics(), headers={"content-type": self._metrics_content_type})

    async def _backends(self, request: web.Request) -> web.Response:
        return _json({"backends": [self._describe(backend) for backend in self._registry.backends]})

    def _describe(self, backend: Backend) -> dict[str, Any]:
        why = backend.why
        if not why and backend.draining:
            why = "being removed" if backend.deleted else "draining"
        return {
            "name": backend.name,
            "url": backend.url,
            "weight": backend.weight,
            "state": backend.state,
            "serving": backend.serving,
            "why": why,
            "draining": backend.draining,
            "models": list(backend.models),
            "in_flight": backend.in_flight,
            "report": self._describe_report(backend),
            "hits": dict(self._hit_accounting(backend)),
            "kv_events": "off",
        }

    def _describe_report(self, backend: Backend) -> dict[str, Any] | None:
        """What the engine last said of itself, and how many seconds ago; None if it never did."""
        assert self._clock is not None
        report = backend.report
        age_s = self._clock.now() - report.at
        if age_s == float("inf"):
            return None
        figures = asdict(report)
        del figures["at"]
        return {"age_s": round(age_s, 3), **figures, "kv_capacity_tokens": report.kv_capacity_tokens}


class _Answered(Exception):
    """Ends a handler with an error of ours."""

    def __init__(self, error: RouterError) -> None:
        super().__init__(error.message)
        self.error = error


def _json(answer: object) -> web.Response:
    return web.Response(body=orjson.dumps(answer), content_type="application/json")


def _error(error: RouterError) -> web.Response:
    response = web.Response(status=error.status, body=error.body(), content_type="application/json")
    response.headers["x-kvgate-error"] = "1"
    if error.retry_after_s is not None:
        response.headers["retry-after"] = str(error.retry_after_s)
    return response


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """One shape of error on both ports, also for what aiohttp itself refuses."""
    try:
        return await handler(request)
    except _Answered as answered:
        return _error(answered.error)
    except web.HTTPMethodNotAllowed as refused:
        response = _error(bad_request("Method not allowed here.", code="method_not_allowed", status=405))
        response.headers["allow"] = refused.headers["allow"]
        return response
    except web.HTTPNotFound:
        return _error(bad_request("No such path on the admin port.", code="not_found", status=404))
    except web.HTTPException as refused:
        return _error(bad_request(refused.reason, code="bad_request", status=refused.status))
    except Exception:
        logger.exception("the admin port failed on %s", request.path)
        return _error(RouterError(500, "internal_error", "The gateway failed; its log says where."))
