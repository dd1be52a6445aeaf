"""One trial: a small run drawn from a seed, hit by faults drawn from the same seed, with every rule checked between any
two callbacks; and the same run left alone, to which its steps are compared.

    trial(seed) ──▶ recipe(seed) ──▶ disturbed run ──▶ n steps ──▶ undisturbed run of n steps ──▶ the same batches

The same seed gives the same event log, byte for byte.
"""

from __future__ import annotations

import json
import traceback
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from windfall import config
from windfall.config import Recipe
from windfall.events.log import Event
from windfall.sim.chaos import bill_invariant
from windfall.sim.chaos.broken import InvariantBroken
from windfall.sim.chaos.faults import Fault, draw
from windfall.sim.chaos.inject import Chaos, all_up
from windfall.sim.chaos.invariants import Rules, compare
from windfall.sim.core import run, scenario
from windfall.sim.core.service import uniform

LAST = 12
"""Events shown with a rule that is broken."""
STEPS = 100_000
"""More than any trial makes: it is stopped when its faults are over."""
SAID = ("reward", "responses", "groups", "drawn", "missing", "mean_length", "cut", "made", "trained")
"""What the log says of a step that must not depend on faults."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialResult:
    seed: int
    faults: Counter[str]
    looked: int
    steps: int
    controllers: int
    trainers: int
    virtual_s: float
    broken: InvariantBroken | None = None
    last: tuple[str, ...] = ()
    """The last events before it broke."""


def recipe(seed: int) -> Recipe:
    """A small run, other with every seed: shape, algorithm, techniques, delays."""

    def pick(name: str, *choices: Any) -> Any:
        return choices[int(uniform(f"{seed}/recipe/{name}") * len(choices))]

    said = {
        "run": {"steps": STEPS, "seed": seed, "deterministic": pick("order", True, False)},
        "rollout": {"groups": pick("groups", 2, 4, 6), "group_size": pick("size", 2, 4), "max_tokens": 48},
        "algorithm": {"name": pick("algorithm", "grpo", "grpo", "dapo", "reinforce_pp")},
        "train": {"micro_tokens": pick("micro", 60, 200), "minibatches": pick("minibatches", 1, 1, 1, 2)},
        "eval": {"tasks": pick("eval", 0, 3), "every": 3},
        "checkpoint": {"every": pick("checkpoint", 1, 2, 4)},
        "fleet": {"local": pick("local", True, True, False), "heartbeat_s": 0.3, "suspect_s": 1.0, "gone_s": 2.5,
                  "stalled_s": 5.0, "trainer_price_usd_per_h": 80.0},
        "trace": {"nodes": pick("nodes", 4, 6, 8), "price_usd_per_h": 5.0, "mean_up_s": 1e9},
        "techniques": {"seeding": pick("seeding", True, True, False), "balancing": pick("balancing", True, True, False),
                       "pipelining": pick("pipelining", True, True, False)},
        "sim": {
            "granule": pick("granule", 1, 1, 3), "boot_s": 0.3, "weights_bytes": 1e8, "egress_bytes_per_s": 2e9,
            "ingress_bytes_per_s": 1e9, "latency_s": pick("latency", 0.0, 0.0, 0.01, 0.05), "prompt_tokens": 9,
            "median_tokens": 16.0, "reward_s": pick("reward", 0.0, 0.05), "save_s": pick("save", 0.0, 0.1),
            "trainer_slots": 8, "worker_slots": pick("slots", 2, 6), "worker_spread": 0.3,
            "trainer_down_s": pick("trainer", 0.5, 2.0), "controller_down_s": pick("controller", 0.2, 1.0),
            "trainer": {"fixed_s": 0.03, "each_s": 0.002, "prefill_s": 1e-4, "train_s": 0.0004, "update_s": 0.05},
            "worker": {"fixed_s": 0.03, "each_s": 0.002, "prefill_s": 1e-4},
        },
    }  # fmt: skip
    return config.parse(said, where=f"chaos, seed {seed}")


def trial(seed: int, *, faults: int, folder: Path) -> TrialResult:
    made = recipe(seed)
    hit = _Run(made, draw(seed), faults, folder / f"{seed}.jsonl")
    broken = hit.go()
    if broken is None:
        broken = _compared(made, hit, folder / f"{seed}.calm.jsonl")
    simulation, rules = hit.simulation, hit.rules
    return TrialResult(
        seed=seed, faults=hit.chaos.done, looked=rules.looked, steps=len(rules.batches), controllers=simulation.lives,
        trainers=simulation.learner.lives, virtual_s=hit.end_s, broken=broken,
        last=tuple(json.dumps(e)[:300] for e in hit.last) if broken else (),
    )  # fmt: skip


def _compared(made: Recipe, hit: _Run, log: Path) -> InvariantBroken | None:
    """With the same run, left alone."""
    steps = max(hit.rules.batches, default=0)
    if not steps:
        return InvariantBroken("progress", "it made no step at all")
    calm = _Run(made.model_copy(update={"run": made.run.model_copy(update={"steps": steps})}), iter(()), 0, log)
    try:
        if broken := calm.go():
            return broken
        for ran in (calm, hit):
            ran.bill()
        for step in range(1, steps + 1):
            compare(step, calm.rules.batches[step], hit.rules.batches[step])
            said = hit.rules.told.get(step)
            for name in SAID if said else ():  # else the controller was killed before it heard that the step is done
                a, b = calm.rules.told[step][name], said[name]
                if a != b and not (isinstance(a, float) and abs(a - b) < 1e-9):
                    raise InvariantBroken("batch", f"step {step}: {name} is {b}, and {a} if left alone")
    except InvariantBroken as e:
        return e
    return None


class _Run:
    """A run with its faults and rules."""

    def __init__(self, made: Recipe, faults: Iterator[Fault], count: int, log: Path) -> None:
        self._made, self._faults, self._count, self._log = made, faults, count, log
        self.last: deque[Event] = deque(maxlen=LAST)
        self.end_s, self._over = 0.0, False
        self.rules: Any = None

    def go(self) -> InvariantBroken | None:
        w = replace(scenario.build(self._made), changes=all_up(self._made.trace.nodes), drawn_s=float("inf"))
        try:
            run.simulate(w, self._log, sink=self._heard, disturb=self._begin, journal=True, between=self._look)
        except InvariantBroken as e:
            return e
        except Exception as e:  # fault boundary: whatever the product raises, the seed that made it do so is told
            where = "\n".join(traceback.format_tb(e.__traceback__)[-6:])
            return InvariantBroken("no error", f"{type(e).__name__}: {e}\n{where}")
        return None

    def bill(self) -> None:
        rules, stays = self.rules, self.simulation.stays
        bill_invariant.check(self._log, births=rules.births, trainers=rules.started, stays=stays)

    def _begin(self, simulation: run.Simulation) -> None:
        self.simulation, self.chaos = simulation, Chaos(simulation, self._faults, self._count)
        self.rules = Rules(self.chaos)

    def _look(self) -> None:
        if self.rules is not None:
            try:
                self.rules.check()
            except InvariantBroken:
                self._over = True
                raise

    def _heard(self, event: Event) -> None:
        if self._over:  # what is said while everything is being taken down
            return
        self.end_s = event["m"]
        self.last.append(event)
        self.rules.heard(event)
        self.chaos.heard(event)
