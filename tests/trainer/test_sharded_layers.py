"""Gradients under FSDP2 equal those of one unsharded model, with windfall's own layers and with those of transformers.

Two ranks split the weights and the samples. Each has two packs; the second rank has no work in its second one.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, Qwen2Config, Qwen3Config

from tests.support.engines import plain_layers
from tests.support.ranks import rank_tensors
from tests.support.ranks.rank_processes import run_ranks
from windfall.models import attention
from windfall.recipe.lora import Lora
from windfall.trainer.model import lora
from windfall.trainer.model.activation_memory import ALL, LEAST, LIGHT
from windfall.trainer.model.gradients import Gradients, trained
from windfall.trainer.model.llama import LlamaLayer
from windfall.trainer.model.logprobs import Learner, PolicyModule
from windfall.trainer.model.lora import is_adapter
from windfall.trainer.ranks.ranks import TrainerRanks
from windfall.trainer.ranks.sharding import is_sharded, sharded_policy
from windfall.training import Sample

plain_layers.install()
RANKS, TEMPERATURE = 2, 0.8
SHAPE: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "initializer_range": 0.2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS: dict[str, Any] = {
    "llama, tied": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen3, untied": lambda: Qwen3Config(**SHAPE, tie_word_embeddings=False),
    "qwen2, biases": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3, adapters": lambda: Qwen3Config(**SHAPE, tie_word_embeddings=True),
    # Its head is not one linear map.
    "gemma2, capped": lambda: Gemma2Config(**SHAPE, query_pre_attn_scalar=16, attn_logit_softcapping=None),
}
CASES: list[tuple[str, int | None, torch.dtype]] = [
    ("llama, tied", ALL, torch.float32),
    ("qwen3, untied", LIGHT, torch.float32),
    ("qwen2, biases", LEAST, torch.float32),
    ("qwen3, untied", None, torch.float32),
    ("gemma2, capped", None, torch.float32),
    ("qwen3, adapters", ALL, torch.float32),
    ("qwen3, adapters", LEAST, torch.float32),
    ("qwen3, adapters", None, torch.float32),
    ("qwen3, adapters", LIGHT, torch.bfloat16),
    ("llama, tied", LEAST, torch.bfloat16),
    ("qwen3, untied", None, torch.bfloat16),
]
"""Model, what the own layers keep (None: the layers of transformers), and the dtype of the passes."""


def model_of(name: str) -> Any:
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(MODELS[name](), attn_implementation=attention.NAME).eval()
    for p in model.parameters():  # norms and biases must have an effect, too
        if p.dim() == 1:
            torch.nn.init.normal_(p, 0.5, 0.3)
    attach(name, model)
    for n, p in model.named_parameters():
        if n.endswith("lora_B"):
            torch.nn.init.normal_(p, 0.0, 0.1)
    return model


def attach(name: str, model: Any) -> None:
    """Adapters of some linear layers of the last two decoder layers, if the name says so."""
    if "adapters" in name:
        targets = [f"layers.{i}.{x}" for i in (1, 2) for x in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj")]
        lora.attach(model, Lora(rank=3, targets=targets), base="", seed=0)


def samples(rank: int) -> list[list[Sample]]:
    """The packs of a rank."""
    rng = np.random.default_rng(rank)

    def one(length: int, advantage: float) -> Sample:
        ids = tuple(rng.integers(3, 60, length).tolist())
        targets = tuple(range(2, length))
        return Sample(ids=ids, targets=targets, behavior=np.zeros(0), advantage=advantage, limit=0)

    packs = [[one(9, 1.0), one(14, -0.5)], [one(21, 0.7)], [one(6, 2.0), one(5, -1.0)]]
    return packs[:2] if rank == 0 else [packs[2], [one(3, 0.0)]]


def learn(learner: Learner, pack: list[Sample]) -> None:
    weights = [s.advantage * (1 + np.arange(len(s.targets)) % 3) for s in pack]
    learner.learn(pack, TEMPERATURE, lambda first, last, logp, entropy: np.concatenate(weights[first:last]))


def learner_of(policy: Any, keep: int | None) -> Learner:
    """`keep`: what windfall's own layers keep; None: those of transformers."""
    several = isinstance(policy, PolicyModule)
    learner = Learner(policy, Gradients(trained(policy.model if several else policy), together=several))
    if keep is not None:
        learner.use_own_layers(keep=keep)
    return learner


def failing(error: Exception) -> Any:
    """The second layer that runs raises an error."""
    forward, calls = LlamaLayer.forward, itertools.count()

    def second(*args: Any) -> Any:
        if next(calls) == 1:
            raise error
        return forward(*args)

    return mock.patch.object(LlamaLayer, "forward", second)


def expected(name: str, keep: int | None, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """With the layers of transformers in float32; in half precision they round differently."""
    model = model_of(name)
    for p in model.parameters():  # FSDP2 does not cast buffers, such as the frequencies of the rotary embedding, either
        p.data = p.data.to(dtype)
    learner = learner_of(model, None if dtype == torch.float32 else keep)
    scores = torch.cat([learner.score(pack, TEMPERATURE)[0] for rank in range(RANKS) for pack in samples(rank)])
    for pack in (pack for rank in range(RANKS) for pack in samples(rank)):
        learn(learner, pack)
    return {"scores": scores, **{n: g for n, p in model.named_parameters() if (g := p.grad) is not None}}


def sharded(ranks: TrainerRanks, name: str, keep: int | None, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    model = model_of(name)
    source = model.state_dict() | dict(model.named_buffers()) if ranks.first else None
    policy = sharded_policy(MODELS[name](), source, ranks, dtype=dtype, prepare=lambda model: attach(name, model))
    learner, (first, second) = learner_of(policy, keep), samples(ranks.rank)
    scores = [learner.score(pack, TEMPERATURE)[0] for pack in (first, second)]
    with failing(torch.OutOfMemoryError()) if ranks.rank == 1 and keep == ALL else contextlib.nullcontext():
        learn(learner, first)  # other ranks do not notice that this one keeps fewer activations
    learn(learner, second)
    learner.score(first, TEMPERATURE)
    weights = dict(policy.model.named_parameters())
    assert all(is_sharded(p) != is_adapter(n) for n, p in weights.items()), "sharded after a pass"
    masters = {n for n, p in weights.items() if p.requires_grad and is_sharded(p)}
    assert all(p.dtype == (torch.float32 if n in masters else dtype) for n, p in weights.items())
    return {
        "scores": torch.cat([x for part in ranks.all_gather(scores) for x in part]),
        **rank_tensors.gradients(ranks, weights),
    }


def all_cases(ranks: TrainerRanks) -> list[dict[str, torch.Tensor]]:
    return [sharded(ranks, *case) for case in CASES]


def all_expected(ranks: TrainerRanks) -> list[dict[str, torch.Tensor]]:
    return [expected(*case) for case in CASES]


@pytest.fixture(scope="module")
def found() -> Any:
    return run_ranks(RANKS, all_cases)[0]


@pytest.fixture(scope="module")
def wanted_of_all() -> Any:
    """In a process like those of the ranks: other tests may leave settings of torch that change how bfloat16 rounds."""
    return run_ranks(1, all_expected)[0]


@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{n}, {k}, {d}" for n, k, d in CASES])
def test_gradients_equal_those_of_one_unsharded_model(case: int, found: Any, wanted_of_all: Any) -> None:
    wanted = wanted_of_all[case]
    assert set(found[case]) == set(wanted)
    for n, g in wanted.items():
        assert found[case][n].dtype == torch.float32
        assert float((found[case][n] - g).norm() / g.norm()) < 1e-5, n
