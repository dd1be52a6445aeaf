"""Whole runs on the tiny model with hostile environments: the message, the exit status, and no processes left over."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.hostile import environments as hostile
from tests.support.hostile.pool_calls import alive, wait_for
from windfall.events.log import Event, read

Windfall = Callable[..., tuple[int, str, str]]
RUN = Path("runs/small")


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of a run also use it."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def using(env: type, **more: Any) -> list[str]:
    keys = {"env.name": "custom", "env.factory": hostile.factory(env), "eval.tasks": 0, "rollout.max_tokens": 8, **more}
    return [f"--set={key}={value}" for key, value in keys.items()]


def events(kind: str, name: str) -> list[Event]:
    return [e for e in read(RUN / "events.jsonl") if (e["kind"], e["name"]) == (kind, name)]


@pytest.mark.slow
def test_blocking_feedback_ends_the_run_with_its_name(windfall: Windfall) -> None:
    """In an earlier version the supervisor killed and restarted the controller forever."""
    code, out, err = windfall(
        "train", "small.toml", *using(hostile.SleepsOnWords, **{"rollout.reward_timeout_s": 1.0}),
        "--set=rollout.reward_tries=1",
    )  # fmt: skip
    assert code == 2
    assert "environment SleepsOnWords: no response of step 1 got a reward; 4 are missing" in err
    assert "waited 1 s for SleepsOnWords.feedback of task 'hostile/" in err
    assert "in misbehave" in err  # where it was when it was killed
    assert "restarting" not in out
    assert "done" not in out


@pytest.mark.slow
def test_run_without_rewards_ends_and_resumes_when_the_environment_is_fixed(windfall: Windfall, here: Path) -> None:
    """An earlier version trained on nothing, printed a line per response, and ended with "done" and status 0."""
    (here / "broken").touch()
    code, out, err = windfall("train", "small.toml", *using(hostile.EmptyOnly))
    assert code == 2
    assert "environment EmptyOnly: no response of step 1 got a reward; 4 are missing" in err
    assert "(4 times in all): EmptyOnly.feedback of task 'hostile/" in err
    assert "ConnectionError: no judge for" in err
    assert out.count("reward missing") == 1
    (told,) = events("instant", "reward_missing")
    for kept in (told["traceback"], (RUN / "controller.log").read_text()):
        assert kept.count("in misbehave") == 1
    assert not (RUN / "checkpoints").exists() or not list((RUN / "checkpoints").iterdir())

    (here / "broken").unlink()
    code, out, err = windfall("resume", str(RUN))
    assert (code, err) == (0, "")
    steps = events("scalar", "step")
    assert [(e["step"], e["missing"]) for e in steps] == [(1, 0), (2, 0)]
    assert steps[0]["restored"] == steps[0]["made"] > 0, "its responses were generated already"


@pytest.mark.parametrize("more", [["--dry-run"], []])
def test_broken_environment_is_refused_before_anything_starts(windfall: Windfall, more: list[str]) -> None:
    code, out, err = windfall("train", "small.toml", *using(hostile.Sleeps, **{"rollout.reward_timeout_s": 0.5}), *more)
    assert (code, out) == (2, "")
    assert "environment Sleeps: waited 0.5 s for Sleeps.feedback of task 'hostile/0'" in err
    assert not Path("runs").exists()


def test_dry_run_prints_the_result_of_the_trial(windfall: Windfall) -> None:
    code, out, _ = windfall("train", "small.toml", *using(hostile.EmptyOnly), "--dry-run")
    assert code == 0
    assert "environment EmptyOnly: built task 'hostile/0'; an empty response to it got reward 0" in out


def test_syntax_error_is_shown_without_a_traceback(windfall: Windfall, here: Path) -> None:
    (here / "typo.py").write_text("class Env:\n    def task(self, index:\n")
    code, _, err = windfall("train", "small.toml", "--set=env.name=custom", "--set=env.factory=typo:Env")
    assert code == 2
    assert f"{here / 'typo.py'}:2: importing typo found a syntax error" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_nothing_that_the_environment_started_survives_the_run(windfall: Windfall, here: Path) -> None:
    """Daemons, in the trial call and in the run. Its output is in a file of its own."""
    options = f'{{ file = "{here / "pids"}", says = "a word" }}'
    code, _, err = windfall("train", "small.toml", *using(hostile.LeavesProcesses, **{"env.options": options}))
    assert code == 0, err
    left = [int(pid) for pid in (here / "pids").read_text().split()]
    assert len(left) > 12  # a call starts 12, and some may have been killed before they wrote their pid
    wait_for(lambda: not alive(left), "they have ended")
    assert (RUN / "env.log").read_text().count("a word") == 8
    assert "a word" not in (RUN / "controller.log").read_text()


@pytest.mark.slow
def test_skipped_tasks_leave_the_weights_the_same_after_a_resume(windfall: Windfall, here: Path) -> None:
    """The task numbers alone decide which tasks are skipped, so a resumed run skips the same ones."""
    import shutil

    more = ["--set=run.deterministic=true", "--set=checkpoint.every=1", "--set=checkpoint.keep=9"]
    assert windfall("train", "small.toml", *using(hostile.LongPrompts), *more)[0] == 0
    steps = events("scalar", "step")
    assert [(e["drawn"], e["skipped"], e["groups"]) for e in steps] == [(3, 1, 2), (3, 1, 2)]
    assert "exceeds the model's context" in events("instant", "task_skipped")[0]["error"]
    cut = Path("runs/cut")
    shutil.copytree(RUN, cut)
    shutil.rmtree(cut / "checkpoints" / "step-000002")
    shutil.rmtree(cut / "journal")
    assert windfall("resume", str(cut))[0] == 0
    weights = [(run / "checkpoints" / "step-000002" / "model.safetensors").read_bytes() for run in (RUN, cut)]
    assert weights[0] == weights[1]
