"""What is asked of the planner: a cluster, a workload, an objective, and what the engines and trainers can do. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from windfall.plan.model.cluster import Cluster, Kind
from windfall.plan.model.cost_model import LINK_SHARE, REPLICA_SIZES, Efficiency
from windfall.plan.model.workload import Workload
from windfall.plan.search.solvers import Objective

BOOT_S = 60.0
"""Seconds until the worker of a new spot machine connects, unless the recipe sets `sim.boot_s`."""
LOSSES_PER_H = 0.36
"""Losses of a spot machine per hour, if no trace is given: the mean of two public traces (docs/fleet-traces.md)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    replica_sizes: tuple[int, ...] = (1,)
    """GPUs per engine, for windfall's own engine. vLLM spans 1, 2, 4 or 8 (cost_model.REPLICA_SIZES)."""
    megatron: bool = False
    """Whether training may use DP x TP x PP."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpotMarket:
    """What a trace says about spot machines."""

    availability: float = 1.0
    """Share of the time in which a machine is up."""
    losses_per_h: float = 0.0
    """Losses of one machine per hour that it is up."""
    boot_s: float = BOOT_S
    assumed: bool = False
    """No trace was given."""

    def useful(self, first_pull_s: float) -> float:
        """Share of the paid time after booting and pulling a full copy of the weights."""
        return max(0.0, 1 - self.losses_per_h * (self.boot_s + first_pull_s) / 3600)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    cluster: Cluster
    work: Workload
    efficiency: Efficiency
    objective: Objective = "throughput"
    budget_usd_per_h: float = math.inf
    deadline_h: float = 0.0
    spot: SpotMarket = field(default_factory=SpotMarket)
    can: Capabilities = field(default_factory=Capabilities)
    top: int = 3

    def replica_sizes(self, kind: Kind) -> tuple[int, ...]:
        """GPUs that one engine on machines of this kind may span."""
        return REPLICA_SIZES if kind.engine == "vllm" else self.can.replica_sizes


def price(request: Request, kind: Kind) -> float:
    """Expected dollars per hour of one GPU; a spot GPU is paid for while it is up."""
    return kind.usd_per_h * (request.spot.availability if kind.lease == "spot" else 1.0)


def useful_share(request: Request, kind: Kind) -> float:
    """Share of an engine's speed that the run gets: a spot machine is away at times, and a lender serves others."""
    if kind.lease == "borrowed":
        return kind.lent
    if kind.lease != "spot":
        return 1.0
    first_pull_s = request.work.weights_bytes / (request.cluster.links.across_types * LINK_SHARE)
    return request.spot.availability * request.spot.useful(first_pull_s)
