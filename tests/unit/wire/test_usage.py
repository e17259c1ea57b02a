"""The usage object, from every API of vLLM, and what is not believed."""

from __future__ import annotations

import pytest

from router.wire.usage import NO_USAGE, Usage, read_usage


@pytest.mark.parametrize(
    ("raw", "usage"),
    [
        (b'{"prompt_tokens":9,"completion_tokens":4,"total_tokens":13}', Usage(9, None, 4)),
        (b'{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":8}}', Usage(9, 8, None)),
        (b'{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":0}}', Usage(9, 0, None)),
        (b'{"prompt_tokens":9,"prompt_tokens_details":null}', Usage(9, None, None)),
        (b'{"input_tokens":7,"input_tokens_details":{"cached_tokens":2},"output_tokens":3}', Usage(7, 2, 3)),
        (b'{"input_tokens":13,"output_tokens":0}', Usage(13, None, 0)),
        (
            b'{"input_tokens":1,"output_tokens":4,"cache_creation_input_tokens":64,"cache_read_input_tokens":32}',
            Usage(97, 32, 4),
        ),
        (b'{"input_tokens":9,"cache_creation_input_tokens":0,"cache_read_input_tokens":0}', Usage(9, 0, None)),
        (b'{"input_tokens":9,"cache_creation_input_tokens":-1,"cache_read_input_tokens":"x"}', Usage(9, None, None)),
    ],
)
def test_counts_are_read(raw: bytes, usage: Usage) -> None:
    assert read_usage(raw) == usage


@pytest.mark.parametrize(
    "raw",
    [
        None,
        b"{",
        b"{}",
        b'{"prompt_tokens":-1}',
        b'{"prompt_tokens":1.5}',
        b'{"prompt_tokens":true}',
        b'{"prompt_tokens":"9"}',
        b'{"prompt_tokens":1099511627776}',
        b'{"prompt_tokens_details":{"cached_tokens":5}}',
    ],
)
def test_what_is_not_a_plausible_count_says_nothing(raw: bytes | None) -> None:
    assert read_usage(raw) == NO_USAGE


def test_more_cached_than_prompted_is_a_lie() -> None:
    assert read_usage(b'{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":10}}') == Usage(9, None, None)
