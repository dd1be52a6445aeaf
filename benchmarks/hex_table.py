"""AReaL-Hex's evaluation (arXiv 2511.00796) with windfall's planner, beside the paper's figures; and search times.

    python benchmarks/hex_table.py                 all sections, a few minutes
    python benchmarks/hex_table.py table           speed-up at equal budget, cost at equal throughput
    python benchmarks/hex_table.py search          search times for 24 to 512 GPUs
    python benchmarks/hex_table.py held-out        errors of the cost model on H200 figures that it was not fitted to

The planner may use all that the paper's systems have: DP x TP x PP and engines on up to 8 GPUs. GPUs, links and prices
are the paper's. Assumptions: efficiencies of plan/measured.py (one H200), 512 responses per step, log-normal lengths
with a median of 6,000 tokens (sigma 0.8, limit 27,648), prompts of 1,024, staleness 4. One number is fitted: the factor
on all times, so that 24 H800 train the 7B model at the paper's 5,980 tokens per second. It cancels in all ratios.
`--h20` changes what an H20 reaches of its bandwidth, as a sensitivity.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

from windfall.plan import devices, measured, planner
from windfall.plan.cluster import Cluster, Links, Machine
from windfall.plan.cost_model import Efficiency
from windfall.plan.devices import Gpu
from windfall.plan.request import Capabilities, Request
from windfall.plan.scoring import Plan
from windfall.plan.workload import MODELS, Workload

PAPER = {"1.5B": (1.36, 2.80, 18_400, 17_900), "7B": (1.31, 2.76, 5_980, 6_000), "14B": (1.50, 2.29, 2_160, 2_300)}
"""Speed-up over all-H800 and all-H20 at equal budget; tokens/s of 24 H800 and of 8 H800 + 24 H20."""
SCHEDULER_S = {24: "14.9 s", 32: "23.1 s", 40: "46.7 s", 56: "2.0 min"}
BUDGET = 126.72
"""Dollars per hour of 24 H800."""
CAN = Capabilities(replica_sizes=(1, 2, 4, 8), megatron=True)
LINKS = Links(same_type=5e9, across_types=1.5e9)


def workload(model: str) -> Workload:
    return Workload(
        shape=MODELS[f"R1-Distill-Qwen-{model}"], groups=32, group_size=16, prompt_tokens=1024, median_tokens=6000,
        sigma=0.8, max_tokens=27_648, staleness=4,
    )  # fmt: skip


def cluster(h800: int, h20: int, h20_gpu: Gpu) -> Cluster:
    machines: list[Machine] = []
    for gpu, count in ((devices.TABLE["H800"], h800), (h20_gpu, h20)):
        for n in range(0, count, 8):
            machines.append(Machine(name=f"m{len(machines)}", gpu=gpu, count=min(8, count - n)))
    return Cluster(machines=tuple(machines), links=LINKS)


def best(model: str, h800: int, h20: int, e: Efficiency, h20_gpu: Gpu, **keys) -> Plan:
    made = cluster(h800, h20, h20_gpu)
    request = Request(cluster=made, work=workload(model), efficiency=e, can=CAN, top=3, **keys)
    return planner.plans(request)[0]


def calibrated(h20_gpu: Gpu) -> Efficiency:
    e = measured.efficiency()
    alone = best("7B", 24, 0, e, h20_gpu)
    return replace(e, slower=alone.tok_per_s / PAPER["7B"][2])


def table(h20_gpu: Gpu) -> None:
    e = calibrated(h20_gpu)
    print(f"factor on all times, fitted to 24 H800 with 7B: {e.slower:.2f}")
    print("| model | deployment | $/h | tok/s | paper | ratio | paper |\n|---|---|---|---|---|---|---|")
    for model, (over_h800, over_h20, paper_h800, paper_mixed) in PAPER.items():
        h800 = best(model, 24, 0, e, h20_gpu)
        h20 = best(model, 0, int(BUDGET / 1.85), e, h20_gpu)
        most = max(
            (best(model, int(8 * n), int((BUDGET - 8 * n * 5.28) / 1.85), e, h20_gpu) for n in (0.5, 1, 1.5, 2, 2.5)),
            key=lambda p: p.tok_per_s,
        )
        mixed = best(model, 8, 24, e, h20_gpu)
        print(row(model, "24 H800", h800, paper_h800))
        print(row(model, "68 H20", h20, None))
        print(
            row(model, "mixed, same budget", most, None, f"{most.tok_per_s / h800.tok_per_s:.2f} over H800", over_h800)
        )
        print(row(model, "", most, None, f"{most.tok_per_s / h20.tok_per_s:.2f} over H20", over_h20))
        cheaper = mixed.tok_per_s / mixed.usd_per_h / (h800.tok_per_s / h800.usd_per_h)
        paper = paper_mixed / 86.64 / (paper_h800 / BUDGET)
        print(
            row(model, "8 H800 + 24 H20", mixed, paper_mixed, f"{cheaper:.2f} tokens per $ over H800", round(paper, 2))
        )


def row(model: str, name: str, p: Plan, paper: float | None, ratio: str = "", theirs: float | None = None) -> str:
    made = f"{name}: {p.name} ({p.training.layout}); {p.bottleneck}" if name else ""
    cells = [model, made, f"{p.usd_per_h:.0f}", f"{p.tok_per_s:,.0f}", f"{paper:,}" if paper else "", ratio]
    return f"| {' | '.join(cells)} | {theirs or ''} |"


def search_times(h20_gpu: Gpu) -> None:
    print("| GPUs | objective | seconds | solver | paper |\n|---|---|---|---|---|")
    e = measured.efficiency()
    for h800, h20 in ((24, 0), (8, 24), (16, 24), (24, 32), (128, 384)):
        for objective in ("throughput", "cost"):
            began = time.perf_counter()
            try:
                made = best("7B", h800, h20, e, h20_gpu, objective=objective)
                solver = made.method
            except Exception as error:  # a benchmark shows what happened and continues
                solver = str(error).splitlines()[0]
            took = time.perf_counter() - began
            gpus = h800 + h20
            print(f"| {gpus} | {objective} | {took:.1f} | {solver} | {SCHEDULER_S.get(gpus, '-')} |", flush=True)


def held_out() -> None:
    done = measured.held_out()
    print(f"held-out: {len(done.predictions)} figures, mean {done.mean:.1%}, worst {done.worst:.1%}")
    for part, error in done.by_part().items():
        print(f"  {part:8} {error:.1%}")
    for p in done.predictions:
        print(
            f"  {p.row.part:8} {p.row.model:14} {p.row.size:6} {p.row.value:12.5g} {p.predicted:12.5g} {p.error:+.1%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", nargs="?", default="all", choices=["all", "table", "search", "held-out"])
    parser.add_argument("--h20", type=float, default=1.0, help="factor on the bandwidth of an H20")
    args = parser.parse_args()
    gpu = devices.TABLE["H20"]
    gpu = replace(gpu, bandwidth=args.h20 * gpu.bandwidth)
    if args.section in ("all", "held-out"):
        held_out()
    if args.section in ("all", "table"):
        table(gpu)
    if args.section in ("all", "search"):
        search_times(gpu)


if __name__ == "__main__":
    main()
