"""Active health: what each engine says when asked. One task a backend, so that none waits for another.

A round asks /health and /metrics at once, and /v1/models where that is due: before a backend serves for the first
time or again, until it has told its models, and every tenth round (a LoRA adapter may have been loaded past us).
The verdict on /health does not wait for the other two. Engines are outside: each answer has a limit in time, from the
injected clock, and in bytes; what is wrong with it concerns that backend alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

import aiohttp

from router.backends.backend import Backend, EngineReport, State
from router.backends.models import BODY_LIMIT_BYTES as MODELS_LIMIT_BYTES
from router.backends.models import BadModels, read_models
from router.backends.registry import BackendAdded, BackendRemoved, FleetEvent, Registry
from router.backends.vllm_metrics import BODY_LIMIT_BYTES as METRICS_LIMIT_BYTES
from router.backends.vllm_metrics import parse
from router.clock import Clock
from router.tls import ClientContexts

logger = logging.getLogger(__name__)

MODELS_ROUNDS = 10  # rounds from one look at /v1/models to the next
SPREAD_PER_BACKEND_S = 0.002  # first checks of a fleet: 512 backends over a second, four within 8 ms
JITTER = 0.1  # share of the interval by which a round may be early or late, so that backends drift apart
KEEPALIVE_S = 4.0  # vLLM closes an idle connection after 5

Report = Callable[[Backend, EngineReport, EngineReport], object]


class HealthSettings(Protocol):
    """The keys of `[health]` that this needs."""

    @property
    def interval_s(self) -> float: ...
    @property
    def timeout_s(self) -> float: ...
    @property
    def unhealthy_after(self) -> int: ...
    @property
    def healthy_after(self) -> int: ...


class PollFailed(Exception):
    """No usable answer; the text says why in a few words, for people, and quotes nothing of the answer."""


def poll_session() -> aiohttp.ClientSession:
    """A session fit for polling: no limit over all backends, since hung ones would use it up; no cookies, no proxy
    from the environment, no decompression (a small answer could become a huge one)."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
        headers={"Accept-Encoding": "identity", "User-Agent": "kvgate"},
        auto_decompress=False,
    )


class _Watch:
    """What is remembered of one backend between two rounds."""

    __slots__ = (
        "asking",
        "check",
        "failures",
        "models_asked",
        "models_due",
        "models_problem",
        "round",
        "successes",
        "task",
    )

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.check: asyncio.Task[bool] | None = None  # one that somebody asked for, shared by all who ask meanwhile
        self.asking: set[asyncio.Task[bool]] = set()  # for the models, outside of the rounds
        self.models_asked = 0  # how often so
        self.round = 0
        self.successes = 0  # in a row
        self.failures = 0  # in a row
        self.models_due = True
        self.models_problem = ""  # the last one logged: an engine without /v1/models is told of once


class HealthMonitor:
    """Asks every backend of the registry from `start` to `stop`, and writes down what follows: states STARTING, UP and
    DOWN (an ejection is left alone until the engine is found dead), models, reports.

    `on_report(backend, before, now)` after each readable answer to /metrics; `on_restart(backend)` before it where
    the engine is another process than before, `before` then being an empty report.
    """

    def __init__(
        self,
        registry: Registry,
        session: Callable[[], aiohttp.ClientSession],
        clock: Clock,
        settings: HealthSettings,
        on_report: Report,
        on_restart: Callable[[Backend], object],
        rng: random.Random | None = None,
        contexts: ClientContexts | None = None,
    ) -> None:
        self._registry = registry
        self._contexts = contexts or ClientContexts()
        self._make_session = session
        self._clock = clock
        self._settings = settings
        self._on_report = on_report
        self._on_restart = on_restart
        self._rng = rng or random.Random()
        self._session: aiohttp.ClientSession | None = None
        self._watches: dict[Backend, _Watch] = {}
        self._ending: set[asyncio.Task[None] | asyncio.Task[bool]] = set()
        self._unsubscribe: Callable[[], None] | None = None

    # --- life

    async def start(self) -> None:
        """Begin with the backends that are there; later ones are followed as they come and go."""
        self._session = self._make_session()
        self._unsubscribe = self._registry.subscribe(self._fleet_changed)
        for backend in self._registry.backends:
            self._watch(backend)

    async def stop(self) -> None:
        """Cancel everything and wait for its end; no task and no connection is left."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        for backend in tuple(self._watches):
            self._unwatch(backend)
        while self._ending:
            await asyncio.gather(*self._ending, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
            self._session = None

    def configure(self, settings: HealthSettings) -> None:
        """Other settings, from the next round of each backend on."""
        self._settings = settings

    async def check_now(self, backend: Backend) -> bool:
        """Ask /health at once: True if the engine is alive. If it is not, the backend is DOWN without further rounds,
        since whoever asks has had a sign of its death already. Those who ask meanwhile share the one request. False
        too for a backend that left the fleet."""
        watch = self._watches.get(backend)
        if watch is None:
            return False
        if watch.check is None:
            watch.check = asyncio.create_task(self._checked_now(backend, watch), name=f"check {backend.name}")
            watch.check.add_done_callback(lambda _: setattr(watch, "check", None))
        check = watch.check
        # Not awaited directly: one caller that is cancelled must not cancel it for the others, and a check that ends
        # with its backend is an answer, not a cancellation of the caller.
        await asyncio.wait((check,))
        return not check.cancelled() and check.result()

    def ask_models(self, backend: Backend) -> None:
        """Have the next round ask for the models."""
        watch = self._watches.get(backend)
        if watch is not None:
            watch.models_asked += 1
            watch.models_due = True

    async def ask_models_now(self, backend: Backend) -> bool:
        """Ask for the models at once, since a request has just changed them: True if the engine told them. The next
        round asks once more, as an answer from before the change may have been under way. Goes on if its caller is
        cancelled. False for a backend that left the fleet."""
        watch = self._watches.get(backend)
        if watch is None:
            return False
        watch.models_asked += 1
        watch.models_due = True
        asked = asyncio.create_task(self._poll_models(backend, watch), name=f"models {backend.name}")
        watch.asking.add(asked)
        asked.add_done_callback(watch.asking.discard)
        await asyncio.wait((asked,))
        return not asked.cancelled() and asked.result()

    def _fleet_changed(self, event: FleetEvent) -> None:
        if isinstance(event, BackendAdded):
            self._watch(event.backend)
        elif isinstance(event, BackendRemoved):
            self._unwatch(event.backend)

    def _watch(self, backend: Backend) -> None:
        watch = self._watches[backend] = _Watch()
        watch.task = asyncio.create_task(self._rounds(backend, watch), name=f"health {backend.name}")

    def _unwatch(self, backend: Backend) -> None:
        watch = self._watches.pop(backend, None)
        if watch is None:
            return
        for task in (watch.task, watch.check, *watch.asking):
            if task is not None:
                self._ending.add(task)
                task.add_done_callback(self._ending.discard)
                task.cancel()

    # --- rounds

    async def _rounds(self, backend: Backend, watch: _Watch) -> None:
        spread_s = min(self._settings.interval_s, SPREAD_PER_BACKEND_S * len(self._registry.backends))
        await self._sleep(self._rng.uniform(0.0, spread_s))
        while True:
            started_at = self._clock.now()
            await self._round(backend, watch)
            next_at = started_at + self._settings.interval_s * self._rng.uniform(1 - JITTER, 1 + JITTER)
            await self._sleep(max(next_at - self._clock.now(), 0.0))

    async def _round(self, backend: Backend, watch: _Watch) -> None:
        watch.models_due = watch.models_due or watch.round % MODELS_ROUNDS == 0
        watch.round += 1
        results = await asyncio.gather(self._check(backend, watch), self._poll_metrics(backend), return_exceptions=True)
        for result in results:
            # A bug met with one answer must not end the watch over this backend for ever.
            if isinstance(result, Exception):
                logger.error("a health round of %s failed", backend.name, exc_info=result)

    async def _check(self, backend: Backend, watch: _Watch) -> None:
        try:
            await self._ask_health(backend)
        except PollFailed as failure:
            self._failed(backend, watch, str(failure), self._settings.unhealthy_after)
            return
        watch.failures = 0
        watch.successes += 1
        backend.check_ok = True
        # Where nobody else serves its models, one good check is enough: it is the only hope.
        returns = backend.state is State.STARTING or (
            backend.state is State.DOWN
            and (watch.successes >= self._settings.healthy_after or not self._registry.others_serve(backend))
        )
        if watch.models_due or returns:
            # Before it serves: an engine that comes back with another model must not get requests for the old one.
            asked = watch.models_asked
            told = await self._poll_models(backend, watch)
            watch.models_due = not told or watch.models_asked != asked
        # The state is looked at again: check_now may have found it dead meanwhile.
        if returns and watch.failures == 0 and backend.state in (State.STARTING, State.DOWN):
            self._registry.set_state(backend, State.UP, "")

    async def _checked_now(self, backend: Backend, watch: _Watch) -> bool:
        try:
            await self._ask_health(backend)
        except PollFailed as failure:
            self._failed(backend, watch, str(failure), 1)
            return False
        return True

    def _failed(self, backend: Backend, watch: _Watch, why: str, enough: int) -> None:
        watch.successes = 0
        watch.failures += 1
        backend.check_ok = False
        if backend.state in (State.STARTING, State.DOWN):
            self._registry.set_state(backend, backend.state, why)
        elif watch.failures >= enough:
            self._registry.set_state(backend, State.DOWN, why)

    # --- questions

    async def _ask_health(self, backend: Backend) -> None:
        """Any status below 500 is a sign of life: other servers than vLLM have no /health."""
        async with self._get(backend, "/health") as response:
            if response.status >= 500:
                raise PollFailed(f"/health answers {response.status}")

    async def _poll_models(self, backend: Backend, watch: _Watch) -> bool:
        """True if the engine told its models."""
        try:
            async with self._get(backend, "/v1/models") as response:
                if response.status != 200:
                    raise PollFailed(f"/v1/models answers {response.status}")
                body = await _read(response, MODELS_LIMIT_BYTES)
            faults: list[str] = []
            entries = read_models(body, faults)
        except (PollFailed, BadModels) as failure:
            if watch.models_problem != str(failure):
                watch.models_problem = str(failure)
                logger.warning("backend %s does not tell its models: %s", backend.name, failure)
            return False
        problem = "; ".join(faults)
        if problem and watch.models_problem != problem:
            logger.warning("backend %s tells of models that cannot be used: %s", backend.name, problem)
        watch.models_problem = problem
        self._registry.set_models(backend, entries)
        return True

    async def _poll_metrics(self, backend: Backend) -> None:
        try:
            async with self._get(backend, "/metrics") as response:
                if response.status != 200:
                    return
                text = await _read(response, METRICS_LIMIT_BYTES)
        except PollFailed:
            return  # the report's age shows it
        report = parse(text)
        if backend not in self._registry or report == _NOTHING_KNOWN:
            return
        report.at = self._clock.now()
        before = backend.report
        backend.report = report
        if _restarted(before, report):
            before = EngineReport()
            self._on_restart(backend)
        self._on_report(backend, before, report)

    @asynccontextmanager
    async def _get(self, backend: Backend, path: str) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer's head, within timeout_s for all that is done with it. PollFailed in place of what aiohttp raises;
        a redirect is not followed, as it would carry the key elsewhere."""
        assert self._session is not None
        headers = {"Authorization": f"Bearer {backend.api_key}"} if backend.api_key else None
        try:
            tls = self._contexts.of(backend.tls_ca, backend.tls_verify) if backend.url.startswith("https:") else True
            async with asyncio.timeout(None) as limit:
                timer = self._clock.call_later(self._settings.timeout_s, limit.reschedule, 0)
                try:
                    async with self._session.get(
                        backend.url + path, headers=headers, allow_redirects=False, ssl=tls
                    ) as response:
                        yield response
                finally:
                    timer.cancel()
        except TimeoutError:
            raise PollFailed(f"{path} does not answer within {self._settings.timeout_s:g} s") from None
        except aiohttp.ClientConnectorCertificateError as error:
            why = getattr(error.certificate_error, "verify_message", "") or "it does not match"
            raise PollFailed(f"its certificate is not accepted: {why}") from None
        except aiohttp.ClientConnectorError as error:
            raise PollFailed(f"cannot connect: {_reason(error.os_error)}") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise PollFailed(f"{path} fails: {type(error).__name__}") from None

    async def _sleep(self, delay_s: float) -> None:
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        timer = self._clock.call_later(delay_s, _wake, woken)
        try:
            await woken
        finally:
            timer.cancel()


_NOTHING_KNOWN = EngineReport(running=None, waiting=None, kv_usage=None)
_COUNTERS = ("prefix_queries", "prefix_hits", "prefill_count", "prompt_tokens")


def _restarted(before: EngineReport, now: EngineReport) -> bool:
    """Another process answers: its counters began anew, or its start is another."""
    if before.started_at is not None and now.started_at is not None and before.started_at != now.started_at:
        return True
    for name in _COUNTERS:
        earlier, later = getattr(before, name), getattr(now, name)
        if earlier is not None and later is not None and later < earlier:
            return True
    return False


async def _read(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    """The whole body, or PollFailed past the limit."""
    parts = []
    length = 0
    async for part in response.content.iter_any():
        length += len(part)
        if length > limit_bytes:
            raise PollFailed(f"an answer of more than {limit_bytes} bytes")
        parts.append(part)
    return b"".join(parts)


def _reason(error: OSError) -> str:
    """In the system's words: asyncio's own text repeats the address, that of a failed look-up has no errno."""
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or type(error).__name__


def _wake(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)
