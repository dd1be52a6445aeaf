"""Groups for the loops: a gate decides which tasks are open, one stream samples and grades them (rollout/stream.py).

    gate ──tasks──▶ stream ──episodes──▶ dispatch ──work──▶ workers
      ▲               │ ▲                   │ ▲                │
      │               │ └─ turns, rewards ──┘ └────tokens──────┘
      │               └──groups──▶ gate ──its part──▶ PolicyGroups ──oldest first, not too old──▶ fill ──▶ the batch of
      └───────────────── versions ◀── published                                                            a step

A run has one Generation, and a PolicyGroups for each policy that is trained; most runs have one policy, "".

With rollout.staleness = 0, the batch of a step is opened when the step begins, and generation stands still until the
next one: synchronous training. Otherwise generation goes on while the trainer trains (tasks/admission.py).

An error of the stream is raised when a loop next looks for groups, so that a verb is never abandoned halfway. If one
trainer is lost, the others go on. Once it is replaced, the stream stops until its policy has been restored
(`restoring`); then what was open is opened again, with the journal's tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

from windfall.algorithms.base import Algorithm
from windfall.controller.credit import informative
from windfall.controller.rollout.stream import Rollout, Stream
from windfall.controller.step_batch import StepBatch
from windfall.controller.tasks.admission import Admission
from windfall.controller.tasks.selection import PromptSelection, Replay
from windfall.controller.tasks.task_gate import TaskGate
from windfall.errors import WindfallError
from windfall.recipe.sections import Recipe
from windfall.training import CheckpointState
from windfall.types import Group, Task

NOT_ASKED_BATCHES = 3
"""The run ends if nothing asked for a policy in this many of its batches of tasks."""


class TrainingPace(Protocol):
    """Decides when the trainer generates and when it trains. LocalGeneration implements it for synchronous training,
    IdleGeneration for asynchronous training."""

    may_train: asyncio.Event
    """Set while training may begin."""

    def begin(self, step: int) -> None: ...
    def begin_evaluation(self) -> None: ...
    def arrived(self, tokens: int) -> None: ...
    def trainable(self) -> None: ...
    def generated(self) -> None: ...
    def end(self, *, tokens: int, train_s: float, train_wait_s: float) -> None: ...


class PolicyGroups:
    """The groups of one policy."""

    def __init__(
        self,
        name: str,
        recipe: Recipe,
        algorithm: Algorithm,
        pace: TrainingPace,
        micro_tokens: int,
        generation: Generation,
    ) -> None:
        """`recipe`: as the policy sees it. `micro_tokens`: number of tokens, prompts included, at which a micro-batch
        is full."""
        self._name = name
        self._options = recipe.rollout
        self._algorithm = algorithm
        self._micro_tokens = micro_tokens
        self._generation = generation
        self.admission = generation.gate.admissions[name]
        self.pace = pace
        self.asynchronous = recipe.rollout.staleness > 0
        self.lagging = self.asynchronous or self._options.replay > 0
        """Tokens may be of an older version than the trainer's."""
        self._replay = Replay(groups=self._options.groups - self._options.fresh_groups, age=self._options.replay_age)
        self.selection = PromptSelection(recipe.run.seed) if self._options.select == "greso" else None
        # Neither their credit nor their mini-batch depends on other groups.
        self.one_by_one = algorithm.scope == "group" and recipe.train.minibatches == 1
        """Groups are trained on one by one."""
        self.pipelined = self.one_by_one and recipe.techniques.pipelining
        """Groups are trained on while others are still being generated."""
        self.changed = asyncio.Event()
        """Set when a group has completed, or an error has occurred."""
        self.in_step = self.restored = False
        """A step has begun and is not published; the policy has been restored since the controller started."""
        self.held_s = 0.0
        """Seconds since the last step was logged in which admission held generation back."""
        self._counted = 0.0, 0
        """When the policy's last step was logged (loop time, seconds), and how many tokens the run had generated."""
        self._error: BaseException | None = None
        self._replaced: list[Group] = []
        """Replaced groups that no batch has counted yet."""
        self._not_asked = 0
        """Tasks in a row in which nothing asked for this policy."""
        generation.groups[name] = self

    @property
    def rollout(self) -> Rollout:
        return self._generation.rollout

    @asynccontextmanager
    async def restoring(self) -> AsyncIterator[None]:
        """The stream stands still while the policy's admission is restored."""
        async with self._generation.paused():
            self._error, self._replaced, self.in_step = None, [], False
            yield
            self.restored = True

    async def restore(self, state: CheckpointState) -> None:
        """Continue from this state, with the groups that may be replayed. The stream stands still."""
        if self.selection is not None:
            self.selection.restore(state.selection)
        groups = [group.of(self._name) for group in await self._generation.read_groups(state.replay)]
        self._replay.groups.clear()
        self._replay.groups.extend(group for group in groups if group.responses)

    def begin_step(self) -> None:
        self.in_step = True
        self._generation.admit()

    def step_logged(self) -> None:
        """Start counting anew. At once: generation may go on between two steps, with tokens of the next one."""
        self._generation.reset_counters()
        self.count_from_now()
        self.held_s = 0.0
        if self.selection is not None:
            self.selection.skipped.clear()

    def count_from_now(self) -> None:
        self._counted = now_s(), self._generation.generated

    def tok_per_s(self, seconds: float) -> float:
        """Tokens per second of all policies since this policy's last step was logged. In synchronous training, nothing
        was generated before the step, which took `seconds`."""
        since_s, before = self._counted
        return (self._generation.generated - before) / (now_s() - since_s if self.asynchronous else seconds)

    def published(self) -> None:
        """The next version exists."""
        self.in_step = False
        self._generation.published(self._name)

    def new_batch(self) -> StepBatch:
        """A batch with the groups to replay."""
        batch = StepBatch()
        for group in self._replay.take(self.admission.version):
            batch.replay(group, self._micro_tokens)
        return batch

    def state_after(self, step: int, batch: StepBatch) -> CheckpointState:
        """The state of the policy once this step is trained on its batch, which is complete."""
        admission, replay, selection = self.admission, self._replay.groups, self.selection
        replay.extend(group for group in batch.fresh if batch.outcomes[group.index][1] == "informative")
        if selection is not None:
            selection.end_step(batch.outcomes)
        return CheckpointState(
            step=step, next_task=admission.next_task, open_tasks=admission.open_tasks,
            replay=tuple(group.index for group in replay), selection=selection.state if selection is not None else (),
        )  # fmt: skip

    def fill(self, batch: StepBatch) -> bool:
        """Move the groups that are ready into the batch; True if it is complete. Raises the error of the stream, or of
        `interrupt`."""
        self.changed.clear()
        if self._error is not None:
            raise self._error
        size = self._options.group_size
        while (group := self.admission.take()) is not None:
            batch.add(group, size, self._micro_tokens)
            if self.pipelined and batch.micro_batches:
                self.pace.trainable()
        for group in self._replaced:
            batch.note(group, size)
        self._replaced.clear()
        self._generation.admit()  # a group may have been too old
        if self.admission.complete:
            batch.completed(self.admission.ready, pipelined=self.pipelined)
        return self.admission.complete

    async def wait(self, batch: StepBatch) -> None:
        """Wait for a change or, while the trainer generates, until it stops."""
        may_train, began = self.pace.may_train, now_s()
        training = may_train.is_set()
        missing, ready = self.admission.batch - len(self.admission.taken), self.admission.ready
        waits = [asyncio.ensure_future(self.changed.wait())]
        if not training:
            waits.append(asyncio.ensure_future(may_train.wait()))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if training and may_train.is_set():  # otherwise the trainer has started to generate again
            batch.waited(now_s() - began, missing=missing, ready=ready, pipelined=self.pipelined)

    def interrupt(self, error: BaseException) -> None:
        """Raise this error when the loop next looks for groups."""
        self._error = error
        self.changed.set()

    def describe(self, batch: StepBatch) -> dict[str, Any]:
        """Fields of the step's event about what was held back, dropped, replayed and skipped."""
        dropped = self.admission.dropped
        out: dict[str, Any] = {}
        if self.asynchronous:
            counted_s = now_s() - self._generation.counted_from_s
            out |= {"lead": self.admission.lead.groups, "held_s": self.held_s, "counted_s": counted_s}
        if self.asynchronous or dropped.responses or self.admission.too_new:
            out |= {"too_old": dropped.responses, "too_old_tokens": dropped.tokens, "too_new": self.admission.too_new}
        if self._options.replay:
            out |= batch.describe_replay(self.admission.version)
        return out if self.selection is None else out | self.selection.describe()

    def tick(self, seconds: float) -> None:
        if self.asynchronous and self.admission.closed and self.rollout.dispatch.has_free_slots(self._name):
            self.held_s += seconds

    # What the stream reports.

    def informative(self, group: Group) -> bool:
        return informative(group, self._algorithm, self._options.max_tokens)

    def arrived(self, part: Group, whole: Group) -> None:
        """The policy's part of a group has completed, and its admission knows. Raises WindfallError if nothing ever
        asks for this policy: its trainer would wait forever."""
        self.pace.arrived(sum(r.sampled_count for r in part.responses))
        if part.responses and not self.admission.is_held(part.index):
            self._replaced.append(part)
        self._not_asked = self._not_asked + 1 if whole.responses and not part.responses else 0
        if self._not_asked >= NOT_ASKED_BATCHES * self.admission.batch:
            raise _not_asked(self._name, self._not_asked, whole)
        self.changed.set()


class Generation:
    """The tasks of a run: opened together for all policies, and handed out to each."""

    def __init__(self, rollout: Rollout, gate: TaskGate, group_size: int) -> None:
        self.rollout = rollout
        self.gate = gate
        self.groups: dict[str, PolicyGroups] = {}
        """By policy that is trained. A PolicyGroups adds itself."""
        self.reload: Callable[[], Awaitable[None]] = _nothing
        """Gives the rollout the journal's history. Called while the stream stands still, if it ran since the last
        call."""
        self.counted_from_s = 0.0
        """When the counters were reset (loop time, seconds)."""
        self._generated = 0
        self._size = group_size
        self._stream: Stream | None = None
        self._running: asyncio.Task[None] | None = None
        self._loaded = False
        self._pausing = asyncio.Lock()

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Stop the stream, and start it again, with the journal's history, once every policy has been restored."""
        async with self._pausing:
            await self.stop()
            if not self._loaded:
                await self.reload()
                self._loaded = True
            try:
                yield
            finally:  # if the trainer was lost again, the other policies go on
                if all(groups.restored for groups in self.groups.values()):
                    self.gate.reopen()
                    self.start()

    def start(self) -> None:
        groups = self.groups.values()
        self._stream = self.rollout.stream(
            size=self._size, sampling=self.rollout.sampling, on_group=self._group_arrived,
            on_skipped=self._task_skipped, on_too_old=self._too_old, is_wanted=self._is_wanted,
        )  # fmt: skip
        self._running = asyncio.create_task(self._stream.run(), name="generation")
        self._running.add_done_callback(self._ended)
        self._loaded = False
        self.rollout.forget_history(self.gate.needed)
        if not any(g.in_step for g in groups):
            self.reset_counters()  # what the journal has of open responses is counted as restored
            for g in groups:
                g.count_from_now()
        self._expire(self._stream)
        self._admit_unless_between_steps()

    async def stop(self) -> None:
        """Withdraw everything that is open. The tokens generated so far stay in the journal."""
        running, self._running, self._stream = self._running, None, None
        if running is not None:
            await asyncio.sleep(0)  # a task that has not begun would be canceled without withdrawing what is open
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running

    async def read_groups(self, tasks: Sequence[int]) -> list[Group]:
        """The groups of these tasks, with the responses that the journal has whole. The stream stands still."""
        rollout, history = self.rollout, self.rollout.history
        if not (known := [index for index in tasks if f"{index}/0" in history]):
            return []
        rollout.history = dict(history)  # another policy may have the task open
        try:
            options = {"size": self._size, "sampling": rollout.sampling, "counted": False, "restored_only": True}
            found = {group.index: group async for group in rollout.groups(known, **options)}
        finally:
            rollout.history = history
        return [found[index] for index in known if index in found]

    def _ended(self, running: asyncio.Task[None]) -> None:
        if running is self._running and not running.cancelled() and (error := running.exception()) is not None:
            for groups in self.groups.values():
                groups.interrupt(error)

    def admit(self) -> None:
        """Open the tasks that may be opened now."""
        while self._stream is not None and (tasks := self.gate.open()):
            self._stream.open(tasks)

    def _admit_unless_between_steps(self) -> None:
        """In synchronous training, generation stands still between two steps, also for the sake of an evaluation."""
        if any(g.asynchronous or g.in_step for g in self.groups.values()):
            self.admit()

    def published(self, policy: str) -> None:
        """The next version exists: what has become too old is dropped, and more tasks may be opened."""
        admission, stream = self.groups[policy].admission, self._stream
        admission.publish()
        if self.groups[policy].asynchronous and stream is not None:
            self._expire(stream)
            # The new version is offered already, so queued responses begin with it or with a newer one.
            admission.not_begun([*stream.not_begun(policy), *self._waiting()])
        self._admit_unless_between_steps()

    def _expire(self, stream: Stream) -> None:
        if any(g.asynchronous for g in self.groups.values()):
            training = {name: g for name, g in self.groups.items() if not g.admission.done} or self.groups
            stream.expire({name: g.admission.oldest_version for name, g in training.items()})

    def _waiting(self) -> set[int]:
        """Tasks that wait for another policy, without those that the journal has tokens of."""
        waiting = set(self.gate.waiting())
        return waiting and waiting - {int(id.partition("/")[0]) for id in self.rollout.history if ":" not in id}

    @property
    def generated(self) -> int:
        """Tokens of finished responses since the start, without those that the journal had."""
        return self._generated + self.rollout.sampled_tokens - self.rollout.restored_tokens

    def reset_counters(self) -> None:
        self._generated = self.generated
        self.rollout.reset_counters()
        self.counted_from_s = now_s()

    def tick(self, seconds: float) -> None:
        """Called every `seconds`: measures how long admission holds generation back."""
        for groups in self.groups.values():
            groups.tick(seconds)

    # What the stream reports.

    def _group_arrived(self, group: Group) -> None:
        parts = self.gate.finish(group, lambda name, part: self.groups[name].informative(part))
        for name, part in parts.items():
            self.groups[name].arrived(part, group)
        self.admit()

    def _task_skipped(self, index: int) -> None:
        self.gate.dismiss(index)
        self.admit()
        for groups in self.groups.values():
            groups.changed.set()

    def _is_wanted(self, index: int, task: Task) -> bool:
        """Whether some policy wants the prompt of a task that was drawn. What the journal has tokens of was wanted."""
        selections = [s for name in self.gate.holders(index) if (s := self.groups[name].selection) is not None]
        begun = any(f"{index}/{n}" in self.rollout.history for n in range(self._size))
        if self._stream is None or begun or not selections or any(s.wants(index, task.prompt) for s in selections):
            return True
        for selection in selections:
            selection.skip(task.prompt)
        self.gate.skip(index)
        self._stream.inbox.put_nowait(self.admit)  # not here: the stream may be opening other tasks
        return False

    def _too_old(self, index: int, tokens: int) -> None:
        self.rollout.sampled_tokens += tokens
        for groups in self.groups.values():
            if groups.admission.is_open(index):
                groups.admission.dropped.add(tokens)


def make_admission(recipe: Recipe) -> Admission:
    """`recipe`: as the policy sees it."""
    o = recipe.rollout
    # Deterministic runs train in order: how a gradient sum rounds must not depend on which worker was fastest.
    return Admission(
        batch=o.fresh_groups, steps=recipe.run.steps, staleness=o.staleness, max_draws=o.max_draws,
        in_order=recipe.run.deterministic,
    )  # fmt: skip


async def _nothing() -> None: ...


def _not_asked(name: str, tasks: int, last: Group) -> WindfallError:
    roles = sorted({segment.role for r in last.responses for segment in r.segments})
    return WindfallError(
        f"{tasks} tasks in a row asked nothing of the policy '{name}', so it cannot be trained. The last one asked "
        f"for: {', '.join(roles)}",
        where="policies",
        fix="Have the environment or the agent ask for this role, or remove the policy.",
    )


def now_s() -> float:
    """The event loop's clock in seconds. A simulated run has its own."""
    return asyncio.get_running_loop().time()
