"""What `windfall plan` prints: the plans with their figures, and a picture of the best one. Pure."""

from __future__ import annotations

from typing import Any

from windfall.plan.choose import ComparedPlan, MachineGroup, PlanChoice
from windfall.plan.model.cluster import Kind
from windfall.plan.model.workload import VALUE_BYTES, AddedWorkload
from windfall.plan.search.plan import PlanRequest, RunPlan


def report(name: str, request: PlanRequest, choice: PlanChoice) -> list[str]:
    w, e = request.work, request.efficiency
    lines = [
        f"{name} on {request.cluster}: {w.responses} responses a step, {w.mean_tokens:,.0f} tokens on average, "
        f"staleness {w.staleness}",
        f"speeds: {e.source}; held-out errors: {e.held_out}. "
        "Other GPUs: data sheets with the same shares, not measured",
    ]
    lines += _bases(request)
    lines += _assumptions(request)
    known = {m.kind.name: m.gpu for m in request.cluster.machines if m.gpu.worker or m.gpu.trainer}
    for kind, gpu in known.items():
        parts = [part for part, times in (("engine", gpu.worker), ("training", gpu.trainer)) if times is not None]
        lines.append(f"{kind}: {' and '.join(parts)} as measured")
    for n, row in enumerate(choice.ranked, start=1):
        lines += ["", f"{n}. {row.plan.name}", *_plan_lines(row, request)]
    chosen = choice.ranked[0]
    if len(choice.groups) > 1:
        lines += ["", "what every group of machines adds to plan 1:"]
        lines += [f"   {group.name:22} {_adds(group, chosen)}" for group in choice.groups]
    if len(choice.frontier) > 1:
        lines += ["", "speed and cost, from the cheapest to the fastest plan (s: simulated, otherwise predicted):"]
        lines.append(f"   {'tok/s':>10} {'$/h':>9} {'$/100 steps':>12}  plan")
        for row in choice.frontier:
            mark = "s" if row.figures else " "
            usd = f"{row.plan.usd_per_h:9,.2f} {row.usd_per_100:12,.2f}"
            first = " (plan 1)" if row.plan is chosen.plan else ""
            lines.append(f"   {row.tok_per_s:9,.0f}{mark} {usd}  {row.plan.name}{first}")
    return [*lines, "", *picture(chosen.plan)]


def fields(name: str, request: PlanRequest, choice: PlanChoice) -> dict[str, Any]:
    """The plans for `--json`: those to show, best first, and those of the table of speed and cost."""
    return {
        "model": name, "objective": request.objective, "plans": [_fields(row, request) for row in choice.ranked],
        "frontier": [_fields(row, request) for row in choice.frontier], "refused": choice.refused,
    }  # fmt: skip


def _fields(row: ComparedPlan, request: PlanRequest) -> dict[str, Any]:
    plan, figures = row.plan, row.figures
    return {
        "name": plan.name, "simulated": figures is not None, "tok_per_s": row.tok_per_s,
        "predicted_tok_per_s": plan.tok_per_s, "usd_per_h": plan.usd_per_h, "usd_per_100_steps": row.usd_per_100,
        "steps": plan.work.steps, "hours": row.hours, "usd": row.hours * plan.usd_per_h,
        "late": row.is_late(request), "bottleneck": plan.bottleneck, "why": plan.why, "step_s": plan.step_s,
        "train_s": plan.train_s, "rollout_s": plan.rollout_s, "pull_s": plan.pull_s,
        "training_gb": plan.training.memory_bytes / 1e9,
        "own_engine_gb": plan.own.memory_bytes / 1e9 if plan.own is not None else None,
        "machines": [
            {"name": p.machine.name, "gpu": p.machine.kind.name, "training": p.training, "engines": list(p.replicas)}
            for p in plan.placed if p.used
        ],
    }  # fmt: skip


def _bases(request: PlanRequest) -> list[str]:
    """With several policies: one line for each base."""
    work, lines = request.work, list[str]()
    if not isinstance(work, AddedWorkload):
        return lines
    for base in [work] if work.one_base else work.parts:
        names = [part.policy for part in base.parts] if isinstance(base, AddedWorkload) else [base.policy]
        memory = f"{VALUE_BYTES * base.shape.parameters / 1e9:.3g} GB in every engine"
        if base.adapter_parameters:
            memory += f", and {VALUE_BYTES * base.adapter_parameters / 1e9:.2g} GB of adapters"
        lines.append(
            f"base {base.policy}: {' and '.join(names)}; {memory}; "
            f"{base.tokens:,.0f} tokens a step, {base.tokens / work.tokens:.0%} of the workers"
        )
    return lines


def _adds(group: MachineGroup, chosen: ComparedPlan) -> str:
    """What a group adds and costs: the chosen plan beside the best one without it, or the best one with it beside the
    chosen one."""
    if group.other is None:
        return f"needed: no plan without it; ${group.usd_per_h:.2f}/h" if group.used else "not used"
    more, less = (chosen, group.other) if group.used else (group.other, chosen)
    tok_per_s = more.tok_per_s - less.tok_per_s
    share = f"({tok_per_s / less.tok_per_s:+.1%})"
    usd = f"{more.plan.usd_per_h - less.plan.usd_per_h:+,.2f} $/h, "
    usd += f"{more.usd_per_100 - less.usd_per_100:+,.2f} $/100 steps"
    if group.used:
        return f"{tok_per_s:+,.0f} tok/s {share}, {usd}; costs ${group.usd_per_h:.2f}/h"
    return f"not used; with it: {tok_per_s:+,.0f} tok/s {share}, {usd}"


def _assumptions(request: PlanRequest) -> list[str]:
    """Prices, links and the spot market, with where they come from."""
    kinds = request.cluster.kinds()
    lines = [f"prices per GPU-hour: {', '.join(f'{kind.name} {_price(kind)}' for kind in kinds)}"]
    if len(request.cluster.machines) > 1:
        lines.append(f"links: {request.cluster.links}")
    if any(kind.lease == "spot" for kind in kinds):
        m = request.spot
        market = f"available {m.availability:.0%} of the time, {m.losses_per_h:.2f} losses per machine-hour, "
        market += "assumed: no --spot TRACE was given" if m.assumed else "from the trace"
        lines.append(f"spot machines: {market}; a new one boots for {m.boot_s:g} s")
    if request.work.delta < 1:
        lines.append(
            f"pulls: deltas of {request.work.delta:.1%} of the weights, by the learning rate (docs/weights.md)"
        )
    return lines


def _price(kind: Kind) -> str:
    if kind.lease == "borrowed":
        return "free (lent)"
    source = kind.gpu.spot_source if kind.lease == "spot" else kind.gpu.reserved_source
    return f"${kind.usd_per_h:.2f}" + (f" ({source})" if source else "")


def duration(hours: float) -> str:
    """
    >>> duration(1.234), duration(0.05)
    ('1.23 h', '180 s')
    """
    return f"{hours:.2f} h" if hours >= 0.1 else f"{3600 * hours:.3g} s"


def _plan_lines(row: ComparedPlan, request: PlanRequest) -> list[str]:
    plan, figures, hours = row.plan, row.figures, row.hours
    predicted = f"{plan.tok_per_s:,.0f} tok/s, ${plan.usd_per_mtok:.3f} per million tokens, ${plan.usd_per_h:.2f}/h"
    lines = []
    if figures is not None:
        usd = plan.usd_per_h / 3600 / figures.tok_per_s * 1e6
        idle = _idle(plan, figures.trainer_idle, figures.workers_idle)
        lines.append(f"   simulated   {figures.tok_per_s:,.0f} tok/s, ${usd:.3f} per million tokens{idle}")
    gb = f"{plan.training.memory_bytes / 1e9:.3g} GB per GPU"
    if plan.training.host_bytes:
        gb += f" and {plan.training.host_bytes / 1e9:.3g} GB of host memory"
    engines = [f"{g.engine.memory_bytes / 1e9:.3g} GB ({g.kind.name})" for g in plan.replicas]
    if plan.own is not None:
        engines.append(f"the trainer's own {plan.own.memory_bytes / 1e9:.3g} GB with the training state")
    late = ": later than the deadline" if row.is_late(request) else ""
    lines += [
        f"   predicted   {predicted}{_idle(plan, plan.trainer_idle, plan.rollout_idle)}",
        f"   run         {plan.work.steps} steps of {3600 * hours / plan.work.steps:.3g} s take {duration(hours)} and "
        f"cost ${hours * plan.usd_per_h:,.2f}{late}",
        f"   training    {plan.training.layout}, {gb}; engines: {', '.join(engines)}",
        f"   bottleneck  {plan.bottleneck}: {plan.why}",
    ]
    if plan.traffic_usd_per_h:
        lines.append(f"   traffic     ${plan.traffic_usd_per_h:.2f}/h between zones")
    return lines


def _idle(plan: RunPlan, trainer: float, workers: float) -> str:
    """Nothing is idle where the trainer's own engine alone generates."""
    return f"; idle: trainer {trainer:.0%}, workers {workers:.0%}" if plan.replicas else ""


def picture(plan: RunPlan, most: int = 24) -> list[str]:
    """The machines that the plan uses, one character per GPU."""
    trains = "trains and generates" if plan.own is not None else "trains"
    lines = [f"placement: T {trains}, R generates, = an engine over several GPUs, . unused"]
    used = [p for p in plan.placed if p.used]
    for p in used[:most]:
        row = "T" * p.training + "".join("R" + "=" * (tp - 1) for tp in p.replicas) + "." * (p.machine.count - p.used)
        lines.append(f"   {p.machine.name:5} {p.machine.kind.name:16} {row}")
    if len(used) > most:
        lines.append(f"   and {len(used) - most} more machines")
    if len(used) < len(plan.placed):
        lines.append(f"   {len(plan.placed) - len(used)} machines are not used")
    return lines
