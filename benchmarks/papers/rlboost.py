"""RLBoost's Algorithms 1 and 2 as published, for comparison with windfall's own rules in simulated runs: set
`Scenario.rules` to one of RULES.

- Algorithm 1 chooses T_seed. It changes T_seed by the imbalance of the last step divided by eta, remembers the T_seed
  that worked for each fleet size, and bounds the number of instances that are worth having.
- Algorithm 2 (`select` and `balance`) places and moves responses.

    select    Choose the worker with the fewest pending responses among those with fewer than THETA. If there is none,
              hold the response back.
    balance   If one worker has no pending responses and another has some, move one from the worker with the most. If no
              worker has any and one is idle, reduce the batch of the busiest worker to B, the size with which it has
              nearly its highest throughput, and move the rest.

The paper leaves some points open. They are resolved here as follows:
- A response is pending if a worker's engine holds it but does not run it. No worker gets more responses than it has
  slots, so there is usually no pending response. Workers with equally many pending responses are compared by their
  load, executing / slots. So the trainer's machine, which stands for several of the paper's instances, gets its share.
- THETA is 8: of 1, 8 and 32, no value was better in benchmarks/fleet/balance.py.
- B is the knee of the profile that was measured for that worker (worker_speed.py).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from windfall.controller.assembly import Rules
from windfall.controller.ledger.ledger import Ledger
from windfall.controller.scheduling.balance import Held, Move, Running, WorkerLoad
from windfall.controller.scheduling.local_time import (
    GENERATE_ALL,
    LocalPlan,
    LocalTimePolicy,
    RemoteFleet,
    StepMeasurement,
)
from windfall.controller.scheduling.placement import Placement
from windfall.recipe.sections import Recipe
from windfall.sim.core import scenario
from windfall.sim.core.scenario import Scenario
from windfall.sim.report import variants
from windfall.step_time import StepTime

THETA = 8
KNEE = 0.8
"""Share of the highest throughput that defines the knee."""
SAME = 1e-3
"""Mean numbers of workers that differ by less than this count as equal; the difference is a rounding error."""


@dataclass(slots=True)
class Algorithm1(LocalTimePolicy):
    """T_seed follows the imbalance of the last step. It is planned once per step."""

    first_s: float = 150.0
    """T_init: T_seed of the first step, in seconds."""
    eta: float = 3.0
    local_s: float = field(init=False)
    """T_seed in seconds."""
    memory: dict[int, float] = field(default_factory=dict)
    """T_seed by number of workers."""
    remembers: bool = True

    def __post_init__(self) -> None:
        self.local_s = self.first_s

    def plan(self, last: StepMeasurement | None, fleet: RemoteFleet) -> LocalPlan:
        if last is not None and last.workers > 0 and math.isfinite(last.local_s):
            self.local_s = max(0.0, self.local_s + (last.train_wait_s - last.remote_wait_s) / self.eta)
            if abs(last.workers - fleet.workers) < SAME and self.remembers:
                self.memory[fleet.workers] = self.local_s
        if fleet.workers == 0:
            return GENERATE_ALL
        self.local_s = self.memory.get(fleet.workers, self.local_s)
        why = f"from the imbalance of earlier steps, {fleet.workers} workers"
        return LocalPlan(local_s=self.local_s, why=why)


def knee(time: StepTime) -> int:
    """The batch size with 0.8 of the highest throughput of any batch; twice this size gives a ninth more.

    >>> knee(StepTime(fixed_s=0.002, each_s=0.00001))
    800
    """
    return max(1, round(KNEE / (1 - KNEE) * time.fixed_s / time.each_s))


def select(
    queued: Sequence[str], loads: Sequence[WorkerLoad], *, coming: int = 0,
    move_targets: Mapping[str, str] | None = None,
) -> list[tuple[str, str]]:  # fmt: skip
    """Algorithm 2, placement: (response, worker) for as many queued responses as there is room for. `move_targets`: the
    worker to which a response is being moved. `coming`: workers about to be ready; their share is held back.

    >>> select(["1/0", "1/1"], [WorkerLoad(worker="a", running=3, slots=8), WorkerLoad(worker="b", running=1, slots=8)])
    [('1/0', 'b'), ('1/1', 'b')]
    """
    targets, index = move_targets or {}, {load.worker: n for n, load in enumerate(loads)}
    if coming and loads:
        slots = min(load.slots for load in loads)
        loads = [*loads, *(WorkerLoad(worker="", running=0, slots=slots) for _ in range(coming))]
    running = [load.running for load in loads]

    def rank(n: int) -> tuple[int, float, int]:
        return loads[n].waiting, running[n] / loads[n].slots, n

    heap = [rank(n) for n, load in enumerate(loads) if load.waiting < THETA and load.running < load.slots]
    heapq.heapify(heap)
    out: list[tuple[str, str]] = []
    held_back = 0
    while len(out) + held_back < len(queued):
        id = queued[len(out)]
        n = index.get(targets.get(id, ""), -1)
        if n < 0 or running[n] >= loads[n].slots:
            while heap and heap[0] != rank(heap[0][2]):  # its load has changed since the entry was pushed
                n = heapq.heappop(heap)[2]
                if running[n] < loads[n].slots:
                    heapq.heappush(heap, rank(n))
            if not heap:
                break
            n = heap[0][2]
        running[n] += 1
        if loads[n].worker:
            out.append((id, loads[n].worker))
        else:
            held_back += 1
    return out


def balance(loads: Sequence[WorkerLoad], held: Held) -> list[Move]:
    """Algorithm 2, rebalancing.

    >>>     >>> profile = StepTime(fixed_s=0.004, each_s=0.002)
    >>> loads = [WorkerLoad(worker=w, running=n, slots=99, profile=profile) for w, n in (("a", 10), ("b", 0))]
    >>> knee(profile), [m.id for m in balance(loads, lambda w: [Running(id=f"{i}/0", context=5) for i in range(10)])]
    (8, ['0/0', '1/0'])
    """
    if len(loads) < 2:
        return []
    most = max(loads, key=lambda load: load.waiting)
    if most.waiting:
        target = next((x for x in loads if not x.waiting and x.running < x.slots and x is not most), None)
        waiting = [r for r in held(most.worker) if r.waiting]
        return _moves(most, target, waiting[:1]) if target is not None else []
    idle = next((load for load in loads if not load.running and load.slots), None)
    busiest = max(loads, key=lambda load: load.running)
    if idle is None or busiest.profile is None:
        return []
    above = max(0, busiest.running - knee(busiest.profile))
    return _moves(busiest, idle, held(busiest.worker)[: min(above, idle.slots)])


def _moves(source: WorkerLoad, target: WorkerLoad, chosen: Sequence[Running]) -> list[Move]:
    return [Move(id=r.id, source=source.worker, target=target.worker, gain_s=0.0, cost_s=0.0) for r in chosen]


class Algorithm2(Placement):
    def __init__(self, ledger: Ledger, *, balancing: bool = True, affinity: bool = True, **options: Any) -> None:
        del affinity, options  # the algorithm knows neither prefix caches nor turns nor lengths
        super().__init__(ledger, balancing=balancing, affinity=False)

    def choose(
        self, queued: Sequence[str], loads: Sequence[WorkerLoad], *, backlog: int, coming: int
    ) -> list[tuple[str, str]]:
        del backlog
        return select(queued, loads, coming=coming, move_targets=self.move_targets)

    def moves(self, loads: Sequence[WorkerLoad]) -> list[Move]:
        return balance(loads, self.held)


RULES = {
    "algorithm1": Rules(local_time=Algorithm1),
    "algorithm2": Rules(placement=Algorithm2),
    "rlboost": Rules(local_time=Algorithm1, placement=Algorithm2),
    "rlboost without memory": Rules(local_time=partial(Algorithm1, remembers=False), placement=Algorithm2),
}


def build(recipe: Recipe, name: str) -> Scenario:
    """The scenario of a recipe with one of RULES, or of one of the simulator's own variants."""
    if name in RULES:
        return replace(scenario.build(recipe), rules=RULES[name])
    return scenario.build(variants.apply(recipe, name))
