"""Whole runs of several jobs on one device: each ends with the weights that it has alone."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs.turn_server import served

OPTIONS = ("--set", "run.deterministic=true", "--set", "run.steps=2")


def train(folder: Path, recipe: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    folder.mkdir()
    (folder / "small.toml").write_text(recipe)
    return subprocess.Popen(
        [sys.executable, "-m", "windfall.run.cli", "train", "small.toml", *OPTIONS],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def weights(folder: Path) -> bytes:
    return (folder / "runs" / "small" / "checkpoints" / "step-000002" / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_jobs_on_one_device_end_with_the_weights_that_they_have_alone(tmp_path: Path, small_recipe: str) -> None:
    recipes = {job: small_recipe.replace("[run]", f"[run]\nseed = {n}") for n, job in enumerate("ab")}
    for job, recipe in recipes.items():
        alone = train(tmp_path / f"{job}-alone", recipe, {})
        output = alone.communicate(timeout=240)[0]
        assert alone.returncode == 0, output
    with served(tmp_path / "turns") as server:
        names = {"WINDFALL_TURNS": str(server.path), "WINDFALL_TURN_DEVICES": "gpu"}
        running = {
            job: train(tmp_path / job, recipe, {**names, "WINDFALL_TURN_KEY": f"key-{job}"})
            for job, recipe in recipes.items()
        }
        for job, process in running.items():
            output = process.communicate(timeout=240)[0]
            assert process.returncode == 0, output
            assert weights(tmp_path / job) == weights(tmp_path / f"{job}-alone")
        turns = list(server.turns)
        assert not server.holder()
        assert not server.waiting()
    assert {(t["job"], t["kind"]) for t in turns} == {(job, kind) for job in "ab" for kind in ("rollout", "train")}
    assert all(sum(t["work"] for t in turns if (t["job"], t["kind"]) == (job, "train")) > 0 for job in "ab")
    ends = sorted((t["start_s"], t["end_s"]) for t in turns)
    assert all(first[1] <= second[0] + 0.005 for first, second in itertools.pairwise(ends))
    assert weights(tmp_path / "a") != weights(tmp_path / "b")
