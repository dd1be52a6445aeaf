"""How old trained responses are if the lead over the trainer is measured (admission.py), and if it is the bound.

    python benchmarks/staleness/run.py age [--steps 44] [--bounds 2] [--jobs 2]     simulated
    python benchmarks/staleness/run.py age --nodes 2 --leads 96 48 24 [--slots 64]  simulated; also constant leads
    python benchmarks/staleness/run.py age --processes [--steps 44] [--nodes 6]     real processes, both runs at once

The runs are those of harvest.py, without the trainer's own engine. Simulated: recipes/sim-harvest.toml with 4 or 8
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
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from windfall.controller.tasks.admission import Lead
from windfall.events.log import Event, read
from windfall.recipe.file import load_recipe

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `benchmarks` is found

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
            f"{name:<44}{self.steps_per_s:10.4f}{ratio:>8}{self.wait:8.1%}{self.wait_s:8.2f}{self.mean:7.2f}"
            f"{self.at_bound:10.1%}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    nodes: int
    """Number of workers."""
    bound: int
    steps: int
    killed: bool = False
    """Workers are killed after 40 s on average, and come back after 15 s."""
    pipelined: bool = True
    """Groups are trained on as they arrive."""
    slots: int = 256
    """Responses that a worker generates at once."""
    sets: tuple[str, ...] = ()
    """Other keys of the simulated recipe."""

    def __str__(self) -> str:
        return f"{self.nodes} workers{', killed' * self.killed}{', pipelined' * self.pipelined}, bound {self.bound}"


HEAD = f"{'':<44}{'steps/s':>10}{'ratio':>8}{'waits':>8}{'s/step':>8}{'mean':>7}{'at bound':>10}"


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


def fixed_lead(groups: int | None = None) -> Any:
    """As long as this context is open, the lead stays at the bound, or at `groups` after the first step."""

    def end_step(lead: Lead, **_: Any) -> None:
        lead.groups = lead.groups if groups is None else groups

    return patch.object(Lead, "end_step", end_step)


def simulate(case: Case, leads: Sequence[int] = ()) -> list[Measured]:
    """With the lead at the bound, measured, and with each of these constant leads."""
    from windfall.sim.core import run, scenario

    sets = [
        "sim.granule=16", "fleet.local=false", f"run.steps={case.steps}", f"rollout.staleness={case.bound}",
        f"trace.nodes={case.nodes}", f"sim.worker_slots={case.slots}",
        f"techniques.pipelining={str(case.pipelined).lower()}",
        *([] if case.killed else ["trace.mean_up_s=1e7", "trace.mean_down_s=1"]), *case.sets,
    ]  # fmt: skip
    recipe = load_recipe(Path(__file__).parents[2] / "recipes" / "sim-harvest.toml", sets)
    found = []
    for context in (fixed_lead(), nullcontext(), *map(fixed_lead, leads)):
        with tempfile.TemporaryDirectory() as folder, context:
            run.simulate(scenario.build(recipe), Path(folder) / "events.jsonl")
            found.append(measure(read(Path(folder) / "events.jsonl"), case.bound))
    return found


async def run_processes(case: Case) -> list[Measured]:
    """Both runs at once, so that other load on the machine hits both."""
    from benchmarks.fleet import harvest
    from windfall.providers.trace_formats import Change

    controllers = {"fixed": (__file__, "controller"), "measured": ("-m", "windfall.run.cli", "_controller")}
    changes = [Change(at_s=0.0, node=f"n{n}", up=True) for n in range(case.nodes)]
    with tempfile.TemporaryDirectory() as name:
        folders = {key: Path(name) / key for key in controllers}
        async with asyncio.TaskGroup() as group:
            for key, argv in controllers.items():
                run = harvest.run_variant(
                    folders[key], changes=changes, steps=case.steps, speedup=1.0, fleet="local = false",
                    rollout=f"staleness = {case.bound}", controller_argv=argv,
                )  # fmt: skip
                group.create_task(run)
        return [measure(read(folder / "events.jsonl"), case.bound) for folder in folders.values()]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=44)
    parser.add_argument("--bounds", type=int, nargs="+", default=[2])
    parser.add_argument("--jobs", type=int, default=2, help="Simulations that run at once.")
    parser.add_argument("--processes", action="store_true", help="Run real processes instead of a simulation.")
    parser.add_argument("--nodes", type=int, default=0, help="Number of workers. Default: 6 processes; simulated 4, 8.")
    parser.add_argument("--slots", type=int, default=256, help="Responses that a simulated worker generates at once.")
    parser.add_argument("--set", nargs="+", default=[], metavar="a.b=value", help="Keys of the simulated recipe.")
    parser.add_argument("--leads", type=int, nargs="+", default=[], help="Simulate also with these constant leads.")


def main(options: argparse.Namespace) -> None:
    print(HEAD, flush=True)
    if options.processes:
        cases = [Case(nodes=options.nodes or 6, bound=bound, steps=options.steps) for bound in options.bounds]
        for case in cases:
            show(case, asyncio.run(run_processes(case)))
    else:
        kinds = [(4, False, True), (8, False, True), (8, False, False), (8, True, True)]
        cases = [
            Case(
                nodes=nodes, bound=bound, steps=options.steps, killed=killed, pipelined=pipelined, slots=options.slots,
                sets=tuple(options.set),
            )
            for bound in options.bounds
            for nodes, killed, pipelined in ([(options.nodes, False, True)] if options.nodes else kinds)
        ]  # fmt: skip
        with ProcessPoolExecutor(options.jobs) as pool:
            for case, found in zip(cases, pool.map(simulate, cases, [options.leads] * len(cases)), strict=True):
                show(case, found, options.leads)
    print(f"{options.steps} steps; load on the machine (1 min): {os.getloadavg()[0]:.1f}")


def show(case: Case, found: Sequence[Measured], leads: Sequence[int] = ()) -> None:
    print(found[0].row(f"{case}: bound"))
    for name, measured in zip(["measured", *leads], found[1:], strict=True):
        print(measured.row(f"{' ' * len(str(case))}  {name}", found[0]), flush=True)


if __name__ == "__main__":  # a controller whose lead stays at the bound
    from windfall.run import cli

    sys.argv[1] = "_controller"
    with fixed_lead():
        cli.main()
