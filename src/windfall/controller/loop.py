"""The loop of one policy, on one page, over the verbs (verbs.py).

    run      for every trainer of the policy that connects: generate and train side by side
    _step    sample              groups of tasks, generated and graded          (generation.py)
             forward_backward    full micro-batches, while others are generated
             optim_step          one or several updates
             publish             workers load the new weights
             save, evaluate      when due

If the trainer is lost, generation goes on until the next one connects; then the run continues from the trainer's step,
and responses of later steps are restored from the journal. A stop abandons the current step, which has not changed the
weights yet, and saves the last completed step.

A run with several policies has one loop for each, over the same stream of tasks (generation.py).

The state of a policy is (step, next_task, open_tasks) and the weights. Tasks and seeds follow from them. With replay or
selected prompts, it has the tasks to replay and what is known about prompts, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any, Protocol

from windfall.algorithms.base import Algorithm
from windfall.controller.credit import credit
from windfall.controller.generation import PolicyGroups, now_s
from windfall.controller.rollout.evaluation import Evaluation
from windfall.controller.rollout.stream import Stopped
from windfall.controller.step_batch import StepBatch, describe_updates
from windfall.controller.tasks.admission import Admission
from windfall.errors import WindfallError
from windfall.events.log import EventLog
from windfall.recipe.sections import Recipe
from windfall.training import (
    ENGINE_GAP,
    MIN_FRESH,
    NOT_FINITE,
    NOTHING,
    CheckpointState,
    NewVersion,
    Report,
    Sample,
    TrainerLost,
)
from windfall.types import Group, in_fp8
from windfall.verbs import TrainingVerbs

WHY_SKIPPED = {
    NOT_FINITE: "the gradient was not finite",
    NOTHING: "the gradient was zero: rewards did not differ within any group, or no token had any weight",
    ENGINE_GAP: "log-probs of engines in fp8 and of the trainer differed by more than train.engine_gap_limit",
}


class Run(Protocol):
    """What the loop needs from the controller's process besides the verbs. run_policy.RunPolicy implements it."""

    async def connected(self) -> None:
        """Wait until a trainer is connected."""
        ...

    async def restore(self, admission: Admission) -> CheckpointState:
        """Prepare the run and the policy's admission to continue from the trainer's state, and return that state. The
        stream stands still."""
        ...

    async def offer(self, published: NewVersion) -> None:
        """Assign work with this version from now on. Copies of the policy that are due are renewed first, so that it
        does not depend on chance which one plays against the next tasks."""
        ...

    def before_update(self, step: int, tasks: Sequence[int]) -> None:
        """The weights are about to change. `tasks`: those of the step's batch."""
        ...

    def saved(self, state: CheckpointState) -> None:
        """A checkpoint of this state is on disk."""
        ...

    def leave_fp8(self, step: int, gap: float) -> None:
        """Log-probs of engines in fp8 and of the trainer differ by more than the alarm: have workers use a KV cache in
        bf16 from now on. Does nothing if they do."""
        ...

    def counters(self, staleness: dict[str, Any]) -> dict[str, Any]:
        """What happened to the fleet since the last call. `staleness`: the fields of the step's event about it."""
        ...


class Loop:
    def __init__(
        self, recipe: Recipe, algorithm: Algorithm, policy: TrainingVerbs, groups: PolicyGroups,
        evaluation: Evaluation, run: Run, events: EventLog,
    ) -> None:  # fmt: skip
        self.recipe = recipe
        self.algorithm = algorithm
        self.policy = policy
        self.groups = groups
        self.evaluation = evaluation
        self.events = events
        self.state = CheckpointState(step=0, next_task=0)
        self._run = run
        self._updates = 0
        self._not_finite = 0
        """Optimizer updates of this process, and how many were skipped because their gradient was not finite."""
        self._calls = 0
        """Number of the last call of `forward_backward`; part of its id."""

    async def run(self) -> CheckpointState:
        """Run all steps that are left. Returns the state that was reached and saved."""
        try:
            while True:
                try:
                    await self._run.connected()
                    async with self.groups.restoring():
                        self.state = await self._run.restore(self.groups.admission)
                        await self.groups.restore(self.state)
                        self.evaluation.forget_after(self.state.step)
                    return await self._train_to_end()
                except TrainerLost as e:
                    self.events.instant("trainer_lost", step=self.state.step, why=str(e))
        except Stopped:
            return await self._stop()

    async def _train_to_end(self) -> CheckpointState:
        # The answer to the Publish or Save of this trainer's step may have been lost.
        await self._save_and_evaluate_if_due()
        while self.state.step < self.recipe.run.steps:
            await self._step()
            await self._save_and_evaluate_if_due()
        if 0 < self._updates == self._not_finite:
            raise _nothing_learned(self._updates)
        return self.state

    async def _step(self) -> None:
        groups, rollout, pace = self.groups, self.groups.rollout, self.groups.pace
        step, before, started = self.state.step + 1, self.state, now_s()
        pace.begin(step)
        groups.begin_step()
        with self.events.span("rollout", step=step) as span:
            batch = await self._collect()
            span["tokens"] = rollout.sampled_tokens
            if not batch.rewards:
                raise rollout.failures.no_rewards(f"step {step}", len(batch.scores))
        pace.generated()
        training = now_s()
        with self.events.span("train", step=step, early_s=batch.early_s, asked_s=batch.asked_s) as span:
            reports = await self._train(batch, step)
            span["update_s"] = batch.update_s
        train_s = batch.early_s + now_s() - training
        tokens = batch.tokens if groups.asynchronous else rollout.sampled_tokens
        pace.end(tokens=tokens, train_s=train_s, train_wait_s=batch.wait_s)
        self._log_step(before, batch, reports, train_s, now_s() - started)
        groups.admission.lead.end_step(
            spare=batch.spare, missing=batch.missing, wait_s=batch.starved_s, train_s=train_s
        )
        groups.step_logged()
        groups.published()

    async def _collect(self) -> StepBatch:
        """Take groups until the batch is complete. Train on full micro-batches before waiting for more."""
        groups, batch = self.groups, self.groups.new_batch()
        while True:
            if groups.fill(batch):
                return batch
            if groups.pipelined and batch.micro_batches and groups.pace.may_train.is_set():
                began = now_s()
                batch.early_s += await self._forward_backward(batch.hand_over(groups.admission.ready))
                batch.asked_s += now_s() - began
            else:
                await groups.wait(batch)

    async def _train(self, batch: StepBatch, step: int) -> list[Report]:
        """Train on the rest of the batch, update the weights and publish them."""
        admission, count = self.groups.admission, self.recipe.train.minibatches
        if self.groups.one_by_one:
            while batch.micro_batches or batch.partial:
                await self._forward_backward(batch.hand_over(admission.ready))
            samples: list[list[Sample]] = [[]]
        else:
            # First credit over the whole batch, then mini-batches of whole groups.
            credited = self._credit(sorted(batch.kept, key=lambda g: g.index))
            samples = [list(chain.from_iterable(credited[i::count])) for i in range(count)]
        if count > 1:
            samples = [await self.policy.forward(s, id=self._next_id("forward")) for s in samples]
        state = self.groups.state_after(step, batch)
        self._run.before_update(step, admission.taken)
        reports = []
        for n, part in enumerate(samples, 1):
            if part:
                await self.policy.forward_backward(part, id=self._next_id("forward_backward"))
            began = now_s()
            completed = state if n == len(samples) else None
            reports.append(await self.policy.optim_step(completed, id=f"{step}/optim_step/{n}"))
            batch.update_s += now_s() - began
        began = now_s()
        published = await self.policy.publish(id=f"{step}/publish")
        batch.update_s += now_s() - began
        batch.weights_bytes = published.update_bytes
        self.state = state
        await self._run.offer(published)
        return reports

    async def _forward_backward(self, groups: Sequence[Group]) -> float:
        """Have the trainer add the gradients of these groups. Returns the seconds it took."""
        if not groups:
            return 0.0
        samples = list(chain.from_iterable(self._credit(groups)))
        return (await self.policy.forward_backward(samples, id=self._next_id("forward_backward"))).s

    def _credit(self, groups: Sequence[Group]) -> list[list[Sample]]:
        version = self.state.step if self.groups.lagging else None
        return credit(groups, self.algorithm, self.recipe.rollout.max_tokens, version)

    def _next_id(self, verb: str) -> str:
        self._calls += 1
        return f"{self.state.step + 1}/{verb}/{self._calls}"

    async def _save_and_evaluate_if_due(self) -> None:
        step = self.state.step
        if step > 0 and (step == self.recipe.run.steps or step % self.recipe.checkpoint.every == 0):
            await self._write_checkpoint()
            self._run.saved(self.state)
        if self.evaluation.due(step):
            self.groups.pace.begin_evaluation()
            await self.evaluation.evaluate(step)

    async def _write_checkpoint(self) -> None:
        with self.events.span("checkpoint", step=self.state.step) as span:
            span["path"] = await self.policy.save(id=f"{self.state.step}/save")

    async def _stop(self) -> CheckpointState:
        try:
            await self._write_checkpoint()  # the journal stays: it has the tokens of the abandoned step
        except TrainerLost as e:  # the last checkpoint and the journal have everything
            self.events.instant("trainer_lost", step=self.state.step, why=str(e))
        self.events.instant("stopped", step=self.state.step)
        return self.state

    # What the log says.

    def _log_step(
        self, before: CheckpointState, batch: StepBatch, reports: list[Report], train_s: float, took_s: float
    ) -> None:
        step, rollout = self.state.step, self.groups.rollout
        self._log_updates(step, reports)
        drawn = range(before.next_task, self.state.next_task)
        tasks: dict[str, Any] = {"lengths": [batch.lengths.get(index, []) for index in drawn]}
        if self.groups.asynchronous:
            used = sorted(batch.lengths)
            tasks = {"tasks": used, "lengths": [batch.lengths[index] for index in used]}
            tasks |= batch.describe_staleness(before.step, self.groups.admission.staleness)
        tasks |= batch.describe() | self.groups.describe(batch)
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
            tok_per_s=self.groups.tok_per_s(took_s),
            **tasks,
            **describe_updates(reports),
            **self._run.counters(tasks),
        )

    def _log_updates(self, step: int, reports: list[Report]) -> None:
        """Count the updates and log what was wrong with them."""
        skipped = [r.skipped for r in reports if r.skipped]
        self._updates += len(reports)
        self._not_finite += skipped.count(NOT_FINITE)
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
        if self.recipe.engine.kv_dtype == "fp8":
            gap, tokens = _fp8_gap(reports)
            if ENGINE_GAP in skipped:
                self._run.leave_fp8(step, worst.engine_gap)
            elif tokens >= MIN_FRESH and not gap <= alarm:  # a NaN fails every comparison
                self._run.leave_fp8(step, gap)


def _nothing_learned(updates: int) -> WindfallError:
    return WindfallError(
        f"nothing was learned since the run was started or resumed: all {updates} updates were skipped, because no "
        "gradient was finite",
        where="train",
        fix="The model may be damaged, or its dtype too narrow: try model.dtype = 'float32', or another model.",
    )


def _gap(report: Report) -> float:
    """The report's engine gap; infinite if it is not a number."""
    return report.engine_gap if math.isfinite(report.engine_gap) else math.inf


def _fp8_gap(reports: Sequence[Report]) -> tuple[float, int]:
    """The mean gap of the engines with a KV cache in fp8, and the number of tokens that it is known for."""
    known = [(r.engine_gaps[name], n) for r in reports for name, n in r.engine_tokens.items() if in_fp8(name)]
    tokens = sum(n for _, n in known)
    return sum(gap * n for gap, n in known) / max(1, tokens), tokens
