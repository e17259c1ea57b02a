"""What goes wrong outside of us, and the one place that renders it for a client.

Foreign exceptions are mapped to RouterError at the edge, once. A broken invariant of our own is never one: it raises.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import orjson

NAMED_MODELS: Final = 32  # in an error; a fleet may know thousands of adapters


class Source(StrEnum):
    """Whose doing it is."""

    CLIENT = "client"
    UPSTREAM = "upstream"
    GATEWAY = "gateway"


class RouterError(Exception):
    """An answer of ours in place of an engine's.

    `status` and `code` go to the client; `retry_after_s` (seconds) becomes the Retry-After header.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        source: Source = Source.GATEWAY,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.source = source
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def type(self) -> str:
        """The `type` that OpenAI clients know for this kind of status."""
        if self.status == 401:
            return "authentication_error"
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> bytes:
        """OpenAI error JSON."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})

    def sse_event(self, *, named: bool = False) -> bytes:
        """The same as a server-sent event, for a stream that has begun. `named`: as Anthropic's Messages API has it,
        whose clients pass over an event without a name."""
        if not named:
            return b"data: " + self.body() + b"\n\n"
        kind = "timeout_error" if self.status == 504 else "api_error" if self.status >= 500 else self.type
        error = {"type": kind, "message": self.message, "param": self.param, "code": self.code}
        return b"event: error\ndata: " + orjson.dumps({"type": "error", "error": error}) + b"\n\n"


def bad_request(message: str, *, code: str = "bad_request", param: str | None = None, status: int = 400) -> RouterError:
    return RouterError(status, code, message, source=Source.CLIENT, param=param)


def model_not_found(model: str, known: list[str]) -> RouterError:
    names = ", ".join(known[:NAMED_MODELS]) if known else "none"
    if len(known) > NAMED_MODELS:
        names += f" and {len(known) - NAMED_MODELS} more"
    return RouterError(
        404,
        "model_not_found",
        f"The model `{model[:200]}` does not exist. Available models: {names}.",
        source=Source.CLIENT,
        param="model",
    )


def no_backend(message: str, *, retry_after_s: int = 1) -> RouterError:
    return RouterError(503, "no_backend", message, retry_after_s=retry_after_s)


def queue_full(retry_after_s: int) -> RouterError:
    return RouterError(429, "queue_full", "The gateway's queue is full.", retry_after_s=retry_after_s)


def queue_timeout(waited_s: float, retry_after_s: int) -> RouterError:
    return RouterError(429, "queue_full", f"No backend had room within {waited_s:g} s.", retry_after_s=retry_after_s)


def invalid_api_key() -> RouterError:
    """Never tells whether there was a key at all, nor any of it."""
    return RouterError(
        401,
        "invalid_api_key",
        "A valid API key is needed: `Authorization: Bearer KEY` or `x-api-key: KEY`.",
        source=Source.CLIENT,
    )


def upstream_error(message: str) -> RouterError:
    return RouterError(502, "upstream_error", message, source=Source.UPSTREAM)


def upstream_timeout(message: str) -> RouterError:
    return RouterError(504, "upstream_timeout", message, source=Source.UPSTREAM)
