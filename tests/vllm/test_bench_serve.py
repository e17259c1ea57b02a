"""vLLM's own load generator runs through the gateway."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.vllm.engines import MODEL

pytestmark = pytest.mark.vllm

PROMPTS = 24


def test_prefix_repetition_runs_through(
    base_url: str, vllm_environment: Path, tmp_path: Path, figures: list[str]
) -> None:
    command = [
        *(str(vllm_environment / "bin" / "vllm"), "bench", "serve"),
        *("--backend", "openai-chat", "--base-url", base_url, "--endpoint", "/v1/chat/completions"),
        *("--model", MODEL, "--tokenizer", str(vllm_environment / "kvgate-model")),
        *("--dataset-name", "prefix_repetition", "--prefix-repetition-prefix-len", "512"),
        *("--prefix-repetition-suffix-len", "64", "--prefix-repetition-num-prefixes", "4"),
        *("--prefix-repetition-output-len", "8", "--num-prompts", str(PROMPTS), "--max-concurrency", "6"),
        *("--ignore-eos", "--temperature", "0", "--seed", "1"),
        *("--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json"),
    ]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (PROMPTS, 0)
    assert result["total_output_tokens"] == PROMPTS * 8
    figures.append(
        f"vllm bench serve, prefix_repetition: {result['completed']} of {PROMPTS}, "
        f"mean TTFT {result['mean_ttft_ms']:.0f} ms, p99 {result['p99_ttft_ms']:.0f} ms"
    )
