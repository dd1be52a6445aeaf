"""Variants are compared over the same steps, and co-located training has no worker but the trainer's own engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from windfall.events import log as events
from windfall.recipe.sections import Recipe
from windfall.sim.report import compare


@pytest.mark.slow
def test_variants_are_compared_over_the_steps_that_all_completed(tmp_path: Path, recipe: Callable[..., Recipe]) -> None:
    slow = {"fixed_s": 0.012, "each_s": 0.0006, "prefill_s": 4e-6, "train_s": 0.00005}
    limited = recipe(
        run={"steps": 1000}, trace={"nodes": 6, "mean_up_s": 1e6},
        sim={"seconds": 25.0, "skip_steps": 1, "granule": 8, "trainer": slow},
    )  # fmt: skip
    names = ["colocated", "windfall"]
    done = compare.compare(limited, names, 2, tmp_path)
    for seed in range(2):
        completed = [sum(e["name"] == "step" for e in events.read(tmp_path / f"{name}-{seed}.jsonl")) for name in names]
        assert completed[0] < completed[1], "one of them is faster"
        runs = [row.runs[seed] for row in done.rows]
        assert [f.steps for f in runs] == [min(completed) - 1] * 2
        tokens = [f.tok_per_s * f.virtual_s for f in runs]
        assert tokens == pytest.approx([tokens[0]] * 2), "they generate the same responses"
        assert all(len(f.step_s) == f.steps and sum(f.step_s) < f.virtual_s + 1.0 for f in runs)
    [alone] = compare.compare(limited, ["windfall"], 1, tmp_path).rows
    assert alone.runs[0].steps > done.rows[1].runs[0].steps, "without others, all its steps count"
    assert alone.runs[0].step_s[: done.rows[1].runs[0].steps] == done.rows[1].runs[0].step_s
    assert compare.steps(done.rows).endswith("steps that all variants completed")
    assert compare.steps([alone]) == f"{alone.runs[0].steps} steps"


def test_colocated_training_has_no_other_workers(tmp_path: Path, recipe: Callable[..., Recipe]) -> None:
    harvesting = recipe(fleet={"workers": 1, "workers_max": 3})
    compare.compare(harvesting, ["colocated", "windfall"], 1, tmp_path)
    joined = {
        name: {e["lease"] for e in events.read(tmp_path / f"{name}-0.jsonl") if e["name"] == "worker_joined"}
        for name in ("colocated", "windfall")
    }
    assert joined == {"colocated": {"reserved"}, "windfall": {"reserved", "spot"}}
    workers = {e["worker"] for e in events.read(tmp_path / "colocated-0.jsonl") if e["name"] == "worker_joined"}
    assert workers == {"local"}
