"""The engines of a trainer with two ranks generate for the run, alone. They are real processes, as is everything else.
In deterministic mode it makes no difference who generates, nor who is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.engine_groups import alive, parent, wait_for
from tests.support.rank_runs import events, finish, run_windfall, trained_steps, wait_for_trainer, wait_until, weights

OWN = ("fleet.local=true", "fleet.workers=0", "run.steps=2")
WORKER = ("fleet.local=false", "fleet.workers=1", *OWN[2:])
LORA = ("train.lora.rank=4", "train.lora.alpha=8")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of a run for which a worker generates."""
    folder = tmp_path_factory.mktemp("worker")
    with run_windfall(folder, *WORKER) as running:
        finish(folder, running)
    return weights(folder / "r")


def children(pid: int) -> list[int]:
    found = (int(p.name) for p in Path("/proc").iterdir() if p.name.isdecimal())
    return [child for child in found if alive(child) and parent_or_none(child) == pid]


def parent_or_none(pid: int) -> int | None:
    try:
        return parent(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None


def engines(run: Path) -> list[int]:
    """The processes of the engines: children of the fork server of rank 0."""
    rank = events(run, "trainer_ready")[-1]["rank_pids"][0]
    return [engine for server in children(rank) for engine in children(server)]


def check(run: Path) -> None:
    """All steps were trained, no token was lost, and only the trainer generated."""
    assert sorted(set(trained_steps(run))) == [1, 2]
    trained = [e for e in events(run, "step") if e["kind"] == "scalar"]
    assert all(e["lost_tokens"] == e["gaps"] == 0 for e in trained)
    assert any(e["updates_skipped"] < 3 for e in trained), "otherwise the weights are those of the start"
    assert {(e["worker"].partition("#")[0], e["device"]) for e in events(run, "worker_joined")} == {("local", "2x cpu")}


@pytest.mark.slow
def test_engines_generate_and_one_is_killed(tmp_path: Path) -> None:
    train_while_an_engine_is_killed(tmp_path)


@pytest.mark.slow
def test_weights_do_not_depend_on_the_engines(tmp_path: Path, expected: str) -> None:
    assert weights(train_while_an_engine_is_killed(tmp_path)) == expected


def train_while_an_engine_is_killed(folder: Path) -> Path:
    run = folder / "r"
    with run_windfall(folder, *OWN) as running:
        wait_until(lambda: trained_steps(run), folder, running)
        pids = engines(run)
        assert len(pids) == 2
        os.kill(pids[0], signal.SIGKILL)
        finish(folder, running)
    wait_for(lambda: not any(map(alive, pids)), "the engines end with the run")
    assert "of the trainer ended: the process was killed (SIGKILL)" in (run / "trainer.log").read_text()
    assert len(events(run, "trainer_ready")) == 1
    check(run)
    assert trained_steps(run) == [1, 2]
    return run


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_is_killed(tmp_path: Path, expected: str, rank: int) -> None:
    run = tmp_path / "r"
    with run_windfall(tmp_path, *OWN) as running:
        wait_until(lambda: trained_steps(run), tmp_path, running)
        left = engines(run)
        os.kill(events(run, "trainer_ready")[-1]["rank_pids"][rank], signal.SIGKILL)
        wait_for_trainer(tmp_path, running, 2)
        assert not any(map(alive, left)), "engines of the last trainer"
        finish(tmp_path, running)
    check(run)
    assert weights(run) == expected


@pytest.mark.slow
def test_adapters(tmp_path: Path) -> None:
    """The engines get the base once, and merge each adapter into it."""
    for name, options in (("worker", WORKER), ("own", OWN)):
        with run_windfall(tmp_path / name, *options, *LORA) as running:
            finish(tmp_path / name, running)
    check(tmp_path / "own" / "r")
    assert weights(tmp_path / "own" / "r") == weights(tmp_path / "worker" / "r")
