"""Checks before a run is resumed: its files, changes to its recipe, and whether anything is left to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.hostile.checkpoints import flip
from tests.support.hostile.files import DAMAGES, damage
from windfall import run_folder as folders
from windfall.errors import WindfallError
from windfall.events.log import EventLog
from windfall.link import auth
from windfall.recipe.changes import RULES
from windfall.recipe.env_sections import ENVS, DatasetEnv
from windfall.recipe.file import load_recipe
from windfall.recipe.sections import Recipe, RunSection
from windfall.run import resume_check, start
from windfall.trainer import checkpoint
from windfall.trainer.checkpoint import DamagedCheckpoint


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that has started."""
    made = start.new_folder(Recipe(run=RunSection(name="small", folder=tmp_path / "runs")))
    auth.make_token(made / "token")
    return made


def edited(run: Path, *overrides: str) -> Recipe:
    return load_recipe(run / "recipe.toml", list(overrides))


@pytest.mark.parametrize(
    "change",
    ["run.name=other", "run.folder=/elsewhere", "run.seed=7", "model.path=smollm2-135m", "env.max_steps=3",
     "env={name='gym', task='chain_sum'}"],
)  # fmt: skip
def test_change_of_a_fixed_key_is_refused_with_the_reason(run: Path, change: str) -> None:
    with pytest.raises(WindfallError) as caught:
        resume_check.check_changes(edited(run, change), run)
    section, _, key = change.partition("=")[0].partition(".")
    assert f"{section}.{key or 'name'}: " in caught.value.what
    assert "windfall train RECIPE.toml --set model.path=" in caught.value.fix


def test_refused_context_groups_stay_out_of_the_recipe(run: Path) -> None:
    """The heads of the model are known from its config.json, so no trainer has to say it."""
    before = (run / "recipe.toml").read_text()
    with pytest.raises(WindfallError, match=r"train\.context_parallel = 3: this model has 4 heads"):
        start.resume(edited(run, "train.context_parallel=3", "train.ranks=3"), run)
    assert (run / "recipe.toml").read_text() == before


def test_all_refused_changes_are_reported_at_once(run: Path) -> None:
    with pytest.raises(WindfallError) as caught:
        resume_check.check_changes(edited(run, "run.seed=7", "run.name=x", "train.lr=0.5"), run)
    assert caught.value.what.count(" -> ") == 2
    assert "run.seed: 0 -> 7. The seed determines the tasks" in caught.value.what


@pytest.mark.parametrize(
    ("change", "verdict"),
    [("train.lr=0.5", "noted"), ("rollout.temperature=0.7", "noted"), ("algorithm.kl=0.1", "noted"),
     ("eval.temperature=0.0", "noted"), ("run.steps=50", "free"), ("fleet.workers=3", "free"),
     ("engine.page_size=8", "free"), ("checkpoint.every=2", "free"), ("run.threads=3", "free")],
)  # fmt: skip
def test_allowed_change_is_listed(run: Path, change: str, verdict: str) -> None:
    (found,) = resume_check.check_changes(edited(run, change), run)
    assert (found.key, found.verdict) == (change.partition("=")[0], verdict)
    assert bool(found.why) == (verdict == "noted")


def test_longer_run_with_a_schedule_is_noted(run: Path) -> None:
    found = resume_check.check_changes(edited(run, "run.steps=50", "train.schedule=linear"), run)
    assert [c.verdict for c in found] == ["noted", "noted"]


def test_changes_are_relative_to_the_original_recipe(run: Path) -> None:
    folders.write_recipe(edited(run, "train.lr=0.5"), run)
    (found,) = resume_check.check_changes(edited(run), run)
    assert (found.key, found.old, found.new) == ("train.lr", 1e-4, 0.5)
    assert resume_check.check_changes(edited(run, "train.lr=1e-4"), run) == []
    (run / folders.BEGAN).unlink()  # a run of an earlier version: its current recipe counts as the original
    assert resume_check.check_changes(edited(run), run) == []


def test_every_rule_is_about_a_key_that_exists() -> None:
    keys = {f"{name}.{key}" for name, field in Recipe.model_fields.items() if name != "env"
            for key in getattr(field.annotation, "model_fields", ())}  # fmt: skip
    keys |= {f"env.{key}" for env in ENVS.values() for key in env.model_fields}
    keys |= {f"env.tasks.{key}" for env in ENVS.values() for key in env.model_fields}
    assert RULES.keys() <= keys | Recipe.model_fields.keys()


# its files


@pytest.mark.parametrize("kind", sorted(DAMAGES.keys() - {"missing", "a directory"}))
def test_damaged_address_is_removed_with_a_warning(run: Path, kind: str) -> None:
    path = run / "address.json"
    path.write_text(json.dumps({"url": "http://127.0.0.1:8700", "port": 8700, "pid": 1}))
    assert resume_check.check_files(run) == []
    assert path.exists()
    damage(path, kind)
    (warning,) = resume_check.check_files(run)
    assert f"{path}: damaged" in warning
    assert not path.exists()


def test_missing_token_gives_a_warning(run: Path) -> None:
    (run / "token").unlink()
    (warning,) = resume_check.check_files(run)
    assert "workers with the old one are refused" in warning


@pytest.mark.parametrize("port", [0, -1, 65536, "8700", True, None, 1.5])
def test_address_with_an_invalid_port_is_ignored(run: Path, port: Any) -> None:
    (run / "address.json").write_text(json.dumps({"url": "http://127.0.0.1:1", "port": port, "pid": 1}))
    assert folders.address(run) is None


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_beginning_is_an_error_in_words(run: Path, kind: str) -> None:
    damage(run / folders.BEGAN, kind)
    if kind == "missing":
        assert resume_check.check_changes(edited(run), run) == []
        return
    with pytest.raises(WindfallError) as caught:
        resume_check.check_changes(edited(run), run)
    assert folders.BEGAN in caught.value.where


# finished


def ended(run: Path, policy: str = "", **end: Any) -> None:
    log = EventLog(run / "events.jsonl")
    log.scalar("step", step=20)
    log.instant("end", **end)
    log.close()
    saved = folders.policy_folder(run, policy) / "checkpoints" / "step-000020"
    (saved / "windfall").mkdir(parents=True)
    (saved / "config.json").write_text("{}")
    (saved / "windfall" / "optimizer.safetensors").write_bytes(b"moments")
    (saved / "windfall" / "state.json").write_text('{"step": 20, "next_task": 80, "checksums": true}')
    checkpoint.write_checksums(saved)


def test_finished_run_is_known_by_the_end_of_its_log(run: Path) -> None:
    assert resume_check.finished(edited(run), run) is None  # no log at all
    ended(run, step=20, finished=True)
    assert resume_check.finished(edited(run), run) == 20
    assert resume_check.finished(edited(run, "run.steps=10"), run) == 20
    assert resume_check.finished(edited(run, "run.steps=21"), run) is None
    with (run / "events.jsonl").open("a") as file:
        file.write('{"t": 1, "torn by a ki')
    assert resume_check.finished(edited(run), run) == 20


def test_run_that_was_stopped_or_lost_its_checkpoint_is_not_finished(run: Path) -> None:
    ended(run, step=20, finished=False)
    assert resume_check.finished(edited(run), run) is None
    EventLog(run / "events.jsonl").instant("end", step=20, finished=True)
    shutil.rmtree(run / "checkpoints" / "step-000020")
    assert resume_check.finished(edited(run), run) is None


def test_run_is_finished_when_all_policies_that_are_trained_are(run: Path) -> None:
    several = edited(run, "fleet.local=false", "policies.a={}", "policies.b={}", "policies.c={frozen=true}")
    ended(run, "a", step=20, finished=True)
    assert resume_check.finished(several, run) is None
    ended(run, "b", step=20, finished=True)
    assert resume_check.finished(several, run) == 20
    flip(folders.policy_folder(run, "b") / "checkpoints" / "step-000020" / "windfall" / "optimizer.safetensors")
    with pytest.raises(DamagedCheckpoint, match="its checksum is"):
        resume_check.finished(several, run)


def test_damage_of_the_last_checkpoint_is_reported(run: Path) -> None:
    ended(run, step=20, finished=True)
    flip(run / "checkpoints" / "step-000020" / "windfall" / "optimizer.safetensors")
    with pytest.raises(DamagedCheckpoint, match="its checksum is"):
        resume_check.finished(edited(run), run)


def test_run_that_was_resumed_and_killed_is_not_finished(run: Path) -> None:
    ended(run, step=20, finished=True)
    EventLog(run / "events.jsonl").instant("resumed", step=20)
    assert resume_check.finished(edited(run), run) is None


# the data files


@pytest.fixture
def trained_on(tmp_path: Path) -> tuple[Path, Path]:
    """A data file, and the folder of a run that started with it."""
    data = tmp_path / "good.jsonl"
    data.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "2+2=", "answer": "4"}\n')
    env = DatasetEnv(name="dataset", path=data, rewards=["exact"])
    return data, start.new_folder(Recipe(run=RunSection(name="rows", folder=tmp_path / "runs"), env=env))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [("+", "-", "same length as before, but different contents"), ("1+1", "1+1+0", "68 bytes before, 70 now")],
)  # fmt: skip
def test_edited_data_is_refused(trained_on: tuple[Path, Path], old: str, new: str, says: str) -> None:
    data, run = trained_on
    resume_check.check_changes(edited(run), run)
    data.write_text(data.read_text().replace(old, new))
    with pytest.raises(WindfallError) as caught:
        resume_check.check_changes(edited(run), run)
    assert f"env.path: {data}: {says}" in caught.value.what
    assert "Restore the file" in caught.value.fix


def test_data_may_move_but_not_change(trained_on: tuple[Path, Path]) -> None:
    data, run = trained_on
    other = data.rename(data.with_name("moved.jsonl"))
    (found,) = resume_check.check_changes(edited(run, f"env.path='{other}'"), run)
    assert found.key == "env.path"
    other.write_text('{"prompt": "1+1=", "answer": "3"}\n')
    with pytest.raises(WindfallError, match=r"moved\.jsonl: 68 bytes before, 34 now"):
        resume_check.check_changes(edited(run, f"env.path='{other}'"), run)
    with pytest.raises(WindfallError, match="no such file or folder"):
        resume_check.check_changes(edited(run), run)


def test_run_without_a_record_of_its_data_gets_one(trained_on: tuple[Path, Path]) -> None:
    _, run = trained_on
    record = run / folders.DATA_BEGAN
    original = record.read_bytes()
    record.unlink()
    resume_check.check_changes(edited(run), run)
    assert record.read_bytes() == original


def test_damaged_record_of_data_is_refused(trained_on: tuple[Path, Path]) -> None:
    _, run = trained_on
    (run / folders.DATA_BEGAN).write_text('{"env.path": 3}')
    with pytest.raises(WindfallError, match="the record of the run's data files is damaged"):
        resume_check.check_changes(edited(run), run)
