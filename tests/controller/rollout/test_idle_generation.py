"""The trainer's engine in asynchronous training: simulated runs with few workers, with many and with none."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleets.virtual_loop import StepLoop
from windfall.controller.rollout.dispatch import Dispatch
from windfall.controller.rollout.local_generation import IdleGeneration
from windfall.controller.scheduling.local_time import LocalTimePolicy, OnlyWithoutWorkers, PredictedLocalTime
from windfall.events.log import EventLog, read
from windfall.recipe.file import load_recipe
from windfall.sim.core.run import Simulation, simulate
from windfall.sim.core.scenario import build
from windfall.types import LOCAL

RECIPE = Path(__file__).parents[3] / "recipes" / "sim-harvest.toml"
STEADY = ["trace.mean_up_s=1e7", "trace.mean_down_s=1"]


def run(folder: Path, *sets: str, steps: int = 8) -> tuple[list[dict[str, Any]], float]:
    """The step events, and the share of all tokens that the trainer's engine generated."""
    keys = ["sim.granule=8", f"run.steps={steps}", *STEADY, *sets]
    done: Simulation = simulate(build(load_recipe(RECIPE, keys)), folder / "log.jsonl")
    members = done.dispatch.members.all.values()
    local, total = sum(m.generated for m in members if m.name == LOCAL), sum(m.generated for m in members)
    events = read(folder / "log.jsonl")
    return [e for e in events if (e["kind"], e["name"]) == ("scalar", "step")], local / total


@pytest.mark.parametrize("staleness", [1, 4])
def test_run_without_other_workers_completes(tmp_path: Path, staleness: int) -> None:
    steps, share = run(tmp_path, "trace.nodes=0", f"rollout.staleness={staleness}")
    assert (len(steps), share) == (8, 1.0)
    assert all(e["groups"] == 48 and e["staleness_max"] <= staleness for e in steps)


def test_run_without_local_time_and_without_other_workers_completes(tmp_path: Path) -> None:
    steps, share = run(tmp_path, "trace.nodes=0", "rollout.staleness=1", "techniques.trainer_generates=false", steps=3)
    assert (len(steps), share) == (3, 1.0)


NEVER = [False] * 6


@pytest.mark.parametrize(
    ("waits", "expected"),
    [
        ([0.9, 0.0, 0.0, 0.0, 0.0], NEVER),  # the first step of a run does not count
        ([0.9, 0.2, 0.0, 0.2, 0.0], NEVER),
        ([0.9, 0.0, 0.5, 0.0, 0.5], [False, False, False, True, True, True]),  # waits for one step of each period
        ([0.9, 0.5, 0.5, 0.0, 0.0], [False, False, False, True, True, False]),  # a period without waits
    ],
)
def test_engine_takes_part_from_a_slow_step_until_a_fast_period(
    tmp_path: Path, waits: list[float], expected: list[bool]
) -> None:
    assert taken_part(tmp_path, PredictedLocalTime(), waits) == expected
    assert taken_part(tmp_path, OnlyWithoutWorkers(), waits) == NEVER


def taken_part(folder: Path, policy: LocalTimePolicy, waits: list[float]) -> list[bool]:
    """Whether the engine takes part in each step, with staleness 1. `waits`: wait shares of all steps but the last."""

    async def run() -> list[bool]:
        events = EventLog(folder / "events.jsonl")
        pace, out = IdleGeneration(Dispatch(events=events), policy, events, responses=12, staleness=1), list[bool]()
        for number, wait in enumerate([*waits, 0.0], start=1):
            pace.begin(number)
            out.append(pace.generates)
            await asyncio.sleep(10.0)
            pace.end(tokens=1, train_s=0.0, train_wait_s=10.0 * wait)
        return out

    with asyncio.Runner(loop_factory=StepLoop) as runner:
        return runner.run(run())


@pytest.mark.slow
def test_engine_takes_part_while_the_trainer_waits_and_rests_otherwise(tmp_path: Path) -> None:
    _, few = run(tmp_path, "trace.nodes=2", "rollout.staleness=2", steps=20)
    _, many = run(tmp_path, "trace.nodes=10", "rollout.staleness=2")
    _, off = run(tmp_path, "trace.nodes=2", "rollout.staleness=2", "techniques.trainer_generates=false")
    assert few > 0.2
    assert many < 0.05
    assert off < 0.05, "it may generate until the first worker has its weights"


def test_rates_of_a_step_cover_the_time_since_the_step_before(tmp_path: Path) -> None:
    """Before the first step the run waits for an evaluation, and generation goes on meanwhile."""
    steps, _ = run(tmp_path, "trace.nodes=4", "rollout.staleness=1", "eval.tasks=32", steps=4)
    for before, e in pairwise(steps):
        assert e["counted_s"] == pytest.approx(e["t"] - before["t"])
    for e in steps:
        assert e["tok_per_s"] == pytest.approx((e["made"] - e["restored"]) / e["counted_s"])
        assert 0 <= e["held_s"] <= e["counted_s"] + 1.0
    assert steps[0]["counted_s"] > steps[0]["s"] + 1.0
