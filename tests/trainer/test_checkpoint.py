"""Checkpoints: other tools can load them; they are atomic and pruned; a killed run ends with the same weights."""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.hostile.checkpoints import CHECKPOINTS, flip, rename_step
from windfall import run_folder as folders
from windfall.errors import WindfallError
from windfall.events.log import read
from windfall.models import load
from windfall.recipe.sections import Train
from windfall.run.commands import offline
from windfall.trainer import checkpoint
from windfall.trainer.model.gradients import trained
from windfall.trainer.optimizer import Optimizer
from windfall.trainer.ranks import sharded_file
from windfall.trainer.ranks.ranks import TrainerRanks
from windfall.training import CheckpointState

RECIPE = """
[run]
name = "r"
steps = 5
threads = 1
deterministic = true
[env]
name = "custom"
factory = "examples.guess:Guess"  # several turns
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
tasks = 2
every = 5
"""


def training_objects() -> Objects:
    torch.manual_seed(1)
    model = load.load("tiny", dtype="float32", device="cpu")
    optimizer = Optimizer(trained(model), Train(), total_updates=10)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.update(1.0)
    return Objects(model, optimizer)


class Objects(dict[str, Any]):
    """What `checkpoint.save` needs of a model and its optimizer."""

    def __init__(self, model: Any, optimizer: Optimizer) -> None:
        super().__init__(
            write_model=model.save_pretrained, tokenizer=load.load_tokenizer("tiny"),
            write_optimizer=lambda path: sharded_file.write(path, optimizer.state(), TrainerRanks.alone()),
        )  # fmt: skip
        self.model, self.optimizer = model, optimizer


def test_transformers_loads_a_checkpoint(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    objects = training_objects()
    path = checkpoint.save(tmp_path, CheckpointState(step=3, next_task=9), keep=2, **objects)
    loaded = AutoModelForCausalLM.from_pretrained(path)
    ids = AutoTokenizer.from_pretrained(path)("12+3=", return_tensors="pt").input_ids
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, objects.model.state_dict()[name]), name
    assert loaded.generate(ids, max_new_tokens=5, do_sample=False).shape[1] == ids.shape[1] + 5
    assert not any(p.suffix in (".bin", ".pt", ".pkl") for p in path.rglob("*"))


def test_optimizer_resumes_bit_for_bit(tmp_path: Path) -> None:
    one = training_objects()
    state = CheckpointState(step=1, next_task=2, open_tasks=(1,), replay=(0,), selection=(50, 49, 1 << 55))
    path = checkpoint.save(tmp_path, state, keep=1, **one)
    model = load.load(str(path), dtype="float32", device="cpu")
    other = Optimizer(trained(model), Train(), total_updates=10)
    other.restore(path / checkpoint.OPTIMIZER)
    assert checkpoint.read_state(path) == state
    for m, o in ((one.model, one.optimizer), (model, other)):
        generator = torch.Generator().manual_seed(4)
        for p in m.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        o.update(1.0)
    for a, b in zip(one.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_partial_checkpoints_are_never_listed_and_old_ones_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = training_objects()
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, CheckpointState(step=step, next_task=0), keep=2, **objects)
    assert [p.name for p in checkpoint.list_checkpoints(tmp_path)] == ["step-000002", "step-000003"]
    with monkeypatch.context() as m:
        m.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError("disk gone")))
        with pytest.raises(WindfallError, match="step-000004: the checkpoint cannot be written: OSError: disk gone"):
            checkpoint.save(tmp_path, CheckpointState(step=4, next_task=0), keep=2, **objects)
    assert [p.name for p in checkpoint.list_checkpoints(tmp_path)] == ["step-000002", "step-000003"]
    checkpoint.save(tmp_path, CheckpointState(step=4, next_task=0), keep=2, **objects)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000003", "step-000004"]


def test_run_without_a_checkpoint_says_when_the_first_one_comes(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    with pytest.raises(WindfallError, match="no checkpoint in this run") as refused:
        checkpoint.latest(tmp_path)
    assert refused.value.fix == f"Continue the run: windfall resume {tmp_path}"
    with folders.owned(tmp_path), pytest.raises(WindfallError, match=r"after step 2 \(checkpoint.every\)"):
        checkpoint.latest(tmp_path)


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


def failed_save(folder: Path, objects: dict[str, Any]) -> str:
    """Save step 2, which must fail; return the message. The checkpoint of step 1 must not change."""
    with pytest.raises(WindfallError) as caught:
        checkpoint.save(folder, CheckpointState(step=2, next_task=2), keep=1, **objects)
    message = str(caught.value)
    assert message.startswith(f"{folder / 'step-000002'}: the checkpoint cannot be written: ")
    assert "or make the folder writable. Then use `windfall resume`, which continues from step-000001" in message
    found = checkpoint.newest(folder)
    assert found is not None
    assert found.path.name == "step-000001"
    return message


def test_full_disk_is_reported_and_earlier_checkpoint_is_kept(tmp_path: Path) -> None:
    objects = training_objects()
    with small_disk(tmp_path / "disk") as disk:
        checkpoint.save(disk, CheckpointState(step=1, next_task=1), keep=1, **objects)
        message = failed_save(disk, objects)
        assert "No space left on device" in message
        assert "MB are free there" in message
        assert [p.name for p in disk.iterdir()] == ["step-000001"], "a partial checkpoint would fill the disk"
        subprocess.run(["mount", "-o", "remount,size=40m", str(disk)], check=True)
        checkpoint.save(disk, CheckpointState(step=2, next_task=2), keep=1, **objects)
        assert [p.name for p in checkpoint.list_checkpoints(disk)] == ["step-000002"]


@pytest.mark.parametrize("limit", [100, 200_000, 2_000_000])
def test_file_size_limit_is_reported_for_any_file(tmp_path: Path, limit: int) -> None:
    """The limits affect config.json, the weights and the optimizer's state, in this order."""
    objects = training_objects()
    checkpoint.save(tmp_path, CheckpointState(step=1, next_task=1), keep=1, **objects)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        assert "File too large" in failed_save(tmp_path, objects)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    checkpoint.save(tmp_path, CheckpointState(step=2, next_task=2), keep=1, **objects)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000002"]


def test_file_in_place_of_the_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(
        WindfallError, match=r"checkpoints/step-000001: the checkpoint cannot be written: NotADirectory"
    ) as refused:
        checkpoint.save(tmp_path / "checkpoints", CheckpointState(step=1, next_task=1), keep=1, **training_objects())
    assert f"`windfall resume`, which {checkpoint.FROM_JOURNAL}. " in refused.value.fix


def saved(folder: Path, *steps: int) -> None:
    objects = training_objects()
    for step in steps:
        checkpoint.save(folder, CheckpointState(step=step, next_task=step), keep=len(steps), **objects)


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    saved(folder, 2, 4)
    return folder


def test_intact_checkpoint_is_verified_to_the_last_byte(two_checkpoints: Path) -> None:
    found = checkpoint.newest(two_checkpoints)
    assert found is not None
    assert (found.path.name, found.state) == ("step-000004", CheckpointState(step=4, next_task=4))
    for file in (p for p in found.path.rglob("*") if p.is_file() and p.name != "checksums.json"):
        flip(file)
        with pytest.raises(checkpoint.DamagedCheckpoint, match="checksum"):
            checkpoint.check(found.path)
        flip(file)
    checkpoint.check(found.path)


@pytest.mark.parametrize("kind", list(CHECKPOINTS))
def test_damaged_checkpoint_is_an_error_that_names_the_previous_one(
    two_checkpoints: Path, tmp_path: Path, kind: str
) -> None:
    folder, (file, damage) = Path(shutil.copytree(two_checkpoints, tmp_path / "c")), CHECKPOINTS[kind]
    damage(folder / "step-000004" / file)
    # An edited state.json is detected by its checksum, or without checksums by its content.
    with pytest.raises(checkpoint.DamagedCheckpoint, match="then continues from step-000002") as found:
        checkpoint.newest(folder)
    assert found.value.where == str(folder / "step-000004" / file)
    shutil.rmtree(folder / "step-000004")
    damage(folder / "step-000002" / file)
    with pytest.raises(checkpoint.DamagedCheckpoint, match="then starts again from step 1, with the responses"):
        checkpoint.newest(folder)
    assert checkpoint.newest(tmp_path / "nothing") is None


def test_checkpoint_copied_to_another_step_is_refused(two_checkpoints: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(two_checkpoints, tmp_path / "c"))
    rename_step(folder / "step-000004", 9)
    with pytest.raises(checkpoint.DamagedCheckpoint, match="says step 4 in the folder of step 9"):
        checkpoint.newest(folder)


def test_optimizer_is_not_verified_if_not_needed(two_checkpoints: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(two_checkpoints, tmp_path / "c"))
    flip(folder / "step-000004" / "windfall" / "optimizer.safetensors")
    found = checkpoint.newest(folder, optimizer=False)
    assert found is not None
    assert found.state.step == 4


def test_steps_are_ordered_by_number(tmp_path: Path) -> None:
    for name in ("step-1000000", "step-999999", "step-abc", "step-000007.bak"):
        (tmp_path / name).mkdir()
    assert [p.name for p in checkpoint.list_checkpoints(tmp_path)] == ["step-999999", "step-1000000"]


def windfall(*args: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "windfall.run.cli", *args],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def weights(run: Path) -> str:
    return hashlib.sha256((checkpoint.latest(run).path / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("undisturbed")
    recipe = folder / "r.toml"
    recipe.write_text(RECIPE)
    done = command("train", str(recipe), "--set", f"run.folder={folder}")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "r"


@pytest.mark.slow  # quick: tests/runs/test_policy_beside.py
@pytest.mark.parametrize("kills", [(3,), (1, 2, 4)], ids=["once", "again"])
def test_run_killed_at_any_moment_and_resumed_ends_with_the_same_weights(
    undisturbed: Path, tmp_path: Path, kills: tuple[int, ...]
) -> None:
    """kill -9 of the supervisor after these steps, before and after a checkpoint, which ends all other processes; each
    time `windfall resume` continues the run. If a run ended before it was killed, because this process got no CPU time
    for that long, another one is killed."""
    recipe = tmp_path / "r.toml"
    recipe.write_text(RECIPE)
    tries = (tmp_path / f"try-{n}" for n in range(4))
    run = next(folder / "r" for folder in tries if killed_and_resumed(recipe, folder, kills))
    assert weights(run) == weights(undisturbed)
    steps = [e["step"] for e in read(run / "events.jsonl") if e["kind"] == "scalar" and e["name"] == "step"]
    assert steps == list(range(1, 6))


def killed_and_resumed(recipe: Path, folder: Path, kills: tuple[int, ...]) -> bool:
    """Whether the run was killed after each of these steps, before it ended."""
    process = windfall("train", str(recipe), "--set", f"run.folder={folder}")
    try:
        for step in kills:
            wait_for_step(folder / "r", step, process)
            process.kill()
            if process.wait(240) == 0:
                return False
            process = windfall("resume", str(folder / "r"))
        assert process.wait(240) == 0
    finally:
        process.kill()
    return True


def wait_for_step(run: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() in (None, 0):
        if (run / "events.jsonl").is_file():
            done = [e["step"] for e in read(run / "events.jsonl") if e["kind"] == "scalar" and e["name"] == "step"]
            if done and done[-1] >= step:
                return
        time.sleep(0.02)
    raise AssertionError(f"waited 240 s for step {step} of {run}; its status is {process.poll()}")


@pytest.mark.slow
def test_run_without_its_damaged_newest_checkpoint_ends_with_the_same_weights(
    undisturbed: Path, tmp_path: Path
) -> None:
    """It resumes from the previous checkpoint, generates again what is not in the journal, and reports that."""
    run = Path(shutil.copytree(undisturbed, tmp_path / "r"))
    saved = run / "checkpoints" / "step-000005"
    before = (saved / "model.safetensors").read_bytes()
    flip(saved / "model.safetensors")
    refused = command("resume", str(run))
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert "step-000005/model.safetensors: damaged: its checksum" in " ".join(refused.stderr.split())
    assert "the run then continues from step-000004" in " ".join(refused.stderr.split())
    shutil.rmtree(saved)
    done = command("resume", str(run))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "journal lost: 000004.wal: it is gone" in done.stdout
    assert (saved / "model.safetensors").read_bytes() == before
    steps, expected = (
        [e for e in read(path / "events.jsonl") if (e["kind"], e["name"]) == ("scalar", "step")]
        for path in (run, undisturbed)
    )
    assert [e["step"] for e in steps] == list(range(1, 6))
    assert steps[-1]["reward"] == expected[-1]["reward"]
    assert steps[-1]["grad_norm"] == expected[-1]["grad_norm"] > 0
    assert (run / "checkpoints" / "step-000004" / "model.safetensors").read_bytes() != before


def test_eval_and_generate_verify_their_checkpoint(two_checkpoints: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(two_checkpoints, run / "checkpoints")
    (run / "recipe.toml").write_text("")
    flip(run / "checkpoints" / "step-000004" / "model.safetensors")
    for name in (run, run / "checkpoints" / "step-000004"):
        with pytest.raises(WindfallError, match=r"step-000004/model.safetensors: damaged: its checksum is"):
            offline.find_checkpoint(str(name))
    shutil.rmtree(run / "checkpoints" / "step-000004")
    assert Path(offline.find_checkpoint(str(run))).name == "step-000002"
    assert (
        offline.find_recipe(str(run))
        == offline.find_recipe(str(run / "checkpoints" / "step-000002"))
        == run / "recipe.toml"
    )


def command(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "windfall.run.cli", *args], capture_output=True, text=True, timeout=240, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
