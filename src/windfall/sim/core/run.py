"""One simulated run: the product's controller, rollout, dispatch, seeding and telling in virtual time, with simulated
workers and a simulated trainer behind their links. No policy is written twice.

    simulate ─┬─ _lives      lives of a controller (launch/assembly.py)     until the run is finished, or its time is over
              ├─ machines    the trace                                  for ever
              ├─ _failures   the trainer and the controller, if asked   for ever
              └─ _guard      nobody has made a token for long           an error that says who waits

A controller that is killed loses all but what lies on disk: its event log, and its journal, which is kept where
somebody may be killed. Its links end; whoever was at the other end dials again. The event log is stamped with virtual
time; counts in it are in simulated tokens, of which the event `start` says how many real ones each stands for.
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

from windfall.envs.in_process import InProcess
from windfall.errors import WindfallError
from windfall.events.log import Event, EventLog
from windfall.launch.assembly import ControllerLife, run_until_first
from windfall.launch.processes.controller import settings_digest
from windfall.ledger.journal import Found, Journal
from windfall.models.text import Text
from windfall.rollout.dispatch import Dispatch
from windfall.rollout.groups import Stopped
from windfall.sim.core import loop as loops
from windfall.sim.core.link import SimLink
from windfall.sim.core.scenario import Scenario
from windfall.sim.core.service import uniform
from windfall.sim.core.token_schedule import TokenSchedule
from windfall.sim.machines.env import SimEnv, SimText
from windfall.sim.machines.fleet import Machines, Stay
from windfall.sim.machines.linked_trainer import LinkedTrainer
from windfall.train.checkpoint import CheckpointState

STUCK_S = 6 * 3600.0
"""So long without a token or a step is no run any more."""
LOOK_S = 60.0
COLLECT = (100_000, 20, 100)
"""Most of what is made here is long tuples and dies without a cycle: looking for cycles often takes an eighth of the
time."""
Sink = Callable[[Event], None]


class Simulation:
    """What outlives a controller, and the life that one has now."""

    def __init__(self, world: Scenario, log: Path, sinks: list[Sink], clock: Any, journal: Path | None) -> None:
        recipe, s = world.recipe, world.real.sim
        self.world = world
        self._log, self._sinks, self._clock, self._journal = log, sinks, clock, journal
        self.book = TokenSchedule(
            world.lengths, granule=world.granule, prompt_tokens=s.prompt_tokens,
            max_tokens=world.real.rollout.max_tokens,
        )  # fmt: skip
        self.machines = Machines(world, self.book, self.attend)
        facts = {"device": "simulated", "granule": world.granule, "seed": recipe.run.seed}
        self.learner = LinkedTrainer(
            world.trainer, self.book, save_s=s.save_s, down_s=s.trainer_down_s,
            micro_tokens=recipe.train.micro_tokens, facts={**facts, "machine": "simulated trainer"},
        )  # fmt: skip
        self.learner.local, self.learner.attend = self.machines.local, self._attend_trainer
        self.learner.started, self.learner.ended = self.machines.start_local, self.machines.stop_local
        self.env: Any = SimEnv(seed=recipe.run.seed, reward_mean=s.reward_mean, reward_s=s.reward_s)
        self.down = False
        """There is no controller just now."""
        self.lives = 0
        self._stopping = False
        self._killed = asyncio.Event()
        self._calls: dict[asyncio.Task[Any], SimLink] = {}
        self._reached = CheckpointState(step=0, next_task=0)
        self.life = self._begin()

    @property
    def dispatch(self) -> Dispatch:
        return self.life.dispatch

    @property
    def events(self) -> EventLog:
        return self.life.events

    @property
    def stays(self) -> list[Stay]:
        return self.machines.stays

    # lives of a controller

    def _begin(self) -> ControllerLife:
        events = EventLog(self._log, self._sinks, clock=self._clock)
        journal = Journal(self._journal, settings_digest(self.world.recipe)) if self._journal else None
        self.lives += 1
        life = ControllerLife(self.world.recipe, events, journal, resumed=self.lives > 1, read_journal=self._find)
        if self._stopping:
            life.stop.set()
        return life

    @staticmethod
    async def _find(journal: Journal, step: int) -> Found:
        await asyncio.sleep(0.0)  # as long as a thread takes: somebody may be heard meanwhile
        return journal.find(step)

    def stop(self) -> None:
        """Ask the run to stop, and save."""
        self._stopping = True
        self.life.stop.set()

    def kill_controller(self) -> None:
        if not self.down:
            self._killed.set()
            self._cut_all()

    def _cut_all(self) -> None:
        """Nothing that this life does from here on reaches anybody."""
        self.down = True
        self.life.events.abandon()
        if self.life.journal is not None:
            self.life.journal.abandon()
        for task, wire in self._calls.items():
            wire.vanish("the controller is gone")
            task.cancel()
        self._calls.clear()

    async def run(self) -> None:
        self.learner.start()
        await run_until_first(self._lives(), self.machines.run(), self._guard(), self._failures())

    async def _lives(self) -> None:
        while True:
            living = asyncio.create_task(self._live(self.life))
            killed = asyncio.create_task(self._killed.wait())
            try:
                await asyncio.wait([living, killed], return_when=asyncio.FIRST_COMPLETED)
                if living.done() and not self.down:
                    living.result()
                    return
            finally:
                living.cancel()
                killed.cancel()
                await asyncio.gather(living, killed, return_exceptions=True)
            await asyncio.sleep(self.world.real.sim.controller_down_s)
            self._killed.clear()
            self.life, self.down = self._begin(), False

    async def _live(self, life: ControllerLife) -> None:
        await run_until_first(self._steps(life), life.dispatch.watch(), life.tick())
        if life.journal is not None:
            life.journal.close()
        life.events.instant(
            "end", step=self._reached.step, finished=self._reached.step >= self.world.recipe.run.steps,
            real_tokens=self.book.real_tokens, **life.report.last_bill(asyncio.get_running_loop().time()),
        )  # fmt: skip
        life.events.abandon()  # what follows is taking down, and nobody's

    async def _steps(self, life: ControllerLife) -> None:
        s = self.world.real.sim
        if s.seconds:
            loop = asyncio.get_running_loop()
            loop.call_later(max(0.0, s.seconds - loop.time()), self.stop)
        text = SimText(max(2, round(s.prompt_tokens / self.world.granule)))

        def counters() -> dict[str, Any]:
            told, now = life.counters(), asyncio.get_running_loop().time()
            self.machines.follow(life.report.snapshot(step=0, now_s=now, ended=None))
            return {**told, "real_tokens": self.book.real_tokens}

        try:
            self._reached = await life.steps(InProcess(self.env), lambda: cast(Text, text), counters)
        except Stopped:  # before there was anything to save
            self._reached = life.state

    # who dials in

    async def attend(self, link: Any, hello: Any) -> None:
        await self._answer(link, self.life.attend(link, hello))

    async def _attend_trainer(self, link: Any, hello: Any) -> None:
        await self._answer(link, self.life.attend_trainer(link, hello))

    async def _answer(self, link: SimLink, attend: Coroutine[Any, Any, None]) -> None:
        if self.down:
            attend.close()
            link.vanish("nobody listens")
            return
        task = asyncio.current_task()
        assert task is not None
        self._calls[task] = link
        try:
            await attend
        except Exception as e:  # fault boundary: a link's task is awaited by nobody, and this must end the simulation
            said = {"message": f"the controller failed {link.peer}", "exception": e}
            asyncio.get_running_loop().call_exception_handler(said)
        finally:
            self._calls.pop(task, None)

    # what goes wrong by itself

    async def _failures(self) -> None:
        s = self.world.real.sim
        await run_until_first(
            self._failing("trainer", s.trainer_mean_up_s, s.trainer_down_s, self.learner.kill),
            self._failing("controller", s.controller_mean_up_s, s.controller_down_s, self.kill_controller),
        )

    async def _failing(self, who: str, mean_up_s: float, down_s: float, kill: Callable[[], None]) -> None:
        """Each time it has been up for an exponential time."""
        n = 0
        if not mean_up_s:
            await asyncio.Event().wait()
        while True:
            n += 1
            drawn = uniform(f"{self.world.real.run.seed}/{who}/{n}")
            await asyncio.sleep(-math.log(1.0 - drawn) * mean_up_s)
            kill()
            await asyncio.sleep(down_s)

    async def _guard(self) -> None:
        """Timers go on for ever, so a run that is stuck is no deadlock of the loop."""
        loop, before, since_s = asyncio.get_running_loop(), (-1, -1), 0.0
        while True:
            seen = (self.dispatch.ledger.counts.accepted, self.learner.trained_tokens)
            if seen != before:
                before, since_s = seen, loop.time()
            elif loop.time() - since_s > STUCK_S:
                what = f"no token in {STUCK_S / 3600:g} virtual hours; these wait:\n{loops.waiting(loop)}"
                raise WindfallError(what, where="sim", fix="Does the trace have a worker left? See sim.seconds.")
            await asyncio.sleep(LOOK_S)


def simulate(
    world: Scenario, log: Path, *, sink: Sink | None = None, disturb: Callable[[Simulation], None] | None = None,
    journal: bool = False, between: Callable[[], None] | None = None,
) -> Simulation:  # fmt: skip
    """The whole run; its log is written to `log`, and every event goes to `sink`. `disturb`: called at the start.
    `journal`: keep one, also where the recipe has nobody fail. `between`: called between any two callbacks."""
    s = world.real.sim

    async def main(loop: loops.VirtualLoop) -> Simulation:
        log.unlink(missing_ok=True)
        with ExitStack() as after:
            fails = journal or s.trainer_mean_up_s or s.controller_mean_up_s
            folder = Path(after.enter_context(tempfile.TemporaryDirectory())) if fails else None
            simulation = Simulation(world, log, [sink] if sink else [], loops.clock(loop), folder)
            after.callback(lambda: simulation.events.close())
            if disturb is not None:
                disturb(simulation)
            await simulation.run()
            return simulation

    before = gc.get_threshold()
    gc.set_threshold(*COLLECT)
    try:
        return loops.run(main, between)
    finally:
        gc.set_threshold(*before)
