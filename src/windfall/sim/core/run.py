"""One simulated run: windfall's own controller, rollout and scheduling in virtual time, with simulated workers and a
simulated trainer at the other end of their links. No policy is implemented twice.

    simulate ─┬─ _run_controllers  one controller after another (controller/assembly.py)  until the run or its time ends
              ├─ fleet             machines that come and go by the trace             never ends
              ├─ _failures         kills the trainer and the controller, if asked     never ends
              └─ _guard            no token for a long time                           raises and lists the waiting tasks

A killed controller loses everything that is not on disk. Its event log is on disk, and so is its journal if the recipe
kills trainers or controllers. Its links close, and the peers dial again. The event log is stamped with virtual time.
Counts in it are in simulated tokens; the event `start` says how many real tokens each one stands for (`granule`).
"""

from __future__ import annotations

import asyncio
import gc
import math
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

from windfall.controller.assembly import ControllerLife
from windfall.controller.ledger.journal import Journal
from windfall.controller.ledger.journal_format import JournalContents
from windfall.controller.process import settings_digest
from windfall.controller.rollout.dispatch import Dispatch
from windfall.controller.rollout.stream import Stopped
from windfall.envs.in_process import InProcess
from windfall.errors import WindfallError, run_until_first
from windfall.events.log import EventLog, Sink
from windfall.models.text import Text
from windfall.sim.core import loop as loops
from windfall.sim.core.draws import uniform
from windfall.sim.core.link import SimLink
from windfall.sim.core.scenario import Scenario
from windfall.sim.core.token_schedule import TokenSchedule
from windfall.sim.machines.env import SimEnv, SimText
from windfall.sim.machines.fleet import SimFleet, Stay
from windfall.sim.machines.linked_trainer import LinkedTrainer
from windfall.training import CheckpointState

STUCK_S = 6 * 3600.0
"""A run without a new token or step for this many virtual seconds is stuck."""
GUARD_EVERY_S = 60.0
GC_THRESHOLD = (100_000, 20, 100)
"""Most objects are tuples without cycles, but with the default threshold an eighth of the time goes to searching for
cycles."""


class Simulation:
    """Everything that outlives a controller, and the current controller (`life`)."""

    def __init__(self, scenario: Scenario, log: Path, sinks: list[Sink], clock: Any, journal: Path | None) -> None:
        recipe, s = scenario.recipe, scenario.real.sim
        self.scenario = scenario
        self._log, self._sinks, self._clock, self._journal = log, sinks, clock, journal
        self.token_schedule = TokenSchedule(
            scenario.lengths, granule=scenario.granule, prompt_tokens=s.prompt_tokens,
            max_tokens=scenario.real.rollout.max_tokens, sessions=scenario.sessions,
        )  # fmt: skip
        self.fleet = SimFleet(scenario, self.token_schedule, self.attend)
        facts = {"device": "simulated", "granule": scenario.granule, "seed": recipe.run.seed}
        self.trainer = LinkedTrainer(
            scenario.trainer, self.token_schedule, save_s=s.save_s, down_s=s.trainer_down_s,
            micro_tokens=recipe.train.micro_tokens, facts={**facts, "machine": "simulated trainer"},
        )  # fmt: skip
        self.trainer.local, self.trainer.attend = self.fleet.local, self._attend_trainer
        self.trainer.on_start, self.trainer.on_exit = self.fleet.start_local, self.fleet.stop_local
        self.env: Any = SimEnv(
            seed=recipe.run.seed, reward_mean=s.reward_mean, reward_s=s.reward_s, sessions=scenario.sessions
        )
        self.down = False
        self.controller_starts = 0
        self._stopping = False
        self._killed = asyncio.Event()
        self._attending: dict[asyncio.Task[Any], SimLink] = {}
        self._reached = CheckpointState(step=0, next_task=0)
        self.life = self._start_controller()

    @property
    def dispatch(self) -> Dispatch:
        return self.life.dispatch

    @property
    def events(self) -> EventLog:
        return self.life.events

    @property
    def stays(self) -> list[Stay]:
        return self.fleet.stays

    # starting and killing controllers

    def _start_controller(self) -> ControllerLife:
        events = EventLog(self._log, self._sinks, clock=self._clock)
        journal, recipe = None, self.scenario.recipe
        if self._journal is not None:
            journal = Journal(self._journal, settings_digest(recipe), staleness=recipe.rollout.staleness)
        self.controller_starts += 1
        again = self.controller_starts > 1
        life = ControllerLife(
            recipe,
            events,
            journal,
            resumed=again,
            read_journal=self._find,
            policies=self.scenario.policies,
        )
        if self._stopping:
            life.stop.set()
        return life

    @staticmethod
    async def _find(journal: Journal, step: int) -> JournalContents:
        await asyncio.sleep(0.0)  # a real controller reads in a thread, and messages may arrive meanwhile
        return journal.read(step)

    def stop(self) -> None:
        """Ask the run to save and stop."""
        self._stopping = True
        self.life.stop.set()

    def kill_controller(self) -> None:
        if not self.down:
            self._killed.set()
            self._disconnect_controller()

    def _disconnect_controller(self) -> None:
        """From here on, nothing that this controller does reaches another process or the disk."""
        self.down = True
        self.life.events.abandon()
        if self.life.journal is not None:
            self.life.journal.abandon()
        for task, link in self._attending.items():
            link.lose_controller("the controller was killed")
            task.cancel()
        self._attending.clear()

    async def run(self) -> None:
        self.trainer.start()
        await run_until_first(self._run_controllers(), self.fleet.run(), self._guard(), self._failures())

    async def _run_controllers(self) -> None:
        while True:
            running = asyncio.create_task(self._run_controller(self.life))
            killed = asyncio.create_task(self._killed.wait())
            try:
                await asyncio.wait([running, killed], return_when=asyncio.FIRST_COMPLETED)
                if running.done() and not self.down:
                    running.result()
                    return
            finally:
                running.cancel()
                killed.cancel()
                await asyncio.gather(running, killed, return_exceptions=True)
            await asyncio.sleep(self.scenario.real.sim.controller_down_s)
            self._killed.clear()
            self.life, self.down = self._start_controller(), False

    async def _run_controller(self, life: ControllerLife) -> None:
        await run_until_first(self._steps(life), life.dispatch.watch(), life.tick(), life.log_activities())
        if life.journal is not None:
            life.journal.close()
        life.events.instant(
            "end", step=self._reached.step, finished=self._reached.step >= self.scenario.recipe.run.steps,
            real_tokens=self.token_schedule.real_tokens, **life.report.last_bill(asyncio.get_running_loop().time()),
        )  # fmt: skip
        life.events.abandon()  # events of the shutdown do not belong to the run

    async def _steps(self, life: ControllerLife) -> None:
        s = self.scenario.real.sim
        if s.seconds:
            loop = asyncio.get_running_loop()
            loop.call_later(max(0.0, s.seconds - loop.time()), self.stop)
        text = SimText(max(2, round(s.prompt_tokens / self.scenario.granule)), self.scenario.granule)

        def counters() -> dict[str, Any]:
            now_s = asyncio.get_running_loop().time()
            self.fleet.follow(life.report.snapshot(step=0, now_s=now_s, ended=None))
            return {"real_tokens": self.token_schedule.real_tokens}

        try:
            self._reached = await life.steps(InProcess(self.env), lambda: cast(Text, text), counters)
        except Stopped:  # stopped before the first step
            self._reached = life.state

    # links that dial in

    async def attend(self, link: Any, hello: Any) -> None:
        await self._answer(link, self.life.attend(link, hello))

    async def _attend_trainer(self, link: Any, hello: Any) -> None:
        await self._answer(link, self.life.attend_trainer(link, hello))

    async def _answer(self, link: SimLink, attend: Coroutine[Any, Any, None]) -> None:
        if self.down:
            attend.close()
            link.lose_controller("no controller is listening")
            return
        task = asyncio.current_task()
        assert task is not None
        self._attending[task] = link
        try:
            await attend
        except Exception as e:  # fault boundary: no task awaits this one, and the error must end the simulation
            context = {"message": f"the controller failed while it served {link.peer}", "exception": e}
            asyncio.get_running_loop().call_exception_handler(context)
        finally:
            self._attending.pop(task, None)

    # failures that the recipe asks for

    async def _failures(self) -> None:
        s = self.scenario.real.sim
        await run_until_first(
            self._fail_repeatedly("trainer", s.trainer_mean_up_s, s.trainer_down_s, self.trainer.kill),
            self._fail_repeatedly("controller", s.controller_mean_up_s, s.controller_down_s, self.kill_controller),
        )

    async def _fail_repeatedly(self, process: str, mean_up_s: float, down_s: float, kill: Callable[[], None]) -> None:
        """Kill it again and again, each time after an exponentially distributed uptime."""
        n = 0
        if not mean_up_s:
            await asyncio.Event().wait()
        while True:
            n += 1
            drawn = uniform(f"{self.scenario.real.run.seed}/{process}/{n}")
            await asyncio.sleep(-math.log(1.0 - drawn) * mean_up_s)
            kill()
            await asyncio.sleep(down_s)

    async def _guard(self) -> None:
        """Detect a run that is stuck. Its periodic timers continue, so the loop sees no deadlock."""
        loop, last_progress, since_s = asyncio.get_running_loop(), (-1, -1), 0.0
        while True:
            progress = (self.dispatch.ledger.counts.accepted, self.trainer.trained_tokens)
            if progress != last_progress:
                last_progress, since_s = progress, loop.time()
            elif loop.time() - since_s > STUCK_S:
                what = f"no token in {STUCK_S / 3600:g} virtual hours; waiting tasks:\n{loops.waiting_tasks(loop)}"
                fix = "Check that the trace still has a worker, or limit the time with sim.seconds."
                raise WindfallError(what, where="sim", fix=fix)
            await asyncio.sleep(GUARD_EVERY_S)


def simulate(
    scenario: Scenario, log: Path, *, sink: Sink | None = None, disturb: Callable[[Simulation], None] | None = None,
    journal: bool = False, between: Callable[[], None] | None = None,
) -> Simulation:  # fmt: skip
    """Simulate the whole run. Every event is written to `log` and passed to `sink`. `disturb` is called at the start.
    `journal`: keep one even if the recipe kills nothing. `between` is called between any two callbacks."""
    s = scenario.real.sim

    async def main(loop: loops.VirtualLoop) -> Simulation:
        log.unlink(missing_ok=True)
        with ExitStack() as after:
            fails = journal or s.trainer_mean_up_s or s.controller_mean_up_s
            folder = Path(after.enter_context(tempfile.TemporaryDirectory())) if fails else None
            simulation = Simulation(scenario, log, [sink] if sink else [], loops.clock(loop), folder)
            after.callback(lambda: simulation.events.close())
            if disturb is not None:
                disturb(simulation)
            await simulation.run()
            return simulation

    before = gc.get_threshold()
    gc.set_threshold(*GC_THRESHOLD)
    try:
        return loops.run(main, between)
    finally:
        gc.set_threshold(*before)
