"""The loop of a run, on one page.

    for every step:
        seed        the trainer's own engine rolls out, too         until: T_seed (scheduling/seed_time.py)
        rollout     draw tasks, have responses made and graded      waits for: groups (workers, rewards)
        train       credit and accumulate groups as they complete   waits for: the trainer
        update      one or several optimizer updates                waits for: the trainer
        offer       workers pull the new weights when they get work
        checkpoint  when due                                        waits for: the trainer

    who waits for whom

        workers ──tokens──▶ dispatch ──turns──▶ rollout ──groups──▶ Controller ──samples──▶ trainer
           ▲                   │ ▲                 │  ▲                                        │
           └──────work─────────┘ └────episodes─────┘  └─ rewards (env, with a timeout)         │
           └────────────────────────── weights (pulled) ◀───────────publishes──────────────────┘

Nothing here blocks the event loop, and nothing here waits for one particular worker. A trainer that is lost is waited
for; the run then goes on from the step it has, with what the journal knows. A stop (Ctrl-C, SIGTERM) gives up the step
under way, of which nothing has touched the weights, and saves the last completed one.

The state of a run is (step, next_task) and the weights. Tasks, seeds and hence tokens follow from them.
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
    """What the loop asks of a trainer: train.remote.RemoteTrainer is one."""

    async def prepare(self, samples: Sequence[Sample]) -> list[Sample]: ...
    async def accumulate(self, samples: Sequence[Sample]) -> float: ...
    async def update(self, state: CheckpointState | None) -> tuple[Report, Any]: ...
    async def save(self) -> str: ...


class Pace(Protocol):
    """When the trainer generates and when it trains: rollout.seeding.Seeding is one."""

    over: asyncio.Event

    def begin(self, step: int) -> None: ...
    def begin_evaluation(self) -> None: ...
    def arrived(self, tokens: int) -> None: ...
    def trainable(self) -> None: ...
    def generated(self) -> None: ...
    def end(self, *, tokens: int, train_s: float, train_wait_s: float) -> None: ...


@dataclass(kw_only=True)
class StepBatch:
    """What one step has collected."""

    kept: list[Group] = field(default_factory=list)
    drawn: int = 0
    rewards: list[float] = field(default_factory=list)
    """Of every response made, also of groups that dynamic sampling replaced: the policy's reward as it is."""
    lengths: dict[int, list[int]] = field(default_factory=dict)
    """By task: how many tokens each of its responses got, also of groups that were replaced."""
    early_s: float = 0.0
    """Spent training on groups while others were still to come."""
    asked_s: float = 0.0
    """The same, with what it took to ask for it and to hear that it was done."""
    update_s: float = 0.0
    """Of the optimizer, and of publishing."""
    wait_s: float = 0.0
    """The trainer had stopped generating, and waited for groups."""
    whole: deque[list[Group]] = field(default_factory=deque)
    """Micro-batches that are whole. Where they are cut follows from the groups alone, not from when they are sent."""
    part: list[Group] = field(default_factory=list)

    def add(self, group: Group, micro_tokens: int) -> None:
        self.kept.append(group)
        self.part.append(group)
        if _tokens(self.part) >= micro_tokens:
            self.whole.append(self.part)
            self.part = []


@dataclass(kw_only=True)
class Controller:
    recipe: Recipe
    algorithm: Algorithm
    trainer: AsyncTrainer
    rollout: Rollout
    pace: Pace
    events: EventLog
    connect: Callable[[], Any]
    """Waits for a trainer and makes the run ready to go on from the State it returns."""
    offer: Callable[[Any], None]
    """The trainer has published: workers get work with this from now on."""
    saved: Callable[[CheckpointState], None]
    """A checkpoint of this state is on disk."""
    counters: Callable[[], dict[str, Any]] = dict
    """What happened to the fleet since the last call."""
    evaluated: set[int] = field(default_factory=set)
    """Steps whose evaluation is in the log already."""
    held_out: HeldOut | None = None
    """What is evaluated on; None: as many tasks from HELD_OUT on as the recipe says."""
    micro_tokens: int = 0
    state: CheckpointState = field(default_factory=lambda: CheckpointState(step=0, next_task=0))
    updates: int = 0
    not_finite: int = 0
    """Updates of this process's steps, and those of them that were skipped because their gradient was not finite."""

    async def run(self) -> CheckpointState:
        """All steps that are left. Returns the state that was reached and saved."""
        while True:
            try:
                self.state = await self.connect()
                # What came after this step was made void with it.
                self.evaluated = {step for step in self.evaluated if step <= self.state.step}
                return await self._run()
            except TrainerLost as e:
                self.events.instant("trainer_lost", step=self.state.step, why=str(e))
            except Stopped:
                return await self._stop()

    async def _run(self) -> CheckpointState:
        # The step that this trainer has may be one whose Update or Save we never heard the answer to.
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
            await self._write()  # the journal stays: it has what was made of the step that is given up
        except TrainerLost as e:  # the last checkpoint and the journal hold all there is
            self.events.instant("trainer_lost", step=self.state.step, why=str(e))
        self.events.instant("stopped", step=self.state.step)
        return self.state

    async def _step(self) -> None:
        step, started = self.state.step + 1, _now()
        self.rollout.reset_counters()
        self.pace.begin(step)
        with self.events.span("rollout", step=step) as span:
            batch = await self._collect(self.state.next_task)
            span["tokens"] = self.rollout.made
            if not batch.rewards:
                raise self.rollout.failures.nothing(f"step {step}")
        self.pace.generated()
        training = _now()
        with self.events.span("train", step=step, early_s=batch.early_s, asked_s=batch.asked_s) as span:
            state = CheckpointState(step=step, next_task=self.state.next_task + batch.drawn)
            reports = await self._update(batch, state)
            self.state = state
            span["update_s"] = batch.update_s
        train_s = batch.early_s + _now() - training
        self.pace.end(tokens=self.rollout.made, train_s=train_s, train_wait_s=batch.wait_s)
        self._tell(step, batch, reports, train_s, _now() - started)

    async def _collect(self, first: int) -> StepBatch:
        """The groups of one batch. Those that need no more than themselves are trained on as they arrive."""
        want, o = self.recipe.rollout.groups, self.recipe.rollout
        batch, most = StepBatch(), o.max_draws * want
        while len(batch.kept) < want and batch.drawn < most:
            tasks = range(first + batch.drawn, first + min(batch.drawn + want - len(batch.kept), most))
            batch.drawn += len(tasks)
            # Deterministic, in order: what the sums of a gradient round to must not depend on who was quick.
            made = self.rollout.groups(
                tasks, size=o.group_size, sampling=o.sampling(), in_order=self.recipe.run.deterministic
            )
            async with aclosing(self._arrivals(made, batch)) as arrivals:
                async for group in arrivals:
                    batch.rewards += group.rewards
                    batch.lengths[group.index] = [r.made for r in group.responses]
                    if self.algorithm.informative(outcomes(group, o.max_tokens)):
                        batch.add(group, self.micro_tokens)
                        if self._early and batch.whole:
                            self.pace.trainable()
        return batch

    async def _arrivals(self, made: AsyncGenerator[Group], batch: StepBatch) -> AsyncGenerator[Group]:
        """Groups as they come; between them, once local has stopped generating, what is whole is trained on."""
        arrived: asyncio.Queue[Group | None] = asyncio.Queue()
        over = self.pace.over
        pump = asyncio.create_task(_pump(made, arrived, self.pace))
        coming: asyncio.Future[Group | None] | None = None
        try:
            while True:
                if over.is_set() and self._early and batch.whole:
                    began = _now()
                    batch.early_s += await self._accumulate(batch.whole.popleft())
                    batch.asked_s += _now() - began
                    continue
                coming = coming or asyncio.ensure_future(arrived.get())
                began, waits = _now(), over.is_set()
                change = asyncio.ensure_future(over.wait())
                await asyncio.wait([coming] if waits else [coming, change], return_when=asyncio.FIRST_COMPLETED)
                change.cancel()
                if waits and over.is_set():  # else local has taken up the work again
                    batch.wait_s += _now() - began
                if coming.done():
                    group, coming = coming.result(), None
                    if group is None:
                        await pump
                        return
                    yield group
        finally:
            for task in (coming, pump):
                if task is not None:
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
            await made.aclose()

    @property
    def _streaming(self) -> bool:
        return self.algorithm.scope == "group" and self.recipe.train.minibatches == 1

    @property
    def _early(self) -> bool:
        """Train on groups while others are still being made."""
        return self._streaming and self.recipe.techniques.pipelining

    async def _accumulate(self, groups: Sequence[Group]) -> float:
        """Returns how long it took."""
        if not groups:
            return 0.0
        credited = credit(groups, self.algorithm, self.recipe.rollout.max_tokens)
        return await self.trainer.accumulate(list(chain.from_iterable(credited)))

    async def _update(self, batch: StepBatch, state: CheckpointState) -> list[Report]:
        count = self.recipe.train.minibatches
        if self._streaming:
            for part in [*batch.whole, batch.part]:  # what has not been accumulated yet
                await self._accumulate(part)
            samples: list[list[Sample]] = [[]]
        else:
            # Credit over the whole batch first, then mini-batches of whole groups.
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
        held_out = self.held_out or HeldOut(tasks=o.tasks, what=f"{o.tasks} held-out tasks")
        due = step == 0 or step >= self.recipe.run.steps or (o.every and step % o.every == 0)
        if held_out.tasks == 0 or not due or step in self.evaluated:
            return
        sampling = self.recipe.rollout.sampling(o.temperature)
        rewards: list[float] = []
        lengths: dict[int, int] = {}
        self.rollout.reset_counters()  # what was missing in the step before is not missing here
        self.pace.begin_evaluation()
        with self.events.span("eval", step=step):
            tasks = range(HELD_OUT, HELD_OUT + held_out.tasks)
            made = self.rollout.groups(tasks, size=1, sampling=sampling, scope=f"eval-{step}:")
            async with aclosing(made):
                async for group in made:
                    rewards += group.rewards
                    lengths[group.index] = group.responses[0].made
        if not rewards:
            raise self.rollout.failures.nothing(f"the evaluation after step {step}")
        in_order = [lengths.get(index, 0) for index in tasks]
        self.events.scalar(
            "eval", step=step, reward=_mean(rewards), tasks=len(rewards), on=held_out.what, lengths=in_order
        )
        self.evaluated.add(step)

    async def _save(self) -> None:
        await self._write()
        self.saved(self.state)

    async def _write(self) -> None:
        with self.events.span("checkpoint", step=self.state.step) as span:
            span["path"] = await self.trainer.save()

    def _tell(self, step: int, batch: StepBatch, reports: list[Report], train_s: float, took_s: float) -> None:
        responses = [r for g in batch.kept for r in g.responses]
        lengths = [r.made for r in responses]
        drawn = range(self.state.next_task - batch.drawn, self.state.next_task)
        last = asdict(next((r for r in reversed(reports) if r.tokens), reports[-1]))
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
            reward_s=self.rollout.grading_s / max(1, self.rollout.graded),
            cut=sum(r.finish == "length" for r in responses) / max(1, len(responses)),
            made=self.rollout.made,
            restored=self.rollout.restored,
            s=took_s,
            train_s=train_s,
            train_wait_s=batch.wait_s,
            tok_per_s=(self.rollout.made - self.rollout.restored) / took_s,
            **{k: v for k, v in last.items() if k not in ("responses", "tokens", "skipped")},
            trained=sum(r.tokens for r in reports),
            updates_skipped=len(skipped),
            updates_not_finite=skipped.count(NOT_FINITE),
            **self.counters(),
        )


async def _pump(made: AsyncGenerator[Group], into: asyncio.Queue[Group | None], pace: Pace) -> None:
    """Also while training is under way: turns are judged, and responses go on."""
    try:
        async for group in made:
            pace.arrived(sum(r.made for r in group.responses))
            into.put_nowait(group)
    finally:
        into.put_nowait(None)


def _now() -> float:
    """The event loop's clock: a simulated run has its own."""
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
    """A gap that is not a number is as wide as can be."""
    return report.engine_gap if math.isfinite(report.engine_gap) else math.inf


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
