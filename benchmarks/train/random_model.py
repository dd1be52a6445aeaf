"""Models and samples whose numbers are random: speed and memory do not depend on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from windfall.models.attention import NAME
from windfall.training import Sample


def random_model(config: Any, device: str, dtype: torch.dtype, attention: str = NAME) -> Any:
    """The model of a configuration. Only the device needs memory for it."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).eval()
    rotary = type(model.model.rotary_emb)(config)
    model.to_empty(device=device)
    model.model.rotary_emb = rotary.to(device)
    model.tie_weights()
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0.0, p.shape[-1] ** -0.5) if p.dim() > 1 else p.fill_(1.0)
    return model


def random_samples(lengths: Sequence[int], vocabulary: int) -> list[Sample]:
    """Sequences of these lengths, trained on all tokens but the first, as if all tokens had been equally likely."""
    rng, out = np.random.default_rng(0), list[Sample]()
    for n in lengths:
        ids, behavior = tuple(rng.integers(3, vocabulary, n).tolist()), np.full(n - 1, -float(np.log(vocabulary)))
        advantage = float(rng.normal())
        out.append(Sample(ids=ids, targets=tuple(range(1, n)), behavior=behavior, advantage=advantage, limit=4096))
    return out
