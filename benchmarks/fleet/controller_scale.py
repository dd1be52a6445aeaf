"""How the controller's cost grows with the number of workers: simulated workers in virtual time, real CPU seconds.

    python benchmarks/fleet/controller_scale.py                       10, 100, 1,000 and 10,000 workers
    python benchmarks/fleet/controller_scale.py --workers 10,100      these numbers of workers
    python benchmarks/fleet/controller_scale.py --workers 100,300,1000 --whole-steps
    python benchmarks/fleet/controller_scale.py --workers 1000 --profile

Every worker holds RESPONSES responses and generates a token of each every STEP_S. It reports tokens when a response
ends and at least once a second, and sends a heartbeat once a second. Workers do this at different moments. The queue is
never empty; with `--whole-steps` a step has just as many responses as there are slots, so that the queue is empty most
of the time, workers become idle, and responses are rebalanced. Every FLAP_S seconds, one worker in a hundred loses its
link and dials again, so its responses move. The controller is windfall's own. The cost of the simulated workers and of
the network is measured around their callbacks and subtracted; the last row but one includes it. The event loop's own
work counts as the controller's. Each number of workers runs in its own process.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import math
import pstats
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from windfall.controller.directory.directory import Directory
from windfall.controller.rollout.dispatch import Dispatch
from windfall.controller.rollout.local_generation import LocalGeneration
from windfall.controller.workers.members import Members
from windfall.link import messages as m
from windfall.recipe.file import parse_recipe
from windfall.recipe.sections import Recipe
from windfall.sim.core import run
from windfall.sim.core.scenario import build
from windfall.sim.machines.network import Network
from windfall.sim.machines.worker import SimWorker

RESPONSES, STEP_S, LENGTH, GROUP = 8, 0.25, 80.0, 8
BOOT_S, WARM_S, FLAP_S = 1.0, 5.0, 1.0
"""The measurement starts at BOOT_S + WARM_S, when all workers have joined."""
KEYS = ("sim", "frame", "beat", "settle", "lose", "join", "load", "tick", "other")


class CpuTimer:
    """CPU seconds by name. A timed call inside another timed call counts only for the inner name."""

    def __init__(self) -> None:
        self.s: defaultdict[str, float] = defaultdict(float)
        self.n: defaultdict[str, int] = defaultdict(int)
        self._inner_s = 0.0

    def timed(self, name: str | Callable[..., str], function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def wrapper(*args: Any, **options: Any) -> Any:
            outer_s, self._inner_s = self._inner_s, 0.0
            start_s = time.thread_time()
            try:
                return function(*args, **options)
            finally:
                total_s = time.thread_time() - start_s
                key = name if isinstance(name, str) else name(*args)
                self.s[key] += total_s - self._inner_s
                self.n[key] += 1
                self._inner_s = outer_s + total_s

        return wrapper


def install(timer: CpuTimer) -> None:
    """Time the callbacks of simulated workers and the network (`sim`), and those of the controller by their task."""
    simulated = {SimWorker: ("_tick", "_heartbeat", "_receive", "dial", "flap"), Network: ("_share", "_sent")}
    for kind, names in simulated.items():
        for name in names:
            setattr(kind, name, timer.timed("sim", getattr(kind, name)))
    message_kind = lambda _self, _member, message: {m.Tokens: "frame", m.Stats: "beat"}.get(type(message), "other")  # noqa: E731
    for kind, name, key in (
        (Dispatch, "_handle", message_kind), (Dispatch, "_schedule", "settle"), (Dispatch, "_lose", "lose"),
        (Members, "join", "join"), (Directory, "load", "load"), (Members, "tick", "tick"),
        (LocalGeneration, "tick", "tick"),
    ):  # fmt: skip
        setattr(kind, name, timer.timed(key, getattr(kind, name)))


def recipe(workers: int, seconds: float, whole_steps: bool) -> Recipe:
    groups = (1 if whole_steps else 4) * max(8, workers) * RESPONSES // GROUP
    engine = {"fixed_s": STEP_S - RESPONSES * 1e-6, "each_s": 1e-6}
    return parse_recipe(
        {
            "run": {"name": "scale", "steps": 1000 if whole_steps else 10},
            "rollout": {"groups": groups, "group_size": GROUP, "max_tokens": 1000},
            "eval": {"tasks": 0},
            "fleet": {"local": False, "workers": workers, "kind": "spot", "price_usd_per_h": 1.0},
            "sim": {
                "granule": 1, "seconds": seconds, "skip_steps": 0, "boot_s": BOOT_S, "worker_slots": RESPONSES,
                "worker_spread": 0.05, "prompt_tokens": 32, "median_tokens": LENGTH, "weights_bytes": 1e6,
                "egress_bytes_per_s": 1e12, "trainer": {**engine, "train_s": 1e-9}, "worker": engine,
            },
        },
        where="controller_scale",
    )  # fmt: skip


def measure(workers: int, seconds: float, whole_steps: bool) -> dict[str, float]:
    """Simulate this number of workers. Costs cover the time after all have joined."""
    timer, marks = CpuTimer(), {}
    install(timer)
    end_s = BOOT_S + WARM_S + seconds

    def mark(simulation: run.Simulation) -> None:
        counts = simulation.dispatch.ledger.counts
        marks["from"] = (time.thread_time(), timer.s.copy(), timer.n.copy(), counts.accepted, counts.moved)

    def flap(simulation: run.Simulation, turn: int) -> None:
        workers = list(simulation.fleet.workers.values())
        for worker in workers[turn % 100 :: 100]:
            worker.flap(0.5)
        asyncio.get_running_loop().call_later(FLAP_S, flap, simulation, turn + 1)

    def disturb(simulation: run.Simulation) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(BOOT_S + WARM_S, mark, simulation)
        loop.call_later(BOOT_S + WARM_S + 0.1, flap, simulation, 0)

    scenario = build(recipe(workers, end_s, whole_steps))
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory() as folder:
        done = run.simulate(scenario, Path(folder) / "events.jsonl", disturb=disturb)
    cpu_s, s, n, accepted, moved = marks["from"]
    spent_s = time.thread_time() - cpu_s
    times = {key: timer.s[key] - s[key] for key in KEYS}
    counts = {key: timer.n[key] - n[key] for key in KEYS}
    done.dispatch.ledger.check()
    ledger = done.dispatch.ledger.counts
    return {
        "workers": workers, "virtual_s": seconds, "cpu_s": spent_s,
        "controller_s": spent_s - times["sim"], "tokens": ledger.accepted - accepted, "moved": ledger.moved - moved,
        "kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib,
        **{f"{key}_s": times[key] for key in KEYS}, **{f"{key}_n": counts[key] for key in KEYS},
    }  # fmt: skip


def microseconds_per_call(r: dict[str, float], key: str) -> float:
    return 1e6 * r[f"{key}_s"] / max(1.0, r[f"{key}_n"])


COLUMNS: tuple[tuple[str, str, Callable[[dict[str, float]], float]], ...] = (
    ("tok/s", "{:,.0f}", lambda r: r["tokens"] / r["virtual_s"]),
    ("frames/s", "{:,.0f}", lambda r: r["frame_n"] / r["virtual_s"]),
    ("CPU s per s", "{:.4f}", lambda r: r["controller_s"] / r["virtual_s"]),
    ("ms per 1000 tok", "{:.2f}", lambda r: 1e6 * r["controller_s"] / max(1.0, r["tokens"])),
    ("us per frame", "{:.1f}", lambda r: microseconds_per_call(r, "frame")),
    ("us per beat", "{:.1f}", lambda r: microseconds_per_call(r, "beat")),
    ("us per join", "{:.1f}", lambda r: microseconds_per_call(r, "join")),
    ("us per load", "{:.1f}", lambda r: microseconds_per_call(r, "load")),
    ("us per loss", "{:.0f}", lambda r: microseconds_per_call(r, "lose")),
    ("us per move", "{:.1f}", lambda r: 1e6 * r["lose_s"] / max(1.0, r["moved"])),
    ("settles/s", "{:,.0f}", lambda r: r["settle_n"] / r["virtual_s"]),
    ("us per settle", "{:,.0f}", lambda r: microseconds_per_call(r, "settle")),
    ("settling CPU", "{:.4f}", lambda r: r["settle_s"] / r["virtual_s"]),
    ("ticking CPU", "{:.4f}", lambda r: r["tick_s"] / r["virtual_s"]),
    ("sim CPU", "{:.4f}", lambda r: r["sim_s"] / r["virtual_s"]),
    ("all, us/worker", "{:.0f}", lambda r: 1e6 * r["cpu_s"] / r["virtual_s"] / r["workers"]),
    ("MiB", "{:,.0f}", lambda r: r["kib"] / 1024),
)


def show(rows: list[dict[str, float]]) -> None:
    """Print one row per figure and one column per number of workers. The last column is the exponent of growth between
    the last two numbers: 1 means proportional to the workers, 0 means constant."""
    print(f"{'workers':18}" + "".join(f"{r['workers']:>12,.0f}" for r in rows) + f"{'exponent':>12}")
    for name, form, value in COLUMNS:
        line = f"{name:18}" + "".join(f"{form.format(value(r)):>12}" for r in rows)
        if len(rows) > 1 and value(rows[-2]) > 0 and value(rows[-1]) > 0:
            exponent = math.log(value(rows[-1]) / value(rows[-2])) / math.log(rows[-1]["workers"] / rows[-2]["workers"])
            line += f"{exponent:>12.2f}"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="10,100,1000,10000", help="Numbers of workers, separated by commas.")
    parser.add_argument("--seconds", type=float, default=20.0, help="Virtual seconds to measure.")
    parser.add_argument("--whole-steps", action="store_true", help="Let the queue become empty in every step.")
    parser.add_argument("--profile", action="store_true", help="Profile the first number of workers.")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.seconds, options.whole_steps)))
        return
    if not all(n.isdecimal() and int(n) > 0 for n in options.workers.split(",")):
        parser.error("--workers: expected numbers above 0, separated by commas")
    counts = [int(n) for n in options.workers.split(",")]
    if options.profile:
        profile = cProfile.Profile()
        profile.runcall(measure, counts[0], options.seconds, options.whole_steps)
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)
        return
    rows = []
    for count in counts:
        began_s = time.monotonic()
        process = subprocess.run(
            [sys.executable, __file__, "--one", str(count), "--seconds", str(options.seconds)]
            + ["--whole-steps"] * options.whole_steps,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if process.returncode:
            sys.exit(process.stderr)
        rows.append(json.loads(process.stdout))
        print(f"{count:,} workers: {time.monotonic() - began_s:.0f} s", file=sys.stderr)
    show(rows)


if __name__ == "__main__":
    main()
