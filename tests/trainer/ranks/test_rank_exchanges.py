"""Ranks built as in a run: a rank that hangs outside the collectives of tensors is noticed soon."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.ranks.rank_processes import run_ranks
from windfall.link import messages as m
from windfall.models import load
from windfall.recipe.file import parse_recipe
from windfall.trainer import process as trainer_process
from windfall.trainer import trained_weights
from windfall.trainer import trainer as trainer_module
from windfall.trainer.process import PolicySetup, RankPart, Setup
from windfall.trainer.ranks.rank_place import RANK_LOST, WEIGHTS_KEY, RankPlace
from windfall.trainer.ranks.ranks import Orders, RankLost, TrainerRanks
from windfall.training import Sample
from windfall.weights.bucket import BucketFailed
from windfall.weights.publishing.meeting import PublishFailed

SAMPLES = [
    Sample(ids=(3, 4, 5, 6, 7), targets=(2, 3, 4), behavior=np.full(3, -4.0), advantage=1.0, limit=8)
    for _ in range(2)
]  # fmt: skip


def build(ranks: TrainerRanks, folder: Path, bucket: str = "", place: RankPlace | None = None) -> RankPart:
    sections: dict[str, Any] = {
        "model": {"path": "tiny"}, "train": {"engine_gap_limit": 50.0, "engine_gap_alarm": 50.0},
        "weights": {"bucket": bucket},
    }  # fmt: skip
    recipe, model = parse_recipe(sections, where="test"), load.load("tiny", dtype="float32", device="cpu")
    setup = Setup(
        model_config=model.config, dtype="float32", checkpoint_activations=False, onednn=False,
        policies={"": PolicySetup(micro_tokens=64)}, bucket="run" if bucket else "",
    )  # fmt: skip
    loaded = {"": trained_weights.prepare(model, recipe, None, dtype="float32")} if ranks.first else None
    part = RankPart(recipe, folder, Orders(ranks), place=place, loaded=loaded)
    part.build(setup)
    return part


def stop_at(ranks: TrainerRanks, folder: Path, moment: str) -> tuple[str, float]:
    """Train and publish. Rank 1 freezes after its last pack, or when it has copied its rows to be published. Returns
    what rank 0 notices, and after how many seconds."""

    def freeze(*_: Any) -> int:
        os.kill(os.getpid(), signal.SIGSTOP)
        return 0

    if not ranks.first and moment == "finish":
        trainer_module.peak_bytes = freeze
    part = build(ranks, folder)
    if not ranks.first and moment == "publish":
        part.engine.release = freeze
    trainer = part.policies[""].trainer
    assert trainer is not None
    if not ranks.first:
        trainer.orders.follow()
    trainer.forward_backward(SAMPLES)
    began_s = time.monotonic()
    try:
        trainer.optim_step()
        trainer.orders.call(part.publish, "", 1, m.Publish(id=""))
    except (RankLost, PublishFailed) as e:
        return str(e), time.monotonic() - began_s
    return "", 0.0


@pytest.mark.parametrize("moment", [pytest.param("finish", marks=pytest.mark.slow), "publish"])
def test_frozen_rank_is_noticed_after_the_limit_of_collectives(tmp_path: Path, moment: str) -> None:
    ((error, took_s),) = run_ranks(2, stop_at, tmp_path, moment, timeout_s=4.0, lost=(1,))
    assert "waited" in error
    assert ("to write their rows" in error) == (moment == "publish")
    assert took_s < 20


def fail_to_upload(ranks: TrainerRanks, folder: Path) -> tuple[list[str], list[list[str]]]:
    """Publish from two machines, of which the second cannot upload. Returns the errors that rank 0 is told, and the
    files that this machine uploads of each version."""
    os.environ[WEIGHTS_KEY] = "a-key-for-tests"
    place = RankPlace(rank=ranks.rank, size=2, machine=ranks.rank, host="127.0.0.1")
    part = build(replace(ranks, machine=ranks.rank), folder, f"file://{folder}/bucket", place)
    told: list[m.Uploaded] = []
    files: list[list[str]] = []
    policy = part.policies[""]
    assert policy.uploads is not None
    if ranks.first:
        policy.report = told.append
    else:

        def fail(*_: Any, **__: Any) -> int:
            raise BucketFailed("no access")

        policy.uploads.store.upload = fail
    for version in range(3):
        part.publish("", version, m.Publish(id=""))
        files.append(sorted(each.file.digest for each in policy.uploads.holds()))
        time.sleep(0.2)
    policy.uploads.close()
    return [done.error for done in told if done.error], files


def test_rank_0_reports_failed_uploads_of_other_machines(tmp_path: Path) -> None:
    (errors, files), (_, others) = run_ranks(2, fail_to_upload, tmp_path)
    assert "no access" in errors
    assert files == others


def test_a_rank_that_ends_stops_its_uploads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    def lose(*_: Any) -> None:
        raise RankLost("rank 0 is gone")

    policy = SimpleNamespace(stop_uploads=lambda: closed.append(True))
    monkeypatch.setattr(trainer_process, "load_recipe", lambda _: parse_recipe({"model": {"path": "tiny"}}, where="t"))
    monkeypatch.setattr(trainer_process, "join", lambda *_: SimpleNamespace(follow=lose))
    monkeypatch.setattr(trainer_process, "RankPart", lambda *_, **__: SimpleNamespace(policies={"": policy}))
    make: Any = lambda part: None  # noqa: E731
    assert trainer_process.follow(tmp_path, RankPlace(rank=1, size=2), make) == RANK_LOST
    assert closed


def test_a_file_that_is_damaged_in_the_bucket_is_replaced(tmp_path: Path) -> None:
    part = build(TrainerRanks.alone(), tmp_path, f"file://{tmp_path}/bucket")
    digest = part.publish("", 0, m.Publish(id="")).digest
    uploads = part.policies[""].uploads
    assert uploads is not None
    stored, deadline = tmp_path / "bucket/run" / digest / f"{0:015d}", time.monotonic() + 20
    while uploads.unfinished() and time.monotonic() < deadline:
        time.sleep(0.01)
    whole = stored.read_bytes()
    stored.write_bytes(b"\0" * len(whole))
    part.upload_again("", (digest,))
    while stored.read_bytes() != whole and time.monotonic() < deadline:
        time.sleep(0.01)
    uploads.close()
    assert stored.read_bytes() == whole
