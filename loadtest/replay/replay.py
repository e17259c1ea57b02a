"""One replay: the trace's requests at their times to one URL, streamed, each answer checked."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final

import aiohttp
import orjson

from loadtest.chat_stream import ChatStream, StreamFault, refusal
from loadtest.replay import engine_counters, target
from loadtest.replay.bodies import read_body
from loadtest.replay.cache_aware import CacheAware
from loadtest.replay.closed_loop import closed_loop
from loadtest.replay.engine_counters import Counters, EngineShare, ScrapeFailed
from loadtest.replay.open_loop import OpenLoop, due_times
from loadtest.replay.progress import FRAME_S, Progress
from loadtest.replay.prompt_text import PromptText
from loadtest.replay.report import Report, Tally
from loadtest.replay.trace import Trace, TraceRequest
from router.clock import SystemClock

KEPT_ALIVE_S: Final = 3.0  # below the 5 s after which vLLM closes an idle connection
MAX_ERROR_BYTES: Final = 65_536


@dataclass(frozen=True, slots=True)
class Settings:
    """What is asked of a replay. URLs without a path; times in seconds."""

    target: str
    engines: tuple[str, ...] = ()
    model: str | None = None
    api_key: str | None = None
    speed: float = 1.0
    spread: bool = False
    limit_s: float | None = None  # of the replay: what would be sent later is not part of it
    max_in_flight: int = 1000
    max_output_tokens: int | None = None
    request_timeout_s: float = 600.0
    salt: str = ""
    sessions: bool = True  # send x-session-id where the trace knows the session
    straight: CacheAware | None = None  # who chooses an engine for each request, in the place of `target`
    turns_wait: bool = False  # a session's next request is sent when the one before it has ended, and not earlier
    seed: int | None = None  # moves each arrival by up to the mean distance of two


@dataclass(frozen=True, slots=True)
class _Due:
    """A request and when it is due, seconds from the start."""

    at_s: float
    request: TraceRequest


async def measure_rate(trace: Trace, settings: Settings, *, clients: int, seconds: float) -> float:
    """Requests a second that so many clients get answered who wait for each answer. TargetFailed if it cannot begin."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_ALIVE_S)
    async with aiohttp.ClientSession(connector=connector) as session:
        run = _Run(session, trace, settings, Progress(sys.stderr), asyncio.Event())
        return await run.closed_loop(clients, seconds)


async def replay(trace: Trace, settings: Settings, progress: Progress, stop: asyncio.Event) -> Report:
    """Until every answer is there, or `stop` is set: then what is under way is cut, and the report says so.

    TargetFailed or ScrapeFailed if it cannot begin; what fails after that is counted.
    """
    headers = {"authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_ALIVE_S)
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
        return await _Run(session, trace, settings, progress, stop).run()


class _Run:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        trace: Trace,
        settings: Settings,
        progress: Progress,
        stop: asyncio.Event,
    ) -> None:
        self._session = session
        self._trace = trace
        self._settings = settings
        self._progress = progress
        self._stop = stop
        self._clock = SystemClock(asyncio.get_running_loop())
        self._tally = Tally()
        self._tasks: set[asyncio.Task[None]] = set()
        self._all_sent = asyncio.Event()
        self._calibration = ""
        self._last_of: dict[str, asyncio.Task[None]] = {}  # of each session

    async def run(self) -> Report:
        settings, session = self._settings, self._session
        model, text = await self._prepare()
        before = await asyncio.gather(*(engine_counters.scrape(session, url) for url in settings.engines))
        due, too_long = self._select(model.max_tokens)

        def send(number: int, due_at: float) -> None:
            request = due[number].request
            before = self._last_of.get(request.session) if settings.turns_wait and request.session else None
            task = asyncio.create_task(self._ask(request, text, model.name, due_at, before))
            if request.session:
                self._last_of[request.session] = task
            self._tasks.add(task)
            task.add_done_callback(lambda done: self._ended(done, loop))

        loop = OpenLoop(
            [one.at_s for one in due], self._clock, send, self._all_sent.set, max_in_flight=settings.max_in_flight
        )
        loop.start()
        await self._until_over(loop, due)
        took_s = self._clock.now() - loop.started_at
        interrupted = self._stop.is_set()
        engines, faults = await self._shares(before)
        return Report(
            trace=self._trace.name,
            target=settings.target,
            model=model.name,
            speed=settings.speed,
            calibration=self._calibration,
            requests=len(due),
            sent=loop.sent,
            not_sent=loop.not_sent,
            too_long=too_long,
            left=len(due) - loop.sent - loop.not_sent,
            late=loop.late,
            latest_s=loop.latest_s,
            took_s=took_s,
            interrupted=interrupted,
            tally=self._tally,
            engines=engines,
            engine_faults=faults,
        )

    async def closed_loop(self, clients: int, seconds: float) -> float:
        model, text = await self._prepare()
        fitting = [due.request for due in self._select(model.max_tokens)[0]]

        async def ask(request: TraceRequest) -> bool:
            failed = self._tally.failed
            await self._ask(request, text, model.name, self._clock.now())
            return self._tally.failed == failed

        within = Trace(self._trace.name, self._trace.block_tokens, tuple(fitting))
        return await closed_loop(within, ask, self._clock, clients=clients, seconds=seconds)

    async def _prepare(self) -> tuple[target.Model, PromptText]:
        settings = self._settings
        model = await target.find_model(self._session, settings.target, settings.model)
        asked = settings.engines[0] if settings.engines else settings.target
        scale, self._calibration = await target.measure_scale(
            self._session, asked, model.name, self._trace.block_tokens
        )
        return model, PromptText(self._trace.block_tokens, scale, settings.salt)

    def _select(self, max_tokens: int | None) -> tuple[list[_Due], int]:
        """What is due within the limit and fits the model, and how many did not fit."""
        settings, requests = self._settings, self._trace.requests
        times = due_times([request.at_s for request in requests], settings.speed, settings.spread)
        if settings.seed is not None and times:
            drawn, distance_s = Random(settings.seed), times[-1] / len(times)
            moved = sorted((at_s + drawn.random() * distance_s, number) for number, at_s in enumerate(times))
            times, requests = [at_s for at_s, _ in moved], tuple(requests[number] for _, number in moved)
        within = [
            _Due(at_s, request)
            for at_s, request in zip(times, requests, strict=True)
            if settings.limit_s is None or at_s < settings.limit_s
        ]
        fitting = [
            due
            for due in within
            if max_tokens is None or due.request.prompt_tokens + self._output_tokens(due.request) <= max_tokens
        ]
        return fitting, len(within) - len(fitting)

    def _output_tokens(self, request: TraceRequest) -> int:
        most = self._settings.max_output_tokens
        return request.output_tokens if most is None else min(request.output_tokens, most)

    async def _until_over(self, loop: OpenLoop, due: list[_Due]) -> None:
        """Show how far it is until all answers are there or it is stopped; nothing is under way afterwards."""
        span_s = due[-1].at_s if due else 0.0
        stopping = asyncio.create_task(self._stop.wait())
        try:
            while not (self._all_sent.is_set() and not self._tasks) and not self._stop.is_set():
                # Until something ends, but not longer than a frame.
                waiting = {stopping, *(self._tasks if self._all_sent.is_set() else ())}
                await asyncio.wait(waiting, timeout=FRAME_S, return_when=asyncio.FIRST_COMPLETED)
                self._progress.show(
                    self._clock.now() - loop.started_at,
                    span_s,
                    loop.sent,
                    len(due),
                    loop.in_flight,
                    self._tally.failed,
                    loop.not_sent,
                )
        finally:
            loop.stop()
            stopping.cancel()
            left = list(self._tasks)
            for task in left:
                task.cancel()
            await asyncio.gather(stopping, *left, return_exceptions=True)
            self._progress.close()

    def _ended(self, task: asyncio.Task[None], loop: OpenLoop) -> None:
        self._tasks.discard(task)
        loop.ended()
        if task.cancelled():
            self._tally.interrupted += 1
        elif error := task.exception():
            # A fault of ours, not the target's: it must not look like a quiet success.
            self._tally.error(f"this client: {type(error).__name__}")

    async def _ask(
        self,
        request: TraceRequest,
        text: PromptText,
        model: str,
        due_at: float,
        before: asyncio.Task[None] | None = None,
    ) -> None:
        """`before`: the request whose end this one waits for; its times count from then on."""
        if before is not None and not before.done():
            await asyncio.wait((before,))
            due_at = max(due_at, self._clock.now())
        prompt = text.prompt(request.block_ids, request.prompt_tokens)
        straight = self._settings.straight
        url = self._settings.target if straight is None else straight.choose(prompt)
        body = {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": self._output_tokens(request),
            "temperature": 0,
            "ignore_eos": True,  # the trace's number of tokens, whatever they say
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {"content-type": "application/json"}
        if request.session is not None and self._settings.sessions:
            headers["x-session-id"] = f"{self._trace.name}-{self._settings.salt}{request.session}"
        stream = ChatStream(due_at)
        now = self._clock.now
        try:
            async with self._session.post(
                f"{url}/v1/chat/completions",
                data=orjson.dumps(body),
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=self._settings.request_timeout_s),
            ) as response:
                if response.status != 200:
                    self._tally.error(refusal(response.status, await read_body(response, MAX_ERROR_BYTES)))
                    return
                async for data in response.content.iter_any():
                    stream.feed(data, now())
                stream.end()
        except StreamFault as fault:
            self._tally.error(str(fault))
        except TimeoutError:
            self._tally.error(f"no end within {self._settings.request_timeout_s:g} s")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            self._tally.error(_kind(error))
        else:
            told = response.headers
            self._tally.answer(
                stream,
                request.prompt_tokens,
                now() - due_at,
                told.get("x-kvgate-backend", ""),
                told.get("x-kvgate-reason", ""),
                _whole_number(told.get("x-kvgate-matched", "")),
            )
        finally:
            if straight is not None:
                straight.ended(url)

    async def _shares(self, before: list[Counters]) -> tuple[tuple[EngineShare, ...], tuple[str, ...]]:
        shares: list[EngineShare] = []
        faults: list[str] = []
        after = await asyncio.gather(
            *(engine_counters.scrape(self._session, url) for url in self._settings.engines), return_exceptions=True
        )
        for url, earlier, later in zip(self._settings.engines, before, after, strict=True):
            try:
                if isinstance(later, BaseException):
                    raise later
                shares.append(engine_counters.share(url, earlier, later))
            except ScrapeFailed as failed:
                faults.append(str(failed))
        return tuple(shares), tuple(faults)


def _kind(error: Exception) -> str:
    """A name for it without addresses: the same fault has the same name."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"no connection: {error.os_error.strerror or type(error.os_error).__name__}"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the answer was cut"
    return type(error).__name__


def _whole_number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else 0


def new_salt(now: Callable[[], float] = time.time) -> str:
    """For a run that shares no prompt with those before, so that warm caches do not know it."""
    return f"{int(now() * 1000):x}-"
