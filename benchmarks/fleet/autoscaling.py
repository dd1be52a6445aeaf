"""Compares two rules for the number of workers in asynchronous training. Simulated.

    python benchmarks/fleet/autoscaling.py [--steps 24] [--models harvest,spot] [--staleness 2] [--prices 1,3]
                                     [--losses no,yes] [--seed 0] [--no-fixed]

    value        tokens per dollar from measured rates and prices (controller/workers/worker_value.py)
    wait_share   AstraFlow's rule, from the share of the time in which the trainer waits (papers/astraflow.py)
    best fixed   the number of workers with the most tokens per dollar, found by simulating every number in FIXED

A run starts with 1 worker, or with many, and may have up to 16. `price` is a factor on the price of a worker. With
losses, machines of a trace come and go beside the scaled workers. Figures are of the last half of the steps; `settled`
is the first step after which the number of workers changes by one at most.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `benchmarks` is found

from benchmarks.papers import astraflow
from benchmarks.support.async_sim import MODELS, Trained, simulate, trained
from windfall.controller.assembly import Rules

PRICE = 5.32
LIMIT = 16
START = (1, 14)
FIXED = {"harvest": (0, 2, 4, 5, 6), "spot": (0, 4, 7, 10)}


def keys(model: str, *, workers: int, price: float, losses: bool, staleness: int, steps: int) -> list[str]:
    nodes = {"harvest": 2, "spot": 3}[model] if losses else 0
    return [
        f"trace.nodes={nodes}", f"fleet.workers={workers}", f"fleet.price_usd_per_h={PRICE * price}",
        f"trace.price_usd_per_h={PRICE * price}", f"rollout.staleness={staleness}", f"run.steps={steps}",
    ]  # fmt: skip


def settled(counts: list[float]) -> int:
    """The first step after which the number of workers changes by one at most.

    >>> settled([1, 1, 4, 9, 5, 5, 6, 5])
    5
    """
    last = next(n for n in range(len(counts)) if max(counts[n:]) - min(counts[n:]) <= 1)
    return last + 1


def show(name: str, found: Trained, more: str = "") -> None:
    print(
        f"    {name:24}{found.tok_per_s:>9,.0f} tok/s{found.tok_per_usd:>11,.0f} tok/$  {found.workers:>5.1f} workers, "
        f"wait {found.wait:.0%}, too old {found.too_old:.0%}{more}", flush=True,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--staleness", default="2")
    parser.add_argument("--prices", default="1,3", help="Factors on the price of a worker")
    parser.add_argument("--losses", default="no,yes", help="Whether machines of a trace come and go beside")
    parser.add_argument("--seed", type=int, default=0, help="Seed of responses and of the trace")
    parser.add_argument("--no-fixed", action="store_true", help="Do not search for the best fixed number")
    args = parser.parse_args()
    seed = [f"run.seed={args.seed}", f"trace.seed={args.seed}"]
    began_s = time.perf_counter()
    for model, staleness, price, losses in itertools.product(
        args.models.split(","), map(int, args.staleness.split(",")), map(float, args.prices.split(",")),
        (said == "yes" for said in args.losses.split(",")),
    ):  # fmt: skip
        print(f"{model}, staleness {staleness}, price x{price:g}, {'with' if losses else 'no'} losses", flush=True)
        case = {"price": price, "losses": losses, "staleness": staleness}
        fixed = {}
        for workers in () if args.no_fixed else FIXED[model]:
            steps, granule = simulate(model, [*keys(model, workers=workers, steps=args.steps // 2, **case), *seed])
            fixed[workers] = trained(steps[len(steps) // 3 :], granule)
        if fixed:
            best = max(fixed, key=lambda n: fixed[n].tok_per_usd)
            show(f"best fixed: {best}", fixed[best])
        for rule, start in itertools.product(("value", "wait_share"), START):
            sets = [*keys(model, workers=start, steps=args.steps, **case), *seed]
            rules = astraflow.RULES if rule == "wait_share" else Rules()
            steps, granule = simulate(model, [*sets, f"fleet.workers_max={LIMIT}"], rules)
            at = settled([e["workers"] for e in steps]) if not losses else 0
            show(
                f"{rule}, from {start}", trained(steps[len(steps) // 2 :], granule), f", settled at {at}" if at else ""
            )
    print(f"{time.perf_counter() - began_s:.0f} s")


if __name__ == "__main__":
    main()
