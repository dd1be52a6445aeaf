"""A plan with its predicted times, costs and bottleneck: scored from where its GPUs really are. Pure.

The batch of an engine follows from the number of engines, and its speed from the batch, so a plan is scored as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from windfall.plan.model import cost_model
from windfall.plan.model.cluster import Kind, Machine
from windfall.plan.model.cost_model import Replica, Training
from windfall.plan.model.workload import Workload
from windfall.plan.search.request import Request, price, useful_share
from windfall.plan.search.solvers import Problem

PIPELINED = 0.9
"""Without staleness: share of the shorter of training and generation that pipelining hides. From simulations."""


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
    """All GPUs that are used, and traffic between zones."""
    traffic_usd_per_h: float
    tok_per_s: float
    """Response tokens per second."""
    own: Replica | None = None
    """The trainer's own engine, if it generates as well (`fleet.local`)."""

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
        if not self.work.staleness:
            return "training" if self.train_s > self.rollout_s else "rollout"
        parts = {
            "training": self.train_s, "rollout": self.rollout_s, "longest responses": self.tail_s,
            "weight transfer": self.pull_s,
        }  # fmt: skip
        return max(parts, key=parts.__getitem__)

    @property
    def name(self) -> str:
        """The plan in words. "roll out 4 H100 + 2 x 4 L40S spot" ends with two engines of four GPUs each."""
        made = [f"{n} x {r.tp} {kind.name}" if r.tp > 1 else f"{n} {kind.name}" for kind, r, n, _ in self.replicas]
        own = " + the trainer's own engine" if self.own else ""
        return f"train {self.training.gpus} {self.training.gpu.name}; roll out {' + '.join(made)}{own}"

    @property
    def counts(self) -> frozenset[tuple[Kind, int, int]]:
        """What tells plans apart: kind, GPUs per engine (0: the trainer, -1: its own engine), and number. Names do not,
        because kinds that differ only in price or provider have the same one."""
        engines = {(kind, r.tp, n) for kind, r, n, _ in self.replicas}
        own = {(self.training_kind, -1, 1)} if self.own else set[tuple[Kind, int, int]]()
        return frozenset({(self.training_kind, 0, self.training.gpus), *engines, *own})

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


def pull_s(request: Request, placed: Sequence[Placed]) -> float:
    """Seconds until all engines hold new weights."""
    work, links = request.work, request.cluster.links
    if links.pull:  # measured, with other pulls beside it
        return work.update_bytes / (links.pull * cost_model.LINK_SHARE)
    sources = [p.machine for p in placed if p.training]
    away, local = list[tuple[float, float]](), 0
    for p in placed:
        if not p.replicas:
            continue
        if p.training:
            local = max(local, len(p.replicas))
        engines = float(len(p.replicas))
        others = [m for m in sources if m.name != p.machine.name]
        if p.training:  # the part of the weights that is on the trainer's other machines
            engines *= len(others) / len(sources)
        if engines:
            away.append((request.cluster.pull_rate(p.machine, others), engines))
    return cost_model.pull_s(work, away, len(sources), local)


def pull_alone(request: Request, placed: Sequence[Placed]) -> float:
    """Seconds of a pull if no other engine pulls: on the slowest of the links that are used."""
    work = request.work
    if request.cluster.links.pull:
        return work.update_bytes / (request.cluster.links.pull * cost_model.LINK_SHARE)
    sources = [p.machine for p in placed if p.training]
    away = [p.machine for p in placed if p.replicas and not p.training]
    rates = [request.cluster.pull_rate(m, sources) for m in away]
    return cost_model.pull_s(work, [(min(rates), 1)], 1) if rates else work.update_bytes / cost_model.LOOPBACK


def traffic_usd(request: Request, placed: Sequence[Placed], trained: Training) -> float:
    """Dollars per step for traffic between zones: every pull of an engine in a zone in which nothing trains, and the
    rings of a trainer in several zones, which leave every zone once."""
    links, sources = request.cluster.links, {p.machine.zone for p in placed if p.training}
    gb = request.work.pull_bytes / 1e9
    usd = sum(len(p.replicas) * gb * min(links.price(p.machine.zone, z) for z in sources) for p in placed if p.replicas)
    if len(sources) > 1:
        order = sorted(sources)
        ring = zip(order, [*order[1:], order[0]], strict=True)
        usd += trained.sent_bytes / 1e9 * sum(links.price(a, b) for a, b in ring)
    return usd


def score(
    request: Request, placed: Sequence[Placed], engines: Sequence[tuple[Replica, int]], kinds: Sequence[Kind],
    trained: Training, own: Replica | None = None,
) -> Plan:  # fmt: skip
    """The plan with its predicted times and costs. `engines`: with their numbers; `kinds`: the kind of each; `own`: the
    trainer's own engine, if it generates while the trainer would wait."""
    w = request.work
    weights_s = pull_s(request, placed)
    # The last group of a step is trained after its longest response has ended, then the weights are published.
    last_s = trained.update_s + (trained.step_s - trained.update_s) * min(1.0, trained.last_share)
    run = [*engines, *([(own, 1)] if own else [])]
    shares = [n * useful_share(request, kind) for (_, n), kind in zip(engines, kinds, strict=True)] + [1.0] * bool(own)

    def speed(batches: Sequence[float]) -> float:
        """Tokens per second. The trainer's own engine generates until training and generation would end together."""
        speeds = [x * e.tok_per_s(b, w) for (e, _), x, b in zip(run, shares, batches, strict=True)]
        if own is None:
            return sum(speeds)
        workers = sum(speeds[:-1])
        share = speeds[-1] / workers
        alone_s = w.tokens / workers
        own_s = max(0.0, alone_s - trained.step_s) / (1 + share)
        return w.tokens / (alone_s - share * own_s)

    def again(batches: Sequence[float]) -> float:
        """Seconds to compute the contexts of all running responses again, after new weights."""
        used = max(e.service.prefill_s * b * w.mean_context for (e, _), b in zip(run, batches, strict=True))
        return used if w.staleness else 0.0

    def tail(batches: Sequence[float]) -> float:
        fastest = min(step_time(e, b, w) for (e, _), b in zip(run, batches, strict=True))
        around_s = weights_s + last_s if w.staleness else 0.0
        return (w.longest_tokens * fastest + around_s + w.staleness * again(batches)) / (w.staleness + 1)

    full = share_out(run, w)
    low, high = 0.0, max(step_time(e, b, w) for (e, _), b in zip(run, full, strict=True))
    batches, tok_per_s, again_s = full, speed(full), again(full)
    # With staleness, engines that are fast enough run fewer responses at once, and each of them is faster.
    for _ in range(20 if w.staleness else 0):
        middle = (low + high) / 2
        fewer = [max(1.0, min(batch_at(e, middle, w), most)) for (e, _), most in zip(run, full, strict=True)]
        if w.tokens / speed(fewer) + again(fewer) > max(trained.step_s, tail(fewer)):
            low = middle
        else:
            high, batches = middle, fewer
    tail_s = tail(batches)
    if w.tokens / speed(batches) + again(batches) < w.tokens / tok_per_s + again_s:
        tok_per_s, again_s = speed(batches), again(batches)
    # With staleness, engines go on while new weights arrive; then the contexts of running responses are computed again.
    update_s = w.reward_s + (again_s if w.staleness else weights_s)
    bound_s = max(tail_s, weights_s) if w.staleness else tail_s
    problem = Problem(
        have=(), usd_per_h=(), trainers=(), replicas=(), tokens=w.tokens, update_s=update_s, tail_s=bound_s,
        overlapped=w.staleness > 0, hidden=PIPELINED,
    )  # fmt: skip
    rate = float(problem.rate(trained.step_s, tok_per_s))
    used = [p for p in placed if p.training or p.replicas]
    usd = sum((p.training + sum(p.replicas)) * price(request, p.machine.kind) for p in used)
    traffic = traffic_usd(request, placed, trained) * 3600 * rate
    return Plan(
        work=w, training=trained, placed=tuple(placed), train_s=trained.step_s,
        replicas=tuple((kind, e, n, b) for (e, n), b, kind in zip(engines, batches, kinds, strict=False)),
        rollout_s=w.tokens / tok_per_s + update_s, update_s=update_s, tail_s=tail_s, pull_s=weights_s, step_s=1 / rate,
        usd_per_h=usd + traffic, traffic_usd_per_h=traffic, tok_per_s=rate * w.tokens, own=own,
    )  # fmt: skip
