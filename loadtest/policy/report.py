"""The tables: each set-up, and geometric means over all of them, in Markdown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import exp, log
from statistics import fmean
from typing import Final

from loadtest.policy.ours import EXACT
from loadtest.policy.peers import PEERS
from loadtest.policy.runs import PLAIN, Figures

Cell = dict[str, float]  # means over the seeds, and the spread of mean TTFT
MEANS: Final = (
    "hit_ratio",
    "pooled_hit_ratio",
    "ttft_mean_s",
    "ttft_p50_s",
    "ttft_p99_s",
    "itl_mean_s",
    "imbalance",
    "utilisation",
    "preemptions",
    "requests_per_s",
)


def render(found: Sequence[Figures], brief: bool = False) -> str:
    """`brief`: one line for each set-up instead of a table."""
    by_scenario: dict[str, dict[str, dict[str, Cell]]] = defaultdict(dict)
    runs: dict[tuple[str, str, str], list[Figures]] = defaultdict(list)
    for figures in found:
        runs[figures.scenario, figures.set_up, figures.policy].append(figures)
    for (scenario, set_up, policy), same in runs.items():
        cell: Cell = {name: fmean(getattr(one, name) for one in same) for name in MEANS}
        cell["low_s"] = min(one.ttft_mean_s for one in same)
        cell["high_s"] = max(one.ttft_mean_s for one in same)
        by_scenario[scenario].setdefault(set_up, {})[policy] = cell
    parts = []
    for scenario, table in by_scenario.items():
        if len(by_scenario) > 1 or scenario != PLAIN.name:
            parts.append(f"## {scenario}")
        parts += [summary(table), against_peers(table), *([matrix(table)] if brief else _each(table))]
    return "\n\n".join(parts)


def geometric_mean(values: Sequence[float]) -> float:
    return exp(fmean(log(value) for value in values))


def summary(table: dict[str, dict[str, Cell]]) -> str:
    """By policy: hit ratio to the pooled bound, and TTFT as times the best policy's in each set-up."""
    policies = list(dict.fromkeys(policy for cells in table.values() for policy in cells))
    lines = [
        f"Over {len(table)} set-ups: geometric mean (worst set-up) of TTFT as times the best policy's there.",
        "",
        "| policy | hit ratio / pooled bound | mean TTFT | p99 TTFT | mean ITL | imbalance |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    rows = []
    for policy in policies:
        own = {set_up: cells[policy] for set_up, cells in table.items() if policy in cells}
        times = {}
        for name in ("ttft_mean_s", "ttft_p99_s", "itl_mean_s"):
            times[name] = [cell[name] / min(c[name] for c in table[s].values()) for s, cell in own.items()]
        hits = fmean(cell["hit_ratio"] / cell["pooled_hit_ratio"] for cell in own.values())
        cells = [
            f"{geometric_mean(ratios):.2f} ({max(ratios):.1f})"
            for ratios in (times["ttft_mean_s"], times["ttft_p99_s"])
        ]
        rows.append(
            (
                geometric_mean(times["ttft_mean_s"]),
                f"| {policy} | {hits:.3f} | {cells[0]} | {cells[1]} | {geometric_mean(times['itl_mean_s']):.2f} "
                f"| {fmean(cell['imbalance'] for cell in own.values()):.2f} |",
            )
        )
    return "\n".join([*lines, *(row for _, row in sorted(rows))])


def against_peers(table: dict[str, dict[str, Cell]]) -> str:
    """How ours stand to the best peer over all set-ups, to the best in each, and to round robin."""
    complete = list(table.values())
    peers = [name for name in PEERS if name != "least ttft" and all(name in cells for cells in complete)]
    ours = [name for name in ("kvaware", "prefixaware", EXACT) if all(name in cells for cells in complete)]
    if not peers or not ours:
        return ""
    best = min(peers, key=lambda name: geometric_mean([cells[name]["ttft_mean_s"] for cells in complete]))
    lines = [
        f"The best peer over all is {best}. Ours as times its TTFT, geometric means; then the set-ups as times the "
        "best peer in each, and the worst to round robin.",
        "",
        "| | mean | p99 | set-ups above 1.1 x the best peer there | worst | worst to round robin |",
        "|---|---:|---:|---|---|---|",
    ]
    for name in ours:
        mean, p99 = (
            geometric_mean([cells[name][figure] / cells[best][figure] for cells in complete])
            for figure in ("ttft_mean_s", "ttft_p99_s")
        )
        there = {
            set_up: (cells[name]["ttft_mean_s"] / cells[peer]["ttft_mean_s"], peer)
            for set_up, cells in table.items()
            for peer in (min(peers, key=lambda other: cells[other]["ttft_mean_s"]),)
        }
        worst = max(there, key=lambda set_up: there[set_up][0])
        above = sorted((s for s in there if there[s][0] > 1.1), key=lambda s: -there[s][0])
        robin = ""
        if "round robin" in peers:
            ratios = {s: cells[name]["ttft_mean_s"] / cells["round robin"]["ttft_mean_s"] for s, cells in table.items()}
            most = max(ratios, key=lambda s: ratios[s])
            robin = f"{ratios[most]:.2f} ({most})"
        lines.append(
            f"| {name} | {mean:.2f} | {p99:.2f} | {len(above)} of {len(table)}: "
            + ", ".join(f"{s} {there[s][0]:.2f} ({there[s][1]})" for s in above)
            + f" | {there[worst][0]:.2f} ({worst}, {there[worst][1]}) | {robin} |"
        )
    return "\n".join(lines)


def matrix(table: dict[str, dict[str, Cell]]) -> str:
    """Mean / p99 TTFT in seconds, a line for each set-up, a column for each policy; the least mean is bold."""
    policies = list(dict.fromkeys(policy for cells in table.values() for policy in cells))
    lines = [f"| mean / p99 TTFT, s | {' | '.join(policies)} |", "|---|" + "---:|" * len(policies)]
    for set_up, cells in table.items():
        least = min(cell["ttft_mean_s"] for cell in cells.values())
        shown = []
        for policy in policies:
            cell = cells.get(policy)
            if cell is None:
                shown.append("")
                continue
            mean = _short(cell["ttft_mean_s"])
            shown.append(f"{f'**{mean}**' if cell['ttft_mean_s'] == least else mean} / {_short(cell['ttft_p99_s'])}")
        lines.append(f"| {set_up} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _short(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 30 else f"{seconds:.3g}"


def _each(table: dict[str, dict[str, Cell]]) -> list[str]:
    parts = []
    for set_up, cells in table.items():
        some = next(iter(cells.values()))
        lines = [
            f"### {set_up}: {some['requests_per_s']:.2f} requests/s, pooled bound {some['pooled_hit_ratio']:.3f}",
            "",
            "| policy | hit ratio | TTFT mean (seeds), s | p50 | p99 | ITL, ms | imbalance | busy | preemptions |",
            "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
        ]
        for policy, cell in sorted(cells.items(), key=lambda item: item[1]["ttft_mean_s"]):
            lines.append(
                f"| {policy} | {cell['hit_ratio']:.3f} | {cell['ttft_mean_s']:.3f} "
                f"({cell['low_s']:.3f}-{cell['high_s']:.3f}) | {cell['ttft_p50_s']:.3f} | {cell['ttft_p99_s']:.3f} "
                f"| {1e3 * cell['itl_mean_s']:.1f} | {cell['imbalance']:.2f} | {cell['utilisation']:.2f} "
                f"| {cell['preemptions']:.0f} |"
            )
        parts.append("\n".join(lines))
    return parts
