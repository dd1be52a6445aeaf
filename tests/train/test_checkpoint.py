"""Checkpoints: loadable by others as they are, atomic, pruned; and a killed run that ends as if it had never died."""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile.checkpoints import CHECKPOINTS, cut, flip, of_0_2, rename_step

from windfall import config
from windfall.commands import offline
from windfall.errors import WindfallError
from windfall.events.log import read
from windfall.launch.processes import trainer
from windfall.models import load
from windfall.train import checkpoint
from windfall.train.checkpoint import CheckpointState
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
    model = load.load("tiny", dtype="float32", device="cpu")
    optimizer = Optimizer(model, config.Train(), total_updates=10)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.update(1.0)
    return {"model": model, "tokenizer": load.load_tokenizer("tiny"), "optimizer": optimizer}


def test_transformers_loads_a_checkpoint_as_it_is(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made = parts()
    path = checkpoint.save(tmp_path, CheckpointState(step=3, next_task=9), keep=2, **made)
    loaded = AutoModelForCausalLM.from_pretrained(path)
    ids = AutoTokenizer.from_pretrained(path)("12+3=", return_tensors="pt").input_ids
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, made["model"].state_dict()[name]), name
    assert loaded.generate(ids, max_new_tokens=5, do_sample=False).shape[1] == ids.shape[1] + 5
    assert not any(p.suffix in (".bin", ".pt", ".pkl") for p in path.rglob("*"))


def test_optimizer_goes_on_bit_for_bit(tmp_path: Path) -> None:
    one = parts()
    path = checkpoint.save(tmp_path, CheckpointState(step=1, next_task=2), keep=1, **one)
    model = load.load(str(path), dtype="float32", device="cpu")
    other = Optimizer(model, config.Train(), total_updates=10)
    assert checkpoint.restore(path, optimizer=other, device="cpu") == CheckpointState(step=1, next_task=2)
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
        checkpoint.save(tmp_path, CheckpointState(step=step, next_task=0), keep=2, **made)
    assert [p.name for p in checkpoint.all_in(tmp_path)] == ["step-000002", "step-000003"]
    with monkeypatch.context() as m:
        m.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError("disk gone")))
        with pytest.raises(WindfallError, match="step-000004: the checkpoint cannot be written: OSError: disk gone"):
            checkpoint.save(tmp_path, CheckpointState(step=4, next_task=0), keep=2, **made)
    assert [p.name for p in checkpoint.all_in(tmp_path)] == ["step-000002", "step-000003"]
    checkpoint.save(tmp_path, CheckpointState(step=4, next_task=0), keep=2, **made)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000003", "step-000004"]


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of 16 MB: one checkpoint of the demo's model takes 11 MB."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root can mount a small file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def refused_save(folder: Path, made: dict[str, Any]) -> str:
    """Save step 2, which the disk does not take; return the message. The checkpoint of step 1 must be as it was."""
    with pytest.raises(WindfallError) as caught:
        checkpoint.save(folder, CheckpointState(step=2, next_task=2), keep=1, **made)
    said = str(caught.value)
    assert said.startswith(f"{folder / 'step-000002'}: the checkpoint cannot be written: ")
    assert "or make the folder writable. Then use `windfall resume`, which goes on from step-000001" in said
    chosen = checkpoint.choose(folder)
    assert chosen is not None
    assert (chosen.path.name, chosen.checked.hashed, chosen.damaged) == ("step-000001", True, ())
    return said


def test_a_full_disk_is_named_and_the_checkpoint_before_stays(tmp_path: Path) -> None:
    made = parts()
    with small_disk(tmp_path / "disk") as disk:
        checkpoint.save(disk, CheckpointState(step=1, next_task=1), keep=1, **made)
        said = refused_save(disk, made)
        assert "No space left on device" in said
        assert "MB are free there" in said
        assert [p.name for p in disk.iterdir()] == ["step-000001"], "half a checkpoint would fill the disk"
        subprocess.run(["mount", "-o", "remount,size=40m", str(disk)], check=True)
        checkpoint.save(disk, CheckpointState(step=2, next_task=2), keep=1, **made)
        assert [p.name for p in checkpoint.all_in(disk)] == ["step-000002"]


@pytest.mark.parametrize("most", [100, 200_000, 2_000_000])
def test_a_limit_on_the_size_of_files_is_named_whichever_file_it_hits(tmp_path: Path, most: int) -> None:
    """In turn config.json, the weights and the optimizer's state."""
    made = parts()
    checkpoint.save(tmp_path, CheckpointState(step=1, next_task=1), keep=1, **made)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        assert "File too large" in refused_save(tmp_path, made)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    checkpoint.save(tmp_path, CheckpointState(step=2, next_task=2), keep=1, **made)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000002"]


def test_a_file_where_the_folder_should_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(
        WindfallError, match=r"checkpoints/step-000001: the checkpoint cannot be written: NotADirectory"
    ):
        checkpoint.save(tmp_path / "checkpoints", CheckpointState(step=1, next_task=1), keep=1, **parts())


def saved(folder: Path, *steps: int) -> None:
    made = parts()
    for step in steps:
        checkpoint.save(folder, CheckpointState(step=step, next_task=step), keep=len(steps), **made)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    saved(folder, 2, 4)
    return folder


def test_a_whole_checkpoint_is_verified_to_the_last_byte(two: Path) -> None:
    chosen = checkpoint.choose(two)
    assert chosen is not None
    assert (chosen.path.name, chosen.state, chosen.damaged) == ("step-000004", CheckpointState(step=4, next_task=4), ())
    files = [p for p in chosen.path.rglob("*") if p.is_file() and p.name != "checksums.json"]
    assert chosen.checked.hashed
    assert chosen.checked.bytes == sum(p.stat().st_size for p in files)
    assert "GB/s" in str(chosen.checked)


@pytest.mark.parametrize("kind", list(CHECKPOINTS))
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(two: Path, tmp_path: Path, kind: str) -> None:
    folder, (file, damage) = Path(shutil.copytree(two, tmp_path / "c")), CHECKPOINTS[kind]
    damage(folder / "step-000004" / file)
    chosen = checkpoint.choose(folder)
    assert chosen is not None
    assert chosen.state == CheckpointState(step=2, next_task=2)
    (damaged,) = chosen.damaged
    # An edited state.json is found by its checksum, a state.json without checksums by what it says.
    assert damaged.file == file
    assert str(damaged.checkpoint / file) in str(damaged)
    assert checkpoint.set_aside(damaged).name == "damaged-step-000004"
    assert [p.name for p in checkpoint.all_in(folder)] == ["step-000002"]
    damage(folder / "step-000002" / file)
    with pytest.raises(WindfallError, match="no checkpoint of this run is whole: step-000002"):
        checkpoint.choose(folder)
    assert (folder / "step-000002").is_dir(), "the last one stays where it is"


def test_a_copy_under_another_step_is_not_believed(two: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(two, tmp_path / "c"))
    rename_step(folder / "step-000004", 9)
    chosen = checkpoint.choose(folder)
    assert chosen is not None
    assert chosen.state.step == 4
    assert [d.file for d in chosen.damaged] == ["windfall/state.json"]
    assert "says step 4 in the folder of step 9" in str(chosen.damaged[0])


def test_checkpoints_of_0_2_are_used_with_a_word(two: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(two, tmp_path / "c"))
    for path in checkpoint.all_in(folder):
        of_0_2(path)
    chosen = checkpoint.choose(folder)
    assert chosen is not None
    assert chosen.state.step == 4
    assert not chosen.checked.hashed
    assert "no checksums" in str(chosen.checked)
    cut(folder / "step-000004" / "windfall" / "optimizer.safetensors")
    chosen = checkpoint.choose(folder)
    assert chosen is not None
    assert chosen.state.step == 2, "a file that is cut is found without checksums"


def test_the_optimizer_is_not_read_where_it_is_not_needed(two: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(two, tmp_path / "c"))
    flip(folder / "step-000004" / "windfall" / "optimizer.safetensors")
    chosen = checkpoint.choose(folder, optimizer=False)
    assert chosen is not None
    assert chosen.state.step == 4


def test_steps_are_ordered_by_number(tmp_path: Path) -> None:
    for name in ("step-1000000", "step-999999", "step-abc", "step-000007.bak"):
        (tmp_path / name).mkdir()
    assert [p.name for p in checkpoint.all_in(tmp_path)] == ["step-999999", "step-1000000"]


def test_a_run_whose_only_checkpoints_were_set_aside_does_not_begin_anew(two: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(two, tmp_path / "c"))
    (folder / "step-000004").rename(folder / "damaged-step-000004")
    shutil.rmtree(folder / "step-000002")
    with pytest.raises(WindfallError, match="damaged-step-000004 was set aside before"):
        checkpoint.choose(folder)
    assert checkpoint.choose(tmp_path / "nothing") is None


def windfall(*args: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "windfall.cli", *args],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def weights(run: Path) -> str:
    return hashlib.sha256((checkpoint.latest(run).path / "model.safetensors").read_bytes()).hexdigest()


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


def test_damaged_checkpoint_is_told_by_the_next_trainer_if_the_first_one_died(two: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(two, tmp_path / "c"))
    flip(folder / "step-000004" / "model.safetensors")
    _, first = trainer._find_checkpoint(folder)
    assert first["checkpoint_damaged"].startswith("step-000004/model.safetensors: its checksum is ")
    assert first["checkpoint_damaged"].endswith("(now damaged-step-000004)")
    found, second = trainer._find_checkpoint(folder)
    assert found is not None
    assert (found.state.step, second) == (2, first)
    shutil.copytree(two / "step-000004", folder / "step-000004")  # made again: the damaged one is of no interest
    assert trainer._find_checkpoint(folder)[1] == {}


def test_a_run_whose_newest_checkpoint_is_damaged_makes_the_same_weights_again(tmp_path: Path) -> None:
    """It goes back to the one before, generates what is not in the journal again, and says so."""
    recipe, run = tmp_path / "r.toml", tmp_path / "r"
    recipe.write_text(RECIPE.replace("steps = 7", "steps = 4").replace('schedule = "cosine"', ""))
    assert command("train", str(recipe), "--set", f"run.folder={tmp_path}", "--set", "eval.tasks=0").returncode == 0
    saved = run / "checkpoints" / "step-000004"
    before = (saved / "model.safetensors").read_bytes()
    flip(saved / "model.safetensors")
    done = command("resume", str(run), "--set", "run.steps=5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "checkpoint damaged: step-000004/model.safetensors: its checksum" in done.stdout
    assert "continuing from step 2" in done.stdout
    assert "journal lost: 000002.wal: it is gone" in done.stdout
    assert (saved / "model.safetensors").read_bytes() == before
    assert (run / "checkpoints" / "damaged-step-000004").is_dir()
    steps = [e["step"] for e in read(run / "events.jsonl") if e["kind"] == "scalar" and e["name"] == "step"]
    assert steps == list(range(1, 6))


def test_eval_and_generate_verify_what_they_load(two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    shutil.copytree(two, run / "checkpoints")
    (run / "recipe.toml").write_text("")
    flip(run / "checkpoints" / "step-000004" / "model.safetensors")
    path, recipe = offline.find_checkpoint(str(run))
    assert (Path(path).name, recipe) == ("step-000002", run / "recipe.toml")
    assert "damaged, not used: step-000004/model.safetensors: its checksum is" in capsys.readouterr().err
    assert (run / "checkpoints" / "step-000004").is_dir(), "nothing is changed by looking"
    with pytest.raises(WindfallError, match=r"step-000004/model.safetensors: damaged: its checksum is"):
        offline.find_checkpoint(str(run / "checkpoints" / "step-000004"))


def command(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "windfall.cli", *args], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
