"""What merged tails gain in simulation: the controllers of the product in virtual time, with and without the rule.

    python benchmarks/jobs/tails.py [--seeds 2] [--steps 8] [--only NAME]

Jobs of the same recipe, each with a trainer and a worker on each of four devices (or three and the trainer's
own engine). An empty decode step takes 4 ms and a response adds 0.02 ms (the 0.6B shape on an H200), prefill takes 5 us
per token; lengths are log-normal with a spread of 0.6.

    in sum     the sum of the relative speeds: in one second together, the jobs advance as far as in so many seconds one
               after the other. From the start of all jobs to the end of each
    faster     how many times as fast all jobs are done together as one after the other
    slowdown   of the slowest job, compared with that job alone
    busy       share of the device time in which a job has the turn
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `benchmarks` is found

from windfall.controller.assembly import Rules
from windfall.controller.scheduling.balance import WorkerLoad
from windfall.controller.scheduling.placement import Placement
from windfall.recipe.file import parse_recipe
from windfall.recipe.sections import Recipe
from windfall.sim.jobs.report import Answer
from windfall.sim.jobs.together import Shared, SimJob, jobs_of, simulate
from windfall.turns.sharing import SLICE_S

GRANULE = 16
CASES: dict[str, dict[str, Any]] = {
    "2 jobs": {},
    "2 jobs, turns of 1 s": {"slice_s": 1.0},
    "2 jobs, 200 tokens": {"median": 200.0, "most": 2048},
    "2 jobs, own engines": {"workers": 3, "local": True},
    "4 jobs": {"jobs": 4},
    "2 jobs, a response adds 0.2 ms": {"each_s": 2e-4, "prefill_s": 5e-5},
}


class Apart(Placement):
    """Without merged tails."""

    def _is_the_end(self, loads: Sequence[WorkerLoad]) -> bool:
        return False


def recipe(
    name: str, seed: int, *, steps: int, workers: int = 4, local: bool = False, median: float = 1000.0,
    most: int = 8192, each_s: float = 2e-5, prefill_s: float = 5e-6,
) -> Recipe:  # fmt: skip
    machine = {"fixed_s": 0.004, "each_s": each_s, "prefill_s": prefill_s}
    return parse_recipe({
        "run": {"name": name, "steps": steps, "seed": seed},
        "rollout": {"groups": 64, "group_size": 4, "max_tokens": most // GRANULE},
        "train": {"micro_tokens": 8000}, "eval": {"tasks": 0}, "checkpoint": {"every": 1000},
        "fleet": {"workers": workers, "local": local}, "trace": {"nodes": 0},
        "sim": {
            "granule": GRANULE, "boot_s": 0.5, "weights_bytes": 1e9, "egress_bytes_per_s": 1e10,
            "ingress_bytes_per_s": 1e10, "prompt_tokens": 256, "median_tokens": median, "sigma": 0.6, "alike": 0.5,
            "skip_steps": 0, "trainer": {**machine, "train_s": 2e-5}, "worker": machine,
        },
    }, where=name)  # fmt: skip


def measure(
    folder: Path, *, seeds: int, steps: int, jobs: int = 2, slice_s: float = SLICE_S, **keys: Any
) -> dict[str, list[Answer]]:
    """By rule: the results of each seed."""
    out: dict[str, list[Answer]] = {"apart": [], "merged": []}
    for seed in range(seeds):
        names = [f"job{n}" for n in range(jobs)]
        found = jobs_of([(name, recipe(name, 100 * seed + n, steps=steps, **keys)) for n, name in enumerate(names)])

        def run(chosen: Sequence[SimJob], name: str, found: Sequence[SimJob] = found) -> Shared:
            return simulate(chosen, folder / name, machines_of=found, slice_s=slice_s)

        alone = {job.name: run([job], f"alone-{seed}") for job in found}
        for way, rules in (("apart", Rules(placement=Apart)), ("merged", Rules())):
            changed = [SimJob(name=job.name, scenario=replace(job.scenario, rules=rules)) for job in found]
            out[way].append(Answer(alone=alone, together=run(changed, f"{way}-{seed}")))
    return out


def row(found: Sequence[Answer]) -> tuple[float, float, float, float]:
    """In sum, faster, slowdown and busy: means over the seeds."""
    each = []
    for answer in found:
        slowdowns = [answer.job(name)["slowdown"] for name in answer.alone]
        faster = answer.way(False)["seconds"] / answer.way(True)["seconds"]
        each.append((sum(1 / s for s in slowdowns), faster, max(slowdowns), answer.together.busy))
    a, b, c, d = (statistics.mean(column) for column in zip(*each, strict=True))
    return a, b, c, d


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", choices=CASES, default="")
    a = parser.parse_args()
    print(f"{'':32}{'':10}{'in sum':>10}{'faster':>10}{'slowdown':>10}{'busy':>8}", flush=True)
    for case, keys in CASES.items():
        if a.only in ("", case):
            with tempfile.TemporaryDirectory(prefix="tails-") as folder:
                for way, found in measure(Path(folder), seeds=a.seeds, steps=a.steps, **keys).items():
                    in_sum, faster, slowdown, busy = row(found)
                    name = case if way == "apart" else ""
                    print(f"{name:32}{way:10}{in_sum:10.2f}{faster:10.2f}{slowdown:10.2f}{busy:8.0%}", flush=True)


if __name__ == "__main__":
    main()
