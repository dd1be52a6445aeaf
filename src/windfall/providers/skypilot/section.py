"""The section [fleet.skypilot]."""

from __future__ import annotations

from pydantic import Field

from windfall.recipe.worker_source import WorkerSource, gpu_count


class SkyPilot(WorkerSource):
    """Workers from clouds through SkyPilot: one managed job per worker. Needs the program `sky`."""

    accelerators: str | list[str] = Field(default=[])
    """GPUs of a worker's machine, such as "H100:1". A list names alternatives. If left out: a machine without a GPU."""
    infra: str = ""
    """Where to look for machines, such as "aws/us-east-1". If left out: everywhere that SkyPilot has access to."""
    fallback: bool = True
    """Use an on-demand machine if no spot machine is available. Only for `kind` = "spot"."""
    on_demand_usd_per_h: float = Field(default=0.0, ge=0)
    """Price of that on-demand machine in $ per hour. `fleet.max_usd_per_h` counts every worker at the higher price."""
    cpus: str = ""
    """CPUs of a machine, such as "8+"."""
    image: str = ""
    """Machine or container image. If left out: SkyPilot's default."""
    setup: str = ""
    """Shell commands that install windfall on a new machine. Needed unless `image` has it."""
    max_restarts: int = Field(default=3, ge=0)
    """Number of times that SkyPilot restarts a worker that fails. Preempted workers are always started again."""

    def highest_usd_per_h(self) -> float:
        return max(self.price_usd_per_h, self.on_demand_usd_per_h) if self._may_fall_back else self.price_usd_per_h

    def missing_price(self) -> str:
        if self._may_fall_back and self.highest_usd_per_h() and not self.on_demand_usd_per_h:
            return "on_demand_usd_per_h, or fallback = false"
        return super().missing_price()

    @property
    def _may_fall_back(self) -> bool:
        return self.kind == "spot" and self.fallback

    def gpu_counts(self) -> list[float]:
        names = [self.accelerators] if isinstance(self.accelerators, str) else self.accelerators
        return [gpu_count(name) for name in names] or [0.0]
