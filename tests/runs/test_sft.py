"""Supervised runs with real processes: killed and resumed they end with the same weights, and runs of reinforcement
learning continue from them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from windfall.events.log import read, scan

Windfall = Callable[..., tuple[int, str, str]]
STEPS = 12
SETS = ("run.name=sft", "run.device=cpu", "run.threads=1", "sft.batch=8", "sft.epochs=3", "sft.held_out=4",
        "sft.eval_every=6", "checkpoint.every=5", "train.lr=1e-3", "train.schedule=linear")  # fmt: skip


@pytest.fixture
def data(here: Path) -> Path:
    path = here / "data.jsonl"
    lines = [{"prompt": f"{n}+{n + 1}=", "completion": f"{n}+{n + 1}={2 * n + 1};#{2 * n + 1}"} for n in range(36)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def sft(windfall: Windfall, data: Path, *more: str) -> str:
    code, out, err = windfall("sft", str(data), *(f"--set={each}" for each in (*SETS, *more)))
    assert (code, err) == (0, ""), out + err
    return out


def weights(run: Path) -> bytes:
    return (run / "checkpoints" / f"step-{STEPS:06d}" / "model.safetensors").read_bytes()


def losses(run: Path, name: str = "sft") -> list[tuple[int, float]]:
    return [(e["step"], e["loss"]) for e in read(run / "events.jsonl") if e["name"] == name]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_run_continues_to_the_same_bits_and_data_may_not_change(windfall: Windfall, data: Path) -> None:
    run, cut = Path("runs/sft"), Path("runs/cut")
    out = sft(windfall, data)
    assert "on 32 rows of data.jsonl" in out
    assert "finished" in out
    found = losses(run)
    assert [step for step, _ in found] == list(range(1, STEPS + 1))
    assert found[-1][1] < found[0][1]
    evaluated = losses(run, "sft_eval")
    assert [step for step, _ in evaluated] == [0, 6, STEPS]
    assert evaluated[-1][1] < evaluated[0][1]

    shutil.copytree(run, cut)  # as after a kill of all processes in the last step
    shutil.rmtree(cut / "checkpoints" / f"step-{STEPS:06d}")
    data.write_text(data.read_text().replace("0+1", "1+0"))
    code, _, err = windfall("resume", str(cut))
    assert code == 2
    assert "the data has changed since this run began" in err
    data.write_text(data.read_text().replace("1+0", "0+1"))
    code, _, err = windfall("resume", str(cut))
    assert (code, err) == (0, "")
    assert weights(cut) == weights(run)
    assert losses(cut) == found


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_kills_change_nothing_and_reinforcement_learning_continues(windfall: Windfall, data: Path) -> None:
    sft(windfall, data)
    killed: list[str] = []

    def events(run: Path) -> list[Any]:
        path = run / "events.jsonl"
        return list(scan(path)) if path.exists() else []

    def kill(run: Path) -> None:
        for step, who in ((3, "controller"), (8, "trainer")):
            until = time.monotonic() + 120
            while not any(e["name"] == "sft" and e["step"] >= step for e in events(run)):
                assert time.monotonic() < until, f"waited 120 s for step {step}"
                time.sleep(0.01)
            ready = [e["pid"] for e in events(run) if e["name"] == "trainer_ready"]
            controller = json.loads((run / "address.json").read_text())["pid"]
            os.kill(controller if who == "controller" else ready[-1], signal.SIGKILL)
            killed.append(who)

    thread = threading.Thread(target=kill, args=(Path("runs/sft-2"),))
    thread.start()
    sft(windfall, data)
    thread.join(60)
    assert killed == ["controller", "trainer"]
    assert weights(Path("runs/sft-2")) == weights(Path("runs/sft"))
    assert losses(Path("runs/sft-2")) == losses(Path("runs/sft"))

    model = Path("runs/sft-2") / "checkpoints" / f"step-{STEPS:06d}"
    code, out, err = windfall(
        "train", "small.toml", f"--set=model.path={model}", "--set=run.steps=1", "--set=rollout.groups=2",
        "--set=eval.tasks=0",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert "finished" in out
