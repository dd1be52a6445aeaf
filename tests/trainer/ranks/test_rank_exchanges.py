"""Ranks built as in a run: a rank that hangs outside the collectives of tensors is noticed soon."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.rank_processes import run_ranks
from windfall.link import messages as m
from windfall.models import load
from windfall.recipe.file import parse_recipe
from windfall.trainer import trained_weights
from windfall.trainer import trainer as trainer_module
from windfall.trainer.process import RankPart, Setup
from windfall.trainer.ranks.ranks import Orders, RankLost, TrainerRanks
from windfall.training import Sample
from windfall.weights.meeting import PublishFailed

SAMPLES = [
    Sample(ids=(3, 4, 5, 6, 7), targets=(2, 3, 4), behavior=np.full(3, -4.0), advantage=1.0, limit=8)
    for _ in range(2)
]  # fmt: skip


def build(ranks: TrainerRanks, folder: Path) -> RankPart:
    sections = {"model": {"path": "tiny"}, "train": {"engine_gap_limit": 50.0, "engine_gap_alarm": 50.0}}
    recipe, model = parse_recipe(sections, where="test"), load.load("tiny", dtype="float32", device="cpu")
    setup = Setup(
        model_config=model.config, dtype="float32", micro_tokens=64, checkpoint_activations=False, onednn=False,
        checkpoint=None, adapter=None,
    )  # fmt: skip
    loaded = trained_weights.prepare(model, recipe, None, dtype="float32") if ranks.first else None
    part = RankPart(recipe, folder, Orders(ranks), loaded=loaded)
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
    trainer = part.trainer
    if not ranks.first:
        trainer.orders.follow()
    trainer.forward_backward(SAMPLES)
    began_s = time.monotonic()
    try:
        trainer.optim_step()
        trainer.orders.call(part.publish, 1, m.Publish(id=""))
    except (RankLost, PublishFailed) as e:
        return str(e), time.monotonic() - began_s
    return "", 0.0


@pytest.mark.parametrize("moment", [pytest.param("finish", marks=pytest.mark.slow), "publish"])
def test_frozen_rank_is_noticed_after_the_limit_of_collectives(tmp_path: Path, moment: str) -> None:
    ((error, took_s),) = run_ranks(2, stop_at, tmp_path, moment, timeout_s=4.0, lost=(1,))
    assert "waited" in error
    assert ("to write their rows" in error) == (moment == "publish")
    assert took_s < 20
