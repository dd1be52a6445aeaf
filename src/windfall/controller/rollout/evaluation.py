"""Evaluation on held-out tasks: `eval.samples` responses per task, all from one version of the weights.

In synchronous training the run waits for an evaluation. In asynchronous training it goes on: some workers keep the
version until its evaluation is over (scheduling/fixed_versions.py). The run still waits for the first and the last
evaluation, and for one that only the trainer's own engine can run.

    due ──▶ evaluate            the run waits
        └─▶ start ──▶ [ runs alongside training ] ──▶ logged
                          │ no worker holds the version any more: abandoned, and the next version is evaluated instead
                          └ the trainer is lost: interrupted, and started again with its tokens from the journal
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from windfall.controller.rollout.stream import Rollout, VersionGone
from windfall.controller.step_batch import Scores, describe_scores
from windfall.envs.base import HELD_OUT
from windfall.envs.held_out import EvaluationTasks
from windfall.events.log import EventLog
from windfall.recipe.sections import Recipe


class Evaluation:
    def __init__(
        self,
        recipe: Recipe,
        rollout: Rollout,
        events: EventLog,
        held_out: EvaluationTasks | None = None,
        *,
        evaluated: Iterable[int] = (),
        lost: bool = False,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`held_out`: by default, the recipe's `eval.tasks` tasks, starting at HELD_OUT. `evaluated`: steps whose
        evaluation is in the log. `lost`: an evaluation was not completed before the controller was restarted.
        `on_change`: called when an evaluation alongside training ends."""
        tasks = recipe.eval.tasks
        self._recipe = recipe
        self._rollout = rollout
        self._events = events
        self._on_change = on_change
        self._held_out = held_out or EvaluationTasks(tasks=tasks, description=f"{tasks} held-out tasks")
        self._asynchronous = recipe.rollout.staleness > 0
        self._evaluated, self._lost = set(evaluated), lost
        self._running: dict[int, asyncio.Task[None]] = {}
        """Evaluations alongside training, by step."""

    @property
    def evaluated(self) -> frozenset[int]:
        """Steps whose evaluation is in the log."""
        return frozenset(self._evaluated)

    def forget_after(self, step: int) -> None:
        """Later steps are trained again, and evaluated again."""
        self._evaluated = {s for s in self._evaluated if s <= step}

    def due(self, step: int) -> bool:
        o, last = self._recipe.eval, self._recipe.run.steps
        due = step == 0 or step >= last or self._lost or (o.every and step % o.every == 0)
        return bool(due and self._held_out.tasks) and step not in self._evaluated and step not in self._running

    def start(self, step: int) -> bool:
        """Evaluate this step alongside training. False if the run must wait for the evaluation instead."""
        if not self._asynchronous or step == 0 or step >= self._recipe.run.steps:
            return False
        if not self._rollout.dispatch.keep_version(self._held_out.tasks * self._recipe.eval.samples):
            return False
        self._events.instant("eval_started", step=step)
        self._run_beside_training(step)
        return True

    def _run_beside_training(self, step: int) -> None:
        async def run() -> None:
            try:
                await self.evaluate(step)
            except VersionGone as e:
                self._events.instant("eval_abandoned", step=step, why=str(e))
                self._lost = True
            self._rollout.dispatch.release_version(step)
            del self._running[step]

        task = self._running[step] = asyncio.create_task(run(), name=f"evaluation of step {step}")
        task.add_done_callback(lambda _: self._on_change())

    def check(self) -> None:
        """Raise the error of an evaluation that has failed."""
        for task in self._running.values():
            if task.done():
                task.result()

    async def finish(self) -> None:
        """Wait for the evaluations alongside training."""
        while self._running:
            await asyncio.wait(self._running.values(), return_when=asyncio.FIRST_COMPLETED)
            self.check()

    async def interrupt(self) -> list[int]:
        """Stop the evaluations alongside training. Returns their steps. Workers keep the versions."""
        running, self._running = self._running, {}
        for task in running.values():
            task.cancel()
        await asyncio.gather(*running.values(), return_exceptions=True)
        return list(running)

    def resume(self, steps: Iterable[int], *, reached: int) -> None:
        """Start interrupted evaluations again, except those of steps after `reached`, which are trained again."""
        for step in steps:
            if step <= reached:
                self._run_beside_training(step)
            else:
                self._rollout.dispatch.release_version(step)

    async def evaluate(self, step: int) -> None:
        """Evaluate the version of this step, and log the result."""
        sampling = self._recipe.rollout.sampling(self._recipe.eval.temperature)
        rewards: dict[int, tuple[float, ...]] = {}
        scores: list[Scores] = []
        lengths: dict[int, int] = {}
        self._lost = False
        with self._events.span("eval", step=step):
            tasks = range(HELD_OUT, HELD_OUT + self._held_out.tasks)
            groups = self._rollout.groups(
                tasks,
                size=self._recipe.eval.samples,
                sampling=sampling,
                scope=f"eval-{step}:",
                version=step if self._asynchronous else None,
            )
            async with aclosing(groups):
                async for group in groups:
                    if group.rewards:
                        rewards[group.index] = group.rewards
                    scores += [response.scores for response in group.responses]
                    counts = [response.sampled_count for response in group.responses]
                    lengths[group.index] = round(sum(counts) / len(counts))
        if not rewards:
            raise self._rollout.failures.no_rewards(f"the evaluation after step {step}")
        all_rewards = [reward for group in rewards.values() for reward in group]
        self._events.scalar(
            "eval",
            step=step,
            reward=sum(all_rewards) / len(all_rewards),
            graded=len(all_rewards),
            responses=len(tasks) * self._recipe.eval.samples,
            tasks=len(rewards),
            on=self._held_out.description,
            lengths=[lengths.get(index, 0) for index in tasks],
            **describe_passes(self._recipe.eval, list(rewards.values())),
            **describe_scores(scores),
        )
        self._evaluated.add(step)


def describe_passes(options: Any, rewards: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Fields of the event about pass@k. `options`: the [eval] section; `rewards`: those of each task. `pass_at` is
    pass@k by k."""
    if not options.pass_at:
        return {}
    passes = {k: mean_pass_at(rewards, k, options.pass_reward) for k in sorted(set(options.pass_at))}
    out: dict[str, Any] = {"pass_at": {str(k): p for k, (p, _) in passes.items()}}
    left_out = {str(k): len(rewards) - tasks for k, (_, tasks) in passes.items() if tasks < len(rewards)}
    return out | ({"pass_left_out": left_out} if left_out else {})


def pass_at_k(responses: int, passed: int, k: int) -> float:
    """The unbiased estimate for one task from `responses` responses, of which `passed` passed: the share of all
    selections of k responses that contain one that passed (Chen et al., 2021).

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
    (0.25, 0.5, 1.0)
    """
    if not 1 <= k <= responses or not 0 <= passed <= responses:
        raise ValueError(f"pass@{k} of {responses} responses, {passed} of them passed")
    return 1.0 - math.comb(responses - passed, k) / math.comb(responses, k)


def mean_pass_at(rewards: Sequence[Sequence[float]], k: int, least: float) -> tuple[float, int]:
    """The mean of pass@k over tasks, and the number of tasks. `rewards`: those of each task. `least`: smallest reward
    that passes. Tasks with fewer than k rewards, because some are missing, are left out."""
    tasks = [pass_at_k(len(r), sum(x >= least for x in r), k) for r in rewards if len(r) >= k]
    return (sum(tasks) / len(tasks) if tasks else math.nan), len(tasks)
