"""A run that trains a model of experts (Qwen3-MoE), from end to end: a worker generates, and the trainer learns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.kills.expert_routes import write_model
from windfall.events.log import read
from windfall.trainer import checkpoint

Windfall = Callable[..., tuple[int, str, str]]
ENVIRONMENT = """
from windfall.types import Feedback, Task

class Digits:
    def __init__(self, seed):
        pass

    def task(self, index):
        return Task(id=f"digits/{index}", prompt=f"{index}=", answer="")

    def feedback(self, task, turns):
        return Feedback(reward=sum(c.isdigit() for c in turns[-1].text) / 100)
"""
"""A random model gets rewards that differ."""


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "context"), [(1, 1), (2, 1), (2, 2)])
def test_experts_are_trained(
    windfall: Windfall, here: Path, capsys: pytest.CaptureFixture[str], ranks: int, context: int
) -> None:
    write_model(here / "experts")
    capsys.readouterr()
    (here / "digits.py").write_text(ENVIRONMENT)
    changes = ["model.path=experts", "env.name=custom", "env.factory=digits:Digits", "rollout.group_size=4",
               "eval.tasks=0", "fleet.workers=1", "fleet.local=false", f"train.ranks={ranks}",
               f"train.context_parallel={context}"]  # fmt: skip
    code, _, err = windfall("train", "small.toml", *(f"--set={c}" for c in changes))
    assert (code, err) == (0, "")
    run = Path("runs/small")
    steps = [e for e in read(run / "events.jsonl") if e["kind"] == "scalar" and e["name"] == "step"]
    assert [e["step"] for e in steps] == [1, 2]
    assert all(e["grad_norm"] > 0 and e["engine_gap"] < 1e-4 for e in steps)
    assert all(e["replayed_experts"] == 1 and 0 < e["router_gap"] < 1e-4 for e in steps), "the weights were the same"
    before, after = (load_file(f / "model.safetensors") for f in (here / "experts", checkpoint.latest(run).path))
    changed = {name for name, value in before.items() if not torch.equal(value.float(), after[name].float())}
    assert {n for n in before if "experts" in n or n.endswith("gate.weight")} <= changed
