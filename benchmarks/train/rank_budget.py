"""What 8B, 14B and 32B models need on 8 and 16 H100, on paper: memory of a rank, time to compute and to communicate.

    python benchmarks/train/rank_budget.py

The formulas are in trainer/ranks/rank_budget.py. Nothing here is measured: compute assumes half of the GPU's peak,
which windfall's layers reach on 8B blocks (docs/benchmarks.md), and communication the bandwidth of the data sheets:
NVLink within a machine of 8 GPUs, one 400 Gbit/s port per GPU between machines. All ports work at once: NCCL lets each
ring cross the machines through another port.
"""

from __future__ import annotations

from dataclasses import replace

from windfall.trainer.ranks.rank_budget import ModelShape, RankBudget, rank_budget

GB = 1e9
GPU_BYTES, HEADROOM = 80 * GB, 0.85
PEAK_FLOPS, SHARE_OF_PEAK = 990e12, 0.5
NVLINK_BYTES_PER_S, NETWORK_BYTES_PER_S, GPUS_PER_MACHINE = 450e9, 8 * 50e9, 8
PCIE_BYTES_PER_S = 50e9
PACK_TOKENS, STEP_TOKENS = 16_384, 2_000_000
QWEN3 = {
    "8B": ModelShape(
        hidden=4096, intermediate=12_288, layers=36, heads=32, kv_heads=8, head=128, vocabulary=151_936
    ),
    "14B": ModelShape(
        hidden=5120, intermediate=17_408, layers=40, heads=40, kv_heads=8, head=128, vocabulary=151_936
    ),
    "32B": ModelShape(
        hidden=5120, intermediate=25_600, layers=64, heads=64, kv_heads=8, head=128, vocabulary=151_936
    ),
}  # fmt: skip
ADAPTER_RANK = 16


def adapter_parameters(shape: ModelShape, rank: int) -> int:
    """Adapters on every matrix of a layer: `rank` rows of A and columns of B for each."""
    query, kv = shape.heads * shape.head, shape.kv_heads * shape.head
    matrices = [(shape.hidden, query), (shape.hidden, kv), (shape.hidden, kv), (query, shape.hidden)]
    matrices += [(shape.hidden, shape.intermediate)] * 2 + [(shape.intermediate, shape.hidden)]
    return shape.layers * rank * sum(a + b for a, b in matrices)


def seconds_to_send(budget: RankBudget, ranks: int) -> float:
    """Per pack."""
    return budget.sent_per_pack / (NVLINK_BYTES_PER_S if ranks <= GPUS_PER_MACHINE else NETWORK_BYTES_PER_S)


def verdict(budget: RankBudget) -> str:
    free = HEADROOM * GPU_BYTES - budget.fixed
    if free < budget.least_activations:
        return "does not fit"
    return "fits" if free >= budget.all_activations else "fits, some activations computed twice"


def main() -> None:
    print(f"GB per GPU (80 GB, {HEADROOM:.0%} usable); a pack has {PACK_TOKENS:,} tokens, a step {STEP_TOKENS:,}")
    columns = ("state", "gathered", "acts.", "host", "s/pack", "sent s", "min/step", "publish s")
    print(f"{'model':<6}{'GPUs':>5} {'training':<16}" + "".join(f"{c:>10}" for c in columns) + "  verdict")
    for name, shape in QWEN3.items():
        for ranks in (8, 16):
            for training in ("full", "full, offload", "adapters"):
                adapters = adapter_parameters(shape, ADAPTER_RANK) if training == "adapters" else 0
                budget = rank_budget(shape, ranks, pack_tokens=PACK_TOKENS, adapter_parameters=adapters)
                layout = replace(budget.layout, host_share=float("offload" in training))
                budget = replace(budget, layout=layout)
                flops = (4 if adapters else 6) * shape.parameters * PACK_TOKENS
                computed_s = flops / (SHARE_OF_PEAK * PEAK_FLOPS)
                sent_s = seconds_to_send(budget, ranks)
                packs = STEP_TOKENS / PACK_TOKENS / ranks
                published_s = 2 * (adapters or shape.parameters) / ranks / PCIE_BYTES_PER_S
                figures = [
                    layout.gpu_bytes / GB, budget.gathered / GB, budget.all_activations / GB,
                    layout.host_bytes * min(ranks, 8) / GB,
                ]  # fmt: skip
                row = "".join(f"{f:>10.1f}" for f in figures) + f"{computed_s:>10.2f}{sent_s:>10.2f}"
                step_s = max(computed_s, sent_s) * packs + layout.host_bytes / PCIE_BYTES_PER_S
                row += f"{step_s / 60:>10.2f}{published_s:>10.3f}"
                print(f"{name:<6}{ranks:>5} {training:<16}{row}  {verdict(budget)}")


if __name__ == "__main__":
    main()
