"""`windfall plan`: reads its inputs, prints the plans and writes the recipe. All reading of files is here."""

from __future__ import annotations

import csv
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from windfall import recipe as config
from windfall.errors import WindfallError, nearest
from windfall.events.log import Event, read
from windfall.plan import report
from windfall.plan.model import cluster as clusters
from windfall.plan.model import devices
from windfall.plan.model.cluster import Cluster, Links, Machine
from windfall.plan.model.cost_model import Efficiency
from windfall.plan.model.devices import Gpu, PriceList, Terms
from windfall.plan.model.inputs import recipe_workload
from windfall.plan.model.workload import Workload
from windfall.plan.report import Row
from windfall.plan.run import recipe, review, run_log
from windfall.plan.run.recipe import Simulated
from windfall.plan.search import planner
from windfall.plan.search.request import LOSSES_PER_H, Request, SpotMarket, price
from windfall.plan.search.scoring import Plan
from windfall.providers import trace
from windfall.recipe import Recipe

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
    overrides: Sequence[str] = (),
) -> None:  # fmt: skip
    if objective not in OBJECTIVES:
        wrong = f"unknown value {objective!r}; expected one of: {', '.join(OBJECTIVES)}"
        raise WindfallError(wrong, where="--objective", fix=nearest(objective, OBJECTIVES))
    if deadline > 0 and objective != "deadline":
        fix = "Add --objective deadline, or leave --deadline out."
        raise WindfallError(f"the objective {objective} has no deadline", where="--deadline", fix=fix)
    if write is not None:
        _check_target(write, what)
    base, name, work = _workload(what, staleness, overrides)
    listed = _prices(prices) if prices is not None else None
    known = listed.gpus if listed else None
    usd = _budget(budget) if budget else math.inf
    if sum((cluster is not None, bool(gpus))) > 1:
        raise WindfallError("--cluster and --gpus both describe the GPUs", where="windfall plan", fix="Give one.")
    engine = "vllm" if base.engine.name == "vllm" else "windfall"
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
        cluster=made, work=work, efficiency=Efficiency(), objective=objective, budget_usd_per_h=usd,  # pyright: ignore
        deadline_h=deadline if objective == "deadline" else 0.0, spot=_spot(spot, base.sim.boot_s), top=top,
    )  # fmt: skip
    found = best(request, base, simulate=simulate)
    print("\n".join(report.report(name, request, found.ranked, found.frontier, found.groups)))
    for line in found.refused:
        print(f"refused: {line}")
    if listed and listed.unknown:
        print(f"not planned, because their figures are not known: {', '.join(listed.unknown)} of {prices}")
    if write is not None:
        plan, figures = found.ranked[0]
        text = config.dump(recipe.write(plan, request, base, figures))
        try:
            write.write_text(text if what.endswith(".toml") else recipe.with_notes(text), encoding="utf-8")
        except OSError as e:
            raise WindfallError(f"cannot write: {e.strerror}", where=str(write), fix="Give another file.") from e
        print(f"\nwritten: {write}; start it with: windfall train {write}")
        for line in recipe.commands(plan, name):
            print(f"  then on {line}")


class Best(NamedTuple):
    ranked: list[Row]
    """The plan to choose, then the next best ones by the objective."""
    frontier: list[Row]
    """Plans that are faster than every cheaper one, the cheapest first."""
    groups: list[report.Group]
    """What every group of machines adds."""
    compared: list[Row]
    """Everything that was compared at last, best first."""
    refused: list[str]


def best(request: Request, base: Recipe, *, simulate: bool) -> Best:
    """The best plans that can run. What is chosen is compared with the best plan without each group of machines that it
    uses, and with `fleet.local` on and off; if one of these is better, it is chosen and compared in the same way. If
    all plans miss the deadline in the simulation, the search is repeated with less time, as far as there are faster
    plans."""
    request, refused, first = _possible(request, base)
    try:
        every = planner.ranked(request, planner.search(request))
    except WindfallError as e:
        raise (first or e) from e
    found = Candidates(request, base, simulate=simulate, refused=refused)
    fastest = min(every, key=lambda p: (-p.tok_per_s, p.usd_per_h))
    if not found.add(every, request.top, first) or not found.rows:
        raise found.first or first or WindfallError("no plan can run", where="windfall plan")
    found.add([fastest], 1)
    found.add_both(every)
    hours = request.deadline_h
    for _ in range(SEARCHES):
        plan, figures = found.best()[0]
        if figures is None or not report.is_late(plan, figures, request):
            break
        hours *= 0.99 * min(1.0, request.deadline_h / report.run_hours(plan, figures))
        try:
            faster = planner.plans(replace(request, deadline_h=hours, top=request.top + MORE))
        except WindfallError:  # nothing is that fast by the cost model
            faster = planner.plans(replace(request, objective="throughput", top=request.top + MORE))
        if not found.add(faster, request.top):
            break
    found.without_groups()
    ranked = found.best()
    rows = [*found.rows.values(), *((p, None) for p in every if p.counts not in found.rows)]
    speeds = [(report.speed(*row), row[0].usd_per_h) for row in rows]
    frontier = [rows[n] for n in planner.frontier(speeds, report.FRONTIER)]
    if ranked[0] not in frontier:
        frontier = sorted([*frontier, ranked[0]], key=lambda row: row[0].usd_per_h)
    groups = found.groups(ranked[0])
    return Best(ranked=ranked[: request.top], frontier=frontier, groups=groups, compared=ranked, refused=found.refused)


class Candidates:
    """Plans that can run, with their simulated figures."""

    def __init__(self, request: Request, base: Recipe, *, simulate: bool, refused: list[str]) -> None:
        self.request, self.base, self.refused, self._simulate = request, base, refused, simulate
        self.rows: dict[frozenset[Any], Row] = {}
        self.first: WindfallError | None = None
        """The error of the first plan that cannot run."""
        self._removed: dict[frozenset[Any], frozenset[str]] = {}
        """The groups of machines that were left out, by plan; only plans for a part of the cluster are listed."""

    def add(self, plans: Sequence[Plan], most: int, first: WindfallError | None = None) -> list[Plan]:
        """Simulate the first plans that can run, this many."""
        out: list[Plan] = []
        self.first = self.first or first
        for plan in plans:
            if len(out) == most or len(self.refused) > MORE:
                break
            error = recipe.refusal(plan, self.request, self.base)
            if error is not None:
                self.first = self.first or error
                self.refused.append(f"{plan.name}: {error.what}")
                continue
            out.append(plan)
            if plan.counts not in self.rows:
                figures = recipe.simulate(plan, self.request, self.base) if self._simulate else None
                self.rows[plan.counts] = plan, figures
        return out

    def add_both(self, plans: Sequence[Plan]) -> list[Plan]:
        """Simulate the best plans with and without the trainer's own engine that can run."""

        def first(own: bool) -> list[Plan]:
            of_kind = (p for p in plans if (p.own is not None) == own)
            return list(islice((p for p in of_kind if recipe.refusal(p, self.request, self.base) is None), 1))

        return self.add(planner.by_own_engine(self.request, first(False) + first(True)), MORE)

    def best(self) -> list[Row]:
        """The plan to choose, then the others by the objective."""
        rows = sorted(self.rows.values(), key=lambda row: _key(self.request, *row))
        speeds = [(figures.tok_per_s if figures else plan.tok_per_s, plan.usd_per_h) for plan, figures in rows]
        n = planner.preferred(self.request.objective, speeds)
        return [rows[n], *rows[:n], *rows[n + 1 :]]

    def without_groups(self) -> None:
        """Add the best plan without each group that the best plan uses, until that is compared with all of them."""
        groups, done = self.request.cluster.groups(), set[frozenset[str]]()
        while True:
            plan = self.best()[0][0]
            removed = self._removed.get(plan.counts, frozenset())
            left = [r for name in used(plan, groups) if (r := removed | {name}) not in done]
            if not left:
                return
            for names in left:
                done.add(names)
                machines = [m for name in names for m in groups[name]]
                for made in self.add_both(planner.without(self.request, machines)):
                    self._removed.setdefault(made.counts, names)

    def groups(self, chosen: Row) -> list[report.Group]:
        """Every group of machines: what the chosen plan gains from it, or would gain if it used it."""
        out: list[report.Group] = []
        groups = self.request.cluster.groups()
        for name in groups:
            uses = name in used(chosen[0], groups)
            others = [row for row in self.best() if (name in used(row[0], groups)) != uses]
            usd = sum(
                (p.training + sum(p.replicas)) * price(self.request, p.machine.kind)
                for p in chosen[0].placed if p.machine in groups[name]
            )  # fmt: skip
            out.append(report.Group(name=name, used=uses, usd_per_h=usd, other=others[0] if others else None))
        return out


def used(plan: Plan, groups: Mapping[str, list[Machine]]) -> list[str]:
    """The groups of machines that a plan uses."""
    busy = {p.machine.name for p in plan.placed if p.training or p.replicas}
    return [name for name, machines in groups.items() if any(m.name in busy for m in machines)]


def _possible(request: Request, base: Recipe) -> tuple[Request, list[str], WindfallError | None]:
    """The request without machines of providers that cannot be used from here, what was left out, and the first
    reason."""
    refused, first = list[str](), None
    for name in {m.provider: None for m in request.cluster.machines if m.provider}:
        if error := recipe.provider_refusal(name, base):
            first = first or error
            refused.append(f"machines of {name}: {error.what}")
            left = tuple(m for m in request.cluster.machines if m.provider != name)
            request = replace(request, cluster=replace(request.cluster, machines=left))
    return request, refused, first


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


def _workload(what: str, staleness: int | None, overrides: Sequence[str]) -> tuple[Recipe, str, Workload]:
    """The recipe, or that of a model's name; what the plan is called; and what a step asks for."""
    base = config.load(Path(what), list(overrides)) if what.endswith(".toml") else recipe.of_model(what, overrides)
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


def _spot(path: Path | None, boot_s: float) -> SpotMarket:
    if path is None:
        return SpotMarket(losses_per_h=LOSSES_PER_H, boot_s=boot_s, assumed=True)
    changes = trace.read(path)
    seconds = changes[-1].at_s
    made = trace.summary(changes, max(1.0, seconds))
    availability = min(1.0, made.mean_up / max(1, made.max_up))
    return SpotMarket(availability=availability, losses_per_h=made.losses_per_node_hour, boot_s=boot_s)
