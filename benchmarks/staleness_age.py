"""How old trained responses are if the lead over the trainer is measured (scheduling/lead.py), and if it is the bound.

    python benchmarks/staleness.py age [--steps 60] [--bounds 2] [--seeds 1]     simulated
    python benchmarks/staleness.py age --processes [--steps 40] [--nodes 6]      real processes, both runs at once

The runs are those of harvest.py, without the trainer's own engine. Simulated: recipes/sim-harvest.toml with 4 to 12
workers that stay or are killed, with and without pipelining. Real processes: controller, links, journal, pulls; engines
and the trainer sleep by a service-time model. Both runs of a pair have the same tasks and the same machines.

Columns, over the steps after the first 20 and without the last ones, in which nothing more is opened: steps per second,
and the ratio of `measured` to `bound`; waits: share of the time in which the trainer waited for groups, and seconds per
step; mean: mean staleness of trained responses; at bound: share of them at the bound.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from windfall.events.log import Event, read
from windfall.scheduling.lead import Lead

FIRST = 20
"""Steps that are left out: the lead begins at the bound and shrinks slowly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    steps_per_s: float
    wait: float
    wait_s: float
    mean: float
    at_bound: float

    def row(self, name: str, base: Measured | None = None) -> str:
        ratio = f"{self.steps_per_s / base.steps_per_s:.4f}" if base else ""
        return (
            f"{name:<34}{self.steps_per_s:10.4f}{ratio:>8}{self.wait:8.1%}{self.wait_s:8.2f}{self.mean:7.2f}"
            f"{self.at_bound:10.1%}"
        )


HEAD = f"{'':<34}{'steps/s':>10}{'ratio':>8}{'waits':>8}{'s/step':>8}{'mean':>7}{'at bound':>10}"


def measure(events: Sequence[Event], bound: int) -> Measured:
    steps = [e for e in events if (e["kind"], e["name"]) == ("scalar", "step")][FIRST : -bound - 1]
    seconds = steps[-1]["t"] - (steps[0]["t"] - steps[0]["s"])
    counts = [e["staleness_counts"] for e in steps]
    responses, waited_s = sum(map(sum, counts)), sum(e["train_wait_s"] for e in steps)
    return Measured(
        steps_per_s=len(steps) / seconds, wait=waited_s / seconds, wait_s=waited_s / len(steps),
        mean=sum(age * n for row in counts for age, n in enumerate(row)) / responses,
        at_bound=sum(sum(row[bound:]) for row in counts) / responses,
    )  # fmt: skip


def fixed_lead() -> Any:
    """As long as this context is open, the lead stays at the bound."""
    return patch.object(Lead, "end_step", lambda *_, **__: None)


def simulate(sets: Sequence[str], bound: int, *, fixed: bool) -> Measured:
    from windfall.config import load
    from windfall.sim.core import run, scenario

    recipe = load(Path(__file__).parent.parent / "recipes" / "sim-harvest.toml", list(sets))
    with tempfile.TemporaryDirectory() as folder, fixed_lead() if fixed else nullcontext():
        run.simulate(scenario.build(recipe), Path(folder) / "events.jsonl")
        return measure(read(Path(folder) / "events.jsonl"), bound)


async def run_processes(options: argparse.Namespace, bound: int) -> tuple[Measured, Measured]:
    """Both runs at once, so that other load on the machine hits both."""
    import harvest

    from windfall.fleet.trace_formats import Change

    controllers = {"fixed": (__file__, "controller"), "measured": ("-m", "windfall.cli", "_controller")}
    changes = [Change(at_s=0.0, node=f"n{n}", up=True) for n in range(options.nodes)]
    with tempfile.TemporaryDirectory() as name:
        folders = {key: Path(name) / key for key in controllers}
        async with asyncio.TaskGroup() as group:
            for key, argv in controllers.items():
                run = harvest.run_variant(
                    folders[key], changes=changes, steps=options.steps, speedup=1.0, fleet="local = false",
                    rollout=f"staleness = {bound}", controller_argv=argv,
                )  # fmt: skip
                group.create_task(run)
        fixed, measured = (measure(read(folder / "events.jsonl"), bound) for folder in folders.values())
    return fixed, measured


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--bounds", type=int, nargs="+", default=[2])
    parser.add_argument("--seeds", type=int, default=1, help="Number of seeds of a simulation.")
    parser.add_argument("--processes", action="store_true", help="Run real processes instead of a simulation.")
    parser.add_argument("--nodes", type=int, default=6, help="Number of workers of real processes.")


def main(options: argparse.Namespace) -> None:
    print(HEAD, flush=True)
    for bound in options.bounds:
        if options.processes:
            fixed, measured = asyncio.run(run_processes(options, bound))
            show(f"{options.nodes} workers, bound {bound}", fixed, measured)
            continue
        for nodes, killed, pipelining in ((4, 0, 1), (8, 0, 1), (8, 0, 0), (8, 1, 1), (8, 1, 0), (12, 0, 1)):
            for seed in range(options.seeds):
                sets = [
                    "sim.granule=8", "fleet.local=false", f"run.steps={options.steps}", f"run.seed={seed}",
                    f"rollout.staleness={bound}", f"trace.nodes={nodes}",
                    f"techniques.pipelining={str(bool(pipelining)).lower()}",
                    *([] if killed else ["trace.mean_up_s=1e7", "trace.mean_down_s=1"]),
                ]  # fmt: skip
                name = f"{nodes} workers{', killed' * killed}{', pipelined' * pipelining}, bound {bound}"
                show(name, simulate(sets, bound, fixed=True), simulate(sets, bound, fixed=False))
    print(f"{options.steps} steps; load on the machine (1 min): {os.getloadavg()[0]:.1f}")


def show(name: str, fixed: Measured, measured: Measured) -> None:
    print(fixed.row(f"{name}: bound"), measured.row("".rjust(len(name)) + "  measured", fixed), sep="\n", flush=True)


if __name__ == "__main__":  # a controller whose lead stays at the bound
    from windfall import cli

    sys.argv[1] = "_controller"
    with fixed_lead():
        cli.main()
