"""Whole simulated runs: reproducible, lossless, every second billed, close to a plain formula, and fast."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from windfall.controller.cost.bill import Totals
from windfall.errors import WindfallError
from windfall.recipe.file import load_recipe
from windfall.recipe.sections import Recipe
from windfall.sim.core import run, scenario
from windfall.sim.report.figures import figures

RECIPES = Path(__file__).parent.parent.parent.parent / "recipes"
Simulated = Callable[..., Any]


def steps_of(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [e for e in log if (e["kind"], e["name"]) == ("scalar", "step")]


def test_same_seed_gives_the_same_log_in_every_process(tmp_path: Path) -> None:
    """This process has a random hash seed, and the other one another."""
    changes = ["run.steps=2", "trace.mean_up_s=5", "trace.mean_down_s=2"]
    code = (
        "import sys; from pathlib import Path; from windfall.recipe.file import load_recipe;"
        "from windfall.sim.core import run, scenario;"
        f"run.simulate(scenario.build(load_recipe(Path(sys.argv[1]), {changes})), Path(sys.argv[2]))"
    )
    recipe, here, there = RECIPES / "sim-harvest.toml", tmp_path / "here.jsonl", tmp_path / "there.jsonl"
    env = {**os.environ, "PYTHONHASHSEED": "2"}
    with subprocess.Popen([sys.executable, "-c", code, str(recipe), str(there)], env=env) as other:
        run.simulate(scenario.build(load_recipe(recipe, changes)), here)
    assert other.returncode == 0
    log = here.read_bytes()
    assert log == there.read_bytes()
    assert b"worker_lost" in log
    assert b'"t":17672' in log, "wall-clock times start at EPOCH_S"


def test_different_seed_gives_a_different_log(simulated: Simulated) -> None:
    a, b = (steps_of(simulated(run={"seed": n, "steps": 1})[1])[0]["made"] for n in (0, 1))
    assert a != b


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_lost_and_every_second_is_billed_once(simulated: Simulated, seed: int) -> None:
    done, log = simulated(run={"seed": seed, "steps": 5}, trace={"mean_up_s": 4.0, "mean_down_s": 1.0})
    steps = steps_of(log)
    assert len(steps) == 5
    assert all(e["lost_tokens"] == 0 and e["discarded"] == 0 and e["responses"] == 64 for e in steps)
    assert sum(e["made"] for e in steps) == done.token_schedule.real_tokens, "with granule 1 every token is real"
    assert sum(e["workers_lost"] for e in steps) > 5, "too few losses for a meaningful test"
    end_s = log[-1]["m"]
    bill = sum((msgspec.convert(e["bill"], Totals) for e in log if "bill" in e), Totals())
    there_s = sum(min(s.end_s, end_s) - s.start_s for s in done.stays if s.joined)
    assert bill.holders["spot"].total_s == pytest.approx(there_s, abs=1e-6)
    assert bill.holders["trainer"].total_s == pytest.approx(end_s, abs=1e-6)
    assert bill.holders["spot"].total_usd == pytest.approx(there_s * 5 / 3600)


def test_without_migration_tokens_are_generated_again(simulated: Simulated) -> None:
    churn = {"mean_up_s": 4.0, "mean_down_s": 1.0}
    _, log = simulated(run={"steps": 5}, trace=churn, techniques={"migration": False})
    assert sum(e["discarded"] for e in steps_of(log)) > 0


@pytest.mark.parametrize("granule", [1, 8])
def test_colocated_step_takes_as_long_as_the_plain_formula(simulated: Simulated, granule: int) -> None:
    """All responses have one length: prefill, then steps with a full batch, then training, then the update."""
    trainer = {"fixed_s": 0.01, "each_s": 0.0001, "prefill_s": 1e-5, "train_s": 0.0002, "update_s": 0.7}
    sim = {"sigma": 0.0, "median_tokens": 200.0, "granule": granule, "trainer": trainer, "prompt_tokens": 50}
    done, log = simulated(trace={"nodes": 0}, sim=sim)
    generating_s = 16 * 50 * 1e-5 + 200 * (0.01 + 64 * 0.0001)
    expected_s = generating_s + 64 * 200 * 0.0002 + 0.7
    for event in steps_of(log):
        assert event["s"] == pytest.approx(expected_s, rel=1e-6)
    assert done.token_schedule.real_tokens == 4 * 64 * 200


@pytest.mark.slow
def test_granule_changes_figures_little(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    figures_by_granule = {}
    for granule in (1, 0):
        sections = {
            "run": {"steps": 6}, "rollout": {"groups": 24, "group_size": 4, "max_tokens": 2000},
            "train": {"micro_tokens": 5000}, "trace": {"mean_up_s": 60.0, "mean_down_s": 20.0},
            "sim": {"granule": granule, "median_tokens": 480.0, "skip_steps": 1},
        }  # fmt: skip
        w = scenario.build(recipe(**sections))
        done = run.simulate(w, tmp_path / "events.jsonl")
        figures_by_granule[w.granule] = figures(tmp_path / "events.jsonl", w, done.stays)
    exact, coarse = figures_by_granule[1], figures_by_granule[15]
    assert coarse.tok_per_s == pytest.approx(exact.tok_per_s, rel=0.02)
    assert coarse.tok_per_usd == pytest.approx(exact.tok_per_usd, rel=0.02)
    assert coarse.workers_there == pytest.approx(exact.workers_there, rel=0.05)


def test_trainer_machine_never_trains_and_generates_at_once(simulated: Simulated) -> None:
    """When no worker is left, `local` generates again, but not while it trains."""
    done, log = simulated(
        run={"steps": 6},
        trace={"nodes": 1, "mean_up_s": 5.0, "mean_down_s": 3.0},
        techniques={"trainer_generates": False},
    )
    trainer = sum((msgspec.convert(e["bill"], Totals) for e in log if "bill" in e), Totals()).holders["trainer"]
    training_s = done.trainer.trained_tokens * 0.000185
    assert trainer.seconds["generating"] + training_s <= log[-1]["m"] + 1e-6
    assert any(e["name"] == "local_resumed" for e in log), "local never generated again"


def test_run_stops_at_its_time_limit(simulated: Simulated) -> None:
    _, log = simulated(run={"steps": 1000}, sim={"seconds": 20.0})
    assert (log[-1]["name"], log[-1]["finished"]) == ("end", False)
    assert 19.9 < log[-1]["m"] < 25.0


def test_stuck_run_lists_the_waiting_tasks(
    simulated: Simulated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "STUCK_S", 600.0)
    trace = tmp_path / "trace.csv"
    trace.write_text("0,add,a\n4000,remove,a\n")
    with pytest.raises(WindfallError, match="no token in") as e:
        simulated(trace={"file": str(trace), "nodes": 1}, fleet={"local": False, "heartbeat_s": 0.3})
    assert "controller/rollout/stream.py" in str(e.value), "a task waits for groups"


def _spot64(tmp_path: Path, seconds: float) -> float:
    keys = [f"sim.seconds={seconds}", "sim.skip_steps=0", "run.steps=1000"]
    w = scenario.build(load_recipe(RECIPES / "sim-spot64.toml", keys))
    began = time.process_time()
    done = run.simulate(w, tmp_path / f"{seconds:g}.jsonl")
    took_s = time.process_time() - began
    assert done.dispatch.ledger.lost_tokens() == 0
    assert done.dispatch.ledger.counts.accepted * w.granule > 50_000 * seconds, "tokens of 64 workers"
    return took_s


@pytest.mark.slow
def test_a_simulated_hour_takes_little_more_than_twenty_times_three_minutes(tmp_path: Path) -> None:
    short_s = _spot64(tmp_path, 180.0)
    assert _spot64(tmp_path, 3600.0) < 2.0 * 20 * short_s
