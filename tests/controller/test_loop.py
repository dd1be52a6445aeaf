"""The controller: which tasks a step draws, when it saves and evaluates, and what a stop leaves. No model, no torch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from windfall import algorithms
from windfall.controller.generation import Generation, PolicyGroups, make_admission
from windfall.controller.loop import Loop
from windfall.controller.rollout.evaluation import Evaluation
from windfall.controller.rollout.grading import EnvFailures, Grading
from windfall.controller.rollout.stream import Stopped
from windfall.controller.tasks.admission import Admission
from windfall.controller.tasks.task_gate import TaskGate
from windfall.envs.base import HELD_OUT
from windfall.envs.failures import EnvFailed
from windfall.envs.held_out import EvaluationTasks
from windfall.errors import WindfallError
from windfall.events.log import EventLog, read
from windfall.recipe.file import parse_recipe
from windfall.recipe.sections import RolloutSection
from windfall.training import ENGINE_GAP, MIN_FRESH, CheckpointState, Gradient, NewVersion, Report, TrainerLost
from windfall.types import Group, Response, Sampling, Task


class ScriptedStream:
    """Hands out the groups of a world, one after another."""

    def __init__(self, world: World, on_group: Any, on_skipped: Any) -> None:
        self._world, self._on_group, self._on_skipped = world, on_group, on_skipped
        self._tasks: asyncio.Queue[int] = asyncio.Queue()

    def open(self, tasks: Sequence[int]) -> None:
        self._world.done.append(("draw", tasks[0], len(tasks)))
        for index in tasks:
            self._tasks.put_nowait(index)

    async def run(self) -> None:
        while True:
            index = await self._tasks.get()
            if index == self._world.stop_at:
                raise Stopped
            if index in self._world.skipped:
                self._on_skipped(index)
            else:
                self._on_group(self._world.group(index))


class World:
    """Fleet, trainer and rollout in one. It records in `done` what was requested."""

    def __init__(self, rewards: Callable[[int], Sequence[float | None]], stop_at: int = -1) -> None:
        self.done: list[tuple[Any, ...]] = []
        self.history: dict[str, object] = {}
        self.policy_options = {"": RolloutSection()}
        self.sampled_tokens = self.restored_tokens = 0
        self.grading = Grading()
        self.failures = EnvFailures("Scripted", EventLog(Path("/dev/null")))
        self.may_train = asyncio.Event()
        self.writes, self.micro_tokens = 0, 1000
        """Number of checkpoints written; number of tokens of a full micro-batch."""
        self.gap = 0.0
        """Engine gap in every report."""
        self.gaps: dict[int, float] = {}
        """Engine gap by number of the update, counted from 0."""
        self.skip: set[int] = set()
        """Numbers of the updates, counted from 0, whose gradient is not finite."""
        self.reasons: dict[int, str] = {}
        """Other reasons why an update was skipped, by its number."""
        self.engines: dict[str, int] = {}
        """Fresh tokens of each engine in every report."""
        self.skipped: set[int] = set()
        """Tasks that the environment cannot produce."""
        self.deaths: list[str] = []
        """Requests at which the trainer dies, in this order."""
        self.kept = CheckpointState(step=0, next_task=0)
        """The state that a new trainer starts from."""
        self.stop_at, self.version = stop_at, 0
        self._rewards, self._updates = rewards, 0

    def stream(self, *, on_group: Any, on_skipped: Any, **_: Any) -> ScriptedStream:
        return ScriptedStream(self, on_group, on_skipped)

    def sampling(self, policy: str) -> Sampling:
        return Sampling()

    async def groups(self, tasks: range, **_: Any) -> AsyncGenerator[Group]:
        self.done.append(("eval", len(tasks)))
        for index in tasks:
            if index == self.stop_at:
                raise Stopped
            yield self.group(index, [(1,)])

    def group(self, index: int, rows: Sequence[tuple[int, ...]] = ((1,), (1, 2))) -> Group:
        return Group(index=index, task=Task(id="t", prompt="p"), responses=tuple(
            Response(id=f"{index}/{i}", prompt=(5,), tokens=t, logprobs=(-1.0,) * len(t), sampled=(True,) * len(t),
                     versions=(self.version,) * len(t), finish="stop", reward=r)
            for i, (t, r) in enumerate(zip(rows, self._rewards(index), strict=False))))  # fmt: skip

    def reset_counters(self) -> None:
        self.failures.reset()

    def forget_history(self, needed: Any) -> None: ...

    def _live(self, request: str) -> None:
        if self.deaths and self.deaths[0] == request:
            self.deaths.pop(0)
            self.done.append(("died", request))
            raise TrainerLost(request)

    async def forward(self, samples: Sequence[Any], loss: Any = None, *, id: str) -> list[Any]:
        self._live("forward")
        self.done.append(("forward", len(samples)))
        return list(samples)

    async def forward_backward(self, samples: Sequence[Any], loss: Any = None, *, id: str) -> Gradient:
        self._live("forward_backward")
        self.done.append(("forward_backward", len(samples)))
        return Gradient(s=0.0)

    async def optim_step(self, state: CheckpointState | None = None, adam: Any = None, *, id: str) -> Report:
        self._live("optim_step")
        self.done.append(("optim_step",))
        self._updates += 1
        skipped = "not finite" if self._updates - 1 in self.skip else self.reasons.get(self._updates - 1, "")
        values = {f.name: 0.0 for f in fields(Report)} | {"tokens": 3, "skipped": skipped}
        gap = self.gaps.get(self._updates - 1, self.gap)
        values |= {"engine_gap": gap, "engine_gap_max": 9 * gap}
        values |= {"engine_gaps": dict.fromkeys(self.engines, gap), "engine_tokens": self.engines}
        if state is not None:
            self._completed = state.step
        return Report(**values)  # pyright: ignore

    async def publish(self, *, id: str) -> NewVersion:
        return NewVersion(version=self._completed, digest="")

    # TrainingPace: the trainer does not generate here, so training may begin at once.

    def begin(self, step: int) -> None:
        self.may_train.set()

    def begin_evaluation(self) -> None: ...
    def arrived(self, tokens: int) -> None: ...
    def trainable(self) -> None: ...
    def generated(self) -> None: ...
    def end(self, *, tokens: int, train_s: float, train_wait_s: float) -> None: ...

    async def connected(self) -> None:
        self.done.append(("connect", self.kept.step))

    async def restore(self, admission: Admission) -> CheckpointState:
        self.version = self.kept.step
        admission.restore(version=self.kept.step, next_task=self.kept.next_task)
        return self.kept

    async def offer(self, published: NewVersion) -> None:
        self.done.append(("offer", published.version))
        self.version = published.version

    def before_update(self, step: int, tasks: Sequence[int]) -> None: ...
    def leave_fp8(self, step: int, gap: float) -> None:
        self.done.append(("bf16", step, gap))

    def counters(self, staleness: dict[str, Any]) -> dict[str, Any]:
        return {}

    async def save(self, *, id: str) -> str:
        self._live("save")
        self.writes += 1
        return "somewhere"

    def saved(self, state: CheckpointState) -> None:
        self.kept = state
        self.done.append(("save", state.step, state.next_task))

    held_out: EvaluationTasks | None = None

    def run(self, folder: Path, start: CheckpointState | None = None, **sections: Any) -> CheckpointState:
        defaults = {"run": {"steps": 3}, "rollout": {"groups": 2, "group_size": 2}, "eval": {"tasks": 4}}
        recipe = parse_recipe(defaults | sections, where="here")
        algorithm = algorithms.make(recipe.algorithm.name)
        it: Any = self
        events = EventLog(folder / "events.jsonl")
        self.kept = start or self.kept

        async def play() -> CheckpointState:
            gate = TaskGate({"": make_admission(recipe)})
            generation = Generation(it, gate, recipe.rollout.group_size)
            groups = PolicyGroups("", recipe, algorithm, it, self.micro_tokens, generation)
            evaluation = Evaluation(recipe, it, events, self.held_out)
            reached = await Loop(recipe, algorithm, it, groups, evaluation, it, events).run()
            with suppress(Stopped):
                await generation.stop()
            return reached

        reached = asyncio.run(play())
        events.close()
        return reached

    def only(self, *kinds: str) -> list[tuple[Any, ...]]:
        return [d for d in self.done if d[0] in kinds]


def mixed(index: int) -> list[float | None]:
    return [0.0, 1.0]


def test_order_of_steps_checkpoints_and_evaluations(tmp_path: Path) -> None:
    world = World(mixed)
    reached = world.run(tmp_path, run={"steps": 5}, eval={"tasks": 4, "every": 2}, checkpoint={"every": 2})
    step = lambda first, n: [("draw", first, 2), ("forward_backward", 4), ("optim_step",), ("offer", n)]  # noqa: E731
    save = lambda n: [("save", n, 2 * n)]  # noqa: E731
    test = [("eval", 4)]
    assert world.done == [
        ("connect", 0), *test, *step(0, 1), *step(2, 2), *save(2), *test, *step(4, 3), *step(6, 4), *save(4), *test,
        *step(8, 5), *save(5), *test]  # fmt: skip
    assert reached == CheckpointState(step=5, next_task=10)


def test_evaluation_event_names_its_tasks(tmp_path: Path) -> None:
    """The file has fewer rows than `eval.tasks`: each is used once."""
    world = World(mixed)
    world.held_out = EvaluationTasks(tasks=3, description="3 rows of test.jsonl")
    world.run(tmp_path, run={"steps": 1}, eval={"tasks": 9})
    assert world.only("eval") == [("eval", 3)] * 2
    assert {e["on"] for e in read(tmp_path / "events.jsonl") if e["kind"] == "scalar" and e["name"] == "eval"} == {
        "3 rows of test.jsonl"
    }


def test_evaluation_event_says_how_many_responses_were_graded(tmp_path: Path) -> None:
    world = World(lambda index: [1.0 if index % 4 else None, 0.0])
    world.run(tmp_path, run={"steps": 1}, eval={"tasks": 4})
    evals = [e for e in read(tmp_path / "events.jsonl") if e["kind"] == "scalar" and e["name"] == "eval"]
    assert [(e["reward"], e["graded"], e["responses"], e["tasks"]) for e in evals] == [(1.0, 3, 4, 3)] * 2


def test_evaluation_event_of_two_roles(tmp_path: Path) -> None:
    """One response in which two roles of the policy spoke is two: "8 of 4 responses graded" would be wrong."""
    world, made = World(mixed), World.group

    def group(index: int, rows: Sequence[tuple[int, ...]] = ((1,), (1, 2))) -> Group:
        plain = made(world, index, rows)
        rewards = ((":a", 1.0), (":b", 0.5 if index % 2 else 0.0))
        return replace(plain, responses=tuple(
            replace(r, role=":a", rewards=rewards, more=(replace(r, id=f"{r.id}+1", role=":b"),))
            for r in plain.responses))  # fmt: skip

    world.group = group
    world.run(tmp_path, run={"steps": 1}, eval={"tasks": 4})
    evals = [e for e in read(tmp_path / "events.jsonl") if e["kind"] == "scalar" and e["name"] == "eval"]
    assert [(e["reward"], e["graded"], e["responses"], e["tasks"]) for e in evals] == [(0.625, 8, 8, 4)] * 2
    assert [e["roles"] for e in evals] == [{":a": 1.0, ":b": 0.25}] * 2


def test_groups_are_generated_while_one_is_trained_on(tmp_path: Path) -> None:
    """Otherwise turns would not be graded meanwhile, and their responses would wait."""
    world = World(mixed)
    second, made = asyncio.Event(), World.group

    def group(index: int) -> Group:
        if index == 1:
            second.set()
        return made(world, index)

    async def forward_backward(samples: Sequence[Any], *, id: str) -> Gradient:
        async with asyncio.timeout(60):
            await second.wait()
        return Gradient(s=0.0)

    world.group, world.forward_backward = group, forward_backward  # pyright: ignore
    world.micro_tokens = 1
    assert world.run(tmp_path, run={"steps": 1}, eval={"tasks": 0}).step == 1


@pytest.mark.parametrize(("gap", "alarms"), [(0.04, 0), (0.06, 3)])
def test_gap_between_engine_and_trainer_is_logged(tmp_path: Path, gap: float, alarms: int) -> None:
    world = World(mixed)
    world.gap = gap
    world.run(tmp_path)
    events = [e for e in read(tmp_path / "events.jsonl") if e["name"] == "engine_gap"]
    assert [(e["step"], e["mean"], e["alarm"]) for e in events] == [(n + 1, gap, 0.05) for n in range(alarms)]


FP8 = {"cuda fp8": MIN_FRESH}


@pytest.mark.parametrize(
    ("kv_dtype", "engines", "gap", "steps"),
    [
        ("fp8", FP8, 0.04, []),
        ("fp8", FP8, 0.06, [2]),
        ("auto", FP8, 0.06, []),
        ("fp8", {"cuda fp8": MIN_FRESH - 1}, 0.06, []),  # one unlikely token could decide it
        ("fp8", {"cuda": 1000}, 0.06, []),  # a lender, or the engine of a rank
        ("fp8", {"cuda fp8": 40, "vllm fp8": 40, "cuda": 1000}, 0.06, [2]),
    ],
)
def test_gap_with_an_fp8_cache_ends_its_use(
    tmp_path: Path, kv_dtype: str, engines: dict[str, int], gap: float, steps: list[int]
) -> None:
    world = World(mixed)
    world.gaps, world.engines = {1: gap}, engines
    world.run(tmp_path, engine={"kv_dtype": kv_dtype})
    assert [step for _, step, _ in world.only("bf16")] == steps
    assert all(found == pytest.approx(gap) for _, _, found in world.only("bf16"))


def test_fp8_gap_counts_though_the_mean_over_all_engines_is_small(tmp_path: Path) -> None:
    reports = [Report(tokens=1064, responses=1, engine_gap=0.01, engine_gaps={"cuda": 0.0, "cuda fp8": 0.2},
                      engine_tokens={"cuda": 1000, "cuda fp8": MIN_FRESH})]  # fmt: skip
    world = World(mixed)

    async def optim_step(state: CheckpointState | None = None, *, id: str) -> Report:
        world._completed = 1
        return reports[0]

    world.optim_step = optim_step  # pyright: ignore
    world.run(tmp_path, run={"steps": 1}, engine={"kv_dtype": "fp8"})
    assert world.only("bf16") == [("bf16", 1, pytest.approx(0.2))]


@pytest.mark.parametrize("gap", [0.9, float("nan")])
def test_step_whose_update_was_skipped_for_fp8_ends_its_use(tmp_path: Path, gap: float) -> None:
    """The number of tokens and their engines do not matter: the trainer has refused to train on them."""
    world = World(mixed)
    world.gaps, world.reasons = {1: gap}, {1: ENGINE_GAP}
    reached = world.run(tmp_path, engine={"kv_dtype": "fp8"})
    assert reached.step == 3, "the run goes on"
    assert world.only("draw") == [("draw", 0, 2), ("draw", 2, 2), ("draw", 4, 2)], "the step is not repeated"
    assert [step for _, step, _ in world.only("bf16")] == [2]
    (event,) = [e for e in read(tmp_path / "events.jsonl") if e["name"] == "update_skipped"]
    assert (event["step"], "train.engine_gap_limit" in event["why"]) == (2, True)


@pytest.mark.parametrize(("gap", "mean"), [(0.06, 0.06), (float("nan"), None)])
def test_gap_in_any_update_of_a_step_is_logged(tmp_path: Path, gap: float, mean: float | None) -> None:
    world = World(mixed)
    world.gaps = {0: gap}
    world.run(tmp_path, run={"steps": 1}, train={"minibatches": 2})
    (event,) = [e for e in read(tmp_path / "events.jsonl") if e["name"] == "engine_gap"]
    assert event["mean"] == mean


def test_resumed_run_continues_with_the_next_task(tmp_path: Path) -> None:
    world = World(mixed)
    world.run(tmp_path, start=CheckpointState(step=2, next_task=9))
    assert world.only("draw", "eval", "save") == [("draw", 9, 2), ("save", 3, 11), ("eval", 4)]
    assert world.only("offer") == [("offer", 3)]


@pytest.mark.parametrize(
    ("stop_at", "saved"),
    [(HELD_OUT, (0, 0)), (0, (0, 0)), (3, (1, 2)), (5, (2, 4))],
    ids=["in the first evaluation", "in the first step", "in the second", "in the third"],
)
def test_stop_saves_the_completed_steps(tmp_path: Path, stop_at: int, saved: tuple[int, int]) -> None:
    world = World(mixed, stop_at)
    reached = world.run(tmp_path)
    assert world.writes == 1
    assert world.only("save") == []  # the journal stays: it has the tokens of the step under way
    assert world.only("offer") == [("offer", n) for n in range(1, saved[0] + 1)]
    assert world.only("eval") == [("eval", 4)]
    assert reached == CheckpointState(step=saved[0], next_task=saved[1])
    assert read(tmp_path / "events.jsonl")[-1]["name"] == "stopped"


@pytest.mark.parametrize(
    ("groups", "max_draws", "drawn"),
    [
        (2, 3, [(0, 2), *[(n, 1) for n in range(2, 6)]]),  # after 3 times 2 tasks the step trains on what it has
        (2, 4, [(0, 2), *[(n, 1) for n in range(2, 8)]]),
        (5, 2, [(0, 5), *[(n, 1) for n in range(5, 10)]]),  # never more than 2 times 5
        (3, 9, [(0, 3), *[(n, 1) for n in range(3, 12)]]),
    ],
)
def test_dynamic_sampling_draws_until_enough_groups_are_informative(
    tmp_path: Path, groups: int, max_draws: int, drawn: list[tuple[int, int]]
) -> None:
    """Only the groups of tasks 3, 7, 11, ... are informative. Any other group is replaced as soon as it arrives."""
    world = World(lambda index: [0.0, 1.0] if index % 4 == 3 else [1.0, 1.0])
    rollout = {"groups": groups, "group_size": 2, "max_draws": max_draws}
    world.run(tmp_path, run={"steps": 1}, rollout=rollout, algorithm={"name": "dapo"}, eval={"tasks": 0})
    assert [d[1:] for d in world.only("draw")] == drawn
    end = sum(drawn[-1])
    assert world.only("forward_backward") == [("forward_backward", 2 * len([i for i in range(end) if i % 4 == 3]))]
    assert world.done[-1] == ("save", 1, end)


def test_step_with_several_updates(tmp_path: Path) -> None:
    world = World(mixed)
    world.skip = {0}
    world.run(tmp_path, run={"steps": 1}, train={"minibatches": 2}, eval={"tasks": 0})
    assert world.done == [
        ("connect", 0), ("draw", 0, 2), ("forward", 2), ("forward", 2), ("forward_backward", 2), ("optim_step",),
        ("forward_backward", 2), ("optim_step",), ("offer", 1), ("save", 1, 2)]  # fmt: skip
    events = {e["name"]: e for e in read(tmp_path / "events.jsonl")}
    skipped = {k: events["update_skipped"][k] for k in ("step", "why", "updates", "of")}
    assert skipped == {"step": 1, "why": "the gradient was not finite", "updates": 1, "of": 2}
    assert (events["step"]["updates_skipped"], events["step"]["updates_not_finite"]) == (1, 1)
    assert events["step"]["trained"] == 6


def test_run_without_a_finite_gradient_ends_with_an_error(tmp_path: Path) -> None:
    world = World(mixed)
    world.skip = {0, 1, 2}
    with pytest.raises(WindfallError, match="all 3 updates were skipped, because no gradient was finite"):
        world.run(tmp_path)
    assert world.kept.step == 3
    world = World(mixed)
    world.skip = {0, 2}
    assert world.run(tmp_path).step == 3


class QuietWorld(World):
    """In every group, the first agent ends without a token that is trained."""

    def group(self, index: int, rows: Sequence[tuple[int, ...]] = ((), (1, 2))) -> Group:
        return super().group(index, rows)


def test_response_without_tokens_is_used_in_every_step(tmp_path: Path) -> None:
    world = QuietWorld(mixed)
    assert world.run(tmp_path, run={"steps": 4}, eval={"tasks": 0}).next_task == 8, "no task was drawn twice"
    steps = [e for e in read(tmp_path / "events.jsonl") if e["kind"] == "scalar" and e["name"] == "step"]
    assert [e["responses"] for e in steps] == [4] * 4


def test_evaluation_without_a_reward_counts_only_its_own_responses(tmp_path: Path) -> None:
    """Step 1 leaves a response without a reward; the evaluation after it has four."""
    world = World(lambda index: [None] if index >= HELD_OUT and world.only("optim_step") else [0.0, 1.0])
    begin = world.begin

    def one_missing(step: int) -> None:
        begin(step)
        world.failures.miss("0/0", EnvFailed("no reward", "none"))

    world.begin = one_missing
    groups = world.groups

    def counted(tasks: range, **options: Any) -> AsyncGenerator[Group]:
        if tasks[0] >= HELD_OUT and world.only("optim_step"):
            for index in tasks:
                world.failures.miss(f"{index}/0", EnvFailed("no reward", "none"))
        return groups(tasks, **options)

    world.groups = counted  # pyright: ignore
    with pytest.raises(WindfallError, match="no response of the evaluation after step 1 got a reward; 4 are missing"):
        world.run(tmp_path, run={"steps": 1})


def test_response_without_a_reward_is_not_trained_on(tmp_path: Path) -> None:
    world = World(lambda index: [None, 1.0] if index else [None, None])
    world.run(tmp_path, run={"steps": 1}, eval={"tasks": 0})
    assert world.only("forward_backward") == [("forward_backward", 1)]
    step = next(e for e in read(tmp_path / "events.jsonl") if e["name"] == "step")
    assert (step["reward"], step["responses"], step["mean_length"]) == (1.0, 4, 1.5)


def test_run_waits_for_a_lost_trainer_and_trains_its_steps_again(tmp_path: Path) -> None:
    world = World(mixed)
    world.deaths = ["forward_backward"]
    reached = world.run(tmp_path, run={"steps": 2}, eval={"tasks": 4}, checkpoint={"every": 1})
    assert reached == CheckpointState(step=2, next_task=4)
    first = [("draw", 0, 2), ("forward_backward", 4), ("optim_step",), ("offer", 1), ("save", 1, 2)]
    assert world.done == [
        ("connect", 0), ("eval", 4), ("draw", 0, 2), ("died", "forward_backward"), ("connect", 0), *first,
        ("draw", 2, 2), ("forward_backward", 4), ("optim_step",), ("offer", 2), ("save", 2, 4),
        ("eval", 4)]  # fmt: skip


@pytest.mark.parametrize("death", ["forward_backward", "optim_step", "save", "forward"])
def test_steps_since_the_checkpoint_are_trained_again(tmp_path: Path, death: str) -> None:
    world = World(mixed)
    end = world.run(tmp_path, run={"steps": 3}, checkpoint={"every": 2}, train={"minibatches": 2})
    again = World(mixed)
    again.deaths = [death, death]
    assert again.run(tmp_path / "again", run={"steps": 3}, checkpoint={"every": 2}, train={"minibatches": 2}) == end
    assert len(again.only("died")) == 2
    assert again.only("save")[-1] == world.only("save")[-1]
    assert again.only("eval") == world.only("eval")  # no evaluation runs twice
    lost = [e["name"] for e in read(tmp_path / "again" / "events.jsonl")].count("trainer_lost")
    assert lost == 2


@pytest.mark.parametrize("every", [1, 10])
def test_step_is_saved_although_the_answer_to_its_update_was_lost(tmp_path: Path, every: int) -> None:
    """The link ended during the last Update: the trainer reconnects, and has the step."""
    world = World(mixed)
    world.deaths = ["optim_step"]
    at = world.connected

    async def connected() -> None:
        if world.only("died"):
            world.kept = CheckpointState(step=2, next_task=4)
        await at()

    world.connected = connected
    start = CheckpointState(step=1, next_task=2)
    reached = world.run(tmp_path, run={"steps": 2}, eval={"tasks": 4}, checkpoint={"every": every}, start=start)
    assert reached == CheckpointState(step=2, next_task=4)
    assert world.done[-3:] == [("connect", 2), ("save", 2, 4), ("eval", 4)]


def test_evaluation_of_a_lost_step_runs_again(tmp_path: Path) -> None:
    """After a fall back, evaluations of later steps no longer count."""
    world = World(mixed)
    world.deaths = ["forward_backward", "forward_backward"]
    first, calls = world.forward_backward, [0]

    async def forward_backward(samples: Sequence[Any], *, id: str) -> Gradient:
        calls[0] += 1  # it dies in step 2 of the first trainer and in step 1 of the second
        if calls[0] in (2, 3):
            return await first(samples, id=id)
        deaths, world.deaths = world.deaths, []
        try:
            return await first(samples, id=id)
        finally:
            world.deaths = deaths

    world.forward_backward = forward_backward
    world.run(tmp_path, run={"steps": 2}, eval={"tasks": 4, "every": 1}, checkpoint={"every": 10})
    assert len(world.only("died")) == 2
    assert [e["step"] for e in read(tmp_path / "events.jsonl") if (e["kind"], e["name"]) == ("scalar", "eval")] == [
        0, 1, 1, 2]  # fmt: skip


@pytest.mark.parametrize("where", ["step 2", "the evaluation after step 0"])
def test_run_ends_when_no_response_got_a_reward(tmp_path: Path, where: str) -> None:
    def rewards(index: int) -> list[float | None]:
        broken = index >= HELD_OUT if where.startswith("the eval") else 2 <= index < HELD_OUT
        return [None, None] if broken else [0.0, 1.0]

    world = World(rewards)
    with pytest.raises(WindfallError, match=f"environment Scripted: no response of {where} got a reward"):
        world.run(tmp_path)
    assert len(world.only("optim_step")) == (1 if where == "step 2" else 0), (
        "a step without rewards must not be trained on"
    )


def test_one_reward_is_enough_to_continue(tmp_path: Path) -> None:
    world = World(lambda index: [None, 1.0] if index % 2 else [None, None])
    assert world.run(tmp_path, eval={"tasks": 0}).step == 3


def test_skipped_task_is_replaced_and_counts_as_drawn(tmp_path: Path) -> None:
    world = World(mixed)
    world.skipped = {0, 3}
    assert world.run(tmp_path, run={"steps": 1}, eval={"tasks": 0}) == CheckpointState(step=1, next_task=3)
    assert world.only("draw") == [("draw", 0, 2), ("draw", 2, 1)]
    (step,) = [e for e in read(tmp_path / "events.jsonl") if e["kind"] == "scalar" and e["name"] == "step"]
    assert (step["drawn"], step["groups"], step["lengths"]) == (3, 2, [[], [1, 2], [1, 2]])
