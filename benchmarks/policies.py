"""windfall's policies beside RLBoost's Algorithms 1 and 2 as published, on several spot markets and seeds; simulated.

    python benchmarks/policies.py [--seeds 5] [--hours 0.5] [--trace bamboo-p3-trace.csv] [--markets poisson,bursts]

The run is rlboost_model.py's 8B: 128 x 8 responses of up to 14,000 tokens, trainer 8 H100, instances of 2 H100; the
same responses and the same losses for every policy. Algorithm 1 has eta 3 and T_init 150 s.

    rlboost       Algorithms 1 and 2          algorithm1   1 for T_seed, windfall's balancing
    windfall      its own policies            algorithm2   2 for balancing, windfall's T_seed

Figures are means over seeds, with the least and the most; `wins`: seeds in which windfall makes more tokens per second,
and per dollar, than rlboost.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import rlboost_model as rb

from windfall.config import Recipe
from windfall.fleet import trace
from windfall.fleet.formats import Change
from windfall.sim import run, variants, world
from windfall.sim.figures import Figures, figures, spread

SLOWER = 1.34
"""What rlboost_table.py fits."""
POLICIES = ("rlboost", "algorithm1", "algorithm2", "windfall")
NODES = 6
MARKETS: dict[str, dict[str, dict[str, Any]]] = {
    "steady": {"trace": {"mean_up_s": 1e7, "mean_down_s": 1.0}},
    "machines": {"trace": {"mean_up_s": 1800.0, "mean_down_s": 900.0}},
    "churn": {"trace": {"mean_up_s": 400.0, "mean_down_s": 200.0}},
    "poisson": {"trace": {"mean_up_s": 1200.0}, "sim": {"market": "poisson", "arrivals_per_h": 14.0}},
    "bursts": {
        "trace": {"mean_up_s": 3600.0, "mean_down_s": 600.0},
        "sim": {"market": "bursts", "bursts_per_h": 4.0, "burst_share": 0.7},
    },
    "diurnal": {"trace": {"mean_up_s": 900.0, "mean_down_s": 600.0}, "sim": {"market": "diurnal", "day_s": 3600.0}},
    "unequal": {"trace": {"mean_up_s": 1800.0, "mean_down_s": 900.0}, "sim": {"worker_spread": 0.5}},
}
"""`unequal`: machines that differ in speed, one in three by more than 1.65 times."""


def recipe(keys: dict[str, dict[str, Any]], seed: int, seconds: float) -> Recipe:
    said = {k: dict(v) for k, v in keys.items()}
    said["run"] = {"seed": seed, "steps": 10_000, "name": "policies"}
    said["sim"] = {**said.get("sim", {}), "seconds": seconds, "skip_steps": 1}
    said["trace"] = {"nodes": NODES, "price_usd_per_h": rb.INSTANCE_USD_PER_H, **said.get("trace", {})}
    made = rb.recipe(rb.MODELS["8B"], rb.Assumed(slower=SLOWER))
    return made.model_copy(update={k: getattr(made, k).model_copy(update=v) for k, v in said.items()})


def one(said: Recipe, name: str, changes: Sequence[Change] | None, folder: Path) -> Figures:
    w = world.build(variants.apply(said, name))
    if changes is not None:
        w = replace(w, changes=tuple(changes))
    done = run.simulate(w, folder / "events.jsonl")
    return figures(folder / "events.jsonl", w, done.stays)


def bamboo(path: Path, seed: int, seconds: float) -> list[Change]:
    """Another half of its nodes, and another start, with every seed."""
    return rb.at_most(trace.window(rb.half(trace.read(path), seed=seed), 3600.0 + 1500.0 * seed, seconds), NODES)


def row(market: str, found: dict[str, list[Figures]]) -> None:
    base, own = found["rlboost"], found["windfall"]
    for name, runs in found.items():
        s, usd = spread([f.tok_per_s for f in runs]), spread([f.tok_per_usd / 1000 for f in runs])
        gain = [sum(getattr(a, k) / getattr(b, k) for a, b in zip(runs, base, strict=True)) / len(runs) - 1
                for k in ("tok_per_s", "tok_per_usd")]  # fmt: skip
        wins = ""
        if name == "windfall":
            more = [sum(getattr(a, k) > getattr(b, k) for a, b in zip(own, base, strict=True))
                    for k in ("tok_per_s", "tok_per_usd")]  # fmt: skip
            wins = f"{more[0]} and {more[1]} of {len(own)}"
        idle = (
            f"{sum(f.trainer_idle for f in runs) / len(runs):.0%} {sum(f.workers_idle for f in runs) / len(runs):.0%}"
        )
        print(
            f"{market if name == 'rlboost' else '':<10}{name:<12}"
            f"{s.mean:>8,.0f} {f'{s.least:,.0f} to {s.most:,.0f}':>17}"
            f"{usd.mean:>7.0f}k {f'{usd.least:.0f} to {usd.most:.0f}':>12}{gain[0]:>+8.1%}{gain[1]:>+8.1%}{idle:>10}"
            f"{sum(f.killed for f in runs) / len(runs):>8.1f}  {wins}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--hours", type=float, default=0.5)
    parser.add_argument("--trace", type=Path, help="also windows of this spot trace")
    parser.add_argument("--markets", default="", help="only these, with commas")
    parser.add_argument("--policies", default=",".join(POLICIES), help="rlboost and windfall among them")
    args = parser.parse_args()
    names = [n for n in args.markets.split(",") if n] or [*MARKETS, *(["bamboo"] if args.trace else [])]
    for name in names:
        if name not in (*MARKETS, "bamboo") or (name == "bamboo" and args.trace is None):
            parser.error(f"--markets: {name} is none of {', '.join(MARKETS)}, or bamboo with --trace")
    began_s, seconds = time.perf_counter(), args.hours * 3600
    print(f"{'market':<10}{'policy':<12}{'tok/s':>8} {'':>17}{'tok/$':>8} {'':>12}{'tok/s':>8}{'tok/$':>8}{'idle':>10}"
          f"{'killed':>8}  wins")  # fmt: skip
    print(f"{'':<77}{'over rlboost':>16}{'tr. wk.':>8}")
    with tempfile.TemporaryDirectory() as place:
        for market in names:
            found: dict[str, list[Figures]] = {name: [] for name in args.policies.split(",")}
            for seed in range(args.seeds):
                changes = bamboo(args.trace, seed, seconds) if market == "bamboo" else None
                for name, runs in found.items():
                    runs.append(one(recipe(MARKETS.get(market, {}), seed, seconds), name, changes, Path(place)))
                    said = f"{market}, seed {seed}, {name}, {time.perf_counter() - began_s:.0f} s"
                    print(f"\r{said:<60}\r", end="", file=sys.stderr, flush=True)
            row(market, found)
    print(f"{time.perf_counter() - began_s:.0f} s; {NODES} instances at most, {args.hours:g} h each")


if __name__ == "__main__":
    main()
