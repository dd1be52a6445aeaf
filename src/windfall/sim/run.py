"""One simulated run: the product's controller, rollout, dispatch, seeding and telling in virtual time, with simulated
workers behind the link and a simulated trainer behind the loop's seam. No policy is written twice.

    simulate ─┬─ _steps      the loop of controller.py          until the run is finished, or its time is over
              ├─ watch       of dispatch                        for ever
              ├─ _tick       of seeding                         for ever
              ├─ machines    the trace                          for ever
              └─ _guard      nobody has made a token for long   an error that says who waits

It writes the event log of a run, stamped with virtual time; counts in it are in simulated tokens, of which the event
`start` says how many real ones each stands for.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, cast

from windfall import algorithms, prices
from windfall.controller import Controller
from windfall.errors import WindfallError
from windfall.events import Event, EventLog
from windfall.launch.control import TICK_S, first
from windfall.launch.telling import Telling
from windfall.rollout import offload
from windfall.rollout.dispatch import Dispatch
from windfall.rollout.manager import Rollout
from windfall.rollout.members import Patience
from windfall.rollout.seeding import Seeding
from windfall.rollout.work import Offer
from windfall.sim import loop as loops
from windfall.sim.book import Book
from windfall.sim.env import SimEnv, SimText
from windfall.sim.learner import Learner
from windfall.sim.machines import Machines, Stay
from windfall.sim.world import World
from windfall.text import Text
from windfall.train.checkpoint import State
from windfall.types import Lease

STUCK_S = 6 * 3600.0
"""So long without a token or a step is no run any more."""
LOOK_S = 60.0
COLLECT = (100_000, 20, 100)
"""Most of what is made here is long tuples and dies without a cycle: looking for cycles often takes an eighth of the
time."""


class Simulation:
    """The objects of one run, and what is known of it besides its log."""

    def __init__(self, world: World, events: EventLog) -> None:
        recipe, f, t = world.recipe, world.recipe.fleet, world.recipe.techniques
        self.world, self.events = world, events
        self.dispatch = Dispatch(
            events=events, patience=Patience(suspect_s=f.suspect_s, gone_s=f.gone_s, stalled_s=f.stalled_s),
            techniques=t,
        )  # fmt: skip
        policy = offload.make(f.offload if t.seeding else "never", first_s=f.first_seed_s)
        self.seeding = Seeding(self.dispatch, policy, events, recipe.rollout.groups * recipe.rollout.group_size)
        self.telling = Telling(recipe, self.dispatch, events)
        s = world.real.sim
        self.book = Book(
            world.lengths, granule=world.granule, prompt_tokens=s.prompt_tokens,
            max_tokens=world.real.rollout.max_tokens,
        )  # fmt: skip
        self.machines = Machines(world, self.book, self.dispatch.attend)
        self.learner = Learner(world.trainer, self.book, save_s=s.save_s)
        self.learner.local = self.machines.local
        env = SimEnv(seed=recipe.run.seed, reward_mean=s.reward_mean, reward_s=s.reward_s)
        text = cast(Text, SimText(max(2, round(s.prompt_tokens / world.granule))))
        self.rollout = Rollout(self.dispatch, env, text, recipe.rollout, seed=recipe.run.seed, events=events)
        self._reached = State(step=0, next_task=0)

    @property
    def stays(self) -> list[Stay]:
        return self.machines.stays

    async def run(self) -> None:
        loop, w = asyncio.get_running_loop(), self.world
        self.events.instant(
            "start", step=0, steps=w.recipe.run.steps, device="simulated", granule=w.granule, seed=w.recipe.run.seed
        )
        paid = self._pay()
        await first(self._steps(), self.dispatch.watch(), self._tick(), self.machines.run(), self._guard())
        if paid is not None:
            self.dispatch.accounts.gone(loop.time(), paid, heard_s=loop.time())
        self.events.instant(
            "end", step=self._reached.step, finished=self._reached.step >= w.recipe.run.steps,
            real_tokens=self.book.real_tokens, **self.telling.last_bill(loop.time()),
        )  # fmt: skip

    def _pay(self) -> str | None:
        """A trainer without an engine of its own is no worker, and costs all the same (as launch/control.py has it)."""
        f = self.world.recipe.fleet
        if f.local:
            return None
        lease = Lease(kind="reserved", device="simulated trainer", price_usd_per_h=f.trainer_price_usd_per_h)
        accounts = self.dispatch.accounts
        accounts.join(0.0, "trainer", kind="reserved", usd_per_h=prices.of(lease).or_none, trainer=True)
        accounts.paused(0.0, "trainer")
        return "trainer"

    async def _steps(self) -> None:
        recipe, loop = self.world.recipe, asyncio.get_running_loop()
        self.dispatch.set_offer(_offer(0))
        if self.world.real.sim.seconds:
            loop.call_later(self.world.real.sim.seconds, self.rollout.interrupt)
        controller = Controller(
            recipe=recipe, algorithm=algorithms.make(recipe.algorithm.name, **recipe.algorithm.options),
            trainer=self.learner, rollout=self.rollout, pace=self.seeding, events=self.events,
            connect=self._connect, offer=lambda state: self.dispatch.set_offer(_offer(state.step)),
            saved=lambda state: None, counters=self._counters, micro_tokens=recipe.train.micro_tokens,
        )  # fmt: skip
        self._reached = await controller.run()

    async def _connect(self) -> State:
        return State(step=0, next_task=0)

    def _counters(self) -> dict[str, Any]:
        now = asyncio.get_running_loop().time()
        told = self.telling.counters(self.seeding.last, now)
        self.machines.follow(self.telling.snapshot(step=0, now_s=now, ended=False))
        return {**told, "real_tokens": self.book.real_tokens}

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.seeding.tick()

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


def _offer(version: int) -> Offer:
    return Offer(version=version, digest=f"v{version}", url="")


def simulate(
    world: World, log: Path, *, sink: Callable[[Event], None] | None = None,
    disturb: Callable[[Simulation], None] | None = None,
) -> Simulation:  # fmt: skip
    """The whole run; its log is written to `log`, and every event goes to `sink`. `disturb`: called at the start."""

    async def main(loop: loops.VirtualLoop) -> Simulation:
        log.unlink(missing_ok=True)
        with closing(EventLog(log, [sink] if sink else None, clock=loops.clock(loop))) as events:
            simulation = Simulation(world, events)
            if disturb is not None:
                disturb(simulation)
            await simulation.run()
            return simulation

    before = gc.get_threshold()
    gc.set_threshold(*COLLECT)
    try:
        return loops.run(main)
    finally:
        gc.set_threshold(*before)
