"""One policy of a run: its trainer, its loop and its state. A run has one, or several over the same fleet and tasks.

    run ── trained ──▶ the loop of loop.py                          until its steps are made
        └─ frozen ───▶ offer what each of its trainers publishes    until the others have made their steps
                       (a copy: also when its original has made `every` more steps, before the next tasks)

Policies advance at their own pace. If a trainer is lost, only its policy waits for the next one.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from windfall import algorithms
from windfall.controller.generation import Generation, PolicyGroups
from windfall.controller.loop import Loop
from windfall.controller.remote_trainer import RemoteTrainer
from windfall.controller.rollout.evaluation import Evaluation
from windfall.controller.rollout.local_generation import IdleGeneration, LocalGeneration
from windfall.controller.scheduling.local_time import LocalTimePolicy
from windfall.controller.tasks.admission import Admission
from windfall.controller.workers.versions import Offer
from windfall.link import messages as m
from windfall.link.base import Link
from windfall.recipe.sections import Recipe
from windfall.training import CheckpointState, NewVersion, TrainerLost

if TYPE_CHECKING:
    from windfall.controller.assembly import ControllerLife

TRAINER_START_S = 600.0
"""Timeout for a trainer to connect, in seconds."""
COPY_CHECK_S = 0.01
"""Seconds between looks for the copies of a policy whose trainer was replaced."""


class RunPolicy:
    """Implements loop.Run."""

    def __init__(self, name: str, recipe: Recipe, life: ControllerLife, local_time: LocalTimePolicy) -> None:
        """`recipe`: as the policy sees it."""
        self.name, self.recipe, self._life = name, recipe, life
        self.trained = life.recipe.is_trained(name)
        own = life.recipe.policies.get(name)
        self._copy_of, self._every = (own.copy_of, own.every) if own is not None else ("", 0)
        self.events = life.events.bind(policy=name) if name else life.events
        self.trainer = RemoteTrainer(life.dispatch.weights, name)
        o = recipe.rollout
        pace = partial(IdleGeneration, staleness=o.staleness) if o.staleness else LocalGeneration
        self.local_generation = pace(life.dispatch, local_time, self.events, o.fresh_groups * o.group_size)
        self.groups: PolicyGroups | None = None
        self.evaluation: Evaluation | None = None
        self.loop: Loop | None = None
        self.state = CheckpointState(step=0, next_task=0)
        self.on_disk: CheckpointState | None = None
        """The state of the last checkpoint; None if this controller did not see one."""
        self.evaluated: set[int] = set()
        """Steps with an evaluation in the log when the controller started."""
        self.last_logged: float = 0
        """The last step in the log."""
        self._resumed, self._recovered = life.resumed, False
        """The run was started before; it continues with the trainer that has connected."""
        self._hello: m.TrainerHello | None = None
        self._wake = asyncio.Event()
        """Set when a trainer of a frozen policy has connected."""
        self._announced: m.TrainerHello | None = None
        """That of the trainer whose step the policy has continued from."""
        self._renewing = asyncio.Lock()

    @property
    def _copies(self) -> list[RunPolicy]:
        return [policy for policy in self._life.policies.values() if policy._copy_of == self.name and self.name]

    @property
    def hello(self) -> m.TrainerHello:
        """That of the trainer that the policy continues with."""
        assert self._hello is not None, "no trainer has connected"
        return self._hello

    @property
    def recovery_state(self) -> CheckpointState:
        """The state that the journal must cover: that of the trainer that has connected, or of the last checkpoint."""
        return self.on_disk if self._recovered and self.on_disk is not None else CheckpointState.of(self.hello)

    def restores(self, scope: str) -> bool:
        """Whether the journal's responses of this scope belong to an evaluation of this policy that is still due."""
        last = self.state.step if self._recovered else self.hello.step
        return self.evaluation is not None and self.evaluation.restores(scope, last)

    def assemble(self, generation: Generation) -> None:
        """Build the loop of a policy that is trained. Its trainer has connected."""
        life, recipe = self._life, self.recipe
        algorithm = algorithms.make(recipe.algorithm.name, **recipe.algorithm.options)
        micro_tokens = self.hello.micro_tokens
        self.groups = PolicyGroups(self.name, recipe, algorithm, self.local_generation, micro_tokens, generation)
        self.evaluation = Evaluation(
            recipe, generation.rollout, self.events, life.held_out.get(self.name), evaluated=self.evaluated,
            policy=self.name,
        )  # fmt: skip
        self.loop = Loop(recipe, algorithm, self.trainer, self.groups, self.evaluation, self, self.events)

    async def run(self) -> CheckpointState:
        """Make all steps that are left. A frozen policy never returns."""
        if self.loop is not None:
            return await self.loop.run()
        while True:
            self._wake.clear()
            with suppress(TrainerLost):  # the next trainer sets _wake
                if self.trainer.hello is not self._announced:
                    await self.connected()
                    self.announce()
                await self._renew()
            await self._wake.wait()

    async def _renew(self) -> None:
        """Have the trainer of a copy take over its original, if that is due. Not while the original still has the step
        of another process: when it continues with this one, it calls this again."""
        async with self._renewing:
            original = self._life.policies[self._copy_of] if self._copy_of else None
            if original is None or not self._continues_with(original._announced):
                return
            if (step := original.state.step) >= self.state.step + self._every:
                self._publish(await self.trainer.publish(id=f"{step}/publish"))

    def _continues_with(self, hello: m.TrainerHello | None) -> bool:
        """Whether the policy has continued from a step of this trainer's process."""
        mine = self._announced
        return mine is not None and hello is not None and mine.facts["pid"] == hello.facts["pid"]

    async def attend(self, link: Link, hello: m.TrainerHello) -> None:
        """Serve the link of one trainer until it closes."""
        # The policy continues from this trainer's step, and the weights of the current step may no longer exist.
        error = TrainerLost("another trainer replaced it")
        if self.groups is not None:
            self.groups.interrupt(error)
        if self.evaluation is not None:
            self.evaluation.interrupt(error)
        asyncio.get_running_loop().call_soon(self._wake.set)
        await self.trainer.attend(link, hello)

    # loop.Run

    async def connected(self) -> None:
        hello = await self._life.unless_stopped(self.trainer.connected(TRAINER_START_S))
        self._hello, self._recovered = hello, False

    async def restore(self, admission: Admission) -> CheckpointState:
        """Continue from the step of the connected trainer, with the journal's tokens of later steps."""
        hello = self.announce()
        for copy in self._copies:  # until they continue with the same process, they have versions that are lost
            while not copy._continues_with(hello):
                await asyncio.sleep(COPY_CHECK_S)
                if self.trainer.hello is not hello:
                    raise TrainerLost("it disconnected, or another trainer replaced it")
            await copy._renew()
        planned, oldest = self._life.restored_of(self.name)
        admission.restore(
            version=hello.step, next_task=hello.next_task, open_tasks=hello.open_tasks, planned=planned, oldest=oldest
        )
        return self.state

    def announce(self) -> m.TrainerHello:
        """Offer the version of the trainer that has connected."""
        hello = self._hello
        if hello is None or self.trainer.hello is not hello:
            raise TrainerLost("it disconnected, or another trainer replaced it")
        self.state, self._announced = CheckpointState.of(hello), hello
        if self._resumed:
            self.events.instant("resumed", step=hello.step)
        if hello.step > self.last_logged:
            self.events.instant("log_gap", first=self.last_logged + 1, last=hello.step)
        self._resumed, self.last_logged, self._recovered = True, math.inf, True
        pids = [int(pid) for pid in str(hello.facts.get("rank_pids", "")).split()]
        more = {"rank_pids": pids} if pids else {}
        more |= {key: hello.facts[key] for key in ("memory", "predicted_bytes") if hello.facts.get(key)}
        self.events.instant("trainer_ready", step=hello.step, pid=hello.facts["pid"], digest=hello.digest, **more)
        self._life.on_trainer(hello)
        self._offer(Offer(version=hello.version, digest=hello.digest))
        return hello

    def before_update(self, step: int, tasks: Sequence[int]) -> None:
        """With staleness 0, the tasks of a step follow from its number."""
        journal = self._life.journal
        if journal is not None and self.recipe.rollout.staleness:
            journal.write_trained(step, tuple(tasks), self.name)
            journal.flush()

    async def offer(self, published: NewVersion) -> None:
        self._publish(published)
        for copy in self._copies:
            with suppress(TrainerLost):  # then it is renewed when the next trainer has connected
                await copy._renew()

    def _publish(self, published: NewVersion) -> None:
        if self.trainer.hello is not None:  # otherwise it was just lost, and the next trainer announces its version
            self.state = CheckpointState(step=published.version, next_task=self.state.next_task)
            self._offer(Offer(version=published.version, digest=published.digest))

    def _offer(self, offer: Offer) -> None:
        self._life.dispatch.set_offer(offer, self.trainer.weights, policy=self.name)

    def saved(self, state: CheckpointState) -> None:
        self.on_disk = state
        self._life.rotate_journal(self)

    def leave_fp8(self, step: int, gap: float) -> None:
        self._life.leave_fp8(step, gap)

    def counters(self, staleness: dict[str, Any]) -> dict[str, Any]:
        return self._life.counters(self, self.local_generation.last, staleness)
