"""The processes of a trainer's ranks start and end together, whichever of them is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from windfall.devices import Place
from windfall.errors import WindfallError
from windfall.processes import process
from windfall.processes.process import Handle
from windfall.recipe.file import parse_recipe
from windfall.recipe.sections import Recipe
from windfall.run.ranks import rank_group
from windfall.run.ranks.rank_group import RankGroup
from windfall.trainer.ranks.rank_place import RANK_LOST, rank_devices


def recipe(**train: Any) -> Recipe:
    return parse_recipe({"train": train}, where="test")


def test_one_rank_per_gpu() -> None:
    gpus = [Place(device="cuda", gpu=str(n)) for n in range(4)]
    assert rank_devices(recipe(), gpus) == gpus
    assert rank_devices(recipe(ranks=2), gpus) == gpus[:2]
    assert rank_devices(recipe(ranks=8, rendezvous="10.0.0.5:29400"), gpus) == gpus  # the others are elsewhere
    assert rank_devices(recipe(), []) == [Place()]
    assert rank_devices(recipe(ranks=3), []) == [Place()] * 3
    with pytest.raises(WindfallError, match="5 ranks need as many GPUs, but this machine has 4"):
        rank_devices(recipe(ranks=5), gpus)


async def start(name: str, script: str, folder: Path) -> Handle:
    argv = [sys.executable, "-c", script]
    return process.start(name=name, argv=argv, env=dict(os.environ), log=folder / f"{name}.log")


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
        code = await asyncio.wait_for(RankGroup(ranks).wait(), 240)
        return code, [rank.running for rank in ranks]

    assert asyncio.run(main()) == (status, [False, False])


def test_group_is_killed_as_a_whole(tmp_path: Path) -> None:
    async def main() -> list[int]:
        ranks = [await start(f"rank-{n}", "import time; time.sleep(60)", tmp_path) for n in range(3)]
        group = RankGroup(ranks)
        group.kill()
        await asyncio.wait_for(group.wait(), 240)
        return [await rank.wait() for rank in ranks]

    assert asyncio.run(main()) == [-signal.SIGKILL] * 3
