"""Placement policies against request traces.

python -m loadtest.policy table --traces DIR [--quick] [--seeds 3] [--out FILE]
python -m loadtest.policy robust --traces DIR [--seeds 3] [--out FILE]
python -m loadtest.policy report FILE...
python -m loadtest.policy find-rates --traces DIR
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

if "--pure" not in sys.argv:
    from loadtest.policy.compiled import use_compiled_model

    use_compiled_model()

from loadtest.policy.ours import EXACT, NAMES
from loadtest.policy.peers import PEERS
from loadtest.policy.report import render
from loadtest.policy.runs import SCENARIOS, Figures, Scenario, find_rate, run
from loadtest.policy.setups import FULL, QUICK, SOURCES, SetUp

POLICIES = (
    *(name for name in PEERS if name not in ("least ttft", "least loaded")),
    "leastload",
    "prefixaware",
    "kvaware",
    EXACT,
)
ROBUST_POLICIES = ("round robin", "dynamo x32", "llm-d latency", "prefixaware", "kvaware")

FORK = multiprocessing.get_context("fork")

Task = tuple[SetUp, Scenario, str, int]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.policy", description=(__doc__ or "").splitlines()[0])
    parts = parser.add_subparsers(dest="part", required=True)
    for name, explained in (("table", "every set-up, every policy"), ("robust", "the named scenarios, quick set-ups")):
        part = parts.add_parser(name, help=explained)
        part.add_argument("--traces", type=Path, required=True, help="folder with the traces")
        part.add_argument("--quick", action="store_true", help=f"{len(QUICK)} set-ups instead of {len(FULL)}")
        part.add_argument("--only", nargs="*", default=[], help="set-ups whose name starts so")
        part.add_argument("--policies", nargs="*", help=f"of: {', '.join((*PEERS, *NAMES))}")
        part.add_argument("--scenarios", nargs="*", help=f"of: {', '.join(SCENARIOS)}")
        part.add_argument("--seeds", type=int, default=3)
        part.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
        part.add_argument("--out", type=Path, help="each run's figures, a line of JSON; runs in it are not made again")
    part = parts.add_parser("report", help="the tables of runs made before")
    part.add_argument("files", type=Path, nargs="+")
    part.add_argument("--brief", action="store_true", help="a line for each set-up instead of a table")
    part = parts.add_parser("find-rates", help="the rates of loadtest/policy/setups.py, anew")
    part.add_argument("--traces", type=Path, required=True)
    part.add_argument("--only", nargs="*", default=[], help="set-ups whose name starts so")
    part.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    for part in parts.choices.values():
        part.add_argument("--pure", action="store_true", help="run the engine model from its Python source")
    options = parser.parse_args(arguments)

    if options.part == "report":
        print(render(_read(options.files), options.brief))
        return 0
    if options.part == "find-rates":
        with ProcessPoolExecutor(options.jobs, FORK) as pool:
            wanted = [set_up for set_up in FULL if _wanted(set_up.name, options.only)]
            rates = pool.map(find_rate, wanted, [options.traces] * len(wanted))
            for set_up, rate in zip(wanted, rates, strict=True):
                print(f'    "{set_up.name}": {rate:.4g},', flush=True)
        return 0

    robust = options.part == "robust"
    set_ups = [s for s in (QUICK if options.quick or robust else FULL) if _wanted(s.name, options.only)]
    missing = sorted({s.file for s in SOURCES.values() if not (options.traces / f"{s.file}.jsonl.gz").exists()})
    if missing:
        print(f"no trace in {options.traces}, set-ups left out: {', '.join(missing)}", file=sys.stderr)
        set_ups = [s for s in set_ups if SOURCES[s.source].file not in missing]
    if not set_ups:
        parser.error("no set-up is left")
    policies = options.policies or (ROBUST_POLICIES if robust else POLICIES)
    for policy in policies:
        if policy not in PEERS and policy not in NAMES:
            parser.error(f"unknown policy {policy!r} (known: {', '.join((*PEERS, *NAMES))})")
    unknown = [name for name in options.scenarios or () if name not in SCENARIOS]
    if unknown:
        parser.error(f"unknown scenario {unknown[0]!r} (known: {', '.join(SCENARIOS)})")
    scenarios = [SCENARIOS[name] for name in options.scenarios or (SCENARIOS if robust else ("plain",))]
    tasks = [
        (set_up, scenario, policy, seed)
        for set_up in set_ups
        for scenario in scenarios
        for policy in policies
        for seed in range(options.seeds)
    ]
    found: list[Figures] = _read([options.out]) if options.out and options.out.exists() else []
    done = {(one.set_up, one.scenario, one.policy, one.seed) for one in found}
    tasks = [task for task in tasks if (task[0].name, task[1].name, *task[2:]) not in done]
    made = 0
    out = options.out.open("a") if options.out else None
    try:
        for figures in _run_all(tasks, options.traces, options.jobs):
            found.append(figures)
            made += 1
            if out is not None:
                out.write(json.dumps(asdict(figures)) + "\n")
                out.flush()
            progress = f"{made}/{len(tasks)} {figures.set_up}, {figures.policy}, seed {figures.seed}"
            print(f"{progress}: mean TTFT {figures.ttft_mean_s:.3f} s", file=sys.stderr, flush=True)
    finally:
        if out is not None:
            out.close()
    print(render(found))
    return 0


def _read(files: Iterable[Path]) -> list[Figures]:
    found = []
    for file in files:
        with file.open() as lines:
            found += [Figures(**json.loads(line)) for line in lines]
    return found


def _wanted(name: str, starts: Iterable[str]) -> bool:
    starts = tuple(starts)
    return not starts or name.startswith(starts)


def _run_all(tasks: Sequence[Task], traces: Path, jobs: int) -> Iterator[Figures]:
    """In any order. The processes are forked, so that each has the compiled model where this one has."""
    if jobs == 1:
        for task in tasks:
            yield _run_one(task, traces)
        return
    with ProcessPoolExecutor(jobs, FORK) as pool:
        for future in as_completed([pool.submit(_run_one, task, traces) for task in tasks]):
            yield future.result()


def _run_one(task: Task, traces: Path) -> Figures:
    set_up, scenario, policy, seed = task
    return run(set_up, policy, seed, set_up.workload(traces), scenario=scenario)


if __name__ == "__main__":
    sys.exit(main())
