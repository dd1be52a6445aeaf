"""Real processes: throughput and trainer idle time by bound on staleness, with and without workers being killed.

    python benchmarks/staleness/run.py processes [--steps 10] [--rounds 1] [--slow 1.5] [--out FILE]

The processes are those of harvest.py: controller, links, ledger, journal, weight pulls and kills are windfall's own;
engines and the trainer sleep by a service-time model instead of computing, because two cores cannot show a parallel
speed-up. Workers only generate and the trainer's machine only trains (fleet.local = false). `killed`: workers are
killed with SIGKILL at random and replaced by new ones. The bounds run one after another in every round.

Columns: trained tokens per second, and its ratio to staleness 0 without kills; waits: share of the time in which the
trainer waited for groups; workers idle: share of the time paid for; mean and max: staleness of trained responses;
dropped: share of sampled tokens that were dropped as too old.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BOUNDS = (0, 1, 2, 4)
SKIP = 2
"""Steps at the start that are left out: the pipeline fills and speeds are still being measured."""
Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=1, help="Times that every bound runs.")
    parser.add_argument("--bounds", type=int, nargs="+", default=BOUNDS)
    parser.add_argument("--nodes", type=int, default=4, help="Number of workers.")
    parser.add_argument("--up", type=float, default=25.0, help="Mean seconds until a worker is killed.")
    parser.add_argument("--down", type=float, default=2.0, help="Mean seconds until it is replaced.")
    parser.add_argument("--slow", type=float, default=1.5, help="Factor that stretches all times, for a busy machine.")
    parser.add_argument("--out", type=Path, help="File that every result is appended to, as a line of JSON.")


def main(options: argparse.Namespace) -> None:
    os.environ["HARVEST_SLOW"] = str(options.slow)  # read by harvest.py, here and in its processes
    rows: list[Row] = []
    for number in range(options.rounds):
        for bound in options.bounds:
            for killed in (False, True):
                row = run(bound, killed, number, options)
                rows.append(row)
                print(json.dumps(row), file=sys.stderr, flush=True)
                if options.out:
                    with options.out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")
    print("\n".join(table(rows)))
    loads = [r["load"] for r in rows]
    print(f"{options.steps} steps, {SKIP} left out; load on the machine (1 min): {min(loads):.1f} to {max(loads):.1f}")


def run(bound: int, killed: bool, seed: int, options: argparse.Namespace) -> Row:
    from benchmarks.fleet import harvest
    from windfall.events import log
    from windfall.providers import trace
    from windfall.providers.trace_formats import Change
    from windfall.sim.report import figures

    changes = [Change(at_s=0.0, node=f"n{n}", up=True) for n in range(options.nodes)]
    if killed:
        changes = trace.synthetic(
            nodes=options.nodes, mean_up_s=options.up, mean_down_s=options.down, seconds=3600.0, seed=seed
        )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        asyncio.run(
            harvest.run_variant(
                folder, changes=changes, steps=options.steps, speedup=1 / options.slow, fleet="local = false",
                rollout=f"staleness = {bound}",
            )
        )  # fmt: skip
        events = log.read(folder / "events.jsonl")
    whole = figures.from_events(events, skip=SKIP)
    # At the end of a run nothing is generated for later steps, so the last `bound` steps are not typical.
    steps = [e for e in events if (e["kind"], e["name"]) == ("scalar", "step")][SKIP : options.steps - min(bound, 2)]
    seconds = steps[-1]["t"] - (steps[0]["t"] - steps[0]["s"])
    trained, dropped = (sum(e.get(key, 0) for e in steps) for key in ("trained", "too_old_tokens"))
    return {
        "staleness": bound, "killed": killed, "round": seed, "tok_per_s": trained / seconds,
        "step_s": seconds / len(steps), "waits": sum(e["train_wait_s"] for e in steps) / seconds,
        "workers_idle": whole.workers_idle, "workers": whole.workers_there, "kills": whole.killed,
        "mean": statistics.mean(e.get("staleness_mean", 0.0) for e in steps),
        "max": max(e.get("staleness_max", 0) for e in steps), "dropped": dropped / (trained + dropped),
        "load": os.getloadavg()[0],
    }  # fmt: skip


def table(rows: Sequence[Row]) -> list[str]:
    """One line per bound, without and with kills; means over the rounds."""
    heads = ("staleness", 10), ("killed", 8), ("tok/s", 8), ("ratio", 7), ("step s", 8), ("waits", 7)
    heads += ("workers idle", 14), ("mean", 6), ("max", 5), ("dropped", 9)
    lines = ["".join(f"{name:>{width}}" for name, width in heads)]
    base = [r["tok_per_s"] for r in rows if r["staleness"] == 0 and not r["killed"]]
    for killed in (False, True):
        for bound in sorted({r["staleness"] for r in rows}):
            of = [r for r in rows if (r["staleness"], r["killed"]) == (bound, killed)]
            if not of:
                continue
            mean = {k: statistics.mean(r[k] for r in of) for k in of[0]}
            ratio = f"{mean['tok_per_s'] / statistics.mean(base):.2f}" if base else ""
            lines.append(
                f"{bound:10}{mean['kills'] if killed else 0:8.0f}{mean['tok_per_s']:8,.0f}{ratio:>7}"
                f"{mean['step_s']:8.2f}{mean['waits']:7.0%}{mean['workers_idle']:14.0%}{mean['mean']:6.2f}"
                f"{max(r['max'] for r in of):5}{mean['dropped']:9.1%}"
            )
    return lines
