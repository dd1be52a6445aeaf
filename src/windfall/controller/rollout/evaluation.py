"""Evaluation on held-out tasks: `eval.samples` responses per task, all from one version of the weights.

The training of its policy waits for an evaluation. In asynchronous training, the workers meanwhile generate for the
next steps with the slots that the evaluation leaves, as far ahead as the bound on staleness allows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from typing import Any

from windfall.controller.rollout.stream import Rollout
from windfall.controller.step_batch import describe_scores
from windfall.envs.base import HELD_OUT
from windfall.envs.held_out import EvaluationTasks
from windfall.events.log import EventLog
from windfall.recipe.sections import Recipe
from windfall.types import Group


class Evaluation:
    def __init__(
        self,
        recipe: Recipe,
        rollout: Rollout,
        events: EventLog,
        held_out: EvaluationTasks | None = None,
        *,
        evaluated: Iterable[int] = (),
        policy: str = "",
    ) -> None:
        """`recipe`: as the policy sees it. `held_out`: by default, the recipe's `eval.tasks` tasks, starting at
        HELD_OUT. `evaluated`: steps whose evaluation is in the log."""
        tasks = recipe.eval.tasks
        self._recipe = recipe
        self._rollout = rollout
        self._events = events
        self._held_out = held_out or EvaluationTasks(tasks=tasks, description=f"{tasks} held-out tasks")
        self._asynchronous = recipe.rollout.staleness > 0
        self.evaluated = set(evaluated)
        self._policy = policy
        self._scope: str | None = None
        """That of the evaluation in progress."""

    def interrupt(self, error: BaseException) -> None:
        """Raise the error in the evaluation that is in progress."""
        if self._scope is not None:
            self._rollout.interrupt(error, self._scope)

    def restores(self, scope: str, last: int) -> bool:
        """Whether the journal's responses of this scope belong to an evaluation that is still due, if the policy
        continues after the step `last`."""
        prefix, _, step = scope.removesuffix(":").rpartition("-")
        if prefix != self._prefix or scope == self._scope:
            return False
        return int(step) not in self.evaluated or int(step) > last

    @property
    def _prefix(self) -> str:
        return f"eval-{self._policy}" if self._policy else "eval"

    def forget_after(self, step: int) -> None:
        """Later steps are trained again, and evaluated again."""
        self.evaluated = {s for s in self.evaluated if s <= step}

    def due(self, step: int) -> bool:
        o, last = self._recipe.eval, self._recipe.run.steps
        due = step == 0 or step >= last or (o.every and step % o.every == 0)
        return bool(due and self._held_out.tasks) and step not in self.evaluated

    async def evaluate(self, step: int) -> None:
        """Evaluate the version of this step, and log the result."""
        with self._events.span("eval", step=step):
            groups = await self._sample(step)
        rewards = {
            (role, group.index): part.rewards
            for group in groups
            for role, part in group.by_role().items()
            if part.rewards
        }
        tasks, samples = self._held_out.tasks, self._recipe.eval.samples
        lengths = {group.index: [response.sampled_count for response in group.responses] for group in groups}
        responses = sum(map(len, lengths.values()))
        if not rewards:
            raise self._rollout.failures.no_rewards(f"the evaluation after step {step}", responses)
        by_role: dict[str, list[float]] = {}
        for (role, _), found in rewards.items():
            by_role.setdefault(role, []).extend(found)
        all_rewards = [reward for found in by_role.values() for reward in found]
        roles = {role: _mean(found) for role, found in by_role.items()} if len(by_role) > 1 else {}
        self._events.scalar(
            "eval",
            step=step,
            reward=_mean(all_rewards),
            graded=len(all_rewards),
            responses=responses + (tasks - len(lengths)) * samples,
            tasks=len({index for _, index in rewards}),
            on=self._held_out.description,
            lengths=[round(_mean(lengths.get(HELD_OUT + n, []))) for n in range(tasks)],
            **({"roles": roles} if roles else {}),
            **describe_passes(self._recipe.eval, list(rewards.values())),
            **describe_scores([response.scores for group in groups for response in group.responses]),
        )
        self.evaluated.add(step)

    async def _sample(self, step: int) -> list[Group]:
        """What the policy samples of the held-out tasks, as they complete."""
        temperature, options = self._recipe.eval.temperature, self._rollout.policy_options
        self._scope = f"{self._prefix}-{step}:"
        groups = self._rollout.groups(
            range(HELD_OUT, HELD_OUT + self._held_out.tasks),
            size=self._recipe.eval.samples,
            sampling=lambda policy: options[policy].sampling(temperature),
            scope=self._scope,
            versions={self._policy: step} if self._asynchronous else None,
            counted=False,
        )
        try:
            async with aclosing(groups):
                return [whole.of(self._policy) async for whole in groups]
        finally:
            self._scope = None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


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
