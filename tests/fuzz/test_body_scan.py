"""Invariant: no bytes crash the reader, hang it or make it raise; what json accepts is never malformed and has the same
model and stream as json finds; what is cut short is always malformed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from native.body_scan import MALFORMED, OK, UNKNOWN_SHAPE, scan_json
from router.wire.openai_request import read_request

# Wall time says nothing about a body: the machine may be busy.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

FIXTURES = Path(__file__).parents[1] / "fixtures" / "vllm" / "http"

SEEDS = [
    *sorted({path.read_bytes().partition(b"\r\n\r\n")[2] for path in FIXTURES.glob("*.req.http")}),
    b'{"model":"\\ud83d\\ude00\\ud800","messages":[{"role":"user","content":[{"type":"text","text":"a\\\\\\"b"},{"type":'
    b'"image_url","image_url":{"url":"data:image/png;base64,'
    + b"A"
    * 300
    + b'"}},{"type":"tool_result","content":["x",'
    b'{"type":"tool_use","input":{}}]}]},[{"role":"tool"}],"s",[1,2],null],"cache_salt":"s\\n","user":-5,"stream":true}',
    b'{"input":[{"role":"user","content":"'
    + b'\\"' * 200
    + b'"},{"type":"function_call_output","output":"data:'
    + b"B" * 400
    + b'"}],"instructions":[{"text":"i"}],"tools":[{"a":[[],{}]}],"max_output_tokens":12}',
    b'{"prompt":[[1,22,333],[4444,55555,666666,7777777,88888888,999999999]],"token_ids":[2147483647,2147483648]}',
    b'{"query":{"text":"q"},"documents":["a",{"b":"c"}],"text_1":["x",[1]],"text_2":null,"items":[1.5e3,-0]}',
]
# Bytes that mean something to the reader are likelier than others.
STRUCTURE = b'"\\{}[]:,\x00\x01\x03 nulltrue0123-.eE/u\xff\xef'


def check(body: bytes) -> None:
    for block_bytes, need_prefix in ((1, True), (64, True), (64, False)):
        scanned = scan_json(body, block_bytes, (b"user",), need_prefix)
        assert scanned.status in (OK, UNKNOWN_SHAPE, MALFORMED)
    try:
        value: Any = json.loads(body.decode())
    except (ValueError, RecursionError):
        return
    assert scanned.status != MALFORMED
    if isinstance(value, dict):
        model = value.get("model")
        expected = (
            model.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if isinstance(model, str) else None
        )
        assert scanned.model == expected
        assert scanned.stream is (value.get("stream") is True)
    else:
        assert scanned.status == UNKNOWN_SHAPE


@unhurried
@given(st.binary(max_size=300))
@example(b"")
@example(b'"')
@example(b"\\" * 200 + b'"')
def test_any_bytes(body: bytes) -> None:
    check(body)
    check(b'{"messages":[' + body + b"]}")


@unhurried
@given(st.text(alphabet=STRUCTURE.decode("latin-1"), max_size=200))
def test_any_structure(text: str) -> None:
    body = text.encode("latin-1")
    check(body)
    check(b'{"prompt":[' + body + b'],"messages":[{"role":"user","content":[' + body + b"]}]}")


@pytest.mark.parametrize("seed", range(len(SEEDS)))
def test_mutations_of_real_bodies(seed: int) -> None:
    generator = random.Random(seed)
    for _ in range(150):
        body = bytearray(SEEDS[seed])
        for _ in range(generator.randint(1, 4)):
            if not body:
                break
            at = generator.randrange(len(body))
            match generator.randrange(4):
                case 0:
                    body[at] = generator.choice(STRUCTURE)
                case 1:
                    body[at] ^= 1 << generator.randrange(8)
                case 2:
                    del body[at : at + generator.choice((1, 1, 2, 70))]
                case 3:
                    body[at:at] = body[at : at + generator.choice((1, 2, 65))]
        check(bytes(body))


@pytest.mark.parametrize("seed", range(len(SEEDS)))
def test_a_body_cut_short_is_malformed(seed: int) -> None:
    body = SEEDS[seed].rstrip()
    if scan_json(body, 64).status == MALFORMED or not body.startswith(b"{"):
        return
    ends = range(len(body)) if len(body) < 2000 else random.Random(seed).sample(range(len(body)), 500)
    for end in ends:
        assert scan_json(body[:end], 64).status == MALFORMED


@unhurried
@given(
    st.sampled_from(
        [b"application/json", b"multipart/form-data; boundary=X", b"multipart/form-data", b"", b"text/plain"]
    ),
    st.lists(
        st.one_of(
            st.binary(max_size=20),
            st.sampled_from(
                [
                    b"--X",
                    b"\r\n",
                    b"\r\n--X",
                    b"--",
                    b"\r\n\r\n",
                    b'Content-Disposition: form-data; name="model"',
                    b"; filename=a",
                    b'{"model":"m"}',
                ]
            ),
        ),
        max_size=12,
    ),
    st.binary(max_size=40),
)
def test_any_request(content_type: bytes, pieces: list[bytes], parameters: bytes) -> None:
    body = b"".join(pieces)
    for each in (content_type, content_type + parameters, parameters):
        request = read_request(each, b"/v1/x", body, 16, ("user",), True)
        assert len(request.session_values) == 1
        assert not (request.readable and request.malformed)
