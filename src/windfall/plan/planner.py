"""From a cluster and a workload to a list of plans, best first. Pure.

    1  options   trainers and replicas that fit in memory, with the cost model's times
    2  search    counts per kind (plan/search.py). A replica's speed depends on its batch, and the batch on how many
                 replicas there are, so search and speeds are repeated until nothing new is found
    3  place     individual GPUs (plan/partition.py); replicas that cannot be placed are replaced by smaller ones
    4  score     the placed plan with its true links and batches; plans are sorted by this

Rules: spot machines never train. A trainer uses GPUs of one type. A replica stays inside one machine. Only what
`Capabilities` lists is planned; by default that is what windfall runs: FSDP, and engines on one GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from windfall.errors import WindfallError
from windfall.plan import cost_model, partition, search
from windfall.plan.cluster import Cluster, Kind, Machine
from windfall.plan.cost_model import DoesNotFit, Efficiency, Replica, Training
from windfall.plan.search import Objective, Problem, ReplicaOption, TrainOption
from windfall.plan.workload import Workload

ROUNDS = 3
"""Repetitions of search with the batches of the last solution."""
CANDIDATES = 24
"""Solutions that are placed and scored where they are enumerated anyway."""
PIPELINED = 0.9
"""Without staleness: share of the shorter of training and generation that pipelining hides. From simulations."""
BOOT_S = 60.0
"""Seconds until a new spot machine generates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    replica_sizes: tuple[int, ...] = (1,)
    """GPUs per engine."""
    megatron: bool = False
    """Whether training may use DP x TP x PP."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpotMarket:
    """What a trace says about spot machines."""

    availability: float = 1.0
    """Share of the time in which a machine is up."""
    losses_per_h: float = 0.0
    """Losses of one machine per hour that it is up."""

    @property
    def useful(self) -> float:
        """Share of the paid time after booting."""
        return max(0.0, 1 - self.losses_per_h * BOOT_S / 3600)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    cluster: Cluster
    work: Workload
    efficiency: Efficiency
    objective: Objective = "throughput"
    budget_usd_per_h: float = math.inf
    deadline_h: float = 0.0
    spot: SpotMarket = field(default_factory=SpotMarket)
    can: Capabilities = field(default_factory=Capabilities)
    top: int = 3
    method: str = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """What one machine does."""

    machine: Machine
    training: int
    replicas: tuple[int, ...]
    """GPUs of each of its replicas."""

    @property
    def idle(self) -> int:
        return self.machine.count - self.training - sum(self.replicas)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    work: Workload
    training: Training
    replicas: tuple[tuple[Kind, Replica, int, float], ...]
    """Kind, engine, number of engines, and responses in each."""
    placed: tuple[Placed, ...]
    train_s: float
    rollout_s: float
    """Generation, rewards and weight update, per step."""
    update_s: float
    """Part of `rollout_s` that is not generation."""
    tail_s: float
    """Seconds of a step's longest responses, divided by the steps that they may span."""
    pull_s: float
    """Seconds until all workers hold new weights; hidden behind generation if the staleness is above 0."""
    step_s: float
    usd_per_h: float
    method: str
    tok_per_s: float
    """Response tokens per second."""

    @property
    def usd_per_mtok(self) -> float:
        return self.usd_per_h / 3600 / self.tok_per_s * 1e6

    @property
    def trainer_idle(self) -> float:
        return max(0.0, 1 - self.train_s / self.step_s)

    @property
    def rollout_idle(self) -> float:
        return max(0.0, 1 - self.rollout_s / self.step_s)

    @property
    def bottleneck(self) -> str:
        if not self.work.staleness:
            return "training" if self.train_s > self.rollout_s else "rollout"
        parts = {
            "training": self.train_s, "rollout": self.rollout_s, "longest responses": self.tail_s,
            "weight transfer": self.pull_s,
        }  # fmt: skip
        return max(parts, key=parts.__getitem__)

    @property
    def name(self) -> str:
        made = " + ".join(f"{n} x {r.tp} {kind.name}" for kind, r, n, _ in self.replicas)
        return f"train {self.training.gpus} {self.training.gpu.name}; roll out {made}"

    @property
    def why(self) -> str:
        train, rollout = f"training takes {self.train_s:.3g} s a step", f"generation {self.rollout_s:.3g} s"
        match self.bottleneck:
            case "training":
                return f"{train}, {rollout}: more rollout GPUs would not help"
            case "rollout":
                return f"{rollout} a step, {train}: more training GPUs would not help"
            case "weight transfer":
                return f"new weights take {self.pull_s:.3g} s to reach all workers: train on more machines"
        return f"the longest responses take {self.tail_s:.3g} s per step: raise the staleness, or use faster GPUs"


def plans(request: Request) -> list[Plan]:
    """The best plans, best first; raises WindfallError if there is none."""
    options = _Options(request)
    found: dict[str, Plan] = {}
    exact = search.combinations(options.problem(1.0)) <= search.EXACT_LIMIT
    candidates = CANDIDATES if exact and request.method in ("auto", "exact") else 1
    for crowded in (False, True):
        step_s = options.first_step_s(crowded)
        for _ in range(ROUNDS):
            splits = search.solve(options.problem(step_s), max(request.top, candidates), request.method)
            made = [plan for split in splits if (plan := _place(request, options, split)) is not None]
            new = [plan for plan in made if plan.name not in found]
            found.update((plan.name, plan) for plan in new)
            if not new:
                break
            step_s = max(_step_s(engine, batch, request.work) for _, engine, _, batch in made[0].replicas)
    problem = options.problem(options.first_step_s(True))
    allowed = [p for p in found.values() if problem.allowed(1 / p.step_s, p.usd_per_h)]
    if not allowed:
        raise _nothing(request, problem)
    return sorted(allowed, key=lambda p: problem.key(1 / p.step_s, p.usd_per_h))[: request.top]


class _Options:
    """Trainers and replicas that fit, by kind."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.kinds: list[tuple[Kind, list[Machine]]] = list(request.cluster.kinds().items())
        self.trainers: dict[tuple[int, int], Training] = {}
        self.replicas: dict[tuple[int, int], Replica] = {}
        refused: list[str] = []
        for k, (kind, machines) in enumerate(self.kinds):
            have, largest = sum(m.count for m in machines), max(m.count for m in machines)
            for n in _trainer_sizes(have) if kind.lease == "reserved" else ():
                try:
                    self.trainers[k, n] = training(request, kind, n, largest)
                except DoesNotFit as e:
                    refused.append(str(e))
            if not any(key[0] == k for key in self.trainers) and kind.lease == "spot":
                refused.append(f"{kind.name} can be taken away, so it cannot train")
            for tp in request.can.replica_sizes:
                if tp <= largest:
                    try:
                        self.replicas[k, tp] = cost_model.replica(request.work, kind.gpu, tp, request.efficiency)
                    except DoesNotFit as e:
                        refused.append(str(e))
        if not self.trainers or not self.replicas:
            part = "train" if not self.trainers else "generate"
            fix = "Use GPUs with more memory, or more of them; or train adapters, or set train.offload = true."
            why = f"no GPU of this cluster can {part} this model"
            raise WindfallError(f"{why}: {refused[-1] if refused else 'there are none'}", where="cluster", fix=fix)

    def first_step_s(self, crowded: bool) -> float:
        """Step time of an engine to begin the search with: all GPUs share the responses, or one engine has all."""
        w, gpus = self.request.work, self.request.cluster.gpus
        (_, tp), engine = next(iter(self.replicas.items()))
        batch = in_flight(w) if crowded else max(1.0, 2 * in_flight(w) * tp / gpus)
        return _step_s(engine, min(batch, engine.slots), w)

    def problem(self, step_s: float) -> Problem:
        """The search with engines that take this long for a step."""
        r, w = self.request, self.request.work
        replicas, tail_s = [], math.inf
        for (k, tp), engine in self.replicas.items():
            batch = max(1.0, min(_batch_at(engine, step_s, w), in_flight(w)))
            replicas.append(ReplicaOption(k, tp, engine.tok_per_s(batch, w) * useful_share(r, self.kinds[k][0])))
            tail_s = min(tail_s, w.longest_tokens * _step_s(engine, 1.0, w) / (w.staleness + 1))
        pull_s = cost_model.pull_s(w, r.cluster.links.across_types, 1, 1)
        return Problem(
            have=tuple(sum(m.count for m in ms) for _, ms in self.kinds),
            usd_per_h=tuple(price(r, kind) for kind, _ in self.kinds),
            trainers=tuple(TrainOption(k, n, t.step_s) for (k, n), t in self.trainers.items()),
            replicas=tuple(replicas), tokens=w.tokens, tail_s=max(tail_s, pull_s) if w.staleness else tail_s,
            update_s=w.reward_s + (0.0 if w.staleness else pull_s),
            overlapped=w.staleness > 0, hidden=PIPELINED, objective=r.objective, budget_usd_per_h=r.budget_usd_per_h,
            deadline_rate=w.steps / (3600 * r.deadline_h) if r.deadline_h else 0.0,
        )  # fmt: skip


def training(request: Request, kind: Kind, gpus: int, per_machine: int) -> Training:
    """The fastest layout on this many GPUs; raises DoesNotFit."""
    w, e, network = request.work, request.efficiency, request.cluster.links.same_type
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
    """Every number up to 16, then steps of 8, then steps that grow: about 100 sizes for 4,096 GPUs."""
    n = 1
    while n <= have:
        yield n
        n += 1 if n < 16 else 8 if n < 256 else 64


def price(request: Request, kind: Kind) -> float:
    """Expected dollars per hour of one GPU; a spot GPU is paid for while it is up."""
    return kind.usd_per_h * (request.spot.availability if kind.lease == "spot" else 1.0)


def useful_share(request: Request, kind: Kind) -> float:
    return request.spot.availability * request.spot.useful if kind.lease == "spot" else 1.0


def in_flight(work: Workload) -> float:
    """Responses that run at once, on average, if there is room for all."""
    if work.staleness:
        return work.responses * (1 + work.staleness)
    return work.responses * work.mean_tokens / max(work.mean_tokens, work.longest_tokens)


def _step_s(engine: Replica, batch: float, work: Workload) -> float:
    return engine.service.step_s(batch, 0, batch * work.mean_context)


def _batch_at(engine: Replica, step_s: float, work: Workload) -> float:
    """The batch at which a step takes this long, within the engine's room."""
    low, high = 0.0, float(engine.slots)
    if _step_s(engine, high, work) <= step_s:
        return high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _step_s(engine, middle, work) <= step_s else (low, middle)
    return low


def share_out(engines: Sequence[tuple[Replica, int]], work: Workload) -> list[float]:
    """Responses in each engine if all engines have equal step times, as balancing aims for."""
    total = min(in_flight(work), sum(e.slots * n for e, n in engines))
    low, high = 0.0, max(_step_s(e, e.slots, work) for e, _ in engines)
    for _ in range(50):
        middle = (low + high) / 2
        held = sum(n * _batch_at(e, middle, work) for e, n in engines)
        low, high = (middle, high) if held < total else (low, middle)
    return [max(_batch_at(e, high, work), min(1.0, total)) for e, _ in engines]


def _place(request: Request, options: _Options, split: search.Split) -> Plan | None:
    placed: list[Placed] = []
    counts: dict[tuple[int, int], int] = {}
    trained: Training | None = None
    links = request.cluster.links
    for k, (kind, machines) in enumerate(options.kinds):
        sizes = [o.tp for o, n in split.replicas.items() for _ in range(n) if o.kind == k]
        train = split.trainer.gpus if split.trainer.kind == k else 0
        room = [m.count for m in machines]
        found = partition.partition(room, train, sizes, link=kind.gpu.link, network=links.same_type)
        while found is None and sizes:  # break up the largest replica, or leave it out
            sizes.sort()
            largest = sizes.pop()
            half = [s for s in request.can.replica_sizes if s < largest and (k, s) in options.replicas]
            sizes += [max(half)] * (largest // max(half)) if half else []
            found = partition.partition(room, train, sizes, link=kind.gpu.link, network=links.same_type)
        if found is None:
            return None
        if train:
            trained = options.trainers[k, train]
            if max(found.training) < train and max(found.training) < max(room):
                try:
                    trained = training(request, kind, train, max(found.training))
                except DoesNotFit:
                    return None
        for machine, own, row in zip(machines, found.training, found.replicas, strict=True):
            placed.append(Placed(machine=machine, training=own, replicas=row))
            for tp in row:
                counts[k, tp] = counts.get((k, tp), 0) + 1
    return _scored(request, options, placed, counts, trained, split.method) if trained and counts else None


def _scored(
    request: Request, options: _Options, placed: Sequence[Placed], counts: Mapping[tuple[int, int], int],
    trained: Training, method: str,
) -> Plan:  # fmt: skip
    w = request.work
    engines = [(options.replicas[key], n) for key, n in counts.items()]
    kinds = [options.kinds[k][0] for k, _ in counts]
    shares = [n * useful_share(request, kind) for (_, n), kind in zip(engines, kinds, strict=True)]

    def speed(batches: Sequence[float]) -> float:
        return sum(x * e.tok_per_s(b, w) for (e, _), x, b in zip(engines, shares, batches, strict=True))

    def again(batches: Sequence[float]) -> float:
        """Seconds to compute the contexts of all running responses again, after new weights."""
        used = max(e.service.prefill_s * b * w.mean_context for (e, _), b in zip(engines, batches, strict=True))
        return used if w.staleness else 0.0

    def tail(batches: Sequence[float]) -> float:
        fastest = min(_step_s(e, b, w) for (e, _), b in zip(engines, batches, strict=True))
        return (w.longest_tokens * fastest + w.staleness * again(batches)) / (w.staleness + 1)

    full = share_out(engines, w)
    low, high = 0.0, max(_step_s(e, b, w) for (e, _), b in zip(engines, full, strict=True))
    batches, tok_per_s, again_s = full, speed(full), again(full)
    # With staleness, engines that are fast enough run fewer responses at once, and each of them is faster.
    for _ in range(20 if w.staleness else 0):
        middle = (low + high) / 2
        fewer = [max(1.0, min(_batch_at(e, middle, w), most)) for (e, _), most in zip(engines, full, strict=True)]
        if w.tokens / speed(fewer) + again(fewer) > max(trained.step_s, tail(fewer)):
            low = middle
        else:
            high, batches = middle, fewer
    tail_s = tail(batches)
    if w.tokens / speed(batches) + again(batches) < w.tokens / tok_per_s + again_s:
        tok_per_s, again_s = speed(batches), again(batches)
    away = sum(1 for p in placed if p.replicas and not p.training)
    pull_s = 0.0
    if away:
        sources = sum(1 for p in placed if p.training)
        pull_s = cost_model.pull_s(w, request.cluster.links.across_types, away, sources)
    # With staleness, engines go on while new weights arrive; then the contexts of running responses are computed again.
    update_s = w.reward_s + (again_s if w.staleness else pull_s)
    bound_s = max(tail_s, pull_s) if w.staleness else tail_s
    rate = replace(options.problem(1.0), update_s=update_s, tail_s=bound_s).rate(trained.step_s, tok_per_s)
    usd = sum((p.training + sum(p.replicas)) * price(request, p.machine.kind) for p in placed)
    return Plan(
        work=w, training=trained, placed=tuple(placed), train_s=trained.step_s,
        replicas=tuple((kind, e, n, b) for (e, n), b, kind in zip(engines, batches, kinds, strict=True)),
        rollout_s=w.tokens / tok_per_s + update_s, update_s=update_s, tail_s=tail_s, pull_s=pull_s, step_s=1 / rate,
        usd_per_h=usd, method=method, tok_per_s=rate * w.tokens,
    )  # fmt: skip


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
