"""What a recipe asks of its machines: the workload for the planner. Reads the config.json of the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from windfall.errors import WindfallError
from windfall.models import load
from windfall.plan.model.workload import Workload, delta_share
from windfall.plan.model.workload import model as find_model
from windfall.recipe.lora import DEFAULT_RANK
from windfall.recipe.sections import Recipe
from windfall.trainer.ranks.rank_budget import ModelShape


def recipe_workload(base: Recipe) -> Workload:
    """Lengths are those of [sim]; without that section, a third of `rollout.max_tokens`. Adapters, and weights in
    float32, are pulled whole: nearly every element changes (docs/weights.md)."""
    o, s, lora = base.rollout, base.sim, base.train.lora
    shape = model_shape(base.model.path)
    given = s.model_fields_set
    return Workload(
        shape=shape, groups=o.groups, group_size=o.group_size, max_tokens=o.max_tokens,
        prompt_tokens=s.prompt_tokens, median_tokens=s.median_tokens if "median_tokens" in given else o.max_tokens / 3,
        sigma=s.sigma, staleness=o.staleness, reward_s=s.reward_s, steps=base.run.steps, kl=base.algorithm.kl > 0,
        offload=base.train.offload, minibatches=base.train.minibatches,
        delta=1.0 if lora is not None or base.model.dtype == "float32" else delta_share(base.train.lr),
        adapter_parameters=0 if lora is None else _adapter_parameters(shape, lora.rank or DEFAULT_RANK),
    )  # fmt: skip


def _adapter_parameters(shape: ModelShape, rank: int) -> int:
    """Adapters on all linear layers."""
    wide = (shape.heads + 2 * shape.kv_heads) * shape.head + shape.hidden
    return shape.layers * rank * (4 * shape.hidden + wide + 3 * (shape.hidden + shape.intermediate))


def model_shape(path: str) -> ModelShape:
    """The sizes of a model, from its config.json or from the table of known models."""
    if path not in load.NAMED and not Path(path).expanduser().is_dir():
        return find_model(path)[1]
    file = Path(load.resolve(path)) / "config.json"
    try:
        c: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        heads = c["num_attention_heads"]
        return ModelShape(
            hidden=c["hidden_size"], intermediate=c["intermediate_size"], layers=c["num_hidden_layers"], heads=heads,
            kv_heads=c.get("num_key_value_heads") or heads, head=c.get("head_dim") or c["hidden_size"] // heads,
            vocabulary=c["vocab_size"], tied=bool(c.get("tie_word_embeddings", False)),
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError) as e:
        fix = "Only decoders with the sizes of Llama or Qwen can be planned."
        raise WindfallError(f"the sizes of this model cannot be read: {e!r}", where=str(file), fix=fix) from e
