"""The loops of a run, on one page.

    run            for every trainer that connects: _train_to_end; a stop (Ctrl-C, SIGTERM) saves and returns
    _train_to_end  for every step: _step; a checkpoint and an evaluation when due
    _step          begin       the trainer's own engine generates too       until: T_seed (scheduling/seed_time.py)
                   _collect    draw tasks; collect their graded groups      waits for: groups (workers, rewards)
                   _update     one or several optimizer updates             waits for: the trainer
                   offer       workers pull the new weights when they get work
    _collect       for every draw of tasks: _arrivals; keep the groups that the algorithm can learn from
    _arrivals      for every group that arrives: yield it; meanwhile train on groups that are here

    who waits for whom

        workers ──tokens──▶ dispatch ──turns──▶ rollout ──groups──▶ Controller ──samples──▶ trainer
           ▲                   │ ▲                 │  ▲                                        │
           └──────work─────────┘ └────episodes─────┘  └─ rewards (env, with a timeout)         │
           └────────────────────────── weights (pulled) ◀───────────publishes──────────────────┘

Nothing here blocks the event loop, and nothing here waits for one particular worker. If the trainer is lost, the run
waits for the next one and continues from the step that it has, with what the journal has of later steps. A stop
abandons the step under way, which has not changed the weights yet, and saves the last completed step.

The state of a run is (step, next_task) and the weights. Tasks, seeds and therefore tokens follow from them.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any, Protocol

from windfall.algorithms.base import Algorithm
from windfall.config import Recipe
from windfall.envs.base import HELD_OUT
from windfall.envs.held_out import HeldOut
from windfall.errors import WindfallError
from windfall.events.log import EventLog
from windfall.rollout.groups import Rollout, Stopped
from windfall.train.base import NOT_FINITE, NOTHING, Report, TrainerLost
from windfall.train.checkpoint import CheckpointState
from windfall.train.sample import Sample, credit, outcomes
from windfall.types import Group

WHY_SKIPPED = {
    NOT_FINITE: "the gradient was not finite",
    NOTHING: "the gradient was zero: in no group did rewards differ, or no token had any weight",
}


class AsyncTrainer(Protocol):
    """What the controller needs from a trainer. train.remote.RemoteTrainer implements it."""

    async def prepare(self, samples: Sequence[Sample]) -> list[Sample]: ...
    async def accumulate(self, samples: Sequence[Sample]) -> float: ...
    async def update(self, state: CheckpointState | None) -> tuple[Report, Any]: ...
    async def save(self) -> str: ...


class Pace(Protocol):
    """Decides when the trainer generates and when it trains. rollout.seeding.Seeding implements it."""

    over: asyncio.Event

    def begin(self, step: int) -> None: ...
    def begin_evaluation(self) -> None: ...
    def arrived(self, tokens: int) -> None: ...
    def trainable(self) -> None: ...
    def generated(self) -> None: ...
    def end(self, *, tokens: int, train_s: float, train_wait_s: float) -> None: ...


@dataclass(kw_only=True)
class StepBatch:
    """The groups that one step has collected, and the seconds it has spent."""

    kept: list[Group] = field(default_factory=list)
    """Groups to train on."""
    drawn: int = 0
    """Number of tasks drawn."""
    rewards: list[float] = field(default_factory=list)
    """Rewards of all responses, including those of groups that dynamic sampling replaced: the policy's true reward."""
    lengths: dict[int, list[int]] = field(default_factory=dict)
    """By task: number of sampled tokens of each of its responses, including those of replaced groups."""
    early_s: float = 0.0
    """Seconds the trainer trained on groups before the last one had arrived."""
    asked_s: float = 0.0
    """The same, including the messages to the trainer and back."""
    update_s: float = 0.0
    """Seconds of the optimizer updates and of publishing."""
    wait_s: float = 0.0
    """Seconds the trainer waited for groups after it had stopped generating."""
    micro_batches: deque[list[Group]] = field(default_factory=deque)
    """Full micro-batches that are not trained yet. Where they are cut depends only on the groups, not on timing."""
    partial: list[Group] = field(default_factory=list)
    """Groups of the micro-batch that is not full yet."""

    def add(self, group: Group, micro_tokens: int) -> None:
        self.kept.append(group)
        self.partial.append(group)
        if _tokens(self.partial) >= micro_tokens:
            self.micro_batches.append(self.partial)
            self.partial = []


@dataclass(kw_only=True)
class Controller:
    recipe: Recipe
    algorithm: Algorithm
    trainer: AsyncTrainer
    rollout: Rollout
    pace: Pace
    events: EventLog
    connect: Callable[[], Any]
    """Waits for a trainer, and prepares the run to continue from the state that it returns."""
    offer: Callable[[Any], None]
    """Called when the trainer has published: work is assigned with this version from now on."""
    saved: Callable[[CheckpointState], None]
    """Called when a checkpoint of this state is on disk."""
    counters: Callable[[], dict[str, Any]] = dict
    """Returns what happened to the fleet since the last call."""
    evaluated: set[int] = field(default_factory=set)
    """Steps whose evaluation is already in the log."""
    held_out: HeldOut | None = None
    """Tasks for evaluation. None: the recipe's `eval.tasks` tasks, starting at HELD_OUT."""
    micro_tokens: int = 0
    """Number of tokens, prompts included, at which a micro-batch is full."""
    state: CheckpointState = field(default_factory=lambda: CheckpointState(step=0, next_task=0))
    updates: int = 0
    not_finite: int = 0
    """`updates` counts the optimizer updates of this process; `not_finite` counts those that were skipped because their
    gradient was not finite."""

    async def run(self) -> CheckpointState:
        """Run all steps that are left. Returns the state that was reached and saved."""
        while True:
            try:
                self.state = await self.connect()
                # Later steps are trained again, and evaluated again.
                self.evaluated = {step for step in self.evaluated if step <= self.state.step}
                return await self._train_to_end()
            except TrainerLost as e:
                self.events.instant("trainer_lost", step=self.state.step, why=str(e))
            except Stopped:
                return await self._stop()

    async def _train_to_end(self) -> CheckpointState:
        # The answer to the Update or Save of this trainer's step may have been lost.
        await self._save_if_due()
        await self._evaluate_if_due()
        while self.state.step < self.recipe.run.steps:
            await self._step()
            await self._save_if_due()
            await self._evaluate_if_due()
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
        step, started = self.state.step + 1, _now()
        self.rollout.reset_counters()
        self.pace.begin(step)
        with self.events.span("rollout", step=step) as span:
            batch = await self._collect(self.state.next_task)
            span["tokens"] = self.rollout.sampled_tokens
            if not batch.rewards:
                raise self.rollout.failures.no_rewards(f"step {step}")
        self.pace.generated()
        training = _now()
        with self.events.span("train", step=step, early_s=batch.early_s, asked_s=batch.asked_s) as span:
            state = CheckpointState(step=step, next_task=self.state.next_task + batch.drawn)
            reports = await self._update(batch, state)
            self.state = state
            span["update_s"] = batch.update_s
        train_s = batch.early_s + _now() - training
        self.pace.end(tokens=self.rollout.sampled_tokens, train_s=train_s, train_wait_s=batch.wait_s)
        self._log_step(step, batch, reports, train_s, _now() - started)

    async def _collect(self, first_task: int) -> StepBatch:
        """Draw tasks until the batch has enough groups that the algorithm can learn from, or the limit is reached."""
        o = self.recipe.rollout
        batch, max_drawn = StepBatch(), o.max_draws * o.groups
        while len(batch.kept) < o.groups and batch.drawn < max_drawn:
            drawn = min(batch.drawn + o.groups - len(batch.kept), max_drawn)
            tasks = range(first_task + batch.drawn, first_task + drawn)
            batch.drawn = drawn
            # Deterministic runs train in order: how a gradient sum rounds must not depend on which worker was fastest.
            groups = self.rollout.groups(
                tasks, size=o.group_size, sampling=o.sampling(), in_order=self.recipe.run.deterministic
            )
            async with aclosing(self._arrivals(groups, batch)) as arrivals:
                async for group in arrivals:
                    self._keep_if_informative(group, batch)
        return batch

    def _keep_if_informative(self, group: Group, batch: StepBatch) -> None:
        batch.rewards += group.rewards
        batch.lengths[group.index] = [r.sampled_count for r in group.responses]
        if self.algorithm.informative(outcomes(group, self.recipe.rollout.max_tokens)):
            batch.add(group, self.micro_tokens)
            if self._pipelining and batch.micro_batches:
                self.pace.trainable()

    async def _arrivals(self, groups: AsyncGenerator[Group], batch: StepBatch) -> AsyncGenerator[Group]:
        """Yield groups as they arrive. Train on full micro-batches before waiting for the next group."""
        arrived: asyncio.Queue[Group | None] = asyncio.Queue()
        pump = asyncio.create_task(_pump(groups, arrived, self.pace))
        next_group: asyncio.Future[Group | None] | None = None
        try:
            while True:
                await self._train_early(batch)
                next_group = next_group or asyncio.ensure_future(arrived.get())
                await self._wait_for(next_group, batch)
                if not next_group.done():
                    continue  # the trainer has stopped generating, so it can train
                group, next_group = next_group.result(), None
                if group is None:
                    await pump  # raises the error of the rollout, if there was one
                    return
                yield group
        finally:
            for task in (next_group, pump):
                if task is not None:
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
            await groups.aclose()

    async def _train_early(self, batch: StepBatch) -> None:
        """Train on full micro-batches while the trainer does not generate."""
        while self._pipelining and batch.micro_batches and self.pace.over.is_set():
            began = _now()
            batch.early_s += await self._accumulate(batch.micro_batches.popleft())
            batch.asked_s += _now() - began

    async def _wait_for(self, next_group: asyncio.Future[Group | None], batch: StepBatch) -> None:
        """Wait for the next group or, while the trainer generates, until it stops."""
        over, began = self.pace.over, _now()
        if not over.is_set():
            stops = asyncio.ensure_future(over.wait())
            await asyncio.wait([next_group, stops], return_when=asyncio.FIRST_COMPLETED)
            stops.cancel()
            return
        await asyncio.wait([next_group])
        if over.is_set():  # otherwise the trainer has started to generate again
            batch.wait_s += _now() - began

    @property
    def _streaming(self) -> bool:
        """Groups are accumulated one by one: neither their credit nor their mini-batch depends on other groups."""
        return self.algorithm.scope == "group" and self.recipe.train.minibatches == 1

    @property
    def _pipelining(self) -> bool:
        """Train on groups while others are still being generated."""
        return self._streaming and self.recipe.techniques.pipelining

    async def _accumulate(self, groups: Sequence[Group]) -> float:
        """Have the trainer add the gradients of these groups. Returns the seconds it took."""
        if not groups:
            return 0.0
        credited = credit(groups, self.algorithm, self.recipe.rollout.max_tokens)
        return await self.trainer.accumulate(list(chain.from_iterable(credited)))

    async def _update(self, batch: StepBatch, state: CheckpointState) -> list[Report]:
        count = self.recipe.train.minibatches
        if self._streaming:
            for groups in [*batch.micro_batches, batch.partial]:  # those that are not accumulated yet
                await self._accumulate(groups)
            samples: list[list[Sample]] = [[]]
        else:
            # First credit over the whole batch, then mini-batches of whole groups.
            groups = sorted(batch.kept, key=lambda g: g.index)
            credited = credit(groups, self.algorithm, self.recipe.rollout.max_tokens)
            samples = [list(chain.from_iterable(credited[i::count])) for i in range(count)]
        if count > 1:
            samples = [await self.trainer.prepare(s) for s in samples]
        reports = []
        for n, part in enumerate(samples, 1):
            if part:
                await self.trainer.accumulate(part)
            began = _now()
            report, published = await self.trainer.update(state if n == len(samples) else None)
            batch.update_s += _now() - began
            reports.append(report)
        self.offer(published)
        return reports

    async def _evaluate_if_due(self) -> None:
        o, step = self.recipe.eval, self.state.step
        held_out = self.held_out or HeldOut(tasks=o.tasks, description=f"{o.tasks} held-out tasks")
        due = step == 0 or step >= self.recipe.run.steps or (o.every and step % o.every == 0)
        if held_out.tasks == 0 or not due or step in self.evaluated:
            return
        sampling = self.recipe.rollout.sampling(o.temperature)
        rewards: list[float] = []
        lengths: dict[int, int] = {}
        self.rollout.reset_counters()  # rewards that were missing in the last step do not count here
        self.pace.begin_evaluation()
        with self.events.span("eval", step=step):
            tasks = range(HELD_OUT, HELD_OUT + held_out.tasks)
            groups = self.rollout.groups(tasks, size=1, sampling=sampling, scope=f"eval-{step}:")
            async with aclosing(groups):
                async for group in groups:
                    rewards += group.rewards
                    lengths[group.index] = group.responses[0].sampled_count
        if not rewards:
            raise self.rollout.failures.no_rewards(f"the evaluation after step {step}")
        in_order = [lengths.get(index, 0) for index in tasks]
        self.events.scalar(
            "eval", step=step, reward=_mean(rewards), tasks=len(rewards), on=held_out.description, lengths=in_order
        )
        self.evaluated.add(step)

    async def _save(self) -> None:
        await self._write_checkpoint()
        self.saved(self.state)

    async def _write_checkpoint(self) -> None:
        with self.events.span("checkpoint", step=self.state.step) as span:
            span["path"] = await self.trainer.save()

    def _log_step(self, step: int, batch: StepBatch, reports: list[Report], train_s: float, took_s: float) -> None:
        skipped = self._log_updates(step, reports)
        responses = [r for g in batch.kept for r in g.responses]
        lengths = [r.sampled_count for r in responses]
        drawn = range(self.state.next_task - batch.drawn, self.state.next_task)
        last = asdict(next((r for r in reversed(reports) if r.tokens), reports[-1]))
        self.events.scalar(
            "step",
            step=step,
            reward=_mean(batch.rewards),
            responses=len(responses),
            groups=len(batch.kept),
            drawn=batch.drawn,
            skipped=self.rollout.failures.skipped,
            missing=self.rollout.failures.missing,
            mean_length=sum(lengths) / max(1, len(lengths)),
            prompt_tokens=_mean([len(r.prompt) for r in responses]),
            lengths=[batch.lengths.get(index, []) for index in drawn],
            replaced=sorted(set(batch.lengths) - {g.index for g in batch.kept}),
            reward_s=self.rollout.grading_s / max(1, self.rollout.graded_turns),
            cut=sum(r.finish == "length" for r in responses) / max(1, len(responses)),
            made=self.rollout.sampled_tokens,
            restored=self.rollout.restored_tokens,
            s=took_s,
            train_s=train_s,
            train_wait_s=batch.wait_s,
            tok_per_s=(self.rollout.sampled_tokens - self.rollout.restored_tokens) / took_s,
            **{k: v for k, v in last.items() if k not in ("responses", "tokens", "skipped")},
            trained=sum(r.tokens for r in reports),
            updates_skipped=len(skipped),
            updates_not_finite=skipped.count(NOT_FINITE),
            **self.counters(),
        )

    def _log_updates(self, step: int, reports: list[Report]) -> list[str]:
        """Count the updates and log what was wrong with them. Returns the reasons of those that were skipped."""
        skipped = [r.skipped for r in reports if r.skipped]
        self.updates += len(reports)
        self.not_finite += skipped.count(NOT_FINITE)
        for why in sorted(set(skipped)):
            self.events.instant(
                "update_skipped", step=step, why=WHY_SKIPPED[why], updates=skipped.count(why), of=len(reports)
            )
        worst, alarm = max(reports, key=_gap), self.recipe.train.engine_gap_alarm
        if _gap(worst) > alarm:
            self.events.instant("engine_gap", step=step, mean=worst.engine_gap, max=worst.engine_gap_max, alarm=alarm)
        return skipped


async def _pump(groups: AsyncGenerator[Group], arrived: asyncio.Queue[Group | None], pace: Pace) -> None:
    """Move groups into the queue, then None. This keeps turns graded and responses running during training."""
    try:
        async for group in groups:
            pace.arrived(sum(r.sampled_count for r in group.responses))
            arrived.put_nowait(group)
    finally:
        arrived.put_nowait(None)


def _now() -> float:
    """The event loop's clock in seconds. A simulated run has its own."""
    return asyncio.get_running_loop().time()


def _tokens(groups: Sequence[Group]) -> int:
    return sum(len(r.prompt) + len(r.tokens) for g in groups for r in g.responses)


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


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
