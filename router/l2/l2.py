"""The one to ask: how many leading tokens of a prompt are in the store that all engines share.

An answer is there at once where it was found a moment ago or cannot be had; else it takes one round trip of one EXISTS
per chunk, and comes not later than the deadline. Nothing is answered from a store that is away, late or not understood:
`unknown` is the word for it then, and the caller has other figures (learning/l2_rate.py).
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from router.clock import Clock, TimerHandle
from router.l2.answers import KNOWN, L2Answer, Lookup, Why
from router.l2.chunk_hash import Chain, ChunkHasher, as_hex, blake3_missing, in_process_chains, multi_process_chains
from router.l2.connection import Phase, StoreConnection
from router.l2.key_layout import Form, Layout, Unread, read_key, salt_suffix
from router.l2.learned_form import (
    MISSES_TO_DOUBT,
    SMALLEST_CHUNK_TOKENS,
    UNSUCCESSFUL_PROBES,
    LearnedForm,
    Probe,
    Variant,
)
from router.l2.resp import Reply, ServerError, command, exists
from router.l2.settings import L2Settings
from router.metrics import Histogram
from router.metrics_exporter import L2Figures

logger = logging.getLogger(__name__)

WAIT_BUCKETS: Final = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25)
MODELS_SEEN_LIMIT: Final = 64
SCAN_COUNT: Final = 100


class _Model:
    __slots__ = ("name", "names")

    def __init__(self, name: str, root: str) -> None:
        self.name = name
        self.names = (root, name) if root and root != name else (name,)  # LMCache takes what --model says: the root


class _Run:
    """The keys of one prompt in one layout: the first `present` of them are known to be there."""

    __slots__ = ("asked", "keys", "present")

    def __init__(self, keys: list[bytes], present: int, asked: bool) -> None:
        self.keys = keys
        self.present = present
        self.asked = asked  # whether those behind are to be asked for


class L2:
    """Used from the loop's thread, from `start` to `close`."""

    def __init__(self, settings: L2Settings, clock: Clock, loop: asyncio.AbstractEventLoop) -> None:
        self._settings = settings
        self._clock = clock
        self._connection = StoreConnection(settings, clock, loop, self._connected)
        self._hasher = ChunkHasher()
        seed = str(settings.hash_seed)
        self._chains: dict[Form, Sequence[Chain]] = {
            Form.IN_PROCESS: in_process_chains(seed),
            Form.MULTI_PROCESS: multi_process_chains(seed),
        }
        self._models: dict[str, _Model] = {}
        self._forms: dict[str, LearnedForm] = {}  # by the store's names for models, in the order they were seen
        self._remembered: OrderedDict[bytes, float] = OrderedDict()  # until when; below 0: until when it is absent
        self._sampling: TimerHandle | None = None
        self._cursor = b"0"
        self._sample_s = settings.sample_first_s
        self.looked = False  # a whole look at the keys is over, since the last connection
        self._refusal = ""  # the kind of error that commands are answered with
        self._sampled: defaultdict[str, int] = defaultdict(int)
        self.answers: defaultdict[str, int] = defaultdict(int)  # by Why
        self.wait = Histogram(WAIT_BUCKETS)  # seconds from the question to an answer of the store
        self.found_tokens = 0  # in the store, of prompts with a known answer
        self.asked_tokens = 0

    # -- life

    def start(self) -> None:
        self._connection.start()

    def close(self) -> None:
        if self._sampling is not None:
            self._sampling.cancel()
            self._sampling = None
        self._connection.close()

    # -- models

    def learn(self, model: str, root: str = "") -> None:
        """The fleet serves it; `root` is that of its /v1/models entry. Adapters are not to be learned."""
        known = self._models.get(model)
        if known is None and len(self._models) >= self._settings.model_limit:
            return
        self._models[model] = _Model(model, root)
        if not self._seen(self._models[model]):
            self._sample_soon()

    def forget(self, model: str) -> None:
        self._models.pop(model, None)

    def _form(self, model: _Model) -> LearnedForm | None:
        for name in model.names:
            form = self._forms.get(name)
            if form is not None:
                return form
        return None

    def _seen(self, model: _Model) -> bool:
        return self._form(model) is not None

    # -- questions

    def ask(
        self,
        model: str,
        ids: array[int],
        salt: str | None,
        lora: str | None,
        deadline: float,
        done: Callable[[L2Answer], None],
    ) -> Lookup:
        """`ids`: array("I") of the whole prompt. `deadline` is an instant of the clock, which time_limit_s may move
        forward; `done` is called on the loop, once, not later than that, unless the answer was there at once
        (Lookup.answer) or the question was cancelled."""
        now = self._clock.now()
        lookup = Lookup(now, done)
        known = self._models.get(model)
        if known is None:
            return self._at_once(lookup, Why.OFF)
        if lora:
            return self._at_once(lookup, Why.ADAPTER)
        if len(ids) < SMALLEST_CHUNK_TOKENS:
            return self._at_once(lookup, Why.SHORT, 0)
        if self._connection.phase is not Phase.READY:
            return self._at_once(lookup, Why.AWAY)
        form = self._form(known)
        if form is None:
            return self._at_once(lookup, Why.LEARNING)
        suffix = salt_suffix(salt)
        if suffix is None or (suffix and not self._tells_salts_apart(form)):
            return self._at_once(lookup, Why.SALT)
        variant = form.variant
        deadline = min(deadline, now + self._settings.time_limit_s)
        if variant is None:
            return self._probe(lookup, form, ids, suffix, deadline)
        if len(ids) < variant.chunk_tokens:
            return self._at_once(lookup, Why.SHORT, 0)
        runs = self._runs(form, variant, ids, suffix, now)
        if not any(run.asked for run in runs):
            return self._at_once(lookup, Why.REMEMBERED, self._longest(runs) * variant.chunk_tokens, len(ids))
        if form.misses and form.misses % MISSES_TO_DOUBT == 0:
            self._doubt(form, ids)
        refused = self._refused(deadline)
        if refused is None and not self._query(lookup, form, variant, runs, len(ids)):
            refused = Why.BUSY
        if refused is not None:
            return self._at_once(lookup, refused)
        return self._waits(lookup, deadline)

    def _at_once(self, lookup: Lookup, why: Why, tokens: int | None = None, prompt_tokens: int = 0) -> Lookup:
        lookup.done = None
        lookup.answer = self._answer(why, tokens, prompt_tokens)
        return lookup

    def _answer(self, why: Why, tokens: int | None, prompt_tokens: int) -> L2Answer:
        self.answers[why] += 1
        if tokens is not None:
            self.found_tokens += tokens
            self.asked_tokens += prompt_tokens
        return L2Answer(tokens if why in KNOWN else None, why)

    def _refused(self, deadline: float) -> Why | None:
        now = self._clock.now()
        if now >= deadline:
            return Why.LATE
        if self._connection.waiting_s(now) > self._settings.time_limit_s:
            return Why.SLOW
        return None

    def _waits(self, lookup: Lookup, deadline: float) -> Lookup:
        lookup.wait(self._clock.call_later(max(deadline - self._clock.now(), 0.0), self._late, lookup))
        return lookup

    def _late(self, lookup: Lookup) -> None:
        self._finish(lookup, Why.LATE)

    def _finish(self, lookup: Lookup, why: Why, tokens: int | None = None, prompt_tokens: int = 0) -> None:
        done = lookup.done
        if done is None:
            return
        lookup.cancel()
        if why is Why.STORE:
            self.wait.observe(self._clock.now() - lookup.asked_at)
        done(self._answer(why, tokens, prompt_tokens))

    def _tells_salts_apart(self, form: LearnedForm) -> bool:
        if form.variant is not None:
            return form.variant.form is Form.MULTI_PROCESS
        return all(layout.form is Form.MULTI_PROCESS for layout in form.layouts)

    # -- presence

    def _runs(self, form: LearnedForm, variant: Variant, ids: array[int], salt: bytes, now: float) -> list[_Run]:
        layouts: list[Layout] = form.layouts_of(variant)
        most = self._settings.max_chunks // len(layouts)
        chunks = [as_hex(chunk) for chunk in self._hasher.hashes(variant.chain, ids, variant.chunk_tokens, most)]
        runs = []
        for layout in layouts:
            keys = [layout.key(chunk, salt) for chunk in chunks]
            present, asked = 0, False
            for key in keys:
                there = self._known(key, now)
                if not there:
                    asked = there is None
                    break
                present += 1
            runs.append(_Run(keys, present, asked))
        return runs

    @staticmethod
    def _longest(runs: list[_Run]) -> int:
        return max((run.present for run in runs), default=0)

    def _query(self, lookup: Lookup, form: LearnedForm, variant: Variant, runs: list[_Run], prompt_tokens: int) -> bool:
        keys = [key for run in runs if run.asked for key in run.keys[run.present :]]
        heard = partial(self._heard, lookup, form, variant, runs, keys, prompt_tokens)
        return self._connection.ask(exists(keys), len(keys), heard)

    def _heard(
        self,
        lookup: Lookup,
        form: LearnedForm,
        variant: Variant,
        runs: list[_Run],
        keys: list[bytes],
        prompt_tokens: int,
        replies: list[Reply] | None,
    ) -> None:
        there = self._learn_presence(keys, replies)
        if there is None:
            self._finish(lookup, Why.AWAY)
            return
        at = 0
        for run in runs:
            if run.asked:
                behind = there[at : at + len(run.keys) - run.present]
                at += len(behind)
                run.present += behind.index(False) if False in behind else len(behind)
        longest = self._longest(runs)
        form.misses = 0 if longest else form.misses + 1
        self._finish(lookup, Why.STORE, longest * variant.chunk_tokens, prompt_tokens)

    def _learn_presence(self, keys: list[bytes], replies: list[Reply] | None) -> list[bool] | None:
        """None: the connection was lost, or an answer is no word on a key (a replica that is loading, no rights)."""
        if replies is None or not all(reply == 0 or reply == 1 for reply in replies):
            if replies is not None:
                self._refusal = next((reply.kind for reply in replies if isinstance(reply, ServerError)), "odd")
            return None
        self._refusal = ""
        now = self._clock.now()
        remembered = self._remembered
        there = [reply == 1 for reply in replies]
        for key, present in zip(keys, there, strict=True):
            remembered[key] = now + self._settings.present_age_s if present else -(now + self._settings.absent_age_s)
            remembered.move_to_end(key)
        while len(remembered) > self._settings.remembered_limit:
            remembered.popitem(last=False)
        return there

    def _known(self, key: bytes, now: float) -> bool | None:
        until = self._remembered.get(key)
        if until is None or abs(until) < now:
            return None
        return until > 0

    # -- learning the form

    def _probe(self, lookup: Lookup, form: LearnedForm, ids: array[int], salt: bytes, deadline: float) -> Lookup:
        refused = self._refused(deadline)
        if refused is None and form.gave_up_for_now():
            refused = Why.LEARNING
        if refused is None:
            probes = form.candidates(self._chains, ids, self._hasher)
            probes = [Probe(probe.variant, probe.key + salt) for probe in probes] if salt else probes
            heard = partial(self._probed, lookup, form, ids, salt, deadline, probes)
            if not probes:
                refused = Why.LEARNING
            elif not self._connection.ask(exists(probe.key for probe in probes), len(probes), heard):
                refused = Why.BUSY
        if refused is not None:
            return self._at_once(lookup, refused)
        return self._waits(lookup, deadline)

    def _probed(
        self,
        lookup: Lookup,
        form: LearnedForm,
        ids: array[int],
        salt: bytes,
        deadline: float,
        probes: list[Probe],
        replies: list[Reply] | None,
    ) -> None:
        if not self._settled(form, probes, replies):
            self._finish(lookup, Why.AWAY if replies is None else Why.LEARNING)
            return
        if not lookup.open or form.variant is None:
            return
        runs = self._runs(form, form.variant, ids, salt, self._clock.now())
        if not self._query(lookup, form, form.variant, runs, len(ids)):
            self._finish(lookup, Why.BUSY)

    def _doubt(self, form: LearnedForm, ids: array[int]) -> None:
        """Nothing was found for long: engines may name their chunks differently now."""
        form.misses += 1
        probes = form.candidates(self._chains, ids, self._hasher)
        if probes:
            self._connection.ask(
                exists(probe.key for probe in probes), len(probes), partial(self._settled, form, probes)
            )

    def _settled(self, form: LearnedForm, probes: list[Probe], replies: list[Reply] | None) -> bool:
        """Whether one of the names was found."""
        for probe, reply in zip(probes, replies or (), strict=False):
            if reply == 1:
                if form.variant != probe.variant:
                    logger.info(
                        "chunks of %r in the shared KV store: %s, %d tokens, %s",
                        form.layouts[0].model,
                        probe.variant.form,
                        probe.variant.chunk_tokens,
                        probe.variant.chain.name,
                    )
                form.settle(probe.variant)
                return True
        if form.variant is None and replies is not None:
            form.probes += 1
            if form.probes == UNSUCCESSFUL_PROBES:
                logger.warning(
                    "the shared KV store has keys of %r, but of %d prompts none was found under a name that is known: "
                    "set kv_cache.l2_hash_seed to the engines' PYTHONHASHSEED",
                    form.layouts[0].model,
                    form.probes,
                )
        return False

    # -- looking at the keys

    def _connected(self) -> None:
        self._remembered.clear()  # it may be another server
        self.looked = False
        self._cursor = b"0"
        self._sample_s = self._settings.sample_first_s
        self._sample()

    def _sample_soon(self) -> None:
        self._sample_s = self._settings.sample_first_s
        if self._connection.phase is Phase.READY and self._sampling is not None:
            self._sampling.cancel()
            self._sampling = self._clock.call_later(self._sample_s, self._sample)

    def _sample(self, left: int | None = None) -> None:
        """Read some of the keys: those behind where the last look ended, and around."""
        if self._sampling is not None:
            self._sampling.cancel()
            self._sampling = None
        left = self._settings.sample_keys // SCAN_COUNT if left is None else left
        scan = command(b"SCAN", self._cursor, b"COUNT", b"%d" % SCAN_COUNT)
        if not self._connection.ask(scan, 1, partial(self._scanned, left - 1)):
            self._sample_later()

    def _scanned(self, left: int, replies: list[Reply] | None) -> None:
        if replies is None:
            return  # the next connection begins anew
        if isinstance(replies[0], ServerError):
            self._refusal = replies[0].kind
        cursor, keys = _scan_reply(replies[0])
        self._cursor = cursor
        for key in keys:
            self._saw(key)
        if cursor != b"0" and left > 0:
            self._sample(left)
        else:
            self._sample_later()

    def _sample_later(self) -> None:
        self.looked = True
        if all(self._seen(model) for model in self._models.values()):
            self._sample_s = self._settings.sample_every_s
        delay_s, self._sample_s = self._sample_s, min(self._sample_s * 2, self._settings.sample_every_s)
        if self._sampling is not None:
            self._sampling.cancel()
        self._sampling = self._clock.call_later(delay_s, self._sample)

    def _saw(self, key: bytes) -> None:
        layout = read_key(key)
        if isinstance(layout, Unread):
            self._sampled[layout.value] += 1
            return
        self._sampled[layout.form.value] += 1
        form = self._forms.get(layout.model)
        if form is None:
            form = self._forms[layout.model] = LearnedForm()
            while len(self._forms) > MODELS_SEEN_LIMIT:
                served = {name for model in self._models.values() for name in model.names}
                self._forms.pop(next((name for name in self._forms if name not in served), next(iter(self._forms))))
        form.saw(layout)

    # -- what people see

    def state(self) -> dict[str, Any]:
        """For GET /backends and check --probe."""
        refusal = f"commands are answered with {self._refusal}" if self._refusal else ""
        return {
            "url": self._settings.shown_url,
            "store": self._connection.phase.value,
            "detail": self._connection.detail or refusal,
            "keys": dict(self._sampled),
            "models_seen": sorted(self._forms),
            "models": {model.name: self._model_state(model) for model in self._models.values()},
        }

    def _model_state(self, model: _Model) -> dict[str, Any]:
        form = self._form(model)
        if form is None:
            if self._sampled.get(Unread.OTHER.value) and not self._forms:
                return {
                    "state": "no keys",
                    "detail": "the store holds keys, but none of a form that is known",
                    "cure": "is it the store and the database that LMCache writes to?",
                }
            return {"state": "no keys", "detail": f"no key of {' or '.join(model.names)} was seen"}
        state: dict[str, Any] = {"state": "learning", "detail": "", "layouts": len(form.layouts)}
        variant = form.variant
        if variant is not None:
            return state | {
                "state": "learned",
                "form": variant.form.value,
                "hash": variant.chain.name,
                "chunk_tokens": variant.chunk_tokens,
            }
        if blake3_missing() and any(layout.form is Form.MULTI_PROCESS for layout in form.layouts):
            state["detail"] = "the hashes of its keys are by default blake3, which is not installed here"
            state["cure"] = "pip install 'kvgate[lmcache]'"
        elif form.probes >= UNSUCCESSFUL_PROBES:
            state["detail"] = "no prompt was found under any name that is known"
            state["cure"] = "set PYTHONHASHSEED for all engines, and kv_cache.l2_hash_seed to it"
        return state

    def figures(self) -> L2Figures:
        """For the metrics, all of this process; `wait` goes on changing."""
        return L2Figures(
            up=self._connection.phase is Phase.READY,
            failures=self._connection.failures,
            results=dict(self.answers),
            wait=self.wait,
            asked_tokens=self.asked_tokens,
            found_tokens=self.found_tokens,
        )

    def counters(self) -> dict[str, int]:
        """What is bounded, and how full it is."""
        return {
            "failures": self._connection.failures,
            "open_keys": self._connection.open_keys,
            "remembered_keys": len(self._remembered),
        }


def _scan_reply(reply: Reply) -> tuple[bytes, list[bytes]]:
    """The next cursor and the keys; the start and none for anything else, as from a server without SCAN."""
    if isinstance(reply, list) and len(reply) == 2:
        cursor, keys = reply
        if isinstance(cursor, bytes) and cursor.isdigit() and len(cursor) <= 20 and isinstance(keys, list):
            return cursor, [key for key in keys if isinstance(key, bytes)]
    return b"0", []
