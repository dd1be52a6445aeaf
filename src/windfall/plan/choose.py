"""Which plan to choose: candidates of the search that can run, compared by their simulated figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from windfall.errors import WindfallError
from windfall.plan.model.cluster import ClusterMachine
from windfall.plan.run import recipe
from windfall.plan.run.recipe import Simulated
from windfall.plan.search import planner
from windfall.plan.search.frontier import fastest_by_price
from windfall.plan.search.plan import PlanRequest, RunPlan
from windfall.recipe.sections import Recipe

MORE = 12
"""Plans beyond those to show, in case some cannot run."""
SEARCHES = 4
"""Further searches if all plans miss the deadline in the simulation."""
FRONTIER = 8
"""Rows of the table of speed and cost."""


class ComparedPlan(NamedTuple):
    """A plan, with its simulated figures if it was simulated."""

    plan: RunPlan
    figures: Simulated | None = None

    @property
    def tok_per_s(self) -> float:
        return self.figures.tok_per_s if self.figures else self.plan.tok_per_s

    @property
    def usd_per_h(self) -> float:
        return self.plan.usd_per_h

    @property
    def usd_per_100(self) -> float:
        """Dollars per 100 steps."""
        return 100 * self.plan.work.tokens / self.tok_per_s / 3600 * self.plan.usd_per_h

    @property
    def hours(self) -> float:
        """Hours of all steps."""
        return self.plan.work.steps * self.plan.work.tokens / self.tok_per_s / 3600

    def is_late(self, request: PlanRequest) -> bool:
        return request.objective == "deadline" and self.hours > request.deadline_h * planner.LATE

    def uses(self, machines: Iterable[ClusterMachine]) -> bool:
        busy = {p.machine.name for p in self.plan.placed if p.used}
        return any(m.name in busy for m in machines)


class MachineGroup(NamedTuple):
    """A group of machines, beside the chosen plan."""

    name: str
    used: bool
    usd_per_h: float
    """Dollars per hour that the chosen plan pays for it."""
    other: ComparedPlan | None
    """The best plan without it, or with it if the chosen plan does not use it. None: there is none."""


class PlanChoice(NamedTuple):
    ranked: list[ComparedPlan]
    """The plan to choose, then the next best ones by the objective."""
    frontier: list[ComparedPlan]
    """Plans that are faster than every cheaper one, the cheapest first."""
    groups: list[MachineGroup]
    """What every group of machines adds."""
    compared: list[ComparedPlan]
    """Everything that was compared at last, best first."""
    refused: list[str]


def best(request: PlanRequest, base: Recipe, *, simulate: bool) -> PlanChoice:
    """The best plans that can run. What is chosen is compared with the best plan without each group of machines that it
    uses, and with `fleet.local` on and off; if one of these is better, it is chosen and compared in the same way. If
    all plans miss the deadline in the simulation, the search is repeated with less time, as far as there are faster
    plans."""
    found = Candidates(request, base, simulate=simulate)
    request = found.request
    try:
        every = planner.ranked(request, planner.search(request))
    except WindfallError as e:
        raise (found.error or e) from e
    if not found.add(every, request.top):
        raise found.error or WindfallError("no plan can run", where="windfall plan")
    found.add([min(every, key=lambda p: (-p.tok_per_s, p.usd_per_h))], 1)
    found.add_both(every)
    hours = request.deadline_h
    for _ in range(SEARCHES):
        first = found.ranked()[0]
        if first.figures is None or not first.is_late(request):
            break
        hours *= 0.99 * min(1.0, request.deadline_h / first.hours)
        more = replace(request, top=request.top + MORE)
        try:
            faster = planner.plans(replace(more, deadline_h=hours))
        except WindfallError:  # nothing is that fast by the cost model
            faster = planner.plans(replace(more, objective="throughput"))
        if not found.add(faster, request.top):
            break
    found.add_without_groups()
    ranked = found.ranked()
    rows = [*found.rows.values(), *(ComparedPlan(p) for p in every if p.counts not in found.rows)]
    shown = fastest_by_price([(row.tok_per_s, row.plan.usd_per_h) for row in rows], FRONTIER)
    frontier = [rows[n] for n in shown]
    if ranked[0] not in frontier:
        frontier = sorted([*frontier, ranked[0]], key=lambda row: row.plan.usd_per_h)
    return PlanChoice(ranked[: request.top], frontier, found.groups(), ranked, found.refused)


class Candidates:
    """Plans that can run, with their simulated figures."""

    def __init__(self, request: PlanRequest, base: Recipe, *, simulate: bool) -> None:
        self.rows: dict[frozenset[Any], ComparedPlan] = {}
        self.refused: list[str] = []
        self.error: WindfallError | None = None
        """Why the first machines or plans cannot be used."""
        self._base = base
        self._simulate = simulate
        self._removed: dict[frozenset[Any], frozenset[str]] = {}
        """The groups of machines that were left out, by plan; only plans for a part of the cluster are listed."""
        cluster = request.cluster
        for name in {m.provider: None for m in cluster.machines if m.provider}:
            if error := recipe.provider_refusal(name, base):
                self._refuse(f"machines of {name}", error)
                cluster = replace(cluster, machines=tuple(m for m in cluster.machines if m.provider != name))
        self.request = replace(request, cluster=cluster)
        """Without machines of providers that cannot be used from here."""

    def _refuse(self, name: str, error: WindfallError) -> None:
        self.error = self.error or error
        self.refused.append(f"{name}: {error.what}")

    def add(self, plans: Iterable[RunPlan], most: int) -> list[RunPlan]:
        """Simulate the first plans that can run, this many."""
        out: list[RunPlan] = []
        for plan in plans:
            if len(out) == most or len(self.refused) > MORE:
                break
            if error := recipe.refusal(plan, self.request, self._base):
                self._refuse(plan.name, error)
                continue
            out.append(plan)
            if plan.counts not in self.rows:
                figures = recipe.simulate(plan, self.request, self._base) if self._simulate else None
                self.rows[plan.counts] = ComparedPlan(plan, figures)
        return out

    def add_both(self, plans: Sequence[RunPlan]) -> list[RunPlan]:
        """Simulate the best plans with and without the trainer's own engine that can run."""
        possible = []
        for own in (False, True):
            of_kind = (p for p in plans if (p.own is not None) == own)
            possible += [next((p for p in of_kind if not recipe.refusal(p, self.request, self._base)), None)]
        return self.add(planner.by_own_engine(self.request, [p for p in possible if p is not None]), MORE)

    def ranked(self) -> list[ComparedPlan]:
        return planner.ranked(self.request, self.rows.values())

    def add_without_groups(self) -> None:
        """Add the best plan without each group that the best plan uses, until that is compared with all of them."""
        groups, done = self.request.cluster.groups(), set[frozenset[str]]()
        while True:
            row = self.ranked()[0]
            removed = self._removed.get(row.plan.counts, frozenset())
            used = [name for name, machines in groups.items() if row.uses(machines)]
            left = [names for name in used if (names := removed | {name}) not in done]
            if not left:
                return
            for names in left:
                done.add(names)
                machines = [m for name in names for m in groups[name]]
                for made in self.add_both(planner.without(self.request, machines)):
                    self._removed.setdefault(made.counts, names)

    def groups(self) -> list[MachineGroup]:
        """Every group of machines: what the chosen plan gains from it, or would gain if it used it."""
        out: list[MachineGroup] = []
        chosen, *others = self.ranked()
        for name, machines in self.request.cluster.groups().items():
            uses = chosen.uses(machines)
            other = next((row for row in others if row.uses(machines) != uses), None)
            paid = [p for p in chosen.plan.placed if p.machine in machines]
            usd = sum(p.used * self.request.price(p.machine.kind) for p in paid)
            out.append(MachineGroup(name, uses, usd, other))
        return out
