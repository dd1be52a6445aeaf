"""Linear layers on an x86-64 CPU that multiply by a copy of their weights in the layout of the matrix library.

torch keeps a weight as (out, in). MKL brings it into a layout of its own in every product, which for the few rows of a
decode step takes about as long as the product itself. `prepacked` makes a module tree that has the parameters of the
given one, and in which linear layers keep that layout from step to step. docs/engine.md has figures.

Rules:
- the given module is never changed: a trainer and other engines may use it at the same time;
- a copy is made when it is first needed and does not follow its weight: call `drop_copies` whenever weights change, as
  `TorchEngine.swap` does;
- the copies take as much memory as the weights. There are none where that is more than `MEMORY_SHARE` of what is free;
- the order of summation may differ from that of the weights themselves, so deterministic mode, in which engine and
  trainer have the same bits, does not use them. Otherwise results are promised up to rounding only.

On aarch64 torch has no MKL, and OpenBLAS, which it uses there, offers no such layout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from windfall.engine.module_weights import copy_tree, replace_linear
from windfall.free_memory import free_bytes

ROWS = range(4, 97)
"""Batches for which the copies are faster. Others are computed with the weights themselves."""
TYPICAL_ROWS = 32
MEMORY_SHARE = 0.25
"""Largest share of the free memory that the copies may take."""


class PrepackedLinear(nn.Linear):
    copy: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        rows = input.numel() // self.in_features
        if rows not in ROWS:
            return linear(input, self.weight, self.bias)
        if self.copy is None:
            self.copy = torch.ops.mkl._mkl_reorder_linear_weight(self.weight.detach(), TYPICAL_ROWS)
        # torch uses the copy only if it is told that it was made for this number of rows. MKL's layout does not depend
        # on that number: tests/engine/torch/test_prepacked.py multiplies every number of rows by the same copy.
        return torch.ops.mkl._mkl_linear.default(input, self.copy, self.weight, self.bias, rows)


def prepacked(model: Any) -> Any:
    """The model in a tree of its own, with the same weights, where that is faster and there is memory; else the model
    itself."""
    names = [name for name, layer in model.named_modules() if type(layer) is nn.Linear and _gains(layer.weight)]
    nbytes = sum(model.get_submodule(name).weight.nbytes for name in names)
    if not names or nbytes > MEMORY_SHARE * free_bytes("cpu"):
        return model
    tree = copy_tree(model)
    for name in names:
        replace_linear(tree, name, PrepackedLinear)
    return tree


def drop_copies(tree: Any) -> None:
    """Free the copies. The next pass makes them anew."""
    for layer in tree.modules():
        if isinstance(layer, PrepackedLinear):
            layer.copy = None


def _gains(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkl.is_available()
