"""The engine model's times from a running engine: what a step costs, a prefill token, a running sequence.

    python -m loadtest.policy.calibrate http://127.0.0.1:8000 [--largest 2048] [--repeats 7] [--batches 1 2 4 8]

The engine must have nothing else to do. Prompts are token ids that no cache has seen, small enough for one step.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from random import Random
from statistics import fmean, median

import aiohttp

from router.sim.engine_model import EngineConfig

IDS = (1000, 30_000)  # of prompts: no special tokens, in any vocabulary of today
SHORT_TOKENS = 32  # prompt of those that decode


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.policy.calibrate", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("url", help="an engine with nothing else to do")
    parser.add_argument("--model", help="default: the first of /v1/models")
    parser.add_argument("--largest", type=int, default=2048, help="tokens; at most max_num_batched_tokens")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8], help="sequences that decode together")
    parser.add_argument("--output", type=int, default=64, help="tokens that each of those decodes")
    options = parser.parse_args(arguments)
    if options.largest < 8 or options.repeats < 1 or min(options.batches) < 1 or options.output < 8:
        parser.error("--largest and --output from 8, --repeats and --batches from 1")
    try:
        prefills, decodes = asyncio.run(measure(options))
    except (aiohttp.ClientError, OSError) as error:
        print(f"{options.url}: {error}", file=sys.stderr)
        return 1
    print(describe(fit(prefills, decodes), prefills, decodes))
    return 0


def fit(prefills: Sequence[tuple[int, float]], decodes: Sequence[tuple[int, float]]) -> EngineConfig:
    """`prefills`: tokens and seconds to the first token on an idle engine; `decodes`: sequences and seconds between
    tokens. ValueError where two sizes of each lack."""
    step_s, prefill_token_s = line(prefills)
    both_s, decode_seq_s = line(decodes)
    step_s, decode_seq_s = max(step_s, 0.0), max(decode_seq_s, 0.0)
    return EngineConfig(
        step_s=step_s,
        prefill_token_s=max(prefill_token_s, 1e-9),
        decode_s=max(both_s - step_s, 0.0),
        decode_seq_s=decode_seq_s,
    )


def line(samples: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Intercept and slope by least squares, through the median of each size."""
    sizes = sorted({size for size, _ in samples})
    if len(sizes) < 2:
        raise ValueError("a line needs two sizes")
    middles = [median(seconds for size, seconds in samples if size == wanted) for wanted in sizes]
    mean_x, mean_y = fmean(sizes), fmean(middles)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(sizes, middles, strict=True)) / sum(
        (x - mean_x) ** 2 for x in sizes
    )
    return mean_y - slope * mean_x, slope


def describe(config: EngineConfig, prefills: Sequence[tuple[int, float]], decodes: Sequence[tuple[int, float]]) -> str:
    lines = [
        f"step_s={config.step_s:.6f}, prefill_token_s={config.prefill_token_s:.9f}, "
        f"decode_s={config.decode_s:.6f}, decode_seq_s={config.decode_seq_s:.6f}"
    ]
    for what, samples in (("prefill tokens", prefills), ("sequences", decodes)):
        for size in sorted({size for size, _ in samples}):
            seen = median(seconds for one, seconds in samples if one == size)
            model = config.step_duration_s(size, 0) if samples is prefills else config.step_duration_s(0, size)
            lines.append(f"{size:6d} {what}: {1e3 * seen:8.2f} ms, the model {1e3 * model:8.2f} ms")
    return "\n".join(lines)


async def measure(options: argparse.Namespace) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    rng = Random(1)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(options.url, timeout=timeout, raise_for_status=True) as session:
        model = options.model
        if model is None:
            async with session.get("/v1/models") as answer:
                model = (await answer.json())["data"][0]["id"]
        sizes = [options.largest // 8 * part for part in (1, 2, 4, 6, 8)]
        prefills: list[tuple[int, float]] = []
        await stream(session, model, prompt(rng, SHORT_TOKENS), 4)  # connections, warm-up
        for _ in range(options.repeats):
            for size in sizes:
                times = await stream(session, model, prompt(rng, size), 1)
                prefills.append((size, times[1] - times[0]))
        decodes: list[tuple[int, float]] = []
        for _ in range(options.repeats):
            for batch in options.batches:
                wanted = [stream(session, model, prompt(rng, SHORT_TOKENS), options.output) for _ in range(batch)]
                for times in await asyncio.gather(*wanted):
                    # The first tokens come while others are still prefilled, the last ones in a smaller batch.
                    inner = times[1 + len(times) // 4 : len(times) - len(times) // 8]
                    if len(inner) > 1:
                        decodes.append((batch, (inner[-1] - inner[0]) / (len(inner) - 1)))
    return prefills, decodes


def prompt(rng: Random, tokens: int) -> list[int]:
    return [rng.randrange(*IDS) for _ in range(tokens)]


async def stream(session: aiohttp.ClientSession, model: str, ids: list[int], output: int) -> list[float]:
    """When it was sent, and when each token came."""
    body = {
        "model": model,
        "prompt": ids,
        "max_tokens": output,
        "min_tokens": output,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    times = [time.perf_counter()]
    async with session.post("/v1/completions", json=body) as answer:
        async for row in answer.content:
            if row.startswith(b"data:") and b"[DONE]" not in row:
                times.append(time.perf_counter())
    if len(times) < 2:
        raise aiohttp.ClientPayloadError("a stream without a token")
    return times


if __name__ == "__main__":
    sys.exit(main())
