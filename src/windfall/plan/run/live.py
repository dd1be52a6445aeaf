"""Replanning during a run: observes the event log, and logs advice when another plan has become better.

    worker_joined, worker_left, worker_lost     what the fleet has, and at which price
    step                                        lengths; then, if conditions have changed, one evaluation

An evaluation scores the run as it is now and searches for the best plan under the conditions of now: machines that are
paid for anyway as in the section [plan], others as they are present, prices of their leases, lengths of the last steps.
replan.py decides whether the difference is worth advising. How many workers of a kind pay off is the subject of
the advice of rollout/advisor.py; this is about who trains and which kinds generate, so plans that differ only in
numbers of workers are the same here.

Searching takes a moment, so it is done in a thread, and never for more than BUSY of the time. A failure here never ends
a run: the observer stops, and says so in the log.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from windfall.errors import WindfallError, last_line
from windfall.events.log import Event, EventLog
from windfall.plan.model import cluster as clusters
from windfall.plan.model import devices
from windfall.plan.model.cluster import Cluster, Kind, Machine
from windfall.plan.model.cost_model import Efficiency
from windfall.plan.model.inputs import recipe_workload
from windfall.plan.model.workload import Workload
from windfall.plan.run import run_log
from windfall.plan.run.replan import Advice, Candidate, Replanner
from windfall.plan.search import planner
from windfall.plan.search.request import Request
from windfall.plan.search.scoring import Plan
from windfall.recipe import PlannedWorkers, Recipe
from windfall.types import LOCAL

STEPS = 4
"""Steps whose lengths count."""
CHANGED = 0.10
"""Relative change of the mean length, or of a price, after which conditions have changed."""
WORKERS_S, TRAINER_S = 60.0, 240.0
"""Seconds without progress that a change of the workers costs, and one of the trainer, which restarts the run."""
BUSY = 0.05
"""Upper limit for the share of time spent on searching."""


class Worker(NamedTuple):
    """A worker that is present."""

    device: str
    lease: str
    usd_per_h: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """What a plan depends on and what changes in a run."""

    workers: tuple[Worker, ...]
    lengths: tuple[int, ...]
    steps_left: int
    hours_used: float = 0.0

    @property
    def mean_tokens(self) -> float:
        return statistics.mean(self.lengths) if self.lengths else 0.0

    def differ(self, other: Conditions) -> str:
        """What has changed since `other`; empty: nothing that matters."""
        parts = []
        before, now = (_counts(c.workers) for c in (other, self))
        for kind in dict.fromkeys([*before, *now]):
            if before.get(kind, 0) != now.get(kind, 0):
                parts.append(f"{kind}: {before.get(kind, 0)} -> {now.get(kind, 0)} workers")
        for kind, usd in _prices(self.workers).items():
            if (was := _prices(other.workers).get(kind)) and abs(usd / was - 1) > CHANGED:
                parts.append(f"{kind}: ${was:g} -> ${usd:g} per hour")
        if other.mean_tokens and abs(self.mean_tokens / other.mean_tokens - 1) > CHANGED:
            parts.append(f"mean response: {other.mean_tokens:.0f} -> {self.mean_tokens:.0f} tokens")
        return "; ".join(parts)


def _counts(workers: tuple[Worker, ...]) -> dict[str, int]:
    out: dict[str, int] = {}
    for w in workers:
        out[f"{w.lease} {w.device}"] = out.get(f"{w.lease} {w.device}", 0) + 1
    return out


def _prices(workers: tuple[Worker, ...]) -> dict[str, float]:
    return {f"{w.lease} {w.device}": w.usd_per_h for w in workers if w.usd_per_h}


class Situation:
    """The plan of a run under changing conditions. Pure."""

    def __init__(self, recipe: Recipe, work: Workload) -> None:
        self.plan, self._work, self._own = recipe.plan, work, recipe.fleet.local
        self.cluster = clusters.parse(recipe.plan.cluster, "plan.cluster")

    def request(self, now: Conditions) -> Request:
        work = run_log.with_lengths(replace(self._work, steps=max(1, now.steps_left)), now.lengths)
        hours = max(1e-3, self.plan.deadline_h - now.hours_used) if self.plan.deadline_h else 0.0
        return Request(
            cluster=self._present(now), work=work, efficiency=Efficiency(), objective=self.plan.objective,
            budget_usd_per_h=self.plan.budget_usd_per_h or float("inf"), deadline_h=hours, top=1,
        )  # fmt: skip

    def _present(self, now: Conditions) -> Cluster:
        """Reserved machines as planned, at the prices of now; all others as they are present."""
        known = {m.kind: m for m in self.cluster.machines}
        machines = [m for m in self.cluster.machines if m.lease == "reserved"]
        for w in now.workers:
            if w.lease == "reserved":
                continue
            like = self._like(w, list(known.values()))
            if like is not None:
                machines.append(replace(_at_price(like, w), name=f"w{len(machines)}", address=""))
        return replace(self.cluster, machines=tuple(machines))

    def _like(self, w: Worker, known: list[Machine]) -> Machine | None:
        """A machine with one engine such as this worker has: one of the cluster, or one with a known GPU."""
        same = [m for m in known if m.lease == w.lease and _named(m.gpu.name, w.device)]
        if same:
            planned = min(same, key=lambda m: abs((w.usd_per_h or 0.0) - m.kind.usd_per_h))
            return replace(planned, count=self.gpus_of(planned.kind))
        gpu = next((name for name in devices.TABLE if _named(name, w.device)), None)
        if gpu is None or devices.TABLE[gpu].measured_only or w.lease not in ("spot", "borrowed"):
            return None
        return Machine(name="", gpu=devices.find(gpu), count=1, lease="spot" if w.lease == "spot" else "borrowed")

    def gpus_of(self, kind: Kind) -> int:
        mine = [w.gpus for w in self.plan.workers if (w.device, w.lease) == (kind.gpu.name, kind.lease)]
        return mine[0] if mine else 1

    def score(self, request: Request, gpus: int, workers: list[tuple[str, str, int]]) -> Plan | None:
        """The run with these trainer GPUs and these (device, lease, count) workers, under present conditions."""
        counts: dict[tuple[Kind, int], int] = {}
        for device, lease, count in workers:
            kinds = [k for k in request.cluster.kinds() if k.lease == lease and _named(k.gpu.name, device)]
            if not kinds:
                return None
            counts[kinds[0], self.gpus_of(kinds[0])] = counts.get((kinds[0], self.gpus_of(kinds[0])), 0) + count
        try:
            return planner.fixed(request, self.plan.trainer_device, gpus, counts, own=self._own)
        except WindfallError:  # nothing fits any more
            return None


def _named(gpu: str, device: str) -> bool:
    """Whether a worker's device, named as in torch, is this GPU."""
    return set(re.findall(r"\w+", gpu.lower())) <= set(re.findall(r"\w+", device.lower()))


def _at_price(machine: Machine, w: Worker) -> Machine:
    if machine.lease != "spot" or not w.usd_per_h:
        return machine
    return replace(machine, gpu=replace(machine.gpu, spot_usd_per_h=w.usd_per_h / machine.count))


def shape_of(plan: Plan) -> str:
    """Who trains and which kinds generate: plans with the same shape differ only in numbers of workers."""
    kinds = sorted({kind.name for kind, *_ in plan.replicas})
    return f"train {plan.training.gpus} {plan.training.gpu.name}; roll out {', '.join(kinds)}"


class Found(NamedTuple):
    """The result of one evaluation."""

    advice: Advice
    now: Plan
    best: Plan


@dataclass(kw_only=True)
class Evaluations:
    """One evaluation after the other, with hysteresis. Pure but for its memory."""

    situation: Situation
    _replanner: Replanner = field(default_factory=lambda: Replanner(current=""))
    _advised: Plan | None = None

    @property
    def undecided(self) -> bool:
        """A plan is ahead, but not for long enough to advise it."""
        return self._replanner.undecided

    def evaluate(self, conditions: Conditions) -> Found | None:
        s = self.situation
        try:
            request = s.request(conditions)
            best = planner.plans(request)[0]
        except WindfallError:  # nothing can be planned: there is nothing to advise
            return None
        now = s.score(request, s.plan.trainer_gpus, [(w.device, w.lease, 1) for w in conditions.workers])
        if now is None:
            return None
        advised = self._again(request)
        reference = max([p for p in (now, advised) if p is not None], key=lambda p: _value(request, p))
        self._replanner.current = shape_of(reference)
        candidates = [Candidate(shape_of(p), _value(request, p)) for p in (best, reference)]
        if shape_of(best) == shape_of(reference):
            candidates = candidates[1:]
        change_s = WORKERS_S if best.training.gpus == now.training.gpus else TRAINER_S
        advice = self._replanner.observe(candidates, change_s=change_s)
        if advice is None:
            return None
        self._advised = best
        return Found(advice, now, best)

    def _again(self, request: Request) -> Plan | None:
        """The plan that was advised last, under present conditions; None: none was, or it is not possible now."""
        p = self._advised
        if p is None:
            return None
        workers = [(kind.gpu.name, kind.lease, n) for kind, _, n, _ in p.replicas]
        return self.situation.score(request, p.training.gpus, workers)


def _value(request: Request, plan: Plan) -> float:
    match request.objective:
        case "throughput":
            return plan.tok_per_s
        case "cost":
            return 1 / plan.usd_per_mtok
        case "deadline":
            late = plan.work.steps * plan.step_s > 3600 * request.deadline_h * 1.001
            return 0.0 if late else 1 / plan.usd_per_h


class Observer:
    """A sink of the event log. `submit` runs a search: `submit(search, on_result)`; by default in a thread."""

    def __init__(
        self, recipe: Recipe, instant: Callable[..., None], *, work: Workload | None = None,
        submit: Callable[[Callable[[], Found | None], Callable[[Found | None], None]], None] | None = None,
    ) -> None:  # fmt: skip
        self._recipe, self._instant = recipe, instant
        self._evaluations = Evaluations(situation=Situation(recipe, work or recipe_workload(recipe)))
        self._submit = submit or self._in_thread
        self._workers: dict[str, Worker] = {}
        self._lengths: deque[list[int]] = deque(maxlen=STEPS)
        self._last: Conditions | None = None
        """Conditions of the plan at first, then of the last evaluation."""
        self._began_s: float | None = None
        self._searching = False
        self._not_before_s = 0.0
        self._why = ""
        """What had changed before the last search."""

    def __call__(self, event: Event) -> None:
        match event["name"]:
            case "worker_joined":
                if event["worker"].partition("#")[0] != LOCAL:
                    worker = Worker(self._short(event["device"]), event["lease"], event["usd_per_h"])
                    self._workers[event["worker"]] = worker
            case "worker_left" | "worker_lost":
                self._workers.pop(event["worker"], None)
            case "step":
                self._step(event)

    def _short(self, device: str) -> str:
        """The device as the plan names it."""
        names = [m.gpu.name for m in self._evaluations.situation.cluster.machines]
        return next((name for name in [*names, *devices.TABLE] if _named(name, device)), device)

    def _step(self, event: Event) -> None:
        self._lengths.append([n for row in event.get("lengths", ()) for n in row if n])
        self._began_s = event["t"] if self._began_s is None else self._began_s
        now = Conditions(
            workers=tuple(self._workers.values()), lengths=tuple(n for row in self._lengths for n in row),
            steps_left=self._recipe.run.steps - event["step"], hours_used=(event["t"] - self._began_s) / 3600,
        )  # fmt: skip
        why = now.differ(self._last or planned_conditions(self._recipe))
        ready = not self._searching and time.monotonic() >= self._not_before_s
        if not ready or not now.workers or not (why or self._evaluations.undecided):
            return
        self._why = why or self._why
        if why:
            self._last = now
        self._searching = True

        def search() -> Found | None:
            began_s = time.thread_time()  # other work on this machine is not this thread's
            try:
                return self._evaluations.evaluate(now)
            finally:
                self._not_before_s = time.monotonic() + (time.thread_time() - began_s) / BUSY

        def done(found: Found | None) -> None:
            self._searching = False
            if found is not None:
                self._log(event["step"], found)

        self._submit(search, done)

    def _log(self, step: int, found: Found) -> None:
        a, now, best = found
        self._instant(
            "replan", step=step, plan=best.name, now=now.name, gain=a.gain, payback_s=a.payback_s, why=self._why,
            objective=self._recipe.plan.objective, tok_per_s_now=now.tok_per_s, tok_per_s_best=best.tok_per_s,
            usd_per_mtok_now=now.usd_per_mtok, usd_per_mtok_best=best.usd_per_mtok,
        )  # fmt: skip

    def _in_thread(self, search: Callable[[], Found | None], done: Callable[[Found | None], None]) -> None:
        future = asyncio.get_running_loop().run_in_executor(None, search)

        def finish(future: asyncio.Future[Any]) -> None:
            try:
                done(future.result())
            except asyncio.CancelledError:  # the run is over
                pass
            except Exception as e:  # fault boundary: advice must never end a run; nothing more is advised
                self._instant("replan_failed", why=last_line(e))

        future.add_done_callback(finish)


def planned_conditions(recipe: Recipe) -> Conditions:
    """What the plan assumed. Lengths are the quantiles of the planned distribution."""

    def quantile(n: int) -> int:
        x = statistics.NormalDist(0.0, max(1e-9, recipe.sim.sigma)).inv_cdf((n + 0.5) / 64)
        return max(1, round(min(recipe.rollout.max_tokens, recipe.sim.median_tokens * 2.718281828459045**x)))

    workers = [worker for w in recipe.plan.workers for worker in [_worker(w)] * w.count]
    return Conditions(
        workers=tuple(workers), lengths=tuple(quantile(n) for n in range(64)), steps_left=recipe.run.steps
    )


def _worker(w: PlannedWorkers) -> Worker:
    return Worker(w.device, w.lease, w.price_usd_per_h)


def attach(recipe: Recipe, events: EventLog) -> None:
    """Advise on this run's plan from now on, if it has one."""
    if not recipe.plan.name:
        return
    try:
        events.attach(Observer(recipe, events.instant))
    except WindfallError as e:
        events.instant("replan_failed", why=str(e).replace("\n", " "))
