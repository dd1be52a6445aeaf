"""Simulated: throughput by bound on staleness, beside AReaL's curve (arXiv 2505.24298).

    python benchmarks/staleness/run.py curve [--jobs 2] [--seeds 1] [--only windfall,...] [--out FILE]
    python benchmarks/staleness/run.py curve --calibrate      print the training time that gives AReaL's last figure

windfall's own controller and policies run in virtual time (docs/sim.md). The scenario is like AReaL's: a 1.5B model,
long responses with a heavy tail, three quarters of the GPUs roll out and the others train. The machines are roofline
formulas for H100-class GPUs. One number is fitted: TRAIN_S, so that throughput without a bound is about 3.08 times
that of staleness 0. The other settings are assumptions that were chosen with the paper's curve in view. Variants:

    gate        AReaL's rule: only the gate bounds staleness; a response that exceeds the bound is trained on
    windfall    gate and check: no response exceeds the bound; a step waits for those that the next version would make
                too old; running responses are interrupted by new weights
    finish      as windfall, with on_new_weights = "finish"
    pipelined   as windfall, and micro-batches are trained on before the batch is complete, as windfall does by default.
                AReaL does not, so the other variants do not either.

Throughput is in trained tokens per virtual second, as a ratio to the same variant with staleness 0. `over`: share of
trained responses that exceed the bound. `dropped`: share of sampled tokens that were dropped as too old.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

from windfall.controller import generation
from windfall.controller.tasks.admission import Admission
from windfall.events import log as events
from windfall.recipe.file import parse_recipe
from windfall.recipe.sections import Recipe
from windfall.sim.calibrate.event_log import steps_of
from windfall.sim.core import run, scenario

AREAL = {0: 1.00, 1: 2.09, 2: 2.77, 4: 2.77, 8: 2.89, 16: 2.97, None: 3.08}
"""AReaL's throughput, 128.7k tokens per second at staleness 0, as ratios. None: without a bound."""
VARIANTS: dict[str, dict[str, Any]] = {
    "gate": {"gate_only": True},
    "windfall": {},
    "finish": {"on_new_weights": "finish"},
    "pipelined": {"pipelining": True},
}
STEPS, FIRST, LAST = 26, 8, 20
"""Steps of a run; the figures are those of the steps after FIRST until LAST. Before that the pipeline fills, after it
the run opens no more tasks."""
UNLIMITED = 1_000_000

# 128 groups of 4 responses on 6 GPUs are 85 responses per GPU. Lengths are log-normal: the mean is 8,400 tokens, 2.7 %
# reach the limit. H100 SXM at 70 % of 3.35 TB/s: reading the weights (3.1 GB) and launching a step takes 5 ms, reading
# the KV cache (28 layers, 2 KV heads of 128, bfloat16: 28.7 kB per token) 12 ns per token.
GROUPS, GROUP_SIZE, ROLLOUT_GPUS, SLOTS = 128, 4, 6, 128
ROLLOUT = {"fixed_s": 0.005, "each_s": 3e-5, "context_s": 1.2e-8, "prefill_s": 6e-6}
TRAIN_S = 2.3e-5
"""Seconds of training per token on the other 2 GPUs. Fitted to AREAL[None] on a run of 20 steps; with STEPS the ratio
is 3.15. `--calibrate` fits it again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    variant: str
    staleness: int | None
    seed: int = 0
    train_s: float = TRAIN_S
    slots: int = SLOTS
    steps: int = STEPS
    first: int = FIRST
    last: int = LAST


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    variant: str
    staleness: int | None
    seed: int
    tok_per_s: float
    step_s: float
    wait: float
    """Share of the time in which the trainer waited for groups."""
    mean_staleness: float
    max_staleness: int
    over: float
    dropped: float
    mean_length: float
    cut: float
    """Share of trained responses that reached the limit: the longest ones must not be missing."""


class GateOnly(Admission):
    """AReaL's rule: staleness is bounded only by how many tasks are admitted."""

    def __init__(self, *, staleness: int, **others: Any) -> None:
        super().__init__(staleness=staleness, **others)
        self._gate, self.staleness = staleness, UNLIMITED

    @property
    def capacity(self) -> int:
        held = len(self._again) + len(self._open) + len(self._ready) + len(self.taken)
        return max(0, min(self._gate + 1, self.steps - self.version) * self.batch - held)


def recipe(case: Case) -> Recipe:
    keys = VARIANTS[case.variant]
    return parse_recipe(
        {
            "run": {"name": "staleness", "steps": case.steps, "seed": case.seed},
            "rollout": {
                "groups": GROUPS, "group_size": GROUP_SIZE, "max_tokens": 27_648,
                "staleness": case.steps if case.staleness is None else case.staleness,
                "on_new_weights": keys.get("on_new_weights", "interrupt"),
            },
            "train": {"micro_tokens": 200_000},
            "techniques": {"pipelining": keys.get("pipelining", False)},
            "eval": {"tasks": 0}, "checkpoint": {"every": 1000},
            "fleet": {"local": False, "workers": ROLLOUT_GPUS},
            "sim": {
                "granule": 1024, "boot_s": 30.0, "weights_bytes": 3.1e9, "egress_bytes_per_s": 25e9,
                "ingress_bytes_per_s": 6.25e9, "prompt_tokens": 256, "median_tokens": 6000.0, "sigma": 0.8,
                "alike": 0.5, "worker_slots": case.slots, "worker": ROLLOUT,
                "trainer": {**ROLLOUT, "train_s": case.train_s, "update_s": 3.0},
            },
        },
        where="benchmarks/staleness/curve.py",
    )  # fmt: skip


def simulate(case: Case) -> Measured:
    built = scenario.build(recipe(case))
    admission = GateOnly if VARIANTS[case.variant].get("gate_only") and case.staleness else Admission
    with tempfile.TemporaryDirectory() as folder, patch.object(generation, "Admission", admission):
        log = Path(folder) / "events.jsonl"
        run.simulate(built, log)
        steps = steps_of(events.read(log))[case.first : case.last]
    seconds = steps[-1]["t"] - (steps[0]["t"] - steps[0]["s"])
    trained = sum(e["trained"] for e in steps) * built.granule
    dropped = sum(e.get("too_old_tokens", 0) for e in steps) * built.granule
    responses = sum(e["responses"] for e in steps)
    bound = UNLIMITED if case.staleness is None else case.staleness
    counts = [e.get("staleness_counts", [e["responses"]]) for e in steps]
    return Measured(
        variant=case.variant, staleness=case.staleness, seed=case.seed, tok_per_s=trained / seconds,
        step_s=seconds / len(steps), wait=sum(e["train_wait_s"] for e in steps) / seconds,
        mean_staleness=sum(lag * n for row in counts for lag, n in enumerate(row)) / responses,
        max_staleness=max(len(row) - 1 for row in counts),
        over=sum(sum(row[bound + 1 :]) for row in counts) / responses, dropped=dropped / (trained + dropped),
        mean_length=trained / responses, cut=sum(e["cut"] * e["responses"] for e in steps) / responses,
    )  # fmt: skip


def calibrate(jobs: int) -> float:
    """The training time per token with which throughput without a bound is AREAL[None] times that of staleness 0."""
    low, high = 0.5 * TRAIN_S, 2.0 * TRAIN_S  # slower training leaves less to gain
    with ProcessPoolExecutor(jobs) as pool:
        for _ in range(7):
            train_s = (low * high) ** 0.5
            both = pool.map(simulate, [Case(variant="windfall", staleness=n, train_s=train_s) for n in (0, None)])
            base, unbounded = (m.tok_per_s for m in both)
            print(f"train_s {train_s:.3g}: {unbounded / base:.3f}", file=sys.stderr, flush=True)
            low, high = (low, train_s) if unbounded / base < AREAL[None] else (train_s, high)
    return (low * high) ** 0.5


def table(found: Sequence[Measured]) -> list[str]:
    """One line per variant and bound."""
    heads = ("staleness", 11), ("AReaL", 7), ("ratio", 7), ("diff", 7), ("tok/s", 9), ("step s", 8), ("waits", 7)
    heads += ("mean", 6), ("max", 5), ("over", 7), ("dropped", 9), ("length", 8), ("at limit", 9)
    lines = [f"{'variant':11}" + "".join(f"{name:>{width}}" for name, width in heads)]
    for variant in VARIANTS:
        of = {n: [m for m in found if (m.variant, m.staleness) == (variant, n)] for n in AREAL}
        base = statistics.mean(m.tok_per_s for m in of[0]) if of[0] else 0.0
        for bound, runs in of.items():
            if not runs or not base:
                continue
            numbers = [f.name for f in fields(Measured) if f.name not in ("variant", "staleness")]
            mean = {name: statistics.mean(getattr(m, name) for m in runs) for name in numbers}
            ratio = mean["tok_per_s"] / base
            lines.append(
                f"{variant:11}{'unbounded' if bound is None else bound:>11}{AREAL[bound]:7.2f}{ratio:7.2f}"
                f"{ratio / AREAL[bound] - 1:+7.0%}{mean['tok_per_s']:9,.0f}{mean['step_s']:8.1f}{mean['wait']:7.0%}"
                f"{mean['mean_staleness']:6.2f}{max(m.max_staleness for m in runs):5}{mean['over']:7.1%}"
                f"{mean['dropped']:9.1%}{mean['mean_length']:8,.0f}{mean['cut']:9.1%}"
            )
    return lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, default=2, help="Simulations that run at once.")
    parser.add_argument("--seeds", type=int, default=1, help="Number of seeds.")
    parser.add_argument("--only", default=",".join(VARIANTS), help="Variants to simulate.")
    parser.add_argument("--bounds", help="Bounds to simulate, for example 0,1,unbounded; all by default.")
    parser.add_argument("--train-s", type=float, default=TRAIN_S, help="Seconds of training per token.")
    parser.add_argument("--slots", type=int, default=SLOTS, help="Responses that a rollout GPU runs at once.")
    parser.add_argument("--calibrate", action="store_true", help="Only fit the training time, and print it.")
    parser.add_argument("--out", type=Path, help="File to write the figures to, as lines of JSON.")


def main(options: argparse.Namespace) -> None:
    if options.calibrate:
        print(f"train_s = {calibrate(options.jobs):.3g}")
        return
    began_s = time.perf_counter()
    wanted = [str(n) for n in AREAL] if not options.bounds else options.bounds.replace("unbounded", "None").split(",")
    cases = [
        Case(variant=variant, staleness=bound, seed=seed, train_s=options.train_s, slots=options.slots)
        for seed in range(options.seeds) for bound in AREAL if str(bound) in wanted
        for variant in options.only.split(",")
    ]  # fmt: skip
    found: list[Measured] = []
    with ProcessPoolExecutor(options.jobs) as pool:
        for measured in pool.map(simulate, cases):
            found.append(measured)
            print(f"[{len(found)}/{len(cases)}] {measured}", file=sys.stderr, flush=True)
            if options.out:
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(measured)) + "\n")
    print("\n".join(table(found)))
    print(f"{time.perf_counter() - began_s:.0f} s; train_s {options.train_s:g}, {options.slots} slots per GPU")
