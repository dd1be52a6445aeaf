"""The keys of every section [fleet.NAME] of a system that workers come from. Its part (providers/) adds its own keys.

`windfall fleet preview RECIPE.toml` prints what a recipe would start there. docs/guides/ has one page per system.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from windfall.defaults import KV_SHARE
from windfall.recipe.section_base import Count, Section
from windfall.types import Lease


def gpu_count(gpus: str) -> float:
    """The number of GPUs in "h100:4", "4" or "h100".

    >>> gpu_count("h100:4"), gpu_count("4"), gpu_count("h100")
    (4.0, 4.0, 1.0)
    """
    last = gpus.rpartition(":")[2]
    return float(last) if last.replace(".", "", 1).isdecimal() else 1.0


class WorkerSource(Section):
    """The keys that all systems share."""

    workers: Count = 1
    """Workers to start with, and to keep running."""
    workers_min: int = Field(default=0, ge=0)
    """Lower limit for autoscaling."""
    workers_max: int = Field(default=0, ge=0)
    """Upper limit for autoscaling. 0 disables it; otherwise the run starts with `workers` and scales between
    `workers_min` and this limit by measured throughput and price."""
    kind: Literal["reserved", "spot", "borrowed"] = "spot"
    """Lease terms of these workers."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of these workers. "auto" uses a GPU if the worker sees one."""
    region: str = ""
    """Cloud or region of these workers; it selects the price."""
    price_usd_per_h: float = Field(default=0.0, ge=0)
    """Price of one worker in $ per hour. 0 looks it up by device in the built-in price table."""
    worker_threads: int = Field(default=0, ge=0)
    """CPU threads of each worker. 0 uses all cores of its machine."""
    worker_memory: float = Field(default=KV_SHARE, gt=0, lt=1)
    """Share of a device's free memory for the KV cache of each worker."""
    engine: Literal["auto", "windfall", "vllm"] = "auto"
    """Engine of these workers. "auto" leaves the choice to `engine.name`."""
    tensor_parallel: Count = 1
    """GPUs that one engine of these workers spans. More than 1 needs vLLM, and as many GPUs per worker."""
    join_url: str = Field(default="", pattern=r"^(https?://[^/\s]+)?$")
    """Address at which these workers reach the controller, such as "https://train.example.com:8700". If left out: the
    address of this machine."""
    drain_s: float = Field(default=30.0, ge=0)
    """Seconds that a worker has to send its last tokens and leave when it is stopped. No effect with SkyPilot, which
    cannot signal a worker."""

    @property
    def lease(self) -> Lease:
        return Lease(kind=self.kind, region=self.region, price_usd_per_h=self.price_usd_per_h)

    def gpu_counts(self) -> list[float]:
        """GPUs that one worker gets; several numbers if the machines that it may get differ."""
        return []

    def highest_usd_per_h(self) -> float:
        """The highest price of one worker in $ per hour. 0: not known."""
        return self.price_usd_per_h

    def missing_price(self) -> str:
        """The key that must be set before a price ceiling can be kept, or ""."""
        return "" if self.highest_usd_per_h() or self.kind == "borrowed" else "price_usd_per_h"

    @model_validator(mode="after")
    def _ranks(self) -> WorkerSource:
        fewest = min(self.gpu_counts(), default=None)
        if self.tensor_parallel > 1 and self.device != "cpu" and fewest is not None and fewest < self.tensor_parallel:
            raise ValueError(
                f"tensor_parallel = {self.tensor_parallel} needs as many GPUs for each worker, which gets {fewest:g}"
            )
        return self

    @model_validator(mode="after")
    def _limits(self) -> WorkerSource:
        if self.workers_max and not self.workers_min <= self.workers <= self.workers_max:
            raise ValueError(
                f"workers = {self.workers} must be from workers_min = {self.workers_min} to "
                f"workers_max = {self.workers_max}"
            )
        return self
