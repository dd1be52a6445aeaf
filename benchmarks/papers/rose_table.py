"""ROSE's evaluation in virtual time, beside the paper's figures (arXiv 2605.06534): rollout on serving GPUs.

    python benchmarks/papers/rose_table.py [--quick] [--requests azure-llm-2023-conv.csv] [--trace bamboo-p3-trace.csv]

The product's own controller, placement and lending policies run on simulated machines (docs/sim.md). Machines follow
from data sheets and assumed efficiencies, as in rlboost_model.py. A step is a rollout and then training, which are not
overlapped; the machine that trains does not generate. One number is fitted: the seconds of training in a step of 8B, so
that GRPO of 8B with lenders is 1.31 times as fast as without. For 32B they scale with parameters, tokens and GPUs.
Everything else is a prediction. ROSE publishes neither code nor most of its settings: `ASSUMED` lists what is guessed.

Lenders keep the limits that `windfall serve` has by default, `--max-slowdown` among them: a request's time per token
grows by at most that share. `--max-slowdown inf` keeps the service's objectives (TTFT, TPOT) alone, as ROSE does.

Rows "over spot" compare the time of the rollouts: lenders with windfall's policies against spot machines with
RLBoost's Algorithm 2, which does not send turns to the worker that has their tokens. The spot machines are those that
the market has, at most as many as there are lenders; a lost one is replaced if another is up. The row is the mean over
the three segments of the market.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `benchmarks` is found

from benchmarks.papers import rlboost
from benchmarks.support import recorded_requests
from benchmarks.support.request_load import GeneratedLoad
from benchmarks.support.rlboost_model import (
    H100_BYTES,
    H100_BYTES_PER_S,
    H100_FLOP_PER_S,
    MODELS,
    WINDOW_S,
    Assumptions,
    Model,
    market,
)  # fmt: skip
from benchmarks.support.sim_lenders import Lenders, LendingSimulation, SimLender, with_lenders
from windfall.defaults import MAX_SLOWDOWN
from windfall.events import log as events
from windfall.providers import trace
from windfall.providers.trace_formats import Change
from windfall.recipe.file import parse_recipe
from windfall.recipe.sections import Recipe
from windfall.serve.slo import Objectives
from windfall.sim.core import run
from windfall.step_time import StepTime

PAPER = {
    ("8B", "GRPO"): 1.31, ("8B", "DAPO"): 1.42, ("8B", "over spot"): 1.20,
    ("32B", "GRPO"): 1.46, ("32B", "DAPO"): 3.31, ("32B", "over spot"): 1.26,
}  # fmt: skip
FITTED = ("8B", "GRPO")
ASSUMED = (
    "engines of 1 (8B) and 4 GPUs (32B); 16 responses per GPU (the paper's limit); groups of 16: 256 (8B), 768 (32B)",
    "turns: 4 on average; 450 tokens sampled and 1,800 observed in each (medians); 0.5 s (8B) and 2 s (32B) between",
    "DAPO: half of the groups have equal rewards and are replaced (reward 1 with probability 0.042)",
    "serving: Qwen2.5-7B and 32B; as many requests as keep 18.9 % of the FLOP/s busy; peak 4.2 times the mean",
    "10 % of a GPU's memory is not for KV; weights of both models stay there; both clusters have H100 data sheets",
    "training has as many GPUs as the dedicated rollout; spot: what the market has, at most as many as lenders",
)
SERVED = {
    "8B": Model(name="7B", parameters=7.6e9, layers=28, heads=28, kv_heads=4, trainer_gpus=0),
    "32B": Model(name="32B", parameters=32.5e9, layers=64, heads=40, trainer_gpus=0),
}
"""Qwen2.5's published shapes."""
BUSY, PEAK = 0.189, 4.2
PROMPT, ANSWER = 900.0, 150.0
"""Median tokens of a request and of its answer."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    model: Model
    gpus: int
    """GPUs of one engine."""
    dedicated: int
    """GPUs."""
    borrowed: int
    """GPUs, at most."""
    groups: int
    turns: float
    env_s: float


SETTINGS = {
    "8B": Setting(model=MODELS["8B"], gpus=1, dedicated=16, borrowed=16, groups=256, turns=4, env_s=0.5),
    "32B": Setting(model=MODELS["32B"], gpus=4, dedicated=48, borrowed=64, groups=768, turns=4, env_s=2.0),
}


def engine(model: Model, gpus: int) -> dict[str, float]:
    a = Assumptions()
    memory, flops = gpus * H100_BYTES_PER_S * a.memory, gpus * H100_FLOP_PER_S * a.decode
    token_s = 2 * model.parameters / flops
    return {
        "fixed_s": model.weights_bytes / memory, "each_s": token_s, "prefill_s": token_s,
        "context_s": model.kv_bytes / memory,
    }  # fmt: skip


def free_bytes(s: Setting) -> float:
    """Memory of an engine that its weights leave free."""
    return s.gpus * H100_BYTES * 0.9 - s.model.weights_bytes


def recipe(s: Setting, algorithm: str, steps: int, seed: int) -> Recipe:
    keys: dict[str, dict[str, Any]] = {
        "run": {"name": f"rose-{s.model.name}", "steps": steps, "seed": seed},
        "algorithm": {"name": algorithm.lower()},
        "rollout": {"groups": s.groups, "group_size": 16, "max_tokens": 31_000, "max_draws": 8},
        "train": {"micro_tokens": 65_536}, "eval": {"tasks": 0}, "checkpoint": {"every": 10_000},
        "techniques": {"pipelining": False},
        "fleet": {"local": False, "workers": s.dedicated // s.gpus, "kind": "reserved", "price_usd_per_h": 4.0 * s.gpus,
                  "trainer_price_usd_per_h": 4.0 * s.dedicated, "borrowed_max": s.borrowed // s.gpus},
        "trace": {"price_usd_per_h": 1.5 * s.gpus},
        "sim": {
            "trainer": {**engine(s.model, s.gpus), "train_s": 1e-9}, "worker": engine(s.model, s.gpus),
            "worker_slots": 16 * s.gpus, "worker_kv_tokens": int(free_bytes(s) / s.model.kv_bytes), "boot_s": 60.0,
            "weights_bytes": s.model.weights_bytes, "prompt_tokens": 512, "median_tokens": 450, "sigma": 0.5,
            "turns": s.turns, "env_s": s.env_s, "env_sigma": 0.5, "observation_tokens": 1800, "observation_sigma": 0.5,
            "reward_mean": 0.042, "granule": 64, "skip_steps": 1,
        },
    }  # fmt: skip
    return parse_recipe(keys, where=s.model.name)


@dataclass(kw_only=True)
class Bench:
    folder: Path
    steps: int
    seeds: int
    requests: Path | None
    spot: dict[str, list[Change]]
    """The segments of the market."""
    scale: int
    idle: bool = False
    """The lenders have no requests."""
    groups: int = 1
    """Groups of a step, as a multiple of the setting's."""
    spot_policy: str = "algorithm2"
    """How spot workers are used: a name for papers.rlboost.build."""
    peak: float = PEAK
    """Largest rate of the requests, as a multiple of the mean."""
    max_slowdown: float = MAX_SLOWDOWN
    """Upper limit for the time per token that lending adds to a request, as a share."""

    def lenders(self, s: Setting, seed: int) -> Lenders:
        served, serving = SERVED[s.model.name], engine(SERVED[s.model.name], s.gpus)
        shared, count = free_bytes(s) - served.weights_bytes, s.borrowed // s.gpus
        mean_prompt, mean_answer = (tokens * 1.38 for tokens in (PROMPT, ANSWER))  # of log-normal lengths, sigma 0.8
        per_s = BUSY / (mean_prompt * serving["prefill_s"] + mean_answer * serving["each_s"])
        load = GeneratedLoad(
            seed=seed, per_s=0.0 if self.idle else per_s, peak=self.peak, prompt_tokens=PROMPT, generated_tokens=ANSWER
        )
        if self.requests is not None:
            load = recorded_requests.read(self.requests, lenders=count, per_s=load.per_s)
        return Lenders(
            count=count, serving=StepTime(**serving), slots=16 * s.gpus, kv_tokens=int(shared / s.model.kv_bytes),
            serving_kv_tokens=int(shared / served.kv_bytes), load=load,
            objectives=Objectives(max_slowdown=self.max_slowdown),
        )  # fmt: skip

    def rollout_s(self, s: Setting, algorithm: str, where: str) -> tuple[float, float, list[SimLender]]:
        """Mean seconds of a rollout, sampled tokens of a step, and the lenders. `where`: fixed, lent, or the name of a
        segment of the spot market."""
        times, tokens, lenders = [], [], []
        for seed in range(self.seeds):
            r = recipe(s, algorithm, self.steps, seed)
            w = rlboost.build(r, self.spot_policy if where in self.spot else "windfall")
            if where in self.spot:
                w = replace(w, changes=tuple(trace.slots(thinned(self.spot[where], self.scale), s.borrowed // s.gpus)))
            if where == "lent":
                w = with_lenders(w, self.lenders(s, seed))
            began_s, log = time.perf_counter(), self.folder / "events.jsonl"
            done = run.simulate(w, log, make=LendingSimulation)
            found = [e for e in events.read(log) if e["name"] in ("rollout", "step") and e.get("step", 0) > 1]
            times += [e["s"] for e in found if e["kind"] == "span" and e["name"] == "rollout"]
            tokens += [e["trained"] * w.granule for e in found if e["kind"] == "scalar"]
            lenders += [x for x in done.fleet.workers.values() if isinstance(x, SimLender)]
            status = f"{s.model.name} {algorithm} {where}: {time.perf_counter() - began_s:.0f} s"
            print(f"\r{status:<60}", end="", file=sys.stderr, flush=True)
        return mean(times), mean(tokens), lenders


def thinned(changes: list[Change], scale: int) -> list[Change]:
    """Every `scale`-th machine of a market, in the order of their time up, so that the share that is up stays."""
    up_s: dict[str, float] = {}
    for c in changes:
        left_s = WINDOW_S - c.at_s
        up_s[c.node] = up_s.get(c.node, 0.0) + (left_s if c.up else -left_s)
    chosen = set(sorted(up_s, key=lambda node: (up_s[node], node))[scale // 2 :: scale])
    return [c for c in changes if c.node in chosen]


def mean_up(changes: Sequence[Change], seconds: float) -> float:
    """Mean number of machines that are up in the first seconds."""
    signed_s = ((1 if c.up else -1) * max(0.0, seconds - c.at_s) for c in changes)
    return sum(signed_s) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="Only 8B, on a quarter of the machines: about a minute.")
    parser.add_argument("--requests", type=Path, help="Requests of the service. Default: generated.")
    parser.add_argument("--trace", type=Path, help="Spot trace (docs/fleet-traces.md). Default: generated.")
    parser.add_argument("--scale", type=int, default=1, help="Divide machines and groups by this number, to save time.")
    parser.add_argument("--only", choices=list(SETTINGS), help="Only this model.")
    parser.add_argument("--idle", action="store_true", help="Lenders have no requests: what the service takes.")
    parser.add_argument("--peak", type=float, default=PEAK, help="Largest rate of the requests, in means. 1: no peaks.")
    parser.add_argument(
        "--max-slowdown", type=float, default=MAX_SLOWDOWN,
        help=f"Largest share that lending adds to a request's time per token; inf: none. Default: {MAX_SLOWDOWN:g}.",
    )  # fmt: skip
    policies = ("algorithm2", "windfall")
    parser.add_argument("--spot-policy", choices=policies, default=policies[0], help="Policy of the spot workers.")
    parser.add_argument("--groups", type=int, default=1, help="Multiply the groups of a step by this number.")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    windows, origin = market(args.trace)
    print(f"spot trace: {origin}; requests: {args.requests.name if args.requests else 'generated'}")
    print("assumed:", *ASSUMED, sep="\n  ")
    with tempfile.TemporaryDirectory() as temporary:
        bench = Bench(
            folder=Path(temporary), steps=args.steps, seeds=args.seeds, requests=args.requests, spot=windows,
            scale=4 if args.quick else args.scale, idle=args.idle, groups=args.groups, peak=args.peak,
            spot_policy=args.spot_policy, max_slowdown=args.max_slowdown,
        )  # fmt: skip
        report(bench, ["8B"] if args.quick else [args.only] if args.only else list(SETTINGS))


def report(bench: Bench, names: list[str]) -> None:
    fitted_s = fitted_tokens = 0.0
    head = ("", "rollout without", "with lenders", "training", "simulated", "ROSE", "lenders: TPOT P99, use, lent")
    print(f"\n{head[0]:<16}{head[1]:>17}{head[2]:>14}{head[3]:>11}{head[4]:>12}{head[5]:>8}  {head[6]}", flush=True)
    for name in names:
        s, n = SETTINGS[name], bench.scale
        s = replace(s, dedicated=s.dedicated // n, borrowed=s.borrowed // n, groups=bench.groups * s.groups // n)
        for algorithm in ("GRPO", "DAPO"):
            fixed_s, tokens, _ = bench.rollout_s(s, algorithm, "fixed")
            lent_s, _, lenders = bench.rollout_s(s, algorithm, "lent")
            if (name, algorithm) == FITTED:
                fitted_s = max(0.0, (fixed_s - PAPER[FITTED] * lent_s) / (PAPER[FITTED] - 1))
                fitted_tokens = tokens
            if not fitted_tokens:  # 8B is left out: nothing is fitted, and training counts as nothing
                fitted_tokens = tokens
            scale = s.model.parameters / s.dedicated / (MODELS["8B"].parameters / (16 // n)) * tokens / fitted_tokens
            train_s = fitted_s * scale
            ratio = (fixed_s + train_s) / (lent_s + train_s)
            print_row(name, algorithm, fixed_s, lent_s, train_s, ratio, service(lenders))
            if algorithm == "GRPO":
                over_spot(bench, s, lent_s)
    if fitted_s:
        print(
            f"fitted: training of 8B takes {fitted_s:.0f} s in a step, so that {' '.join(FITTED)} is {PAPER[FITTED]}x"
        )
    else:
        print(f"not fitted: {' '.join(FITTED)} is below {PAPER[FITTED]}x even if training takes no time")


def over_spot(bench: Bench, s: Setting, lent_s: float) -> None:
    times, more, most = [], [], s.borrowed // s.gpus
    for segment, changes in bench.spot.items():
        times.append(bench.rollout_s(s, "GRPO", segment)[0])
        up = mean_up(trace.slots(thinned(changes, bench.scale), most), bench.steps * times[-1])
        more.append(f"{segment}: {times[-1]:,.0f} s with {up:.1f} of {most}")
    print_row(s.model.name, "over spot", mean(times), lent_s, 0.0, mean(times) / lent_s, "; ".join(more))


def print_row(name: str, what: str, base_s: float, lent_s: float, train_s: float, ratio: float, more: str) -> None:
    train = f"{train_s:,.0f} s" if train_s else "-"
    mark = " (fitted)" if (name, what) == FITTED and train_s else ""
    print("\r" + " " * 60 + "\r", end="", file=sys.stderr, flush=True)
    print(
        f"{name + ' ' + what:<16}{base_s:>15,.0f} s{lent_s:>12,.0f} s{train:>11}{ratio:>11.2f}x"
        f"{PAPER[name, what]:>7.2f}x  {more}{mark}",
        flush=True,
    )


def service(lenders: list[SimLender]) -> str:
    """How the service of the lenders was: its time per token at the 99th percentile, and how much was used and lent."""
    turns = sorted(t for x in lenders for t in x.turns_s)
    use, lent = mean(x.meter.use for x in lenders), mean(x.meter.lent for x in lenders)
    late = f"{1000 * turns[int(0.99 * len(turns))]:.0f} ms" if turns else "no requests"
    return f"{late}, {use:.0%}, {lent:.0%}"


if __name__ == "__main__":
    main()
