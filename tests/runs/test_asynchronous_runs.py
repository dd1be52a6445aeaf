"""Asynchronous runs from end to end on the tiny model, with real processes: what their event log must say.

Not covered here: runs whose processes are killed (tests/runs/test_soak.py), and faults that need many steps
(tests/chaos).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from windfall.events.log import read

Windfall = Callable[..., tuple[int, str, str]]


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [e for e in read(run / "events.jsonl") if (e["kind"], e["name"]) == ("scalar", "step")]


def settings(*more: str) -> list[str]:
    """Options of a small asynchronous run."""
    common = ["rollout.groups=3", "rollout.group_size=4", "rollout.max_tokens=60", "train.lr=1e-3", "eval.tasks=0"]
    return [f"--set={setting}" for setting in (*common, *more)]


def check_rules(steps: list[dict[str, Any]], bound: int) -> None:
    """The rules of every asynchronous run that was not disturbed."""
    trained = [task for e in steps for task in e["tasks"] if task not in e["replaced"]]
    assert len(trained) == len(set(trained)), "a task was trained on twice"
    assert max(e["staleness_max"] for e in steps) <= bound
    assert all(sum(e["staleness_counts"]) == e["responses"] - e["missing"] for e in steps)
    assert all(e["lost_tokens"] == e["stale"] == e["late"] == 0 for e in steps)
    # Tokens that are new have the log-probs of the trainer's weights. With a wrong version they would not.
    assert max(e["engine_gap_max"] for e in steps) < 1e-3
    used = sum(tokens for e in steps for row in e["lengths"] for tokens in row)
    assert sum(e["made"] for e in steps) == used + sum(e["too_old_tokens"] for e in steps), "tokens do not add up"


@pytest.mark.slow
def test_tokens_add_up_and_the_bound_holds(windfall: Windfall) -> None:
    code, out, err = windfall("train", "small.toml", *settings("rollout.staleness=2", "run.steps=5", "fleet.workers=1"))
    assert (code, err) == (0, ""), out
    steps = steps_of(Path("runs/small"))
    assert [e["step"] for e in steps] == [1, 2, 3, 4, 5]
    check_rules(steps, bound=2)
    assert max(e["drift"] for e in steps) > 0, "no response had a token of an older version"
    assert sum(e["restored"] for e in steps) == 0
    assert "stale " in out
    assert "while generating" not in out, "generation never stops in an asynchronous run"
