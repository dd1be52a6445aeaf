"""What `windfall plan` prints: the plans with their figures, and a picture of the best one. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from windfall.plan.model.cluster import Kind
from windfall.plan.run.recipe import Simulated
from windfall.plan.search.request import Request
from windfall.plan.search.scoring import Plan

Row = tuple[Plan, Simulated | None]
"""A plan, with its simulated figures if it was simulated."""
FRONTIER = 8
"""Rows of the table of speed and cost."""


class Group(NamedTuple):
    """A group of machines, beside the chosen plan."""

    name: str
    used: bool
    usd_per_h: float
    """Dollars per hour that the chosen plan pays for it."""
    other: Row | None
    """The best plan without it, or with it if the chosen plan does not use it. None: there is none."""


def report(
    name: str, request: Request, ranked: Sequence[Row], frontier: Sequence[Row] = (), groups: Sequence[Group] = ()
) -> list[str]:
    w, e = request.work, request.efficiency
    lines = [
        f"{name} on {request.cluster}: {w.responses} responses a step, {w.mean_tokens:,.0f} tokens on average, "
        f"staleness {w.staleness}",
        f"speeds: {e.source}; held-out errors: {e.held_out}. "
        "Other GPUs: data sheets with the same shares, not measured",
    ]
    lines += _assumptions(request)
    known = {m.kind.name: m.gpu for m in request.cluster.machines if m.gpu.worker or m.gpu.trainer}
    for kind, gpu in known.items():
        parts = [part for part, times in (("engine", gpu.worker), ("training", gpu.trainer)) if times is not None]
        lines.append(f"{kind}: {' and '.join(parts)} as measured")
    for n, (plan, figures) in enumerate(ranked, start=1):
        lines += ["", f"{n}. {plan.name}", *_plan_lines(plan, figures, request)]
    if len(groups) > 1:
        lines += ["", "what every group of machines adds to plan 1:"]
        lines += [f"   {group.name:22} {_adds(group, ranked[0])}" for group in groups]
    if len(frontier) > 1:
        lines += ["", "speed and cost, from the cheapest to the fastest plan (s: simulated, otherwise predicted):"]
        lines.append(f"   {'tok/s':>10} {'$/h':>9} {'$/100 steps':>12}  plan")
        for plan, figures in frontier:
            mark = "s" if figures else " "
            usd = f"{plan.usd_per_h:9,.2f} {usd_per_100(plan, figures):12,.2f}"
            chosen = " (plan 1)" if plan is ranked[0][0] else ""
            lines.append(f"   {speed(plan, figures):9,.0f}{mark} {usd}  {plan.name}{chosen}")
    return [*lines, "", *picture(ranked[0][0])]


def speed(plan: Plan, figures: Simulated | None) -> float:
    """Tokens per second: simulated, or predicted."""
    return figures.tok_per_s if figures else plan.tok_per_s


def usd_per_100(plan: Plan, figures: Simulated | None) -> float:
    """Dollars per 100 steps."""
    return 100 * plan.work.tokens / speed(plan, figures) / 3600 * plan.usd_per_h


def _adds(group: Group, chosen: Row) -> str:
    """What a group adds and costs: the chosen plan beside the best one without it, or the best one with it beside the
    chosen one."""
    if group.other is None:
        return f"needed: no plan without it; ${group.usd_per_h:.2f}/h" if group.used else "not used"
    more, less = (chosen, group.other) if group.used else (group.other, chosen)
    tok_per_s = speed(*more) - speed(*less)
    share = f"({tok_per_s / speed(*less):+.1%})"
    usd = f"{more[0].usd_per_h - less[0].usd_per_h:+,.2f} $/h, "
    usd += f"{usd_per_100(*more) - usd_per_100(*less):+,.2f} $/100 steps"
    if group.used:
        return f"{tok_per_s:+,.0f} tok/s {share}, {usd}; costs ${group.usd_per_h:.2f}/h"
    return f"not used; with it: {tok_per_s:+,.0f} tok/s {share}, {usd}"


def _assumptions(request: Request) -> list[str]:
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


def run_hours(plan: Plan, figures: Simulated | None) -> float:
    """Hours of all steps: simulated, or predicted."""
    return plan.work.steps * plan.work.tokens / speed(plan, figures) / 3600


def is_late(plan: Plan, figures: Simulated | None, request: Request) -> bool:
    return request.objective == "deadline" and run_hours(plan, figures) > request.deadline_h * 1.001


def duration(hours: float) -> str:
    """
    >>> duration(1.234), duration(0.05)
    ('1.23 h', '180 s')
    """
    return f"{hours:.2f} h" if hours >= 0.1 else f"{3600 * hours:.3g} s"


def _plan_lines(plan: Plan, figures: Simulated | None, request: Request) -> list[str]:
    predicted = f"{plan.tok_per_s:,.0f} tok/s, ${plan.usd_per_mtok:.3f} per million tokens, ${plan.usd_per_h:.2f}/h"
    lines, hours = [], run_hours(plan, figures)
    if figures is not None:
        usd = plan.usd_per_h / 3600 / figures.tok_per_s * 1e6
        lines.append(
            f"   simulated   {figures.tok_per_s:,.0f} tok/s, ${usd:.3f} per million tokens; idle: trainer "
            f"{figures.trainer_idle:.0%}, workers {figures.workers_idle:.0%}"
        )
    gb = f"{plan.training.memory_bytes / 1e9:.3g} GB per GPU"
    engines = ", ".join(f"{e.memory_bytes / 1e9:.3g} GB ({kind.name})" for kind, e, _, _ in plan.replicas)
    late = ": later than the deadline" if is_late(plan, figures, request) else ""
    return [
        *lines,
        f"   predicted   {predicted}; idle: trainer {plan.trainer_idle:.0%}, workers {plan.rollout_idle:.0%}",
        f"   run         {plan.work.steps} steps take {duration(hours)} and cost ${hours * plan.usd_per_h:,.2f}{late}",
        f"   training    {plan.training.layout}, {gb}; engines: {engines}",
        f"   bottleneck  {plan.bottleneck}: {plan.why}",
        *([f"   traffic     ${plan.traffic_usd_per_h:.2f}/h between zones"] if plan.traffic_usd_per_h else []),
    ]


def picture(plan: Plan, most: int = 24) -> list[str]:
    """The machines that the plan uses, one character per GPU."""
    lines = ["placement: T trains, R generates, = an engine over several GPUs, . unused"]
    used = [p for p in plan.placed if p.training or p.replicas]
    for p in used[:most]:
        row = "T" * p.training + "".join("R" + "=" * (tp - 1) for tp in p.replicas) + "." * p.idle
        lines.append(f"   {p.machine.name:5} {p.machine.kind.name:16} {row}")
    if len(used) > most:
        lines.append(f"   and {len(used) - most} more machines")
    if len(used) < len(plan.placed):
        lines.append(f"   {len(plan.placed) - len(used)} machines are not used")
    return lines
