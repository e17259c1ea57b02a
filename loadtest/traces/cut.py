"""python loadtest/traces/cut.py SOURCE TARGET: how agents.jsonl.gz was cut from lmcache_agents.jsonl.gz (README.md).

Keeps the first ten minutes, without sessions that have a prompt above 12,288 or an answer above 2,048 tokens; times
from 0; ids and sessions numbered anew in order of their first use. The same source gives the same bytes.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

SPAN_MS = 600_000
MAX_PROMPT_TOKENS = 12_288
MAX_OUTPUT_TOKENS = 2_048


def main() -> int:
    source, target = map(Path, sys.argv[1:])
    with gzip.open(source) as file:
        requests = [json.loads(line) for line in file]
    long = {r["s"] for r in requests if r["in"] > MAX_PROMPT_TOKENS or r["out"] > MAX_OUTPUT_TOKENS}
    start_ms = requests[0]["t_ms"]
    kept = [r for r in requests if r["s"] not in long and r["t_ms"] < start_ms + SPAN_MS]
    start_ms = kept[0]["t_ms"]
    ids: dict[int, int] = {}
    sessions: dict[int, int] = {}
    lines = []
    for request in kept:
        cut = {
            "t_ms": request["t_ms"] - start_ms,
            "in": request["in"],
            "out": request["out"],
            "hash_ids": [ids.setdefault(block_id, len(ids)) for block_id in request["hash_ids"]],
            "s": sessions.setdefault(request["s"], len(sessions)),
        }
        lines.append(json.dumps(cut, separators=(",", ":")) + "\n")
    target.write_bytes(gzip.compress("".join(lines).encode(), 9, mtime=0))
    return 0


if __name__ == "__main__":
    sys.exit(main())
