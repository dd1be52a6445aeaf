"""The engines of a trainer with two ranks generate for the run, alone. In deterministic mode it makes no difference who
generates, nor who is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.ranks.rank_runs import (
    events,
    finish,
    run_windfall,
    trained_steps,
    wait_for_trainer,
    wait_until,
    weights,
)

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


def check(run: Path) -> None:
    """All steps were trained, no token was lost, and only the ranks generated."""
    assert sorted(set(trained_steps(run))) == [1, 2]
    trained = [e for e in events(run, "step") if e["kind"] == "scalar"]
    assert all(e["lost_tokens"] == e["gaps"] == 0 for e in trained)
    assert any(e["updates_skipped"] < 3 for e in trained), "otherwise the weights are those of the start"
    joined = {(e["worker"].partition("#")[0], e["device"]) for e in events(run, "worker_joined")}
    assert joined == {("local", "cpu"), ("local-1", "cpu")}


@pytest.mark.slow
def test_weights_do_not_depend_on_who_generates(tmp_path: Path, expected: str) -> None:
    run = tmp_path / "r"
    with run_windfall(tmp_path, *OWN) as running:
        finish(tmp_path, running)
    assert len(events(run, "trainer_ready")) == 1
    check(run)
    assert trained_steps(run) == [1, 2]
    assert weights(run) == expected


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_is_killed(tmp_path: Path, expected: str, rank: int) -> None:
    run = tmp_path / "r"
    with run_windfall(tmp_path, *OWN) as running:
        wait_until(lambda: trained_steps(run), tmp_path, running)
        os.kill(events(run, "trainer_ready")[-1]["rank_pids"][rank], signal.SIGKILL)
        wait_for_trainer(tmp_path, running, 2)
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
