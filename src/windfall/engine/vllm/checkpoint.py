"""The names and shapes of a model's weights: as transformers has them in memory, and as vLLM's loaders read them.

windfall publishes the state dict of the trained module. vLLM's `load_weights` reads the names of a checkpoint on disk.
For most models these are the same. transformers joins the experts of a layer into one tensor (experts, outputs,
inputs); a checkpoint has one matrix per expert and projection. `to_checkpoint` splits them, without copying anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from windfall.engine.module_weights import check_weights
from windfall.models.experts import expert_layers

GATE_UP, DOWN = ".experts.gate_up_proj", ".experts.down_proj"


class WeightShapes:
    """The shapes of a model's weights, from its configuration. Nothing is allocated."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        fields = dict(fields)
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        self.config = config
        self.architecture = type(model).__name__
        state = model.state_dict()
        self.shapes = {name: t.shape for name, t in state.items()}
        self.tied = (
            self.shapes.keys()
            - {name for name, _ in model.named_parameters()}
            - {name for name, _ in model.named_buffers()}
        )
        self.parameters = sum(p.numel() for p in model.parameters())
        self.vocabulary = model.get_input_embeddings().num_embeddings
        self.experts = expert_layers(model)

    def check(self, version: int, weights: Mapping[str, Any]) -> None:
        """Raise WindfallError unless these weights are those of the model."""
        check_weights(version, weights, self.shapes, self.tied)


def to_checkpoint(weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The same weights by the names of a checkpoint.

    >>> joined = torch.arange(2 * 6 * 2).reshape(2, 6, 2)
    >>> [(name, tuple(t.shape)) for name, t in to_checkpoint(iter([("mlp.experts.gate_up_proj", joined)]))][:2]
    [('mlp.experts.0.gate_proj.weight', (3, 2)), ('mlp.experts.0.up_proj.weight', (3, 2))]
    """
    for name, tensor in weights:
        if name.endswith(GATE_UP) and tensor.dim() == 3:
            prefix, half = name.removesuffix("gate_up_proj"), tensor.shape[1] // 2
            for expert, matrix in enumerate(tensor):
                yield f"{prefix}{expert}.gate_proj.weight", matrix[:half]
                yield f"{prefix}{expert}.up_proj.weight", matrix[half:]
        elif name.endswith(DOWN) and tensor.dim() == 3:
            prefix = name.removesuffix("down_proj")
            for expert, matrix in enumerate(tensor):
                yield f"{prefix}{expert}.down_proj.weight", matrix
        else:
            yield name, tensor
