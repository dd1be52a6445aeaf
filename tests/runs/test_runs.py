"""Runs from end to end on the tiny model: train, stop, resume, evaluate, generate.

Not covered here: a resumed run ends with the same weights (tests/trainer/test_checkpoint.py), and what a kill -9 in the
middle of a write leaves behind (there, and in tests/events).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.support.hostile.files import FOREIGN_LINES, damage
from windfall.controller.cost.bill import Totals
from windfall.envs.arithmetic import Arithmetic
from windfall.envs.base import HELD_OUT
from windfall.events.log import read
from windfall.processes import fork_client
from windfall.recipe.file import load_recipe

Windfall = Callable[..., tuple[int, str, str]]


def steps_of(run: Path) -> list[int]:
    return [e["step"] for e in read(run / "events.jsonl") if e["kind"] == "scalar" and e["name"] == "step"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, small_recipe: str) -> tuple[Path, str]:
    """The folder of a finished run, and what it printed. It starts as a user's run does, without an import server."""
    folder = tmp_path_factory.mktemp("trained")
    environment = {k: v for k, v in os.environ.items() if k != fork_client.RUNNER}
    (folder / "small.toml").write_text(small_recipe)
    done = subprocess.run(
        [sys.executable, "-m", "windfall.run.cli", "train", "small.toml"], cwd=folder, capture_output=True, text=True,
        timeout=280, env=environment | {"OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert (folder / "runs" / "small" / "fork_server.log").read_text() == ""
    return folder / "runs" / "small", done.stdout


def test_train_and_evaluate(windfall: Windfall, here: Path, trained: tuple[Path, str]) -> None:
    run, out = Path("runs/small"), trained[1]
    shutil.copytree(trained[0], run)
    assert "windfall generate runs/small --prompt" in out
    assert load_recipe(run / "recipe.toml") == load_recipe(here / "small.toml")
    assert steps_of(run) == [1, 2]
    events = read(run / "events.jsonl")
    assert [e["step"] for e in events if e["name"] == "eval" and e["kind"] == "scalar"] == [0, 2]
    assert all(e["made"] > 0 and e["responses"] == 4 for e in events if e["name"] == "step")
    assert events[-1]["finished"] is True
    # Every second of the trainer's machine, from the start of its process until it leaves, is billed.
    billed = sum((msgspec.convert(e["bill"], Totals) for e in events if "bill" in e), Totals()).all.total_s
    joined, left = (next(e for e in events if e["name"] == n) for n in ("worker_joined", "worker_left"))
    assert joined["age_s"] > 0
    assert billed == pytest.approx(left["t"] - joined["t"] + joined["age_s"], abs=0.25)

    code, out, _ = windfall("eval", "runs/small", "--tasks", "3", "--show", "3", "--temperature", "0")
    assert code == 0
    assert "on 3 held-out tasks of arithmetic" in out
    again = windfall("eval", "runs/small/checkpoints/step-000002", "--tasks", "3", "--show", "3", "--temperature", "0")
    assert again[1] == out
    assert windfall("eval", "tiny", "--recipe", "small.toml", "--tasks", "2")[0] == 0
    out = windfall("eval", "tiny", "--recipe", "small.toml", "--tasks", "24", "--show", "3")[1]
    first = [str(Arithmetic(seed=0).task(HELD_OUT + i).prompt) for i in range(3)]
    shown = [line for line in out.splitlines() if line.endswith("=")]
    assert shown == first, "the first tasks in order, not those that finish first"


def test_a_checkpoint_has_the_chat_template_of_the_recipe(
    windfall: Windfall, here: Path, trained: tuple[Path, str]
) -> None:
    run, tokenizer = Path("runs/small"), Path("runs/small/tokenizer")
    shutil.copytree(trained[0], run)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for steps, given in ((3, template), (4, "")):
        assert windfall("resume", str(run), f"--set=chat.template={given}", f"--set=run.steps={steps}")[0] == 0
        file = run / "checkpoints" / f"step-{steps:06d}" / "chat_template.jinja"
        assert (file.read_text() if file.exists() else "") == given
        assert not (tokenizer / "chat_template.jinja").exists(), "that of the model, which has none"
    (tokenizer / "tokenizer.json").write_text("{")
    assert windfall("resume", str(run), "--set=run.steps=5")[0] == 0, "a damaged tokenizer is written again"


@pytest.mark.slow
def test_resume_with_an_edited_recipe_and_damaged_files(windfall: Windfall, trained: tuple[Path, str]) -> None:
    run = Path("runs/small")
    shutil.copytree(trained[0], run)
    recipe = (run / "recipe.toml").read_text()
    (run / "recipe.toml").write_text(recipe.replace("seed = 0", "seed = 1", 1))
    code, _, err = windfall("resume", "runs/small", "--set", "run.steps=3")
    assert code == 2
    assert "run.seed: 0 -> 1. The seed determines the tasks" in err

    (run / "recipe.toml").write_text(recipe.replace("temperature = 1.0", "temperature = 0.5", 1))
    with (run / "events.jsonl").open("ab") as file:
        file.write(b"".join(line + b"\n" for line in FOREIGN_LINES.values()))
        file.write(b'{"t": 1.0, "m": 1.0, "kind": "scalar", "name": "step", "step": 1}\n')  # nearly an event
    damage(run / "address.json", "another JSON object")
    damage(run / "fleet.json", "a JSON list")
    (run / "workers" / "old.log").mkdir()
    code, out, err = windfall("resume", "runs/small", "--set", "run.steps=3", "--set", "fleet.workers=1")
    assert (code, err) == (0, "")
    assert "changed since the start of the run:" in out
    assert "  rollout.temperature: 1.0 -> 0.5. Responses after this point" in out
    assert "runs/small/address.json: damaged and removed" in out
    assert "some events are damaged, so there is no summary" in " ".join(out.split())
    events = read(run / "events.jsonl")
    (event,) = [e for e in events if e["name"] == "recipe"]
    assert event["changed"] == {"run.steps": [2, 3], "rollout.temperature": [1.0, 0.5], "fleet.workers": [0, 1]}
    assert events[-1]["finished"] is True
    assert steps_of(run)[-1] == 3
    check_nothing_is_left_to_do(windfall, run)


def check_nothing_is_left_to_do(windfall: Windfall, run: Path) -> None:
    assert load_recipe(run / "recipe.toml").run.steps == 3  # so the next resume has nothing left to do
    was = {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.name != ".run.lock"}
    code, out, err = windfall("resume", "runs/small")
    assert (code, err) == (0, "")
    assert "this run is finished: all 3 steps are done" in out
    assert "windfall resume runs/small --set run.steps=6" in out
    code, _, err = windfall("resume", "runs/small", "--set", "model.path=smollm2-135m", "--set", "run.steps=4")
    assert code == 2
    assert "model.path: 'tiny' -> 'smollm2-135m'. A run continues from its own checkpoint" in err
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.name != ".run.lock"} == was  # nothing was touched


def test_same_seed_gives_the_same_text(windfall: Windfall) -> None:
    command = ["generate", "tiny", "--prompt", "12+34-5+8=", "--prompt", "7+8-9=", "--n", "3", "--max-tokens", "40"]
    code, out, _ = windfall(*command, "--seed", "5")
    assert code == 0
    assert len(out.splitlines()) == 6
    assert windfall(*command, "--seed", "5")[1] == out
    assert windfall(*command, "--seed", "6")[1] != out
    alone = windfall("generate", "tiny", "--prompt", "12+34-5+8=", "--max-tokens", "40", "--seed", "5")[1]
    assert f"[0/0] {alone}" == out.splitlines(keepends=True)[0]  # streamed, and alone in its batch: the same text


@pytest.mark.slow
def test_ctrl_c_saves_and_resume_continues(windfall: Windfall, here: Path) -> None:
    command = [sys.executable, "-m", "windfall.run.cli", "train", "small.toml", "--set", "run.steps=100000"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            run = Path("runs/small")
            deadline = time.monotonic() + 240
            while not (run / "events.jsonl").is_file() or not steps_of(run):
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < deadline, "waited 240 s for a step"
                time.sleep(0.05)
            code, _, err = windfall("resume", "runs/small")
            assert code == 2
            assert "runs/small: another process is already running it" in err
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=240)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "windfall resume runs/small" in out
    assert "press Ctrl-C again" in out
    out = windfall("top", "runs/small")[1]
    assert ", stopped, as of " in out
    assert "resume with: windfall resume runs/small" in out
    reached = steps_of(run)[-1]
    (saved,) = sorted((run / "checkpoints").iterdir())[-1:]
    assert saved.name == f"step-{reached:06d}"
    assert windfall("resume", "runs/small", "--set", f"run.steps={reached + 1}")[0] == 0
    assert steps_of(run) == list(range(1, reached + 2))
    assert read(run / "events.jsonl")[-1]["finished"] is True


@pytest.mark.parametrize(
    "where",
    [
        "run.device=cuda",
        *(pytest.param(w, marks=pytest.mark.slow) for w in ("rollout.max_tokens=600", "engine.kv_tokens=16")),
    ],
)
def test_impossible_run_fails_with_a_clear_error(windfall: Windfall, where: str) -> None:
    import torch

    if where == "run.device=cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    code, out, err = windfall("train", "small.toml", "--set", where)
    assert code == 2
    assert "Traceback" not in err
    assert where.partition("=")[0] in err
    assert "Ctrl-C" not in out
    assert "join" not in out
