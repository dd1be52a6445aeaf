"""`python -m tests.chaos`: trials with several seeds. It prints the injected faults by kind and the verdict, and if an
invariant is broken, the seed and the last events before that.

A trial is a small run and its faults, both drawn from one seed. Every invariant is checked after every callback.

    trial(seed) ──▶ recipe(seed) ──▶ disturbed run ──▶ n steps ──▶ undisturbed run of n steps ──▶ the same batches

With staleness 0, the steps of the run are compared with those of the same run without faults. With a higher staleness,
batches depend on the timing, so only the rules of asynchronous training are checked (staleness_invariants.py).

With several policies, all of them speak in every session: adapters on one base, full weights on bases of their own, or
both. Each of them has a batch size of its own, and with a higher staleness its own bound. The third may be frozen.

The same seed gives the same event log, byte for byte.
"""

from __future__ import annotations

import io
import json
import time
import traceback
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.support.request_load import GeneratedLoad
from benchmarks.support.sim_lenders import Lenders, with_lenders
from tests.chaos import InvariantBroken, bill_invariant
from tests.chaos.faults import KINDS, Fault, draw
from tests.chaos.inject import FaultInjector
from tests.chaos.invariants import Invariants, compare
from tests.support.fleets.restarts import RestartingSimulation
from tests.support.fleets.virtual_loop import CheckedLoop
from windfall.errors import WindfallError
from windfall.events.log import Event
from windfall.providers.trace_formats import Change
from windfall.recipe.file import parse_recipe
from windfall.recipe.sections import Recipe
from windfall.serve.slo import Objectives
from windfall.sim.core import run, scenario
from windfall.sim.core.draws import uniform
from windfall.sim.report.compare import output_folder
from windfall.step_time import StepTime

LAST_EVENTS = 12
"""Number of events shown with a broken invariant."""
STEPS = 100_000
"""More steps than any trial completes: a trial is stopped after its last fault."""
COMPARED_FIELDS = ("reward", "responses", "groups", "drawn", "mean_length", "cut", "trained")
"""Fields of a step event that must not depend on faults."""
ALONE_FIELDS = ("missing", "made")
"""The same with one policy. With several, these cover the time since the last step of any of them."""
NAMES = ("solver", "verifier", "critic")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialResult:
    seed: int
    policies: int
    faults: Counter[str]
    """Injected faults by kind."""
    checks: int
    """Number of times that the invariants were checked."""
    steps: int
    controllers: int
    """Controller processes started."""
    trainers: int
    """Trainer processes started."""
    virtual_s: float
    broken: InvariantBroken | None = None
    last_events: tuple[str, ...] = ()
    """The last events before the invariant broke."""


def main(*, seeds: int, seed: int, faults: int, policies: Sequence[int] = (1,), out: Path | None = None) -> None:
    """Stop at the first broken invariant. `policies`: numbers of policies, used in turn. `out`: folder for the event
    logs."""
    began, done = time.perf_counter(), list[TrialResult]()
    with output_folder(out) as folder, redirect_stderr(io.StringIO()):  # injected faults print their tracebacks
        for n in range(seed, seed + seeds):
            done.append(trial(n, faults=faults, folder=folder, policies=policies[n % len(policies)]))
            if done[-1].broken is not None:
                break
    print("\n".join(summary(done)))
    last = done[-1]
    if last.broken is not None:
        print("\n".join(["the last events:", *last.last_events]))
        several = f" --policies {last.policies}" if last.policies > 1 else ""
        again = f"python -m tests.chaos --seed {last.seed} --seeds 1 --faults {faults}{several} --out chaos"
        raise WindfallError(f"seed {last.seed}: {last.broken}", where="tests.chaos", fix=f"Replay it: {again}")
    print(f"passed: no invariant was broken in {_count(len(done), 'run')} ({time.perf_counter() - began:.1f} s)")


def summary(done: list[TrialResult]) -> list[str]:
    count = sum((o.faults for o in done), Counter[str]())
    controllers, trainers = (sum(o.controllers for o in done) - len(done), sum(o.trainers for o in done) - len(done))
    return [
        *(f"{kind:14}{count[kind]:8,}" for kind in KINDS),
        f"{_count(count.total(), 'fault')} in {_count(len(done), 'run')} of {sum(o.virtual_s for o in done):,.0f} "
        f"virtual s: {_count(sum(o.steps for o in done), 'step')}, {_count(controllers, 'controller')} and "
        f"{_count(trainers, 'trainer')} lost; {_count(sum(o.checks for o in done), 'callback')}, with all invariants "
        "checked after each",
    ]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _pick(seed: int | str, name: str, *choices: Any) -> Any:
    return choices[int(uniform(f"{seed}/recipe/{name}") * len(choices))]


def recipe(seed: int, policies: int = 1) -> Recipe:
    """A small run. Its shape, algorithm, techniques and delays depend on the seed."""

    pick = partial(_pick, seed)
    staleness = pick("staleness", 0, 0, 1, 2, 4)
    sections = {
        "run": {"steps": STEPS, "seed": seed, "deterministic": staleness == 0 and pick("order", True, False)},
        "rollout": {"groups": pick("groups", 2, 4, 6), "group_size": pick("size", 2, 4), "max_tokens": 48,
                    "staleness": staleness, "on_new_weights": pick("weights", "interrupt", "finish")},
        "algorithm": {"name": pick("algorithm", "grpo", "grpo", "dapo", "reinforce_pp")},
        "train": {"micro_tokens": pick("micro", 60, 200), "minibatches": pick("minibatches", 1, 1, 1, 2)},
        "eval": {"tasks": pick("eval", 0, 3), "every": 3},
        "checkpoint": {"every": pick("checkpoint", 1, 2, 4)},
        "fleet": {"local": pick("local", True, True, False), "heartbeat_s": 0.3, "suspect_s": 1.0, "gone_s": 2.5,
                  "stalled_s": 5.0, "trainer_price_usd_per_h": 80.0, "borrowed_max": pick("borrowed", 1, 64)},
        "trace": {"nodes": pick("nodes", 4, 6, 8), "price_usd_per_h": 5.0, "mean_up_s": 1e9},
        "weights": {"peers": pick("peers", "auto", "auto", "auto", "off"), "region": "a",
                    "bucket": pick("bucket", "", "file:///bucket")},
        "techniques": {"trainer_generates": pick("seeding", True, True, False),
                       "balancing": pick("balancing", True, True, False),
                       "pipelining": pick("pipelining", True, True, False)},
        "sim": {
            "granule": pick("granule", 1, 1, 3), "boot_s": 0.3, "weights_bytes": 1e8, "egress_bytes_per_s": 2e9,
            "delta_bytes": pick("delta", 0.0, 1e7),
            "regions": [{"name": r, "bytes_per_s": 5e8, "latency_s": 0.05} for r in pick("regions", "", "ab", "abb")],
            "ingress_bytes_per_s": 1e9, "latency_s": pick("latency", 0.0, 0.0, 0.01, 0.05), "prompt_tokens": 9,
            "turns": pick("turns", 1.0, 1.0, 2.5), "env_s": 0.3, "env_sigma": 0.8, "observation_tokens": 5,
            "observation_sigma": 0.5,
            "median_tokens": 16.0, "reward_s": pick("reward", 0.0, 0.05), "save_s": pick("save", 0.0, 0.1),
            "trainer_slots": 8, "worker_slots": pick("slots", 2, 6), "worker_spread": 0.3,
            "trainer": {"fixed_s": 0.03, "each_s": 0.002, "prefill_s": 1e-4, "train_s": 0.0004, "update_s": 0.05},
            "worker": {"fixed_s": 0.03, "each_s": 0.002, "prefill_s": 1e-4},
        },
    }  # fmt: skip
    if policies > 1:
        _add_policies(sections, seed, NAMES[:policies])
    return parse_recipe(sections, where=f"chaos, seed {seed}")


def _add_policies(sections: dict[str, Any], seed: int, names: Sequence[str]) -> None:
    bases = _pick(seed, "bases", "adapters", "adapters", "full", "mixed")
    staleness, script = sections["rollout"]["staleness"], [[name, 1.0] for name in names]
    sections["policies"], sections["fleet"]["local"], sections["sim"]["turns"] = {}, False, 1.0
    for n, name in enumerate(names):
        pick = partial(_pick, f"{seed}/{name}")
        parts = sections["train"]["minibatches"]
        rollout = {"groups": parts * pick("groups", 1, 2, 3)}
        if staleness:
            rollout["staleness"] = pick("staleness", 1, 2, staleness)
        if n == 2 and pick("frozen", False, False, True):
            sections["policies"][name] = {"frozen": True}
            continue
        full = bases == "full" or (bases == "mixed" and n == 0)
        sections["policies"][name] = {
            "rollout": rollout, "algorithm": pick("algorithm", "", "", "dapo"), "eval": {"tasks": pick("eval", 0, 3)},
            **({} if full else {"lora": {"rank": 4}}),
        }  # fmt: skip
    more = [[role, 0.5] for role in _pick(seed, "script", (), (names[0],), (f"{names[0]}:again",))]
    sections["sim"]["script"] = script + more


def lenders(seed: int) -> Lenders | None:
    """Small lenders, in two of five trials: a burst of requests takes most of their memory."""
    load = _pick(seed, "lenders", None, None, None, (1.0, 4.0), (6.0, 8.0))
    if load is None:
        return None
    per_s, peak = load
    return Lenders(
        count=3, serving=StepTime(fixed_s=0.03, each_s=0.002, prefill_s=1e-4), slots=4, kv_tokens=400,
        serving_kv_tokens=4000, objectives=Objectives(max_slowdown=1.0),
        load=GeneratedLoad(seed=seed, per_s=per_s, peak=peak, prompt_tokens=200.0, generated_tokens=20.0),
    )  # fmt: skip


def trial(seed: int, *, faults: int, folder: Path, policies: int = 1) -> TrialResult:
    small_run = recipe(seed, policies)
    disturbed = _ChaosRun(small_run, draw(seed), faults, folder / f"{seed}.jsonl")
    broken = disturbed.run()
    if broken is None:
        calm_log = None if is_asynchronous(small_run) else folder / f"{seed}.calm.jsonl"
        broken = _check_ended(small_run, disturbed, calm_log)
    simulation, invariants = disturbed.simulation, disturbed.invariants
    return TrialResult(
        seed=seed,
        policies=policies,
        faults=disturbed.injector.done,
        checks=invariants.checks,
        steps=len(invariants.batches),
        controllers=simulation.controller_starts,
        trainers=sum(simulation.trainers[base].starts for base in small_run.bases()) - len(small_run.bases()) + 1,
        virtual_s=disturbed.end_s,
        broken=broken,
        last_events=tuple(json.dumps(e)[:300] for e in disturbed.last_events) if broken else (),
    )


def _check_ended(small_run: Recipe, disturbed: _ChaosRun, calm_log: Path | None) -> InvariantBroken | None:
    """Check what can be checked only when the run has ended. `calm_log`: if given, also run the same recipe without
    faults, write its events to this log, and compare every step."""
    batches = disturbed.invariants.batches
    trained = filter(small_run.is_trained, small_run.names())
    steps = {name: max((step for of, step in batches if of == name), default=0) for name in trained}
    if not all(steps.values()):
        return InvariantBroken("progress", f"steps completed: {steps}")
    try:
        disturbed.check_ended()
        if calm_log is None:
            return None
        calm = _ChaosRun(scenario.with_keys(small_run, {"run": {"steps": max(steps.values())}}), iter(()), 0, calm_log)
        if broken := calm.run():
            return broken
        calm.check_ended()
        for policy, step in sorted(batches):
            compare(policy, step, calm.invariants.batches[policy, step], batches[policy, step])
            event = disturbed.invariants.step_events.get((policy, step))
            fields = COMPARED_FIELDS if policy else COMPARED_FIELDS + ALONE_FIELDS
            for name in fields if event else ():  # no event: the controller was killed before it wrote one
                a, b = calm.invariants.step_events[policy, step][name], event[name]
                if a != b and not (isinstance(a, float) and abs(a - b) < 1e-9):
                    raise InvariantBroken("batch", f"step {step}: {name} is {b}, but {a} without faults")
    except InvariantBroken as e:
        return e
    return None


def is_asynchronous(recipe: Recipe) -> bool:
    return any(recipe.of(name).rollout.staleness for name in recipe.names())


class ChaosLoop(CheckedLoop):
    def run_forever(self) -> None:
        """Check nothing while the tasks that are left are cancelled."""
        try:
            super().run_forever()
        finally:
            self.between(None)


class _ChaosRun:
    """A simulated run with its faults and invariants."""

    def __init__(self, recipe: Recipe, faults: Iterator[Fault], count: int, log: Path) -> None:
        self._recipe = recipe
        self._faults = faults
        self._count = count
        self.log = log
        self.last_events: deque[Event] = deque(maxlen=LAST_EVENTS)
        self.end_s = 0.0
        self._failed = False
        self.invariants: Any = None

    def run(self) -> InvariantBroken | None:
        # All machines come up at the start; only faults take them down.
        changes = tuple(Change(at_s=0.0, node=f"n{n + 1}", up=True) for n in range(self._recipe.trace.nodes))
        built = replace(scenario.build(self._recipe), changes=changes, trace_s=float("inf"))
        if lending := lenders(self._recipe.run.seed):
            built = with_lenders(built, lending)
        try:
            loop = ChaosLoop()
            loop.between(self._check)
            options = {"make": RestartingSimulation, "loop": loop}
            run.simulate(built, self.log, sink=self._on_event, disturb=self._start, **options)
        except InvariantBroken as e:
            return e
        except Exception as e:  # fault boundary: any error in windfall is reported together with its seed
            where = "\n".join(traceback.format_tb(e.__traceback__)[-6:])
            return InvariantBroken("no error", f"{type(e).__name__}: {e}\n{where}")
        return None

    def check_ended(self) -> None:
        starts = self.invariants.controller_starts, self.invariants.trainer_starts
        stays = [*self.simulation.stays, *self.simulation.fleet.lender_stays]
        bill_invariant.check(self.log, *starts, stays)

    def _start(self, simulation: RestartingSimulation) -> None:
        self.simulation = simulation
        seed = self._recipe.run.seed
        for trainer in simulation.trainers.values():
            trainer.down_s = _pick(seed, "trainer", 0.5, 2.0)
        simulation.controller_down_s = _pick(seed, "controller", 0.2, 1.0)
        self.injector = FaultInjector(simulation, self._faults, self._count)
        self.invariants = Invariants(self.injector)

    def _check(self) -> None:
        if self.invariants is not None:
            try:
                self.invariants.check()
            except InvariantBroken:
                self._failed = True
                raise

    def _on_event(self, event: Event) -> None:
        if self._failed:  # events of the shutdown
            return
        self.end_s = event["m"]
        self.last_events.append(event)
        self.invariants.on_event(event)
        self.injector.on_event(event)
