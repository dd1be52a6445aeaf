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
from windfall.models import load
from windfall.plan import report
from windfall.plan.model import cluster as clusters
from windfall.plan.model import devices, measured
from windfall.plan.model.cluster import Cluster, Links, Machine
from windfall.plan.model.devices import Gpu, PriceList, Terms
from windfall.plan.model.inputs import model_shape, recipe_workload
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
SEARCHES = 4
"""Further searches if all plans miss the deadline in the simulation."""
MOST_PER_KIND = 128
"""GPUs of one kind that a budget may buy."""


def main(
    what: str, *, cluster: Path | None, gpus: str, budget: str, prices: Path | None, objective: str, deadline: float,
    staleness: int | None, spot: Path | None, measured_in: Path | None, top: int, simulate: bool, write: Path | None,
) -> None:  # fmt: skip
    if objective not in OBJECTIVES:
        wrong = f"unknown value {objective!r}; expected one of: {', '.join(OBJECTIVES)}"
        raise WindfallError(wrong, where="--objective", fix=nearest(objective, OBJECTIVES))
    if deadline > 0 and objective != "deadline":
        fix = "Add --objective deadline, or leave --deadline out."
        raise WindfallError(f"the objective {objective} has no deadline", where="--deadline", fix=fix)
    if write is not None:
        _check_target(write, what)
    base, name, work = _workload(what, staleness)
    listed = _prices(prices) if prices is not None else None
    known = listed.gpus if listed else None
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
    ranked, refused = best(request, base, simulate=simulate)
    print("\n".join(report.report(name, request, ranked)))
    for line in refused:
        print(f"refused: {line}")
    if listed and listed.unknown:
        print(f"not planned, because their figures are not known: {', '.join(listed.unknown)} of {prices}")
    if write is not None:
        planned = recipe.write(ranked[0][0], request, base or recipe.of_model(name, work), ranked[0][1])
        try:
            write.write_text(config.dump(planned), encoding="utf-8")
        except OSError as e:
            raise WindfallError(f"cannot write: {e.strerror}", where=str(write), fix="Give another file.") from e
        print(f"\nwritten: {write}; start it with: windfall train {write}")
        for line in recipe.commands(ranked[0][0], name):
            print(f"  then on {line}")


def best(
    request: Request, base: Recipe | None, *, simulate: bool
) -> tuple[list[tuple[Plan, Simulated | None]], list[str]]:
    """The best plans that can run, ranked, and what was refused. If all of them miss the deadline in the simulation,
    the search is repeated with less time, as far as there are faster plans."""
    found, refused = runnable(request, base)
    ranked = rank(found, request, base, simulate=simulate)
    hours = request.deadline_h
    for _ in range(SEARCHES):
        plan, figures = ranked[0]
        if figures is None or not report.is_late(plan, figures, request):
            break
        hours *= 0.99 * min(1.0, request.deadline_h / report.run_hours(plan, figures))
        try:
            faster, refused = runnable(replace(request, deadline_h=hours), base)
        except WindfallError:  # nothing is that fast by the cost model
            faster, refused = runnable(replace(request, objective="throughput"), base)
        known = {p.counts for p, _ in ranked}
        more = rank([p for p in faster if p.counts not in known], request, base, simulate=True)
        if not more:
            break
        ranked = sorted([*ranked, *more], key=lambda row: _key(request, *row))
    return ranked[: request.top], refused


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
        raise review.no_run(run, "events.jsonl")
    return read(file)


def check(run: Path) -> None:
    """`windfall plan --check RUN`."""
    if not (run / "recipe.toml").is_file():
        raise review.no_run(run, "recipe.toml")
    print("\n".join([review.HEADER, *map(str, review.review(run))]))


def rank(
    plans: list[Plan], request: Request, base: Recipe | None, *, simulate: bool
) -> list[tuple[Plan, Simulated | None]]:
    """The plans with their simulated figures, best first by these. A plan that cannot be simulated keeps its place."""
    if not simulate:
        return [(plan, None) for plan in plans]
    rows: list[tuple[Plan, Simulated | None]] = [(plan, recipe.simulate(plan, request, base)) for plan in plans]

    return sorted(rows, key=lambda row: _key(request, *row))


def _key(request: Request, plan: Plan, figures: Simulated | None) -> tuple[float, ...]:
    """Smaller is better. Plans that miss the deadline come last, the fastest of them first."""
    tok_per_s = figures.tok_per_s if figures else plan.tok_per_s
    match request.objective:
        case "throughput":
            return (-tok_per_s,)
        case "cost":
            return (plan.usd_per_h / tok_per_s,)
        case "deadline":
            late = report.is_late(plan, figures, request)
            return late, report.run_hours(plan, figures) if late else plan.usd_per_h


# inputs


def _workload(what: str, staleness: int | None) -> tuple[Recipe | None, str, Workload]:
    if not what.endswith(".toml"):
        shape = model_shape(what) if what in load.NAMED or Path(what).is_dir() else None
        name, shape = (what, shape) if shape else find_model(what)
        return None, name, Workload(shape=shape, staleness=1 if staleness is None else staleness)
    base = config.load(Path(what))
    work = recipe_workload(base)
    return base, base.model.path, work if staleness is None else replace(work, staleness=staleness)


def _check_target(write: Path, recipe: str) -> None:
    """Refuse before the search what could not be written after it."""
    if write.is_dir() or not write.parent.is_dir():
        what = "this is a folder" if write.is_dir() else "no such folder"
        raise WindfallError(what, where=f"--write {write}", fix="Give a file in a folder that exists.")
    if recipe.endswith(".toml") and write.exists() and Path(recipe).exists() and write.samefile(recipe):
        raise WindfallError("this is the recipe itself", where=f"--write {write}", fix="Give another file.")


def _toml(path: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise WindfallError("no such cluster file", where=str(path), fix="See docs/plan.md for an example.") from e
    except OSError as e:
        raise WindfallError(f"cannot read it: {e.strerror}", where=str(path), fix="Give a TOML file.") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise WindfallError(f"not valid TOML: {e}", where=str(path), fix="Correct the syntax there.") from e


def _prices(path: Path) -> PriceList:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return devices.priced(csv.DictReader(file), str(path))
    except FileNotFoundError as e:
        raise WindfallError("no such price list", where=str(path), fix="Give a CSV file.") from e
    except OSError as e:
        raise WindfallError(f"cannot read it: {e.strerror}", where=str(path), fix="Give a CSV file.") from e
    except (csv.Error, UnicodeDecodeError) as e:
        raise WindfallError(f"not a CSV file: {e}", where=str(path), fix="Save it as CSV in UTF-8.") from e


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
    terms: tuple[Terms, ...] = ("reserved", "spot") if spot else ("reserved",)
    offers: list[tuple[float, Gpu, Terms]] = [
        (usd, gpu, lease) for gpu in known.values() for lease in terms
        if (usd := gpu.spot_usd_per_h if lease == "spot" else gpu.reserved_usd_per_h) is not None
    ]  # fmt: skip
    machines: list[Machine] = []
    for usd, gpu, lease in offers:
        count = min(MOST_PER_KIND, int(usd_per_h / usd))
        for n in range(math.ceil(count / BUDGET_MACHINE)):
            size = min(BUDGET_MACHINE, count - n * BUDGET_MACHINE)
            machines.append(Machine(name=f"m{len(machines)}", gpu=gpu, count=size, lease=lease))
    if not machines:
        what = f"${usd_per_h:.2f} per hour buys no GPU"
        what += f"; the cheapest costs ${min(usd for usd, _, _ in offers):.2f}" if offers else ": no price is known"
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
