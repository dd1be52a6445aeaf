"""The demo teaches: its reward on held-out tasks rises by at least 0.3, whatever the seed, on workers that
die and come back. Minutes long, hence slow."""

from __future__ import annotations

from pathlib import Path

import pytest

from windfall import config
from windfall.events import read
from windfall.launch.folder import new_folder
from windfall.launch.supervisor import train

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_demo_rises_by_a_third_of_the_range(tmp_path: Path, seed: int) -> None:
    recipe = config.load(ROOT / "recipes" / "demo.toml", [f"run.seed={seed}", f"run.folder={tmp_path}"])
    folder = new_folder(recipe)
    train(recipe, folder, quiet=True)
    rewards = [e["reward"] for e in read(folder / "events.jsonl") if e["kind"] == "scalar" and e["name"] == "eval"]
    assert rewards[-1] - rewards[0] >= 0.3
