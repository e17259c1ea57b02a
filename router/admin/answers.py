"""Answers of the admin port: JSON, and one shape of error, which is that of the data port."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

import orjson
from aiohttp import web

from router.errors import RouterError, bad_request

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def json_answer(answer: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    always = {"content-type": "application/json", "cache-control": "no-store", "x-content-type-options": "nosniff"}
    return web.Response(status=status, body=orjson.dumps(answer), headers={**always, **(headers or {})})


def error_answer(error: RouterError, told: Mapping[str, object] | None = None) -> web.Response:
    """`told` stands in the answer beside the error."""
    headers = {"x-kvgate-error": "1"}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if error.status == 401:
        headers["www-authenticate"] = 'Bearer realm="kvgate"'
    answer = orjson.loads(error.body())
    return json_answer({**answer, **(told or {})}, status=error.status, headers=headers)


async def read_body(request: web.Request, *, limit_bytes: int, timeout_s: float) -> bytes:
    """The whole body as it came. RouterError: 413 past the limit, 408 if it takes too long."""
    too_large = bad_request(f"The body is larger than {limit_bytes} bytes.", code="body_too_large", status=413)
    if (request.content_length or 0) > limit_bytes:
        raise too_large
    parts = []
    length = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.content.iter_any():
                length += len(part)
                if length > limit_bytes:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        raise bad_request(f"The body did not arrive within {timeout_s:g} s.", code="body_timeout", status=408) from None
    return b"".join(parts)


class JsonRequestHandler(web.RequestHandler):
    """A connection of the admin port. What is no HTTP gets the shape of error of all else, and no traceback in the
    log: whoever scans ports or speaks TLS here is no fault of ours."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun; there is no room for an error")
        if status < 500:
            logger.debug("the admin port got what is no valid HTTP/1.1: %s", type(exc).__name__)
            error = bad_request("The request is not valid HTTP/1.1.", code="invalid_http", status=status)
        else:
            logger.error("the admin port failed", exc_info=exc)
            error = RouterError(status, "internal_error", "The gateway failed; its log says where.")
        response = error_answer(error)
        response.force_close()
        return response


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Also for what aiohttp itself refuses."""
    try:
        return await handler(request)
    except RouterError as error:
        return error_answer(error)
    except web.HTTPMethodNotAllowed as refused:
        response = error_answer(bad_request("Method not allowed here.", code="method_not_allowed", status=405))
        response.headers["allow"] = refused.headers["allow"]
        return response
    except web.HTTPNotFound:
        return error_answer(bad_request("No such path on the admin port.", code="not_found", status=404))
    except web.HTTPException as refused:
        return error_answer(bad_request(refused.reason, code="bad_request", status=refused.status))
    except Exception:
        logger.exception("the admin port failed on %s", request.path)
        return error_answer(RouterError(500, "internal_error", "The gateway failed; its log says where."))
