"""From a cluster and a workload to a list of plans, best first. Pure.

    1  options   trainers and engines that fit in memory, with the cost model's times
    2  search    counts per kind (frontier.py): every trainer with engines that are as fast as it needs. An engine's
                 speed depends on its batch, and the batch on how many engines there are, so there are two searches:
                 with the speeds of one engine that has all responses, and of engines on all GPUs
    3  place     individual GPUs (partition.py); engines that cannot be placed are replaced by smaller ones
    4  score     the placed plan with its true links and batches (plan.py), with the trainer's own engine and without
                 it, and every trainer with its own engine alone; plans are sorted by this
    5  improve   from the best plans, single changes of counts that raise the true score. The search cannot see all of
                 it: whether anything must be pulled depends on which machines are used at all

Rules: spot machines, lenders and machines of a provider never train. A trainer uses FSDP on GPUs of one type. An engine
stays inside one machine; only vLLM spans several GPUs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

from windfall.errors import WindfallError
from windfall.plan.model import cost_model
from windfall.plan.model.cluster import ClusterMachine, Kind
from windfall.plan.model.cost_model import DoesNotFit, PlannedTrainer, Replica, ZonePull
from windfall.plan.model.workload import AddedWorkload
from windfall.plan.search import frontier
from windfall.plan.search.frontier import Counts, Engine, Problem, Trainer, solve
from windfall.plan.search.partition import Graph, Partition, partition
from windfall.plan.search.plan import (
    PlacedMachine,
    PlannedEngines,
    PlanRequest,
    RunPlan,
    batch_at,
    in_flight,
    score,
    step_time,
)

Row = TypeVar("Row", bound=Any)
"""A plan with its figures, predicted or simulated: `tok_per_s` and `usd_per_h`."""
CANDIDATES = 160
"""Solutions of a search that are placed and scored."""
OWN_GAIN = 1.01
"""The trainer's own engine is planned if it should be worth at least this factor in speed."""
TIE = 0.02
"""Throughput within this share of the highest is equal to it: then the cheaper plan is better."""
LATE = 1.001
"""A plan that takes longer than this share of the deadline misses it."""
MOST_ZONES = 4
"""Zones that are tried together are fewer than this."""
MOST_NEAR = 12
"""Plans of some zones that are compared with those of all."""
IMPROVED = 4
"""Plans that are improved."""
CHANGES = 300
"""Changed plans that are scored, per plan that is improved."""
STEPS = (1, 2, 4, 8)
"""Numbers of engines that a change adds or removes."""


def plans(request: PlanRequest) -> list[RunPlan]:
    """The best plans, best first; raises WindfallError if there is none."""
    return ranked(request, search(request))[: request.top]


def search(request: PlanRequest) -> list[RunPlan]:
    """All plans that were scored and keep the limits; raises WindfallError if there is none."""
    return Search(request).run()


def ranked(request: PlanRequest, found: Iterable[Row]) -> list[Row]:
    """The plan to choose, then all others by the objective. Of those that are within TIE of the highest throughput, the
    one with the cheapest tokens is chosen. Plans that miss the deadline come last, the fastest of them first."""
    w, objective = request.work, request.objective

    def key(row: Any) -> tuple[float, ...]:
        hours = w.steps * w.tokens / row.tok_per_s / 3600
        if objective == "deadline" and hours > request.deadline_h * LATE:
            return True, hours
        return False, *frontier.key(objective, row.tok_per_s, row.usd_per_h)

    rows = sorted(found, key=key)
    if objective == "throughput":
        near = [row for row in rows if row.tok_per_s >= (1 - TIE) * rows[0].tok_per_s]
        first = min(near, key=lambda row: row.usd_per_h / row.tok_per_s)
        rows = [first, *(row for row in rows if row is not first)]
    return rows


def without(request: PlanRequest, machines: Sequence[ClusterMachine]) -> list[RunPlan]:
    """The plans for the rest of the cluster, as plans for all of it; empty: there is none."""
    left = request.cluster.without(machines)
    if not left.machines:
        return []
    try:
        found = ranked(request, search(replace(request, cluster=left)))
    except WindfallError:  # nothing else can train, or the limits cannot be met
        return []
    idle = tuple(PlacedMachine(machine=m) for m in machines)
    return [replace(plan, placed=(*plan.placed, *idle)) for plan in found]


def by_own_engine(request: PlanRequest, plans: Sequence[RunPlan]) -> list[RunPlan]:
    """The best plan without the trainer's own engine and the best one with it, then each of them the other way round,
    if that fits. The cost model is off by different shares for the two ways."""
    best = [next((p for p in plans if (p.own is not None) == own), None) for own in (False, True)]
    twins = [
        score(request, p.placed, p.replicas, p.training) if p.own else with_own_engine(request, p)
        for p in best
        if p is not None and p.replicas
    ]
    return list({p.counts: p for p in (*best, *twins) if p is not None}.values())


def with_own_engine(request: PlanRequest, plan: RunPlan, *, gain: float = 0.0) -> RunPlan | None:
    """The same plan with `fleet.local`: the trainer's own engine generates while the trainer would wait. None: it does
    not fit beside the trainer's state, or speed does not grow by this factor."""
    try:
        own = own_engine(request, plan.placed, plan.training)
    except DoesNotFit:
        return None
    made = score(request, plan.placed, plan.replicas, plan.training, own)
    return made if made.tok_per_s > gain * plan.tok_per_s else None


def own_engine(request: PlanRequest, placed: Sequence[PlacedMachine], trained: PlannedTrainer) -> Replica:
    """The engine of the ranks on the machine of rank 0; others have none. Raises DoesNotFit."""
    first = next(p for p in placed if p.training)
    return cost_model.own_engine(request.work, trained, first.training, request.efficiency)


class Search:
    """One search: the trainers and engines that fit, by number of their kind, and the plans made from them."""

    def __init__(self, request: PlanRequest) -> None:
        """Raises WindfallError if nothing fits."""
        self.request = request
        self.kinds: list[tuple[Kind, list[ClusterMachine]]] = list(request.cluster.kinds().items())
        self.number = {kind: k for k, (kind, _) in enumerate(self.kinds)}
        self.have = [sum(m.count for m in machines) for _, machines in self.kinds]
        self.idle = [[PlacedMachine(machine=m) for m in machines] for _, machines in self.kinds]
        self.graphs = [_graph(request, machines) for _, machines in self.kinds]
        self.fastest = [max(map(max, graph.network)) for graph in self.graphs]
        """The fastest link between two machines of a kind. What a plan has is known when it is placed."""
        self.trainers: dict[Trainer, PlannedTrainer] = {}
        self.engines: dict[Engine, Replica] = {}
        self.not_alone = ""
        """Why the trainer's own engine cannot generate everything, if it cannot."""
        w, e = request.work, request.efficiency
        why: dict[str, list[str]] = {"train": [], "generate": []}
        for k, (kind, machines) in enumerate(self.kinds):
            largest = max(m.count for m in machines)
            if not kind.can_train:
                reason = f"is started by {kind.provider}" if kind.lease == "reserved" else "can be taken away"
                why["train"].insert(0, f"{kind.name} {reason}, so it cannot train")
            for n in _trainer_sizes(self.have[k]) if kind.can_train else ():
                try:
                    self.trainers[k, n] = cost_model.fsdp(w, kind.gpu, n, largest, self.fastest[k], e)
                except DoesNotFit as error:
                    why["train"].append(str(error))
            for tp in request.replica_sizes(kind):
                if tp <= largest:
                    try:
                        self.engines[k, tp] = cost_model.replica(w, kind.gpu, tp, e)
                    except DoesNotFit as error:
                        why["generate"].append(str(error))
        for part, fitting in (("train", self.trainers), ("generate", self.engines)):
            if not fitting:
                raise self._nothing_fits(part, why[part][-1])

    def _nothing_fits(self, part: str, why: str) -> WindfallError:
        fix = "Use GPUs with more memory, or more of them; or train adapters, or set train.optimizer = 'adamw_8bit'."
        if part == "generate":
            fix = 'Use GPUs with more memory, engine = "vllm", which spans several GPUs, or a lower rollout.max_tokens.'
        if part == "train" and not any(kind.can_train for kind, _ in self.kinds):
            fix = "Add a reserved machine for the trainer."
        if "is not known" in why:
            fix = "Run any recipe on it for a few steps, and give --measured RUN; see docs/plan.md."
        elif math.isfinite(self.request.budget_usd_per_h):
            fix = f"{fix[:-1]}. A higher --budget may also help."
        return WindfallError(f"no GPU of this cluster can {part} this model: {why}", where="cluster", fix=fix)

    def run(self, *, near: bool = True) -> list[RunPlan]:
        """All plans that were scored and keep the limits; raises WindfallError if there is none. `near`: also try to
        use only some zones."""
        found: dict[frozenset[tuple[Kind, int, int]], RunPlan] = {}

        def add(problem: Problem) -> None:
            """The solutions as plans, each also with the trainer's own engine if that should help."""
            for solution in solve(problem, CANDIDATES):
                plan = self.place(solution.counts)
                if plan is not None and plan.counts not in found:
                    found[plan.counts] = plan
                    if own := with_own_engine(self.request, plan, gain=OWN_GAIN):
                        found[own.counts] = own

        for crowded in (False, True):
            add(self._problem(crowded=crowded))
        for trainer in self.trainers:
            if (alone := self.place(Counts(trainer, {}))) is not None:
                found[alone.counts] = alone
        for plan in self._near() if near else ():
            found.setdefault(plan.counts, plan)

        def allowed() -> list[RunPlan]:
            return [p for p in found.values() if self._limits.allowed(1 / p.step_s, p.usd_per_h)]

        # The search's speeds are estimates without the trainer's own engine: limits may be met that it cannot meet.
        if self.request.objective == "deadline" or not allowed():
            add(replace(self._limits, objective="throughput", budget_usd_per_h=math.inf))
        found.update((p.counts, p) for p in self._improved(list(found.values())))
        if not allowed():
            raise self._nothing(found.values())
        return allowed()

    def _problem(self, *, crowded: bool) -> Problem:
        """The search with the speeds of engines that all take as long for a step: as long as one engine that has all
        responses, or as one of engines on all GPUs."""
        r, w = self.request, self.request.work
        (_, tp), first = next(iter(self.engines.items()))
        batch = in_flight(w) if crowded else max(1.0, 2 * in_flight(w) * tp / r.cluster.gpus)
        step_s = step_time(first, min(batch, first.slots), w)
        engines, tail_s = {}, math.inf
        for (k, tp), engine in self.engines.items():
            batch = max(1.0, min(batch_at(engine, step_s, w), in_flight(w)))
            engines[k, tp] = engine.tok_per_s(batch, w) * r.useful_share(self.kinds[k][0])
            tail_s = min(tail_s, w.longest_tokens * step_time(engine, 1.0, w) / (w.staleness + 1))
        links = r.cluster.links
        pull_s = cost_model.pull_s(w, [ZonePull(links.pull)] if links.pull else [], 1, local=0 if links.pull else 1)
        return Problem(
            have=tuple(self.have),
            usd_per_h=tuple(r.price(kind) for kind, _ in self.kinds),
            trainers={key: trained.step_s for key, trained in self.trainers.items()},
            engines=engines,
            tokens=w.tokens,
            tail_s=max(tail_s, pull_s) if w.staleness else tail_s,
            update_s=w.reward_s + (0.0 if w.staleness else pull_s),
            overlapped=w.staleness > 0,
            objective=r.objective,
            budget_usd_per_h=r.budget_usd_per_h,
            deadline_rate=w.steps / (3600 * r.deadline_h) if r.deadline_h else 0.0,
        )

    @cached_property
    def _limits(self) -> Problem:
        return self._problem(crowded=True)

    def _near(self) -> Iterator[RunPlan]:
        """Plans that use only some zones: each zone alone, then with the nearest other ones. The search for the highest
        throughput uses all GPUs, also those that new weights reach so late that they are better left out."""
        cluster = self.request.cluster
        zones = list(dict.fromkeys(m.zone for m in cluster.machines))
        tried = {frozenset(zones)}
        for zone in zones:
            order = sorted(zones, key=lambda z: (z != zone, -cluster.links.between(zone, z, same_type=True)))
            for n in range(1, min(len(zones), MOST_ZONES)):
                chosen = frozenset(order[:n])
                if chosen in tried:
                    continue
                tried.add(chosen)
                machines = tuple(m for m in cluster.machines if m.zone in chosen)
                part = replace(self.request, cluster=replace(cluster, machines=machines))
                try:
                    made = ranked(part, Search(part).run(near=False))[:MOST_NEAR]
                except WindfallError:  # too few GPUs for the model, the budget or the deadline
                    continue
                for plan in made:
                    counts = {(g.kind, g.engine.tp): g.count for g in plan.replicas}
                    placed = self.fixed(plan.training_kind, plan.training.gpus, counts)
                    if placed is not None:
                        yield placed
                        if own := with_own_engine(self.request, placed, gain=OWN_GAIN):
                            yield own

    def _improved(self, found: list[RunPlan]) -> Iterator[RunPlan]:
        """From the best plans, always the best of all single changes, until none is better. Then from the fastest,
        always the cheapest that is fast enough."""
        limits = self._limits

        def key(plan: RunPlan) -> tuple[float, ...]:
            """Allowed plans first; of others, those that miss a limit by the least."""
            rate, usd = 1 / plan.step_s, plan.usd_per_h
            late = limits.deadline_rate / rate if limits.objective == "deadline" else 0.0
            miss = 0.0 if limits.allowed(rate, usd) else max(late, usd / limits.budget_usd_per_h)
            return miss, *limits.key(rate, usd)

        order = sorted(found, key=key)
        own = [plan for plan in order[IMPROVED:] if plan.own][:1]
        improved = [plan for start in [*order[:IMPROVED], *own] for plan in self._climb(start, key)]
        yield from improved
        if order and limits.objective == "throughput":  # many engines may be hardly faster than fewer
            fastest = min([*order, *improved], key=key)
            enough = (1 - TIE) * fastest.tok_per_s
            yield from self._climb(fastest, lambda plan: (key(plan)[0], plan.tok_per_s < enough, plan.usd_per_h))

    def _climb(self, best: RunPlan, key: Callable[[RunPlan], tuple[float, ...]]) -> Iterator[RunPlan]:
        left = CHANGES
        while left > 0:
            changes = list(self._changes(best))[:left]
            left -= len(changes)
            made = [plan for c in changes if (plan := self.place(c)) is not None]
            if best.own:
                made = [own for plan in made if (own := with_own_engine(self.request, plan)) is not None]
            better = min(made, key=key, default=None)
            if better is None or not key(better) < key(best):
                break
            best = better
            yield best

    def _changes(self, plan: RunPlan) -> Iterator[Counts]:
        """The plan without one kind of engine; with a few engines more or less; with one engine for another; with
        engines of one kind only; with the next larger or smaller trainer, at the cost of engines of its kind, to their
        benefit, or without touching them."""
        now = {(self.number[g.kind], g.engine.tp): g.count for g in plan.replicas}
        trains, gpus = self.number[plan.training_kind], plan.training.gpus
        sizes = [n for k, n in self.trainers if k == trains]

        def fitting(gpus: int, counts: dict[Engine, int]) -> Iterator[Counts]:
            used = Counter({trains: gpus})
            for (k, tp), n in counts.items():
                used[k] += tp * n
            if any(counts.values()) and all(used[k] <= have for k, have in enumerate(self.have)):
                yield Counts((trains, gpus), {engine: n for engine, n in counts.items() if n})

        for k in {k for k, _ in now}:
            yield from fitting(gpus, {engine: n for engine, n in now.items() if engine[0] != k})
        for engine in self.engines:
            for step in {*STEPS, now[engine] // 8} - {0} if engine in now else (1,):
                yield from fitting(gpus, {**now, engine: max(0, now.get(engine, 0) - step)})
                yield from fitting(gpus, {**now, engine: now.get(engine, 0) + step})
        for old in now:
            for engine in self.engines:
                if engine != old:  # one engine for another
                    yield from fitting(gpus, {**now, old: now[old] - 1, engine: now.get(engine, 0) + 1})
        for k, tp in self.engines:  # one kind instead of all others
            yield from fitting(gpus, {(k, tp): (self.have[k] - gpus * (k == trains)) // tp})
        for n in sizes[max(0, sizes.index(gpus) - 1) : sizes.index(gpus) + 2]:
            if n == gpus:
                continue
            yield from fitting(n, now)
            for k, tp in self.engines:
                if k == trains:
                    others = sum(size * c for (i, size), c in now.items() if i == trains and size != tp)
                    yield from fitting(n, {**now, (k, tp): max(0, (self.have[k] - n - others) // tp)})

    def fixed(self, trains: Kind, gpus: int, counts: Mapping[tuple[Kind, int], int]) -> RunPlan | None:
        """The plan with this trainer and these numbers of engines by kind and size. None: it cannot be placed."""
        trainer = self.number[trains], gpus
        engines = {(self.number[kind], tp): n for (kind, tp), n in counts.items()}
        if trainer not in self.trainers or not engines or not engines.keys() <= self.engines.keys():
            return None
        return self.place(Counts(trainer, engines))

    def place(self, counts: Counts) -> RunPlan | None:
        """The best plan with these counts; without engines, the trainer's own one generates. None: it cannot be
        placed."""
        found: dict[int, Partition] = {}
        trains, gpus = counts.trainer
        trained = self.trainers[counts.trainer]
        sources: list[ClusterMachine] = []
        # The trainer first: other kinds are then placed near it.
        for k in sorted(range(len(self.kinds)), key=lambda k: k != trains):
            kind, machines = self.kinds[k]
            if k != trains and not any(engine[0] == k for engine in counts.engines):
                continue
            # Links depend on the zone only.
            one_of_zone = {m.zone: m for m in machines}
            rates = {z: self.request.cluster.pull_rate(m, sources) for z, m in one_of_zone.items()} if sources else {}
            made = self._partition(counts, k, [rates[m.zone] for m in machines] if sources else [])
            if made is None:
                return None
            found[k] = made
            if k == trains:
                sources = [m for m, n in zip(machines, made.training, strict=True) if n]
                most, room = max(made.training), max(m.count for m in machines)
                if most < gpus and (most < room or made.slowest < self.fastest[k]):
                    try:
                        trained = cost_model.fsdp(
                            self.request.work, kind.gpu, gpus, most, made.slowest, self.request.efficiency
                        )
                    except DoesNotFit:
                        return None
        placed: list[PlacedMachine] = []
        for k, (_, machines) in enumerate(self.kinds):
            if k not in found:
                placed += self.idle[k]
                continue
            rows = zip(machines, found[k].training, found[k].replicas, strict=True)
            placed += [PlacedMachine(machine=machine, training=own, replicas=row) for machine, own, row in rows]
        engines = Counter((k, tp) for k, made in found.items() for row in made.replicas for tp in row)
        groups = [PlannedEngines(self.kinds[e[0]][0], self.engines[e], n) for e, n in engines.items()]
        try:
            own = None if groups else own_engine(self.request, placed, trained)
        except DoesNotFit as error:
            self.not_alone = str(error)
            return None
        return score(self.request, placed, groups, trained, own)

    def _partition(self, counts: Counts, k: int, near: list[float]) -> Partition | None:
        """The GPUs of one kind. Engines that cannot be placed are broken up, the largest first, or left out."""
        sizes = [tp for (kind, tp), n in counts.engines.items() for _ in range(n) if kind == k]
        train = counts.trainer[1] if counts.trainer[0] == k else 0
        found = partition(self.graphs[k], train, sizes, near=near)
        while found is None and sizes:
            sizes.sort()
            largest = sizes.pop()
            half = max((tp for kind, tp in self.engines if kind == k and tp < largest), default=0)
            sizes += [half] * (largest // half) if half else []
            found = partition(self.graphs[k], train, sizes, near=near)
        return found

    def _nothing(self, found: Iterable[RunPlan]) -> WindfallError:
        request = self.request
        least = min((plan.usd_per_h for plan in found), default=0.0)
        if least > request.budget_usd_per_h:
            what = f"${request.budget_usd_per_h:.2f} per hour is not enough: the cheapest plan costs ${least:.2f}"
            return WindfallError(what, where="--budget", fix="Raise the budget, or use cheaper GPUs.")
        if least and request.objective == "deadline":
            what = f"{request.work.steps} steps in {request.deadline_h:g} h are not possible on this cluster"
            return WindfallError(what, where="--deadline", fix="Allow more time, or add GPUs.")
        what = f"training and rollout do not fit on this cluster at the same time: {self.not_alone}"
        fix = "Add a GPU that generates"
        if not isinstance(request.work, AddedWorkload):
            less = "" if request.work.adapter_parameters else "train adapters, set train.optimizer = 'adamw_8bit', or "
            fix += f"; or {less}lower rollout.max_tokens"
        return WindfallError(what, where="cluster", fix=f"{fix}.")


def _graph(request: PlanRequest, machines: list[ClusterMachine]) -> Graph:
    """Machines of one kind and their links."""
    names = list(dict.fromkeys(m.zone for m in machines))
    between = [[request.cluster.links.between(a, b, same_type=True) for b in names] for a in names]
    return Graph(
        machines=tuple(m.count for m in machines),
        zones=tuple(names.index(m.zone) for m in machines),
        link=machines[0].gpu.link,
        network=tuple(map(tuple, between)),
    )


def _trainer_sizes(have: int) -> Iterator[int]:
    """Every number up to 64, then steps of 8, then steps of 64: about 150 sizes for 4,096 GPUs."""
    n = 1
    while n <= have:
        yield n
        n += 1 if n < 64 else 8 if n < 256 else 64
