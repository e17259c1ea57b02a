"""The scanner against a slow canonicaliser that reads the same body with json, and the properties of the prefix."""

from __future__ import annotations

import json
import random
import re
import struct
from collections.abc import Callable
from typing import Any

import orjson
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from native.body_scan import OK, UNKNOWN_SHAPE, scan_json

MASK = (1 << 64) - 1
Dumps = Callable[[Any], bytes]

# Wall time says nothing about a body: the machine may be busy.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def spaced(value: Any) -> bytes:
    return json.dumps(value).encode()


def unescaped(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


class Reference:
    """The encoding at the top of native/body_scan.pyx, word for word, on parsed objects. A value's bytes in the body
    are those of `dumps`, which wrote it."""

    def __init__(self, dumps: Dumps) -> None:
        self.dumps = dumps
        self.colon = b":" if dumps is orjson.dumps else b": "
        self.out = bytearray()
        self.ids = 0
        self.has_text = False
        self.ids_open = False

    def tag(self, tag: int) -> None:
        if self.ids_open:
            self.out += b"\xff\xff\xff\xff"
            self.ids_open = False
        self.out.append(tag)

    def record(self, tag: int, value: Any, *, raw: bool = False) -> None:
        if value is None:
            return
        self.tag(tag)
        text = self.dumps(value)
        self.out += text[1:-1] if isinstance(value, str) and not raw else text
        self.has_text = True

    def reference(self, digest: int) -> None:
        self.tag(0x03)
        self.out += struct.pack("<Q", digest)
        self.has_text = True

    def members(self, part: dict[str, Any]) -> int:
        return (
            sum(
                xxhash.xxh64_intdigest(self.dumps(key) + self.colon + self.dumps(value))
                for key, value in part.items()
                if key != "cache_control"
            )
            & MASK
        )

    def item(self, tag: int, value: Any) -> None:
        if value is None:
            return

        def shorten(match: re.Match[bytes]) -> bytes:
            inside = match[1]
            if len(inside) + 1 > 256 and inside.startswith(b"data:"):
                return b'"\x03' + struct.pack("<Q", xxhash.xxh64_intdigest(inside)) + b'"'
            return match[0]

        self.tag(tag)
        self.out += re.sub(rb'"((?:[^"\\]|\\.)*)"', shorten, self.dumps(value))
        self.has_text = True

    def plain_ids(self, tag: int, values: list[Any]) -> None:
        if all(type(value) is int and 0 <= value < 1 << 31 for value in values):
            self.tag(tag)
            self.out.append(0x11)
            self.out += struct.pack(f"<{len(values)}I", *values)
            self.ids += len(values)
            self.ids_open = True
        else:
            self.tag(tag)
            self.item(0x12, values)

    def prompts(self, tag: int, value: Any) -> None:
        if value is None:
            return
        for prompt in value if isinstance(value, list) and not numeric(value) else [value]:
            if isinstance(prompt, str):
                self.record(tag, prompt)
            elif isinstance(prompt, list):
                self.plain_ids(tag, prompt)
            else:
                self.tag(tag)
                self.item(0x12, prompt)

    def content(self, value: Any, in_result: bool = False) -> None:
        for part in value if isinstance(value, list) else [value]:
            if not isinstance(part, dict) or not isinstance(value, list):
                self.record(0x02, part)
                continue
            kind = part.get("type")
            if isinstance(part.get("text"), str) and not medium(kind):
                self.record(0x02, part["text"])
            elif kind == "thinking" and isinstance(part.get("thinking"), str):
                self.record(0x06, part["thinking"])
            elif kind == "refusal" and isinstance(part.get("refusal"), str):
                self.record(0x02, part["refusal"])
            elif kind == "tool_use":
                self.record(0x05, part.get("id"))
                self.record(0x04, part.get("name"))
                self.record(0x07, part.get("input"), raw=True)
            elif kind == "tool_result" and not in_result:
                self.tag(0x08)
                if part.get("tool_use_id") is not None:
                    self.out += self.dumps(part["tool_use_id"])[1:-1]
                    self.has_text = True
                self.content(part.get("content"), True)
            else:
                self.reference(self.members(part))

    def message(self, message: dict[str, Any]) -> None:
        if message.get("role") is not None:
            self.record(0x01, message["role"])
            self.record(0x04, message.get("name"))
            self.record(0x05, message.get("tool_call_id"))
            reasoning = message.get("reasoning")
            self.record(0x06, message.get("reasoning_content") if reasoning is None else reasoning)
            self.content(message.get("content"))
            self.record(0x07, message.get("tool_calls"), raw=True)
        elif medium(message.get("type")):
            self.reference(self.members(message))
        else:
            self.item(0x12, message)

    def conversation(self, value: Any, in_batch: bool = False) -> None:
        if isinstance(value, list) and numeric(value):
            self.plain_ids(0x10, value)
            return
        for element in value if isinstance(value, list) else [value]:
            if isinstance(element, dict):
                self.message(element)
            elif isinstance(element, str):
                self.message({"role": "user", "content": element})
            elif not isinstance(element, list):
                self.item(0x12, element)
            elif numeric(element):
                self.plain_ids(0x10, element)
            elif in_batch:
                self.item(0x12, element)
            else:
                self.tag(0x15)
                self.conversation(element, True)

    def body(self, body: dict[str, Any]) -> bytes | None:
        """The routing prefix, None for an unknown shape."""
        chat = isinstance(body.get("messages"), list)
        responses = isinstance(body.get("input"), str | list)
        found = chat or responses
        if found:
            self.record(0x0B, body.get("tools"), raw=True)
            self.record(0x0C, body.get("chat_template"))
            self.record(0x0E, body.get("chat_template_kwargs"), raw=True)
            if chat:
                self.item(0x0F, body.get("documents"))
            for field in ("system", "instructions"):
                if body.get(field) is not None:
                    self.message({"role": "system", "content": body[field]})
                    self.has_text = True
        if chat:
            self.conversation(body["messages"])
        for field in ("prompt", "token_ids"):
            if isinstance(body.get(field), str | list):
                found = True
                self.prompts(0x10, body[field])
        if isinstance(body.get("prompt_embeds"), str | list):
            found = True
            self.reference(xxhash.xxh64_intdigest(self.dumps(body["prompt_embeds"])))
        if responses:
            self.conversation(body["input"])
        if isinstance(body.get("texts"), str | list):
            found = True
            self.prompts(0x10, body["texts"])
        pairs = False
        for field in ("query", "queries", "text_1", "data_1"):
            if isinstance(body.get(field), str | list | dict):
                found = pairs = True
                self.prompts(0x13, body[field])
        if pairs:
            if not chat:
                self.prompts(0x14, body.get("documents"))
            for field in ("text_2", "data_2", "items"):
                self.prompts(0x14, body.get(field))
        return bytes(self.out) if found else None


def numeric(values: list[Any]) -> bool:
    return bool(values) and isinstance(values[0], int | float) and not isinstance(values[0], bool)


def medium(kind: Any) -> bool:
    return isinstance(kind, str) and any(word in kind for word in ("image", "audio", "video", "file"))


def chained(canonical: bytes, block_bytes: int, seed: int) -> list[int]:
    hashes: list[int] = []
    for start in range(0, len(canonical) - block_bytes + 1, block_bytes):
        seed = xxhash.xxh64_intdigest(canonical[start : start + block_bytes], seed)
        hashes.append(seed)
    return hashes


def seed_of(body: dict[str, Any]) -> int:
    model, salt = body.get("model"), body.get("cache_salt")
    seed = xxhash.xxh64_intdigest(model.encode() if isinstance(model, str) else b"")
    return xxhash.xxh64_intdigest(salt.encode(), seed) if isinstance(salt, str) else seed


# Lengths on both sides of the scanner's 64-byte steps and of its 256-byte long strings.
words = st.text(alphabet='ab"\\{}[]:,/\n\x01é\u2028\U0001f600', max_size=12)
texts = st.one_of(
    words,
    st.builds(lambda word, times: word * times, words, st.sampled_from([5, 33, 120])),
    st.builds(lambda n, word: "x" * n + word, st.sampled_from([62, 63, 64, 250, 255, 256, 257, 511]), words),
    st.builds(lambda n: "\\" * n + '"', st.integers(0, 200)),
)
data_urls = st.builds(lambda n: "data:image/png;base64," + "A" * n, st.sampled_from([0, 230, 233, 234, 235, 900]))
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**40), 2**40), st.floats(allow_nan=False, allow_infinity=False), texts
)
values = st.recursive(
    st.one_of(scalars, data_urls),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=3)),
    max_leaves=6,
)


def members(**strategies: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=strategies)


plain_parts = st.one_of(
    members(
        type=st.sampled_from(["text", "input_text", "thinking", "refusal", "tool_use", "input_image", "a_file", None]),
        text=st.one_of(texts, st.none(), st.integers()),
        thinking=texts,
        refusal=texts,
        id=words,
        name=words,
        input=values,
        image_url=st.one_of(data_urls, values),
        cache_control=values,
        other=values,
    ),
    values,
)
parts = st.one_of(
    plain_parts,
    members(
        type=st.just("tool_result"),
        tool_use_id=words,
        content=st.one_of(values, st.lists(plain_parts, max_size=3)),
        cache_control=values,
    ),
)
messages = members(
    role=st.one_of(st.sampled_from(["system", "user", "assistant", "tool"]), values),
    content=st.one_of(texts, st.lists(parts, max_size=3), values),
    name=st.one_of(words, st.none()),
    tool_call_id=words,
    tool_calls=values,
    reasoning=st.one_of(texts, st.none()),
    reasoning_content=texts,
    type=st.sampled_from(["message", "function_call", "image_generation_call"]),
    refusal=values,
    annotations=values,
)
token_ids = st.lists(st.one_of(st.integers(0, 2**31 - 1), st.integers(0, 1000)), max_size=90)
odd_ids = st.lists(
    st.one_of(st.integers(-5, 2**33), st.floats(allow_nan=False, allow_infinity=False), values), max_size=4
)
prompts = st.one_of(texts, token_ids, odd_ids, st.lists(st.one_of(texts, token_ids, odd_ids, values), max_size=4))
conversations = st.one_of(
    st.lists(st.one_of(messages, messages, texts, values, st.lists(messages, max_size=2)), max_size=5), prompts
)
bodies = members(
    model=st.one_of(texts, values),
    stream=st.one_of(st.booleans(), values),
    cache_salt=st.one_of(words, values),
    max_tokens=st.one_of(st.integers(-3, 10**17), values),
    session_id=st.one_of(texts, values),
    tools=values,
    chat_template=st.one_of(texts, values),
    chat_template_kwargs=values,
    documents=st.one_of(values, st.lists(texts)),
    system=st.one_of(texts, st.lists(parts, max_size=2), values),
    instructions=st.one_of(texts, values),
    messages=conversations,
    prompt=prompts,
    token_ids=token_ids,
    prompt_embeds=values,
    input=conversations,
    texts=prompts,
    query=st.one_of(texts, values),
    text_1=prompts,
    text_2=prompts,
    items=values,
    anything=values,
)
dumpers = st.sampled_from([orjson.dumps, spaced, unescaped])


@unhurried
@given(bodies, dumpers, st.sampled_from([1, 7, 16, 64, 256]))
def test_any_body_hashes_as_the_slow_reference_says(body: dict[str, Any], dumps: Dumps, block_bytes: int) -> None:
    reference = Reference(dumps)
    canonical = reference.body(body)
    data = b" \n" + dumps(body) + b"\r\t"
    scanned = scan_json(data, block_bytes, (b"session_id",))
    model = body.get("model")
    assert scanned.model == (model if isinstance(model, str) else None)
    if scanned.model_span is not None:
        assert json.loads(data[slice(*scanned.model_span)]) == model
    assert scanned.stream is (body.get("stream") is True)
    session = body.get("session_id")
    if isinstance(session, str) and len(dumps(session)) <= 4096:
        assert scanned.values == (session.encode(),)
    elif type(session) is int:
        assert scanned.values == (str(session).encode(),)
    else:
        assert scanned.values == (None,)
    limit = body.get("max_tokens")
    assert scanned.max_tokens == (limit if type(limit) is int and 0 <= limit < 10**15 else None)
    if canonical is None:
        assert (scanned.status, scanned.blocks, scanned.prefix_bytes) == (UNKNOWN_SHAPE, None, 0)
        return
    assert scanned.status == OK
    assert scanned.prefix_bytes == len(canonical)
    assert scanned.blocks is not None
    assert scanned.blocks.tolist() == chained(canonical, block_bytes, seed_of(body))
    assert scanned.prompt_tokens == (reference.ids if reference.ids and not reference.has_text else None)
    unhashed = scan_json(data, block_bytes, hash_prefix=False)
    assert (unhashed.status, unhashed.blocks) == (OK, None)
    assert (unhashed.prefix_bytes, unhashed.prompt_tokens) == (scanned.prefix_bytes, scanned.prompt_tokens)


def prefix(body: Any, dumps: Dumps = orjson.dumps) -> list[int]:
    """One hash a byte, so that equal lists mean equal canonical bytes."""
    blocks = scan_json(dumps(body), 1).blocks
    assert blocks is not None
    return blocks.tolist()


@unhurried
@given(st.lists(messages, max_size=6), st.data())
def test_a_longer_conversation_starts_with_the_bytes_of_the_shorter(turns: list[Any], data: st.DataObject) -> None:
    earlier = data.draw(st.integers(0, len(turns)))
    for field in ("messages", "input"):
        shorter = prefix({"model": "m", field: turns[:earlier]})
        assert prefix({field: turns, "model": "m"})[: len(shorter)] == shorter


@unhurried
@given(token_ids, token_ids)
def test_longer_token_ids_start_with_the_bytes_of_the_shorter(head: list[int], tail: list[int]) -> None:
    shorter = prefix({"prompt": [*[7], *head]})
    assert prefix({"prompt": [7, *head, *tail]})[: len(shorter)] == shorter


@unhurried
@given(texts, texts)
def test_a_longer_prompt_starts_with_the_bytes_of_the_shorter(head: str, tail: str) -> None:
    shorter = prefix({"prompt": head})
    assert prefix({"prompt": head + tail})[: len(shorter)] == shorter


@unhurried
@given(bodies, st.lists(messages, max_size=4), st.integers(0, 2**32))
def test_the_order_of_keys_changes_nothing(body: dict[str, Any], turns: list[Any], seed: int) -> None:
    body = {**body, "messages": turns}
    generator = random.Random(seed)

    def shuffled(value: dict[str, Any]) -> dict[str, Any]:
        keys = list(value)
        generator.shuffle(keys)
        return {key: value[key] for key in keys}

    def message(value: Any) -> Any:
        if not isinstance(value, dict) or value.get("role") is None:
            return value  # an item goes in as it stands
        content = value.get("content")
        if isinstance(content, list):
            value = {**value, "content": [shuffled(part) if isinstance(part, dict) else part for part in content]}
        return shuffled(value)

    other = shuffled({**body, "messages": [message(turn) for turn in turns]})
    assert prefix(other) == prefix(body)


@pytest.mark.parametrize("dumps", [orjson.dumps, spaced])
def test_the_reference_and_the_scanner_agree_on_a_long_conversation(dumps: Dumps) -> None:
    generator = random.Random(7)
    turns = []
    for turn in range(300):
        text = "".join(generator.choice(['word "quoted" ', "\\", "{[", "plain text ", "\n"]) for _ in range(turn))
        turns.append({"role": "user", "content": [{"type": "text", "text": text}, {"type": "text", "text": "x"}]})
        turns.append({"content": text, "role": "assistant", "tool_calls": [{"arguments": json.dumps([text])}]})
    body = {"messages": turns, "model": "m"}
    canonical = Reference(dumps).body(body)
    assert canonical is not None
    blocks = scan_json(dumps(body), 256).blocks
    assert blocks is not None
    assert blocks.tolist() == chained(canonical, 256, seed_of(body))
