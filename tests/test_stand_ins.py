"""What the run does about a trainer that is lost, replaced or frozen."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from windfall import run_folder as folders
from windfall.controller import process as controls
from windfall.events import log
from windfall.events.log import EventLog
from windfall.link import auth
from windfall.link.memory import pair
from windfall.recipe.sections import Recipe
from windfall.training import TrainerLost


@pytest.fixture
def run(tmp_path: Path) -> Path:
    auth.make_token(tmp_path / "token")
    return tmp_path


def lines(run: Path) -> list[str]:
    return [e["name"] for e in log.read(run / "events.jsonl")]


class Interrupted:
    """Groups that record the errors they were interrupted with."""

    def __init__(self) -> None:
        self.by: list[BaseException] = []

    def interrupt(self, error: BaseException) -> None:
        self.by.append(error)


def dead() -> int:
    """The pid of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def attend(run: Path, pid: int, monkeypatch: pytest.MonkeyPatch, groups: Any) -> None:
    """A trainer connects, and its link ends at once."""

    async def story() -> None:
        monkeypatch.setattr(controls, "TRAINER_HEARTBEAT_S", 0.01)
        control = controls.ControllerProcess(Recipe(), run, EventLog(run / "events.jsonl"), False)
        control.life.lead.groups = groups
        ours, theirs = pair()
        await theirs.close("killed")
        hello: Any = SimpleNamespace(facts={"pid": pid}, weights=None, policy="")
        await control._attend_trainer(ours, hello)

    asyncio.run(asyncio.wait_for(story(), 240))


def test_rollout_of_a_lost_trainers_version_ends_when_the_next_one_connects(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No worker can pull that version any more: waiting for one that has it could take forever."""
    groups = Interrupted()
    attend(run, dead(), monkeypatch, groups)
    assert [type(e) for e in groups.by] == [TrainerLost]


def test_first_trainer_interrupts_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attend(run, dead(), monkeypatch, None)
    assert lines(run) == []


def test_dead_trainer_is_not_reported_as_frozen_while_the_next_one_starts(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with folders.owned(run, "trainer"):  # the lock of its successor
        attend(run, dead(), monkeypatch, None)
    assert lines(run) == []


def test_frozen_trainer_is_reported_to_the_supervisor(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller itself kills no process: the pid came over a link."""
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
