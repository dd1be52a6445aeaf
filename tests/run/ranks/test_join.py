"""`windfall trainer --join`: which rank it is, where it computes, and what it leaves behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from windfall import devices
from windfall.devices import Place
from windfall.errors import WindfallError
from windfall.link import messages as m
from windfall.processes import process
from windfall.processes.process import EXIT_NO_CONTROLLER
from windfall.recipe.file import parse_recipe
from windfall.run import liveness
from windfall.run.ranks import join
from windfall.trainer.ranks.rank_place import RankPlace

SRUN = {
    "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "2", "SLURM_STEP_NUM_TASKS": "8",
}  # fmt: skip


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_temporary_folder_is_removed(temporary: Path) -> None:
    assert join.main("http://127.0.0.1:9", "t" * 20, patience_s=0.1) == EXIT_NO_CONTROLLER
    assert list(temporary.iterdir()) == []


def test_temporary_folder_with_the_log_of_a_failure_stays(temporary: Path) -> None:
    with join.temporary_folder() as folder:
        (folder / ".trainer.failure").write_text("{}")
    assert list(temporary.iterdir()) == [folder]


@pytest.mark.parametrize(
    ("environment", "rank", "size", "local", "machine"),
    [
        ({"RANK": "0", "WORLD_SIZE": "1"}, 0, 1, 0, 0),
        ({"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "GROUP_RANK": "1"}, 9, 16, 1, 1),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "2"}, 5, 8, 1, 2),
        ({**SRUN, "RANK": "1", "WORLD_SIZE": "2"}, 1, 2, 0, 0),  # by hand, or by torchrun, inside a job
        ({**SRUN, "RANK": "1", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "none"}, 1, 8, 0, 0),
    ],
)
def test_environment_says_which_rank_this_is(
    environment: dict[str, str], rank: int, size: int, local: int, machine: int
) -> None:
    place = RankPlace.of(environment)
    assert (place.rank, place.size, place.local_rank, place.machine) == (rank, size, local, machine)
    assert RankPlace.of(environment | place.environment()) == place


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, "no environment variable says which rank this is"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "variable RANK: 'x' is not a number"),
        ({"RANK": "0", "WORLD_SIZE": "-1"}, "variable WORLD_SIZE: '-1' is not a number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2 and WORLD_SIZE is 2: ranks are counted from 0"),
        ({"RANK": "1"}, "RANK is set, but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set, but RANK is not"),
        ({**SRUN, "RANK": "1"}, "RANK is set, but WORLD_SIZE is not"),
        ({"SLURM_NTASKS": "8"}, "SLURM_NTASKS is set, but SLURM_PROCID is not"),  # within salloc, without srun
        ({**SRUN, "SLURM_NTASKS": "4"}, "SLURM_PROCID is 5 and SLURM_NTASKS is 4"),
        ({**SRUN, "SLURM_NTASKS": "16"}, r"SLURM_NTASKS is 16, but srun has started 8 tasks \(SLURM_STEP_NUM_TASKS"),
        ({**SRUN, "RANK": "0", "WORLD_SIZE": "8"}, "RANK is 0, but srun started this as task 5 of 8"),
        ({"RANK": "1", "WORLD_SIZE": "8", "LOCAL_RANK": "2"}, "LOCAL_RANK is 2 and RANK is 1: a machine has no more"),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "at least one of them is wrong"),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "8"}, "at least one of them is wrong"),
    ],
)
def test_variables_that_are_missing_or_contradict_each_other_are_refused(
    environment: dict[str, str], said: str
) -> None:
    with pytest.raises(WindfallError, match=said) as caught:
        RankPlace.of(environment)
    assert "Start it with torchrun or srun" in str(caught.value)


def test_rank_computes_on_the_gpu_with_its_local_number(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Place] = []
    monkeypatch.setattr(devices, "gpu_places", lambda device: found)
    recipe = parse_recipe({}, where="test")
    assert join.own_device(recipe, RankPlace(local_rank=3)) == Place()
    found[:] = [Place(device="cuda", gpu="7")]  # srun shows every task its own GPU only
    assert join.own_device(recipe, RankPlace(local_rank=3)) == found[0]
    found.append(Place(device="cuda", gpu="2"))
    assert join.own_device(recipe, RankPlace(local_rank=1)) == found[1]
    with pytest.raises(WindfallError, match="local rank 2 needs a GPU of its own, but this machine has 2"):
        join.own_device(recipe, RankPlace(local_rank=2))


def joining(folder: Path, rank: int = 1) -> join.JoiningRank:
    dialer: Any = None
    return join.JoiningRank(dialer, "secret", RankPlace(rank=rank, size=2), folder=folder, patience_s=1.0)


def test_rank_0_must_see_the_folder_of_the_run(tmp_path: Path) -> None:
    welcome = m.RankWelcome(proof=b"", recipe="", folder=str(tmp_path / "elsewhere"), weights_key="")
    with pytest.raises(WindfallError, match="rank 0 cannot open the folder of the run"):
        joining(tmp_path, rank=0)._prepare(welcome)


def test_frozen_process_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "CHECK_S", 0.05)
    monkeypatch.setattr(liveness, "FROZEN_S", 0.2)

    async def main() -> int:
        argv = [sys.executable, "-c", "import time; time.sleep(60)"]
        handle = process.start(name="rank-1", argv=argv, env=dict(os.environ), log=tmp_path / "log")
        handle.signal(signal.SIGSTOP)
        return await asyncio.wait_for(joining(tmp_path)._watch(handle), 240)

    assert asyncio.run(main()) == -signal.SIGKILL
