"""One simulated run: windfall's own controller, rollout and scheduling in virtual time, with simulated workers and a
simulated trainer at the other end of their links. No policy is implemented twice.

    simulate ─┬─ _run_controllers  the controller (controller/assembly.py)       until the run or its time ends
              ├─ fleet             machines that come and go by the trace        never ends
              └─ _guard            no token for a long time                      raises and lists the waiting tasks

The event log is stamped with virtual time. Counts in it are in simulated tokens; the event `start` says how many real
tokens each one stands for (`granule`).
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from windfall.controller.assembly import ControllerLife
from windfall.controller.rollout.dispatch import Dispatch
from windfall.controller.rollout.stream import Stopped
from windfall.envs.in_process import InProcess
from windfall.errors import WindfallError, run_until_first
from windfall.events.log import Clock, EventLog, Sink
from windfall.link import messages as m
from windfall.models.text import Text
from windfall.recipe.sections import Recipe
from windfall.sim.core import loop as loops
from windfall.sim.core.link import SimLink
from windfall.sim.core.scenario import Scenario
from windfall.sim.core.token_schedule import TokenSchedule
from windfall.sim.machines.acceptance import DraftAcceptance
from windfall.sim.machines.env import SimEnv, SimText
from windfall.sim.machines.fleet import SimFleet, Stay
from windfall.sim.machines.linked_trainer import LinkedTrainer, SimBase
from windfall.sim.machines.weight_store import WeightStore
from windfall.training import CheckpointState

STUCK_S = 6 * 3600.0
"""A run without a new token or step for this many virtual seconds is stuck."""
GUARD_EVERY_S = 60.0
GC_THRESHOLD = (100_000, 20, 100)
"""Most objects are tuples without cycles, but with the default threshold an eighth of the time goes to searching for
cycles."""


class Simulation:
    """The machines, and the controller (`life`)."""

    trainer_class = LinkedTrainer
    fleet_class = SimFleet

    def __init__(self, scenario: Scenario, log: Path, sinks: list[Sink], clock: Clock) -> None:
        recipe, s = scenario.recipe, scenario.real.sim
        self.scenario = scenario
        self._log = log
        self._sinks = sinks
        self._clock = clock
        self.token_schedule = TokenSchedule(
            scenario.policies,
            granule=scenario.granule,
            sessions=scenario.sessions,
            acceptance=_acceptance(scenario.real),
        )
        self.fleet = self.fleet_class(scenario, self.token_schedule, self.attend)
        self.trainers: dict[str, LinkedTrainer] = {}
        """By policy."""
        turn = asyncio.Lock()
        for name, policies in recipe.bases().items():
            base = self._base(name, policies, turn if s.in_turns else asyncio.Lock())
            self.trainers.update((policy, self._trainer(policy, base)) for policy in policies)
        for policy, own in recipe.policies.items():
            self.trainers[policy].original = self.trainers.get(own.copy_of)
        self.env: Any = SimEnv(
            seed=recipe.run.seed, reward_mean=s.reward_mean, reward_s=s.reward_s, sessions=scenario.sessions
        )
        self._reached = CheckpointState(step=0, next_task=0)
        self.life = self._start_controller()

    def _base(self, name: str, policies: Sequence[str], turn: asyncio.Lock) -> SimBase:
        recipe, s, net = self.scenario.recipe, self.scenario.real.sim, self.fleet.net
        w, suffix = recipe.weights, f"-{name}" if name else ""
        stores = [WeightStore(net=net, location=f"trainer{suffix}", region=w.region, up_per_s=s.egress_bytes_per_s)]
        if w.bucket:
            stores.append(WeightStore(net=net, location=f"{w.bucket}{suffix}", region=w.region))
        shared = len(policies) > 1 or (name and recipe.of(name).train.lora is not None)
        file = m.FileRef(digest=f"base of {name}", nbytes=round(s.weights_bytes)) if shared else None
        return SimBase(name=name, stores=stores, turn=turn, file=file)

    def _trainer(self, policy: str, base: SimBase) -> LinkedTrainer:
        scenario, view, s = self.scenario, self.scenario.recipe.of(policy), self.scenario.real.sim
        facts = {"device": "simulated", "granule": scenario.granule, "seed": view.run.seed}
        trainer = self.trainer_class(
            scenario.policies[policy].trainer,
            self.token_schedule,
            base,
            policy=policy,
            frozen=bool(policy) and scenario.recipe.policies[policy].frozen,
            weights_bytes=s.weights_bytes if base.file is None else s.adapter_bytes,
            delta_bytes=s.delta_bytes if base.file is None else 0.0,
            save_s=s.save_s,
            micro_tokens=view.train.micro_tokens,
            facts={**facts, "machine": "simulated trainer"},
        )
        trainer.local = self.fleet.local
        trainer.attend = self._attend_trainer
        trainer.on_start = self.fleet.start_local
        return trainer

    @property
    def trainer(self) -> LinkedTrainer:
        """That of the first policy."""
        return next(iter(self.trainers.values()))

    @property
    def dispatch(self) -> Dispatch:
        return self.life.dispatch

    @property
    def stays(self) -> list[Stay]:
        return self.fleet.stays

    def _start_controller(self) -> ControllerLife:
        events = EventLog(self._log, self._sinks, clock=self._clock)
        return ControllerLife(self.scenario.recipe, events, None, resumed=False, rules=self.scenario.rules)

    def stop(self) -> None:
        """Ask the run to save and stop."""
        self.life.stop.set()

    async def run(self) -> None:
        for trainer in self.trainers.values():
            trainer.start()
        await run_until_first(self._run_controllers(), self.fleet.run(), self._guard())

    async def _run_controllers(self) -> None:
        await self._run_controller(self.life)

    async def _run_controller(self, life: ControllerLife) -> None:
        await run_until_first(self._steps(life), life.dispatch.watch(), life.tick(), life.log_activities())
        life.events.instant(
            "end",
            step=self._reached.step,
            finished=self._reached.step >= self.scenario.recipe.run.steps,
            real_tokens=self.token_schedule.real_tokens,
            **life.report.bill(asyncio.get_running_loop().time()),
        )
        life.events.abandon()  # events of the shutdown do not belong to the run

    async def _steps(self, life: ControllerLife) -> None:
        s = self.scenario.real.sim
        if s.seconds:
            loop = asyncio.get_running_loop()
            loop.call_later(max(0.0, s.seconds - loop.time()), self.stop)
        g = self.scenario.granule
        texts = {
            name: SimText(max(2, round(policy.prompt_tokens / g)), g) for name, policy in self.scenario.policies.items()
        }

        def counters() -> dict[str, Any]:
            now_s = asyncio.get_running_loop().time()
            self.fleet.follow(life.report.snapshot(steps={}, now_s=now_s, ended=None))
            return {"real_tokens": self.token_schedule.real_tokens}

        try:
            self._reached = await life.steps(InProcess(self.env), lambda policy: cast(Text, texts[policy]), counters)
        except Stopped:  # stopped before the first step
            self._reached = life.lead.state

    # links that dial in

    async def attend(self, link: Any, hello: Any) -> None:
        await self._answer(link, self.life.attend(link, hello))

    async def _attend_trainer(self, link: Any, hello: Any) -> None:
        await self._answer(link, self.life.attend_trainer(link, hello))

    async def _answer(self, link: SimLink, attend: Coroutine[Any, Any, None]) -> None:
        try:
            await attend
        except Exception as e:  # fault boundary: no task awaits this one, and the error must end the simulation
            context = {"message": f"the controller failed while it served {link.peer}", "exception": e}
            asyncio.get_running_loop().call_exception_handler(context)

    async def _guard(self) -> None:
        """Detect a run that is stuck. Its periodic timers continue, so the loop sees no deadlock."""
        loop, last_progress, since_s = asyncio.get_running_loop(), (-1, -1), 0.0
        while True:
            trained = sum(trainer.trained_tokens for trainer in self.trainers.values())
            progress = (self.dispatch.ledger.counts.accepted, trained)
            if progress != last_progress:
                last_progress, since_s = progress, loop.time()
            elif loop.time() - since_s > STUCK_S:
                what = f"no token in {STUCK_S / 3600:g} virtual hours; waiting tasks:\n{loops.waiting_tasks(loop)}"
                fix = "Check that the trace still has a worker, or limit the time with sim.seconds."
                raise WindfallError(what, where="sim", fix=fix)
            await asyncio.sleep(GUARD_EVERY_S)


def _acceptance(recipe: Recipe) -> DraftAcceptance | None:
    s = recipe.sim
    if not s.acceptance or recipe.engine.speculation == "off":
        return None
    return DraftAcceptance(points=sorted(s.acceptance), verify_rows=s.verify_rows)


@contextmanager
def quiet_collector() -> Iterator[None]:
    """Search for cycles of objects rarely."""
    before = gc.get_threshold()
    gc.set_threshold(*GC_THRESHOLD)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def simulate(
    scenario: Scenario,
    log: Path,
    *,
    sink: Sink | None = None,
    disturb: Callable[[Simulation], None] | None = None,
    make: type[Simulation] = Simulation,
    loop: loops.VirtualLoop | None = None,
) -> Simulation:
    """Simulate the whole run. Every event goes to `log` and to `sink`. `disturb` is called at the start."""

    async def main(loop: loops.VirtualLoop) -> Simulation:
        log.unlink(missing_ok=True)
        simulation = make(scenario, log, [sink] if sink else [], loops.clock(loop))
        try:
            if disturb is not None:
                disturb(simulation)
            await simulation.run()
        finally:
            simulation.life.events.close()
        return simulation

    with quiet_collector():
        return loops.run(main, loop)
