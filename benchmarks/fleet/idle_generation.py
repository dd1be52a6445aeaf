"""Compares when the trainer's own engine generates in asynchronous training. Simulated.

    python benchmarks/fleet/idle_generation.py [--steps 14] [--seeds 1] [--models harvest,spot] [--staleness 1,2,4]
                                         [--losses yes,no]

    never         only if there is no other worker
    always        whenever the trainer does not use the machine
    by wait       from a step in which the trainer waited for more than START_SHARE of the time, until a period with
                  less than STOP_SHARE (controller/rollout/local_generation.py)

Rows: models of async_sim.py, numbers of workers, with and without losses, staleness. Columns: trained tokens per second
and per dollar as ratios to `never`, and the share of tokens that were dropped as too old. Figures leave out the first
quarter of the steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `benchmarks` is found

from benchmarks.support.async_sim import STEADY, simulate, trained
from windfall.controller.rollout import local_generation

POLICIES = {
    "never": (9.0, 9.0),
    "by wait": (local_generation.START_SHARE, local_generation.STOP_SHARE),
    "always": (-1.0, -1.0),
}
"""START_SHARE and STOP_SHARE. The share is between 0 and 1."""
WORKERS = {"harvest": (2, 5, 10), "spot": (3, 8, 14)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--models", default="harvest,spot")
    parser.add_argument("--staleness", default="1,2,4")
    parser.add_argument("--losses", default="yes,no", help="Whether machines are lost")
    args = parser.parse_args()
    began_s = time.perf_counter()
    print(f"{'model':9}{'workers':>8}{'losses':>8}{'staleness':>10}  " + "".join(f"{name:^30}" for name in POLICIES))
    print(f"{'':37}" + f"{'tok/s':>8}{'tok/$':>8}{'too old':>9}{'wait':>5}" * len(POLICIES))
    ratios: dict[str, list[tuple[float, float]]] = {name: [] for name in POLICIES}
    for model in args.models.split(","):
        for workers in WORKERS[model]:
            for losses in (said == "yes" for said in args.losses.split(",")):
                for staleness in map(int, args.staleness.split(",")):
                    sets = [f"trace.nodes={workers}", f"rollout.staleness={staleness}", f"run.steps={args.steps}"]
                    row(model, workers, losses, staleness, [*sets, *([] if losses else STEADY)], args, ratios)
    for name, found in ratios.items():
        speed, cost = (statistics.geometric_mean([pair[n] for pair in found]) for n in (0, 1))
        print(f"{name}: {speed:.3f} tok/s and {cost:.3f} tok/$ of `never`, geometric mean of {len(found)} rows")
    print(f"{time.perf_counter() - began_s:.0f} s")


def row(
    model: str, workers: int, losses: bool, staleness: int, sets: list[str], args: argparse.Namespace,
    ratios: dict[str, list[tuple[float, float]]],
) -> None:  # fmt: skip
    print(f"{model:9}{workers:>8}{'yes' if losses else 'no':>8}{staleness:>10}  ", end="", flush=True)
    base = (0.0, 0.0)
    for name, (start, stop) in POLICIES.items():
        local_generation.START_SHARE, local_generation.STOP_SHARE = start, stop
        local_generation.IdleGeneration.generates = stop < 0  # in the first period
        found = []
        for seed in range(args.seeds):
            steps, granule = simulate(model, [*sets, f"run.seed={seed}", f"trace.seed={seed}"])
            found.append(trained(steps[len(steps) // 4 :], granule))
        speed, cost = (statistics.mean(getattr(t, key) for t in found) for key in ("tok_per_s", "tok_per_usd"))
        too_old, wait = (statistics.mean(getattr(t, key) for t in found) for key in ("too_old", "wait"))
        base = (speed, cost) if name == "never" else base
        ratios[name].append((speed / base[0], cost / base[1]))
        shown = f"{speed:>8,.0f}{cost:>8,.0f}" if name == "never" else f"{speed / base[0]:>8.2f}{cost / base[1]:>8.2f}"
        print(f"{shown}{too_old:>9.0%}{wait:>5.0%}", end="", flush=True)
    print(flush=True)


if __name__ == "__main__":
    main()
