"""AReaL-Hex's evaluation (arXiv 2511.00796) with windfall's planner, beside the paper's figures; and search times.

    python benchmarks/papers/hex_table.py             all sections, a few minutes
    python benchmarks/papers/hex_table.py table       speed-up at equal budget, cost at equal throughput
    python benchmarks/papers/hex_table.py search      search times for 24 to 512 GPUs

Training is windfall's FSDP, where the paper's systems have DP x TP x PP; engines span up to 8 GPUs. GPUs, links and
prices are the paper's. Assumptions: the efficiencies of one H200 (plan_fit.py), 512 prompts with 16 responses per step
and at most 27,648 tokens as in AReaL (arXiv 2505.24298), log-normal lengths with a median of 6,000 tokens (sigma 0.8),
prompts of 1,024, staleness 4. One number is fitted: the factor on all times, so that 24 H800 train the 7B model at the
paper's 5,980 tokens per second. It cancels in all ratios.

Sensitivities: `--h800 sxm` plans with the data sheet of the SXM module; the paper's H800 has the FLOP/s and bandwidth
of a PCIe card. `--h20 0.35` changes what an H20 reaches of its bandwidth. `--train 1.33` multiplies the work of
training: AReaL computes the log-probs of its proximal policy in a forward pass of its own. `--groups` is the number of
prompts of a step.

A bound that needs no model: at equal budget, and if both GPUs reach the same share of their peak, no mixture is faster
than all H20 by more than the ratio of FLOP/s per dollar, nor than all H800 by more than the ratio of bytes per second
per dollar. Exchange every H800 of the mixture for the H20 that cost as much: training gets slower by that ratio, and
nothing else gets slower by more. Communication and memory are not counted.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace

from windfall.plan.model import devices
from windfall.plan.model.cluster import Cluster, ClusterMachine, Links
from windfall.plan.model.cost_model import Efficiency
from windfall.plan.model.devices import Gpu
from windfall.plan.model.workload import MODELS, Workload
from windfall.plan.search import frontier, planner
from windfall.plan.search.plan import PlanRequest, RunPlan

PAPER = {"1.5B": (1.36, 2.80, 18_400, 17_900), "7B": (1.31, 2.76, 5_980, 6_000), "14B": (1.50, 2.29, 2_160, 2_300)}
"""Speed-up over all-H800 and all-H20 at equal budget; tokens/s of 24 H800 and of 8 H800 + 24 H20."""
SCHEDULER_S = {24: "14.9 s", 32: "23.1 s", 40: "46.7 s", 56: "2.0 min"}
BUDGET = 126.72
"""Dollars per hour of 24 H800."""
LINKS = Links(same_type=5e9, across_types=1.5e9)
MIXTURES = (4, 8, 12, 16, 20)
"""Numbers of H800; the rest of the budget buys H20."""


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    h800: Gpu
    h20: Gpu
    train: float = 1.0
    groups: int = 512
    slower: float = 1.0

    @property
    def efficiency(self) -> Efficiency:
        e = Efficiency()
        return replace(e, train=e.train / self.train, elementwise=e.elementwise * self.train, slower=self.slower)

    def workload(self, model: str) -> Workload:
        return Workload(
            shape=MODELS[f"R1-Distill-Qwen-{model}"], groups=self.groups, group_size=16, prompt_tokens=1024,
            median_tokens=6000, sigma=0.8, max_tokens=27_648, staleness=4,
        )  # fmt: skip

    def cluster(self, h800: int, h20: int) -> Cluster:
        machines: list[ClusterMachine] = []
        for gpu, count in ((self.h800, h800), (self.h20, h20)):
            for n in range(0, count, 8):
                machines.append(
                    ClusterMachine(name=f"m{len(machines)}", gpu=gpu, count=min(8, count - n), engine="vllm")
                )
        return Cluster(machines=tuple(machines), links=LINKS)

    def best(self, model: str, h800: int, h20: int, **keys) -> RunPlan:
        request = PlanRequest(
            cluster=self.cluster(h800, h20), work=self.workload(model), efficiency=self.efficiency, top=3,
            **keys,
        )  # fmt: skip
        # The paper's trainers do not generate. Ratios of speeds are compared, so that a cheaper plan of nearly the
        # same speed is not preferred.
        plans = [p for p in planner.search(request) if p.own is None]
        return min(plans, key=lambda p: frontier.key(request.objective, p.tok_per_s, p.usd_per_h))

    def calibrated(self) -> Assumptions:
        return replace(self, slower=self.best("7B", 24, 0).tok_per_s / PAPER["7B"][2])


def table(a: Assumptions) -> None:
    a = a.calibrated()
    usd = {gpu: gpu.price(spot=False) for gpu in (a.h800, a.h20)}
    print(f"factor on all times, fitted to 24 H800 with 7B: {a.slower:.2f}")
    flops, memory = (f(a.h800) / usd[a.h800] / (f(a.h20) / usd[a.h20]) for f in (_flops, _bandwidth))
    print(f"bounds at equal shares of peak: {flops:.2f} over H20, {1 / memory:.2f} over H800")
    print("| model | deployment | $/h | tok/s | paper | ratio | paper |\n|---|---|---|---|---|---|---|")
    for model, (over_h800, over_h20, paper_h800, paper_mixed) in PAPER.items():
        h800, h20 = a.best(model, 24, 0), a.best(model, 0, int(BUDGET / 1.85))
        mixtures = [a.best(model, n, int((BUDGET - n * 5.28) / 1.85)) for n in MIXTURES]
        most, mixed = max(mixtures, key=lambda p: p.tok_per_s), a.best(model, 8, 24)
        print(row(model, "24 H800", h800, paper_h800))
        print(row(model, "68 H20", h20, None))
        print(row(model, "88 H20", a.best(model, 0, 88), None))
        ratio = f"{most.tok_per_s / h800.tok_per_s:.2f} over H800"
        print(row(model, "mixed, same budget", most, None, ratio, over_h800))
        print(row(model, "", most, None, f"{most.tok_per_s / h20.tok_per_s:.2f} over H20", over_h20))
        more = mixed.tok_per_s / mixed.usd_per_h / (h800.tok_per_s / h800.usd_per_h)
        paper = paper_mixed / 86.64 / (paper_h800 / BUDGET)
        print(row(model, "8 H800 + 24 H20", mixed, paper_mixed, f"{more:.2f} tokens per $ over H800", round(paper, 2)))
        hours = h800.work.steps * h800.step_s / 3600
        cheap = a.best(model, 24, 64, objective="deadline", deadline_h=hours)
        ratio = f"{h800.usd_per_h / cheap.usd_per_h:.2f} cheaper than 24 H800"
        print(row(model, "cheapest that is as fast", cheap, None, ratio, 1.46), flush=True)


def _flops(gpu: Gpu) -> float:
    return gpu.flops


def _bandwidth(gpu: Gpu) -> float:
    return gpu.bandwidth


def row(model: str, name: str, p: RunPlan, paper: float | None, ratio: str = "", theirs: float | None = None) -> str:
    made = f"{name}: {p.name} ({p.training.layout}); {p.bottleneck}" if name else ""
    cells = [model, made, f"{p.usd_per_h:.0f}", f"{p.tok_per_s:,.0f}", f"{paper:,}" if paper else "", ratio]
    return f"| {' | '.join(cells)} | {theirs or ''} |"


def search_times(a: Assumptions) -> None:
    print("| GPUs | objective | seconds | plan | paper |\n|---|---|---|---|---|")
    for h800, h20 in ((24, 0), (8, 24), (16, 24), (24, 32), (128, 384)):
        for objective in ("throughput", "cost"):
            began = time.perf_counter()
            try:
                found = a.best("7B", h800, h20, objective=objective).name
            except Exception as error:  # a benchmark shows what happened and continues
                found = str(error).splitlines()[0]
            took = time.perf_counter() - began
            gpus = h800 + h20
            print(f"| {gpus} | {objective} | {took:.1f} | {found} | {SCHEDULER_S.get(gpus, '-')} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", nargs="?", default="all", choices=["all", "table", "search"])
    parser.add_argument("--h800", default="paper", choices=["paper", "sxm"], help="figures of an H800")
    parser.add_argument("--h20", type=float, default=1.0, help="factor on the bandwidth of an H20")
    parser.add_argument("--train", type=float, default=1.0, help="factor on the work of training")
    parser.add_argument("--groups", type=int, default=512, help="prompts of a step")
    args = parser.parse_args()
    h800, h20 = devices.TABLE["H800"], devices.TABLE["H20"]
    if args.h800 == "sxm":
        h800 = replace(devices.TABLE["H800-SXM"], reserved_usd_per_h=h800.price(spot=False))
    h20 = replace(h20, bandwidth=args.h20 * h20.bandwidth)
    a = Assumptions(h800=h800, h20=h20, train=args.train, groups=args.groups)
    if args.section in ("all", "table"):
        table(a)
    if args.section in ("all", "search"):
        search_times(a)


if __name__ == "__main__":
    main()
