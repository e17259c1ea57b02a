"""`kvgate check --probe`: asks each engine for what the gateway builds on, and names the flag that cures a lack.

Nothing here is on the request path. An engine's answers are untrusted: sizes, times and shapes are bounded, and what
one of them sends never keeps the others from being asked.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
import orjson

from router.backends import vllm_metrics
from router.backends.backend import EngineReport
from router.backends.cures import CACHING_OFF, NO_CACHED_TOKENS, PUBLISH_EVENTS, SAME_BLOCK_SIZE
from router.backends.models import BadModels, read_models
from router.config import BackendConfig
from router.tls import client_context

ANSWER_LIMIT_BYTES: Final = vllm_metrics.BODY_LIMIT_BYTES
AT_ONCE: Final = 32  # engines asked at the same time
MOST_TOKENS: Final = 100_000_000  # that any prompt has

_EVENTS_CURE: Final = f'{PUBLISH_EVENTS}, or set kv_events = "off" for this backend'


@dataclass(frozen=True, slots=True)
class Finding:
    """A precondition that one backend does not meet, and what to change."""

    backend: str
    problem: str
    cure: str

    def __str__(self) -> str:
        return f"{self.backend}: {self.problem}; {self.cure}"


@dataclass(slots=True)
class Probed:
    """What one engine told. `None`: it could not be asked, or did not say."""

    name: str
    models: tuple[str, ...] = ()
    entries: list[dict[str, Any]] = field(default_factory=list)  # of /v1/models
    no_events: bool = False  # it says that it publishes none, or has none to publish
    block_size_tokens: int | None = None
    num_gpu_blocks: int | None = None
    findings: list[Finding] = field(default_factory=list)

    def __str__(self) -> str:
        told = []
        if self.models:
            told.append(f"models {', '.join(self.models)}")
        if self.block_size_tokens is not None:
            told.append(f"block size {self.block_size_tokens} tokens")
        if self.num_gpu_blocks is not None:
            told.append(f"{self.num_gpu_blocks} blocks")
        return f"{self.name}: {'; '.join(told) or 'told nothing'}"


class _NoAnswer(Exception):
    """The engine could not be asked. The text says why, without anything that it sent."""


async def probe(
    backends: Sequence[BackendConfig],
    *,
    kv_events: bool = True,
    timeout_s: float = 5.0,
    generation_timeout_s: float = 60.0,
) -> list[Probed]:
    """One result per backend, in their order. `kv_events`: whether they matter, as to kvaware. `timeout_s` bounds each
    plain question; `generation_timeout_s` each of the (at most two) completions of one token, which wait in the
    engine's queue like any other."""
    limit = asyncio.Semaphore(AT_ONCE)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, headers={"Accept-Encoding": "identity"}) as session:

        async def ask(backend: BackendConfig) -> Probed:
            async with limit:
                return await _Engine(session, backend, kv_events, timeout_s, generation_timeout_s).probe()

        results = await asyncio.gather(*map(ask, backends))
    _compare_block_sizes(results)
    return results


class _Engine:
    """The questions to one engine, in order; each `_ask` method returns findings and notes what it learned."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        backend: BackendConfig,
        kv_events: bool,
        timeout_s: float,
        generation_timeout_s: float,
    ) -> None:
        self._session = session
        self._backend = backend
        self._kv_events = kv_events and backend.kv_events != "off"
        self._tls: ssl.SSLContext | bool = True
        if backend.url.startswith("https:"):
            self._tls = client_context(backend.tls_ca, backend.tls_verify)
        self._timeout_s = timeout_s
        self._generation_timeout_s = generation_timeout_s
        self._headers = {} if backend.api_key is None else {"Authorization": f"Bearer {backend.api_key}"}
        self._report = EngineReport()
        self._result = Probed(backend.name)

    async def probe(self) -> Probed:
        result = self._result
        try:
            await self._ask_health()
        except _NoAnswer as error:
            self._found(f"unreachable, {error}", f"is the engine running at {self._backend.url} (its --host, --port)?")
            return result
        for question in (self._ask_models, self._ask_cache, self._ask_kv_events, self._ask_cached_tokens):
            try:
                await question()
            except _NoAnswer as error:
                self._found(f"{question.__name__.removeprefix('_ask_')}: {error}", "see the engine's log")
        return result

    def _found(self, problem: str, cure: str) -> None:
        self._result.findings.append(Finding(self._backend.name, problem, cure))

    async def _ask_health(self) -> None:
        status, _ = await self._get("/health")
        if status >= 500:
            raise _NoAnswer(f"/health answers {status}")

    async def _ask_models(self) -> None:
        status, body = await self._get("/v1/models")
        if status in (401, 403):
            self._found(
                f"/v1/models answers {status}",
                "name a variable that holds the engine's --api-key in api_key_env",
            )
            return
        if status != 200:
            self._found(f"/v1/models answers {status}", "is it an OpenAI-compatible engine (vllm serve)?")
            return
        try:
            faults: list[str] = []
            entries = read_models(body, faults)
        except BadModels as error:
            faults, entries = [str(error)], None
        for fault in faults:
            self._found(f"/v1/models is not as vLLM answers it: {fault}", "is it an OpenAI-compatible engine?")
        if entries is None:
            return
        # Base models before their adapters: any of the former can be asked for a token.
        entries.sort(key=lambda entry: entry.get("parent") is not None)
        self._result.entries = entries
        self._result.models = tuple(_printable(entry["id"]) for entry in entries)
        if not entries:
            self._found("serves no model", "see the engine's log")
        missing = [name for name in self._backend.models or () if name not in self._result.models]
        if missing and entries:
            self._found(
                f"model missing: {', '.join(missing)} (it serves {', '.join(self._result.models[:8])})",
                "start it with --served-model-name, or correct `models`",
            )

    async def _ask_cache(self) -> None:
        status, body = await self._get("/metrics")
        if status != 200:
            self._found(f"/metrics answers {status}", "use vLLM 0.8 or later, without --disable-log-stats")
            return
        report = self._report = vllm_metrics.parse(body)
        self._result.block_size_tokens = report.block_size_tokens
        self._result.num_gpu_blocks = report.num_gpu_blocks
        if report.prefix_caching is False:
            self._result.no_events = True
            self._found(*CACHING_OFF)
        if report.prefix_caching is None or report.block_size_tokens is None:
            self._found(
                "does not tell its block size and prefix caching (vllm:cache_config_info in /metrics)",
                "use vLLM 0.8 or later, without --disable-log-stats",
            )

    async def _ask_kv_events(self) -> None:
        if not self._kv_events or self._backend.kv_events != "auto":
            return  # where they are is configured: following them will tell
        status, body = await self._get("/kv_event_sources")
        if status == 404:
            self._result.no_events = True
            self._found("no KV events published, as far as it tells (/kv_event_sources answers 404)", _EVENTS_CURE)
        elif status != 200:
            self._found(f"/kv_event_sources answers {status}", "see the engine's log")
        elif not isinstance(_loaded(body), dict):
            self._found("/kv_event_sources is not as vLLM answers it: no JSON object", "is it vLLM 0.31 or later?")
        elif not _publishes(body):
            self._result.no_events = True
            self._found("no KV events published", _EVENTS_CURE)

    async def _ask_cached_tokens(self) -> None:
        if not self._result.models or self._report.prefix_caching is False:
            return  # a finding already, and without a cache some releases never tell
        model = next((name for name in self._backend.models or () if name in self._result.models), None)
        # Twice the same, and more than a block: some releases leave the field out where nothing was cached.
        words = min(self._report.block_size_tokens or 128, 512) + 16
        question = {
            "model": model or self._result.models[0],
            "prompt": "a " * words,
            "max_tokens": 1,
            "temperature": 0,
        }
        for _ in range(2):
            status, body = await self._post("/v1/completions", question)
            if status != 200:
                self._found(
                    f"cannot tell whether it reports cached_tokens (a completion of one token answers {status})",
                    "see the engine's log",
                )
                return
            if cached_tokens_of(_loaded(body)) is not None:
                return
        self._found(*NO_CACHED_TOKENS)

    async def _get(self, path: str) -> tuple[int, bytes]:
        return await self._exchange("GET", path, None, self._timeout_s)

    async def _post(self, path: str, document: dict[str, Any]) -> tuple[int, bytes]:
        return await self._exchange("POST", path, orjson.dumps(document), self._generation_timeout_s)

    async def _exchange(self, method: str, path: str, body: bytes | None, timeout_s: float) -> tuple[int, bytes]:
        """Status and body. Raises _NoAnswer where there is none in time, or one too large."""
        headers = self._headers if body is None else {**self._headers, "Content-Type": "application/json"}
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(
                    method, self._backend.url + path, data=body, headers=headers, allow_redirects=False, ssl=self._tls
                ) as response,
            ):
                content = bytearray()
                async for chunk in response.content.iter_any():
                    content += chunk
                    if len(content) > ANSWER_LIMIT_BYTES:
                        raise _NoAnswer(f"{path} answers with more than {ANSWER_LIMIT_BYTES} bytes")
                return response.status, bytes(content)
        except TimeoutError:
            raise _NoAnswer(f"{path} does not answer within {timeout_s:g} s") from None
        except aiohttp.ClientConnectorCertificateError as error:
            why = getattr(error.certificate_error, "verify_message", "") or "it does not match"
            raise _NoAnswer(f"its certificate is not accepted: {why} (tls_ca, tls_verify)") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _NoAnswer(f"{path} fails: {_reason(error)}") from None


def _reason(error: BaseException) -> str:
    """The operating system's own words, or ours. Other texts may repeat what the engine sent."""
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    if isinstance(error, aiohttp.ClientResponseError | aiohttp.ClientPayloadError):
        return "its answer is not HTTP as it should be"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "it closed the connection without an answer"
    return type(error).__name__


def _loaded(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None


def _printable(name: str) -> str:
    """For a terminal: an engine's word, without control characters."""
    return "".join(character if character.isprintable() else "?" for character in name)


def _publishes(body: bytes) -> bool:
    """Whether each data-parallel rank of /kv_event_sources has a publisher."""
    sources = _loaded(body)
    if not isinstance(sources, dict) or not sources:
        return False
    return all(
        isinstance(source, dict) and source.get("enable_kv_cache_events") is True and source.get("publisher") == "zmq"
        for source in sources.values()
    )


def cached_tokens_of(answer: object) -> int | None:
    """What an answer's usage says was cached, None where it does not say."""
    place = answer
    for key in ("usage", "prompt_tokens_details", "cached_tokens"):
        place = place.get(key) if isinstance(place, dict) else None
    return place if isinstance(place, int) and not isinstance(place, bool) and 0 <= place <= MOST_TOKENS else None


def _compare_block_sizes(results: Iterable[Probed]) -> None:
    """Engines of one model with blocks of different sizes match prefixes at different lengths."""
    first_of: dict[str, Probed] = {}
    for result in results:
        if result.block_size_tokens is None:
            continue
        for model in result.models:
            first = first_of.setdefault(model, result)
            if first.block_size_tokens != result.block_size_tokens:
                problem = (
                    f"block size {result.block_size_tokens} tokens, while {first.name} has {first.block_size_tokens} "
                    f"for model {model}"
                )
                result.findings.append(Finding(result.name, problem, SAME_BLOCK_SIZE))
                break
