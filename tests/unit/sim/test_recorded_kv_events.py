"""The pool and the scheduler replay what a real vLLM 0.32 was asked, and must emit the same KV events."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from router.sim.block_pool import Cleared, PoolEvent, Removed, Stored
from router.sim.engine_model import EngineConfig, EngineModel, EngineRequest

FIXTURE = Path(__file__).parents[2] / "fixtures" / "vllm" / "kv-events" / "int-hashes.jsonl"
BLOCK = 32


def recorded_steps() -> list[tuple[str, str, list[Any]]]:
    """(step, note, events) in order; the messages of one step joined."""
    steps: list[tuple[str, str, list[Any]]] = []
    for line in FIXTURE.read_text().splitlines():
        entry = json.loads(line)
        events = entry["decoded"][1] if entry.get("decoded") else []
        if steps and steps[-1][0] == entry["step"]:
            steps[-1][2].extend(events)
        else:
            steps.append((entry["step"], entry["note"], list(events)))
    return steps


class Names:
    """Gives each recorded chain of tokens one number of ours, and remembers which recorded hash it was."""

    def __init__(self) -> None:
        self.ours: dict[int, int] = {}  # recorded -> ours

    def of(self, recorded: int) -> int:
        return self.ours.setdefault(recorded, len(self.ours) + 1)

    def render(self, events: list[Any]) -> list[PoolEvent]:
        rendered: list[PoolEvent] = []
        for event in events:
            if event["type"] == "AllBlocksCleared":
                rendered.append(Cleared())
            elif event["type"] == "BlockRemoved":
                rendered.append(Removed(self.of(event["block_hashes"][0])))
            else:
                hashes = tuple(self.of(value) for value in event["block_hashes"])
                parent = event["parent_block_hash"]
                rendered.append(Stored(None, 0, hashes, None if parent is None else self.of(parent)))
        return rendered


def without_owner(event: PoolEvent) -> PoolEvent:
    return Stored(None, 0, event.hashes, event.parent) if isinstance(event, Stored) else event


@pytest.mark.parametrize("chunk", [2048, 256, 64])
def test_events_are_those_of_the_recorded_engine(chunk: int) -> None:
    names = Names()
    model = EngineModel(EngineConfig(block_size=BLOCK, num_blocks=64, max_num_batched_tokens=chunk), emit_events=True)
    chains: dict[str, list[int]] = {}
    compared = 0
    for step, note, recorded in recorded_steps():
        expected = names.render(recorded)
        sizes = re.match(r"prompt (\d+), cached (\d+), output (\d+)", note)
        if step.startswith("reset"):
            assert model.reset_prefix_cache()
            continue
        stored = [value for event in expected if isinstance(event, Stored) for value in event.hashes]
        if sizes:
            prompt, cached, output = map(int, sizes.groups())
            base = {"repeat": "store", "extend": "store", "exact-multiple-again": "exact-multiple"}.get(step)
            hashes = chains[base][: cached // BLOCK] + stored if base else stored
            chains[step] = hashes
            requests = [EngineRequest(step, prompt, output, hashes)]
        elif step == "chat":
            requests, cached = [EngineRequest(step, 80, 6, stored)], 0
        else:
            # Two prompts of 40 tokens in one call, each of one full block; the real engine took them in two steps.
            assert step == "two-prompts-one-call"
            requests, cached = [EngineRequest(f"{step}-{at}", 40, 1, [value]) for at, value in enumerate(stored)], 0
        for request in requests:
            model.submit(request)
            while model.has_work:
                model.step(0.0)
            assert request.cached_tokens == cached, step
        seen = [without_owner(event) for event in model.take_events()]
        if chunk == 2048:
            assert seen == expected, step
        else:
            # Smaller chunks cut the runs differently; what comes and goes, and in which order, is the same.
            assert [h for e in seen if isinstance(e, Stored) for h in e.hashes] == stored, step
            assert [e for e in seen if isinstance(e, Removed)] == [e for e in expected if isinstance(e, Removed)], step
        model.check()
        compared += len(expected)
    assert compared > 50
