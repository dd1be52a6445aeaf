"""From a cluster and a workload to a list of plans, best first. Pure.

    1  options   trainers and replicas that fit in memory, with the cost model's times
    2  search    counts per kind (solvers.py): the best for every trainer, and the frontier of speed and price. A
                 replica's speed depends on its batch, and the batch on how many replicas there are, so search and
                 speeds are repeated until nothing new is found
    3  place     individual GPUs (partition.py); replicas that cannot be placed are replaced by smaller ones
    4  score     the placed plan with its true links and batches (scoring.py), with the trainer's own engine and
                 without it; plans are sorted by this
    5  improve   from the best plans, single changes of counts that raise the true score. The search cannot see all of
                 it: whether anything must be pulled depends on which machines are used at all

Rules: spot machines, lenders and machines of a provider never train. A trainer uses GPUs of one type. A replica stays
inside one machine. Only what `Capabilities` and the machines' engines allow is planned; by default that is what
windfall runs: FSDP, and engines on one GPU.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from windfall.errors import WindfallError
from windfall.plan.model import cost_model
from windfall.plan.model.cluster import Kind, Machine
from windfall.plan.model.cost_model import DoesNotFit, Replica, Training
from windfall.plan.search import partition, solvers
from windfall.plan.search.request import Request, price, useful_share
from windfall.plan.search.scoring import PIPELINED, Placed, Plan, batch_at, in_flight, score, step_time
from windfall.plan.search.solvers import Objective, Problem, ReplicaOption, Split, TrainOption

ROUNDS = 3
"""Repetitions of search with the batches of the last solution."""
CANDIDATES, BETWEEN = 12, 16
"""Solutions of a search that are placed and scored: the best of the best trainers, and some of the frontier."""
OWN_GAIN = 1.01
"""The trainer's own engine is planned if it should be worth at least this factor in speed."""
TIE = 0.02
"""Throughput within this share of the highest is equal to it: then the cheaper plan is better."""
MOST_ZONES = 4
"""Zones that are tried together are fewer than this."""
IMPROVED = 2
"""Plans that are improved."""
CHANGES = 300
"""Changed plans that are scored, per plan that is improved."""
STEPS = (1, 2, 4, 8)
"""Numbers of engines that a change adds or removes."""


def plans(request: Request) -> list[Plan]:
    """The best plans, best first; raises WindfallError if there is none."""
    return ranked(request, search(request))[: request.top]


def ranked(request: Request, found: Sequence[Plan]) -> list[Plan]:
    """The plan to choose, then all others by the objective."""
    rows = sorted(found, key=lambda p: solvers.key(request.objective, p.tok_per_s, p.usd_per_h))
    first = preferred(request.objective, [(p.tok_per_s, p.usd_per_h) for p in rows])
    return [rows[first], *rows[:first], *rows[first + 1 :]]


def preferred(objective: Objective, rows: Sequence[tuple[float, float]]) -> int:
    """Which of these pairs of tokens per second and dollars per hour to choose, the best by the objective first. Of
    those that are within TIE of the highest throughput, the one with the cheapest tokens.

    >>> preferred("throughput", [(100.0, 90.0), (99.0, 50.0), (97.0, 10.0)])
    1
    """
    if objective != "throughput":
        return 0
    near = [n for n, (tok_per_s, _) in enumerate(rows) if tok_per_s >= (1 - TIE) * rows[0][0]]
    return min(near, key=lambda n: rows[n][1] / rows[n][0])


def frontier(rows: Sequence[tuple[float, float]], most: int) -> list[int]:
    """Which of these pairs of tokens per second and dollars per hour are faster than every cheaper one, the cheapest
    first: at most this many, at even distances of the logarithms of their prices.

    >>> frontier([(10.0, 1.0), (30.0, 4.0), (20.0, 2.0), (5.0, 3.0)], 2)
    [0, 1]
    """
    out: list[int] = []
    for n in sorted(range(len(rows)), key=lambda n: (rows[n][1], -rows[n][0])):
        if not out or rows[n][0] > rows[out[-1]][0] * (1 + 1e-9):
            out.append(n)
    if len(out) <= most:
        return out
    at = [math.log(max(rows[n][1], 1e-9)) for n in out]
    wanted = [at[0] + (at[-1] - at[0]) * i / (most - 1) for i in range(most)]
    return [out[i] for i in sorted({min(range(len(at)), key=lambda n: abs(at[n] - x)) for x in wanted})]


def without(request: Request, machines: Sequence[Machine]) -> list[Plan]:
    """The plans for the rest of the cluster, as plans for all of it; empty: there is none."""
    left = request.cluster.without(machines)
    if not left.machines:
        return []
    try:
        found = ranked(request, search(replace(request, cluster=left)))
    except WindfallError:  # nothing else can train, or the limits cannot be met
        return []
    idle = tuple(Placed(machine=m, training=0, replicas=()) for m in machines)
    return [replace(plan, placed=(*plan.placed, *idle)) for plan in found]


def search(request: Request, *, near: bool = True) -> list[Plan]:
    """All plans that were scored and keep the limits; raises WindfallError if there is none. `near`: also try to use
    only some zones."""
    options = Options(request)
    found: dict[frozenset[tuple[Kind, int, int]], Plan] = {}

    def add(splits: Sequence[Split]) -> list[Plan]:
        """The plans that are new, each also with the trainer's own engine if that should help."""
        made = [plan for split in splits if (plan := place(request, options, split)) is not None]
        new = [plan for plan in made if plan.counts not in found]
        found.update((plan.counts, plan) for plan in new)
        owns = [
            own for plan in new if (own := with_own_engine(request, plan)) and own.tok_per_s > OWN_GAIN * plan.tok_per_s
        ]
        found.update((own.counts, own) for own in owns)
        return new

    for crowded in (False, True):
        step_s = options.first_step_s(crowded)
        for n in range(ROUNDS):
            new = add(solvers.solve(options.problem(step_s), CANDIDATES, BETWEEN if n == 0 else 0))
            if not new:
                break
            step_s = max(step_time(engine, batch, request.work) for _, engine, _, batch in new[0].replicas)
    add(list(_beside_own_engine(options)))
    for plan in _near(request, options) if near else ():
        found.setdefault(plan.counts, plan)
    problem = options.problem(options.first_step_s(True))
    if not found:  # the search's speeds are estimates: limits that it cannot meet may still be met
        add(solvers.solve(replace(problem, objective="throughput", budget_usd_per_h=math.inf), CANDIDATES))
    found.update((p.counts, p) for p in _improved(request, options, problem, list(found.values())))
    allowed = [p for p in found.values() if problem.allowed(1 / p.step_s, p.usd_per_h)]
    if not allowed:
        raise _nothing(request, problem)
    return allowed


def _beside_own_engine(options: Options) -> Iterator[Split]:
    """For trainers in one machine, whose own engines may generate: all other GPUs generate, or those of one kind. The
    search does not know of these engines; with them, larger trainers and fewer workers are better."""
    have = [sum(m.count for m in machines) for _, machines in options.kinds]
    smallest = {k: min(tp for i, tp in options.replicas if i == k) for k in {k for k, _ in options.replicas}}
    for (trains, gpus), trained in options.trainers.items():
        if gpus > max(m.count for m in options.kinds[trains][1]):
            continue
        engines = {
            ReplicaOption(k, tp, 1.0): n for k, tp in smallest.items() if (n := (have[k] - gpus * (k == trains)) // tp)
        }  # fmt: skip
        for some in ({}, *({option: n} for option, n in engines.items())):
            if replicas := some or engines:
                trainer = TrainOption(trains, gpus, trained.step_s)
                yield Split(trainer=trainer, replicas=replicas, rate=0.0, usd_per_h=0.0)


def by_own_engine(request: Request, plans: Sequence[Plan]) -> list[Plan]:
    """The best plan without the trainer's own engine and the best one with it, then each of them the other way round,
    if that fits. The cost model is off by different shares for the two ways."""
    best = [next((p for p in plans if (p.own is not None) == own), None) for own in (False, True)]
    twins = [_without_own_engine(request, p) if p.own else with_own_engine(request, p) for p in best if p is not None]
    return list({p.counts: p for p in (*best, *twins) if p is not None}.values())


def _without_own_engine(request: Request, plan: Plan) -> Plan:
    engines, kinds = [(e, n) for _, e, n, _ in plan.replicas], [kind for kind, *_ in plan.replicas]
    return score(request, plan.placed, engines, kinds, plan.training)


def with_own_engine(request: Request, plan: Plan) -> Plan | None:
    """The same plan with `fleet.local`: the trainer's own engine generates while the trainer would wait. Only ranks on
    the machine of rank 0 have an engine. None: it does not fit beside the trainer's state."""
    first = next(p for p in plan.placed if p.training)
    own = cost_model.own_engine(request.work, plan.training, first.training, request.efficiency)
    if own is None or request.can.megatron:
        return None
    engines, kinds = [(e, n) for _, e, n, _ in plan.replicas], [kind for kind, *_ in plan.replicas]
    return score(request, plan.placed, engines, kinds, plan.training, own)


def _near(request: Request, options: Options) -> Iterator[Plan]:
    """Plans that use only some zones: each zone alone, then with the nearest other ones. The search for the highest
    throughput uses all GPUs, also those that new weights reach so late that they are better left out."""
    links = request.cluster.links
    zones = list(dict.fromkeys(m.zone for m in request.cluster.machines))
    tried = {frozenset(zones)}
    for zone in zones:
        order = sorted(zones, key=lambda z: (z != zone, -links.between(zone, z, same_type=True)))
        for n in range(1, min(len(zones), MOST_ZONES)):
            chosen = frozenset(order[:n])
            if chosen in tried:
                continue
            tried.add(chosen)
            machines = tuple(m for m in request.cluster.machines if m.zone in chosen)
            part = replace(request, cluster=replace(request.cluster, machines=machines))
            try:
                made = ranked(part, search(part, near=False))[:CANDIDATES]
            except WindfallError:  # too few GPUs for the model, the budget or the deadline
                continue
            for plan in made:
                placed = fixed_in(request, options, plan)
                if placed is not None:
                    yield placed
                    if (own := with_own_engine(request, placed)) and own.tok_per_s > OWN_GAIN * placed.tok_per_s:
                        yield own


def _improved(request: Request, options: Options, problem: Problem, found: list[Plan]) -> Iterator[Plan]:
    """From the best plans, always the best of all single changes, until none is better."""

    def key(plan: Plan) -> tuple[float, ...]:
        """Allowed plans first; of others, those that miss a limit by the least."""
        rate, usd = 1 / plan.step_s, plan.usd_per_h
        late = problem.deadline_rate / rate if problem.objective == "deadline" else 0.0
        miss = 0.0 if problem.allowed(rate, usd) else max(late, usd / problem.budget_usd_per_h)
        return miss, *problem.key(rate, usd)

    order = sorted(found, key=key)
    own = [plan for plan in order[IMPROVED:] if plan.own][:1]
    for start in [*order[:IMPROVED], *own]:
        best, left = start, CHANGES
        while left > 0:
            splits = list(_changes(options, best))[:left]
            left -= len(splits)
            made = [plan for split in splits if (plan := place(request, options, split)) is not None]
            if best.own:
                made = [own for plan in made if (own := with_own_engine(request, plan)) is not None]
            better = min(made, key=key, default=None)
            if better is None or not key(better) < key(best):
                break
            best = better
            yield best


def _changes(options: Options, plan: Plan) -> Iterator[Split]:
    """The plan without one kind of engine; with a few engines more or less; with one engine for another; with engines
    of one kind only; with the next larger or smaller trainer, at the cost of engines of its kind, to their benefit, or
    without touching them."""
    number = {kind: k for k, (kind, _) in enumerate(options.kinds)}
    now = {(number[kind], engine.tp): n for kind, engine, n, _ in plan.replicas}
    trains = next(k for k, _ in options.trainers if options.kinds[k][0] == plan.training_kind)
    sizes = [n for k, n in options.trainers if k == trains]
    have = [sum(m.count for m in machines) for _, machines in options.kinds]

    def split(gpus: int, counts: dict[tuple[int, int], int]) -> Iterator[Split]:
        used = [sum(tp * n for (i, tp), n in counts.items() if i == k) + gpus * (k == trains) for k in range(len(have))]
        if any(counts.values()) and all(u <= h for u, h in zip(used, have, strict=True)):
            trainer = TrainOption(trains, gpus, options.trainers[trains, gpus].step_s)
            replicas = {ReplicaOption(k, tp, 1.0): n for (k, tp), n in counts.items() if n}
            yield Split(trainer=trainer, replicas=replicas, rate=0.0, usd_per_h=0.0)

    gpus = plan.training.gpus
    for k in {k for k, _ in now}:
        yield from split(gpus, {key: n for key, n in now.items() if key[0] != k})
    for key in options.replicas:
        for step in {*STEPS, now[key] // 8} - {0} if key in now else (1,):
            yield from split(gpus, {**now, key: max(0, now.get(key, 0) - step)})
            yield from split(gpus, {**now, key: now.get(key, 0) + step})
    for old in now:
        for key in options.replicas:
            if key != old:  # one engine for another
                yield from split(gpus, {**now, old: now[old] - 1, key: now.get(key, 0) + 1})
    for key in options.replicas:  # one kind instead of all others
        free = have[key[0]] - gpus * (key[0] == trains)
        yield from split(gpus, {key: free // key[1]})
    for n in sizes[max(0, sizes.index(gpus) - 1) : sizes.index(gpus) + 2]:
        if n != gpus:
            yield from split(n, now)
        for key in options.replicas:
            if n != gpus and key[0] == trains:
                free = have[trains] - n - sum(tp * c for (i, tp), c in now.items() if i == trains and tp != key[1])
                yield from split(n, {**now, key: max(0, free // key[1])})


def fixed(
    request: Request, device: str, gpus: int, counts: Mapping[tuple[Kind, int], int], *, own: bool = False
) -> Plan | None:
    """The plan in which this many GPUs of a device train, with these numbers of engines by kind and size, and with the
    trainer's own engine. None: it cannot be placed."""
    options = Options(request)
    trains = [k for k, n in options.trainers if n == gpus and options.kinds[k][0].gpu.name == device]
    plan = _placed(request, options, trains[0], gpus, counts) if trains else None
    return with_own_engine(request, plan) or plan if own and plan is not None else plan


def fixed_in(request: Request, options: Options, plan: Plan) -> Plan | None:
    """A plan for a part of the cluster, in all of it."""
    trains = [k for k, (kind, _) in enumerate(options.kinds) if kind == plan.training_kind]
    counts = {(kind, engine.tp): n for kind, engine, n, _ in plan.replicas}
    return _placed(request, options, trains[0], plan.training.gpus, counts)


def _placed(
    request: Request, options: Options, trains: int, gpus: int, counts: Mapping[tuple[Kind, int], int]
) -> Plan | None:
    number = {kind: k for k, (kind, _) in enumerate(options.kinds)}
    known = (trains, gpus) in options.trainers
    if not known or not counts or any((number[kind], tp) not in options.replicas for kind, tp in counts):
        return None
    trainer = TrainOption(trains, gpus, options.trainers[trains, gpus].step_s)
    replicas = {ReplicaOption(number[kind], tp, 1.0): n for (kind, tp), n in counts.items()}
    return place(request, options, Split(trainer=trainer, replicas=replicas, rate=0.0, usd_per_h=0.0))


class Options:
    """Trainers and replicas that fit, by kind."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.kinds: list[tuple[Kind, list[Machine]]] = list(request.cluster.kinds().items())
        self.idle = [[Placed(machine=m, training=0, replicas=()) for m in machines] for _, machines in self.kinds]
        self.graphs = [_graph(request, machines) for _, machines in self.kinds]
        self.fastest = [max(map(max, graph.network)) for graph in self.graphs]
        """The fastest link between two machines of a kind. What a plan has is known when it is placed."""
        self.trainers: dict[tuple[int, int], Training] = {}
        self.replicas: dict[tuple[int, int], Replica] = {}
        why: dict[str, list[str]] = {"train": [], "generate": []}
        for k, (kind, machines) in enumerate(self.kinds):
            have, largest = sum(m.count for m in machines), max(m.count for m in machines)
            if not kind.can_train:
                reason = f"is started by {kind.provider}" if kind.lease == "reserved" else "can be taken away"
                why["train"].insert(0, f"{kind.name} {reason}, so it cannot train")
            for n in _trainer_sizes(have) if kind.can_train else ():
                try:
                    self.trainers[k, n] = training(request, kind, n, largest, self.fastest[k])
                except DoesNotFit as e:
                    why["train"].append(str(e))
            for tp in request.replica_sizes(kind):
                if tp <= largest:
                    try:
                        self.replicas[k, tp] = cost_model.replica(request.work, kind.gpu, tp, request.efficiency)
                    except DoesNotFit as e:
                        why["generate"].append(str(e))
        for part, fitting in (("train", self.trainers), ("generate", self.replicas)):
            if not fitting:
                raise self._nothing_fits(part, why[part][-1])

    def _nothing_fits(self, part: str, why: str) -> WindfallError:
        fix = "Use GPUs with more memory, or more of them; or train adapters, or set train.offload = true."
        if part == "generate":
            fix = 'Use GPUs with more memory, engine = "vllm", which spans several GPUs, or a lower rollout.max_tokens.'
        if part == "train" and not any(kind.can_train for kind, _ in self.kinds):
            fix = "Add a reserved machine for the trainer."
        if "is not known" in why:
            fix = "Run any recipe on it for a few steps, and give --measured RUN; see docs/plan.md."
        elif math.isfinite(self.request.budget_usd_per_h):
            fix = f"{fix[:-1]}. A higher --budget may also help."
        what = f"no GPU of this cluster can {part} this model: {why}"
        return WindfallError(what, where="cluster", fix=fix)

    def first_step_s(self, crowded: bool) -> float:
        """Step time of an engine to begin the search with: all GPUs share the responses, or one engine has all."""
        w, gpus = self.request.work, self.request.cluster.gpus
        (_, tp), engine = next(iter(self.replicas.items()))
        batch = in_flight(w) if crowded else max(1.0, 2 * in_flight(w) * tp / gpus)
        return step_time(engine, min(batch, engine.slots), w)

    def problem(self, step_s: float) -> Problem:
        """The search with engines that take this long for a step."""
        r, w = self.request, self.request.work
        replicas, tail_s = [], math.inf
        for (k, tp), engine in self.replicas.items():
            batch = max(1.0, min(batch_at(engine, step_s, w), in_flight(w)))
            replicas.append(ReplicaOption(k, tp, engine.tok_per_s(batch, w) * useful_share(r, self.kinds[k][0])))
            tail_s = min(tail_s, w.longest_tokens * step_time(engine, 1.0, w) / (w.staleness + 1))
        links = r.cluster.links
        pull_s = cost_model.pull_s(w, [(links.pull, 1)] if links.pull else [], 1, local=0 if links.pull else 1)
        return Problem(
            have=tuple(sum(m.count for m in ms) for _, ms in self.kinds),
            usd_per_h=tuple(price(r, kind) for kind, _ in self.kinds),
            trainers=tuple(TrainOption(k, n, t.step_s) for (k, n), t in self.trainers.items()),
            replicas=tuple(replicas), tokens=w.tokens, tail_s=max(tail_s, pull_s) if w.staleness else tail_s,
            update_s=w.reward_s + (0.0 if w.staleness else pull_s),
            overlapped=w.staleness > 0, hidden=PIPELINED, objective=r.objective, budget_usd_per_h=r.budget_usd_per_h,
            deadline_rate=w.steps / (3600 * r.deadline_h) if r.deadline_h else 0.0,
        )  # fmt: skip


def _graph(request: Request, machines: list[Machine]) -> partition.Graph:
    """Machines of one kind and their links."""
    names = list(dict.fromkeys(m.zone for m in machines))
    between = [[request.cluster.links.between(a, b, same_type=True) for b in names] for a in names]
    return partition.Graph(
        machines=tuple(m.count for m in machines), zones=tuple(names.index(m.zone) for m in machines),
        link=machines[0].gpu.link, network=tuple(map(tuple, between)),
    )  # fmt: skip


def training(request: Request, kind: Kind, gpus: int, per_machine: int, network: float) -> Training:
    """The fastest layout on this many GPUs, with this many in one machine and this bandwidth between machines; raises
    DoesNotFit."""
    w, e = request.work, request.efficiency
    if not request.can.megatron:
        return cost_model.fsdp(w, kind.gpu, gpus, per_machine, network, e)
    made: list[Training] = []
    refused = DoesNotFit(f"no layout of {gpus} {kind.gpu.name} fits")
    for tp in (1, 2, 4, 8):
        for pp in (1, 2, 4, 7, 8):
            if gpus % (tp * pp) == 0:
                try:
                    made.append(cost_model.megatron(w, kind.gpu, gpus // tp // pp, tp, pp, per_machine, network, e))
                except DoesNotFit as error:
                    refused = error
    try:
        made.append(cost_model.fsdp(w, kind.gpu, gpus, per_machine, network, e))
    except DoesNotFit as error:
        refused = error
    if not made:
        raise refused
    return min(made, key=lambda t: t.step_s)


def _trainer_sizes(have: int) -> Iterator[int]:
    """Every number up to 64, then steps of 8, then steps of 64: about 150 sizes for 4,096 GPUs."""
    n = 1
    while n <= have:
        yield n
        n += 1 if n < 64 else 8 if n < 256 else 64


def _of_each_zone(machines: Sequence[Machine]) -> list[Machine]:
    """One machine of every zone: links depend on nothing else."""
    return list({m.zone: m for m in machines}.values())


def place(request: Request, options: Options, split: solvers.Split) -> Plan | None:
    found: dict[int, partition.Partition] = {}
    trained = options.trainers[split.trainer.kind, split.trainer.gpus]
    sources: list[Machine] = []
    # The trainer first: other kinds are then placed near it.
    for k in sorted(range(len(options.kinds)), key=lambda k: k != split.trainer.kind):
        kind, machines = options.kinds[k]
        train = split.trainer.gpus if k == split.trainer.kind else 0
        if not train and not any(option.kind == k for option in split.replicas):
            continue
        rates = {m.zone: request.cluster.pull_rate(m, sources) for m in _of_each_zone(machines)} if sources else {}
        near = [rates[m.zone] for m in machines] if sources else []
        made = _partition(request, options, split, k, near)
        if made is None:
            return None
        found[k] = made
        if train:
            sources = [m for m, n in zip(machines, made.training, strict=True) if n]
            most, room = max(made.training), max(m.count for m in machines)
            if most < train and (most < room or made.slowest < options.fastest[k]):
                try:
                    trained = training(request, kind, train, most, made.slowest)
                except DoesNotFit:
                    return None
    placed: list[Placed] = []
    for k, (_, machines) in enumerate(options.kinds):
        if k not in found:
            placed += options.idle[k]
            continue
        rows = zip(machines, found[k].training, found[k].replicas, strict=True)
        placed += [Placed(machine=machine, training=own, replicas=row) for machine, own, row in rows]
    counts = Counter((k, tp) for k, made in found.items() for row in made.replicas for tp in row)
    if not counts:
        return None
    engines = [(options.replicas[key], n) for key, n in counts.items()]
    return score(request, placed, engines, [options.kinds[k][0] for k, _ in counts], trained)


def _partition(
    request: Request, options: Options, split: solvers.Split, k: int, near: list[float]
) -> partition.Partition | None:
    """The GPUs of one kind. Replicas that cannot be placed are broken up, the largest first, or left out."""
    sizes = [o.tp for o, n in split.replicas.items() for _ in range(n) if o.kind == k]
    train = split.trainer.gpus if split.trainer.kind == k else 0
    found = partition.partition(options.graphs[k], train, sizes, near=near)
    while found is None and sizes:
        sizes.sort()
        largest = sizes.pop()
        half = [s for s in request.replica_sizes(options.kinds[k][0]) if s < largest and (k, s) in options.replicas]
        sizes += [max(half)] * (largest // max(half)) if half else []
        found = partition.partition(options.graphs[k], train, sizes, near=near)
    return found


def _nothing(request: Request, problem: Problem) -> WindfallError:
    if math.isfinite(request.budget_usd_per_h):
        least = min(t.gpus * problem.usd_per_h[t.kind] for t in problem.trainers)
        least += min(r.tp * problem.usd_per_h[r.kind] for r in problem.replicas)
        what = f"${request.budget_usd_per_h:.2f} per hour is not enough: a trainer and one replica cost ${least:.2f}"
        return WindfallError(what, where="--budget", fix="Raise the budget, or use cheaper GPUs.")
    if request.objective == "deadline":
        what = f"{request.work.steps} steps in {request.deadline_h:g} h are not possible on this cluster"
        return WindfallError(what, where="--deadline", fix="Allow more time, or add GPUs.")
    what = "training and rollout do not fit on this cluster at the same time"
    return WindfallError(what, where="cluster", fix="Add GPUs: one replica is needed besides the trainer.")
