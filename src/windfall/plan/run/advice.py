"""Advice during a run: observes the event log, and logs `replan` when another plan has become better.

    worker_joined, worker_left, worker_lost     what the fleet has, and at which price
    step                                        lengths; then, if conditions have changed, one evaluation

An evaluation scores the run as it is now and searches for the best plan under the conditions of now: machines that are
paid for anyway as in the section [plan], others as they are present, prices of their leases, lengths of the last steps.
How many workers of a kind pay off is the subject of the advice of controller/rollout/advisor.py; this is about who
trains and which kinds generate, so plans that differ only in numbers of workers are the same here.

A change costs time (drain, restart, pulls), and estimates are noisy. So advice is given only if the better plan is
ahead by GAIN in at least ROUNDS evaluations in a row; a change then pays for itself within an hour. After advice was
given, the next one must beat the plan that was advised.

Searching takes a moment, so it is done in a thread, and never for more than BUSY of the time. A failure here never ends
a run: the observer stops, and says so in the log.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from windfall.errors import WindfallError, last_line
from windfall.events.log import Event, EventLog
from windfall.plan.model import cluster as clusters
from windfall.plan.model import devices, measured
from windfall.plan.model.cluster import Cluster, Kind, Machine
from windfall.plan.model.inputs import recipe_workload
from windfall.plan.model.workload import Workload
from windfall.plan.run import run_log
from windfall.plan.run.run_log import is_device
from windfall.plan.search import planner
from windfall.plan.search.plan import PlanRequest, RunPlan
from windfall.recipe import Recipe
from windfall.types import LOCAL

STEPS = 4
"""Steps whose lengths count."""
CHANGED = 0.10
"""Relative change of the mean length, or of a price, after which conditions have changed."""
WORKERS_S, TRAINER_S = 60.0, 240.0
"""Seconds without progress that a change of the workers costs, and one of the trainer, which restarts the run."""
BUSY = 0.05
"""Upper limit for the share of time spent on searching."""
GAIN = 0.10
"""Smallest relative gain that is worth a change."""
ROUNDS = 3
"""Evaluations in a row in which the same plan must be ahead."""


class PresentWorker(NamedTuple):
    device: str
    lease: str
    usd_per_h: float | None

    @property
    def kind(self) -> str:
        return f"{self.lease} {self.device}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """What a plan depends on and what changes in a run."""

    workers: tuple[PresentWorker, ...]
    mean_tokens: float

    def differ(self, other: Conditions) -> str:
        """What has changed since `other`; empty: nothing that matters."""
        parts = []
        before, now = (Counter(w.kind for w in c.workers) for c in (other, self))
        for kind in dict.fromkeys([*before, *now]):
            if before[kind] != now[kind]:
                parts.append(f"{kind}: {before[kind]} -> {now[kind]} workers")
        before_usd, now_usd = ({w.kind: w.usd_per_h for w in c.workers if w.usd_per_h} for c in (other, self))
        for kind, usd in now_usd.items():
            if (was := before_usd.get(kind)) and abs(usd / was - 1) > CHANGED:
                parts.append(f"{kind}: ${was:g} -> ${usd:g} per hour")
        if other.mean_tokens and abs(self.mean_tokens / other.mean_tokens - 1) > CHANGED:
            parts.append(f"mean response: {other.mean_tokens:.0f} -> {self.mean_tokens:.0f} tokens")
        return "; ".join(parts)


class PlanAdvice(NamedTuple):
    """Another plan is better than the run as it is now."""

    now: RunPlan
    best: RunPlan
    gain: float
    """Relative gain over the run as it is, or over the plan that was advised before."""
    payback_s: float
    """Seconds after which the change has paid for itself."""


class Evaluations:
    """The plan of a run, evaluated under changing conditions. Pure but for its memory."""

    def __init__(self, recipe: Recipe, work: Workload) -> None:
        self._plan = recipe.plan
        self._work = work
        self._own = recipe.fleet.local
        self.cluster = clusters.parse(recipe.plan.cluster, "plan.cluster")
        self._advised: RunPlan | None = None
        self._ahead = ""
        self._rounds = 0
        """Evaluations in a row in which the plan `_ahead` was better by GAIN."""

    @property
    def undecided(self) -> bool:
        """A plan is ahead, but not for long enough."""
        return self._rounds > 0

    def evaluate(
        self, workers: tuple[PresentWorker, ...], lengths: list[int], steps_left: int, hours_used: float
    ) -> PlanAdvice | None:
        work = run_log.with_lengths(replace(self._work, steps=max(1, steps_left)), lengths)
        request = PlanRequest(
            cluster=self._present(workers),
            work=work,
            efficiency=measured.efficiency(),
            objective=self._plan.objective,
            budget_usd_per_h=self._plan.budget_usd_per_h or math.inf,
            deadline_h=max(1e-3, self._plan.deadline_h - hours_used) if self._plan.deadline_h else 0.0,
        )
        try:
            best = planner.plans(request)[0]
        except WindfallError:  # nothing can be planned: there is nothing to advise
            return None
        now = self._score(request, self._plan.trainer_gpus, [(w.device, w.lease, 1) for w in workers])
        if now is None:
            return None
        reference = now
        if (p := self._advised) is not None:
            kinds = [(g.kind.gpu.name, g.kind.lease, g.count) for g in p.replicas]
            advised = self._score(request, p.training.gpus, kinds)
            if advised is not None:
                reference = max(now, advised, key=lambda p: _value(request, p))
        shape, gain = _shape(best), 0.0
        if shape != _shape(reference) and _value(request, best) > 0:
            value = _value(request, reference)
            gain = _value(request, best) / value - 1 if value > 0 else math.inf
        if not self._is_lasting(shape, gain):
            return None
        self._advised = best
        if math.isinf(gain):
            return PlanAdvice(now, best, gain, payback_s=0.0)
        change_s = WORKERS_S if best.training.gpus == now.training.gpus else TRAINER_S
        return PlanAdvice(now, best, gain, payback_s=change_s * (1 + gain) / gain)

    def _is_lasting(self, shape: str, gain: float) -> bool:
        """Whether to advise a plan of this shape that is ahead by `gain` now. inf: the current plan cannot run any
        more, and there is nothing to wait for."""
        self._rounds = self._rounds + 1 if shape == self._ahead else 1
        self._ahead = shape
        if gain >= GAIN and self._rounds < ROUNDS and not math.isinf(gain):
            return False
        self._rounds = 0
        self._ahead = ""
        return gain >= GAIN

    def _present(self, workers: Iterable[PresentWorker]) -> Cluster:
        """Reserved machines as planned; all others as they are present, at the prices of now."""
        machines = [m for m in self.cluster.machines if m.lease == "reserved"]
        for w in workers:
            like = self._like(w) if w.lease != "reserved" else None
            if like is not None:
                if like.lease == "spot" and w.usd_per_h:
                    like = replace(like, gpu=replace(like.gpu, spot_usd_per_h=w.usd_per_h / like.count))
                machines.append(replace(like, name=f"w{len(machines)}", address=""))
        return replace(self.cluster, machines=tuple(machines))

    def _like(self, w: PresentWorker) -> Machine | None:
        """A machine with one engine such as this worker has: one of the cluster, or one with a known GPU."""
        known = {m.kind: m for m in self.cluster.machines}.values()
        same = [m for m in known if m.lease == w.lease and is_device(m.gpu.name, w.device)]
        if same:
            planned = min(same, key=lambda m: abs((w.usd_per_h or 0.0) - m.kind.usd_per_h))
            return replace(planned, count=self._engine_size(planned.kind))
        gpu = next((name for name in devices.TABLE if is_device(name, w.device)), None)
        if gpu is None or devices.TABLE[gpu].measured_only or w.lease not in ("spot", "borrowed"):
            return None
        return Machine(name="", gpu=devices.find(gpu), count=1, lease="spot" if w.lease == "spot" else "borrowed")

    def _engine_size(self, kind: Kind) -> int:
        """GPUs of one engine, as planned."""
        planned = [w.gpus for w in self._plan.workers if (w.device, w.lease) == (kind.gpu.name, kind.lease)]
        return planned[0] if planned else 1

    def _score(self, request: PlanRequest, gpus: int, workers: list[tuple[str, str, int]]) -> RunPlan | None:
        """The run with these trainer GPUs and these (device, lease, count) workers. None: it is not possible now."""
        counts = Counter[tuple[Kind, int]]()
        for device, lease, count in workers:
            kinds = [k for k in request.cluster.kinds() if k.lease == lease and is_device(k.gpu.name, device)]
            if not kinds:
                return None
            counts[kinds[0], self._engine_size(kinds[0])] += count
        try:
            return planner.fixed(request, self._plan.trainer_device, gpus, counts, own=self._own)
        except WindfallError:  # nothing fits any more
            return None


def _shape(plan: RunPlan) -> str:
    """Who trains and which kinds generate: plans with the same shape differ only in numbers of workers."""
    kinds = sorted({g.kind.name for g in plan.replicas})
    return f"train {plan.training.gpus} {plan.training.gpu.name}; roll out {', '.join(kinds)}"


def _value(request: PlanRequest, plan: RunPlan) -> float:
    """Higher is better; 0: the plan misses the deadline."""
    match request.objective:
        case "throughput":
            return plan.tok_per_s
        case "cost":
            return 1 / plan.usd_per_mtok
        case "deadline":
            late = plan.work.steps * plan.step_s > 3600 * request.deadline_h * 1.001
            return 0.0 if late else 1 / plan.usd_per_h


class PlanObserver:
    """A sink of the event log."""

    def __init__(self, recipe: Recipe, instant: Callable[..., None], work: Workload | None = None) -> None:
        """`instant` logs an event. `work`: by default that of the recipe."""
        work = work or recipe_workload(recipe)
        self._recipe = recipe
        self._instant = instant
        self._evaluations = Evaluations(recipe, work)
        self._workers: dict[str, PresentWorker] = {}
        self._lengths: deque[list[int]] = deque(maxlen=STEPS)
        planned = [
            PresentWorker(w.device, w.lease, w.price_usd_per_h) for w in recipe.plan.workers for _ in range(w.count)
        ]
        self._last = Conditions(workers=tuple(planned), mean_tokens=work.mean_tokens)
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
                    worker = PresentWorker(self._short(event["device"]), event["lease"], event["usd_per_h"])
                    self._workers[event["worker"]] = worker
            case "worker_left" | "worker_lost":
                self._workers.pop(event["worker"], None)
            case "step":
                self._step(event)

    def _short(self, device: str) -> str:
        """The device as the plan names it."""
        names = [m.gpu.name for m in self._evaluations.cluster.machines]
        return next((name for name in [*names, *devices.TABLE] if is_device(name, device)), device)

    def _step(self, event: Event) -> None:
        self._lengths.append(run_log.lengths_of([event]))
        self._began_s = event["t"] if self._began_s is None else self._began_s
        lengths, workers = [n for row in self._lengths for n in row], tuple(self._workers.values())
        now = Conditions(workers=workers, mean_tokens=statistics.mean(lengths) if lengths else 0.0)
        why = now.differ(self._last)
        ready = not self._searching and time.monotonic() >= self._not_before_s
        if not ready or not workers or not (why or self._evaluations.undecided):
            return
        if why:
            self._why = why
            self._last = now
        self._searching = True
        left, hours = self._recipe.run.steps - event["step"], (event["t"] - self._began_s) / 3600
        self._start(partial(self._search, workers, lengths, left, hours), event["step"])

    def _search(self, *conditions: Any) -> PlanAdvice | None:
        began_s = time.thread_time()  # other work on this machine is not this thread's
        try:
            return self._evaluations.evaluate(*conditions)
        finally:
            self._not_before_s = time.monotonic() + (time.thread_time() - began_s) / BUSY

    def _start(self, search: Callable[[], PlanAdvice | None], step: int) -> None:
        """Run a search in a thread, then `_done`."""
        future = asyncio.get_running_loop().run_in_executor(None, search)

        def finish(future: asyncio.Future[PlanAdvice | None]) -> None:
            try:
                self._done(step, future.result())
            except asyncio.CancelledError:  # the run is over
                pass
            except Exception as e:  # fault boundary: advice must never end a run; nothing more is advised
                self._instant("replan_failed", why=last_line(e))

        future.add_done_callback(finish)

    def _done(self, step: int, advice: PlanAdvice | None) -> None:
        self._searching = False
        if advice is None:
            return
        now, best, gain, payback_s = advice
        self._instant(
            "replan",
            step=step,
            plan=best.name,
            now=now.name,
            gain=gain,
            payback_s=payback_s,
            why=self._why,
            objective=self._recipe.plan.objective,
            tok_per_s_now=now.tok_per_s,
            tok_per_s_best=best.tok_per_s,
            usd_per_mtok_now=now.usd_per_mtok,
            usd_per_mtok_best=best.usd_per_mtok,
        )


def attach(recipe: Recipe, events: EventLog) -> None:
    """Advise on this run's plan from now on, if it has one."""
    if not recipe.plan.name:
        return
    try:
        events.attach(PlanObserver(recipe, events.instant))
    except WindfallError as e:
        events.instant("replan_failed", why=str(e).replace("\n", " "))
