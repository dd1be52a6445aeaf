"""`windfall plan`: reads its inputs, prints the plans and writes the recipe. All reading of files is here."""

from __future__ import annotations

import csv
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from windfall import config
from windfall.config import Recipe
from windfall.errors import WindfallError, nearest
from windfall.events.log import Event, read
from windfall.fleet import trace
from windfall.plan.model import cluster as clusters
from windfall.plan.model import devices, measured
from windfall.plan.model.cluster import Cluster, Links, Machine
from windfall.plan.model.devices import Gpu, Terms
from windfall.plan.model.inputs import recipe_workload
from windfall.plan.model.workload import Workload
from windfall.plan.model.workload import model as find_model
from windfall.plan.run import recipe, review, run_log
from windfall.plan.run.recipe import Simulated
from windfall.plan.search import planner
from windfall.plan.search.request import Request, SpotMarket
from windfall.plan.search.scoring import Plan

OBJECTIVES = ("throughput", "cost", "deadline")
BUDGET_MACHINE = 8
"""GPUs of a machine if only a budget is given."""
MORE = 12
"""Plans beyond those to show, in case some cannot run."""
MOST_PER_KIND = 128
"""GPUs of one kind that a budget may buy."""


def main(
    what: str, *, cluster: Path | None, gpus: str, budget: str, prices: Path | None, objective: str, deadline: float,
    staleness: int | None, spot: Path | None, measured_in: Path | None, top: int, simulate: bool, write: Path | None,
) -> None:  # fmt: skip
    if objective not in OBJECTIVES:
        wrong = f"unknown value {objective!r}; expected one of: {', '.join(OBJECTIVES)}"
        raise WindfallError(wrong, where="--objective", fix=nearest(objective, OBJECTIVES))
    base, name, work = _workload(what, staleness)
    known = _prices(prices) if prices is not None else None
    usd = _budget(budget) if budget else math.inf
    if sum((cluster is not None, bool(gpus))) > 1:
        raise WindfallError("--cluster and --gpus both describe the GPUs", where="windfall plan", fix="Give one.")
    engine = "vllm" if base is not None and base.engine.name == "vllm" else "windfall"
    if cluster is not None:
        made = clusters.parse(_toml(cluster), str(cluster), known, engine)
    elif gpus:
        made = clusters.from_text(gpus, known, engine)
    elif budget:
        made = market(known or _built_in(), usd, spot is not None)
    else:
        fix = "Give --cluster FILE, --gpus '8xH100 + 6x2xH100:spot', or --budget 90/h."
        raise WindfallError("nothing says which GPUs there are", where="windfall plan", fix=fix)
    if measured_in is not None:
        seen = run_log.speeds(events_of(measured_in), str(measured_in))
        work = run_log.with_lengths(work, seen.lengths, seen.prompt_tokens)
        made = run_log.with_speeds(made, seen, work)
    if objective == "deadline" and deadline <= 0:
        raise WindfallError("the objective needs a time", where="--deadline", fix="Give the hours: --deadline 12.")
    request = Request(
        cluster=made, work=work, efficiency=measured.efficiency(), objective=objective, budget_usd_per_h=usd,  # pyright: ignore
        deadline_h=deadline if objective == "deadline" else 0.0, spot=_spot(spot), top=top,
    )  # fmt: skip
    found, refused = runnable(request, base)
    ranked = rank(found, request, base, simulate=simulate)
    print("\n".join(report(name, request, ranked)))
    for line in refused:
        print(f"refused: {line}")
    if write is not None:
        planned = recipe.write(ranked[0][0], request, base, ranked[0][1])
        write.write_text(config.dump(planned), encoding="utf-8")
        print(f"\nwritten: {write}; start it with: windfall train {write}")
        for line in recipe.commands(ranked[0][0], name):
            print(f"  then on {line}")


def runnable(request: Request, base: Recipe | None) -> tuple[list[Plan], list[str]]:
    """The best plans that can run, and why machines and better plans cannot be used."""
    found, refused, first = list[Plan](), list[str](), None
    for name in {m.provider: None for m in request.cluster.machines if m.provider}:
        if error := recipe.provider_refusal(name, base or Recipe()):
            first = first or error
            refused.append(f"machines of {name}: {error.what}")
            left = tuple(m for m in request.cluster.machines if m.provider != name)
            request = replace(request, cluster=replace(request.cluster, machines=left))
    try:
        plans = planner.plans(replace(request, top=request.top + MORE))
    except WindfallError as e:
        raise (first or e) from e
    for plan in plans:
        error = recipe.refusal(plan, request, base)
        if error is None:
            found.append(plan)
        elif len(found) < request.top:
            first = first or error
            refused.append(f"{plan.name}: {error.what}")
    if not found and first is not None:
        raise first
    return found[: request.top], refused


def events_of(run: Path) -> list[Event]:
    """The log of a run, from its folder or its file."""
    file = run / "events.jsonl" if run.is_dir() else run
    if not file.is_file():
        raise WindfallError("no such run", where=str(run), fix="Give the folder of a run, such as runs/demo.")
    return read(file)


def check(run: Path) -> None:
    """`windfall plan --check RUN`."""
    if not (run / "recipe.toml").is_file():
        raise WindfallError("no such run", where=str(run), fix="Give the folder of a run, such as runs/demo.")
    print("\n".join([review.HEADER, *map(str, review.review(run))]))


def rank(
    plans: list[Plan], request: Request, base: Recipe | None, *, simulate: bool
) -> list[tuple[Plan, Simulated | None]]:
    """The plans with their simulated figures, best first by these. A plan that cannot be simulated keeps its place."""
    if not simulate:
        return [(plan, None) for plan in plans]
    rows: list[tuple[Plan, Simulated | None]] = [(plan, recipe.simulate(plan, request, base)) for plan in plans]

    def key(row: tuple[Plan, Simulated | None]) -> float:
        plan, figures = row
        tok_per_s = figures.tok_per_s if figures else plan.tok_per_s
        match request.objective:
            case "throughput":
                return -tok_per_s
            case "cost":
                return plan.usd_per_h / tok_per_s
            case "deadline":
                late = plan.work.steps * plan.work.tokens / tok_per_s > 3600 * request.deadline_h
                return plan.usd_per_h + (1e9 if late else 0.0)

    return sorted(rows, key=key)


# the report


def report(name: str, request: Request, ranked: list[tuple[Plan, Simulated | None]]) -> list[str]:
    w, e = request.work, request.efficiency
    held = ", ".join(f"{part} {error:.0%}" for part, error in measured.held_out().by_part().items())
    lines = [
        f"{name} on {request.cluster}: {w.responses} responses a step, {w.mean_tokens:,.0f} tokens on average, "
        f"staleness {w.staleness}",
        f"speeds: {e.source}; held-out errors: {held}. Other GPUs: data sheets with the same shares, not measured",
    ]
    known = {m.kind.name: m.gpu for m in request.cluster.machines if m.gpu.worker or m.gpu.trainer}
    for kind, gpu in known.items():
        parts = [part for part, times in (("engine", gpu.worker), ("training", gpu.trainer)) if times is not None]
        lines.append(f"{kind}: {' and '.join(parts)} as measured")
    for n, (plan, figures) in enumerate(ranked, start=1):
        lines += ["", f"{n}. {plan.name}", *_plan_lines(plan, figures)]
    return [*lines, "", *picture(ranked[0][0])]


def _plan_lines(plan: Plan, figures: Simulated | None) -> list[str]:
    predicted = f"{plan.tok_per_s:,.0f} tok/s, ${plan.usd_per_mtok:.3f} per million tokens, ${plan.usd_per_h:.2f}/h"
    hours = plan.work.steps * plan.step_s / 3600
    lines = []
    if figures is not None:
        usd = plan.usd_per_h / 3600 / figures.tok_per_s * 1e6
        lines.append(
            f"   simulated   {figures.tok_per_s:,.0f} tok/s, ${usd:.3f} per million tokens; idle: trainer "
            f"{figures.trainer_idle:.0%}, workers {figures.workers_idle:.0%}"
        )
        hours = plan.work.steps * plan.work.tokens / figures.tok_per_s / 3600
    gb = plan.training.memory_bytes / 1e9
    engines = ", ".join(f"{e.memory_bytes / 1e9:.0f} GB ({kind.name})" for kind, e, _, _ in plan.replicas)
    return [
        *lines,
        f"   predicted   {predicted}; idle: trainer {plan.trainer_idle:.0%}, workers {plan.rollout_idle:.0%}",
        f"   run         {plan.work.steps} steps take {hours:.2f} h and cost ${hours * plan.usd_per_h:,.2f}",
        f"   training    {plan.training.layout}, {gb:.0f} GB per GPU; engines: {engines}",
        f"   bottleneck  {plan.bottleneck}: {plan.why}",
        f"   search      {plan.method}",
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


# inputs


def _workload(what: str, staleness: int | None) -> tuple[Recipe | None, str, Workload]:
    if not what.endswith(".toml"):
        name, shape = find_model(what)
        return None, name, Workload(shape=shape, staleness=1 if staleness is None else staleness)
    base = config.load(Path(what))
    work = recipe_workload(base)
    return base, base.model.path, work if staleness is None else replace(work, staleness=staleness)


def _toml(path: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise WindfallError("no such cluster file", where=str(path), fix="See docs/plan.md for an example.") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise WindfallError(f"not valid TOML: {e}", where=str(path), fix="Correct the syntax there.") from e


def _prices(path: Path) -> dict[str, Gpu]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return devices.priced(csv.DictReader(file), str(path))
    except FileNotFoundError as e:
        raise WindfallError("no such price list", where=str(path), fix="Give a CSV file.") from e


def _built_in() -> dict[str, Gpu]:
    """GPUs whose prices the built-in table has."""
    found = {name: devices.find(name) for name in devices.TABLE}
    return {name: g for name, g in found.items() if g.spot_usd_per_h is not None}


def _budget(text: str) -> float:
    """
    >>> _budget("90/h"), _budget("$12.5")
    (90.0, 12.5)
    """
    found = re.fullmatch(r"\$?\s*(\d+(?:\.\d+)?)\s*(?:/\s*h)?", text.strip())
    if found is None or float(found[1]) <= 0:
        fix = "Give dollars per hour above 0, such as --budget 90/h."
        raise WindfallError(f"{text!r} is not a budget", where="--budget", fix=fix)
    return float(found[1])


def market(known: Mapping[str, Gpu], usd_per_h: float, spot: bool) -> Cluster:
    """Everything that the budget could buy: machines of each type, reserved ones, and spot ones if wanted."""
    machines: list[Machine] = []
    for gpu in known.values():
        terms: tuple[Terms, ...] = ("reserved", "spot") if spot else ("reserved",)
        for lease in terms:
            count = min(MOST_PER_KIND, int(usd_per_h / gpu.price(lease == "spot")))
            for n in range(math.ceil(count / BUDGET_MACHINE)):
                size = min(BUDGET_MACHINE, count - n * BUDGET_MACHINE)
                machines.append(Machine(name=f"m{len(machines)}", gpu=gpu, count=size, lease=lease))
    if not machines:
        cheapest = min(g.price(False) for g in known.values())
        what = f"${usd_per_h:.2f} per hour buys no GPU; the cheapest costs ${cheapest:.2f}"
        raise WindfallError(what, where="--budget", fix="Raise the budget.")
    return Cluster(machines=tuple(machines), links=Links())


def _spot(path: Path | None) -> SpotMarket:
    if path is None:
        return SpotMarket()
    changes = trace.read(path)
    seconds = changes[-1].at_s
    made = trace.summary(changes, max(1.0, seconds))
    availability = min(1.0, made.mean_up / max(1, made.max_up))
    return SpotMarket(availability=availability, losses_per_h=made.losses_per_node_hour)
