"""Compares windfall's policies with RLBoost's Algorithms 1 and 2 as published, on simulated spot markets and fleets.

    python benchmarks/papers/policies.py [--jobs 16] [--seeds 5] [--hours 1] [--trace FILE ...] [--out FILE]
    python benchmarks/papers/policies.py --read FILE ...          print the tables of results that --out wrote

The run is rlboost_model.py's 8B: 128 x 8 responses of up to 14,000 tokens, trainer 8 H100, instances of 2 H100.
Algorithm 1 has eta 3 and T_init 150 s.

    rlboost       Algorithms 1 and 2          algorithm1   Algorithm 1 for T_seed, windfall's balancing
    windfall      windfall's own policies     algorithm2   Algorithm 2 for balancing, windfall's local time

A case is a market, a fleet (maximum number of instances), a number of groups per step, and a seed. In a case all
policies have the same responses and the same losses, and are compared over the same steps: those that each of them has
completed. So policies are compared by their paired difference: the ratio of windfall's tokens per second to the other
policy's, minus 1, as the mean over seeds and its standard error. `windfall` counts as worse if this mean is below 0 by
more than two standard errors. `up` is the mean number of instances that the market offers, at most the fleet.

Each seed has another window of a trace; the windows are spread over the whole file. Cases with three times as many
groups per step (`--groups 128,384`) are simulated for three times as long, and only on the markets in TRIPLE. Cases run
in `--jobs` processes; each prints a line when it ends, and the tables follow at the end.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `benchmarks` is found

from benchmarks.papers import rlboost
from benchmarks.support import markets
from benchmarks.support import rlboost_model as rb
from windfall.providers import trace
from windfall.providers.trace_formats import Change
from windfall.recipe.sections import Recipe
from windfall.sim.report import figures, variants

SLOWER = 1.34
"""The value that rlboost_table.py fits."""
POLICIES = ("rlboost", "algorithm1", "algorithm2", "windfall")
OWN = "windfall"
FLEETS = (6, 8, 12, 16)
MARKETS: dict[str, dict[str, dict[str, Any]]] = {
    "steady": {"trace": {"mean_up_s": 1e7, "mean_down_s": 1.0}},
    "machines": {"trace": {"mean_up_s": 1800.0, "mean_down_s": 900.0}},
    "churn": {"trace": {"mean_up_s": 400.0, "mean_down_s": 200.0}},
    "poisson": {"trace": {"mean_up_s": 1200.0}},
    "bursts": {
        "trace": {"mean_up_s": 3600.0, "mean_down_s": 600.0},
    },
    "diurnal": {"trace": {"mean_up_s": 900.0, "mean_down_s": 600.0}},
    "unequal": {"trace": {"mean_up_s": 1800.0, "mean_down_s": 900.0}, "sim": {"worker_spread": 0.5}},
    "late": {},
}
"""`unequal`: machines differ in speed, one in three by a factor of more than 1.65. `late`: no machine joins in the
first third of the time, then all do."""
GOLDEN = (math.sqrt(5) - 1) / 2
"""Multiples of it, without their whole part, are spread evenly over 0 to 1, however many there are."""
ARRIVALS_PER_H = 14.0 / 6
"""Arrivals per hour and instance of the fleet on the market `poisson`."""
TRIPLE = ("steady", "machines", "churn")
"""Markets that are simulated with three times as many groups, in addition to all traces."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    market: str
    """A name in MARKETS, or the path of a trace."""
    fleet: int
    groups: int
    seed: int
    seconds: float

    @property
    def name(self) -> str:
        return self.market if self.market in MARKETS else Path(self.market).stem


def recipe(case: Case) -> Recipe:
    said = {k: dict(v) for k, v in MARKETS.get(case.market, {}).items()}
    said["run"] = {"seed": case.seed, "steps": 10_000, "name": "policies"}
    said["rollout"] = {"groups": case.groups}
    said["sim"] = {**said.get("sim", {}), "seconds": case.seconds, "skip_steps": 1}
    said["trace"] = {"nodes": case.fleet, "price_usd_per_h": rb.INSTANCE_USD_PER_H, **said.get("trace", {})}
    made = rb.recipe(rb.MODELS["8B"], rb.Assumptions(slower=SLOWER))
    return made.model_copy(update={k: getattr(made, k).model_copy(update=v) for k, v in said.items()})


def changes(case: Case) -> list[Change] | None:
    """The changes of the market, if it is not defined by the recipe."""
    if case.market == "late":
        return [Change(at_s=case.seconds / 3, node=f"n{n}", up=True) for n in range(case.fleet)]
    if case.market in ("poisson", "bursts", "diurnal"):
        made = recipe(case)
        rates = markets.MarketRates(
            nodes=case.fleet,
            mean_up_s=made.trace.mean_up_s,
            mean_down_s=made.trace.mean_down_s,
            arrivals_per_h=ARRIVALS_PER_H * case.fleet,
            bursts_per_h=4.0,
            burst_share=0.7,
            day_s=3600.0,
        )
        seed = made.trace.seed + 7919 * case.seed
        return markets.generate(case.market, rates, seconds=case.seconds, seed=seed)
    if case.market in MARKETS:
        return None
    # Every seed gets another half of the nodes and another start; a trace with few nodes is used as it is.
    whole = trace.read(Path(case.market))
    enough = trace.summary(whole, whole[-1].at_s + 1).mean_up >= 3 * case.fleet
    some = rb.sample_nodes(whole, seed=case.seed) if enough else whole
    start_s = (1 + case.seed) * GOLDEN % 1 * max(0.0, whole[-1].at_s - case.seconds)
    return trace.slots(trace.window(some, start_s, case.seconds), case.fleet)


def simulate(case: Case, policies: Sequence[str]) -> list[dict[str, Any]]:
    """One row of figures per policy, all over the same steps."""
    given, runs, cpu_s = changes(case), [], []
    with tempfile.TemporaryDirectory() as place:
        for policy in policies:
            began_s = time.process_time()
            w = rlboost.build(recipe(case), policy)
            if given is not None:
                w = replace(w, changes=tuple(given))
            runs.append(figures.simulate(w, Path(place) / f"{policy}.jsonl"))
            cpu_s.append(time.process_time() - began_s)
        up = trace.summary(runs[0].scenario.changes, case.seconds).mean_up
        return [
            {
                "market": case.name, "fleet": case.fleet, "groups": case.groups, "seed": case.seed,
                "hours": case.seconds / 3600, "policy": policy, "tok_per_s": f.tok_per_s,
                "tok_per_usd": f.tok_per_usd, "trainer_idle": f.trainer_idle, "workers_idle": f.workers_idle,
                "killed": f.killed, "steps": f.steps, "completed": run.completed, "up": up, "cpu_s": spent_s,
            }
            for policy, run, f, spent_s in zip(
                policies, runs, figures.figures_of_equal_steps(runs), cpu_s, strict=True
            )
        ]  # fmt: skip


# tables


@dataclass(frozen=True, kw_only=True, slots=True)
class Paired:
    """The relative gain of windfall in tokens per second, over seeds."""

    mean: float
    error: float
    """Standard error of the mean; NaN with one seed."""
    count: int

    @property
    def worse(self) -> bool:
        return self.mean < -2 * self.error

    def __str__(self) -> str:
        return f"{self.mean:+.1%} ± {self.error:.1%}" + (" !" if self.worse else "")


def paired(own: Sequence[float], other: Sequence[float]) -> Paired:
    """
    >>> str(paired([110.0, 99.0], [100.0, 100.0]))
    '+4.5% ± 5.5%'
    """
    gains = [a / b - 1 for a, b in zip(own, other, strict=True)]
    error = statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else math.nan
    return Paired(mean=statistics.mean(gains), error=error, count=len(gains))


Cells = dict[tuple[int, int, str], dict[str, dict[int, dict[str, Any]]]]
"""By groups, fleet and market; then policy; then seed."""


def cells(rows: Sequence[dict[str, Any]]) -> Cells:
    out: Cells = {}
    for r in rows:
        cell = out.setdefault((r["groups"], r["fleet"], r["market"]), {})
        cell.setdefault(r["policy"], {})[r["seed"]] = r
    return dict(sorted(out.items()))


def values(cell: dict[str, dict[int, dict[str, Any]]], policy: str, key: str, seeds: Sequence[int]) -> list[float]:
    return [cell[policy][seed][key] for seed in seeds]


def tables(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    policies = [p for p in dict.fromkeys(r["policy"] for r in rows) if p != OWN]
    yield (
        f"{'groups':>6}{'fleet':>6}  {'market':<18}{'up':>6}{'windfall':>9}{'idle tr. wk.':>13}{'seeds':>6}{'steps':>6}"
        "  windfall over"
    )
    yield f"{'':26}{'':12}{'tok/s':>9}{'':>25}  " + "".join(f"{p:<20}" for p in policies)
    gains: dict[tuple[int, str], list[float]] = {}
    worse: dict[str, list[str]] = {p: [] for p in policies}
    for (groups, fleet, market), cell in cells(rows).items():
        seeds = sorted(set.intersection(*(set(by_seed) for by_seed in cell.values())))
        if OWN not in cell or not seeds:
            continue
        own, said = values(cell, OWN, "tok_per_s", seeds), ""
        for policy in policies:
            if policy not in cell:
                said += f"{'':<20}"
                continue
            p = paired(own, values(cell, policy, "tok_per_s", seeds))
            gains.setdefault((groups, policy), []).append(p.mean)
            said += f"{p!s:<20}"
            if p.worse:
                worse[policy].append(f"{market} {fleet}x{groups}")
        keys = ("trainer_idle", "workers_idle", "up", "steps")
        trainer_idle, workers_idle, up, steps = (statistics.mean(values(cell, OWN, k, seeds)) for k in keys)
        yield (
            f"{groups:>6}{fleet:>6}  {market:<18}{up:>6.1f}{statistics.mean(own):>9,.0f}"
            f"{f'{trainer_idle:.0%} {workers_idle:.0%}':>13}{len(seeds):>6}{steps:>6.1f}  {said}"
        )
    yield ""
    for (groups, policy), means in gains.items():
        yield (
            f"{groups} groups, over {policy}: {statistics.mean(means):+.2%} on average of {len(means)} markets and "
            f"fleets, {min(means):+.2%} to {max(means):+.2%}"
        )
    for policy, where in worse.items():
        yield f"worse than {policy} by more than two standard errors: {', '.join(where) or 'nowhere'}"


# the command


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--hours", type=float, default=1.0, help="Simulated hours; three times as long with more groups"
    )
    parser.add_argument("--trace", type=Path, nargs="*", default=[], help="Also simulate windows of these spot traces")
    parser.add_argument("--markets", default="", help="Markets to simulate, separated by commas; 'none': traces only")
    parser.add_argument(
        "--fleets", default=",".join(map(str, FLEETS)), help="Maximum numbers of instances, separated by commas"
    )
    parser.add_argument("--groups", default="128", help="Groups per step, separated by commas")
    parser.add_argument(
        "--policies",
        default=",".join(POLICIES),
        help="Policies to compare, separated by commas; windfall must be one of them",
    )
    parser.add_argument("--jobs", type=int, default=1, help="Number of processes")
    parser.add_argument("--out", type=Path, help="Append a JSON line per simulation to this file")
    parser.add_argument("--read", type=Path, nargs="+", help="Print the tables of these files without simulating")
    args = parser.parse_args()
    args.markets = [n for n in args.markets.split(",") if n] or list(MARKETS)
    if args.markets == ["none"]:
        args.markets = []
    args.policies = args.policies.split(",")
    for name in args.markets:
        if name not in MARKETS:
            parser.error(f"--markets: unknown market {name!r}; expected one of: {', '.join(MARKETS)}")
    known = [*rlboost.RULES, *variants.VARIANTS]
    for name in args.policies:
        if name not in known:
            parser.error(f"--policies: unknown policy {name!r}; expected one of: {', '.join(known)}")
    if OWN not in args.policies:
        parser.error(f"--policies: {OWN} is missing; the other policies are compared with it")
    return args


def cases(args: argparse.Namespace) -> list[Case]:
    out = []
    for groups in map(int, args.groups.split(",")):
        times = 3 if groups > rb.GROUPS else 1
        for market in [*args.markets, *map(str, args.trace)]:
            if times > 1 and market in MARKETS and market not in TRIPLE:
                continue
            for fleet in map(int, args.fleets.split(",")):
                out += [
                    Case(market=market, fleet=fleet, groups=groups, seed=seed, seconds=times * args.hours * 3600)
                    for seed in range(args.seeds)
                ]
    return sorted(
        out, key=lambda c: (c.seed, -c.seconds)
    )  # complete tables of few seeds first; within a seed, the longest cases first


def main() -> None:
    args = options()
    if args.read:
        rows = [json.loads(line) for path in args.read for line in path.read_text(encoding="utf-8").splitlines()]
        print("\n".join(tables(rows)))
        return
    asked, began_s, rows = cases(args), time.perf_counter(), []
    with ProcessPoolExecutor(args.jobs) as pool:
        waiting = {pool.submit(simulate, case, args.policies): case for case in asked}
        for n, done in enumerate(as_completed(waiting), 1):
            case, found = waiting[done], done.result()
            rows += found
            rates = ", ".join(f"{r['policy']} {r['tok_per_s']:,.0f}" for r in found)
            print(
                f"[{n}/{len(asked)}, {time.perf_counter() - began_s:.0f} s] {case.name}, fleet {case.fleet}, "
                f"{case.groups} groups, seed {case.seed}: {rates} tok/s",
                file=sys.stderr, flush=True,
            )  # fmt: skip
            if args.out is not None:
                with args.out.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(r) + "\n" for r in found)
    print("\n".join(tables(rows)))
    cpu_s = sum(r["cpu_s"] for r in rows)
    print(f"{time.perf_counter() - began_s:.0f} s, {cpu_s:.0f} CPU s; {args.hours:g} h each")


if __name__ == "__main__":
    main()
