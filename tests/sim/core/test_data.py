"""Replayed groups and skipped prompts in simulated runs: in the log, and the same when processes are killed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.sim.core.test_restarts import failing, steps_of
from tests.support.fleets.restarts import RestartingSimulation
from windfall.sim.core.draws import uniform
from windfall.sim.machines.env import SimEnv
from windfall.training import Sample
from windfall.types import Feedback, Task, Turn

Simulated = Callable[..., Any]
PROMPTS = 24
SECTIONS: dict[str, Any] = {"run": {"steps": 8, "deterministic": True}, "checkpoint": {"every": 3}}


class FewPrompts(SimEnv):
    """Prompts come back in every epoch. One in three is always solved, and one in three never."""

    def task(self, index: int) -> Task:
        return Task(id=f"sim/{index}", prompt=str(index % PROMPTS))

    async def feedback(self, task: Task, turns: list[Turn]) -> Feedback:  # type: ignore[override]
        chance = (0.0, 0.5, 1.0)[int(str(task.prompt)) % 3]
        return Feedback(reward=float(uniform(f"{task.id}/{turns[0].text}") < chance))


class Trained:
    """Records the samples of every step, in order, as it was trained last."""

    def __init__(self, *disturb: Callable[[RestartingSimulation], None]) -> None:
        self.steps: dict[int, list[tuple[Any, ...]]] = {}
        self._disturb = disturb

    def __call__(self, simulation: RestartingSimulation) -> None:
        simulation.env = FewPrompts(seed=0, reward_mean=0.5, reward_s=0.0)
        simulation.trainer.on_trained = self._trained
        for disturb in self._disturb:
            disturb(simulation)

    def _trained(self, step: int, samples: list[Sample]) -> None:
        lags = [0 if s.lag is None else int(s.lag.max()) for s in samples]
        found = [(s.ids, s.advantage, lag) for s, lag in zip(samples, lags, strict=True)]
        assert self.steps.setdefault(step, found) == found, f"step {step} is trained on other samples than before"


@pytest.mark.parametrize(
    "processes",
    [*(pytest.param((name,), marks=pytest.mark.slow) for name in ("trainer", "controller")), ("trainer", "controller")],
)
@pytest.mark.parametrize("keys", [{"replay": 0.5}, {"select": "greso"}, {"replay": 0.25, "select": "greso"}])
def test_killed_processes_change_neither_replayed_groups_nor_skipped_prompts(
    restarting: Simulated, keys: dict[str, Any], processes: tuple[str, ...]
) -> None:
    calm, killed = Trained(), Trained(failing(*processes))
    rollout = {"rollout": {"groups": 8, "group_size": 4, **keys}}
    alone, calm_log = restarting(calm, **SECTIONS, **rollout)
    done, log = restarting(killed, **SECTIONS, **rollout)
    assert (done.trainer.starts > 1) == ("trainer" in processes)
    assert (done.controller_starts > 1) == ("controller" in processes)
    assert len(calm.steps) == 8
    assert killed.steps == calm.steps
    assert done.token_schedule.real_tokens == alone.token_schedule.real_tokens, "nothing is generated twice"
    for name in ("drawn", "made", "reward", "replayed", "replayed_tokens", "skipped_prompts", "prompt_probability"):
        assert [e.get(name) for e in steps_of(log)] == [e.get(name) for e in steps_of(calm_log)]


def test_share_of_each_batch_is_replayed_within_its_age_and_not_generated(restarting: Simulated) -> None:
    trained = Trained()
    rollout = {"groups": 8, "group_size": 4, "replay": 0.5, "replay_age": 1}
    _, log = restarting(trained, **SECTIONS, rollout=rollout)
    steps = steps_of(log)
    assert [e["replayed"] for e in steps][:1] == [0]
    assert 0 < max(e["replayed"] for e in steps) <= 4
    assert max(e["replayed_age"] for e in steps) == 1
    assert all(e["drawn"] == 4 and e["groups"] == 4 + e["replayed"] for e in steps)
    assert all(e["trained"] == e["made"] + e["replayed_tokens"] for e in steps)
    for step, samples in trained.steps.items():
        old = [ids for ids, _, lag in samples if lag]
        assert {lag for *_, lag in samples} <= {0, 1}
        assert set(old) <= {ids for ids, *_ in trained.steps.get(step - 1, [])}, "it was trained on in the step before"
        assert all(advantage for _, advantage, lag in samples if lag), "without information it is not replayed"


def test_asynchronous_run_keeps_both_bounds(restarting: Simulated) -> None:
    keys = {"groups": 8, "group_size": 4, "staleness": 1, "replay": 0.5, "replay_age": 3, "select": "greso"}
    done, log = restarting(
        Trained(failing("trainer", "controller")), run={"steps": 8}, checkpoint={"every": 3}, rollout=keys
    )
    steps = steps_of(log)
    assert [e["step"] for e in steps] == list(range(1, 9))
    assert max(e["staleness_max"] for e in steps) <= 1
    assert 1 <= max(e["replayed_age"] for e in steps) <= 3
    assert sum(e["replayed"] for e in steps) > 8
    assert min(done.trainer.starts, done.controller_starts) > 1


@pytest.mark.slow
def test_selection_raises_the_share_of_informative_groups(restarting: Simulated) -> None:
    def informative(**keys: Any) -> tuple[float, list[dict[str, Any]]]:
        trained = Trained()
        _, log = restarting(
            trained, run={"steps": 30, "deterministic": True}, rollout={"groups": 8, "group_size": 4, **keys}
        )
        advantages = [advantage for step in range(10, 31) for _, advantage, _ in trained.steps[step]]
        return sum(map(bool, advantages)) / len(advantages), steps_of(log)

    without, plain = informative()
    selected, log = informative(select="greso")
    assert without < 0.45
    assert selected > 0.55
    assert "skipped_prompts" not in plain[0]
    first, last = log[0], log[-1]
    assert first["skipped_prompts"] == {"easy": 0, "hard": 0}, "no prompt is known in the first epoch"
    assert sum(e["skipped_prompts"]["easy"] for e in log) > sum(e["skipped_prompts"]["hard"] for e in log) > 0
    assert last["drawn"] == 8 + sum(last["skipped_prompts"].values())
