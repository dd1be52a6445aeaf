"""The ranks of a trainer start and end together, whichever of them is lost, and the run goes on from its checkpoint."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rank_runs import events, finish, run_windfall, wait_for_trainer, weights

from windfall import config
from windfall.devices import Place
from windfall.errors import WindfallError
from windfall.fleet import process
from windfall.fleet.base import Handle
from windfall.launch import rank_group
from windfall.launch.rank_group import RANK_LOST, RankGroup, rank_places


def recipe(**train: Any) -> config.Recipe:
    return config.parse({"train": train}, where="test")


def test_one_rank_per_gpu() -> None:
    gpus = [Place(device="cuda", gpu=str(n)) for n in range(4)]
    assert rank_places(recipe(), gpus) == gpus
    assert rank_places(recipe(ranks=2), gpus) == gpus[:2]
    assert rank_places(recipe(), []) == [Place()]
    assert rank_places(recipe(ranks=3), []) == [Place()] * 3
    with pytest.raises(WindfallError, match="5 ranks need as many GPUs, but this machine has 4"):
        rank_places(recipe(ranks=5), gpus)


async def start(name: str, script: str, folder: Path) -> Handle:
    argv = [sys.executable, "-c", script]
    return await process.start(name=name, argv=argv, env=dict(os.environ), log=folder / f"{name}.log")


@pytest.mark.parametrize(
    ("scripts", "status"),
    [
        (["import time; time.sleep(60)", "import os; os.kill(os.getpid(), 9)"], -9),
        (["import time; time.sleep(60)", "raise SystemExit(2)"], 2),
        (["import time; time.sleep(0.5); raise SystemExit(1)", f"raise SystemExit({RANK_LOST})"], 1),
        (["raise SystemExit(4)", "import time; time.sleep(60)"], 4),
    ],
)
def test_group_ends_with_its_first_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scripts: list[str], status: int
) -> None:
    monkeypatch.setattr(rank_group, "FOLLOW_S", 1.0)

    async def main() -> tuple[int, list[bool]]:
        ranks = [await start(f"rank-{n}", script, tmp_path) for n, script in enumerate(scripts)]
        code = await asyncio.wait_for(RankGroup(ranks).wait(), 30)
        return code, [rank.running for rank in ranks]

    assert asyncio.run(main()) == (status, [False, False])


def test_group_is_killed_as_a_whole(tmp_path: Path) -> None:
    async def main() -> list[int]:
        ranks = [await start(f"rank-{n}", "import time; time.sleep(60)", tmp_path) for n in range(3)]
        group = RankGroup(ranks)
        group.kill()
        await asyncio.wait_for(group.wait(), 10)
        return [await rank.wait() for rank in ranks]

    assert asyncio.run(main()) == [-signal.SIGKILL] * 3


def train_while_ranks_are_killed(folder: Path, kills: int, seed: int) -> Path:
    """Kill a random rank at a random moment after each start of the trainer."""
    draw, run = random.Random(seed), folder / "r"
    with run_windfall(folder) as running:
        for kill in range(kills):
            wait_for_trainer(folder, running, kill + 1)
            time.sleep(draw.uniform(0.0, 3.0))
            pids = events(run, "trainer_ready")[-1]["rank_pids"]
            assert len(pids) == 2
            if running.poll() is None:
                os.kill(draw.choice(pids), signal.SIGKILL)
        finish(folder, running)
    return run


@pytest.mark.slow
def test_run_whose_ranks_are_killed_at_any_moment_ends_with_the_same_weights(tmp_path: Path) -> None:
    with run_windfall(tmp_path / "undisturbed") as running:
        finish(tmp_path / "undisturbed", running)
    expected = weights(tmp_path / "undisturbed" / "r")
    for seed in range(4):
        run = train_while_ranks_are_killed(tmp_path / str(seed), 3, seed)
        assert weights(run) == expected
        trained = [e["step"] for e in events(run, "step") if e["kind"] == "scalar"]
        assert trained[-1] == 4


def test_run_goes_on_after_a_rank_is_killed(tmp_path: Path) -> None:
    run = train_while_ranks_are_killed(tmp_path, 1, 0)
    assert [e["step"] for e in events(run, "step") if e["kind"] == "scalar"][-1] == 4
    assert "restarting it" in (tmp_path / "out.txt").read_text()
