"""What an engine must return in a model with experts: the choice of transformers, for every token once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from windfall.chosen_experts import ChosenExperts
from windfall.engine.engine_thread import tokens_frame
from windfall.link.messages import expert_columns
from windfall.types import Chunk, Request


def expected(reference: Any, sequence: Iterable[int]) -> np.ndarray:
    """(tokens, layers, chosen) by transformers, with its own attention."""
    found: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda m, a, out: found.append(out[2]))
        for layer in reference.model.layers
        if hasattr(layer.mlp, "gate")
    ]
    with torch.no_grad():
        reference(input_ids=torch.tensor([list(sequence)]))
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1).numpy()


def received(request: Request, chunks: Iterable[Chunk], known: ChosenExperts | None = None) -> ChosenExperts:
    """What a controller makes of the frames."""
    known = known or ChosenExperts(start=-len(request.prompt))
    for c in chunks:
        width, ((start, data),) = expert_columns(tokens_frame([replace(c, id="1")]))
        assert start == known.end, "every token's experts come once"
        known.add(start, data, width)
    return known
