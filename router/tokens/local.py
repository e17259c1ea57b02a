"""One model's tokenizer in this process: prompt -> text -> parts -> ids. Runs in threads, never on the loop."""

from __future__ import annotations

import logging
import os
import threading
from array import array
from typing import Any, Final
from weakref import WeakValueDictionary

import orjson

from router.tokens.answers import EMPTY, Refused, TokenIds, Why
from router.tokens.model_folder import FILES, BadFolder, ModelFolder, read_model_folder
from router.tokens.question import ChatPrompt, GivenIds, Prompt, prompt_chars
from router.tokens.seams import Seams
from router.tokens.segment_cache import SegmentCache
from router.tokens.template import BadTemplate, ChatTemplate, OutOfBounds

# One request is tokenized by one thread of ours; the library would take every core for it, and the loop's with them.
# It reads the variable at each call. Set by the operator, it stays.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from tokenizers import Tokenizer

log = logging.getLogger(__name__)

# A request of at most this size cannot be what makes a template slow.
SMALL_CHARS: Final = 65_536
SMALL_MESSAGES: Final = 100
SAMPLE_EVERY: Final = 1_000  # answers that used the cache, until one is checked against the whole


class LocalTokenizer:
    """`off` is set when the template went out of bounds: it then tokenizes no chats any more, whoever asks. `cache_off`
    says why the cache is not used."""

    def __init__(
        self,
        folder: ModelFolder,
        cache: SegmentCache,
        *,
        max_chars: int = 8_388_608,
        time_limit_s: float = 2.0,
        sample_every: int = SAMPLE_EVERY,
    ) -> None:
        try:
            description = orjson.loads(folder.tokenizer_json)
            self._tokenizer = Tokenizer.from_str(folder.tokenizer_json)
        except Exception as error:  # the library raises bare Exceptions, also for a file of a newer version
            raise BadFolder(f"tokenizer.json: {type(error).__name__} while it was read") from None
        self._tokenizer.no_truncation()  # what the file says of these is for training
        self._tokenizer.no_padding()
        self.off = ""
        self.cache_off = ""
        self._folder = folder
        self._cache = cache
        self._space = cache.new_space()
        self._max_chars = max_chars
        self._time_limit_s = time_limit_s
        self._sample_every = sample_every
        self._until_sample = sample_every
        self._templates: dict[str, ChatTemplate] = {}
        try:
            for name in folder.templates.keys() & {"default", "tool_use"}:
                self._templates[name] = self._compiled(folder.templates[name])
        except BadTemplate as error:
            raise BadFolder(str(error)) from None
        self._seams = Seams(description)
        self.cache_off = self._seams.why_not
        self._before, self._after, self._wraps = self._wrapping()

    def _compiled(self, source: str) -> ChatTemplate:
        return ChatTemplate(
            source, self._folder.named_tokens, max_chars=self._max_chars, time_limit_s=self._time_limit_s
        )

    def _wrapping(self) -> tuple[array[int], array[int], bool]:
        """What the tokenizer puts around a text with add_special_tokens, and whether that is all it does."""
        bare, wrapped = self._whole("a b", special=False), self._whole("a b", special=True)
        for start in range(len(wrapped) - len(bare) + 1):
            if wrapped[start : start + len(bare)] == bare:
                return wrapped[:start], wrapped[start + len(bare) :], True
        return array("I"), array("I"), False

    def tokenize(self, prompt: Prompt) -> TokenIds:
        """Refused with the reason where there are no ids."""
        if isinstance(prompt, GivenIds):
            return TokenIds(prompt.ids, "given")
        if isinstance(prompt, ChatPrompt):
            answer = self._ids(self.render(prompt), prompt.add_special_tokens)
        else:
            answer = self._ids(prompt.text, prompt.add_special_tokens)
        if not answer.ids:
            raise Refused(Why.SHAPE, EMPTY)
        return answer

    def render(self, prompt: ChatPrompt) -> str:
        if self.off:
            raise Refused(Why.OFF, self.off)
        named = self._folder.template_for(prompt.tools is not None)
        if named is None:
            raise Refused(Why.OFF, "the folder has no chat template")
        try:
            return self._templates[named[0]].render(prompt)
        except OutOfBounds as error:
            if error.slow and len(prompt.messages) <= SMALL_MESSAGES and prompt_chars(prompt) <= SMALL_CHARS:
                # The template's doing, not the request's: the next one would hold another thread for as long.
                self.off = str(error)
                log.error("local chat rendering is off for the model in %s: %s", self._folder.path, error)
            raise Refused(Why.TOO_BIG, str(error)) from None

    def _whole(self, text: str, *, special: bool) -> array[int]:
        # a batch of one: this call releases the GIL, encode() does not
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        return array("I", encoding.ids)

    def _ids(self, text: str, special: bool) -> TokenIds:
        if len(text) > self._max_chars:
            raise Refused(Why.TOO_BIG, "the prompt is too long to be tokenized here")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise Refused(Why.SHAPE, "the prompt is not Unicode text") from None
        if self.cache_off or (special and not self._wraps):
            return TokenIds(self._whole(text, special=special), "local")
        parts = self._seams.cut(text)
        keys = [self._cache.key(self._space, part.encode()) for part in parts]
        found = self._cache.find(keys)
        missing = [n for n, ids in enumerate(found) if ids is None]
        cached = sum(len(ids) for ids in found if ids is not None)
        if missing:
            batch = self._tokenizer.encode_batch_fast([parts[n] for n in missing], add_special_tokens=False)
            fresh = []
            for n, encoding in zip(missing, batch, strict=True):
                fresh_ids = array("I", encoding.ids)
                found[n] = fresh_ids
                fresh.append((keys[n], fresh_ids))
            # The end of a prompt is seldom met again as it is: its last part grows with the next turn.
            self._cache.keep(fresh if missing[-1] != len(parts) - 1 or len(parts) == 1 else fresh[:-1])
        whole = array("I", self._before if special else ())
        for ids in found:
            assert ids is not None
            whole.extend(ids)
        if special:
            whole.extend(self._after)
        if cached:
            self._until_sample -= 1
            if self._until_sample <= 0:
                self._until_sample = self._sample_every
                return self._sampled(text, special, whole, cached)
        return TokenIds(whole, "local", cached)

    def _sampled(self, text: str, special: bool, joined: array[int], cached: int) -> TokenIds:
        whole = self._whole(text, special=special)
        if whole == joined:
            return TokenIds(joined, "local", cached)
        at = first_difference(whole, joined)
        self.cache_off = f"cached parts gave other ids than the whole prompt, first at token {at}"
        log.error("the tokenization cache is off for the model in %s: %s", self._folder.path, self.cache_off)
        return TokenIds(whole, "local")

    def state(self) -> dict[str, Any]:
        return {
            "folder": str(self._folder.path),
            "chats": self.off or ("on" if self._templates else "the folder has no chat template"),
            "cache": self.cache_off or "on",
        }


class LocalTokenizers:
    """The tokenizers of this process by folder. Models of one folder (a base and its adapters) share one, which lasts
    as long as one of them uses it; a folder whose files changed is read again."""

    def __init__(self, cache: SegmentCache, **options: Any) -> None:
        self._cache = cache
        self._options = options
        self._reading = threading.Lock()
        self._by_files: WeakValueDictionary[tuple[object, ...], LocalTokenizer] = WeakValueDictionary()

    def get(self, path: str) -> LocalTokenizer:
        """BadFolder where it cannot be used. Called in threads."""
        with self._reading:
            key = (path, *_versions(path))
            found = self._by_files.get(key)
            if found is None:
                found = LocalTokenizer(read_model_folder(path), self._cache, **self._options)
                self._by_files[key] = found
            return found

    def __len__(self) -> int:
        return len(self._by_files)


def _versions(path: str) -> list[object]:
    found: list[object] = []
    for name in FILES:
        try:
            stat = os.stat(os.path.join(path, name))
            found.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
        except OSError:
            found.append(None)
    return found


def first_difference(one: array[int], other: array[int]) -> int:
    """The first position at which they differ; the shorter one's length where it begins the other."""
    for at, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return at
    return min(len(one), len(other))
