"""Tokens of growing conversations with the cache of parts, beside the same without it, in the same run."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from router.tokens.local import LocalTokenizer
from router.tokens.model_folder import read_model_folder
from router.tokens.question import CHAT_PATH, read_prompt
from router.tokens.segment_cache import SegmentCache
from tests.support.tokenizer_folders import TEXTS, write_folder

WORDS = " ".join(TEXTS).split()
TURNS, WORDS_A_TURN = 30, 250


def conversation() -> list[bytes]:
    """The bodies of one conversation, turn by turn."""
    generator = random.Random(1)
    messages: list[dict[str, str]] = []
    bodies = []
    for _ in range(TURNS):
        for role in ("user", "assistant"):
            text = " ".join(generator.choice(WORDS) for _ in range(WORDS_A_TURN))
            messages.append({"role": role, "content": text})
            if role == "user":
                bodies.append(json.dumps({"messages": messages}).encode())
    return bodies


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "whole"])
def test_a_growing_conversation(benchmark: Callable[..., Any], tmp_path: Path, cached: bool) -> None:
    folder = read_model_folder(str(write_folder(tmp_path / "m", "words")))
    bodies = conversation()

    def fresh() -> tuple[tuple[LocalTokenizer], dict[str, Any]]:
        local = LocalTokenizer(folder, SegmentCache(64 * 1024 * 1024))
        if not cached:
            local.cache_off = "measured without"
        return (local,), {}

    def run(local: LocalTokenizer) -> int:
        return sum(len(local.tokenize(read_prompt(CHAT_PATH, body)).ids) for body in bodies)

    tokens = benchmark.pedantic(run, setup=fresh, rounds=5)  # type: ignore[attr-defined]
    benchmark.extra_info["microseconds_per_1000_tokens"] = benchmark.stats.stats.mean / tokens * 1e9  # type: ignore[attr-defined]
