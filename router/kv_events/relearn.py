"""Asks an engine to tell again what it has cached of a prompt, where nothing else tells what was cached before we came.

vLLM 0.26 and later re-announce the cached blocks of a request that says `kv_cache_report_mode = "full"`. Clients'
requests are never changed, so it is a request of our own, right after a client's whose answer showed more cached tokens
than are known: the cached tokens and one more as the prompt, and one token of answer, so that it computes two tokens
and stores no block.

An announcement looks like blocks that are stored, and the index counts references, as an engine may have a block twice
and remove it twice. So each announced block is taken out once before it is put in: one that was known has as many
references as before. Everybody else who follows this engine counts the known ones once too often, until it evicts them:
hence it is switched on where one process follows the engines, and asks only engines without replay, from which nobody
can hear the announcement again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import msgspec
import orjson

from router.backends.backend import Backend
from router.backends.registry import BackendRemoved, FleetEvent, Registry
from router.clock import Clock
from router.kv_events.intake import KvEventIntake
from router.metrics import Metrics
from router.tls import ClientContexts

logger = logging.getLogger(__name__)

# Of a batch that is looked at, some 10 ms/MiB on the loop. An announcement of the longest prompt has 0.4 MiB.
PAYLOAD_LIMIT_BYTES: Final = 1024 * 1024
UNHEARD_LIMIT: Final = 3  # requests in a row that were answered and not announced: this engine cannot


@dataclass(frozen=True, slots=True)
class RelearnSettings:
    """Times in seconds."""

    enabled: bool = True
    interval_s: float = 0.5  # from the end of one request to the next of the same engine
    open_limit: int = 4  # over all engines; of one engine there is never more than one
    prompt_limit_tokens: int = 65_536  # cached ones
    answer_limit_s: float = 10.0
    announcement_limit_s: float = 5.0  # from the answer to the events of its step


class _Engine:
    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.not_before = float("-inf")
        self.unheard = 0


class Relearner:
    """From its making to `stop`, on the loop's thread."""

    def __init__(
        self,
        registry: Registry,
        clock: Clock,
        intake: KvEventIntake,
        session: aiohttp.ClientSession,
        settings: RelearnSettings,
        metrics: Metrics | None = None,
        contexts: ClientContexts | None = None,
    ) -> None:
        self._clock = clock
        self._intake = intake
        self._session = session
        self._settings = settings
        self._metrics = metrics or Metrics()
        self._contexts = contexts or ClientContexts()
        self._engines: dict[Backend, _Engine] = {}  # those that were asked
        self._unsubscribe = registry.subscribe(self._fleet_changed)
        self._open: set[asyncio.Task[None]] = set()
        self.asked = 0
        self.announced = 0  # of those asked

    async def stop(self) -> None:
        """No request is left."""
        self._unsubscribe()
        for backend in tuple(self._engines):
            self._drop(backend)
        await self.idle()

    async def idle(self) -> None:
        """When each request that was begun is over."""
        while self._open:
            await asyncio.gather(*self._open, return_exceptions=True)

    def restarted(self, backend: Backend) -> None:
        """Another process answers for it, which may be able to announce."""
        self._drop(backend)

    def offer(
        self,
        backend: Backend,
        model: str,
        ids: Sequence[int],
        cached_tokens: int,
        lora: str | None = None,
        salt: str | None = None,
    ) -> bool:
        """Whether it asks. `ids`: a text prompt that this engine just answered, of which it reported `cached_tokens`.
        `lora`: the adapter behind `model`. `salt`: its cache_salt."""
        settings = self._settings
        if not settings.enabled or not 0 < cached_tokens < min(len(ids), settings.prompt_limit_tokens):
            return False
        engine = self._engines.get(backend)
        if engine is not None and (
            engine.task is not None or engine.unheard >= UNHEARD_LIMIT or self._clock.now() < engine.not_before
        ):
            return False
        if len(self._open) >= settings.open_limit or not self._intake.relearns(backend):
            return False
        if engine is None:
            engine = self._engines[backend] = _Engine()
        self.asked += 1
        self._metrics.kv_events[backend.name, "relearn_asked"] += 1
        prompt = list(ids[: cached_tokens + 1])
        engine.task = asyncio.create_task(
            self._ask(backend, engine, model, prompt, lora, salt), name=f"relearn {backend.name}"
        )
        self._open.add(engine.task)
        engine.task.add_done_callback(self._open.discard)
        return True

    def _fleet_changed(self, event: FleetEvent) -> None:
        if isinstance(event, BackendRemoved):
            self._drop(event.backend)

    def _drop(self, backend: Backend) -> None:
        engine = self._engines.pop(backend, None)
        if engine is not None and engine.task is not None:
            engine.task.cancel()

    async def _ask(
        self, backend: Backend, engine: _Engine, model: str, prompt: list[int], lora: str | None, salt: str | None
    ) -> None:
        announcement = Announcement(prompt, lora)
        self._intake.rewrite(backend, announcement.taken_out_first)
        try:
            if await self._send(backend, model, prompt, salt):
                heard = await self._within(self._settings.announcement_limit_s, announcement.heard.wait)
                self.announced += heard
                self._metrics.kv_events[backend.name, "relearn_announced"] += heard
                engine.unheard = 0 if heard else engine.unheard + 1
                if engine.unheard == UNHEARD_LIMIT:
                    logger.info("backend %s does not announce cached blocks: it is not asked again", backend.name)
        finally:
            engine.task = None
            engine.not_before = self._clock.now() + self._settings.interval_s
            if self._engines.get(backend, engine) is engine:  # else that of the next process is under way already
                self._intake.rewrite(backend, None)

    async def _send(self, backend: Backend, model: str, prompt: list[int], salt: str | None) -> bool:
        """Whether it was answered; any other answer is as good as none."""
        body: dict[str, Any] = {
            "model": model,
            "prompt": prompt,
            "max_tokens": 1,
            "vllm_xargs": {"kv_cache_report_mode": "full"},
        }
        if salt is not None:
            body["cache_salt"] = salt
        headers = {"Content-Type": "application/json"}
        if backend.api_key:
            headers["Authorization"] = f"Bearer {backend.api_key}"

        status = 0

        async def post() -> None:
            nonlocal status
            tls = self._contexts.of(backend.tls_ca, backend.tls_verify) if backend.url.startswith("https:") else True
            async with self._session.post(
                f"{backend.url}/v1/completions",
                data=orjson.dumps(body),
                headers=headers,
                allow_redirects=False,
                ssl=tls,
            ) as response:
                status = response.status

        with contextlib.suppress(aiohttp.ClientError, OSError, ValueError):
            await self._within(self._settings.answer_limit_s, post)
        return status == 200

    async def _within(self, limit_s: float, wait: Callable[[], Any]) -> bool:
        try:
            async with asyncio.timeout(None) as limit:
                timer = self._clock.call_later(limit_s, limit.reschedule, 0)
                try:
                    await wait()
                finally:
                    timer.cancel()
        except TimeoutError:
            return False
        return True


class Announcement:
    """What is expected of the engine's next batches: cached blocks of this prompt, from its first."""

    def __init__(self, prompt: list[int], lora: str | None) -> None:
        self.heard = asyncio.Event()
        self._prompt = prompt
        self._lora = lora

    def taken_out_first(self, payload: bytes) -> bytes:
        """A batch in which each announced block is removed before it is stored. One that announces nothing stays as it
        is, one that is no batch too: whoever applies it will say so."""
        if len(payload) > PAYLOAD_LIMIT_BYTES:
            return payload
        try:
            batch = msgspec.msgpack.decode(payload)
            rewritten: list[Any] = []
            for event in batch[1]:
                if self._announces(event):
                    rewritten.append(_removal(event))
                rewritten.append(event)
            if len(rewritten) == len(batch[1]):
                return payload
            encoded = msgspec.msgpack.encode([batch[0], rewritten, *batch[2:]])
        except (msgspec.MsgspecError, TypeError, KeyError, IndexError, OverflowError):
            return payload
        self.heard.set()
        return encoded

    def _announces(self, event: Any) -> bool:
        # Releases that can announce write maps. A prompt like it that is computed just now cannot be told from it: of
        # its blocks a second copy is not counted, which may hide them too early and never keeps them too long.
        if (
            not isinstance(event, dict)
            or event.get("type") != "BlockStored"
            or event.get("parent_block_hash") is not None
        ):
            return False
        tokens = event["token_ids"]
        return bool(tokens) and event.get("lora_name") == self._lora and tokens == self._prompt[: len(tokens)]


def _removal(event: dict[str, Any]) -> dict[str, Any]:
    kept = ("block_hashes", "medium", "group_idx")
    return {"type": "BlockRemoved"} | {key: event[key] for key in kept if key in event}
