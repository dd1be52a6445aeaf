"""Rewards by name, pass@k, and graders that are slow or fail: on the console, in the summary and in `windfall top`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from windfall.events.log import Event
from windfall.recipe.sections import Recipe
from windfall.run.views import figures
from windfall.run.views.console import Console
from windfall.run.views.summary import summarize


def event(kind: str, name: str, **fields: Any) -> Event:
    return {"t": 1.0, "m": 1.0, "kind": kind, "name": name, **fields}


def step(**fields: Any) -> Event:
    return event("scalar", "step", step=1, reward=0.5, responses=4, groups=2, missing=0, mean_length=12.5, cut=0.0,
                 made=1000, s=10.0, tok_per_s=500.0, grad_norm=0.1, entropy=0.7, trained=1000, reward_s=0.01,
                 reward_s_max=0.02, grading_peak=3, grader_errors=0, rewards_retried=0, **fields)  # fmt: skip


def test_console_lines(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    console = Console(Recipe(), tmp_path)
    console.show(step(rewards={"math": 0.5, "a[b]": 0.25}))
    assert "(math 0.500, a[b] 0.250)" in capsys.readouterr().out
    slow = step() | {"reward_s": 2.0, "reward_s_max": 4.0, "grader_errors": 3}
    console.show(slow)
    out = capsys.readouterr().out
    assert "grader errors 3" in out
    console.show(step())
    out = capsys.readouterr().out
    assert "grader" not in out
    console.show(event("instant", "reward_retried", response="3/1", error="no server", count=1))
    assert "no server" in capsys.readouterr().out
    busy = {"processes": 4, "limit": 32, "queued": 9, "grading": 13, "longest_s": 25.0, "reward_s": 3.0, "errors": 2}
    console.show(event("instant", "grading_slow", **busy))
    assert "13 rewards in progress (9 queued, longest 25.0 s)" in capsys.readouterr().out
    console.show(event("scalar", "eval", step=0, reward=0.5, on="9 rows", pass_at={"1": 0.5, "4": None}))
    assert "reward 0.500, pass@1 0.500, pass@4 - on 9 rows" in capsys.readouterr().out
    console.show(event("scalar", "eval", step=0, reward=0.677, on="64 held-out tasks", graded=31, responses=64))
    assert "reward 0.677 (31 of 64 responses graded) on 64 held-out tasks" in capsys.readouterr().out


def test_summary() -> None:
    evals = [event("scalar", "eval", step=n, reward=0.1 * n, pass_at={"8": 0.2 * n}) for n in (1, 2)]
    assert dict(summarize([*evals, step()]))["pass@8"] == "0.200 before, 0.400 after"
    evals[0] |= {"on": "8 rows"}
    evals[1] |= {"graded": 3, "responses": 8, "on": "8 rows"}
    shown = dict(summarize(evals))["evaluation reward"]
    assert shown == "0.100 before, 0.200 (3 of 8 responses graded) after, on 8 rows"


def test_the_summary_compares_evaluations_on_the_same_tasks() -> None:
    first, second, third = (
        event("scalar", "eval", step=n, reward=0.1 * n, on=on, pass_at={"8": 0.1 * n})
        for n, on in ((1, "8 rows of a"), (2, "6 rows of b"), (3, "6 rows of b"))
    )
    assert dict(summarize([first, second])) == {"evaluation reward": "0.200, on 6 rows of b"}
    shown = dict(summarize([first, second, third]))
    assert shown["evaluation reward"] == "0.200 before, 0.300 after, on 6 rows of b"
    assert shown["pass@8"] == "0.200 before, 0.300 after"


def test_environments_without_processes_are_named() -> None:
    idle = {"processes": 0, "limit": 0, "queued": 0, "grading": 0, "longest_s": 0.0, "reward_s": 0.0, "errors": 0}
    assert figures.graders(idle).startswith("in the controller, 0 rewards")
    ended = idle | {"limit": 32}  # its processes start with the first call, and end with the run
    assert figures.graders(ended).startswith("0 processes (at most 32), 0 rewards")
