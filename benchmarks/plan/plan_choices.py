"""What `windfall plan` chooses, beside the best plans without each group of machines, with `fleet.local` on and off.

    python benchmarks/plan/plan_choices.py                 eight clusters, some minutes
    python benchmarks/plan/plan_choices.py --only 1,3      some of them
    python benchmarks/plan/plan_choices.py --seed 1        alternatives and choice are simulated again with other tasks

Every plan is simulated with the product's own controller. For each cluster: the chosen plan; then the alternatives, as
their value by the objective relative to the chosen plan (tokens per second, or tokens per dollar). "Behind" is how far
the chosen plan is behind the best of them; of plans within 2 % of the highest throughput the cheapest is chosen.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any, NamedTuple

from windfall.plan import choose
from windfall.plan.choose import ComparedPlan
from windfall.plan.model import cluster
from windfall.plan.model.cluster import ZoneLink
from windfall.plan.model.cost_model import Efficiency
from windfall.plan.model.workload import MODELS, Workload, delta_share
from windfall.plan.run import recipe
from windfall.plan.search import planner
from windfall.plan.search.plan import LOSSES_PER_H, PlanRequest, SpotMarket
from windfall.recipe.sections import Recipe
from windfall.sim.core.scenario import with_keys

MARKET = SpotMarket(losses_per_h=LOSSES_PER_H, assumed=True)


class Case(NamedTuple):
    name: str
    gpus: str
    model: str = "Qwen3-8B"
    objective: str = "throughput"
    keys: dict[str, Any] = {}  # noqa: RUF012
    zone: str = ""
    """Zone of the spot machines, if it is not that of the others."""


LONG = {"median_tokens": 3000.0, "max_tokens": 16_384, "groups": 32}
SHORT = {"median_tokens": 200.0, "max_tokens": 1024, "groups": 32}
CASES = (
    Case("8 H100, long responses, staleness 0", "8xH100", keys={**LONG, "staleness": 0}),
    Case("the README's example", "8xH100 + 6x2xH100:spot"),
    Case(
        "the same, long responses, staleness 0", "8xH100 + 6x2xH100:spot", keys={**LONG, "groups": 16, "staleness": 0}
    ),
    Case("the same, short responses, staleness 0", "8xH100 + 6x2xH100:spot", keys={**SHORT, "staleness": 0}),
    Case("by cost", "8xH100 + 2x8xL40S + 4x2xH200:spot", objective="cost", keys={"groups": 16}),
    Case("spot in another zone", "8xH100 + 4x4xH100:spot", keys={"groups": 16}, zone="b"),
    Case("a small model on small GPUs", "8xL40S + 4x4xL4:spot", "Qwen3-1.7B", keys={"groups": 16}),
    Case("14B on two machines and spot", "2x8xH100 + 4x2xH200:spot", "Qwen3-14B", keys={"groups": 16}),
)


def request(case: Case) -> PlanRequest:
    made = cluster.from_text(case.gpus)
    if case.zone:
        machines = tuple(replace(m, zone=case.zone) if m.lease == "spot" else m for m in made.machines)
        made = replace(made, machines=machines, links=replace(made.links, zones=(ZoneLink("", case.zone, 1.25e9),)))
    work = Workload(shape=MODELS[case.model], delta=delta_share(recipe.LR), **case.keys)
    return PlanRequest(
        cluster=made, work=work, efficiency=Efficiency(), objective=case.objective, spot=MARKET,  # pyright: ignore
    )  # fmt: skip


def value(case: Case, row: ComparedPlan) -> float:
    """Higher is better."""
    return row.tok_per_s if case.objective == "throughput" else 1 / row.usd_per_100


class Choice(NamedTuple):
    chosen: ComparedPlan
    others: dict[str, ComparedPlan]
    """Alternatives by name."""


def compare(case: Case, seed: int = 0) -> Choice:
    asked = request(case)
    base = with_keys(Recipe(), {"run": {"seed": 0}})
    found = choose.best(asked, base, simulate=True)
    known = {row.plan.counts: row for row in found.compared} if seed == 0 else {}
    again = with_keys(base, {"run": {"seed": seed}})

    def simulated(plan: Any) -> ComparedPlan:
        return known.get(plan.counts) or ComparedPlan(plan, recipe.simulate(plan, asked, again))

    others: dict[str, ComparedPlan] = {}
    chosen = simulated(found.ranked[0].plan)
    parts = {"": planner.ranked(asked, planner.search(asked))}
    parts |= {f"without {n}, ": planner.without(asked, machines) for n, machines in asked.cluster.groups().items()}
    for part, plans in parts.items():
        for plan in planner.by_own_engine(asked, plans):
            name, row = f"{part}local {'on' if plan.own else 'off'}", simulated(plan)
            if plan.counts != chosen.plan.counts and (
                name not in others or value(case, row) > value(case, others[name])
            ):
                others[name] = row
    return Choice(chosen, others)


def behind(case: Case, choice: Choice) -> float:
    """How far the chosen plan is behind the best alternative; 0 or less: it is the best."""
    return max((value(case, row) / value(case, choice.chosen) - 1 for row in choice.others.values()), default=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="numbers of the clusters, from 1")
    parser.add_argument("--seed", type=int, default=0, help="seed of the simulations that are compared")
    args = parser.parse_args()
    chosen = [int(n) - 1 for n in args.only.split(",")] if args.only else range(len(CASES))
    print("| cluster | chosen plan | tok/s: predicted, simulated | $/100 steps | alternatives, relative | behind |")
    print("|---|---|---|---|---|---|")
    for n in chosen:
        case = CASES[n]
        made = compare(case, args.seed)
        plan, row = made.chosen.plan, made.chosen
        others = "; ".join(f"{name} {value(case, o) / value(case, row):.2f}" for name, o in made.others.items())
        cells = [
            f"{n + 1}. {case.name}: {case.gpus}", plan.name, f"{plan.tok_per_s:,.0f}, {row.tok_per_s:,.0f}",
            f"{row.usd_per_100:.2f}", others or "none", f"{max(0.0, behind(case, made)):.1%}",
        ]  # fmt: skip
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
