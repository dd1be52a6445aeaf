"""Two policies over one stream of tasks. A trainer is lost at every request that it gets: the other goes on, and both
are trained on the same samples as without the loss. No model, no sockets; the environment and the trainers are scripts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest

from windfall import algorithms
from windfall.controller.generation import Generation, PolicyGroups, make_admission
from windfall.controller.loop import Loop
from windfall.controller.rollout.evaluation import Evaluation
from windfall.controller.rollout.grading import EnvFailures, Grading
from windfall.controller.tasks.admission import Admission
from windfall.controller.tasks.task_gate import TaskGate
from windfall.errors import WindfallError
from windfall.events.log import EventLog
from windfall.recipe.file import parse_recipe
from windfall.recipe.sections import Recipe
from windfall.training import CheckpointState, Gradient, NewVersion, Report, Sample, TrainerLost
from windfall.types import Group, Response, Sampling, Task

START = CheckpointState(step=0, next_task=0)


def recipe(staleness: int, **policies: dict[str, Any]) -> Recipe:
    return parse_recipe(
        {
            "run": {"steps": 4}, "rollout": {"groups": 2, "group_size": 2, "staleness": staleness},
            "checkpoint": {"every": 2}, "eval": {"tasks": 2, "every": 2},
            "policies": policies or {"solver": {}, "verifier": {"rollout": {"groups": 3}}},
        },
        where="here",
    )  # fmt: skip


class Stream:
    """Makes the groups of a world. What was begun stays in the world's journal."""

    def __init__(self, world: World, on_group: Any) -> None:
        self._world, self._on_group = world, on_group
        self._tasks: asyncio.Queue[int] = asyncio.Queue()

    def open(self, tasks: Sequence[int]) -> None:
        for index in tasks:
            self._world.begin(index)
            self._tasks.put_nowait(index)

    def expire(self, oldest: Any) -> None: ...

    def not_begun(self, policy: str) -> list[int]:
        return []

    async def run(self) -> None:
        while True:
            index = await self._tasks.get()
            await asyncio.sleep(0)
            self._on_group(self._world.group(index))


@dataclass
class Trainer:
    """A policy's trainer and checkpoint, and what loop.Run needs of the controller."""

    name: str
    world: World
    die_at: int = -1
    """The request at which it is lost, counted from 0."""
    state: CheckpointState = START
    saved_state: CheckpointState = START
    step_samples: list[tuple[Any, ...]] = field(default_factory=list)
    trained: dict[int, list[tuple[Any, ...]]] = field(default_factory=dict)
    """By step: the samples of its update, as last trained."""
    planned: dict[int, tuple[int, ...]] = field(default_factory=dict)
    requests: int = 0
    lost: int = 0
    completed: CheckpointState = START

    def __post_init__(self) -> None:
        self.may_train = asyncio.Event()
        self.may_train.set()

    async def _ask(self) -> None:
        await asyncio.sleep(0)
        self.requests += 1
        if self.requests - 1 == self.die_at:
            self.lost += 1
            self.state, self.step_samples = self.saved_state, []
            raise TrainerLost("killed")

    async def forward_backward(self, samples: Sequence[Sample], loss: Any = None, *, id: str) -> Gradient:
        await self._ask()
        self.step_samples += [(*s.ids, round(s.advantage)) for s in samples]
        return Gradient(s=0.0)

    async def optim_step(self, state: CheckpointState | None = None, adam: Any = None, *, id: str) -> Report:
        await self._ask()
        assert state is not None
        self.completed = state
        return Report(**({f.name: 0.0 for f in fields(Report)} | {"tokens": 3, "skipped": "", "engine_gaps": {},
                                                                 "engine_tokens": {}}))  # fmt: skip # pyright: ignore

    async def publish(self, *, id: str) -> NewVersion:
        await self._ask()
        step, self.state, self.step_samples = self.completed.step, self.completed, sorted(self.step_samples)
        assert self.trained.setdefault(step, self.step_samples) == self.step_samples, f"step {step} differs"
        self.step_samples = []
        return NewVersion(version=step, digest="")

    async def save(self, *, id: str) -> str:
        await self._ask()
        self.saved_state = self.state
        return "somewhere"

    # loop.Run

    async def connected(self) -> None:
        await asyncio.sleep(0)

    async def restore(self, admission: Admission) -> CheckpointState:
        self.world.versions[self.name] = self.state.step
        oldest = {task: v for (name, task), v in self.world.journal.items() if name == self.name}
        admission.restore(
            version=self.state.step, next_task=self.state.next_task, open_tasks=self.state.open_tasks,
            planned=self.planned, oldest=oldest,
        )  # fmt: skip
        return self.state

    async def offer(self, published: NewVersion) -> None:
        self.world.versions[self.name] = published.version

    def before_update(self, step: int, tasks: Sequence[int]) -> None:
        if self.world.recipe.rollout.staleness:
            self.planned[step] = tuple(tasks)

    def saved(self, state: CheckpointState) -> None: ...
    def counters(self, staleness: dict[str, Any]) -> dict[str, Any]:
        return {}

    # generation.TrainingPace

    def begin(self, step: int) -> None: ...
    def begin_evaluation(self) -> None: ...
    def arrived(self, tokens: int) -> None: ...
    def trainable(self) -> None: ...
    def generated(self) -> None: ...
    def end(self, *, tokens: int, train_s: float, train_wait_s: float) -> None: ...


class World:
    """The rollout of a run, and all that outlives its loops."""

    def __init__(self, recipe: Recipe, folder: Path, asked: Sequence[str] | None = None) -> None:
        self.recipe, self.folder = recipe, folder
        self.policy_options = {name: recipe.of(name).rollout for name in recipe.names()}
        self.asked = tuple(asked or recipe.names())
        """The roles that the environment asks for."""
        self.history: dict[str, Any] = {}
        self.sampled_tokens = self.restored_tokens = 0
        self.grading, self.failures = Grading(), EnvFailures("Scripted", EventLog(Path("/dev/null")))
        self.versions = dict.fromkeys(recipe.names(), 0)
        self.journal: dict[tuple[str, int], int] = {}
        """By policy and task: the version that sampled its tokens."""
        self.evaluations: list[str] = []

    def begin(self, index: int) -> None:
        for name in self.asked:
            self.journal.setdefault((name, index), self.versions[name])

    def group(self, index: int) -> Group:
        responses = []
        for sibling in range(2):
            segments = [
                Response(
                    id=f"{index}/{sibling}" + (f"+{n}" if n else ""), prompt=(5 + sibling,),
                    tokens=(index, n, self.journal[name, index]), logprobs=(-1.0,) * 3, sampled=(True,) * 3,
                    versions=(self.journal[name, index],) * 3, finish="stop", role=name,
                    rewards=tuple((role, float(sibling == i % 2)) for i, role in enumerate(self.asked)),
                )
                for n, name in enumerate(self.asked)
            ]  # fmt: skip
            first, *more = segments
            responses.append(
                Response(**{f.name: getattr(first, f.name) for f in fields(first)} | {"more": tuple(more)})
            )
        return Group(index=index, task=Task(id="t", prompt=""), responses=tuple(responses))

    def stream(self, *, on_group: Any, **_: Any) -> Any:
        return Stream(self, on_group)

    def sampling(self, policy: str) -> Sampling:
        return self.policy_options[policy].sampling()

    async def groups(self, tasks: range, *, scope: str, counted: bool, **_: Any) -> Any:
        assert not counted
        self.evaluations.append(scope)
        for index in tasks:
            self.begin(index)
            yield self.group(index)

    def reset_counters(self) -> None: ...
    def forget_history(self, needed: Any) -> None: ...

    def run(self, **die_at: int) -> dict[str, Trainer]:
        async def main() -> dict[str, Trainer]:
            it: Any = self
            views = {name: self.recipe.of(name) for name in self.recipe.names()}
            trainers = {name: Trainer(name, self, die_at.get(name, -1)) for name in views}
            gate = TaskGate({name: make_admission(view) for name, view in views.items()})
            generation = Generation(it, gate, 2)
            events = EventLog(self.folder / "events.jsonl")
            loops = []
            for name, view in views.items():
                trainer: Any = trainers[name]
                algorithm = algorithms.make(view.algorithm.name)
                groups = PolicyGroups(name, view, algorithm, trainer, 10**6, generation)
                bound = events.bind(policy=name)
                evaluation = Evaluation(view, it, bound, policy=name)
                loops.append(Loop(view, algorithm, trainer, groups, evaluation, trainer, bound))
            running = [asyncio.create_task(loop.run()) for loop in loops]
            try:
                async with asyncio.timeout(20):
                    await asyncio.gather(*running)
            finally:
                for task in running:
                    task.cancel()
                with suppress(WindfallError):
                    await generation.stop()
                events.close()
            gate.check()
            return trainers

        return asyncio.run(main())


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("name", ["solver", "verifier"])
def test_trainer_is_lost_at_every_request(tmp_path: Path, staleness: int, name: str) -> None:
    calm = World(recipe(staleness), tmp_path).run()
    assert {n: sorted(t.trained) for n, t in calm.items()} == {"solver": [1, 2, 3, 4], "verifier": [1, 2, 3, 4]}
    for at in range(calm[name].requests):
        world = World(recipe(staleness), tmp_path)
        trainers = world.run(**{name: at})
        assert trainers[name].lost == 1
        for each, trainer in trainers.items():
            assert trainer.state.step == 4, (at, each)
            if staleness == 0:
                assert trainer.trained == calm[each].trained, f"{each} was trained on other samples (request {at})"


def test_each_policy_is_trained_on_its_own_tokens_and_rewards(tmp_path: Path) -> None:
    """With staleness 0. The solver is rewarded for the first sibling of each task, the verifier for the second."""
    solver, verifier = World(recipe(0), tmp_path).run().values()
    for step in (1, 2):
        tasks = range(2 * step - 2, 2 * step)
        assert solver.trained[step] == [(5 + n, t, 0, step - 1, (1, -1)[n]) for n in (0, 1) for t in tasks]
        tasks = range(3 * step - 3, 3 * step)
        assert verifier.trained[step] == [(5 + n, t, 1, step - 1, (-1, 1)[n]) for n in (0, 1) for t in tasks]


def test_policies_evaluate_by_themselves(tmp_path: Path) -> None:
    world = World(recipe(1), tmp_path)
    world.run()
    expected = [f"eval-{name}-{step}:" for name in ("solver", "verifier") for step in (0, 2, 4)]
    assert sorted(world.evaluations) == expected


def test_policy_that_nothing_asks_for_ends_the_run(tmp_path: Path) -> None:
    world = World(
        recipe(1, solver={}, verifier={}, critic={"eval": {"tasks": 0}}), tmp_path, asked=["solver", "verifier"]
    )
    with pytest.raises(WindfallError, match=r"nothing of the policy 'critic'.* asked for: solver, verifier"):
        world.run()
