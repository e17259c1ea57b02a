"""Every shape of request that an engine serves: what shares a prefix, what must not, and what is refused."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import xxhash

from native.body_scan import MALFORMED, OK, UNKNOWN_SHAPE, ScannedBody, scan_json
from router.wire.openai_request import TEXT_LIMIT_BYTES, VALUE_LIMIT_BYTES, RequestBody, read_request

JSON = b"application/json"
FIXTURES = Path(__file__).parents[2] / "fixtures" / "vllm" / "http"


def scan(body: Any, block_bytes: int = 1) -> ScannedBody:
    return scan_json(body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode(), block_bytes)


def prefix(body: Any) -> list[int]:
    """With blocks of one byte equal lists mean equal canonical bytes and an equal seed."""
    scanned = scan(body)
    assert scanned.status == OK
    assert scanned.blocks is not None
    return scanned.blocks.tolist()


def chained(canonical: bytes, seed: int = xxhash.xxh64_intdigest(b"")) -> list[int]:
    hashes = []
    for i in range(len(canonical)):
        seed = xxhash.xxh64_intdigest(canonical[i : i + 1], seed)
        hashes.append(seed)
    return hashes


def shared(one: list[int], other: list[int]) -> int:
    """How many leading bytes two prefixes have in common."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def chat(*contents: Any, **fields: Any) -> dict[str, Any]:
    roles = ["user", "assistant"]
    return {"messages": [{"role": roles[i % 2], "content": each} for i, each in enumerate(contents)], **fields}


def read(body: bytes, content_type: bytes = JSON, *, path: bytes = b"/v1/x", need_prefix: bool = True) -> RequestBody:
    return read_request(content_type, path, body, 1, ("user",), need_prefix)


# ---- The encoding as native/body_scan.pyx describes it, byte by byte.


@pytest.mark.parametrize(
    ("body", "canonical"),
    [
        (chat("hi", "yo"), b"\x01user\x02hi\x01assistant\x02yo"),
        (chat([{"type": "text", "text": "hi"}]), b"\x01user\x02hi"),
        (chat('say "x\\y"\n'), b'\x01user\x02say \\"x\\\\y\\"\\n'),
        (chat([{"type": "text", "text": "a"}, "b", {"text": "c"}]), b"\x01user\x02a\x02b\x02c"),
        ({"messages": []}, b""),
        (
            {
                "messages": [
                    {
                        "tool_calls": [{"id": "1"}],
                        "content": None,
                        "reasoning": "hm",
                        "name": "n",
                        "role": "assistant",
                    },
                    {"role": "tool", "content": "42", "tool_call_id": "1"},
                    {"role": "assistant", "reasoning_content": "so", "content": ""},
                ]
            },
            b'\x01assistant\x04n\x06hm\x07[{"id":"1"}]\x01tool\x051\x0242\x01assistant\x06so\x02',
        ),
        (
            {
                "messages": [{"role": "user", "content": "q"}],
                "documents": [{"text": "d"}],
                "chat_template_kwargs": {"k": 1},
                "chat_template": "T",
                "tools": [{"f": "g"}],
            },
            b'\x0b[{"f":"g"}]\x0cT\x0e{"k":1}\x0f[{"text":"d"}]\x01user\x02q',
        ),
        ({"system": "S", **chat("q")}, b"\x01system\x02S\x01user\x02q"),
        ({"system": [{"type": "text", "text": "S"}], **chat("q")}, b"\x01system\x02S\x01user\x02q"),
        (
            chat(
                [{"type": "thinking", "thinking": "t", "signature": "s"}],
                [{"type": "tool_use", "id": "7", "name": "f", "input": {"a": 1}}],
                [{"type": "tool_result", "tool_use_id": "7", "content": [{"type": "text", "text": "r"}, "s"]}],
            ),
            b'\x01user\x06t\x01assistant\x057\x04f\x07{"a":1}\x01user\x087\x02r\x02s',
        ),
        (
            {"messages": [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]},
            b"\x15\x01user\x02a\x15\x01user\x02b",
        ),
        ({"input": "hi", "instructions": "I"}, b"\x01system\x02I\x01user\x02hi"),
        (
            {"input": [{"role": "user", "content": "a"}, {"type": "function_call", "name": "f", "arguments": "{}"}]},
            b'\x01user\x02a\x12{"type":"function_call","name":"f","arguments":"{}"}',
        ),
        ({"prompt": "once"}, b"\x10once"),
        ({"prompt": ["a", "b"]}, b"\x10a\x10b"),
        ({"prompt": [1, 258]}, b"\x10\x11\x01\0\0\0\x02\x01\0\0"),
        ({"prompt": [[1], [2147483647]]}, b"\x10\x11\x01\0\0\0\xff\xff\xff\xff\x10\x11\xff\xff\xff\x7f"),
        ({"prompt": [[1], "a"]}, b"\x10\x11\x01\0\0\0\xff\xff\xff\xff\x10a"),
        ({"token_ids": [3]}, b"\x10\x11\x03\0\0\0"),
        ({"texts": ["a"]}, b"\x10a"),
        ({"input": ["a", "b"]}, b"\x01user\x02a\x01user\x02b"),
        ({"input": [[1], [2]]}, b"\x10\x11\x01\0\0\0\xff\xff\xff\xff\x10\x11\x02\0\0\0"),
        ({"documents": ["a", {"text": "b"}], "query": "q"}, b'\x13q\x14a\x14\x12{"text":"b"}'),
        ({"text_2": ["b", "c"], "text_1": "a"}, b"\x13a\x14b\x14c"),
        ({"data_1": ["a"], "data_2": "b"}, b"\x13a\x14b"),
        ({"queries": "a", "items": ["b"]}, b"\x13a\x14b"),
    ],
)
def test_a_shape_has_these_canonical_bytes(body: dict[str, Any], canonical: bytes) -> None:
    assert prefix(body) == chained(canonical)
    assert scan(body).prefix_bytes == len(canonical)


def test_the_seed_is_the_model_and_then_the_salt() -> None:
    model = xxhash.xxh64_intdigest("é/m".encode())
    assert prefix({"model": "é/m", "prompt": "a"}) == chained(b"\x10a", model)
    salted = xxhash.xxh64_intdigest(b"s", model)
    assert prefix({"cache_salt": "s", "prompt": "a", "model": "é/m"}) == chained(b"\x10a", salted)


def test_only_full_blocks_are_hashed_and_the_tail_counts_as_length() -> None:
    scanned = scan({"prompt": "abcdefgh"}, 4)
    assert scanned.blocks is not None
    assert (len(scanned.blocks), scanned.prefix_bytes) == (2, 9)


# ---- What shares a prefix.


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (chat("hi"), chat([{"type": "text", "text": "hi"}])),
        (chat("hi"), chat([{"type": "input_text", "text": "hi", "cache_control": {"type": "ephemeral"}}])),
        (chat("hi"), {"input": "hi"}),
        (
            chat("hi"),
            {"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}]},
        ),
        ({"system": "S", **chat("q")}, {"messages": [{"role": "system", "content": "S"}, *chat("q")["messages"]]}),
        (
            chat("hi"),
            {"messages": [{"role": "user", "content": "hi", "refusal": "no", "annotations": [1], "audio": None}]},
        ),
        (
            chat("hi"),
            {"messages": [{"role": "user", "content": "hi", "name": None, "tool_calls": None, "function_call": None}]},
        ),
        (chat("hi"), {"messages": [{"content": "hi", "role": "user"}]}),
        (chat("hi"), {**chat("hi"), "stream": True, "temperature": 0.5, "n": 2, "tools": None, "prompt": None}),
        ({"prompt": "a"}, {"prompt": ["a"]}),
        ({"prompt": [1, 2]}, {"prompt": [[1, 2]]}),
        (
            chat([{"type": "tool_result", "tool_use_id": "1", "content": "x", "cache_control": {}}]),
            chat([{"content": "x", "tool_use_id": "1", "type": "tool_result"}]),
        ),
        (
            chat([{"type": "image_url", "image_url": {"url": "http://x"}, "cache_control": {"ttl": 5}}]),
            chat([{"image_url": {"url": "http://x"}, "type": "image_url"}]),
        ),
        ({"messages": [{"role": "a", "reasoning": "r"}]}, {"messages": [{"role": "a", "reasoning_content": "r"}]}),
    ],
)
def test_bodies_that_give_the_engine_one_prompt_have_one_prefix(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert prefix(one) == prefix(other)


def test_an_escaped_key_is_the_key() -> None:
    scanned = scan(b'{"mod\\u0065l":"m","\\u006d\\u0065ssages":[{"\\u0072ole":"user","content":"hi"}]}')
    assert scanned.model == "m"
    assert scanned.blocks == scan(chat("hi", model="m")).blocks


def test_the_last_of_equal_keys_wins() -> None:
    assert prefix(b'{"prompt":"a","prompt":"b"}') == prefix({"prompt": "b"})
    assert scan(b'{"prompt":"a","model":"x","model":null}').model is None
    assert prefix(b'{"messages":[{"role":"user","content":"a","role":"tool"}]}') == chained(b"\x01tool\x02a")


# ---- What must not.


def test_another_model_or_salt_shares_nothing() -> None:
    base = chat("hi", model="m", cache_salt="s")
    for other in (
        {**base, "model": "n"},
        {**base, "cache_salt": "t"},
        chat("hi", model="m"),
        chat("hi", cache_salt="s"),
    ):
        assert shared(prefix(base), prefix(other)) == 0


def test_other_tools_or_another_template_share_nothing_of_the_messages() -> None:
    base = prefix(chat("hi" * 50, tools=[{"name": "a"}]))
    assert shared(base, prefix(chat("hi" * 50, tools=[{"name": "b"}]))) == len(b'\x0b[{"name":"')
    for other in ({"chat_template": "T"}, {"chat_template_kwargs": {"a": 1}}, {"documents": ["d"]}, {}):
        assert shared(base, prefix(chat("hi" * 50, **other))) <= 1


def test_another_content_differs_from_its_own_block_on() -> None:
    one = scan(chat("x" * 1000, "y" * 1000, "z" * 1000), 64)
    other = scan(chat("x" * 1000, "y" * 500 + "!" + "y" * 499, "z" * 1000), 64)
    assert one.blocks is not None
    assert other.blocks is not None
    changed = len(b"\x01user\x02" + b"x" * 1000 + b"\x01assistant\x02" + b"y" * 500)
    assert shared(one.blocks.tolist(), other.blocks.tolist()) == changed // 64


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (chat("ab"), chat("a", "b")),
        (chat("x"), {"messages": [{"role": "system", "content": "x"}]}),
        ({"messages": [{"role": "user", "content": "x"}]}, {"messages": [{"role": "userx", "content": ""}]}),
        ({"messages": [{"role": "a", "name": "b"}]}, {"messages": [{"role": "ab"}]}),
        (chat("a\x02b"), chat([{"text": "a"}, {"text": "b"}])),
        (chat("a\x01user\x02b"), {"messages": [*chat("a")["messages"], *chat("b")["messages"]]}),
        ({"prompt": ["a", "b"]}, {"prompt": "ab"}),
        ({"prompt": [[1], [2]]}, {"prompt": [[1, 2]]}),
        ({"prompt": [1]}, {"prompt": "\x11\x01\x00\x00\x00"}),
        ({"text_1": ["a", "b"], "text_2": "c"}, {"text_1": "a", "text_2": ["b", "c"]}),
        (chat([{"type": "tool_result", "tool_use_id": "1"}]), chat([{"type": "tool_result", "tool_use_id": "2"}])),
        (chat([{"type": "image_url", "image_url": "a"}]), chat([{"type": "image_url", "image_url": "b"}])),
        (chat([{"type": "image_url", "text": "a"}]), chat([{"type": "text", "text": "a"}])),
        ({"prompt_embeds": "a"}, {"prompt_embeds": "b"}),
    ],
)
def test_prompts_that_differ_have_prefixes_that_differ(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert prefix(one) != prefix(other)


# ---- References.


@pytest.mark.parametrize(
    "kind", ["image_url", "input_image", "input_audio", "video_url", "input_file", "document", None]
)
def test_a_part_that_is_no_text_counts_as_eight_bytes(kind: str | None) -> None:
    big = chat([{"type": kind, "source": "A" * 100_000}])
    assert scan(big).prefix_bytes == len(b"\x01user\x03") + 8
    assert prefix(big) != prefix(chat([{"type": kind, "source": "A" * 99_999 + "B"}]))


def test_a_long_data_url_anywhere_counts_as_a_reference() -> None:
    def item(url: str) -> dict[str, Any]:
        return {"input": [{"type": "function_call_output", "output": [{"type": "input_image", "image_url": url}]}]}

    long, short, plain = "data:" + "A" * 100_000, "data:" + "A" * 100, "http" + "A" * 1000
    assert scan(item(long)).prefix_bytes == scan(item("")).prefix_bytes + 9
    assert scan(item(short)).prefix_bytes == scan(item("")).prefix_bytes + len(short)
    assert scan(item(plain)).prefix_bytes == scan(item("")).prefix_bytes + len(plain)
    assert prefix(item(long)) != prefix(item(long[:-1] + "B"))


def test_a_tool_result_in_a_tool_result_is_a_reference() -> None:
    inner = {"type": "tool_result", "tool_use_id": "2", "content": "x" * 1000}
    nested = chat([{"type": "tool_result", "tool_use_id": "1", "content": [inner]}])
    assert scan(nested).prefix_bytes == len(b"\x01user\x081\x03") + 8


# ---- Token ids.


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ([1, 2, 3], 3),
        ([0], 1),
        ([2147483647], 1),
        ([[1, 2], [3]], 3),
        ([], None),
        ("text", None),
        ([[1], "a"], None),
        ([2147483648], None),
        ([99999999999999999999], None),
        ([-1], None),
        ([1.0], None),
        ([1, 2e3], None),
        ([1, None], None),
        ([1, [2]], None),
        ([1, "a"], None),
    ],
)
def test_token_ids_are_counted_where_all_are_ids(prompt: Any, tokens: int | None) -> None:
    for field in ("prompt", "input", "token_ids"):
        for space in ("", " ", "\n  "):
            scanned = scan(json.dumps({field: prompt}).replace(" ", space).encode())
            assert scanned.status == OK
            assert scanned.prompt_tokens == tokens


def test_a_list_with_something_else_goes_in_as_it_stands() -> None:
    long = list(range(1000))
    assert prefix({"prompt": [*long, -1]}) == chained(
        b"\x10\x12" + json.dumps([*long, -1], separators=(",", ":")).encode()
    )
    assert prefix(b'{"prompt":[1,01]}') == chained(b"\x10\x12[1,01]")


@pytest.mark.parametrize("count", [63, 64, 65, 128, 129, 1000])
def test_long_lists_of_ids_lose_none(count: int) -> None:
    ids = [i * 2_147_483 % 2_147_483_648 for i in range(count)]
    assert prefix({"prompt": ids}) == chained(b"\x10\x11" + struct.pack(f"<{count}I", *ids))


@pytest.mark.parametrize("block_bytes", [1, 64, 100])
def test_a_list_that_turns_out_not_to_be_ids_leaves_no_trace_of_its_ids(block_bytes: int) -> None:
    odd = [*range(200), -1]
    body = {"prompt": ["before", [5, 6], odd, [7]]}
    canonical = b"\x10before\x10\x11" + struct.pack("<3I", 5, 6, 0xFFFFFFFF)
    canonical += b"\x10\x12" + json.dumps(odd, separators=(",", ":")).encode() + b"\x10\x11" + struct.pack("<I", 7)
    blocks = scan(body, block_bytes).blocks
    assert blocks is not None
    hash_, expected = xxhash.xxh64_intdigest(b""), []
    for start in range(0, len(canonical) - block_bytes + 1, block_bytes):
        hash_ = xxhash.xxh64_intdigest(canonical[start : start + block_bytes], hash_)
        expected.append(hash_)
    assert blocks.tolist() == expected


# ---- The other fields.


def test_model_stream_and_limit_are_read_wherever_they_stand() -> None:
    body = b' {"stream" : true , "max_tokens":5, "prompt":"x","model" :"a\\u00e9\\/\\ud83d\\ude00\\ud800z"}\n'
    scanned = scan(body)
    assert (scanned.model, scanned.stream, scanned.max_tokens) == ("aé/\U0001f600\ufffdz", True, 5)
    assert scanned.model_span is not None
    assert body[slice(*scanned.model_span)] == b'"a\\u00e9\\/\\ud83d\\ude00\\ud800z"'
    assert scan(b'{"model":"\xff"}').model == "\ufffd"


@pytest.mark.parametrize("value", [False, None, 1, "true", [True], {}])
def test_only_true_is_a_stream(value: Any) -> None:
    assert scan({"prompt": "x", "stream": value}).stream is False


@pytest.mark.parametrize("value", [None, 5, ["m"], {"m": 1}, True])
def test_a_model_that_is_no_string_is_none(value: Any) -> None:
    scanned = scan({"prompt": "x", "model": value})
    assert (scanned.status, scanned.model, scanned.model_span) == (OK, None, None)


def test_the_limit_of_the_newer_name_wins() -> None:
    assert scan({"max_tokens": 1, "max_completion_tokens": 2}).max_tokens == 2
    assert scan({"max_tokens": 1, "max_completion_tokens": None}).max_tokens == 1
    assert scan({"max_output_tokens": 3}).max_tokens == 3
    for value in (-1, 1.5, "6", 10**15, True, None, [1]):
        assert scan({"max_tokens": value}).max_tokens is None
    assert scan({"max_tokens": 10**15 - 1}).max_tokens == 10**15 - 1


def test_wanted_values_are_strings_or_integers_of_a_bounded_length() -> None:
    limit = "x" * (4096 - 2)
    body = {"a": "é\n", "b": -17, "c": 1.5, "d": None, "e": ["x"], "f": limit, "g": limit + "x", "model": "m", "i": 1}
    scanned = scan_json(json.dumps(body).encode(), 1, (b"a", b"b", b"c", b"d", b"e", b"f", b"g", b"h", b"model", b"a"))
    expected = ("é\n".encode(), b"-17", None, None, None, limit.encode(), None, None, b"m", "é\n".encode())
    assert scanned.values == expected
    assert scanned.model == "m"


def test_wrong_arguments_raise() -> None:
    for block_bytes in (0, -1, (1 << 20) + 1):
        with pytest.raises(ValueError):
            scan_json(b"{}", block_bytes)
    for fields in ((b"",), (b"x" * 257,), (None,), (b"a",) * 17):
        with pytest.raises(ValueError):
            scan_json(b"{}", 1, fields)  # type: ignore[arg-type]
    assert scan_json(b"{}", 1 << 20, (b"x" * 256,) * 16).status == UNKNOWN_SHAPE
    with pytest.raises(TypeError):
        scan_json("{}", 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        ScannedBody()


# ---- Unknown and malformed.


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b"[]",
        b"[{}]",
        b'"text"',
        b"17",
        b"-1.5e+3",
        b"true",
        b" null ",
        b"NaN",
        b"-Infinity",
        b'{"model":"m"}',
        b'{"messages":"hi"}',
        b'{"messages":null}',
        b'{"prompt":{"id":"p"}}',
        b'{"prompt":5}',
        b'{"input":{}}',
        b'{"query":1}',
        b'{"documents":["a"]}',
        b'{"text_2":"a"}',
        b'{"tokens":[1]}',
    ],
)
def test_json_without_a_known_prompt_is_of_unknown_shape(body: bytes) -> None:
    scanned = scan(body)
    assert (scanned.status, scanned.blocks, scanned.prefix_bytes) == (UNKNOWN_SHAPE, None, 0)
    assert not read(body).readable
    assert not read(body).malformed


@pytest.mark.parametrize(
    "body",
    [
        b" ",
        b"{",
        b"}",
        b"hello",
        b"{}}",
        b"{} {}",
        b'{"a":1} x',
        b"\xef\xbb\xbf{}",
        b"tru",
        b"nul",
        b"-",
        b"01",
        b"1.",
        b"1e",
        b".5",
        b'{"a"}',
        b'{"a" 1}',
        b'{"a":}',
        b'{"a":1,}',
        b'{,"a":1}',
        b'{"a":1 "b":2}',
        b"{a:1}",
        b"{'a':1}",
        b'{"a":1;"b":2}',
        b'{"a":tru}',
        b'{"a":"x',
        b'{"a":"x\\"}',
        b'{"a":[1}',
        b'{"a":{"b":[}]}',
        b'{"a":[[]}',
        b'{"a":1]',
        b'["a"',
        b'{"a":"b"c"}',
        b'{"\\x":1}',
        b'{"model":"\\x"}',
        b'{"model":"\\u12"}',
        b'{"model":"\\u12g4"}',
        b'{"cache_salt":"\\q"}',
        b'{"user":"\\q"}',
        b'{"messages":[{"role":"user" "content":"x"}]}',
        b'{"messages":[{"role"}]}',
        b'{"messages":[{"role":"user"} {"role":"user"}]}',
        b'{"messages":[{"role":"user"},]}',
        b'{"messages":[,{"role":"user"}]}',
        b'{"messages":[x]}',
        b'{"messages":[{"role":"user","content":[{"type":"text" "text":"x"}]}]}',
        b'{"messages":[{"role":"user","content":[x]}]}',
        b'{"messages":[{"role":"user","content":["a" "b"]}]}',
        b'{"messages":[[{"role":1},]]}',
        b'{"messages":[{"role":"user","content":[{"type":"tool_result","content":[{"a"}]}]}]}',
        b'{"system":[{"text"}],"messages":[]}',
        b'{"input":[{"role":"user",}]}',
        b'{"prompt":["a",]}',
        b'{"prompt":["a" "b"]}',
        b'{"query":["a",],"documents":[]}',
        b'{"query":"a","documents":["b",]}',
        b'{"text_1":"a","text_2":[x]}',
        b'{"texts":["a",]}',
    ],
)
def test_a_broken_body_is_malformed_and_tells_nothing(body: bytes) -> None:
    for need_prefix in (True, False):
        scanned = scan_json(body, 1, (b"user",), need_prefix)
        assert scanned.status == MALFORMED
        empty = (None, None, False, None, (None,), None, 0, None)
        assert empty == (
            scanned.model,
            scanned.model_span,
            scanned.stream,
            scanned.max_tokens,
            scanned.values,
            scanned.blocks,
            scanned.prefix_bytes,
            scanned.prompt_tokens,
        )
        assert read(body, need_prefix=need_prefix) == RequestBody(malformed=True, session_values=(None,))


@pytest.mark.parametrize("body", [b'{"model":"m","messages":[{"role":"user","content":"x\\\\"}],"n":[{"a":"}"}]}'])
def test_every_truncation_of_a_body_is_malformed(body: bytes) -> None:
    assert scan(body).status == OK
    for end in range(len(body)):
        assert scan(body[:end]).status == MALFORMED


@pytest.mark.parametrize("backslashes", [*range(6), *range(60, 70), *range(125, 131), 255, 256, 257, 1000])
@pytest.mark.parametrize("before", [0, 1, 50, 63, 64, 65])
def test_a_quotation_mark_ends_a_string_after_an_even_number_of_backslashes(backslashes: int, before: int) -> None:
    body = b'{"a":"' + b"x" * before + b"\\" * backslashes + b'","prompt":"p"}'
    nested = b'{"a":["' + b"x" * before + b"\\" * backslashes + b'"],"prompt":"p"}'
    if backslashes % 2 == 0:
        assert prefix(body) == prefix(nested) == chained(b"\x10p")
    else:
        assert scan(body).status == MALFORMED
        assert scan(nested).status == MALFORMED


def test_nesting_is_bounded() -> None:
    for open_, close in ((b"[", b"]"), (b'{"a":', b"}")):
        value = open_ * 10_000 + b"1" + close * 10_000
        assert scan(b'{"prompt":"p","x":' + value + b"}").status == OK
        deeper = open_ + value + close
        assert scan(b'{"prompt":"p","x":' + deeper + b"}").status == MALFORMED
    assert scan(b"[" * 1_000_000).status == MALFORMED


@pytest.mark.parametrize("end", [b"]}", b"]"])
def test_extra_memory_is_bounded_and_given_back(end: bytes) -> None:
    # The worst for the table of long strings: as many as can be, each just long enough.
    body = b'{"prompt":[' + b",".join([b'"' + b"x" * 256 + b'"'] * 8000) + end
    scan(body, 256)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        status = scan(body, 256).status
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert status == (OK if end == b"]}" else MALFORMED)
    assert peak - before > 8000 * 16  # the table is seen at all
    assert peak - before <= len(body) // 8 + 2 * 8 * len(body) // 256 + 4096
    assert after - before < 1024


# ---- read_request.


def test_a_json_body_is_read() -> None:
    body = b'{"model":"m","user":"u","stream":true,"max_tokens":3,"prompt":[1,2]}'
    blocks = scan(body).blocks
    expected = RequestBody("m", True, True, False, blocks, 10, 2, 3, (b"u",), (9, 12))
    assert read(body) == expected
    for content_type in (b"", b"Application/JSON; charset=utf-8", b"application/vnd.x+json"):
        assert read(body, content_type) == expected
    assert read(body, need_prefix=False).blocks is None
    assert read(body, need_prefix=False).readable


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        (JSON, b""),
        (b"multipart/form-data; boundary=X", b""),
        (b"text/plain", b'{"model":"m","prompt":"x"}'),
        (b"application/x-www-form-urlencoded", b"model=m"),
        (b"application/octet-stream", bytes(range(256))),
        (b"text/json5+json", b"{}"),
    ],
)
def test_a_body_of_another_type_is_neither_readable_nor_malformed(content_type: bytes, body: bytes) -> None:
    assert read(body, content_type) == RequestBody(session_values=(None,))


FORM = b"multipart/form-data; boundary=XX"


def form(*parts: tuple[str, str | bytes]) -> bytes:
    out = b""
    for name, value in parts:
        file = b'; filename="f"' if isinstance(value, bytes) else b""
        data = value if isinstance(value, bytes) else value.encode()
        out += b"--XX\r\nContent-Disposition: form-data; name=" + name.encode() + file + b"\r\n\r\n" + data + b"\r\n"
    return out + b"--XX--\r\n"


def test_a_form_is_read() -> None:
    body = form(("file", b"RIFF" * 1000), ("model", "wh"), ("stream", "true"), ("user", "a"), ("user", "u"))
    request = read(body, FORM, path=b"/v1/audio/transcriptions?x=1")
    digest = xxhash.xxh64_digest(b"RIFF" * 1000)[::-1]
    canonical = b"\x17\x04\0\0\0file" + digest
    for name, value in ((b"stream", b"true"), (b"user", b"a"), (b"user", b"u")):
        canonical += b"\x16" + len(name).to_bytes(4, "little") + len(value).to_bytes(8, "little") + name + value
    seed = xxhash.xxh64_intdigest(b"/v1/audio/transcriptions", xxhash.xxh64_intdigest(b"wh"))
    assert request.blocks is not None
    assert request.blocks.tolist() == chained(canonical, seed)
    assert (request.model, request.stream, request.readable, request.malformed) == ("wh", True, True, False)
    assert (request.prefix_bytes, request.session_values) == (len(canonical), (b"u",))
    unhashed = read(body, FORM, need_prefix=False)
    assert (unhashed.blocks, unhashed.readable, unhashed.prefix_bytes) == (None, True, len(canonical))


def test_forms_differ_by_file_by_text_and_by_path() -> None:
    base = read(form(("model", "m"), ("file", b"a"), ("language", "de")), FORM).blocks
    for other in (
        read(form(("model", "m"), ("file", b"b"), ("language", "de")), FORM),
        read(form(("model", "m"), ("file", b"a"), ("language", "en")), FORM),
        read(form(("model", "n"), ("file", b"a"), ("language", "de")), FORM),
        read(form(("model", "m"), ("file", b"a"), ("language", "de")), FORM, path=b"/v1/audio/translations"),
    ):
        assert other.blocks != base
    assert read(form(("file", b"a"), ("model", "m"), ("language", "de")), FORM).blocks == base


def test_a_long_text_of_a_form_counts_as_a_file_and_is_no_value() -> None:
    at_limit = read(form(("t", "x" * TEXT_LIMIT_BYTES)), FORM)
    beyond = read(form(("t", "x" * (TEXT_LIMIT_BYTES + 1))), FORM)
    assert at_limit.prefix_bytes == 14 + TEXT_LIMIT_BYTES
    assert beyond.prefix_bytes == 14
    assert read(form(("user", "u" * VALUE_LIMIT_BYTES)), FORM).session_values == (b"u" * VALUE_LIMIT_BYTES,)
    assert read(form(("user", "u" * (VALUE_LIMIT_BYTES + 1))), FORM).session_values == (None,)


@pytest.mark.parametrize("content_type", [FORM, b"multipart/form-data"])
def test_a_broken_form_is_malformed(content_type: bytes) -> None:
    assert read(form(("a", "1"))[:-8], content_type) == RequestBody(malformed=True, session_values=(None,))


# ---- What a real engine was sent.


def fixture_body(path: Path) -> tuple[bytes, bytes]:
    head, _, body = path.read_bytes().partition(b"\r\n\r\n")
    types = [line[14:] for line in head.split(b"\r\n") if line.startswith(b"Content-Type: ")]
    return (types[0] if types else b""), body


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("*.req.http")), ids=lambda path: path.name)
def test_the_recorded_requests_are_read_as_json_reads_them(path: Path) -> None:
    content_type, body = fixture_body(path)
    request = read(body, content_type)
    try:
        value = json.loads(body)
    except ValueError:
        assert not request.readable
        assert request.malformed is (bool(body) and content_type in (b"", JSON))
        return
    if content_type not in (b"", JSON):
        assert request == RequestBody(session_values=(None,))
        return
    prompts = ("messages", "prompt", "input", "query", "text_1")
    assert request.model == value.get("model")
    assert request.stream is (value.get("stream") is True)
    assert request.readable is any(field in value for field in prompts)
    assert not request.malformed


def test_there_are_recorded_requests() -> None:
    assert len(list(FIXTURES.glob("*.req.http"))) > 40


def test_recorded_requests_with_one_prompt_share_its_prefix() -> None:
    def blocks(name: str) -> Any:
        return read(fixture_body(FIXTURES / f"{name}.req.http")[1]).blocks

    assert blocks("chat") == blocks("render-chat") == blocks("tokenize-chat")
    assert blocks("cached-first") == blocks("cached-second")
    assert blocks("cached-first") != blocks("cached-other-salt")
    assert blocks("completion") == blocks("completion-stream") == blocks("tokenize-prompt")
