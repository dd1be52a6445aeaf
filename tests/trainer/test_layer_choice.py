"""All ranks of a trainer use the same layers: windfall's own, or those of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.support.rank_processes import run_ranks
from windfall.models import attention
from windfall.trainer.model import logprobs
from windfall.trainer.model.gradients import Gradients
from windfall.trainer.model.llama import UnsupportedModel
from windfall.trainer.model.logprobs import Learner
from windfall.trainer.ranks.ranks import TrainerRanks
from windfall.trainer.ranks.sharding import sharded_policy

CONFIG = LlamaConfig(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=128,
)  # fmt: skip


def choose(ranks: TrainerRanks, where: str, error: Exception | None) -> tuple[bool, list[str]]:
    """Choose the layers; the last rank fails at `where`. Returns whether it uses the own ones, and what it said."""
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32, attn_implementation=attention.NAME)
    source = dict(model.named_parameters()) | dict(model.named_buffers()) if ranks.first else None
    policy = sharded_policy(CONFIG, source, ranks, dtype=torch.float32)
    said: list[str] = []
    learner = Learner(policy, Gradients(policy.model), ranks=ranks)
    if error is not None and ranks.rank == ranks.size - 1:

        def fail(*_: Any, **__: Any) -> None:
            raise error

        if where == "before":
            learner.use_own_layers = fail
        elif where == "after":
            logprobs._check_close = fail
        else:
            policy.model.base_model.layers[1].mlp.forward = fail  # in the pass of transformers' layers
    learner.choose_layers("auto", said.append)
    return policy.body is not None, said


def test_own_layers_are_used_if_all_ranks_can() -> None:
    assert run_ranks(2, choose, "", None) == [(True, []), (True, [])]


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("error", [UnsupportedModel("one rank cannot"), UnsupportedModel("hidden states differ")])
def test_one_rank_that_cannot_use_them_is_enough(where: str, error: Exception) -> None:
    line = f"training uses the layers of transformers: {error}"
    assert run_ranks(3, choose, where, error) == [(False, [line])] * 3


def fail_in_a_pass(ranks: TrainerRanks) -> str:
    try:
        choose(ranks, "within", ValueError("no compiler"))
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return ""


def test_error_within_a_sharded_pass_ends_the_rank() -> None:
    """The other ranks wait in a collective, so no agreement is possible."""
    first, last = run_ranks(2, fail_in_a_pass, timeout_s=3.0)
    assert last == "ValueError: no compiler"
    assert first, "noticed by the time limit"
