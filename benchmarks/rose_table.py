"""ROSE's evaluation in virtual time, beside the paper's figures (arXiv 2605.06534): rollout on serving GPUs.

    python benchmarks/rose_table.py [--quick] [--requests azure-llm-2023-conv.csv] [--trace bamboo-p3-trace.csv]

The product's own controller, placement and lending policies run on simulated machines (docs/sim.md). Machines follow
from data sheets and assumed efficiencies, as in rlboost_model.py. A step is a rollout and then training, which are not
overlapped; the machine that trains does not generate. One number is fitted: the seconds of training in a step of 8B, so
that GRPO of 8B with lenders is 1.31 times as fast as without. For 32B they scale with parameters, tokens and GPUs.
Everything else is a prediction. ROSE publishes neither code nor most of its settings: `ASSUMED` lists what is guessed.

Rows "over spot" compare the time of the rollouts: lenders with windfall's policies against spot machines with
RLBoost's Algorithm 2, which does not send turns to the worker that has their tokens.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from rlboost_model import H100_BYTES, H100_BYTES_PER_S, H100_FLOP_PER_S, MODELS, Assumptions, Model, market

from windfall import config
from windfall.events import log as events
from windfall.fleet.trace_formats import Change
from windfall.sim.core import run, scenario
from windfall.sim.machines.lender import SimLender
from windfall.sim.report import variants

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
    "training has as many GPUs as the dedicated rollout; spot: as many machines as lenders, those up first",
)
SERVED = {
    "8B": Model(name="7B", parameters=7.6e9, layers=28, heads=28, kv_heads=4, trainer_gpus=0),
    "32B": Model(name="32B", parameters=32.5e9, layers=64, heads=40, trainer_gpus=0),
}
"""Qwen2.5's published shapes."""
BUSY = 0.189
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


def recipe(s: Setting, algorithm: str, steps: int, requests: Path | None, seed: int) -> config.Recipe:
    served = SERVED[s.model.name]
    free = s.gpus * H100_BYTES * 0.9 - s.model.weights_bytes
    shared, serving = free - served.weights_bytes, engine(served, s.gpus)
    mean_prompt, mean_answer = (tokens * 1.38 for tokens in (PROMPT, ANSWER))  # of log-normal lengths, sigma 0.8
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
            "worker_slots": 16 * s.gpus, "worker_kv_tokens": int(free / s.model.kv_bytes), "boot_s": 60.0,
            "weights_bytes": s.model.weights_bytes, "prompt_tokens": 512, "median_tokens": 450, "sigma": 0.5,
            "turns": s.turns, "env_s": s.env_s, "env_sigma": 0.5, "observation_tokens": 1800, "observation_sigma": 0.5,
            "reward_mean": 0.042, "granule": 64, "skip_steps": 1,
            "lenders": {
                "count": s.borrowed // s.gpus, "serving": serving, "slots": 16 * s.gpus,
                "kv_tokens": int(shared / s.model.kv_bytes), "serving_kv_tokens": int(shared / served.kv_bytes),
                "requests_per_s": BUSY / (mean_prompt * serving["prefill_s"] + mean_answer * serving["each_s"]),
                "max_slowdown": 1000.0, "peak": 4.2, "prompt_tokens": PROMPT, "generated_tokens": ANSWER,
                **({"requests_file": requests} if requests else {}),
            },
        },
    }  # fmt: skip
    return config.parse(keys, where=s.model.name)


@dataclass(kw_only=True)
class Bench:
    folder: Path
    steps: int
    seeds: int
    requests: Path | None
    spot: list[Change]
    scale: int

    def rollout_s(self, s: Setting, algorithm: str, where: str) -> tuple[float, float, list[SimLender]]:
        """Mean seconds of a rollout, sampled tokens of a step, and the lenders. `where`: fixed, lent or spot."""
        times, tokens, lenders = [], [], []
        for seed in range(self.seeds):
            r = recipe(s, algorithm, self.steps, self.requests, seed)
            if where != "lent":
                r = scenario.with_keys(r, {"sim": {"lenders": None}})
            w = scenario.build(variants.apply(r, "algorithm2" if where == "spot" else "windfall"))
            if where == "spot":
                w = scenario_with(w, self.spot, s.borrowed // s.gpus)
            began_s, log = time.perf_counter(), self.folder / "events.jsonl"
            done = run.simulate(w, log)
            found = [e for e in events.read(log) if e["name"] in ("rollout", "step") and e.get("step", 0) > 1]
            times += [e["s"] for e in found if e["kind"] == "span" and e["name"] == "rollout"]
            tokens += [e["trained"] * w.granule for e in found if e["kind"] == "scalar"]
            lenders += [x for x in done.fleet.workers.values() if isinstance(x, SimLender)]
            status = f"{s.model.name} {algorithm} {where}: {time.perf_counter() - began_s:.0f} s"
            print(f"\r{status:<60}", end="", file=sys.stderr, flush=True)
        return mean(times), mean(tokens), lenders


def scenario_with(w: scenario.Scenario, changes: list[Change], count: int) -> scenario.Scenario:
    """The scenario with `count` machines of a spot trace."""
    chosen = set(list(dict.fromkeys(c.node for c in changes))[:count])
    return replace(w, changes=tuple(c for c in changes if c.node in chosen))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="Only 8B, on a quarter of the machines: about a minute.")
    parser.add_argument("--requests", type=Path, help="Requests of the service. Default: generated.")
    parser.add_argument("--trace", type=Path, help="Spot trace (docs/fleet-traces.md). Default: generated.")
    parser.add_argument("--scale", type=int, default=1, help="Divide machines and groups by this number, to save time.")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    windows, origin = market(args.trace)
    print(f"spot trace: {origin}, segment B; requests: {args.requests.name if args.requests else 'generated'}")
    print("assumed:", *ASSUMED, sep="\n  ")
    with tempfile.TemporaryDirectory() as temporary:
        bench = Bench(
            folder=Path(temporary), steps=args.steps, seeds=args.seeds, requests=args.requests, spot=windows["B"],
            scale=4 if args.quick else args.scale,
        )  # fmt: skip
        report(bench, ["8B"] if args.quick else list(SETTINGS))


def report(bench: Bench, names: list[str]) -> None:
    fitted_s = fitted_tokens = 0.0
    head = ("", "rollout without", "with lenders", "training", "simulated", "ROSE", "lenders: TPOT P99, use, lent")
    print(f"\n{head[0]:<16}{head[1]:>17}{head[2]:>14}{head[3]:>11}{head[4]:>12}{head[5]:>8}  {head[6]}", flush=True)
    for name in names:
        s, n = SETTINGS[name], bench.scale
        s = replace(s, dedicated=s.dedicated // n, borrowed=s.borrowed // n, groups=s.groups // n)
        for algorithm in ("GRPO", "DAPO"):
            fixed_s, tokens, _ = bench.rollout_s(s, algorithm, "fixed")
            lent_s, _, lenders = bench.rollout_s(s, algorithm, "lent")
            if (name, algorithm) == FITTED:
                fitted_s = max(0.0, (fixed_s - PAPER[FITTED] * lent_s) / (PAPER[FITTED] - 1))
                fitted_tokens = tokens
            scale = s.model.parameters / s.dedicated / (MODELS["8B"].parameters / (16 // n)) * tokens / fitted_tokens
            train_s = fitted_s * scale
            ratio = (fixed_s + train_s) / (lent_s + train_s)
            print_row(name, algorithm, fixed_s, lent_s, train_s, ratio, service(lenders))
            if algorithm == "GRPO":
                spot_s, _, _ = bench.rollout_s(s, algorithm, "spot")
                print_row(name, "over spot", spot_s, lent_s, 0.0, spot_s / lent_s, "")
    print(f"fitted: training of 8B takes {fitted_s:.0f} s in a step, so that {' '.join(FITTED)} is {PAPER[FITTED]}x")


def print_row(name: str, what: str, base_s: float, lent_s: float, train_s: float, ratio: float, more: str) -> None:
    train = f"{train_s:,.0f} s" if train_s else "-"
    mark = " (fitted)" if (name, what) == FITTED else ""
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
    return f"{1000 * turns[int(0.99 * len(turns))]:.0f} ms, {use:.0%}, {lent:.0%}"


if __name__ == "__main__":
    main()
