"""Checkpoints: loadable by others as they are, atomic, pruned; and a killed run that ends as if it had never died."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from windfall import config, models
from windfall.errors import WindfallError
from windfall.events import read
from windfall.train import checkpoint
from windfall.train.checkpoint import State
from windfall.train.optimizer import Optimizer

RECIPE = """
[run]
name = "r"
steps = 7
threads = 1
deterministic = true
[env]
name = "guess"  # several turns
[rollout]
groups = 3
group_size = 4
max_tokens = 40
[train]
lr = 1e-3
minibatches = 3
schedule = "cosine"
[checkpoint]
every = 2
[eval]
tasks = 3
every = 1
"""


def parts() -> dict[str, Any]:
    torch.manual_seed(1)
    model = models.load("tiny", dtype="float32", device="cpu")
    optimizer = Optimizer(model, config.Train(), total_updates=10)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.update(1.0)
    return {"model": model, "tokenizer": models.load_tokenizer("tiny"), "optimizer": optimizer}


def test_transformers_loads_a_checkpoint_as_it_is(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made = parts()
    path = checkpoint.save(tmp_path, State(step=3, next_task=9), keep=2, **made)
    loaded = AutoModelForCausalLM.from_pretrained(path)
    ids = AutoTokenizer.from_pretrained(path)("12+3=", return_tensors="pt").input_ids
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, made["model"].state_dict()[name]), name
    assert loaded.generate(ids, max_new_tokens=5, do_sample=False).shape[1] == ids.shape[1] + 5
    assert not any(p.suffix in (".bin", ".pt", ".pkl") for p in path.rglob("*"))


def test_optimizer_goes_on_bit_for_bit(tmp_path: Path) -> None:
    one = parts()
    path = checkpoint.save(tmp_path, State(step=1, next_task=2), keep=1, **one)
    model = models.load(str(path), dtype="float32", device="cpu")
    other = Optimizer(model, config.Train(), total_updates=10)
    assert checkpoint.restore(path, optimizer=other, device="cpu") == State(step=1, next_task=2)
    for m, o in ((one["model"], one["optimizer"]), (model, other)):
        generator = torch.Generator().manual_seed(4)
        for p in m.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        o.update(1.0)
    for a, b in zip(one["model"].parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_half_written_ones_are_never_seen_and_old_ones_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = parts()
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, State(step=step, next_task=0), keep=2, **made)
    assert [p.name for p in checkpoint.all_in(tmp_path)] == ["step-000002", "step-000003"]
    with monkeypatch.context() as m:
        m.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError("disk gone")))
        with pytest.raises(OSError, match="disk gone"):
            checkpoint.save(tmp_path, State(step=4, next_task=0), keep=2, **made)
    assert [p.name for p in checkpoint.all_in(tmp_path)] == ["step-000002", "step-000003"]
    checkpoint.save(tmp_path, State(step=4, next_task=0), keep=2, **made)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000003", "step-000004"]


def test_a_damaged_checkpoint_is_refused_with_its_place(tmp_path: Path) -> None:
    made = parts()
    path = checkpoint.save(tmp_path, State(step=1, next_task=0), keep=1, **made)
    file = path / "windfall" / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(WindfallError, match="optimizer's state cannot be read"):
        checkpoint.restore(path, optimizer=made["optimizer"], device="cpu")
    (path / "windfall" / "state.json").write_text("{}")
    with pytest.raises(WindfallError, match="not a windfall checkpoint"):
        checkpoint.read_state(path)


def windfall(*args: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "windfall.cli", *args],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def weights(run: Path) -> str:
    return hashlib.sha256((checkpoint.latest(run) / "model.safetensors").read_bytes()).hexdigest()


def test_killed_at_any_moment_and_resumed_ends_with_the_same_weights(tmp_path: Path) -> None:
    """kill -9 of the supervisor after the start, in the middle of steps, around checkpoints, which takes everything
    with it; each time `windfall resume` goes on."""
    recipe = tmp_path / "r.toml"
    recipe.write_text(RECIPE)
    assert windfall("train", str(recipe), "--set", f"run.folder={tmp_path}/whole").wait(120) == 0
    run = tmp_path / "killed" / "r"
    process = windfall("train", str(recipe), "--set", f"run.folder={tmp_path}/killed")
    for step in (1, 4):
        wait_for_step(run, step, process)
        process.send_signal(signal.SIGKILL)
        assert process.wait(30) == -signal.SIGKILL
        process = windfall("resume", str(run))
    assert process.wait(120) == 0
    assert weights(run) == weights(tmp_path / "whole" / "r")
    steps = [e["step"] for e in read(run / "events.jsonl") if e["kind"] == "scalar" and e["name"] == "step"]
    assert steps == list(range(1, 8))


def wait_for_step(run: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, f"ended before step {step}"
        if (run / "events.jsonl").is_file():
            done = [e["step"] for e in read(run / "events.jsonl") if e["kind"] == "scalar" and e["name"] == "step"]
            if done and done[-1] >= step:
                return
        time.sleep(0.02)
    raise AssertionError(f"waited 60 s for step {step} of {run}")
