"""The listener of the admin port and its routes. docs/admin.md shows each answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final
from urllib.parse import quote

import orjson
from aiohttp import web

from router.admin.access import Asker, refusal_of_change
from router.admin.answers import JsonRequestHandler, error_answer, errors_as_json, json_answer, read_body
from router.admin.backend_view import BackendView
from router.admin.config_view import config_view
from router.admin.control import FleetControl
from router.admin.explanation import explain
from router.backends.backend import Backend
from router.config import ConfigError
from router.errors import RouterError, bad_request, no_backend
from router.proxy.services import Services

BODY_LIMIT_BYTES: Final = 1024 * 1024  # of all but /explain, whose bodies are those of the data port
EXPLANATIONS_AT_ONCE: Final = 4  # each may hold a body of the data port's size
CLOSE_TIMEOUT_S: Final = 1.0  # for answers under way when the port closes


class AdminServer:
    """`render_metrics` gives the body of /metrics in the type `metrics_content_type`; `hit_accounting` the figures of
    one backend that its listing shows under `hits`, by name, `kv_events` those under that. All are called for each
    answer, on the event loop.
    `version`: what GET /version tells. `add_routes` is called with the application before it starts, to add to it."""

    def __init__(
        self,
        host: str,
        port: int,
        services: Services,
        control: FleetControl,
        *,
        render_metrics: Callable[[], Awaitable[bytes]],
        metrics_content_type: str,
        hit_accounting: Callable[[Backend], Mapping[str, object]],
        kv_events: Callable[[Backend], Mapping[str, object]],
        version: Mapping[str, str],
        add_routes: Callable[[web.Application], object] | None = None,
    ) -> None:
        self._host = host
        self._port = port
        self._services = services
        self._control = control
        self._render_metrics = render_metrics
        self._metrics_content_type = metrics_content_type
        self._version = dict(version)
        self._add_routes = add_routes
        self._view = BackendView(services, hit_accounting, kv_events)
        self._explanations = 0  # under way
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None

    # -- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> int:
        """Listen; returns the port, which matters where port 0 asked for any. OSError: it is taken."""
        app = web.Application(middlewares=[errors_as_json], client_max_size=BODY_LIMIT_BYTES)
        route = app.router
        route.add_get("/health", self._health)
        route.add_get("/metrics", self._metrics)
        route.add_get("/version", self._tell_version)
        route.add_get("/config", self._config)
        route.add_post("/reload", self._reload)
        route.add_post("/explain", self._explain)
        route.add_get("/backends", self._backends)
        route.add_post("/backends", self._add)
        route.add_get("/backends/{name}", self._backend)
        route.add_delete("/backends/{name}", self._remove)
        route.add_post("/backends/{name}/drain", self._drain)
        route.add_post("/backends/{name}/undrain", self._undrain)
        if self._add_routes is not None:
            self._add_routes(app)
        runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=CLOSE_TIMEOUT_S)
        await runner.setup()
        loop = asyncio.get_running_loop()

        def connection() -> JsonRequestHandler:
            assert runner.server is not None
            # Bodies stay as they come: an explanation reads what the data port would, and no small body becomes huge.
            no_log: Any = None  # not foreseen by its type, but by its code
            return JsonRequestHandler(runner.server, loop=loop, access_log=no_log, auto_decompress=False)

        try:
            self._listener = await loop.create_server(connection, self._host, self._port, reuse_address=True)
        except BaseException:
            await runner.cleanup()
            raise
        self._runner = runner
        port: int = self._listener.sockets[0].getsockname()[1]
        return port

    async def stop(self) -> None:
        """Close the port and its connections. Harmless when it is not open."""
        self._view.close()
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    # -- what it tells ------------------------------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        """As on the data port: 200 while at least one backend can serve."""
        if not self._services.registry.any_pool().candidates:
            raise no_backend("No backend can serve.")
        return json_answer({"status": "ok"})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=await self._render_metrics(), headers={"content-type": self._metrics_content_type})

    async def _tell_version(self, request: web.Request) -> web.Response:
        return json_answer(self._version)

    async def _config(self, request: web.Request) -> web.Response:
        return json_answer(config_view(self._control.config))

    async def _backends(self, request: web.Request) -> web.Response:
        return json_answer(await self._view.all())

    async def _backend(self, request: web.Request) -> web.Response:
        backend = self._services.registry.get(request.match_info["name"])
        if backend is None:
            raise _no_such_backend(request)
        return json_answer(self._view.one(backend))

    async def _explain(self, request: web.Request) -> web.Response:
        if self._explanations >= EXPLANATIONS_AT_ONCE:
            message = f"{EXPLANATIONS_AT_ONCE} explanations are under way already."
            raise RouterError(429, "too_many_explanations", message, retry_after_s=1)
        self._explanations += 1
        try:
            config = self._control.config
            body = await read_body(
                request, limit_bytes=config.limits.max_body_bytes, timeout_s=config.timeouts.client_body_s
            )
            found = await explain(self._services, request.query.get("path"), request.raw_headers, body)
        finally:
            self._explanations -= 1
        return json_answer(found.answer) if found.error is None else error_answer(found.error, found.answer)

    # -- what it changes ----------------------------------------------------------------------------------------------

    async def _reload(self, request: web.Request) -> web.Response:
        await self._admit_change(request)
        try:
            changes = await self._control.reload()
        except ConfigError as error:
            raise _faulty(error) from None
        return json_answer({"result": "ok", "changed": [str(change) for change in changes]})

    async def _add(self, request: web.Request) -> web.Response:
        body = await self._admit_change(request)
        try:
            spec: Any = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise bad_request(f"The body is not valid JSON: {error}.", code="invalid_json") from None
        if not isinstance(spec, dict):
            raise bad_request("The body is not a JSON object with the keys of a [[backends]] table.")
        if "api_key" in spec:
            message = "A key is never taken in clear: name the environment variable that holds it, as `api_key_env`."
            raise bad_request(message, code="invalid_backend", param="api_key")
        # JSON clients often send what they do not set as null; TOML knows no null, so it cannot mean anything else.
        spec = {key: value for key, value in spec.items() if value is not None}
        try:
            backend = self._control.add(spec)
        except ConfigError as error:
            raise _faulty(error, code="invalid_backend") from None
        except ValueError as error:
            raise bad_request(f"{error}.", code="conflict", param="name", status=409) from None
        location = f"/backends/{quote(backend.name, safe='')}"
        return json_answer(self._view.one(backend), status=201, headers={"location": location})

    async def _remove(self, request: web.Request) -> web.Response:
        return await self._change(request, self._control.remove, status=202)

    async def _drain(self, request: web.Request) -> web.Response:
        return await self._change(request, self._control.drain)

    async def _undrain(self, request: web.Request) -> web.Response:
        return await self._change(request, self._control.undrain)

    async def _change(
        self, request: web.Request, change: Callable[[str], Backend], *, status: int = 200
    ) -> web.Response:
        await self._admit_change(request)
        try:
            backend = change(request.match_info["name"])
        except KeyError:
            raise _no_such_backend(request) from None
        except ValueError as error:
            raise bad_request(f"{error}.", code="conflict", status=409) from None
        return json_answer(self._view.one(backend), status=status)

    async def _admit_change(self, request: web.Request) -> bytes:
        """The body of a change that this asker may make. RouterError: it may not, and its body was not read."""
        config = self._control.config
        peer = request.transport.get_extra_info("peername") if request.transport is not None else None
        headers = request.headers
        asker = Asker(
            peer=peer[0] if isinstance(peer, tuple) else None,
            hosts=headers.getall("Host", ()),
            origins=headers.getall("Origin", ()),
            fetch_sites=headers.getall("Sec-Fetch-Site", ()),
            authorizations=headers.getall("Authorization", ()),
        )
        refused = refusal_of_change(asker, admin_host=config.admin.host, token=config.admin.token)
        if refused is not None:
            raise refused
        return await read_body(request, limit_bytes=BODY_LIMIT_BYTES, timeout_s=config.timeouts.client_body_s)


def _no_such_backend(request: web.Request) -> RouterError:
    name = request.match_info["name"][:200]
    return bad_request(f"There is no backend `{name}`.", code="backend_not_found", status=404)


def _faulty(error: ConfigError, *, code: str = "invalid_configuration") -> RouterError:
    """One line a fault, as at the start."""
    return bad_request(str(error), code=code, param=error.faults[0].key_path if error.faults else None)
