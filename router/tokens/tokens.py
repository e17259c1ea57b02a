"""The one to ask: for each model, where its tokens come from, and whether that can be trusted.

A model's way is found once: `local` reads the folder in a thread, is compared with an engine's /tokenize (self_test.py)
and then serves, or is off with the difference named; `engine` asks the engines for every request; `auto` takes local
where a folder is known and agrees with the engines, and the engines otherwise. A question never waits longer than its
deadline, and what is full or late is answered with the word for it: routing then goes on without tokens.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from array import array
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from router.backends.backend import Backend
from router.clock import Clock, TimerHandle
from router.metrics import Histogram
from router.metrics_exporter import TokenFigures
from router.tokens import self_test
from router.tokens.answers import Answer, NoTokens, Refused, TokenIds, Why
from router.tokens.engine import EngineTokenizer, NoTokenizeRoute, Post, engine_question, read_answer
from router.tokens.model_folder import BadFolder, is_model_folder
from router.tokens.offload import Job, Offload
from router.tokens.question import ChatPrompt, GivenIds, Prompt, TextPrompt, read_prompt
from router.tokens.segment_cache import SegmentCache

if TYPE_CHECKING:
    from router.tokens.local import LocalTokenizer, LocalTokenizers

log = logging.getLogger(__name__)

FIRST_RETRY_S: Final = 2.0
LONGEST_RETRY_S: Final = 60.0
TOLD_LIMIT: Final = 16  # lines about one model, each once
WAIT_BUCKETS: Final = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
# Models that engines render by their own code, and for /tokenize by the template: the ids there are not the prompt's.
_HARMONY: Final = ("gpt-oss", "gpt_oss")


@dataclass(frozen=True, slots=True)
class TokensSettings:
    """`tokenization`: auto | local | engine | off. `folder` is for every model that `folders` does not name."""

    tokenization: str = "auto"
    folder: str | None = None
    folders: Mapping[str, str] = field(default_factory=dict)
    threads: int = 2
    queue_limit: int = 64  # requests that wait for a thread or run in one
    queue_bytes: int = 64 * 1024 * 1024  # of their bodies
    body_limit_bytes: int = 16 * 1024 * 1024
    text_limit_chars: int = 8 * 1024 * 1024
    template_time_limit_s: float = 2.0
    cache_bytes: int = 64 * 1024 * 1024
    engine_time_limit_s: float = 1.0
    engine_limit: int = 8  # questions to /tokenize that are open at a time
    model_limit: int = 256  # models that are followed; those of one folder share its tokenizer of 20 to 100 MB
    sample_every: int = 1_000


class Phase(StrEnum):
    LOADING = "loading"
    TESTING = "testing"
    LOCAL = "local"
    ENGINE = "engine"
    OFF = "off"


class _Model:
    __slots__ = (
        "base",
        "detail",
        "folder",
        "local",
        "name",
        "phase",
        "problem",
        "retry_s",
        "root",
        "space",
        "task",
        "timer",
        "told",
        "unchecked",
        "verdict",
    )

    def __init__(self, name: str, root: str, base: str, folder: str | None, space: int) -> None:
        self.name = name
        self.root = root
        self.base = base
        self.folder = folder
        self.space = space  # in the cache, for answers of engines
        self.phase = Phase.OFF
        self.detail = ""
        self.problem = ""  # why the last question to an engine had no answer; empty after one that had
        self.unchecked: dict[Backend, None] = {}  # came or restarted since the check, in order
        self.told: set[str] = set()  # lines of the log that were written already
        self.local: LocalTokenizer | None = None
        self.verdict: self_test.Verdict | None = None
        self.task: asyncio.Task[None] | None = None
        self.timer: TimerHandle | None = None
        self.retry_s = FIRST_RETRY_S

    def tell(self, level: int, text: str) -> None:
        """Once for each text, however often the model is compared again."""
        if text not in self.told and len(self.told) < TOLD_LIMIT:
            self.told.add(text)
            log.log(level, "model %r: %s", self.name, text)

    def stop(self) -> None:
        if self.task is not None:
            self.task.cancel()
            self.task = None
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


@dataclass(frozen=True, slots=True)
class _ForEngine:
    """The body of a question to /tokenize, and what it does not ask."""

    body: bytes
    salt: str | None


class Question:
    """One request that waits for its ids. `answer` is set if it was known at once: `done` is then never called."""

    __slots__ = ("_timer", "answer", "asked_at", "done", "job", "task")

    def __init__(self, asked_at: float, done: Callable[[Answer], None]) -> None:
        self.asked_at = asked_at
        self.done = done
        self.answer: Answer | None = None
        self.job: Job | None = None
        self.task: asyncio.Task[None] | None = None
        self._timer: TimerHandle | None = None

    def wait(self, timer: TimerHandle) -> None:
        self._timer = timer

    def cancel(self) -> None:
        """The client left: `done` is not called any more. Harmless when it was answered."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.job is not None:
            self.job.cancel()
            self.job = None
        if self.task is not None:
            self.task.cancel()
            self.task = None


class Tokens:
    """Used from the loop's thread. `post` sends to one engine; `backends_of` gives the serving backends of a model."""

    def __init__(
        self,
        settings: TokensSettings,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        post: Post,
        backends_of: Callable[[str], Sequence[Backend]],
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._loop = loop
        self._offload = Offload(
            loop, threads=settings.threads, queue_limit=settings.queue_limit, queue_bytes=settings.queue_bytes
        )
        self._engine = EngineTokenizer(
            post, backends_of, clock, time_limit_s=settings.engine_time_limit_s, limit=settings.engine_limit
        )
        self._models: dict[str, _Model] = {}
        self._making = threading.Lock()
        self._tokenizers: LocalTokenizers | None = None
        self._closed = False
        self._full = False  # models were left out, and it was told
        self.cache = SegmentCache(settings.cache_bytes)
        self.answers: defaultdict[str, int] = defaultdict(int)  # by source, or by the word for why not
        self.wait = Histogram(WAIT_BUCKETS)  # seconds from the question to ids

    # -- models

    def learn(self, model: str, root: str = "", base: str = "") -> None:
        """The fleet serves this model; `root` is that of its /v1/models entry. For an adapter: its base model's, and
        `base` that model's name, whose configured folder is the adapter's too. Again with the same: nothing happens. It
        costs the loop nothing: folders are read in a thread."""
        base = base or model
        known = self._models.get(model)
        if known is not None:
            if (known.root, known.base) == (root, base):
                return
            self.forget(model)
        if self._closed:
            return
        if len(self._models) >= self._settings.model_limit:
            if not self._full:
                self._full = True
                log.warning("no tokens for model %r: %d models are followed already", model, len(self._models))
            return
        new = _Model(model, root, base, self._folder(base, root, model), self.cache.new_space())
        self._models[model] = new
        self._settle(new)

    def forget(self, model: str) -> None:
        gone = self._models.pop(model, None)
        if gone is not None:
            gone.stop()

    def configure(self, settings: TokensSettings) -> None:
        """Other folders, another way: models that they concern begin anew, and so does each whose folder was of no use,
        since it may have been mended. The sizes of queues, threads and the cache stay as they were made."""
        before, self._settings = self._settings, settings
        for known in list(self._models.values()):
            folder = self._folder(known.base, known.root, known.name)
            failed = folder is not None and known.phase in (Phase.ENGINE, Phase.OFF)
            if (
                (failed and settings.tokenization in ("auto", "local"))
                or folder != known.folder
                or settings.tokenization != before.tokenization
            ):
                self.forget(known.name)
                self.learn(known.name, known.root, known.base)

    def joined(self, backend: Backend) -> None:
        """It serves from now on: engines of one model may have been started with different templates, so each is
        compared. One that differs turns local tokenizing off, since nobody knows beforehand who gets a request."""
        for model in list(backend.models):
            known = self._models.get(model)
            if known is not None and known.folder is not None:
                known.unchecked[backend] = None
                self._check_others(known)

    def restarted(self, backend: Backend) -> None:
        """It came back, perhaps with another version or template: its models are compared again, with it too."""
        self._engine.forget_backend(backend.name)
        for model in list(backend.models):
            known = self._models.get(model)
            if known is None:
                continue
            if known.folder is not None:
                known.unchecked[backend] = None
            if known.phase is not Phase.LOADING and known.phase is not Phase.TESTING:
                known.stop()
                self._settle(known)

    def left(self, backend: Backend) -> None:
        """It is no more of the fleet: if it was the one that differed, the others may agree."""
        self._engine.forget_backend(backend.name)
        for known in list(self._models.values()):
            known.unchecked.pop(backend, None)
            if known.verdict is not None and known.verdict.state is self_test.State.MISMATCH:
                known.stop()
                self._settle(known)

    def close(self) -> None:
        self._closed = True
        for model in list(self._models):
            self.forget(model)
        self._offload.close()

    def state(self, model: str) -> dict[str, Any]:
        """For GET /backends. `source`: local | engine | loading | testing | off. `check` against the engine's own ids:
        verified | mismatch | unverified | pending, None where nothing was compared; `detail` says what is the matter.
        Where the model has a folder that serves: `folder`, and whether `chats` and the `cache` are on, or why not."""
        known = self._models.get(model)
        if known is None:
            return {"source": Phase.OFF.value, "check": None, "detail": "the model is not followed"}
        verdict = known.verdict
        told = (known.detail, verdict.detail if verdict is not None else "", known.problem)
        state: dict[str, Any] = {
            "source": known.phase.value,
            "check": verdict.state.value if verdict is not None else None,
            "detail": "; ".join(dict.fromkeys(text for text in told if text)),
        }
        if known.local is not None:
            state |= known.local.state()
        return state

    def states(self) -> dict[str, dict[str, Any]]:
        """Of every model that is followed."""
        return {model: self.state(model) for model in self._models}

    def figures(self) -> TokenFigures:
        """For the metrics, all of this process."""
        return TokenFigures(
            results=dict(self.answers),
            wait=self.wait,
            queued=self._offload.queued,
            cache_hit_tokens=self.cache.hit_tokens,
            cache_missed_tokens=self.cache.missed_tokens,
            cache_bytes=self.cache.memory_bytes(),
        )

    @property
    def engine_open(self) -> int:
        """Questions to engines that are not answered yet."""
        return self._engine.open

    def _folder(self, base: str, root: str, model: str) -> str | None:
        folders = self._settings.folders
        configured = folders.get(model) or folders.get(base) or self._settings.folder
        if configured is not None:
            return configured
        return root if root.startswith("/") else None

    def _settle(self, model: _Model) -> None:
        """Find the way for a model, anew."""
        mode = self._settings.tokenization
        model.local = model.verdict = None
        model.detail = model.problem = ""
        if mode == "off":
            model.phase, model.detail = Phase.OFF, "routing.kvaware.tokenization is off"
        elif any(word in f"{model.name} {model.root}".lower() for word in _HARMONY):
            self._off(model, "engines build this model's prompts by their own code, and /tokenize does not")
        elif mode == "engine":
            model.phase = Phase.ENGINE
        elif model.folder is None:
            if mode == "local":
                self._off(model, "no folder with its tokenizer is known: set routing.kvaware.tokenizer")
            else:
                model.phase, model.detail = Phase.ENGINE, "no folder with its tokenizer is known"
        else:
            model.phase = Phase.LOADING
            model.task = self._start(self._load(model, model.folder))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._loop.create_task(work)

    def _off(self, model: _Model, why: str) -> None:
        model.phase, model.detail = Phase.OFF, why
        model.tell(logging.WARNING, f"no tokens: {why}")

    async def _load(self, model: _Model, folder: str) -> None:
        configured = folder != model.root
        try:
            loaded = await self._in_thread(partial(self._read, folder, configured), 0)
        except BadFolder as error:
            self._give_up_local(model, str(error), loudly=configured)
            return
        except ImportError:
            self._give_up_local(model, "it needs the packages of kvgate[tokenizers]", loudly=configured)
            return
        except Refused as refused:  # the threads are busy
            model.detail = refused.detail
            self._later(model, partial(self._settle, model))
            return
        except Exception as error:  # a folder may hold anything: no defect in reading it leaves the model in between
            log.exception("the tokenizer of model %r could not be read", model.name)
            self._give_up_local(model, f"{type(error).__name__} while it was read", loudly=False)
            return
        model.local = loaded
        await self._test(model)

    def _read(self, folder: str, configured: bool) -> LocalTokenizer:
        """In a thread: the packages are first imported here, and only if a model needs them."""
        from router.tokens.local import LocalTokenizers

        _is_ready_folder(folder, configured)
        with self._making:
            if self._tokenizers is None:
                self._tokenizers = LocalTokenizers(
                    self.cache,
                    max_chars=self._settings.text_limit_chars,
                    time_limit_s=self._settings.template_time_limit_s,
                    sample_every=self._settings.sample_every,
                )
        return self._tokenizers.get(folder)

    def _give_up_local(self, model: _Model, why: str, *, loudly: bool) -> None:
        """`loudly`: somebody counts on it, so that it has to be mended."""
        auto = self._settings.tokenization == "auto"
        if auto:  # what the check found, the state tells beside it
            model.phase, model.detail = Phase.ENGINE, "" if model.verdict is not None else f"local: {why}"
        else:
            model.phase, model.detail = Phase.OFF, why
        if loudly or not auto:
            model.tell(logging.ERROR, f"local tokenizing is off: {why}")

    async def _test(self, model: _Model) -> None:
        model.phase = Phase.TESTING
        first = next(iter(model.unchecked), None)
        verdict = model.verdict = await self._compare(model, first)
        if first is not None:
            model.unchecked.pop(first, None)
        if verdict.state is self_test.State.PENDING:
            model.tell(logging.WARNING, f"no tokens until they are compared with an engine's: {verdict.detail}")
            self._later(model, lambda: setattr(model, "task", self._start(self._test(model))))
            return
        model.retry_s = FIRST_RETRY_S
        if verdict.state is self_test.State.MISMATCH:
            self._differs(model)
            return
        model.phase, model.detail = Phase.LOCAL, ""
        if verdict.chats_only:
            model.tell(logging.WARNING, f"local tokenizing is for chats only: {verdict.detail}")
        if verdict.state is self_test.State.UNVERIFIED:
            model.tell(logging.WARNING, f"local tokenizing is not verified: {verdict.detail}")
        model.task = None
        self._check_others(model)

    def _differs(self, model: _Model) -> None:
        assert model.verdict is not None
        model.local = None
        self._give_up_local(model, model.verdict.detail, loudly=True)

    def _check_others(self, model: _Model) -> None:
        if model.unchecked and model.phase is Phase.LOCAL and model.task is None:
            model.task = self._start(self._compare_others(model))

    async def _compare_others(self, model: _Model) -> None:
        """With each engine that came since; one that cannot be asked now goes to the end, and all wait a while."""
        while model.unchecked:
            backend = next(iter(model.unchecked))
            verdict = await self._compare(model, backend)
            asked = backend in model.unchecked  # else it left meanwhile
            model.unchecked.pop(backend, None)
            if verdict.state is self_test.State.PENDING:
                if asked:
                    model.unchecked[backend] = None
                self._later(model, partial(self._check_others, model))
                break
            model.retry_s = FIRST_RETRY_S
            if not asked:
                continue
            if verdict.state is self_test.State.MISMATCH or (
                verdict.chats_only and model.verdict is not None and not model.verdict.chats_only
            ):
                detail = f"backend {backend.name}: {verdict.detail}"
                model.verdict = replace(verdict, detail=detail)
                if verdict.state is self_test.State.MISMATCH:
                    self._differs(model)
                    return
                model.tell(logging.WARNING, f"local tokenizing is for chats only: {detail}")
        model.task = None

    async def _compare(self, model: _Model, only: Backend | None) -> self_test.Verdict:
        local = model.local
        assert local is not None

        async def ours(prompt: ChatPrompt | TextPrompt) -> array[int]:
            ids: TokenIds = await self._in_thread(partial(local.tokenize, prompt), 0)
            return ids.ids

        async def engines(prompt: ChatPrompt | TextPrompt) -> array[int]:
            return read_answer(await self._engine.ask(model.name, engine_question(model.name, prompt), only))

        try:
            return await self_test.compare(ours, engines)
        except Exception as error:  # a defect of ours, or of the tokenizer's
            log.exception("the self-test of model %r failed", model.name)
            return self_test.Verdict(self_test.State.MISMATCH, f"{type(error).__name__} in the self-test")

    def _later(self, model: _Model, again: Callable[[], None]) -> None:
        if model.timer is not None:
            model.timer.cancel()
        model.timer = self._clock.call_later(model.retry_s, again)
        model.retry_s = min(model.retry_s * 2, LONGEST_RETRY_S)

    async def _in_thread(self, work: Callable[[], Any], size: int) -> Any:
        future: asyncio.Future[Any] = self._loop.create_future()

        def done(result: Any) -> None:
            if future.done():
                return
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

        job = self._offload.submit(work, size, done)
        if job is None:
            raise Refused(Why.BUSY, "too many prompts wait for a thread")
        try:
            return await future
        except asyncio.CancelledError:
            job.cancel()
            raise

    # -- questions

    def ask(self, model: str, path: str, body: bytes, deadline: float, done: Callable[[Answer], None]) -> Question:
        """The ids of this request's prompt. `deadline` is an instant of the clock; `done` is called on the loop, once,
        not later than that, unless the answer was there at once (Question.answer) or the question was cancelled."""
        now = self._clock.now()
        question = Question(now, done)
        known = self._models.get(model)
        if known is None or known.phase is Phase.OFF:
            return self._at_once(question, Why.OFF, "no tokens for this model")
        if known.phase is Phase.LOADING or known.phase is Phase.TESTING:
            return self._at_once(question, Why.STARTING, "the model's tokenizer is not ready")
        if len(body) > self._settings.body_limit_bytes:
            return self._at_once(question, Why.TOO_BIG, "the body is too long to be tokenized")
        if now >= deadline:
            return self._at_once(question, Why.LATE, "the deadline is over")
        if known.phase is Phase.LOCAL:
            assert known.local is not None
            work: Callable[[], Any] = partial(_answer, known.local, path, body, known.verdict)
        else:
            work = partial(_engine_prompt, known.name, path, body)
        question.job = self._offload.submit(work, len(body), partial(self._worked, question, known))
        if question.job is None:
            return self._at_once(question, Why.BUSY, "too many prompts wait for a thread")
        question.wait(self._clock.call_later(deadline - now, self._late, question))
        return question

    def _at_once(self, question: Question, why: Why, detail: str) -> Question:
        self.answers[why] += 1
        question.answer = NoTokens(why, detail)
        return question

    def _finish(self, question: Question, answer: Answer) -> None:
        if isinstance(answer, TokenIds):
            self.answers[answer.source] += 1
            self.wait.observe(self._clock.now() - question.asked_at)
        else:
            self.answers[answer.why] += 1
        question.task = None  # it may be the one that runs this
        question.cancel()
        question.done(answer)

    def _late(self, question: Question) -> None:
        task = question.task
        self._finish(question, NoTokens(Why.LATE, "not within the deadline"))
        if task is not None:
            task.cancel()

    def _worked(self, question: Question, model: _Model, result: Any) -> None:
        question.job = None
        if isinstance(result, TokenIds | NoTokens):
            self._finish(question, result)
        elif isinstance(result, _ForEngine):
            question.task = self._start(self._ask_engine(question, model, result))
        else:  # a defect of ours: said with its place, and no request fails for it
            log.error("tokenizing failed", exc_info=result if isinstance(result, Exception) else None)
            self._finish(question, NoTokens(Why.OFF, "tokenizing failed here"))

    async def _ask_engine(self, question: Question, model: _Model, asked: _ForEngine) -> None:
        answer = await self._engine_answer(model, asked.body)
        self._finish(question, replace(answer, salt=asked.salt) if isinstance(answer, TokenIds) else answer)

    async def _engine_answer(self, model: _Model, body: bytes) -> Answer:
        key = self.cache.key(model.space, body)
        (kept,) = self.cache.find([key])
        if kept is not None:
            return TokenIds(kept, "engine", len(kept))
        try:
            answer = await self._engine.ask(model.name, body)
            ids: array[int] = await self._in_thread(partial(read_answer, answer), len(answer))
        except NoTokenizeRoute:
            model.problem = "the engines have no /tokenize"
            model.tell(logging.WARNING, f"no tokens: {model.problem}")
            return NoTokens(Why.ENGINE, model.problem)
        except Refused as refused:
            if refused.why is Why.ENGINE:
                model.problem = refused.detail
            return refused.answer()
        model.problem = ""
        self.cache.keep([(key, ids)])
        return TokenIds(ids, "engine")


def _is_ready_folder(folder: str, configured: bool) -> None:
    try:
        if not configured and not is_model_folder(folder):
            raise BadFolder("the engine's root is no folder of this machine with a tokenizer.json")
    except OSError as error:  # a path too long, a folder that we may not enter
        raise BadFolder(error.strerror or "unreadable") from None


def _answer(local: LocalTokenizer, path: str, body: bytes, verdict: self_test.Verdict | None) -> Answer:
    try:
        prompt = read_prompt(path, body)
        if isinstance(prompt, TextPrompt) and verdict is not None and verdict.chats_only:
            return NoTokens(Why.UNCERTAIN, "the engine reads completions differently")
        return replace(local.tokenize(prompt), salt=prompt.salt)
    except Refused as refused:
        return refused.answer()


def _engine_prompt(model: str, path: str, body: bytes) -> Answer | _ForEngine:
    try:
        prompt: Prompt = read_prompt(path, body)
        if isinstance(prompt, GivenIds):
            return TokenIds(prompt.ids, "given", salt=prompt.salt)
        return _ForEngine(engine_question(model, prompt), prompt.salt)
    except Refused as refused:
        return refused.answer()
