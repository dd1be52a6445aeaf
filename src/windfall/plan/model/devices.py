"""What each GPU can do, and what it costs. Pure; fetches nothing.

Figures are those of data sheets: dense FLOP/s in bfloat16 without sparsity (data sheets print twice as much, with a
footnote), and bytes per second in one direction (data sheets add both). Each has its document and date; they were
compared with public copies and listings of these documents on 2026-11-17.
The cost model knows what an engine reaches of them. Prices come from cost/prices.py unless a cluster file has them.
GPUs of the AReaL-Hex paper have the paper's figures and prices, so that its clusters can be planned as they were. Its
H800 has the FLOP/s and bandwidth of a PCIe card and the NVLink of an SXM module, which is "H800-SXM" here
(docs/plan.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from windfall.controller.cost import prices
from windfall.errors import WindfallError, nearest
from windfall.step_time import StepTime

PCIE4 = 25e9
"""Bytes per second that a PCIe x16 link reaches in one direction."""
CATALOG = f"{prices.SOURCE}, {prices.DATE}"
HEX = "AReaL-Hex, arXiv 2511.00796 (2025-11)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    name: str
    memory_bytes: float
    bandwidth: float
    """Bytes per second of the GPU's memory."""
    flops: float
    """Dense FLOP/s in bfloat16."""
    link: float
    """Bytes per second to another GPU of the same machine, in one direction."""
    source: str
    reserved_usd_per_h: float | None = None
    spot_usd_per_h: float | None = None
    reserved_source: str = ""
    """Where the price comes from, for people."""
    spot_source: str = ""
    worker: StepTime | None = None
    """Measured step times of an engine on one of these, for one model; instead of the cost model's."""
    trainer: StepTime | None = None
    """Measured `train_s` and `update_s` of a trainer on one of these."""
    measured_only: bool = False
    """No data sheet describes it: it can be planned only with measured times."""

    def price(self, spot: bool) -> float:
        """Dollars per hour; an unknown price is an error, never 0."""
        usd = self.spot_usd_per_h if spot else self.reserved_usd_per_h
        if usd is None:
            terms = "spot" if spot else "on-demand"
            fix = "Give price_usd_per_gpu_h in the cluster file."
            raise WindfallError(f"no {terms} price is known for {self.name}", where="prices", fix=fix)
        return usd


def _gpu(name: str, gb: float, tb_per_s: float, tflops: float, link: float, source: str) -> Gpu:
    return Gpu(
        name=name, memory_bytes=gb * 1e9, bandwidth=tb_per_s * 1e12, flops=tflops * 1e12, link=link, source=source
    )


TABLE: dict[str, Gpu] = {
    g.name: g
    for g in (
        replace(
            _gpu("B200", 180, 7.7, 2250, 900e9, "NVIDIA HGX B200 data sheet, 2025-03; bus: pytorch/ao#4002, 2026-03"),
            reserved_usd_per_h=7.15,
            spot_usd_per_h=3.95,
            reserved_source=f"nebius B200 on demand, {CATALOG}",
            spot_source=f"nebius B200 spot, {CATALOG}",
        ),
        _gpu("H200", 141, 4.8, 989, 450e9, "NVIDIA H200 SXM data sheet, 2023-11"),
        _gpu("H100", 80, 3.35, 989, 450e9, "NVIDIA H100 SXM5 data sheet, 2022-09"),
        _gpu("A100-80GB", 80, 2.039, 312, 300e9, "NVIDIA A100 80GB SXM4 data sheet, 2021-06"),
        _gpu("A100-40GB", 40, 1.555, 312, 300e9, "NVIDIA A100 40GB SXM4 data sheet, 2020-05"),
        _gpu("L40S", 48, 0.864, 362, PCIE4, "NVIDIA L40S data sheet, 2023-08"),
        _gpu("A10G", 24, 0.6, 70, PCIE4, "AWS G5, 2021-11; tensor FLOP/s: baseten.co, A10 vs A10G, 2023"),
        _gpu("L4", 24, 0.3, 121, PCIE4, "NVIDIA L4 data sheet, 2023-03"),
        replace(
            _gpu("RTX4090", 24, 1.008, 165, PCIE4, "NVIDIA Ada white paper 2.01, 2023-03; accumulation in float32"),
            reserved_usd_per_h=0.74,
            spot_usd_per_h=0.74,
            reserved_source=f"runpod RTX4090, {CATALOG}",
            spot_source=f"runpod RTX4090, {CATALOG}",
        ),
        _gpu("H800-SXM", 80, 3.35, 989, 200e9, "NVIDIA H100 SXM5 data sheet, 2022-09; 400 GB/s NVLink, 2023-03"),
        replace(_gpu("H800", 80, 2.0, 756, 200e9, HEX), reserved_usd_per_h=5.28, reserved_source=HEX),
        replace(_gpu("H20", 96, 4.0, 148, 450e9, HEX), reserved_usd_per_h=1.85, reserved_source=HEX),
        replace(_gpu("cpu", 16, 0.02, 0.1, 1e9, "no data sheet: measured times only"), measured_only=True),
    )
}

ALIASES = {
    "A100": "A100-80GB", "A100-SXM4-80GB": "A100-80GB", "A100-SXM4-40GB": "A100-40GB", "4090": "RTX4090",
    "RTX-4090": "RTX4090", "H100-SXM": "H100", "H200-SXM": "H200",
}  # fmt: skip
"""Other names in use. An A100 without a size is one with 80 GB."""


def find(name: str, known: Mapping[str, Gpu] | None = None, where: str = "cluster") -> Gpu:
    """The GPU of this name, with prices of the built-in table where it has none of its own.

    >>> find("h100").memory_bytes, find("H200").spot_usd_per_h, find("A100").name
    (80000000000.0, 3.29, 'A100-80GB')
    """
    table = {g.upper(): gpu for g, gpu in (known or TABLE).items()}
    wanted = name.strip().upper()
    gpu = table.get(wanted) or table.get(ALIASES.get(wanted, ""))
    if gpu is None:
        close = nearest(wanted, table)
        names = f"Known: {', '.join(known or TABLE)}."
        hint = close if close.startswith("Did") else ""
        fix = f"{hint} {names} Or describe it in a [[device]] table of a cluster file."
        raise WindfallError(f"unknown GPU {name!r}", where=where, fix=fix.strip())
    return _priced(gpu)


def _priced(gpu: Gpu) -> Gpu:
    if gpu.reserved_usd_per_h is not None or gpu.spot_usd_per_h is not None:
        return gpu
    reserved, spot = (prices.lookup(gpu.name, kind=kind) for kind in ("reserved", "spot"))
    return replace(
        gpu, reserved_usd_per_h=reserved.usd_per_h if reserved else None,
        spot_usd_per_h=spot.usd_per_h if spot else None, reserved_source=reserved.label if reserved else "",
        spot_source=spot.label if spot else "",
    )  # fmt: skip


Terms = Literal["reserved", "spot", "borrowed"]
