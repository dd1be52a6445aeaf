"""Adapters of several policies in one module, trained in turns, on one, two and four ranks: each gets the gradients,
moments and bytes that it gets alone. An adapter that is not in use gets no gradient."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.ranks import rank_tensors
from tests.support.ranks.rank_processes import run_ranks
from tests.trainer.ranks.test_ranks import MODELS, make_samples, tensors
from tests.trainer.test_policy_part import ORDER, POLICIES, build, recipe
from tests.trainer.test_policy_part import train as step
from windfall import algorithms
from windfall.models import attention
from windfall.recipe.file import parse_recipe
from windfall.recipe.lora import Lora
from windfall.trainer.model import lora
from windfall.trainer.process import RankPart
from windfall.trainer.ranks.ranks import Orders, TrainerRanks
from windfall.trainer.ranks.sharding import sharded_policy
from windfall.trainer.trainer import TorchTrainer

SECTIONS = {
    "solver": Lora(rank=3),
    "verifier": Lora(rank=5, alpha=2.0, targets=["q_proj", "v_proj", "down_proj"]),
    "third": Lora(rank=2, targets=["layers.1.mlp.up_proj"]),
}
"""The policies have adapters of different layers."""
KL = {"solver": 0.0, "verifier": 0.1, "third": 0.0}
TURNS = ("solver", "verifier", "solver", "third", "verifier", "third", "solver")
"""Whose samples are next. A step of a policy has two passes, and steps of others begin and end between them."""


class Holder:
    """Gathers what the ranks hold of a policy."""

    def __init__(self, ranks: TrainerRanks, trainers: dict[str, TorchTrainer]) -> None:
        self.ranks, self.trainers = ranks, trainers

    def gradients(self, policy: str) -> Any:
        return rank_tensors.gradients(self.ranks, self.trainers[policy].optimizer.gradients.weights)

    def state(self, policy: str) -> Any:
        """The weights, and Adam's moments."""
        optimizer = self.trainers[policy].optimizer
        moments = {n: t.local for n, t in optimizer.state().items()}
        return [rank_tensors.weights(self.ranks, each) for each in (optimizer.gradients.weights, moments)]


def train(ranks: TrainerRanks, policies: tuple[str, ...], dtype: torch.dtype) -> Any:
    """From rank 0, by policy: the gradients before every update, and what there is at the end."""
    torch.manual_seed(3)
    config, attached, orders = MODELS["qwen3"], {}, Orders(ranks)
    model: Any = AutoModel(config, dtype) if ranks.first else None

    def attach(module: Any) -> None:
        attached.update({name: lora.attach(module, SECTIONS[name], base="", seed=7, policy=name) for name in policies})

    if model is not None:
        attach(model)
        for name, adapters in attached.items():
            generator = torch.Generator().manual_seed(len(name))
            for n, t in adapters.weights().items():
                if n.endswith("lora_B"):
                    t.data.copy_(torch.randn(t.shape, generator=generator) * 0.1)
    if ranks.size > 1:
        model = sharded_policy(config, tensors(model), ranks, prepare=attach, dtype=dtype)
    trainers = {}
    for name in policies:
        sections: dict[str, Any] = {"train": {"lr": 1e-2, "engine_gap_limit": 50.0, "engine_gap_alarm": 50.0},
                                    "algorithm": {"kl": KL[name]}, "run": {"steps": 20}}  # fmt: skip
        recipe, reference = parse_recipe(sections, where="test"), attached[name] if KL[name] else None
        trainers[name] = TorchTrainer(
            model, algorithms.make("grpo"), recipe, micro_tokens=64, orders=orders, reference=reference,
            adapters=attached[name],
        )  # fmt: skip
    holder = Holder(ranks, trainers)
    orders.add(holder)
    if not ranks.first:
        orders.follow()
        return None
    gradients: dict[str, list[Any]] = {name: [] for name in policies}
    reports: dict[str, list[Any]] = {name: [] for name in policies}
    passes = dict.fromkeys(policies, 0)
    for name in (name for name in TURNS * 2 if name in policies):
        trainer = trainers[name]
        passes[name] += 1
        samples = make_samples(len(name) + passes[name], 5)
        trainer.forward_backward(trainer.forward(samples) if passes[name] % 3 == 0 else samples)
        if passes[name] % 2 == 0:
            gradients[name].append(orders.call(holder.gradients, name))
            reports[name].append(trainer.optim_step())
    found = {name: (reports[name], gradients[name], *orders.call(holder.state, name)) for name in policies}
    orders.stop()
    return found


def AutoModel(config: Any, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention.NAME).eval()


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        (1, torch.float32),
        (1, torch.bfloat16),
        (2, torch.float32),
        pytest.param(2, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(4, torch.float32, marks=pytest.mark.slow),
    ],
)
def test_policies_in_one_module_train_as_each_alone(size: int, dtype: torch.dtype) -> None:
    together = run_ranks(size, train, tuple(SECTIONS), dtype)[0]
    for name in SECTIONS:
        (alone,) = run_ranks(size, train, (name,), dtype)[:1]
        ours, theirs = together[name], alone[name]
        assert len(ours[0]) >= 2
        for one, two in zip(ours[0], theirs[0], strict=True):
            assert (one.grad_norm, one.entropy, one.kl, one.skipped) == (two.grad_norm, two.entropy, two.kl, "")
            assert one.grad_norm > 0
        for one, two in zip([*ours[1], *ours[2:]], [*theirs[1], *theirs[2:]], strict=True):
            assert one.keys() == two.keys()
            assert all(torch.equal(one[n], two[n]) for n in two), f"{name} beside others differs from {name} alone"
        assert {n.partition("@")[0] for n in ours[2]} == set(ours[2]), "names do not contain the policy"


def publish_all(ranks: TrainerRanks, folder: Path) -> Any:
    """Publish all policies, train two of them, and publish the copy of one. Rank 0 writes what checkpoints would hold.
    Returns the digests of all versions."""
    made, orders = recipe(**POLICIES), Orders(ranks)
    if not ranks.first:
        RankPart(made, folder, orders)
        orders.follow()
        return None
    part, _ = build(made, folder, orders)
    digests = {name: [orders.call(part.publish, name, 0, ORDER).digest] for name in part.policies}
    for name in ("solver", "verifier"):
        digests[name].append(step(part, name, 1).digest)
    digests["old"].append(orders.call(part.publish, "old", 1, ORDER).digest)
    unused = SimpleNamespace(to=lambda device: None)  # for whole models
    for name in ("solver", "verifier", "old"):
        own, path = part.policies[name], folder / name
        path.mkdir(parents=True)
        own.weights.write_published(unused, own.publisher, lambda name=name: orders.call(part.collect, name), path)
    orders.stop()
    part.close()
    return digests


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_publish_all_policies_of_a_base(tmp_path: Path, size: int) -> None:
    digests = run_ranks(size, publish_all, tmp_path / "several")[0]
    (wanted,) = run_ranks(1, publish_all, tmp_path / "one")
    for name, found in digests.items():
        assert found[0] == wanted[name][0], "the base, and the adapters before the first update"
    assert digests["old"] == digests["solver"], "the copy has the bytes of its original"
    assert len({*digests["solver"], *digests["verifier"], *digests["reference"]}) == 5
    for name in ("solver", "verifier", "old"):
        one, two = (load_file(tmp_path / x / name / "adapter_model.safetensors") for x in ("one", "several"))
        assert one.keys() == two.keys()
        for n, t in one.items():  # Adam divides by the size of a gradient, so tiny ones may differ in sign
            assert (two[n] - t).norm() < 0.02 * t.norm(), n
