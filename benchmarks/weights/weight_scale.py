"""How long new weights take to reach a growing fleet, and what that costs: simulated, with windfall's own controller.

    python benchmarks/weights/weight_scale.py                              8 to 1,000 workers in four regions
    python benchmarks/weights/weight_scale.py --workers 8,64               these numbers of workers
    python benchmarks/weights/weight_scale.py --tensorhub                  the three cases of TensorHub

Every row is the second version of a run: seconds until half and until all workers have it, bytes out of the trainer and
between regions in copies of the file that is read, dollars for the traffic, and CPU seconds of the simulation per
version, all else included. In the *star* every worker reads from the trainer (`weights.peers = "off"`).

TensorHub's cases: a *stall* is the mean time that a worker waits for a version, with all workers in the trainer's
region, or all in another one; an *elastic* update is the time until workers have joined that are as many as the others.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from windfall.events.log import Event, read
from windfall.recipe.file import parse_recipe
from windfall.recipe.sections import Recipe
from windfall.sim.core import run
from windfall.sim.core.run import Simulation
from windfall.sim.core.scenario import build

REGIONS = ("us", "eu", "asia", "south")
COPY, DELTA = 16e9, 0.4e9
"""Bytes: an 8B model in bfloat16, and 2.5 % of it (docs/weights.md)."""
TRAINER, WORKER, WIDE = 12.5e9, 3.125e9, 1.25e9
"""Bytes per second: 100 and 25 Gbit/s, and 10 Gbit/s between two regions."""
LATENCY_S, WIDE_LATENCY_S = 0.0005, 0.08
STEPS = 2


class Moved(NamedTuple):
    half_s: float
    all_s: float
    stall_s: float
    joined_s: float
    copies: float
    """Copies of the file that left the trainer."""
    across: float
    """Copies of the file between regions."""
    usd: float
    cpu_s: float


def recipe(workers: int, regions: Sequence[str], peers: str, delta: float) -> Recipe:
    """A run with little work for each worker, whose steps take longer than the first copy."""
    readers = workers if peers == "off" else len(regions)
    step_s = 30.0 + 1.2 * COPY * readers / (TRAINER if regions == REGIONS[:1] else WIDE * len(regions))
    return parse_recipe(
        {
            "run": {"steps": STEPS},
            "rollout": {"groups": max(1, workers // 4), "group_size": 4, "max_tokens": 64},
            "train": {"micro_tokens": 100_000},
            "eval": {"tasks": 0},
            "checkpoint": {"every": 1000},
            "fleet": {
                "workers": workers, "local": False, "heartbeat_s": 100.0, "suspect_s": 1e3, "gone_s": 1e5,
                "stalled_s": 1e5,
            },
            "techniques": {"trainer_generates": False},
            "weights": {"peers": peers, "region": REGIONS[0]},
            "sim": {
                "granule": 16, "boot_s": 1.0, "median_tokens": 32.0, "sigma": 0.0, "worker_slots": 4,
                "weights_bytes": COPY, "delta_bytes": delta, "egress_bytes_per_s": TRAINER,
                "ingress_bytes_per_s": WORKER, "latency_s": LATENCY_S,
                "regions": [{"name": name, "bytes_per_s": WIDE, "latency_s": WIDE_LATENCY_S} for name in regions],
                "trainer": {"fixed_s": 0.01, "each_s": 1e-4, "train_s": 1e-7, "update_s": step_s},
                "worker": {"fixed_s": 0.02, "each_s": 1e-4},
            },
        },
        where="weight_scale",
    )  # fmt: skip


def moved(workers: int, regions: Sequence[str], peers: str, delta: float = 0.0, joiners: int = 0) -> Moved:
    """Simulate a run. `joiners`: workers that join when all others have the second version."""
    runs: list[Simulation] = []
    ready: list[Event] = []

    def join(event: Event) -> None:
        if event["name"] == "worker_ready" and event["version"] == 1:
            ready.append(event)
            if len(ready) == workers:
                asyncio.get_running_loop().call_soon(runs[0].fleet._scale_to, workers + joiners)

    began_s = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "events.jsonl"
        run.simulate(build(recipe(workers, regions, peers, delta)), log, sink=join, disturb=runs.append)
        events = read(log)
    cpu_s = (time.process_time() - began_s) / STEPS
    last = next(e for e in events if e["name"] == "weights" and e["version"] == 1)
    waits_s = [e["s"] for e in ready]
    assert len(waits_s) == workers + joiners, "not all workers have the last version"
    return Moved(
        half_s=last["half_s"], all_s=last["all_s"], stall_s=statistics.mean(waits_s[:workers]),
        joined_s=max(waits_s[workers:], default=0.0), copies=last["trainer_bytes"] / (delta or COPY),
        across=last["across_bytes"] / (delta or COPY), usd=last["usd"], cpu_s=cpu_s,
    )  # fmt: skip


def grow(counts: Sequence[int]) -> None:
    head = f"{'half s':>10}{'all s':>10}{'trainer copies':>16}{'across copies':>15}{'$':>9}{'CPU s':>8}"
    for what, delta in (("full copies", 0.0), ("deltas", DELTA)):
        print(f"{what + ', ' + str(len(REGIONS)) + ' regions':<24}{head}")
        for workers in counts:
            for name, peers in (("star", "off"), ("peers", "auto")):
                row = moved(workers, REGIONS, peers, delta)
                print(
                    f"{workers:>8,} {name:<15}{row.half_s:>10,.2f}{row.all_s:>10,.2f}{row.copies:>16,.1f}"
                    f"{row.across:>15,.1f}{row.usd:>9,.2f}{row.cpu_s:>8.1f}",
                    flush=True,
                )


def tensorhub(workers: int) -> None:
    """Its ratios are 6.7 (stall, 1,024 GPUs), 4.8 (elastic update) and 19 (stall, another data center)."""
    cases = (("stall", REGIONS[:1], 6.7), ("stall elsewhere", REGIONS[1:2], 19.0))
    print(f"{f'{workers:,} workers':<28}{'star s':>10}{'peers s':>10}{'ratio':>8}{'TensorHub':>11}")
    for name, regions, paper in cases:
        for what, delta in (("full copy", 0.0), ("delta", DELTA)):
            star, peers = (moved(workers, regions, way, delta).stall_s for way in ("off", "auto"))
            print(f"{name + ', ' + what:<28}{star:>10,.2f}{peers:>10,.2f}{star / peers:>8,.0f}{paper:>11}", flush=True)
    star, peers = (moved(workers // 2, REGIONS[:1], way, joiners=workers // 2).joined_s for way in ("off", "auto"))
    print(f"{'elastic update':<28}{star:>10,.2f}{peers:>10,.2f}{star / peers:>8,.0f}{4.8:>11}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="8,64,250,1000", help="numbers of workers, separated by commas")
    parser.add_argument("--tensorhub", action="store_true", help="the cases of TensorHub, with the last of the numbers")
    options = parser.parse_args()
    counts = [int(count) for count in options.workers.split(",")]
    if options.tensorhub:
        tensorhub(counts[-1])
    else:
        grow(counts)


if __name__ == "__main__":
    main()
