"""Plans with given numbers of GPUs, instead of those that the planner would choose."""

from __future__ import annotations

from collections.abc import Mapping

from windfall.plan.model.cluster import Kind
from windfall.plan.search.plan import PlanRequest, RunPlan
from windfall.plan.search.planner import Search, with_own_engine


def fixed_plan(
    request: PlanRequest, device: str, gpus: int, counts: Mapping[tuple[Kind, int], int], *, own: bool = False
) -> RunPlan | None:
    """The plan in which this many GPUs of a device train, with these numbers of engines by kind and size, and with the
    trainer's own engine. None: it cannot be placed."""
    search = Search(request)
    kind = next(search.kinds[k][0] for k, n in search.trainers if n == gpus and search.kinds[k][0].gpu.name == device)
    plan = search.fixed(kind, gpus, counts)
    return with_own_engine(request, plan) or plan if own and plan is not None else plan
