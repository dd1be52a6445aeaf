"""The section [plan]: what `windfall plan --write` expects of the run. The run works the same without it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from windfall.recipe.section_base import Count, Section


class PlannedWorkers(Section):
    """Workers of one kind in a planned run."""

    device: str
    """Device of these workers, such as "H100" or "cpu"."""
    lease: Literal["reserved", "spot", "borrowed"] = "reserved"
    """Lease terms of these workers."""
    price_usd_per_h: float = Field(default=0.0, ge=0)
    """Price of one worker in $ per hour, all its GPUs together."""
    count: Count = 1
    """Number of workers."""
    gpus: Count = 1
    """GPUs that the engine of one worker spans."""
    batch: float = Field(default=0.0, ge=0)
    """Responses that one worker runs at once, on average."""
    worker: dict[str, float]
    """Speed formula of one worker, with the keys of `sim.worker`."""


class PlanSection(Section):
    """What `windfall plan --write` expects of the run: `windfall plan --check RUN` compares it with what was measured
    (docs/plan.md). Nothing else in a run depends on this section, and a recipe that was not planned has none."""

    name: str = ""
    """The plan in words. Empty: the run was not planned."""
    step_s: float = Field(default=0.0, ge=0)
    """Seconds of a step."""
    tok_per_s: float = Field(default=0.0, ge=0)
    """Response tokens per second that are trained on. From the simulation, if the plan was simulated."""
    usd_per_h: float = Field(default=0.0, ge=0)
    """Price of all machines that the plan uses in $ per hour."""
    workers: list[PlannedWorkers] = Field(default=[])
    """The workers, each kind in a [[plan.workers]] table."""
