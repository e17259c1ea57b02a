"""An alias in a body becomes the model's name: that, and no other byte; and the prefix is the one of the model."""

from __future__ import annotations

import json
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from router.wire.openai_request import RequestBody, read_request, with_model

TARGETS = st.sampled_from(["meta/Llama-3", "модель", '"q\\"', "a\u2028b", "日本/模型 7b", "x" * 300, "😀"])
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=12),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6) | st.just("model"), inner, max_size=3)
    ),
    max_leaves=8,
)
space = st.sampled_from(["", " ", "\n\t", "\r\n  "])


@st.composite
def spelled(draw: st.DrawFn, text: str) -> str:
    """A JSON string for `text`, with escapes where they are not needed."""
    out = []
    for char in text:
        way = draw(st.integers(0, 3))
        if way == 0 or char in '"\\' or ord(char) < 0x20:
            out.append(json.dumps(char)[1:-1])
        elif way == 1:
            encoded = char.encode("utf-16-be")
            out.extend(f"\\u{int.from_bytes(encoded[i : i + 2], 'big'):04X}" for i in range(0, len(encoded), 2))
        else:
            out.append(char)
    return '"' + "".join(out) + '"'


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, str]:
    """An alias, and a JSON object in which it is the last top-level `model`."""
    alias = draw(st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=8))
    members = [
        draw(spelled(draw(st.sampled_from(["messages", "user", "prompt", "mode", "Model", "m"]))))
        + draw(space)
        + ":"
        + draw(space)
        + json.dumps(draw(values), ensure_ascii=draw(st.booleans()))
        for _ in range(draw(st.integers(0, 4)))
    ]
    for _ in range(draw(st.integers(0, 2))):
        earlier = draw(spelled("model")) + ":" + json.dumps(draw(values))
        members.insert(draw(st.integers(0, len(members))), earlier)
    last = draw(spelled("model")) + draw(space) + ":" + draw(space) + draw(spelled(alias))
    at = max((i + 1 for i, m in enumerate(members) if json.loads("{" + m + "}").keys() == {"model"}), default=0)
    members.insert(draw(st.integers(at, len(members))), last)
    return alias, draw(space) + "{" + (draw(space) + ",").join(members) + "}" + draw(space)


def read(body: bytes, content_type: bytes = b"application/json", **seeds: Any) -> RequestBody:
    return read_request(content_type, b"/v1/x", body, 8, (), True, **seeds)


def hashes(seen: RequestBody) -> list[int] | None:
    return None if seen.blocks is None else seen.blocks.tolist()


@given(bodies(), TARGETS)
def test_only_the_last_model_changes(aliased: tuple[str, str], target: str) -> None:
    alias, text = aliased
    body = text.encode()
    seen = read(body, seeds={alias: target.encode()})
    assert seen.model == alias == orjson.loads(body)["model"]
    assert seen.model_span is not None
    start, end = seen.model_span
    assert orjson.loads(body[start:end]) == alias
    spliced = with_model(body, seen, target)
    assert orjson.loads(spliced) == orjson.loads(body) | {"model": target}
    assert spliced.startswith(body[:start])
    assert spliced.endswith(body[end:])
    direct = read(spliced)
    assert direct.model == target
    assert hashes(seen) == hashes(direct)
    assert seen.prefix_bytes == direct.prefix_bytes


@given(st.lists(values, max_size=3), TARGETS)
def test_a_body_without_a_model_has_the_prefix_of_the_default(messages: list[Any], target: str) -> None:
    named = orjson.dumps({"model": target, "messages": messages})
    for absent in ({"messages": messages}, {"model": None, "messages": messages}):
        seen = read(orjson.dumps(absent), default_seed=target.encode())
        assert seen.model is None
        assert seen.model_span is None
        assert hashes(seen) == hashes(read(named))


def form(*parts: tuple[str, bytes, str]) -> bytes:
    """Name, value and further parameters of each part."""
    return (
        b"".join(
            f'--XX\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + value + b"\r\n"
            for name, value, more in parts
        )
        + b"--XX--\r\n"
    )


FORM = b"multipart/form-data; boundary=XX"
part_values = st.binary(max_size=40).filter(lambda value: b"--XX" not in value)


@given(
    st.lists(
        st.tuples(st.sampled_from(["file", "language", "model"]), part_values, st.sampled_from(["", '; filename="a"'])),
        max_size=4,
    ),
    st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=8).filter(lambda a: "--XX" not in a),
    TARGETS,
)
def test_the_last_model_field_of_a_form_changes(before: list[tuple[str, bytes, str]], alias: str, target: str) -> None:
    parts = [*before, ("model", alias.encode(), ""), ("temperature", b"0", "")]
    body = form(*parts)
    seen = read(body, FORM, seeds={alias: target.encode()})
    assert seen.model == alias
    spliced = with_model(body, seen, target)
    assert spliced == form(*before, ("model", target.encode(), ""), ("temperature", b"0", ""))
    direct = read(spliced, FORM)
    assert direct.model == target
    assert hashes(seen) == hashes(direct)
