"""Reading /metrics: recorded answers, every name since 0.8, and what no engine should send."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from router.backends.backend import EngineReport
from router.backends.vllm_metrics import LINES_LIMIT, parse

FIXTURES = Path(__file__).parents[2] / "fixtures" / "vllm"
UNKNOWN = EngineReport(running=None, waiting=None, kv_usage=None)
RECORDED = sorted(path.name for path in FIXTURES.glob("metrics-*.txt"))


def recorded(name: str) -> bytes:
    return (FIXTURES / name).read_bytes()


def reference_sum(text: bytes, name: str) -> float:
    """By the full parser of prometheus_client."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if sample.name == name
    )


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_answer_reads_as_the_full_parser_does(name: str) -> None:
    text = recorded(name)
    report = parse(text)
    assert report.running == reference_sum(text, "vllm:num_requests_running")
    assert report.waiting == reference_sum(text, "vllm:num_requests_waiting")
    assert report.prefix_queries == reference_sum(text, "vllm:prefix_cache_queries_total")
    assert report.prefix_hits == reference_sum(text, "vllm:prefix_cache_hits_total")
    assert report.prompt_tokens == reference_sum(text, "vllm:prompt_tokens_total")
    assert report.block_size_tokens == 32
    assert report.prefix_caching is True
    if b"request_prefill_time" in text:
        assert report.prefill_seconds_sum == reference_sum(text, "vllm:request_prefill_time_seconds_sum")
        assert report.prefill_count == reference_sum(text, "vllm:request_prefill_time_seconds_count")
        assert report.started_at == reference_sum(text, "process_start_time_seconds")


def test_there_are_recorded_answers() -> None:
    assert len(RECORDED) == 4


def test_an_engine_under_load() -> None:
    report = parse(recorded("metrics-under-load.txt"))
    assert (report.running, report.waiting) == (2, 6)
    assert report.kv_usage == pytest.approx(0.38095238095238093)
    assert (report.prefix_queries, report.prefix_hits) == (7953, 512)
    assert report.num_gpu_blocks == 64
    assert report.kv_capacity_tokens == 2048


def test_two_ranks_are_summed_and_their_capacity_is_not_counted_twice() -> None:
    report = parse(recorded("metrics-data-parallel-2.txt"))
    assert (report.prefix_queries, report.prefix_hits) == (500, 96)
    assert report.num_gpu_blocks == 128
    assert report.kv_cache_tokens == 4096
    assert report.kv_capacity_tokens == 4096


def test_capacity_without_the_engines_own_figure_is_blocks_by_block_size() -> None:
    config = b'vllm:cache_config_info{block_size="16",engine="%d",num_gpu_blocks="1000"} 1.0\n'
    report = parse(config % 0 + config % 1)
    assert report.kv_cache_tokens is None
    assert report.kv_capacity_tokens == 16_000


def test_the_engines_own_figure_wins_where_layers_share_blocks() -> None:
    report = parse(b'vllm:cache_config_info{block_size="8",kv_cache_size_tokens="463459",num_gpu_blocks="320"} 1\n')
    assert report.kv_capacity_tokens == 463_459


def test_only_the_label_of_that_very_name_is_the_block_size() -> None:
    report = parse(
        b'vllm:cache_config_info{_block_size_resolved="True",mamba_block_size="7",x="a,block_size=\\"9\\"",'
        b'block_size="32",user_specified_block_size="True"} 1.0\n'
    )
    assert report.block_size_tokens == 32


@pytest.mark.parametrize("value", ["None", "", "0", "-1", "1e3", "9" * 40, "16.0", "\\n"])
def test_a_block_size_that_is_no_positive_integer_is_unknown(value: str) -> None:
    report = parse(f'vllm:cache_config_info{{block_size="{value}",num_gpu_blocks="5"}} 1.0\n'.encode())
    assert report.block_size_tokens is None
    assert report.kv_capacity_tokens is None


def test_prefix_caching_is_off_if_one_rank_says_so() -> None:
    on = b'vllm:cache_config_info{enable_prefix_caching="True",engine="0"} 1.0\n'
    off = b'vllm:cache_config_info{enable_prefix_caching="False",engine="1"} 1.0\n'
    assert parse(on).prefix_caching is True
    assert parse(on + off).prefix_caching is False
    assert parse(off + on).prefix_caching is False
    assert parse(b'vllm:cache_config_info{enable_prefix_caching="None"} 1.0\n').prefix_caching is None


@pytest.mark.parametrize("suffix", ["", "_total"])
@pytest.mark.parametrize("prefix", ["vllm:", "vllm:gpu_"])
def test_prefix_counters_under_each_name(prefix: str, suffix: str) -> None:
    text = f'{prefix}prefix_cache_queries{suffix}{{m="a"}} 50\n{prefix}prefix_cache_hits{suffix}{{m="a"}} 20\n'
    report = parse(text.encode())
    assert (report.prefix_queries, report.prefix_hits) == (50, 20)


def test_old_counters_in_blocks_become_tokens() -> None:
    text = (
        b"# HELP vllm:gpu_prefix_cache_queries_total GPU prefix cache queries, in terms of number of queried blocks.\n"
        b"vllm:gpu_prefix_cache_queries_total 50.0\nvllm:gpu_prefix_cache_hits_total 20.0\n"
    )
    config = b'vllm:cache_config_info{block_size="16"} 1.0\n'
    report = parse(text + config)
    assert (report.prefix_queries, report.prefix_hits) == (800, 320)
    assert parse(text).prefix_queries is None
    in_tokens = parse(text.replace(b"queried blocks", b"queried tokens") + config)
    assert (in_tokens.prefix_queries, in_tokens.prefix_hits) == (50, 20)


def test_names_side_by_side_are_alternatives() -> None:
    report = parse(
        b"vllm:gpu_cache_usage_perc 0.9\nvllm:kv_cache_usage_perc 0.5\n"
        b"vllm:gpu_prefix_cache_queries_total 7\nvllm:prefix_cache_queries_total 100\n"
        b"vllm:gpu_prefix_cache_hits_total 7\nvllm:prefix_cache_hits_total 40\n"
    )
    assert report.kv_usage == 0.5
    assert (report.prefix_queries, report.prefix_hits) == (100, 40)


def test_the_oldest_name_of_the_kv_usage() -> None:
    assert parse(b'vllm:gpu_cache_usage_perc{model_name="m"} 0.25\n').kv_usage == 0.25


def test_usage_is_the_mean_and_load_the_sum_over_engines_and_models() -> None:
    report = parse(
        b'vllm:kv_cache_usage_perc{engine="0",model_name="a"} 0.2\n'
        b'vllm:kv_cache_usage_perc{engine="1",model_name="b"} 0.6\n'
        b'vllm:num_requests_running{engine="0",model_name="a"} 3\n'
        b'vllm:num_requests_running{engine="1",model_name="b"} 4\n'
    )
    assert report.kv_usage == pytest.approx(0.4)
    assert report.running == 7


@pytest.mark.parametrize(
    "text", [b"", b"\n\n", b"# HELP vllm:num_requests_running x\n", b"<html>404</html>", b"\xff\x00{"]
)
def test_what_is_not_there_is_none(text: bytes) -> None:
    assert parse(text) == UNKNOWN


def test_a_renamed_gauge_is_none_and_not_zero() -> None:
    text = recorded("metrics-under-load.txt").replace(b"num_requests_running", b"requests_running_now")
    report = parse(text)
    assert report.running is None
    assert report.waiting == 6


def test_a_name_that_only_starts_alike_is_another_metric() -> None:
    report = parse(
        b'vllm:num_requests_waiting_by_reason{reason="capacity"} 6.0\nvllm:prefix_cache_queries_created 1.7e9\n'
        b"vllm:prompt_tokens_cached_total 5\nexternal_vllm:num_requests_running 4\n"
    )
    assert report == UNKNOWN


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "inf", "-1", "x", "", "0x10", "1_0", "1e999", "1" * 65])
def test_a_sample_that_is_no_load_is_skipped(value: str) -> None:
    assert parse(f"vllm:num_requests_running {value}\n".encode()).running is None
    both = f'vllm:num_requests_running{{engine="0"}} {value}\nvllm:num_requests_running{{engine="1"}} 2\n'
    assert parse(both.encode()).running == 2


def test_a_sum_that_overflows_is_unknown() -> None:
    assert parse(b"vllm:num_requests_running 1e308\n" * 2).running is None


@pytest.mark.parametrize(
    ("line", "running"),
    [
        (b"vllm:num_requests_running 2.0", 2),
        (b"vllm:num_requests_running\t2.0\r", 2),
        (b"vllm:num_requests_running 2.0 1700000000000", 2),
        (b'vllm:num_requests_running{a="}"} 2', 2),
        (b'vllm:num_requests_running{a="x } 9 \\" {"} 2', 2),
        (b'vllm:num_requests_running{a="b"} 2 # {trace_id="x"} 0.5', 2),
        (b"vllm:num_requests_running{} 2e0", 2),
        (b'vllm:num_requests_running{a="b" 2', None),
        (b'vllm:num_requests_running{a="b} 2', None),
        (b"vllm:num_requests_running", None),
        (b"vllm:num_requests_running{", None),
        (b" vllm:num_requests_running 2", None),
    ],
)
def test_one_line(line: bytes, running: float | None) -> None:
    assert parse(line).running == running
    assert parse(b"x 1\n" + line + b"\ny 2").running == running


def test_lines_past_the_limit_make_the_answer_unreadable() -> None:
    line = b"vllm:num_requests_running 2"
    assert parse(b"\n" * (LINES_LIMIT - 1) + line).running == 2
    assert parse(line + b"\n" * LINES_LIMIT) == UNKNOWN


@given(st.binary(max_size=300))
def test_no_bytes_make_it_raise(noise: bytes) -> None:
    parse(noise)
    parse(b"vllm:num_requests_running" + noise)
    parse(b"vllm:cache_config_info{" + noise + b'block_size="16"} 1')


@given(st.data())
def test_a_cut_answer_never_raises_and_never_invents(data: st.DataObject) -> None:
    text = recorded("metrics-data-parallel-2.txt")
    report = parse(text[: data.draw(st.integers(0, len(text)))])
    assert report.prefix_hits in (None, 0, 9, 96)  # cut within the number at worst
    assert report.kv_cache_tokens in (None, 2048, 4096)


@pytest.mark.parametrize(
    "hostile",
    [
        b'vllm:num_requests_running{a="' + b"\\" * 1_000_000,
        b"vllm:num_requests_running{" + b"a" * 1_000_000,
        b'vllm:cache_config_info{a="' + b'" ,"' * 250_000 + b"} 1",
        b"vllm:cache_config_info{" + b',block_size="' * 80_000 + b"} 1",
        b"vllm:num_requests_running " + b"9" * 1_000_000,
        b"vllm:num_requests_running" + b" " * 1_000_000,
    ],
    ids=["backslashes", "open labels", "quotes", "open values", "digits", "blanks"],
)
def test_a_hostile_line_of_a_megabyte_is_passed_over_in_one_go(hostile: bytes) -> None:
    """Backtracking would take minutes here: that this test ends is the point."""
    assert parse(hostile) == UNKNOWN
    assert parse(hostile + b"\nvllm:num_requests_running 2").running == 2


@pytest.mark.parametrize("ending", ["_total", ""])
def test_what_came_from_a_cache_outside_is_summed_over_the_ranks(ending: str) -> None:
    lines = [
        f'vllm:external_prefix_cache_queries{ending}{{engine="{rank}"}} {queries}\n'
        f'vllm:external_prefix_cache_hits{ending}{{engine="{rank}"}} {hits}\n'
        for rank, queries, hits in ((0, 1000.0, 256.0), (1, 500.0, 0.0))
    ]
    report = parse("".join(lines).encode())
    assert (report.external_queries, report.external_hits) == (1500.0, 256.0)
    assert (report.prefix_queries, report.prefix_hits) == (None, None)


def test_an_engine_that_tells_nothing_of_a_cache_outside_is_unknown_not_zero() -> None:
    report = parse(b"vllm:prefix_cache_queries_total 1\n")
    assert (report.external_queries, report.external_hits) == (None, None)
