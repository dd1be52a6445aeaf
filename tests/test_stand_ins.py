"""What the run does about a trainer or a worker that is there and is not: another takes its place, or it is frozen."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from windfall import config
from windfall import run_folder as folders
from windfall.events import log
from windfall.events.log import EventLog
from windfall.launch.processes import controller as controls
from windfall.link import auth
from windfall.link.memory import pair
from windfall.train.base import TrainerLost


@pytest.fixture
def run(tmp_path: Path) -> Path:
    auth.make_token(tmp_path / "token")
    return tmp_path


def lines(run: Path) -> list[str]:
    return [e["name"] for e in log.read(run / "events.jsonl")]


class Interrupted:
    """A rollout that writes down what it was interrupted with."""

    def __init__(self) -> None:
        self.by: list[BaseException | None] = []

    def interrupt(self, error: BaseException | None = None) -> None:
        self.by.append(error)


def dead() -> int:
    """The number of a process that was."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def attend(run: Path, pid: int, monkeypatch: pytest.MonkeyPatch, rollout: Any) -> None:
    """A trainer dials in, and its link ends at once."""

    async def story() -> None:
        monkeypatch.setattr(controls, "TRAINER_HEARTBEAT_S", 0.01)
        control = controls.ControllerProcess(config.Recipe(), run, EventLog(run / "events.jsonl"), False)
        control.life.rollout = rollout
        ours, theirs = pair()
        await theirs.close("killed")
        hello: Any = SimpleNamespace(facts={"pid": pid})
        await control._attend_trainer(ours, hello)

    asyncio.run(asyncio.wait_for(story(), 10))


def test_rollout_of_a_lost_trainers_version_ends_when_the_next_one_comes(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can pull that version any more: waiting for workers that have it could be for ever."""
    rollout = Interrupted()
    attend(run, dead(), monkeypatch, rollout)
    assert [type(e) for e in rollout.by] == [TrainerLost]


def test_the_first_trainer_interrupts_nobody(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attend(run, dead(), monkeypatch, None)
    assert lines(run) == []


def test_a_dead_trainer_is_not_called_frozen_while_the_next_one_starts(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with folders.owned(run, "trainer"):  # as its successor holds it
        attend(run, dead(), monkeypatch, None)
    assert lines(run) == []


def test_of_a_frozen_trainer_the_supervisor_is_told(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller itself kills nobody: the number came over a link."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        with folders.owned(run, "trainer"):
            attend(run, child.pid, monkeypatch, None)
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()
    assert lines(run) == ["trainer_frozen"]
    assert folders.read_json(run / ".trainer.frozen") == {"pid": child.pid}
