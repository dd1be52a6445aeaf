"""Seer's cumulative ablation in virtual time, beside the paper's figures (arXiv 2511.14617): long responses in groups.

    python benchmarks/papers/seer_table.py [--quick] [--only Moonlight] [--alike 0.7] [--sigma 0.9] [--seeds 1]

The product's own controller and placement run on simulated machines (docs/sim.md). Machines follow from data sheets and
assumed efficiencies, as in rlboost_model.py; nothing is fitted. A step is a rollout alone: the row is how many times as
fast the rollout is as in the baseline, mean over steps after the first, in which lengths are not known yet.

    baseline       every group is bound to one engine, round robin; engines take responses in order of arrival
    + divided      windfall's placement, order = "fifo": every response is placed when there is room for it, and moves
    + context      order = "context": a probe of every group first, then the longest expected first
    + speculation  drafts from siblings, with the acceptance that the paper reports by number of references

The paper publishes models, GPUs, groups and limits of lengths. `ASSUMED` lists what is guessed. Seer's engines share a
pool of KV in host memory, so that a response continues elsewhere without a prefill; windfall prefills it again. With
`--host-kv`, one more row is printed: as "+ context", but no prefill takes any time. This bounds what such a pool adds.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `benchmarks` is found

from benchmarks.support.rlboost_model import H100_BYTES, H100_BYTES_PER_S, H100_FLOP_PER_S, Assumptions
from windfall.controller.assembly import Rules
from windfall.controller.scheduling.balance import Move, WorkerLoad
from windfall.controller.scheduling.placement import Placement
from windfall.events import log as events
from windfall.recipe.file import parse_recipe
from windfall.recipe.sections import Recipe
from windfall.sim.core import run, scenario

ACCEPTANCE = [[0, 1.70], [1, 2.04], [5, 2.32], [15, 2.53]]
"""Tokens per step by references, drafts without branches: the paper."""
SIGMA, ALIKE, MEMORY = 0.9, 0.7, 0.6
ASSUMED = (
    "mean lengths 22k (Moonlight), 8k (Qwen2-VL-72B), 39k tokens (Kimi-K2); prompts of 512",
    "log-normal lengths, cut off at the limit; spread and within-group correlation of the logarithms as printed",
    f"engines of 1, 8 and 32 GPUs (H800 as H100 data sheets) have {MEMORY:.0%} of the memory, the trainer the rest",
    "steps read all weights once (all experts) and compute active parameters; no cost of communication",
    "only KV limits how many responses an engine runs; verification of drafts has 4 rows per response",
    "references: siblings that have ended, and half of those in progress; drafts cost no time of their own",
)


@dataclass(frozen=True, kw_only=True)
class Setting:
    weights_bytes: float
    active: float
    """Parameters that a token uses."""
    kv_bytes: float
    """Bytes of the KV cache per token."""
    gpus: int
    """GPUs of one engine."""
    engines: int
    groups: int
    size: int
    """Responses of a group."""
    mean_tokens: float
    max_tokens: int
    paper: tuple[float, float, float]
    """Divided, + context, + speculation: times the baseline's throughput."""


SETTINGS = {
    "Moonlight": Setting(
        weights_bytes=32e9, active=3e9, kv_bytes=27 * 576 * 2, gpus=1, engines=32, groups=400, size=8,
        mean_tokens=22_000, max_tokens=65_536, paper=(1.41, 1.47, 1.90),
    ),
    "Qwen2-VL-72B": Setting(
        weights_bytes=145e9, active=72e9, kv_bytes=80 * 2 * 8 * 128 * 2, gpus=8, engines=16, groups=600, size=16,
        mean_tokens=8_000, max_tokens=40_960, paper=(1.42, 1.56, 2.04),
    ),
    "Kimi-K2": Setting(
        weights_bytes=1e12, active=32e9, kv_bytes=61 * 576 * 2, gpus=32, engines=8, groups=800, size=8,
        mean_tokens=39_000, max_tokens=98_304, paper=(1.16, 1.27, 1.53),
    ),
}  # fmt: skip


class GroupBound(Placement):
    """Every group is bound to one worker. All its responses are sent there at once, and never move."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "balancing": False})

    def choose(
        self, queued: Sequence[str], loads: Sequence[WorkerLoad], *, backlog: int, coming: int
    ) -> list[tuple[str, str]]:
        del backlog, coming
        workers = sorted(load.worker for load in loads)
        return [(id, workers[int(id.partition("/")[0]) % len(workers)]) for id in queued]

    def moves(self, loads: Sequence[WorkerLoad]) -> list[Move]:
        del loads
        return []


VARIANTS: dict[str, tuple[type[Placement], dict[str, dict[str, Any]]]] = {
    "baseline": (GroupBound, {"rollout": {"order": "fifo"}}),
    "divided": (Placement, {"rollout": {"order": "fifo"}}),
    "context": (Placement, {"rollout": {"order": "context"}}),
    "speculation": (Placement, {"rollout": {"order": "context"}, "sim": {"acceptance": ACCEPTANCE}}),
    "host KV": (Placement, {"rollout": {"order": "context"}}),
}


def median_tokens(mean: float, sigma: float, most: int) -> float:
    """The median of a log-normal that has this mean after it is cut off at `most`."""

    def cut_mean(median: float) -> float:
        z = math.log(most / median) / sigma
        normal = statistics.NormalDist()
        return median * math.exp(sigma**2 / 2) * normal.cdf(z - sigma) + most * (1 - normal.cdf(z))

    low, high = 1.0, float(most)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if cut_mean(middle) < mean else (low, middle)
    return low


def recipe(
    s: Setting,
    changes: dict[str, dict[str, Any]],
    *,
    alike: float,
    sigma: float,
    steps: int,
    memory_share: float = MEMORY,
) -> Recipe:
    a = Assumptions()
    memory, flops = s.gpus * H100_BYTES_PER_S * a.memory, s.gpus * H100_FLOP_PER_S * a.decode
    engine = {
        "fixed_s": s.weights_bytes / memory, "each_s": 2 * s.active / flops, "prefill_s": 2 * s.active / flops,
        "context_s": s.kv_bytes / memory,
    }  # fmt: skip
    keys: dict[str, dict[str, Any]] = {
        "run": {"name": "seer", "steps": steps},
        "rollout": {"groups": s.groups, "group_size": s.size, "max_tokens": s.max_tokens},
        "train": {"micro_tokens": 65_536}, "eval": {"tasks": 0}, "checkpoint": {"every": 10_000},
        "techniques": {"pipelining": False}, "fleet": {"local": False, "workers": s.engines, "kind": "reserved"},
        "sim": {
            "trainer": {**engine, "train_s": 1e-9}, "worker": engine, "boot_s": 1.0, "weights_bytes": 1.0,
            "worker_slots": max(256, -(-s.groups // s.engines) * s.size),
            "worker_kv_tokens": int((s.gpus * H100_BYTES * memory_share - s.weights_bytes) / s.kv_bytes),
            "prompt_tokens": 512, "median_tokens": median_tokens(s.mean_tokens, sigma, s.max_tokens), "sigma": sigma,
            "alike": alike, "granule": round(s.mean_tokens / 48), "skip_steps": 1,
        },
    }  # fmt: skip
    if changes is VARIANTS["host KV"][1]:
        keys["sim"]["worker"] = {**engine, "prefill_s": 0.0}
    for section, more in changes.items():
        keys[section] = {**keys[section], **more}
    return parse_recipe(keys, where="seer")


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Means over the steps of a simulated variant, the first one left out."""

    seconds: float
    tail: float
    """Share of the time in which the last tenth of the responses ended."""
    evictions: float
    """Evictions from KV caches in a step."""
    moved: float
    alike: float
    """Within-group correlation, as the controller has learned it."""
    error: float


def simulate(s: Setting, variant: str, folder: Path, *, alike: float, sigma: float, steps: int, seed: int) -> Rollout:
    placement, changes = VARIANTS[variant]
    made = recipe(s, changes, alike=alike, sigma=sigma, steps=steps)
    made = scenario.with_keys(made, {"run": {"seed": seed}})
    built = replace(scenario.build(made), rules=Rules(placement=placement))
    ended: list[float] = []
    log = folder / "events.jsonl"

    def note_ends(simulation: run.Simulation) -> None:
        schedule, finished = simulation.token_schedule, simulation.token_schedule.finished

        def finish(row: Any) -> None:
            ended.append(asyncio.get_running_loop().time())
            finished(row)

        schedule.finished = finish  # type: ignore[method-assign]

    run.simulate(built, log, disturb=note_ends)
    read = events.read(log)
    spans = [e for e in read if e["kind"] == "span" and e["name"] == "rollout"][1:]
    logged = [e for e in read if e["kind"] == "scalar" and e["name"] == "step"][1:]
    count, tails = s.groups * s.size, []
    for n, span in enumerate(spans, 1):
        times = sorted(ended[n * count : (n + 1) * count])
        tails.append((times[-1] - times[int(0.9 * count)]) / span["s"])
    lengths = logged[-1].get("predicted", {})
    return Rollout(
        seconds=statistics.mean(span["s"] for span in spans), tail=statistics.mean(tails),
        evictions=statistics.mean(e["evictions"] for e in logged),
        moved=statistics.mean(e["moved"] for e in logged), alike=lengths.get("alike", math.nan),
        error=lengths.get("error", math.nan),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="Only Moonlight, on an eighth of the machines: seconds.")
    parser.add_argument("--only", choices=list(SETTINGS), help="Only this model.")
    parser.add_argument("--alike", type=float, default=ALIKE, help="Correlation of log lengths within a group.")
    parser.add_argument("--sigma", type=float, default=SIGMA, help="Standard deviation of log lengths.")
    parser.add_argument("--scale", type=int, default=1, help="Divide engines and groups by this number, to save time.")
    parser.add_argument("--steps", type=int, default=3, help="Steps, of which the first is left out.")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--host-kv", action="store_true", help="Add the bound for a pool of KV in host memory.")
    args = parser.parse_args()
    names = ["Moonlight"] if args.quick else [args.only] if args.only else list(SETTINGS)
    scale = 8 if args.quick else args.scale
    print(f"spread of log lengths {args.sigma:g}, within-group correlation {args.alike:g}; assumed:")
    print(*ASSUMED, sep="\n", end="\n\n")
    head = ("", "rollout", "simulated", "Seer", "tail", "evictions", "moved", "alike", "error")
    print(f"{head[0]:<26}" + "".join(f"{name:>11}" for name in head[1:]), flush=True)
    for name in names:
        s = SETTINGS[name]
        s = replace(s, engines=max(1, s.engines // scale), groups=max(1, s.groups // scale))
        variants = list(zip(VARIANTS, (1.0, *s.paper, math.nan), strict=True))[: 5 if args.host_kv else 4]
        report(name, s, variants, alike=args.alike, sigma=args.sigma, steps=args.steps, seeds=args.seeds)


def report(
    name: str, s: Setting, variants: Sequence[tuple[str, float]], *, alike: float, sigma: float, steps: int, seeds: int
) -> None:
    """Print a row for each of `variants`: its name, and the paper's figure."""
    base_s = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for variant, paper in variants:
            rows = [
                simulate(s, variant, Path(folder), alike=alike, sigma=sigma, steps=steps, seed=seed)
                for seed in range(seeds)
            ]
            mean = {key: statistics.mean(getattr(row, key) for row in rows) for key in rows[0].__dataclass_fields__}
            base_s = base_s or mean["seconds"]
            what = variant if variant == "baseline" else f"+ {variant}"
            published = "-" if math.isnan(paper) else f"{paper:.2f}x"
            print(
                f"{name + ' ' + what:<26}{mean['seconds']:>9,.0f} s{base_s / mean['seconds']:>10.2f}x{published:>11}"
                f"{mean['tail']:>11.0%}{mean['evictions']:>11,.0f}{mean['moved']:>11,.0f}{mean['alike']:>11.2f}"
                f"{mean['error']:>11.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
