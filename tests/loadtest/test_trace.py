"""Traces: what is read, and that each fault is named with its place."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.replay import trace as trace_module
from loadtest.replay.trace import TraceError, load_trace
from tests.rules.source_tree import ROOT

AGENTS = ROOT / "loadtest" / "traces" / "agents.jsonl.gz"


def line(t_ms: Any = 0, tokens: Any = 40, output: Any = 5, ids: Any = (0, 1, 2), **more: Any) -> dict[str, Any]:
    return {"t_ms": t_ms, "in": tokens, "out": output, "hash_ids": list(ids) if isinstance(ids, tuple) else ids, **more}


@pytest.fixture
def write(tmp_path):
    def file(*lines: Any, name: str = "small.jsonl", compress: bool = False) -> Path:
        text = "".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines).encode()
        path = tmp_path / name
        path.write_bytes(gzip.compress(text) if compress else text)
        return path

    return file


@pytest.mark.parametrize("compress", [False, True])
def test_a_trace_is_read_compressed_or_not(write, compress):
    path = write(line(500, s=7), "", line(1750.5, 17, 3, (0, 9), s="a"), name="x.jsonl.gz", compress=compress)
    trace = load_trace(path)
    assert (trace.name, trace.block_tokens, trace.span_s) == ("x", 16, 1.2505)
    first, second = trace.requests
    assert (first.at_s, first.prompt_tokens, first.output_tokens, first.block_ids, first.session) == (
        0.0,
        40,
        5,
        (0, 1, 2),
        "7",
    )
    assert (second.at_s, second.block_ids, second.session) == (1.2505, (0, 9), "a")


def test_the_names_of_mooncakes_release_are_read(write):
    trace = load_trace(
        write({"timestamp": 27, "input_length": 600, "output_length": 9, "hash_ids": [46, 47], "extra": None})
    )
    assert trace.block_tokens == 512
    assert trace.requests[0].session is None


def test_the_small_trace_of_the_repository_is_what_its_readme_says():
    trace = load_trace(AGENTS)
    assert AGENTS.stat().st_size < 500_000
    assert (len(trace.requests), trace.block_tokens) == (824, 16)
    assert len({request.session for request in trace.requests}) == 43
    assert max(request.prompt_tokens for request in trace.requests) <= 12_288
    assert max(request.output_tokens for request in trace.requests) <= 2_048
    assert trace.endless_hit_ratio() == pytest.approx(0.905, abs=0.001)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("{", "not JSON"),
        ("[1]", "[1] is not an object"),
        ({"in": 1, "out": 1, "hash_ids": [1]}, "t_ms is missing"),
        (line(t_ms="soon"), "t_ms: 'soon': expected milliseconds"),
        (line(t_ms=True), "t_ms: True: expected milliseconds"),
        (line(t_ms=-1), "t_ms: -1: expected milliseconds from 0"),
        (line(t_ms=1e300), "expected milliseconds from 0 to ten years"),
        (line(tokens=0), "in: 0: expected a number of tokens"),
        (line(tokens=1.5), "in: 1.5: expected a number of tokens"),
        (line(tokens=10_000_001), "expected a number of tokens, 1 to 10,000,000"),
        (line(output=0), "out: 0: expected a number of tokens"),
        (line(output=None), "out: None: expected"),
        (line(ids=[]), "hash_ids: []: expected a list"),
        (line(ids="0"), "hash_ids: '0': expected a list"),
        (line(ids=[0, "1", 2]), "hash_ids: '1': expected a whole number"),
        (line(ids=[0, -1, 2]), "hash_ids: -1: expected a whole number"),
        (line(ids=[0, 1 << 64, 2]), "2^64 - 1"),
        (line(tokens=2), "3 blocks for 2 tokens"),
        (line(s=[]), "s: []: expected a number or a string"),
        (line(s="two words"), "ASCII characters without blanks"),
        (line(s="x\r\ny: z"), "ASCII characters without blanks"),
        (line(s="x" * 129), "expected 1 to 128"),
        (line(tokens=60), "hash_ids: 60 tokens are not 3 blocks of 16"),
    ],
)
def test_a_bad_line_is_named_with_its_number_and_what_was_expected(write, bad, why):
    path = write(line(tokens=48), line(tokens=17, ids=(0, 1)), bad)
    with pytest.raises(TraceError) as caught:
        load_trace(path)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert why in str(caught.value)


def test_lines_out_of_order_are_refused(write):
    with pytest.raises(TraceError, match=r"small.jsonl:2: t_ms: 5 is before the line above \(6\)"):
        load_trace(write(line(6), line(5)))


def test_an_empty_file_is_refused(write):
    with pytest.raises(TraceError, match="no request in it"):
        load_trace(write(""))


def test_a_damaged_compressed_file_is_refused(write, tmp_path):
    whole = write(*[line(at) for at in range(1000)], compress=True).read_bytes()
    cut = tmp_path / "cut.gz"
    cut.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceError, match="damaged"):
        load_trace(cut)


def test_lines_and_requests_are_bounded(write, monkeypatch):
    monkeypatch.setattr(trace_module, "MAX_LINE_BYTES", 100)
    assert len(load_trace(write(line(), line(tokens=33))).requests) == 2
    with pytest.raises(TraceError, match=":1: a line above"):
        load_trace(write(line(s="x" * 60)))
    monkeypatch.setattr(trace_module, "MAX_REQUESTS", 2)
    assert len(load_trace(write(line(), line(tokens=33))).requests) == 2
    with pytest.raises(TraceError, match=":3: more than 2 requests"):
        load_trace(write(line(), line(), line()))


def test_an_unclear_block_size_is_asked_for_and_may_be_given(write):
    path = write(line(tokens=200, ids=(1,)))
    with pytest.raises(TraceError, match="blocks of 200 to 10000000 tokens: say which, --block-tokens N"):
        load_trace(path)
    assert load_trace(path, 512).block_tokens == 512
    with pytest.raises(TraceError, match=":1: hash_ids: 200 tokens are not 1 blocks of 128"):
        load_trace(path, 128)


def test_a_cache_that_forgets_nothing_serves_whole_known_blocks_but_never_the_last_token(write):
    trace = load_trace(write(line(ids=(0, 1, 2)), line(ids=(0, 1, 3)), line(tokens=48, ids=(0, 1, 2)), line(tokens=33)))
    # 32 of 40, 47 of 48, 32 of 33.
    assert trace.endless_hit_ratio() == (32 + 47 + 32) / (40 + 40 + 48 + 33)


def test_requests_that_share_a_time_are_counted(write):
    assert load_trace(write(line(0), line(0), line(0), line(5), line(6), line(6))).crowded == 3
