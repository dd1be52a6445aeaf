"""Reward after equal steps and after equal time, by bound on staleness, with and without importance weights.

    python benchmarks/staleness/run.py learning [--steps 20] [--groups 24] [--seeds 3] [--out FILE]
    python benchmarks/staleness/run.py learning --read FILE          print the table of results that --out wrote

Each run is `windfall train recipes/demo.toml` with two workers that stay: the tiny model learns arithmetic. The
variants of a seed run one after another, then those of the next seed. `equal steps` is the reward on held-out tasks
after the last step. `equal time` is the reward when the fastest run of the same seed had done all its steps,
interpolated between evaluations; only the time of steps counts, not that of evaluations. The learning rate falls
linearly to zero over the steps of a run, so a slower run has not reached its small learning rates by then.

Trainer and workers share the machine's cores. Generation and training cannot overlap on cores that are always busy, so
equal time says little here unless the machine has at least four idle cores; equal steps does not depend on it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
VARIANTS = [(0, "truncate"), (1, "truncate"), (1, "off"), (4, "truncate"), (4, "off")]
"""Staleness and `algorithm.importance`. With staleness 0 all tokens are on-policy, and there is nothing to correct."""
Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=20, help="Training steps of each run.")
    parser.add_argument("--seeds", type=int, default=3, help="Number of seeds.")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--evaluations", type=int, default=4, help="Evaluations of each run after its start.")
    parser.add_argument("--tasks", type=int, default=256, help="Held-out tasks of an evaluation.")
    parser.add_argument("--groups", type=int, default=24, help="Groups of a step.")
    parser.add_argument("--lr", type=float, help="Learning rate; by default that of the recipe.")
    parser.add_argument("--out", type=Path, help="File that every result is appended to, as a line of JSON.")
    parser.add_argument("--read", type=Path, nargs="+", help="Print the table of these files and run nothing.")


def main(options: argparse.Namespace) -> None:
    rows: list[Row] = []
    if options.read:
        rows = [json.loads(line) for path in options.read for line in path.read_text().splitlines()]
        print("\n".join(table(rows)))
        return
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for staleness, importance in VARIANTS:
            row = run(seed, staleness, importance, options)
            rows.append(row)
            print(f"seed {seed}: {json.dumps(row)}", file=sys.stderr, flush=True)
            if options.out:
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    print("\n".join(table(rows)))


def run(seed: int, staleness: int, importance: str, options: argparse.Namespace) -> Row:
    """Train once. Returns the reward of every evaluation with the seconds of the steps before it."""
    with tempfile.TemporaryDirectory() as name:
        sets = {
            "run.folder": name, "run.seed": seed, "run.steps": options.steps, "trace.nodes": 0, "fleet.workers": 2,
            "rollout.groups": options.groups, "rollout.staleness": staleness, "algorithm.importance": importance,
            "eval.tasks": options.tasks, "eval.every": max(1, options.steps // options.evaluations),
            "checkpoint.every": 1000,
        }  # fmt: skip
        if options.lr:
            sets["train.lr"] = options.lr
        command = [sys.executable, "-m", "windfall.run.cli", "train", str(ROOT / "recipes" / "demo.toml")]
        command += [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
        began_s, load = time.monotonic(), os.getloadavg()[0]
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}")
        log = [json.loads(line) for line in (Path(name) / "demo" / "events.jsonl").read_text().splitlines()]
    steps = [e for e in log if (e["kind"], e["name"]) == ("scalar", "step")]
    evaluations = [
        (e["step"], sum(s["s"] for s in steps if s["step"] <= e["step"]), e["reward"]) for e in log
        if (e["kind"], e["name"]) == ("scalar", "eval")
    ]  # fmt: skip
    sampled = sum(s["trained"] + s.get("too_old_tokens", 0) for s in steps)
    return {
        "seed": seed, "staleness": staleness, "importance": importance, "evaluations": evaluations,
        "steps_s": sum(s["s"] for s in steps), "wall_s": time.monotonic() - began_s,
        "load": (load + os.getloadavg()[0]) / 2, "trained": sum(s["trained"] for s in steps),
        "staleness_mean": statistics.mean(s.get("staleness_mean", 0.0) for s in steps),
        "too_old": sum(s.get("too_old_tokens", 0) for s in steps) / max(1, sampled),
        "capped": statistics.mean(s.get("capped", 0.0) for s in steps),
        "drift": statistics.mean(s.get("drift", 0.0) for s in steps),
    }  # fmt: skip


def reward_at(evaluations: Sequence[Sequence[float]], seconds: float) -> float:
    """The reward after this time, interpolated between evaluations given as (step, seconds, reward).

    >>> reward_at([(0, 0.0, 0.2), (5, 10.0, 0.4), (10, 20.0, 0.8)], 15.0)
    0.6
    """
    before = max((e for e in evaluations if e[1] <= seconds), key=lambda e: e[1])
    after = min((e for e in evaluations if e[1] >= seconds), key=lambda e: e[1], default=before)
    share = (seconds - before[1]) / (after[1] - before[1]) if after[1] > before[1] else 0.0
    return round(before[2] + share * (after[2] - before[2]), 6)


def table(rows: Sequence[Row]) -> list[str]:
    """Mean and range over the seeds, by variant."""
    shortest = {seed: min(r["steps_s"] for r in rows if r["seed"] == seed) for seed in {r["seed"] for r in rows}}
    heads = ("staleness", 10), ("importance", 12), ("seeds", 6), ("equal steps", 26)
    heads += ("equal time", 26), ("steps s", 9), ("mean stale", 11), ("too old", 9), ("capped", 8), ("drift", 8)
    lines = ["".join(f"{name:>{width}}" for name, width in heads)]
    for staleness, importance in VARIANTS:
        of = [r for r in rows if (r["staleness"], r["importance"]) == (staleness, importance)]
        if not of:
            continue
        after_steps = spread([r["evaluations"][-1][2] for r in of])
        after_time = spread([reward_at(r["evaluations"], shortest[r["seed"]]) for r in of])
        names = ("steps_s", "staleness_mean", "too_old", "capped", "drift")
        mean = {name: statistics.mean(r[name] for r in of) for name in names}
        lines.append(
            f"{staleness:10}{importance if staleness else '-':>12}{len(of):6}{after_steps:>26}{after_time:>26}"
            f"{mean['steps_s']:9.0f}{mean['staleness_mean']:11.2f}{mean['too_old']:9.1%}{mean['capped']:8.2%}"
            f"{mean['drift']:8.4f}"
        )
    starts = [r["evaluations"][0][2] for r in rows]
    load = spread([r["load"] for r in rows])
    return [*lines, f"reward before the first step: {spread(starts)}; load on the machine (1 min): {load}"]


def spread(values: Sequence[float]) -> str:
    """Mean and range.

    >>> spread([1.0, 3.0])
    '2.000 (1.000 to 3.000)'
    """
    return f"{statistics.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"
