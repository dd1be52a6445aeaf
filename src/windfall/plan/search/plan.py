"""What is asked of the planner, and a plan with its predicted times, costs and bottleneck. Pure.

A plan is scored from where its GPUs really are. The batch of an engine follows from the number of engines, and its
speed from the batch, so a plan is scored as a whole.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from windfall.plan.model import cost_model
from windfall.plan.model.cluster import Cluster, ClusterMachine, Kind
from windfall.plan.model.cost_model import LINK_SHARE, REPLICA_SIZES, Efficiency, PlannedTrainer, Replica, ZonePull
from windfall.plan.model.workload import Workload
from windfall.plan.search.frontier import Objective, steps_per_s

BOOT_S = 60.0
"""Seconds until the worker of a new spot machine connects, unless the recipe sets `sim.boot_s`."""
LOSSES_PER_H = 0.36
"""Losses of a spot machine per hour, if no trace is given: the mean of two public traces (docs/fleet-traces.md)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpotMarket:
    """What a trace says about spot machines."""

    availability: float = 1.0
    """Share of the time in which a machine is up."""
    losses_per_h: float = 0.0
    """Losses of one machine per hour that it is up."""
    boot_s: float = BOOT_S
    assumed: bool = False
    """No trace was given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    cluster: Cluster
    work: Workload
    efficiency: Efficiency
    objective: Objective = "throughput"
    budget_usd_per_h: float = math.inf
    deadline_h: float = 0.0
    spot: SpotMarket = field(default_factory=SpotMarket)
    top: int = 3

    def replica_sizes(self, kind: Kind) -> tuple[int, ...]:
        """GPUs that one engine on machines of this kind may span. Only vLLM spans several."""
        return REPLICA_SIZES if kind.engine == "vllm" else (1,)

    def price(self, kind: Kind) -> float:
        """Expected dollars per hour of one GPU; a spot GPU is paid for while it is up."""
        return kind.usd_per_h * (self.spot.availability if kind.lease == "spot" else 1.0)

    def useful_share(self, kind: Kind) -> float:
        """Share of an engine's speed that the run gets. A lender serves others. A spot machine is away at times; after
        each loss it boots and pulls a full copy of the weights."""
        if kind.lease == "borrowed":
            return kind.lent
        if kind.lease != "spot":
            return 1.0
        first_pull_s = self.work.weights_bytes / (self.cluster.links.across_types * LINK_SHARE)
        lost = self.spot.losses_per_h * (self.spot.boot_s + first_pull_s) / 3600
        return self.spot.availability * max(0.0, 1 - lost)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedMachine:
    """What one machine does."""

    machine: ClusterMachine
    training: int = 0
    replicas: tuple[int, ...] = ()
    """GPUs of each of its engines."""

    @property
    def used(self) -> int:
        """GPUs that train or generate."""
        return self.training + sum(self.replicas)


class PlannedEngines(NamedTuple):
    """Equal engines."""

    kind: Kind
    engine: Replica
    count: int
    batch: float = 0.0
    """Responses in each of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    work: Workload
    training: PlannedTrainer
    replicas: tuple[PlannedEngines, ...]
    placed: tuple[PlacedMachine, ...]
    rollout_s: float
    """Generation, rewards and weight update, per step. Without workers, the trainer stands still for this time."""
    tail_s: float
    """Seconds of a step's longest responses, divided by the steps that they may span."""
    pull_s: float
    """Seconds until all workers hold new weights; hidden behind generation if the staleness is above 0."""
    step_s: float
    usd_per_h: float
    """All GPUs that are used, and traffic between zones."""
    traffic_usd_per_h: float
    tok_per_s: float
    """Response tokens per second."""
    own: Replica | None = None
    """The trainer's own engine, if it generates as well (`fleet.local`)."""

    @property
    def train_s(self) -> float:
        return self.training.step_s

    @property
    def engines(self) -> list[Replica]:
        """One of each kind. The trainer's own is the last."""
        return [g.engine for g in self.replicas] + ([self.own] if self.own is not None else [])

    @property
    def training_kind(self) -> Kind:
        return next(p.machine.kind for p in self.placed if p.training)

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
        if not (self.work.staleness and self.replicas):
            return "training" if self.train_s > self.rollout_s else "rollout"
        parts = {
            "training": self.train_s,
            "rollout": self.rollout_s,
            "longest responses": self.tail_s,
            "weight transfer": self.pull_s,
        }
        return max(parts, key=parts.__getitem__)

    @property
    def why(self) -> str:
        train, rollout = f"training takes {self.train_s:.3g} s a step", f"generation {self.rollout_s:.3g} s"
        if not self.replicas:
            return f"{train} and {rollout}, in turn on the same GPUs: a GPU that only generates would overlap them"
        match self.bottleneck:
            case "training":
                return f"{train}, {rollout}: more rollout GPUs would not help"
            case "rollout":
                return f"{rollout} a step, {train}: more training GPUs would not help"
            case "weight transfer":
                return f"new weights take {self.pull_s:.3g} s to reach all workers: the slowest link limits them"
        return f"the longest responses take {self.tail_s:.3g} s per step: raise the staleness, or use faster GPUs"

    @property
    def name(self) -> str:
        """The plan in words. "roll out 4 H100 + 2 x 4 L40S spot" ends with two engines of four GPUs each."""
        made = [f"{n} x {r.tp} {kind.name}" if r.tp > 1 else f"{n} {kind.name}" for kind, r, n, _ in self.replicas]
        made += ["the trainer's own engine"] if self.own else []
        return f"train {self.training.gpus} {self.training.gpu.name}; roll out {' + '.join(made)}"

    @property
    def counts(self) -> frozenset[tuple[Kind, int, int]]:
        """What tells plans apart: kind, GPUs per engine (0: the trainer, -1: its own engine), and number. Names do not,
        because kinds that differ only in price or provider have the same one."""
        engines = {(kind, r.tp, n) for kind, r, n, _ in self.replicas}
        own = {(self.training_kind, -1, 1)} if self.own else set[tuple[Kind, int, int]]()
        return frozenset({(self.training_kind, 0, self.training.gpus), *engines, *own})


def in_flight(work: Workload) -> float:
    """Responses that run at once, on average, if there is room for all."""
    if work.staleness:
        return work.responses * (1 + work.staleness)
    return work.responses * work.mean_tokens / max(work.mean_tokens, work.longest_tokens)


def step_time(engine: Replica, batch: float, work: Workload) -> float:
    """Seconds of an engine step with this many responses of mean context."""
    return engine.service.step_s(batch, batch * work.mean_context)


def batch_at(engine: Replica, step_s: float, work: Workload) -> float:
    """The batch at which a step takes this long, within the engine's room. Step times are two lines in the batch."""
    e, context = engine.service, work.mean_context
    each_s = e.each_s + e.context_s * context
    batch = (step_s - e.fixed_s) / each_s if each_s else math.inf if step_s >= e.fixed_s else 0.0
    if e.over_s and batch > e.over_batch:
        bend_s = e.fixed_s + each_s * e.over_batch
        batch = e.over_batch + (step_s - bend_s) / (each_s + e.over_s)
    return max(0.0, min(batch, float(engine.slots)))


def share_out(engines: Sequence[tuple[Replica, int]], work: Workload) -> list[float]:
    """Responses in each engine if all engines have equal step times, as balancing aims for."""
    total = min(in_flight(work), sum(e.slots * n for e, n in engines))
    low, high = 0.0, max(step_time(e, e.slots, work) for e, _ in engines)
    for _ in range(50):
        middle = (low + high) / 2
        held = sum(n * batch_at(e, middle, work) for e, n in engines)
        low, high = (middle, high) if held < total else (low, middle)
    return [max(batch_at(e, high, work), min(1.0, total)) for e, _ in engines]


def pull_s(request: PlanRequest, placed: Sequence[PlacedMachine]) -> float:
    """Seconds until all engines hold new weights."""
    work, links = request.work, request.cluster.links
    if links.pull:  # measured, with other pulls beside it
        return work.update_bytes / (links.pull * LINK_SHARE)
    bandwidth, pull_rate = request.cluster.bandwidth, request.cluster.pull_rate
    sources = [p.machine for p in placed if p.training]
    local = max([len(p.replicas) for p in placed if p.training], default=0)
    zones = list[ZonePull]()
    for p in placed:  # the part of the weights that is on the trainer's other machines
        others = [m for m in sources if m.name != p.machine.name]
        if p.training and p.replicas and others:
            share = len(others) / len(sources)
            zones.append(ZonePull(pull_rate(p.machine, others), engines=len(p.replicas), share=share))
    for zone in dict.fromkeys(p.machine.zone for p in placed):
        readers = [p for p in placed if p.replicas and not p.training and p.machine.zone == zone]
        if readers:
            first, rest = readers[0].machine, [p.machine for p in readers[1:]]
            zones.append(
                ZonePull(
                    max(pull_rate(p.machine, sources) for p in readers),
                    engines=max(len(p.replicas) for p in readers),
                    machines=len(readers),
                    inside=min((bandwidth(first, machine) for machine in rest), default=math.inf),
                )
            )
    return cost_model.pull_s(work, zones, len(sources), local)


def pull_alone(request: PlanRequest, placed: Sequence[PlacedMachine]) -> float:
    """Seconds of a pull if no other engine pulls: on the slowest of the links that are used."""
    work = request.work
    if request.cluster.links.pull:
        return work.update_bytes / (request.cluster.links.pull * LINK_SHARE)
    sources = [p.machine for p in placed if p.training]
    rates = [request.cluster.pull_rate(p.machine, sources) for p in placed if p.replicas and not p.training]
    return cost_model.pull_s(work, [ZonePull(min(rates))], 1) if rates else work.update_bytes / cost_model.LOOPBACK


def traffic_usd(request: PlanRequest, placed: Sequence[PlacedMachine], trained: PlannedTrainer) -> float:
    """Dollars per step for traffic between zones: one copy of new weights for each zone in which nothing trains (its
    engines pass it on), and the rings of a trainer in several zones, which leave every zone once."""
    links, sources = request.cluster.links, {p.machine.zone for p in placed if p.training}
    engines = Counter[str]()
    for p in placed:
        engines[p.machine.zone] += len(p.replicas)
    usd = request.work.pull_bytes / 1e9 * sum(
        min(links.price(zone, source) for source in sources) + (count - 1) * links.price(zone, zone)
        for zone, count in engines.items() if count
    )  # fmt: skip
    if len(sources) > 1:
        order = sorted(sources)
        ring = zip(order, [*order[1:], order[0]], strict=True)
        usd += trained.sent_bytes / 1e9 * sum(links.price(a, b) for a, b in ring)
    return usd


def score(
    request: PlanRequest,
    placed: Sequence[PlacedMachine],
    engines: Sequence[PlannedEngines],
    trained: PlannedTrainer,
    own: Replica | None = None,
) -> RunPlan:
    """The plan with its predicted times and costs. `own`: the trainer's own engine, if it generates while the trainer
    would wait; without other engines, it generates everything. With staleness it rests if a run is faster so."""
    w = request.work
    weights_s = pull_s(request, placed)
    # The last group of a step is trained after its longest response has ended, then the weights are published.
    last_s = trained.update_s + (trained.step_s - trained.update_s) * min(1.0, trained.last_share)
    run = [(g.engine, g.count) for g in engines] + ([(own, 1)] if own else [])
    shares = [g.count * request.useful_share(g.kind) for g in engines] + [1.0] * bool(own)

    def speed(batches: Sequence[float]) -> float:
        """Tokens per second. The trainer's own engine generates until training and generation would end together: a
        step lasts as long as if it generated all the time, and had to generate also what it misses while the trainer
        trains."""
        speeds = [x * e.tok_per_s(b, w) for (e, _), x, b in zip(run, shares, batches, strict=True)]
        if own is None:
            return sum(speeds)
        together = sum(speeds) * w.tokens / (w.tokens + speeds[-1] * trained.step_s)
        return max(sum(speeds[:-1]), together)

    def prefill_again_s(batches: Sequence[float]) -> float:
        """Seconds to compute the contexts of all running responses again, after new weights."""
        used = max(e.service.prefill_s * b * w.mean_context for (e, _), b in zip(run, batches, strict=True))
        return used if w.staleness else 0.0

    def tail(batches: Sequence[float]) -> float:
        times = [step_time(e, b, w) for (e, _), b in zip(run, batches, strict=True)]
        # With staleness, long responses are on the trainer's own engine, too, and stand still while the trainer trains.
        still = own is not None and (w.staleness > 0 or not engines)
        around_s = weights_s + last_s if w.staleness else 0.0
        end_s = w.longest_tokens * (times[-1] if still else min(times)) + around_s
        return (end_s + w.staleness * prefill_again_s(batches)) / (w.staleness + 1) + still * trained.step_s

    full = share_out(run, w)
    low, high = 0.0, max(step_time(e, b, w) for (e, _), b in zip(run, full, strict=True))
    batches, tok_per_s, prefill_s = full, speed(full), prefill_again_s(full)
    # With staleness, engines that are fast enough run fewer responses at once, and each of them is faster.
    for _ in range(20 if w.staleness else 0):
        middle = (low + high) / 2
        fewer = [max(1.0, min(batch_at(e, middle, w), most)) for (e, _), most in zip(run, full, strict=True)]
        if w.tokens / speed(fewer) + prefill_again_s(fewer) > max(trained.step_s, tail(fewer)):
            low = middle
        else:
            high, batches = middle, fewer
    tail_s = tail(batches)
    if w.tokens / speed(batches) + prefill_again_s(batches) < w.tokens / tok_per_s + prefill_s:
        tok_per_s, prefill_s = speed(batches), prefill_again_s(batches)
    # With staleness, engines go on while new weights arrive; then the contexts of running responses are computed again.
    update_s = w.reward_s + (prefill_s if w.staleness else weights_s)
    bound_s = max(tail_s, weights_s) if w.staleness else tail_s
    # Without other engines, the time of generation has that of training in it.
    overlapping_s = trained.step_s if engines else 0.0
    rate = steps_per_s(overlapping_s, tok_per_s, w.tokens, update_s, bound_s, w.staleness > 0)
    usd = sum(p.used * request.price(p.machine.kind) for p in placed if p.used)
    traffic = traffic_usd(request, placed, trained) * 3600 * rate
    plan = RunPlan(
        work=w,
        training=trained,
        placed=tuple(placed),
        replicas=tuple(g._replace(batch=b) for g, b in zip(engines, batches, strict=False)),
        rollout_s=w.tokens / tok_per_s + update_s - (trained.step_s - overlapping_s),
        tail_s=tail_s,
        pull_s=weights_s,
        step_s=1 / rate,
        usd_per_h=usd + traffic,
        traffic_usd_per_h=traffic,
        tok_per_s=rate * w.tokens,
        own=own,
    )
    if own is not None and engines and w.staleness:
        resting = score(request, placed, engines, trained)
        return replace(resting, own=own) if resting.tok_per_s > plan.tok_per_s else plan
    return plan
