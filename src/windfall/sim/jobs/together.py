"""Several jobs on the same machines in virtual time: one controller for each, and devices that they take in turns.

Machines have names, and those with the same name are the same machine: the trainer's, the workers w1, w2, ... that
stay, and the nodes of the trace. Every job has a worker on each of them, and its trainer on the trainer's.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from windfall.errors import WindfallError
from windfall.events.log import Sink
from windfall.recipe.sections import Recipe
from windfall.sim.core import loop as loops
from windfall.sim.core.run import Simulation, quiet_collector
from windfall.sim.core.scenario import Scenario, build
from windfall.sim.jobs.devices import JobTurn, SimDevice
from windfall.sim.machines.turn import SimTurn, TurnTaker
from windfall.turns.accounts import DeviceAccounts
from windfall.turns.sharing import SLICE_S
from windfall.types import LOCAL

TRAINER = "trainer"
"""Name of the device of the trainer and of its own engine."""
SAME_KEYS = {
    "fleet": ("trainer_price_usd_per_h", "price_usd_per_h"),
    "trace": (
        "nodes", "mean_up_s", "mean_down_s", "seed", "file", "start_s", "speedup", "price_usd_per_h",
    ),
}  # fmt: skip
"""Keys of the machines, which all recipes must agree on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimJob:
    name: str
    scenario: Scenario
    share: float = 1.0
    priority: int = 0


class JobEnd(NamedTuple):
    end_s: float
    """When it ended (virtual seconds after the start)."""
    real_tokens: int
    used_s: float
    """Device seconds of its turns."""
    usd: float
    """What these device seconds cost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """What one simulation of one or several jobs took."""

    jobs: dict[str, JobEnd]
    seconds: float
    """The time at which the last job ended."""
    paid_s: float
    """Device seconds of all machines that were there."""
    usd: float
    """What these machines cost. 0: no price is known."""

    @property
    def busy(self) -> float:
        """Share of the paid device seconds in which a job had the turn."""
        return sum(job.used_s for job in self.jobs.values()) / max(1e-9, self.paid_s)

    @property
    def real_tokens(self) -> int:
        return sum(job.real_tokens for job in self.jobs.values())


def jobs_of(
    recipes: Sequence[tuple[str, Recipe]], shares: Sequence[float] = (), priorities: Sequence[int] = ()
) -> list[SimJob]:
    """The jobs of these recipes, each with the file that it is from. Rejects those that cannot share machines.
    `shares`, `priorities`: of the jobs in this order; empty: all are equal."""
    first_file, first = recipes[0]
    for file, recipe in recipes:
        _check(file, recipe)
        for section, keys in SAME_KEYS.items():
            for key in keys:
                if getattr(getattr(recipe, section), key) != getattr(getattr(first, section), key):
                    what = f"{section}.{key} differs from that in {first_file}"
                    raise WindfallError(what, where=file, fix="Give all recipes the same machines and prices.")
    trace = build(first)  # the trace depends on the seed of the run, too
    out: list[SimJob] = []
    for n, (_, recipe) in enumerate(recipes):
        same = sum(job.scenario.real.run.name == recipe.run.name for job in out)
        name = f"{recipe.run.name}-{same + 1}" if same else recipe.run.name
        scenario = replace(build(recipe), changes=trace.changes, trace_s=trace.trace_s)
        share, priority = shares[n] if shares else 1.0, priorities[n] if priorities else 0
        out.append(SimJob(name=name, scenario=scenario, share=share, priority=priority))
    return out


def _check(file: str, recipe: Recipe) -> None:
    if recipe.policies:
        fix = "Simulate this recipe alone."
        raise WindfallError("recipes with [policies] cannot be simulated beside others", where=file, fix=fix)
    if recipe.sim.seconds:
        fix = "Set sim.seconds = 0, and run.steps."
        raise WindfallError("sim.seconds ends a run before its work is done", where=file, fix=fix)
    if recipe.fleet.workers_max:
        fix = "Set fleet.workers_max = 0."
        raise WindfallError("jobs that share machines are simulated without autoscaling", where=file, fix=fix)


def simulate(
    jobs: Sequence[SimJob], folder: Path, *, machines_of: Sequence[SimJob] = (), slice_s: float = SLICE_S,
    sink: Sink | None = None,
) -> Shared:  # fmt: skip
    """Simulate these jobs side by side until all have ended. Each one's event log is `folder`/NAME.jsonl.
    `machines_of`: the jobs whose machines are there and paid for, if these are more than `jobs`. `slice_s`: the least
    seconds of a turn of generation; a turn is not shorter than the time in which workers report."""
    scenarios = [job.scenario for job in machines_of or jobs]
    slice_s = max(slice_s, *(scenario.quantum_s for scenario in scenarios))
    folder.mkdir(parents=True, exist_ok=True)

    async def main(loop: loops.VirtualLoop) -> Shared:
        names, machines = [job.name for job in jobs], paid_seconds(scenarios, 0.0)
        accounts = DeviceAccounts(machines, 0)
        devices = {name: SimDevice(name, names, accounts, slice_s) for name in machines}
        for device in devices.values():
            for job in jobs:
                device.set_terms(job.name, share=job.share, priority=job.priority)
        simulations = {job.name: _start(job, folder, devices, loop, sink) for job in jobs}
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {name: group.create_task(_run(s), name=f"job {name}") for name, s in simulations.items()}
        except ExceptionGroup as failed:  # the first one ends the simulation, as it does with one job
            raise failed.exceptions[0] from None
        seconds = max(task.result() for task in tasks.values())
        charged, paid = accounts.charged(round(seconds * 1e9)), paid_seconds(scenarios, seconds)
        ends: dict[str, JobEnd] = {}
        for name, task in tasks.items():
            used = {device: jobs.get(name, 0) / 1e9 for device, jobs in charged.items()}
            usd = sum(used_s * paid[device].usd_per_h / 3600 for device, used_s in used.items())
            tokens = simulations[name].token_schedule.real_tokens
            ends[name] = JobEnd(task.result(), tokens, sum(used.values()), usd)
        usd = sum(paid_s * usd_per_h / 3600 for paid_s, usd_per_h in paid.values())
        return Shared(jobs=ends, seconds=seconds, paid_s=sum(paid_s for paid_s, _ in paid.values()), usd=usd)

    with quiet_collector():
        return loops.run(main)


def _start(
    job: SimJob, folder: Path, devices: Mapping[str, SimDevice], loop: loops.VirtualLoop,
    sink: Sink | None,
) -> Simulation:  # fmt: skip
    def turn_of(device: str, taker: TurnTaker) -> SimTurn:
        return JobTurn(devices[TRAINER if device == LOCAL else device], job.name, "rollout", taker)

    log = folder / f"{job.name}.jsonl"
    log.unlink(missing_ok=True)
    simulation = Simulation(job.scenario, log, [sink] if sink else [], loops.clock(loop))
    simulation.fleet.turn_of = turn_of
    simulation.trainer.turn = JobTurn(devices[TRAINER], job.name, "train", simulation.trainer)
    return simulation


async def _run(simulation: Simulation) -> float:
    """Run this job to its end, and return when that was. Its workers and its trainer leave the machines."""
    try:
        await simulation.run()
        return asyncio.get_running_loop().time()
    finally:
        simulation.life.events.abandon()
        simulation.fleet.stop()
        simulation.trainer.stop()


class Paid(NamedTuple):
    """What one device costs."""

    seconds: float
    usd_per_h: float


def paid_seconds(scenarios: Sequence[Scenario], until_s: float) -> dict[str, Paid]:
    """By device: for how many seconds it is paid for until `until_s`, and its price."""
    real = scenarios[0].real
    workers = max(scenario.real.fleet.workers for scenario in scenarios)
    out = {TRAINER: Paid(until_s, real.fleet.trainer_price_usd_per_h)}
    out |= {f"w{n + 1}": Paid(until_s, real.fleet.price_usd_per_h) for n in range(workers)}
    up_s: dict[str, float] = {}
    there_s: dict[str, float] = defaultdict(float)
    for change in scenarios[0].changes:
        at_s = min(until_s, change.at_s)
        if change.up:
            up_s[change.node] = at_s
        there_s[change.node] += 0.0 if change.up else at_s - up_s.pop(change.node)
    for node, since_s in up_s.items():
        there_s[node] += until_s - since_s
    for n, (node, seconds) in enumerate(there_s.items()):
        out[node] = Paid(seconds, scenarios[0].kinds[n % len(scenarios[0].kinds)].usd_per_h)
    return out
