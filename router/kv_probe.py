"""What `kvgate check --probe` asks for kvaware: whether each engine's KV events tell what it has really computed.

The parts of the gateway that follow events and count tokens are run for a moment, and one completion of a few blocks
is sent to each engine; its answer and its events have to agree.
"""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import orjson

from router.backends.asking import ask
from router.backends.backend import Backend, State
from router.backends.health import poll_session
from router.backends.probe import Finding, Probed, cached_tokens_of
from router.backends.registry import Registry
from router.clock import SystemClock
from router.config import BackendConfig, Config
from router.index.kv_holdings import KvHoldings
from router.kv_events.intake import KvEventIntake
from router.kv_events.rank_feed import FeedState
from router.kv_events.settings import IntakeSettings
from router.metrics import Metrics
from router.tls import ClientContexts
from router.tokens.answers import Answer, NoTokens
from router.tokens.following import FleetTokens
from router.tokens.tokens import TokensSettings

INDEX_BYTES: Final = 64 * 1024 * 1024
BLOCKS: Final = 3  # of the completion that is sent
IDS: Final = (20, 220)  # of its prompt: in every vocabulary, and seldom of special tokens
ANSWER_LIMIT_BYTES: Final = 1024 * 1024
AT_ONCE: Final = 8
LOOK_S: Final = 0.05  # between two looks at what has come


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds: for the events to flow, for a tokenizer to be read and compared, for a completion, for its events."""

    following_s: float = 15.0
    tokens_s: float = 60.0
    completion_s: float = 60.0
    events_s: float = 5.0


async def probe_caches(config: Config, results: Sequence[Probed], patience: Patience = Patience()) -> None:
    """Add findings to `results`, which are those of backends.probe for the backends of `config`, in their order. Those
    that are out of reach or have a finding about their events are left alone."""
    loop = asyncio.get_running_loop()
    clock, contexts, metrics = SystemClock(loop), ClientContexts(), Metrics()
    registry, holdings = Registry(clock), KvHoldings(INDEX_BYTES)
    asked: list[tuple[BackendConfig, Probed, Backend]] = []
    for wanted, result in zip(config.backends, results, strict=True):
        if not result.entries or wanted.kv_events == "off" or result.no_events:
            continue
        backend = registry.add(
            wanted.name,
            wanted.url,
            api_key=wanted.api_key,
            models=wanted.models,
            tls_ca=wanted.tls_ca,
            tls_verify=wanted.tls_verify,
            kv_events=wanted.kv_events,
        )
        registry.set_models(backend, result.entries)
        registry.set_state(backend, State.UP, "")
        asked.append((wanted, result, backend))
    intake = KvEventIntake(registry, clock, poll_session, holdings, IntakeSettings(), metrics, contexts)
    await intake.start()
    tokens = FleetTokens(registry, clock, loop, poll_session, contexts, _token_settings(config))
    limit = asyncio.Semaphore(AT_ONCE)
    session = poll_session()
    try:

        async def question(result: Probed, backend: Backend) -> None:
            async with limit:
                await _Question(session, contexts, intake, holdings, result, backend, patience).ask()

        await asyncio.gather(*(question(result, backend) for _, result, backend in asked))
        await _ask_tokens(tokens, asked, patience)
    finally:
        await session.close()
        await tokens.close()
        await intake.stop()
        registry.close()


def _token_settings(config: Config) -> TokensSettings:
    kvaware = config.routing.kvaware
    return TokensSettings(tokenization=kvaware.tokenization, folder=kvaware.tokenizer, folders=config.models.tokenizers)


async def _ask_tokens(
    fleet: FleetTokens, asked: Sequence[tuple[BackendConfig, Probed, Backend]], patience: Patience
) -> None:
    """A model's tokens are one finding, told of the first backend that serves it."""
    told: set[str] = set()
    for _, result, backend in asked:
        for model in backend.models:
            if model in told:
                continue
            told.add(model)

            def settled(model: str = model) -> bool:
                return fleet.tokens.state(model)["source"] not in ("loading", "testing")

            await _until(settled, patience.tokens_s)
            state = fleet.tokens.state(model)
            if state["source"] == "engine" and (why := await _untokenized(fleet, model, patience)) is not None:
                result.findings.append(
                    Finding(
                        backend.name,
                        f"tokens of model {model}: engines are asked, and their /tokenize is of no use: {why}",
                        "give the model's folder (routing.kvaware.tokenizer), or mend /tokenize",
                    )
                )
            if state["source"] == "off" or state["check"] == "mismatch" or not settled():
                result.findings.append(
                    Finding(
                        backend.name,
                        f"tokens of model {model}: {state['source']}, {state['detail'] or 'not ready in time'}",
                        "correct routing.kvaware.tokenizer (or models.tokenizers): the folder that the engine serves",
                    )
                )


async def _untokenized(fleet: FleetTokens, model: str, patience: Patience) -> str | None:
    """Why the engines do not count a short prompt; None where they do."""
    answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    deadline = asyncio.get_running_loop().time() + patience.events_s
    question = fleet.tokens.ask(model, "/v1/completions", b'{"prompt": "How many?"}', deadline, answered.set_result)
    answer = question.answer if question.answer is not None else await answered
    return (answer.detail or answer.why.value) if isinstance(answer, NoTokens) else None


async def _until(condition: Callable[[], bool], within_s: float) -> bool:
    end = asyncio.get_running_loop().time() + within_s
    while not condition():
        if asyncio.get_running_loop().time() >= end:
            return False
        await asyncio.sleep(LOOK_S)
    return True


class _Question:
    """One engine: do its events flow, and do they tell what it computes?"""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        contexts: ClientContexts,
        intake: KvEventIntake,
        holdings: KvHoldings,
        result: Probed,
        backend: Backend,
        patience: Patience,
    ) -> None:
        self._session = session
        self._contexts = contexts
        self._intake = intake
        self._holdings = holdings
        self._result = result
        self._backend = backend
        self._patience = patience

    async def ask(self) -> None:
        await _until(self._settled, self._patience.following_s)
        ranks = self._intake.describe(self._backend)
        for rank in ranks:
            state = FeedState(rank["state"])
            which = "" if rank["rank"] is None or len(ranks) == 1 else f" of rank {rank['rank']}"
            if state is FeedState.INCOMPLETE:
                self._found(f"KV events{which} are incomplete: {rank['why']}", "see docs/kvaware.md")
            elif state is not FeedState.LIVE:
                self._found(
                    f"KV events{which} do not flow ({state.value}): {rank['why']}",
                    "can this host reach that port of the engine?",
                )
        if all(rank["state"] in (FeedState.LIVE, FeedState.INCOMPLETE) for rank in ranks):
            await self._compare()

    def _settled(self) -> bool:
        states = {rank["state"] for rank in self._intake.describe(self._backend)}
        return bool(states) and states <= {FeedState.LIVE, FeedState.INCOMPLETE, FeedState.OFF}

    def _found(self, problem: str, cure: str) -> None:
        self._result.findings.append(Finding(self._backend.name, problem, cure))

    async def _compare(self) -> None:
        size = self._holdings.block_tokens(self._backend) or self._result.block_size_tokens or 16
        rng = random.Random()
        ids = [rng.randrange(*IDS) for _ in range(BLOCKS * size + 1)]
        first = await self._complete(ids)
        if first is None:
            return

        promised = len(ids) // size * size

        def held() -> bool:
            return self._holdings.leading_tokens(self._backend, array("I", ids)) == promised

        if not await _until(held, self._patience.events_s):
            self._found(
                "its KV events do not tell of a prompt that it has just computed",
                "is prefix caching on, and does nothing else publish at that endpoint?",
            )
            return
        reported = cached_tokens_of(await self._complete([*ids, *ids[:2]]))
        if reported is not None and abs(reported - promised) > size and len(self._intake.ranks_of(self._backend)) == 1:
            self._found(
                f"it reports {reported} cached tokens where its KV events promise {promised}",
                'kvaware will place its requests by the mirror of its cache; set kv_events = "off" for this backend',
            )

    async def _complete(self, ids: list[int]) -> Any:
        """The answer to a completion of one token; None, with a finding, where there is none."""
        backend = self._backend
        base = [name for name, entry in backend.models.items() if entry.get("parent") is None]
        body = orjson.dumps({"model": (base or list(backend.models))[0], "prompt": ids, "max_tokens": 1})
        try:
            async with asyncio.timeout(self._patience.completion_s):
                status, content = await ask(
                    self._session, self._contexts, backend, "/v1/completions", limit_bytes=ANSWER_LIMIT_BYTES, body=body
                )
            if status == 200:
                return orjson.loads(content)
            why = f"answers {status}"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            why = f"fails with {type(error).__name__}"
        self._found(f"cannot compare its KV events: a completion of one token {why}", "see the engine's log")
        return None
