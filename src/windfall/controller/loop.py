"""The loops of a run, on one page.

    run             for every trainer that connects: generate and train side by side
    generation      stream      tasks become graded groups                   waits for: workers, rewards
                    _admit      open as many tasks as the trainer needs      when a group completes or a version appears
    training        for every step: _step; a checkpoint and an evaluation when due (asynchronous: alongside training)
    _step           begin       the trainer's own engine may generate too    (rollout/local_generation.py)
                    _collect    take groups; train on full micro-batches     waits for: ready groups
                    _update     one or several optimizer updates             waits for: the trainer
                    offer       workers load the new weights

    who waits for whom

        admission ──tasks──▶ stream ──episodes──▶ dispatch ──work──▶ workers
            ▲                  │ ▲                   │ ▲                │
            │                  │ └─ turns, rewards ──┘ └────tokens──────┘
            │                  └──groups──▶ admission ──oldest first, not too old──▶ Controller ──samples──▶ trainer
            └───────────────────────────────── versions ◀──────────────────────────────────publishes───────────┘

With rollout.staleness = 0, the batch of a step is opened when the step begins, and generation stands still until the
next one: synchronous training. Otherwise generation goes on while the trainer trains (scheduling/admission.py).

Nothing here blocks the event loop, and nothing here waits for one particular worker. If the trainer is lost,
generation goes on until the next one connects; then the run continues from the trainer's step, and responses of later
steps are restored from the journal. An error of the stream is raised when training next looks for groups, so that a
request to the trainer is never abandoned halfway. A stop abandons the current step, which has not changed the weights
yet, and saves the last completed step.

The state of a run is (step, next_task, open_tasks) and the weights. Tasks and seeds follow from them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

from windfall.algorithms.base import Algorithm
from windfall.controller.credit import credit, outcomes
from windfall.controller.rollout.evaluation import Evaluation
from windfall.controller.rollout.stream import Rollout, Stopped, Stream
from windfall.controller.scheduling.admission import Admission
from windfall.controller.step_batch import StepBatch, describe_updates
from windfall.envs.held_out import HeldOut
from windfall.errors import WindfallError
from windfall.events.log import EventLog
from windfall.recipe import Recipe
from windfall.training import NOT_FINITE, NOTHING, CheckpointState, Report, Sample, TrainerLost
from windfall.types import Group

WHY_SKIPPED = {
    NOT_FINITE: "the gradient was not finite",
    NOTHING: "the gradient was zero: rewards did not differ within any group, or no token had any weight",
}
MAX_SILENT_STEPS = 3
"""A run ends with an error if no agent calls the policy in this many steps in a row."""


class AsyncTrainer(Protocol):
    """What the controller needs from a trainer. controller.remote_trainer.RemoteTrainer implements it."""

    async def prepare(self, samples: Sequence[Sample]) -> list[Sample]: ...
    async def accumulate(self, samples: Sequence[Sample]) -> float: ...
    async def update(self, state: CheckpointState | None) -> tuple[Report, Any]: ...
    async def save(self) -> str: ...


class Pace(Protocol):
    """Decides when the trainer generates and when it trains. In controller/rollout, LocalGeneration implements it for
    synchronous training, and IdleGeneration for asynchronous training."""

    may_train: asyncio.Event
    """Set while training may begin."""

    def begin(self, step: int) -> None: ...
    def begin_evaluation(self) -> None: ...
    def arrived(self, tokens: int) -> None: ...
    def trainable(self) -> None: ...
    def generated(self) -> None: ...
    def end(self, *, tokens: int, train_s: float, train_wait_s: float) -> None: ...


@dataclass(kw_only=True)
class Controller:
    recipe: Recipe
    algorithm: Algorithm
    trainer: AsyncTrainer
    rollout: Rollout
    pace: Pace
    events: EventLog
    connected: Callable[[], Awaitable[None]]
    """Waits until a trainer is connected."""
    restore: Callable[[Admission], Awaitable[CheckpointState]]
    """Prepares the run and its admission to continue from the trainer's state, and returns that state. No task may be
    open."""
    offer: Callable[[Any], None]
    """Called when the trainer has published: work is assigned with this version from now on."""
    saved: Callable[[CheckpointState], None]
    """Called when a checkpoint of this state is on disk."""
    before_update: Callable[[int, Sequence[int]], None] = lambda step, tasks: None
    """Called before the weights change, with the step and the tasks of its batch."""
    note_staleness: Callable[[dict[str, Any]], None] = lambda fields: None
    """Called after every step of asynchronous training, with the fields of its event about staleness."""
    counters: Callable[[], dict[str, Any]] = dict
    """Returns what happened to the fleet since the last call."""
    evaluated: set[int] = field(default_factory=set)
    """Steps whose evaluation is already in the log."""
    evaluation_lost: bool = False
    """An evaluation was not completed before the controller was restarted."""
    held_out: HeldOut | None = None
    """Tasks for evaluation. None: the recipe's `eval.tasks` tasks."""
    micro_tokens: int = 0
    """Number of tokens, prompts included, at which a micro-batch is full."""
    state: CheckpointState = field(default_factory=lambda: CheckpointState(step=0, next_task=0))
    updates: int = 0
    not_finite: int = 0
    """`updates` counts the optimizer updates of this process; `not_finite` counts those that were skipped because their
    gradient was not finite."""

    def __post_init__(self) -> None:
        o, run = self.recipe.rollout, self.recipe.run
        # Deterministic runs train in order: how a gradient sum rounds must not depend on which worker was fastest.
        self.admission = Admission(
            batch=o.groups, steps=run.steps, staleness=o.staleness, max_draws=o.max_draws, in_order=run.deterministic
        )
        self._asynchronous = o.staleness > 0
        self._stream: Stream | None = None
        self._generating: asyncio.Task[None] | None = None
        """Runs the stream."""
        self._silent_steps = 0
        """Number of the last steps in a row in which no token was sampled."""
        self._replaced: list[Group] = []
        """Replaced groups that the step's statistics do not contain yet."""
        self._changed = asyncio.Event()
        """Set when a group has completed, or the stream has ended."""
        self._held_s = 0.0
        """Seconds since the counters were reset in which admission held generation back."""
        self._counted_from_s = 0.0
        """When the counters of an asynchronous run were reset (loop time, seconds)."""
        self.evaluation = Evaluation(
            self.recipe, self.rollout, self.events, self.held_out, evaluated=self.evaluated,
            lost=self.evaluation_lost, on_change=self._changed.set,
        )  # fmt: skip

    async def run(self) -> CheckpointState:
        """Run all steps that are left. Returns the state that was reached and saved."""
        try:
            while True:
                try:
                    await self.connected()
                    interrupted = await self._stop_generating()
                    self.state = await self.restore(self.admission)
                    self._start_generating()
                    self.evaluation.forget_after(self.state.step)
                    self.evaluation.resume(interrupted, reached=self.state.step)
                    return await self._train_to_end()
                except TrainerLost as e:
                    self.events.instant("trainer_lost", step=self.state.step, why=str(e))
        except Stopped:
            return await self._stop()
        finally:
            with suppress(Exception):  # fault boundary: the run is over, or ends with another error
                await self._stop_generating()

    # Generation.

    def _start_generating(self) -> None:
        o = self.recipe.rollout
        self._stream = self.rollout.stream(
            size=o.group_size, sampling=o.sampling(), on_group=self._group_arrived,
            on_skipped=self._task_skipped, on_too_old=self._too_old,
        )  # fmt: skip
        self._generating = asyncio.create_task(self._stream.run(), name="generation")
        self._generating.add_done_callback(lambda _: self._changed.set())
        self._replaced = []
        self._reset_counters()  # what the journal has of open responses is counted as restored
        if self._asynchronous:
            self._stream.expire(self.admission.oldest_version)
            self._admit()

    async def _stop_generating(self) -> list[int]:
        """Withdraw everything that is open. The tokens generated so far stay in the journal. Returns the steps whose
        evaluation is interrupted."""
        evaluations = await self.evaluation.interrupt()
        generating, self._generating, self._stream = self._generating, None, None
        if generating is not None:
            generating.cancel()
            with suppress(asyncio.CancelledError, TrainerLost):
                await generating
        return evaluations

    def _admit(self) -> None:
        """Open the tasks that may be opened now."""
        while self._stream is not None and (tasks := self.admission.admit()):
            self._stream.open(tasks)

    def _group_arrived(self, group: Group) -> None:
        self.pace.arrived(sum(r.sampled_count for r in group.responses))
        if not group.responses:
            self.admission.drop(group.index)
        else:
            informative = self.algorithm.informative(outcomes(group, self.recipe.rollout.max_tokens))
            self.admission.finish(group, informative=informative)
            if not informative:
                self._replaced.append(group)
        self._after_change()

    def _task_skipped(self, index: int) -> None:
        self.admission.dismiss(index)
        self._after_change()

    def _reset_counters(self) -> None:
        self.rollout.reset_counters()
        self._held_s, self._counted_from_s = 0.0, _now()

    def _too_old(self, index: int, tokens: int) -> None:
        del index
        self.admission.dropped.add(tokens)
        self.rollout.sampled_tokens += tokens

    def _after_change(self) -> None:
        self._admit()
        self._changed.set()

    def tick(self, seconds: float) -> None:
        """Called every `seconds`: measures how long admission holds generation back."""
        if self._asynchronous and self.admission.closed and self.rollout.dispatch.has_free_slots():
            self._held_s += seconds

    # Training.

    async def _train_to_end(self) -> CheckpointState:
        # The answer to the Update or Save of this trainer's step may have been lost.
        await self._save_if_due()
        await self._evaluate_if_due()
        while self.state.step < self.recipe.run.steps:
            await self._step()
            await self._save_if_due()
            await self._evaluate_if_due()
        await self.evaluation.finish()
        if 0 < self.updates == self.not_finite:
            raise _nothing_learned(self.updates)
        return self.state

    async def _save_if_due(self) -> None:
        step = self.state.step
        if step > 0 and (step == self.recipe.run.steps or step % self.recipe.checkpoint.every == 0):
            await self._save()

    async def _stop(self) -> CheckpointState:
        try:
            await self._write_checkpoint()  # the journal stays: it has the tokens of the abandoned step
        except TrainerLost as e:  # the last checkpoint and the journal have everything
            self.events.instant("trainer_lost", step=self.state.step, why=str(e))
        self.events.instant("stopped", step=self.state.step)
        return self.state

    async def _step(self) -> None:
        step, started, before = self.state.step + 1, _now(), self.state
        if not self._asynchronous:
            self.rollout.reset_counters()
        self.pace.begin(step)
        self._admit()
        with self.events.span("rollout", step=step) as span:
            batch = await self._collect()
            span["tokens"] = self.rollout.sampled_tokens
            if not batch.rewards:
                raise self.rollout.failures.no_rewards(f"step {step}")
            self._check_silence(batch, step)
        self.pace.generated()
        training = _now()
        with self.events.span("train", step=step, early_s=batch.early_s, asked_s=batch.asked_s) as span:
            reports = await self._update(batch, step)
            span["update_s"] = batch.update_s
        train_s = batch.early_s + _now() - training
        tokens = batch.tokens if self._asynchronous else self.rollout.sampled_tokens
        self.pace.end(tokens=tokens, train_s=train_s, train_wait_s=batch.wait_s)
        self._log_step(before, batch, reports, train_s, _now() - started)
        self.admission.lead.end_step(spare=batch.spare, missing=batch.missing, wait_s=batch.starved_s, train_s=train_s)
        if self._asynchronous:  # at once: generation goes on between two steps, and its tokens belong to the next one
            self._reset_counters()
        self._publish()

    def _check_silence(self, batch: StepBatch, step: int) -> None:
        """Log a step in which no agent called the policy. Raises WindfallError if it is one of several in a row."""
        if batch.silent < len(batch.rewards):
            self._silent_steps = 0
            return
        self._silent_steps += 1
        self.events.instant("no_calls", step=step, agents=batch.silent, steps=self._silent_steps)
        if self._silent_steps == MAX_SILENT_STEPS:
            raise _no_calls(step, batch.silent)

    def _publish(self) -> None:
        """The next version exists: what has become too old is dropped, and more tasks may be opened."""
        self.admission.publish()
        if self._asynchronous and self._stream is not None:
            self._stream.expire(self.admission.oldest_version)
            # The new version is offered already, so queued responses begin with it or with a newer one.
            self.admission.not_begun(self._stream.not_begun())
            self._admit()

    async def _collect(self) -> StepBatch:
        """Take groups until the batch is complete. Train on full micro-batches before waiting for more."""
        batch = StepBatch()
        while True:
            self._changed.clear()
            self._take(batch)
            if self.admission.complete:
                batch.completed(self.admission.ready, pipelined=self._pipelining)
                return batch
            if self._pipelining and batch.micro_batches and self.pace.may_train.is_set():
                began = _now()
                batch.early_s += await self._accumulate(batch.hand_over(self.admission.ready))
                batch.asked_s += _now() - began
            else:
                await self._wait_for_groups(batch)

    def _take(self, batch: StepBatch) -> None:
        """Take the groups that are ready. Raises the error of the stream or of an evaluation, if there is one."""
        self.evaluation.check()
        if self._generating is not None and self._generating.done():
            self._generating.result()
        size = self.recipe.rollout.group_size
        while (group := self.admission.take()) is not None:
            batch.add(group, size, self.micro_tokens)
            if self._pipelining and batch.micro_batches:
                self.pace.trainable()
        for group in self._replaced:
            batch.note(group, size)
        self._replaced.clear()
        self._admit()  # a group may have been too old

    async def _wait_for_groups(self, batch: StepBatch) -> None:
        """Wait for a change or, while the trainer generates, until it stops."""
        may_train, began = self.pace.may_train, _now()
        training = may_train.is_set()
        missing, ready = self.admission.batch - len(self.admission.taken), self.admission.ready
        waits = [asyncio.ensure_future(self._changed.wait())]
        if not training:
            waits.append(asyncio.ensure_future(may_train.wait()))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if training and may_train.is_set():  # otherwise the trainer has started to generate again
            batch.waited(_now() - began, missing=missing, ready=ready, pipelined=self._pipelining)

    @property
    def _streaming(self) -> bool:
        """Groups are accumulated one by one: neither their credit nor their mini-batch depends on other groups."""
        return self.algorithm.scope == "group" and self.recipe.train.minibatches == 1

    @property
    def _pipelining(self) -> bool:
        """Train on groups while others are still being generated."""
        return self._streaming and self.recipe.techniques.pipelining

    def _credit(self, groups: Sequence[Group]) -> list[list[Sample]]:
        version = self.state.step if self._asynchronous else None
        return credit(groups, self.algorithm, self.recipe.rollout.max_tokens, version)

    async def _accumulate(self, groups: Sequence[Group]) -> float:
        """Have the trainer add the gradients of these groups. Returns the seconds it took."""
        if not groups:
            return 0.0
        return await self.trainer.accumulate(list(chain.from_iterable(self._credit(groups))))

    async def _update(self, batch: StepBatch, step: int) -> list[Report]:
        count = self.recipe.train.minibatches
        if self._streaming:
            while batch.micro_batches or batch.partial:  # those that are not accumulated yet
                await self._accumulate(batch.hand_over(self.admission.ready))
            samples: list[list[Sample]] = [[]]
        else:
            # First credit over the whole batch, then mini-batches of whole groups.
            credited = self._credit(sorted(batch.kept, key=lambda g: g.index))
            samples = [list(chain.from_iterable(credited[i::count])) for i in range(count)]
        if count > 1:
            samples = [await self.trainer.prepare(s) for s in samples]
        state = CheckpointState(step=step, next_task=self.admission.next_task, open_tasks=self.admission.open_tasks)
        self.before_update(step, self.admission.taken)
        reports = []
        for n, part in enumerate(samples, 1):
            if part:
                await self.trainer.accumulate(part)
            began = _now()
            report, published = await self.trainer.update(state if n == len(samples) else None)
            batch.update_s += _now() - began
            reports.append(report)
        batch.weights_bytes = getattr(published, "weights_bytes", 0)
        self.state = state
        self.offer(published)
        return reports

    async def _evaluate_if_due(self) -> None:
        step = self.state.step
        if self.evaluation.due(step) and not self.evaluation.start(step):
            if not self._asynchronous:
                self.rollout.reset_counters()  # rewards that were missing in the last step do not count here
            self.pace.begin_evaluation()
            await self.evaluation.evaluate(step)

    async def _save(self) -> None:
        await self._write_checkpoint()
        self.saved(self.state)

    async def _write_checkpoint(self) -> None:
        with self.events.span("checkpoint", step=self.state.step) as span:
            span["path"] = await self.trainer.save()

    # What the log says.

    def _log_step(
        self, before: CheckpointState, batch: StepBatch, reports: list[Report], train_s: float, took_s: float
    ) -> None:
        step, rollout, dropped = self.state.step, self.rollout, self.admission.dropped
        self._log_updates(step, reports)
        drawn, counted_s = range(before.next_task, self.state.next_task), took_s
        tasks: dict[str, Any] = {"lengths": [batch.lengths.get(index, []) for index in drawn]}
        if self._asynchronous:
            used, counted_s = sorted(batch.lengths), _now() - self._counted_from_s
            tasks = {"tasks": used, "lengths": [batch.lengths[index] for index in used]}
            tasks |= batch.describe_staleness(before.step, self.admission.staleness)
            tasks |= {"lead": self.admission.lead.groups, "held_s": self._held_s, "counted_s": counted_s}
        if self._asynchronous or dropped.responses or self.admission.too_new:
            tasks |= {"too_old": dropped.responses, "too_old_tokens": dropped.tokens}
            tasks |= {"too_new": self.admission.too_new}
        if self._asynchronous:
            self.note_staleness({**tasks, "train_wait_s": batch.wait_s})
        self.events.scalar(
            "step",
            step=step,
            drawn=len(drawn),
            skipped=rollout.failures.skipped,
            missing=rollout.failures.missing,
            **rollout.grading.describe(),
            made=rollout.sampled_tokens,
            restored=rollout.restored_tokens,
            s=took_s,
            train_s=train_s,
            weights_bytes=batch.weights_bytes,
            tok_per_s=(rollout.sampled_tokens - rollout.restored_tokens) / counted_s,
            **batch.describe(),
            **tasks,
            **describe_updates(reports),
            **self.counters(),
        )

    def _log_updates(self, step: int, reports: list[Report]) -> None:
        """Count the updates and log what was wrong with them."""
        skipped = [r.skipped for r in reports if r.skipped]
        self.updates += len(reports)
        self.not_finite += skipped.count(NOT_FINITE)
        for why in sorted(set(skipped)):
            self.events.instant(
                "update_skipped", step=step, why=WHY_SKIPPED[why], updates=skipped.count(why), of=len(reports)
            )
        worst, alarm = max(reports, key=_gap), self.recipe.train.engine_gap_alarm
        if _gap(worst) > alarm:
            self.events.instant(
                "engine_gap", step=step, mean=worst.engine_gap, max=worst.engine_gap_max, alarm=alarm,
                engines=worst.engine_gaps,
            )  # fmt: skip


def _now() -> float:
    """The event loop's clock in seconds. A simulated run has its own."""
    return asyncio.get_running_loop().time()


def _nothing_learned(updates: int) -> WindfallError:
    return WindfallError(
        f"nothing was learned since the run was started or resumed: all {updates} updates were skipped, because no "
        "gradient was finite",
        where="train",
        fix="The model may be damaged, or its dtype too narrow: try model.dtype = 'float32', or another model.",
    )


def _no_calls(step: int, agents: int) -> WindfallError:
    return WindfallError(
        f"no agent has called the policy in {MAX_SILENT_STEPS} steps; all {agents} agents of step {step} ended with a "
        "reward and without a call, so there is nothing to train on",
        where="env",
        fix="Have the agent use OPENAI_BASE_URL and OPENAI_API_KEY from its environment, then `windfall resume`.",
    )


def _gap(report: Report) -> float:
    """The report's engine gap; infinite if it is not a number."""
    return report.engine_gap if math.isfinite(report.engine_gap) else math.inf
