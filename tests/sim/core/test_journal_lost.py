"""Simulated runs whose journal is damaged while the controller is down. They continue and report what was lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.fleets.restarts import RestartingSimulation
from tests.support.hostile.checkpoints import JOURNALS, add_strays

Simulated = Callable[..., Any]
KILLED_S = 13.0


def damaging(damage: Callable[[Path], object]) -> Callable[[RestartingSimulation], None]:
    """Kill controller and trainer in about the fourth step, and apply `damage` to the journal's folder."""

    def now(simulation: RestartingSimulation) -> None:
        simulation.kill_controller()
        simulation.trainer.kill()
        damage(simulation.journal)

    def disturb(simulation: RestartingSimulation) -> None:
        simulation.controller_down_s = 1.0
        simulation.trainer.down_s = 2.0
        asyncio.get_running_loop().call_at(KILLED_S, now, simulation)

    return disturb


def run(restarting: Simulated, damage: Callable[[Path], object]) -> tuple[RestartingSimulation, list[dict[str, Any]]]:
    return restarting(damaging(damage), run={"steps": 4}, checkpoint={"every": 2})


def only_file(folder: Path) -> Path:
    (path,) = folder.glob("*.wal")
    return path


def test_intact_journal_causes_no_event(restarting: Simulated) -> None:
    _, log = run(restarting, lambda folder: None)
    assert [e["name"] for e in log if e["name"].startswith("journal_")] == []
    assert [e["step"] for e in log if e["name"] == "resumed"] == [2]


def test_run_reports_lost_tokens_and_generates_them_again(restarting: Simulated) -> None:
    _, alone = run(restarting, lambda folder: None)
    for kind in ("damaged in its middle", "deleted"):
        _, log = run(restarting, lambda folder, kind=kind: JOURNALS[kind](only_file(folder)))
        (lost,) = (e for e in log if e["name"] == "journal_lost")
        assert (lost["file"], lost["step"]) == ("000002.wal", 2)
        restored, fewer = (sum(e["restored"] for e in steps(events)) for events in (alone, log))
        assert fewer < restored
        assert (fewer == 0) == (kind == "deleted")
        for key in ("reward", "responses", "made"):
            assert [e[key] for e in steps(log)] == [e[key] for e in steps(alone)]


def steps(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [e for e in log if (e["kind"], e["name"]) == ("scalar", "step")]


def test_stray_files_are_left_alone(restarting: Simulated) -> None:
    _, log = run(restarting, add_strays)
    assert not any(e["name"] == "journal_lost" for e in log)
