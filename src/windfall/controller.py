"""The loop of a run, on one page.

    for every step:
        rollout     draw tasks, make responses, grade them          waits for: engine steps, rewards (with a timeout)
        train       credit and accumulate groups as they complete   waits for: groups
        update      one or several optimizer updates                waits for: nothing
        swap        the engine goes on under the new weights
        checkpoint  when due

All tensor work runs in one thread beside the event loop, one piece at a time; the event loop never blocks on it, so
slow rewards go on meanwhile. A stop (Ctrl-C, SIGTERM) is honoured between two engine steps: the step under way is
given up, nothing of it has touched the weights, and the last completed step is saved.

The state of a run is (step, next_task) and the weights. Tasks, seeds and hence tokens follow from them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

from windfall.algorithms.base import Algorithm
from windfall.config import Recipe
from windfall.engine.base import Engine
from windfall.envs.base import HELD_OUT
from windfall.events import EventLog
from windfall.rollout.manager import Rollout, Stopped
from windfall.train.base import Report, Trainer
from windfall.train.checkpoint import State
from windfall.train.sample import credit, outcomes
from windfall.types import Group


@dataclass(kw_only=True)
class Batch:
    """What one step has collected."""

    kept: list[Group] = field(default_factory=list)
    drawn: int = 0
    rewards: list[float] = field(default_factory=list)
    """Of every response made, also of groups that dynamic sampling replaced: the policy's reward as it is."""
    early_s: float = 0.0
    """Spent training on groups while others were still to come."""


@dataclass(kw_only=True)
class Controller:
    recipe: Recipe
    algorithm: Algorithm
    engine: Engine
    trainer: Trainer
    rollout: Rollout
    events: EventLog
    threads: Executor
    save: Callable[[State], Any]
    """Writes a checkpoint of the completed steps."""
    micro_tokens: int
    state: State

    async def run(self) -> State:
        """All steps that are left. Returns the state that was reached and saved."""
        total = self.recipe.run.steps
        try:
            if self.state.step == 0 or self.state.step >= total:  # the latter: stopped before it was evaluated
                await self._evaluate()
            while self.state.step < total:
                await self._step()
                done, every = self.state.step, self.recipe.checkpoint.every
                if done % every == 0 or done == total:
                    await self._save()
                if done == total or (self.recipe.eval.every and done % self.recipe.eval.every == 0):
                    await self._evaluate()
        except Stopped:
            await self._save()
            self.events.instant("stopped", step=self.state.step)
        return self.state

    async def _step(self) -> None:
        step, started = self.state.step + 1, time.monotonic()
        self.rollout.made = self.rollout.missing = 0
        with self.events.span("rollout", step=step) as span:
            batch = await self._collect(self.state.next_task)
            span["tokens"] = self.rollout.made
        with self.events.span("train", step=step, early_s=batch.early_s):
            reports = await self._update(batch.kept)
            self.state = State(step=step, next_task=self.state.next_task + batch.drawn)
            self.engine.swap(step)
        self._tell(step, batch, reports, time.monotonic() - started)

    async def _collect(self, first: int) -> Batch:
        """The groups of one batch. Those that need no more than themselves are trained on as they arrive."""
        want, o = self.recipe.rollout.groups, self.recipe.rollout
        streaming = self.algorithm.scope == "group" and self.recipe.train.minibatches == 1
        batch, most = Batch(), o.max_draws * want
        waiting: list[Group] = []
        while len(batch.kept) < want and batch.drawn < most:
            tasks = range(first + batch.drawn, first + min(batch.drawn + want - len(batch.kept), most))
            batch.drawn += len(tasks)
            # In order: what the sums of a gradient round to must not depend on how quick a reward was.
            made = self.rollout.groups(tasks, size=o.group_size, sampling=o.sampling(), in_order=True)
            async for group in made:
                batch.rewards += group.rewards
                if self.algorithm.informative(outcomes(group, o.max_tokens)):
                    batch.kept.append(group)
                    waiting.append(group)
                if streaming and _tokens(waiting) >= self.micro_tokens:
                    batch.early_s += await self._accumulate(waiting)
                    waiting = []
        if streaming:
            batch.early_s += await self._accumulate(waiting)
        return batch

    async def _accumulate(self, groups: Sequence[Group]) -> float:
        """Returns how long it took."""
        if not groups:
            return 0.0
        started = time.monotonic()
        credited = credit(groups, self.algorithm, self.recipe.rollout.max_tokens)
        await self._in_thread(self.trainer.accumulate, list(chain.from_iterable(credited)))
        return time.monotonic() - started

    async def _update(self, groups: list[Group]) -> list[Report]:
        count = self.recipe.train.minibatches
        if self.algorithm.scope == "group" and count == 1:
            return [await self._in_thread(self.trainer.finish)]
        # Credit over the whole batch first, then mini-batches of whole groups.
        groups = sorted(groups, key=lambda g: g.index)
        credited = credit(groups, self.algorithm, self.recipe.rollout.max_tokens)
        samples = [list(chain.from_iterable(credited[i::count])) for i in range(count)]
        if count > 1:
            samples = [await self._in_thread(self.trainer.prepare, s) for s in samples]
        reports = []
        for part in samples:
            await self._in_thread(self.trainer.accumulate, part)
            reports.append(await self._in_thread(self.trainer.finish))
        return reports

    async def _evaluate(self) -> None:
        o = self.recipe.eval
        if o.tasks == 0:
            return
        sampling = self.recipe.rollout.sampling(o.temperature)
        rewards: list[float] = []
        with self.events.span("eval", step=self.state.step):
            tasks = range(HELD_OUT, HELD_OUT + o.tasks)
            async for group in self.rollout.groups(tasks, size=1, sampling=sampling):
                rewards += group.rewards
        self.engine.swap(self.state.step)  # no page of it may change the shapes of the next step: a resume has none
        self.events.scalar("eval", step=self.state.step, reward=_mean(rewards), tasks=len(rewards))

    async def _save(self) -> None:
        with self.events.span("checkpoint", step=self.state.step) as span:
            span["path"] = str(await self._in_thread(self.save, self.state))

    async def _in_thread(self, work: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.threads, work, *args)

    def _tell(self, step: int, batch: Batch, reports: list[Report], took_s: float) -> None:
        responses = [r for g in batch.kept for r in g.responses]
        lengths = [r.made for r in responses]
        last = asdict(next((r for r in reversed(reports) if r.tokens), reports[-1]))
        if any(r.skipped for r in reports):
            self.events.instant("update_skipped", step=step, why="the gradient was not finite")
        self.events.scalar(
            "step",
            step=step,
            reward=_mean(batch.rewards),
            responses=len(responses),
            groups=len(batch.kept),
            drawn=batch.drawn,
            missing=self.rollout.missing,
            mean_length=sum(lengths) / max(1, len(lengths)),
            cut=sum(r.finish == "length" for r in responses) / max(1, len(responses)),
            made=self.rollout.made,
            s=took_s,
            tok_per_s=self.rollout.made / took_s,
            **{k: v for k, v in last.items() if k not in ("responses", "tokens", "skipped")},
            trained=sum(r.tokens for r in reports),
        )


def _tokens(groups: Sequence[Group]) -> int:
    return sum(len(r.prompt) + len(r.tokens) for g in groups for r in g.responses)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
