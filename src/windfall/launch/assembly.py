"""One life of a controller: its objects, made from a recipe and what is on disk; it goes on where the last one was.

    attend, attend_trainer      whoever has dialled in, and may              one each, as long as the link is there
    steps                       the loop of controller.py                    until the run is finished or stopped
    tick                        of seeding                                   for ever

No socket, no process, no signal: launch/processes/controller.py has those, and windfall.sim lives these lives in virtual time. What
a killed controller leaves is its event log, its journal, the trainer's checkpoint, and workers and a trainer that dial
again; all else is made anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from itertools import count
from typing import Any

from windfall import algorithms
from windfall.config import Recipe
from windfall.controller import Controller
from windfall.cost import prices
from windfall.envs.base import EnvHost
from windfall.envs.held_out import HeldOut
from windfall.events.log import EventLog
from windfall.launch.fleet_report import Telling, look_back
from windfall.ledger.journal import Journal
from windfall.ledger.journal_reader import JournalContents
from windfall.ledger.recovery import Recovery
from windfall.link import messages as m
from windfall.link.base import Link
from windfall.models.text import Text
from windfall.rollout.assignment import Offer
from windfall.rollout.dispatch import Dispatch
from windfall.rollout.groups import Rollout, Stopped
from windfall.rollout.seeding import Seeding, seeding_policy
from windfall.scheduling.members import Patience
from windfall.train.base import TrainerLost
from windfall.train.checkpoint import CheckpointState
from windfall.train.remote import RemoteTrainer
from windfall.types import Lease

TRAINER_START_S = 600.0
TICK_S = 0.1


class ControllerLife:
    def __init__(
        self, recipe: Recipe, events: EventLog, journal: Journal | None, *, again: bool,
        find: Callable[[Journal, int], Awaitable[JournalContents]] | None = None,
    ) -> None:  # fmt: skip
        """`again`: the run has been before. `journal` None: nothing outlives this life. `find`: how it is read."""
        f, t = recipe.fleet, recipe.techniques
        self.recipe, self.events, self.journal, self._again = recipe, events, journal, again
        self._find = find or (lambda journal, step: asyncio.to_thread(journal.read, step))
        self._recovery = Recovery(events, checkpoints=recipe.checkpoint.keep)
        before = look_back(events, self._recovery.observe)
        self._evaluated, self._logged = before.evaluated, before.step
        patience = Patience(suspect_s=f.suspect_s, gone_s=f.gone_s, stalled_s=f.stalled_s)
        self.dispatch = Dispatch(
            events=events, journal=journal, patience=patience, techniques=t, billed_s=before.billed_s
        )  # fmt: skip
        self.trainer = RemoteTrainer()
        self.dispatch.loading.served = lambda: self.trainer.hello is not None
        policy = seeding_policy(f.offload if t.seeding else "never", first_s=f.first_seed_s)
        self.seeding = Seeding(self.dispatch, policy, events, recipe.rollout.groups * recipe.rollout.group_size)
        self.telling = Telling(recipe, self.dispatch, events)
        self.rollout: Rollout | None = None
        self.state = CheckpointState(step=0, next_task=0)
        self.held_out: HeldOut | None = None
        """What is evaluated on, where the environment can say."""
        self.stop = asyncio.Event()
        """Set: the run is to stop, and save."""
        self.connected: Callable[[m.TrainerHello], None] = lambda hello: None
        """Told of every trainer that the run goes on with, before any worker gets its weights."""
        self.attend = self.dispatch.attend
        self._trainers = count(1)

    async def steps(
        self, env: EnvHost, text: Callable[[], Text], counters: Callable[[], dict[str, Any]] | None = None
    ) -> CheckpointState:
        """All steps that are left. `text` is asked for when a trainer is there, who has the tokenizer."""
        hello = await self.or_stop(self.trainer.connected(TRAINER_START_S))
        recipe, rollout = self.recipe, self._begin(env, text(), hello)
        watch_stop = asyncio.create_task(self._interrupt(rollout))
        controller = Controller(
            recipe=recipe, algorithm=algorithms.make(recipe.algorithm.name, **recipe.algorithm.options),
            trainer=self.trainer, rollout=rollout, pace=self.seeding, events=self.events,
            connect=self.connect, offer=self._offer, saved=self._saved, counters=counters or self.counters,
            micro_tokens=hello.micro_tokens, evaluated=self._evaluated, held_out=self.held_out,
        )  # fmt: skip
        try:
            return await controller.run()
        finally:
            watch_stop.cancel()

    def _begin(self, env: EnvHost, text: Text, hello: m.TrainerHello) -> Rollout:
        recipe = self.recipe
        if not self._again:
            self.events.instant("start", step=hello.step, steps=recipe.run.steps, **hello.facts)
        self.rollout = Rollout(self.dispatch, env, text, recipe.rollout, seed=recipe.run.seed, events=self.events)
        return self.rollout

    async def connect(self) -> CheckpointState:
        """A trainer is here: go on from the step it has, with what the journal knows of later ones."""
        hello = await self.or_stop(self.trainer.connected(TRAINER_START_S))
        self.state = CheckpointState(step=hello.step, next_task=hello.next_task)
        if self._again:
            self.events.instant("resumed", step=hello.step)
        if hello.step > self._logged:
            self.events.instant("log_gap", first=self._logged + 1, last=hello.step)
        self._again, self._logged = True, math.inf
        self.events.instant("trainer_ready", step=hello.step, pid=hello.facts["pid"], digest=hello.digest)
        self._recovery.report_checkpoints(hello.step, hello.facts)
        assert self.rollout is not None, "connected before there is a loop"
        if self.journal is not None:
            self.journal.close()
            # Reading a long one takes seconds, in which workers must be heard.
            found = await self._find(self.journal, hello.step)
            if self.trainer.hello is not hello:
                raise TrainerLost("it went away, or another has taken its place")
            self._recovery.report_journal(found, step=hello.step, next_task=hello.next_task)
            self.rollout.load_history(self.journal.open(hello.step, found), hello.next_task)
            self.events.instant("journal", file=self.journal.file)
        model = json.loads(hello.engine.model_config)
        self.dispatch.ledger.vocabulary = model.get("vocab_size", 1 << 32)
        self.rollout.context = model.get("max_position_embeddings")
        self.connected(hello)
        self.dispatch.set_offer(Offer(version=hello.version, digest=hello.digest, url=hello.url))
        return self.state

    def _offer(self, published: m.Updated) -> None:
        hello = self.trainer.hello
        if hello is not None:  # else it has just been lost, and the next one says what there is
            self.state = CheckpointState(step=published.version, next_task=self.state.next_task)
            self.dispatch.set_offer(Offer(version=published.version, digest=published.digest, url=hello.url))

    def _saved(self, state: CheckpointState) -> None:
        if self.journal is not None and self._recovery.saved(state.step):
            self.journal.rotate(state.step)
            self.events.instant("journal", file=self.journal.file)

    async def attend_trainer(self, link: Link, hello: m.TrainerHello) -> None:
        """The life of one trainer's link."""
        if self.rollout is not None:
            # The run goes on from what this one has. Nobody else may have the weights of the step under way any more.
            self.rollout.interrupt(TrainerLost("another trainer has taken its place"))
        with self._paying(hello):
            await self.trainer.attend(link, hello)

    @contextlib.contextmanager
    def _paying(self, hello: m.TrainerHello) -> Iterator[None]:
        """A trainer without an engine of its own is no worker, and costs all the same."""
        if self.recipe.fleet.local:
            yield
            return
        accounts, loop, id = self.dispatch.accounts, asyncio.get_running_loop(), f"trainer {next(self._trainers)}"
        device = str(hello.facts.get("machine", ""))
        lease = Lease(kind="reserved", device=device, price_usd_per_h=self.recipe.fleet.trainer_price_usd_per_h)
        now = loop.time()
        accounts.join(now, id, kind="reserved", usd_per_h=prices.of(lease).or_none, trainer=True, name="trainer",
                      started_s=now - float(hello.facts.get("age_s", 0.0)))  # fmt: skip
        accounts.paused(now, id)
        try:
            yield
        finally:
            accounts.gone(loop.time(), id, heard_s=loop.time())

    def counters(self) -> dict[str, Any]:
        return self.telling.counters(self.seeding.last, asyncio.get_running_loop().time())

    async def tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.seeding.tick()

    async def or_stop(self, wait: Coroutine[Any, Any, Any]) -> Any:
        """What is waited for, unless somebody asks the run to stop first."""
        waiting, stop = asyncio.ensure_future(wait), asyncio.ensure_future(self.stop.wait())
        try:
            await asyncio.wait([waiting, stop], return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                raise Stopped
            return waiting.result()
        finally:
            waiting.cancel()
            stop.cancel()

    async def _interrupt(self, rollout: Rollout) -> None:
        await self.stop.wait()
        rollout.interrupt()


async def first(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Until the first of them ends, or fails; the others are then cancelled, and waited for."""
    tasks = [asyncio.create_task(c) for c in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
