"""AstraFlow's recipe with two policies in virtual time, beside the paper's figures (arXiv 2605.15565): a solver and a
verifier, 2 x Qwen3-8B, trained together on 8 H100.

    python benchmarks/papers/astraflow_table.py [--steps 36] [--seeds 1] [--fluctuation 0.5]

The product's own controller runs on simulated machines (docs/sim.md). Rows:

    synchronous    all 8 GPUs generate, then all 8 train the solver, then the verifier; the next step begins after that
    lock-step      4 GPUs generate and 2 train each policy, asynchronously. The trainers advance behind a barrier: none
                   begins with the next batch before the other one has published its version. As in AstraFlow
    free           the same without the barrier, as windfall trains several policies

The paper gives the GPUs, the sizes of batches, the limit of lengths and the staleness; `ASSUMED` lists what is guessed.
One number is fitted: the seconds per trained token, so that the row "lock-step" takes the paper's 77.7 s. So that row
says nothing by itself, and the others say how they compare with it.

A barrier costs time only if trainers differ now in one direction and now in the other: a step takes the mean of the
longer of both times, instead of the longer of both means. So there are four more rows, in which both trainers have the
same mean: steady, and with times that fluctuate from step to step.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `benchmarks` is found

from benchmarks.papers.seer_table import median_tokens
from benchmarks.support.rlboost_model import H100_BYTES, H100_BYTES_PER_S, H100_FLOP_PER_S, Assumptions
from windfall.events import log as events
from windfall.link import messages as m
from windfall.recipe.file import parse_recipe
from windfall.recipe.sections import Recipe
from windfall.sim.calibrate.event_log import steps_of
from windfall.sim.core import run, scenario
from windfall.sim.core.draws import standard_normal
from windfall.sim.machines.linked_trainer import LinkedTrainer

PARAMETERS, KV_BYTES = 8.19e9, 36 * 2 * 8 * 128 * 2
"""Qwen3-8B: parameters, and bytes of one token in the KV cache."""
WEIGHTS_BYTES = 2 * PARAMETERS
GROUPS, SIZE, MAX_TOKENS, STALENESS = 32, 8, 4096, 8
SCALE = 4
"""One simulated response stands for this many, and costs as much: times are linear in responses."""
AGAIN = 0.4
SOLVER_TOKENS, VERIFIER_TOKENS, SIGMA = 1800.0, 900.0, 0.6
CONTEXT = 2500
"""Tokens of the KV cache for which a response is counted: an engine runs as many responses as fit."""
UPDATE_S = 3.0
PAPER = {"synchronous": 212.6, "lock-step": 77.7}
"""Seconds per iteration."""
SKIP = 6
"""Steps at the start that are left out."""
ASSUMED = (
    f"a step has {GROUPS} prompts with {SIZE} responses; the solver is trained on all its sequences, also on the "
    "second ones (AstraFlow takes 256 of each model)",
    f"the solver speaks again in {AGAIN:.0%} of the responses; sequences of {SOLVER_TOKENS:,.0f} (solver) and "
    f"{VERIFIER_TOKENS:,.0f} tokens (verifier) on average, log-normal (spread {SIGMA:g}), prompts of 256 and 2,048",
    "engines by the data sheet of an H100, with 70 % of its bandwidth and 50 % of its FLOP/s; 85 % of its memory",
    f"an update with publishing takes {UPDATE_S:g} s on 2 GPUs; weights move at 10 GB/s, deltas of 2.5 %",
    "training takes the same time per token for both policies, and is 4 times as fast on 8 GPUs as on 2",
    "synchronous: both models are in every engine and share its batches, and switching between generation and training "
    "is free. Both favor it",
    "lock-step and free: 4 engines, each with one model; which one is decided by windfall's own rule",
)


@dataclass(frozen=True, kw_only=True)
class Variant:
    name: str
    synchronous: bool = False
    barrier: bool = False
    balanced: bool = False
    """Both trainers need the same time for a step."""
    fluctuation: float = 0.0
    """Standard deviation of the logarithm of a step's training time."""


@dataclass
class Barrier:
    """Where trainers wait for each other."""

    arrived: dict[int, int] = field(default_factory=dict)
    """By version: number of trainers that have published it."""
    opened: dict[int, asyncio.Event] = field(default_factory=dict)

    async def wait(self, version: int, trainers: int) -> None:
        self.arrived[version] = self.arrived.get(version, 0) + 1
        opened = self.opened.setdefault(version, asyncio.Event())
        if self.arrived[version] == trainers:
            opened.set()
        await opened.wait()


class TableTrainer(LinkedTrainer):
    """A trainer whose times fluctuate, and that answers Publish when the other ones have published, too."""

    barrier: Barrier | None = None
    fluctuation, seed, trainers = 0.0, 0, 1
    barrier_s = 0.0
    """Seconds that it waited for others, over all steps that count."""

    async def _execute(self, order: object) -> object:
        reply = await super()._execute(order)
        if isinstance(reply, m.PublishedVersion) and self.barrier is not None:
            loop = asyncio.get_running_loop()
            began_s = loop.time()
            await self.barrier.wait(reply.version, self.trainers)
            self.barrier_s += (loop.time() - began_s) * (reply.version > SKIP)
        return reply

    async def _work(self, seconds: float) -> None:
        normal = standard_normal(f"{self.seed}/{self.policy}/{self.weights.state.step}/training")
        await super()._work(seconds * math.exp(self.fluctuation * normal - self.fluctuation**2 / 2))


class TableSimulation(run.Simulation):
    trainer_class = TableTrainer


def recipe(v: Variant, train_s: float, steps: int) -> Recipe:
    a = Assumptions()
    bandwidth, flops = H100_BYTES_PER_S * a.memory, H100_FLOP_PER_S * a.decode
    token_s = SCALE * 2 * PARAMETERS / flops
    engine = {
        "fixed_s": WEIGHTS_BYTES / bandwidth, "each_s": token_s, "prefill_s": token_s,
        "context_s": SCALE * KV_BYTES / bandwidth,
    }  # fmt: skip
    solver_tokens = (1 + AGAIN) * SOLVER_TOKENS
    gpus = 4 if v.synchronous else 1  # times as many for each trainer
    trainer = {**engine, "train_s": SCALE * train_s / gpus, "update_s": UPDATE_S / gpus}
    models = (1 + v.synchronous) * WEIGHTS_BYTES
    return parse_recipe(
        {
            "run": {"name": "astraflow", "steps": steps},
            "policies": {name: {"lora": {}} if v.synchronous else {} for name in ("solver", "verifier")},
            "rollout": {"groups": GROUPS // SCALE, "group_size": SIZE, "max_tokens": MAX_TOKENS + 2048,
                        "staleness": 0 if v.synchronous else STALENESS},
            "train": {"micro_tokens": 32_768 // SCALE}, "eval": {"tasks": 0}, "checkpoint": {"every": 10_000},
            "techniques": {"pipelining": not v.synchronous},
            "fleet": {"workers": 8 if v.synchronous else 4, "kind": "reserved", "heartbeat_s": 5.0, "suspect_s": 30.0,
                      "gone_s": 60.0},
            "sim": {
                "trainer": trainer, "worker": engine, "boot_s": 1.0, "granule": 256, "alike": 0.5, "env_s": 0.1,
                "weights_bytes": 1e6 if v.synchronous else WEIGHTS_BYTES, "adapter_bytes": 1e6,
                "delta_bytes": 0.025 * WEIGHTS_BYTES, "egress_bytes_per_s": 10e9, "ingress_bytes_per_s": 10e9,
                "worker_slots": int((0.85 * H100_BYTES - models) / KV_BYTES / CONTEXT / SCALE), "skip_steps": 0,
                "prompt_tokens": 256, "median_tokens": median_tokens(SOLVER_TOKENS, SIGMA, MAX_TOKENS), "sigma": SIGMA,
                "script": [["solver", 1.0], ["verifier", 1.0], ["solver:again", AGAIN]],
                "policies": {"verifier": {
                    "prompt_tokens": 2048, "median_tokens": median_tokens(VERIFIER_TOKENS, SIGMA, MAX_TOKENS),
                    "trainer": {"train_s": trainer["train_s"] * (solver_tokens / VERIFIER_TOKENS if v.balanced else 1)},
                }},
            },
        },
        where="astraflow",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Row:
    """Means of a simulated variant over steps and seeds."""

    step_s: float
    """An iteration ends when both policies have made the step."""
    wait: dict[str, float]
    """By policy: share of the time in which its trainer waits for responses."""
    barrier: dict[str, float]
    """By policy: share of the time in which its trainer waits for the other one."""
    stale: float
    """Mean staleness of the solver's responses."""


def simulate(v: Variant, train_s: float, *, steps: int, seeds: int) -> Row:
    rows = [_simulate(v, train_s, steps=steps, seed=seed) for seed in range(seeds)]
    mean = statistics.mean
    return Row(
        step_s=mean(row.step_s for row in rows),
        wait={name: mean(row.wait[name] for row in rows) for name in rows[0].wait},
        barrier={name: mean(row.barrier[name] for row in rows) for name in rows[0].barrier},
        stale=mean(row.stale for row in rows),
    )


def _simulate(v: Variant, train_s: float, *, steps: int, seed: int) -> Row:
    made = scenario.with_keys(recipe(v, train_s, steps), {"run": {"seed": seed}})

    def prepare(simulation: run.Simulation) -> None:
        barrier = Barrier() if v.barrier else None
        for trainer in simulation.trainers.values():
            assert isinstance(trainer, TableTrainer)
            trainer.barrier, trainer.fluctuation, trainer.seed = barrier, v.fluctuation, seed
            trainer.trainers = len(simulation.trainers)

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "events.jsonl"
        done = run.simulate(scenario.build(made), log, disturb=prepare, make=TableSimulation)
        read = events.read(log)
    by_policy = {name: steps_of(read, name) for name in done.trainers}
    counted = {name: rows[SKIP:] for name, rows in by_policy.items()}
    seconds = {name: rows[-1]["m"] - by_policy[name][SKIP - 1]["m"] for name, rows in counted.items()}
    begin_s, end_s = (max(rows[n]["m"] for rows in by_policy.values()) for n in (SKIP - 1, -1))
    barrier = {name: trainer.barrier_s for name, trainer in done.trainers.items() if isinstance(trainer, TableTrainer)}
    return Row(
        step_s=(end_s - begin_s) / (steps - SKIP),
        wait={name: sum(e["train_wait_s"] for e in rows) / seconds[name] for name, rows in counted.items()},
        barrier={name: s / seconds[name] for name, s in barrier.items()},
        stale=statistics.mean(e.get("staleness_mean", 0.0) for e in counted["solver"]),
    )


def fitted(v: Variant, wanted_s: float, pool: ProcessPoolExecutor, *, steps: int, seeds: int) -> float:
    """Seconds per trained token with which a step of this variant takes `wanted_s`."""
    low, high = guess, _ = 8e-5, 1.6e-4
    both = [pool.submit(simulate, v, s, steps=steps, seeds=seeds) for s in (low, high)]
    low_s, high_s = (found.result().step_s for found in both)
    for _ in range(4):  # steps are nearly linear in it where training is the bottleneck
        guess = low + (high - low) * (wanted_s - low_s) / (high_s - low_s)
        found_s = simulate(v, guess, steps=steps, seeds=seeds).step_s
        if abs(found_s - wanted_s) < 0.003 * wanted_s:
            break
        low, low_s, high, high_s = (
            (guess, found_s, high, high_s) if found_s < wanted_s else (low, low_s, guess, found_s)
        )
    return guess


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=36, help=f"Steps; the first {SKIP} are left out.")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--fluctuation", type=float, default=0.5, help="Spread of log training times, last two rows.")
    args = parser.parse_args()
    began_s, size = time.perf_counter(), {"steps": args.steps, "seeds": args.seeds}
    print("assumed:", *ASSUMED, sep="\n  ", end="\n\n", flush=True)
    lock_step, spread = Variant(name="lock-step", barrier=True), args.fluctuation
    variants = (
        Variant(name="synchronous", synchronous=True),
        lock_step,
        Variant(name="free"),
        Variant(name="lock-step, equal trainers", barrier=True, balanced=True),
        Variant(name="free, equal trainers", balanced=True),
        Variant(name="lock-step, equal, fluctuating", barrier=True, balanced=True, fluctuation=spread),
        Variant(name="free, equal, fluctuating", balanced=True, fluctuation=spread),
    )
    with ProcessPoolExecutor(2) as pool:
        train_s = fitted(lock_step, PAPER["lock-step"], pool, **size)
        print(f"fitted to lock-step: {train_s:.3g} s per trained token on 2 GPUs\n")
        rows = [pool.submit(simulate, v, train_s, **size) for v in variants]
        head = ("s/iteration", "paper", "solver waits", "at barrier", "verifier waits", "at barrier", "staleness")
        print(f"{'':<30}" + "".join(f"{name:>16}" for name in head), flush=True)
        for v, found in zip(variants, rows, strict=True):
            print(f"{v.name:<30}" + "".join(f"{cell:>16}" for cell in cells(v, found.result())), flush=True)
    print(f"\n{args.steps} steps, {args.seeds} seeds, {time.perf_counter() - began_s:.0f} s")


def cells(v: Variant, row: Row) -> list[str]:
    paper = f"{PAPER[v.name]:.1f}" if v.name in PAPER else "-"
    shares = [f"{each[name]:.0%}" for name in ("solver", "verifier") for each in (row.wait, row.barrier)]
    return [f"{row.step_s:.1f}", paper, *shares, f"{row.stale:.1f}"]


if __name__ == "__main__":
    main()
