"""Several adapters of one base in one forward pass: every row of the batch uses the adapter of its own response.

    y = x @ W.T + scale * (x @ A.T) @ B.T        A, B and scale: those of the row's adapter; none: y = x @ W.T
    y = W[token] + scale * B[token] @ A          embeddings

`TorchAdapters` has a module tree of its own with the parameters of the given one. The layers that an adapter changes
are replaced in it by an `AdaptedLayer`, around the layer that was there, packed (prepacked.py) or not. A layer that no
adapter changes stays as it is.

Rules:
- rows without an adapter have the bits of the base model;
- with `whole`, every adapter is computed for all rows of a pass, and each row takes the result of its own. So no shape
  depends on the adapters of other rows, as deterministic mode needs; otherwise an adapter computes only its own rows;
- an adapter that does not fit is refused before anything is changed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from windfall.engine.module_weights import copy_tree
from windfall.errors import WindfallError
from windfall.weights.merged import WEIGHT, AdapterPair, is_repeated


class RowAdapters:
    """The adapters of the rows of a pass."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self.count = 0
        self.rows: dict[int, Tensor | None] = {}
        """For every adapter of the pass, the indices of its rows; None: all rows."""

    def set(self, adapters: Sequence[int]) -> None:
        """`adapters`: of every row; -1: none."""
        self.count = len(adapters)
        used = sorted(set(adapters) - {-1})
        if used and len(set(adapters)) == 1:
            self.rows = {used[0]: None}
            return
        of_row = torch.tensor(adapters)
        self.rows = {n: torch.nonzero(of_row == n)[:, 0].to(self._device) for n in used}


class AdaptedLayer(nn.Module):
    def __init__(self, base: Any, rows: RowAdapters, whole: bool) -> None:
        super().__init__()
        self.base = base
        self.pairs: dict[int, tuple[AdapterPair, float]] = {}
        """The matrices and the scale of each adapter that changes this layer."""
        self._rows = rows
        self._whole = whole

    @abstractmethod
    def by_row(self, input: Tensor) -> Tensor:
        """The input with one entry for each row of the batch."""

    @abstractmethod
    def factors(self, x: Tensor, pair: AdapterPair) -> tuple[Tensor, Tensor]:
        """Two matrices whose product an adapter adds to the output for these rows of the input, apart from scale."""

    def forward(self, input: Tensor) -> Tensor:
        y = self.base(input)
        x, flat = self.by_row(input), y.reshape(-1, y.shape[-1])
        if len(x) != self._rows.count:
            raise WindfallError("a layer that computes only some rows of a batch cannot have one of several adapters")
        for number, rows in self._rows.rows.items():
            if number in self.pairs:
                pair, scale = self.pairs[number]
                narrow, wide = self.factors(x if rows is None or self._whole else x[rows], pair)
                if self._whole:
                    changed = flat + scale * (narrow @ wide)
                    flat = changed if rows is None else flat.index_copy(0, rows, changed[rows])
                elif rows is None:
                    flat.addmm_(narrow, wide, alpha=scale)
                else:
                    flat.index_add_(0, rows, narrow @ wide, alpha=scale)
        return flat.view(y.shape)


class AdaptedLinear(AdaptedLayer):
    def by_row(self, input: Tensor) -> Tensor:
        return input.reshape(-1, input.shape[-1])

    def factors(self, x: Tensor, pair: AdapterPair) -> tuple[Tensor, Tensor]:
        return linear(x, pair.a), pair.b.T


class AdaptedEmbedding(AdaptedLayer):
    def by_row(self, input: Tensor) -> Tensor:
        return input.reshape(-1)

    def factors(self, x: Tensor, pair: AdapterPair) -> tuple[Tensor, Tensor]:
        return embedding(x, pair.b), pair.a


class TorchAdapters:
    def __init__(self, model: Any, *, whole: bool) -> None:
        self.tree = copy_tree(model)
        self._rows = RowAdapters(model.device)
        self._head_rows = RowAdapters(model.device)
        self._head = _name(self.tree, self.tree.get_output_embeddings())
        self._tokens = _name(self.tree, self.tree.get_input_embeddings())
        self._whole = whole
        self._layers: dict[str, AdaptedLayer] = {}

    def set_rows(self, adapters: Sequence[int], ends: Sequence[int] | None) -> None:
        """`adapters`: of every row of the next pass; -1: none. `ends`: the rows of which the head computes the logits;
        None: all."""
        self._rows.set(adapters)
        self._head_rows.set(adapters if ends is None else [adapters[n] for n in ends])

    def check(self, pairs: Mapping[str, AdapterPair]) -> None:
        """Raise WindfallError if an adapter with these matrices cannot be used."""
        for layer in (name.removesuffix(WEIGHT) for name in pairs):
            found = self._layers[layer].base if layer in self._layers else self.tree.get_submodule(layer)
            linear_layer = isinstance(found, nn.Linear) and (is_repeated(layer) or layer == self._head)
            if not linear_layer and not (type(found) is nn.Embedding and layer == self._tokens):
                what = f"an adapter of {layer!r} is not supported: it is no linear layer of a decoder layer"
                raise WindfallError(f"{what}, nor the head, nor a plain embedding of tokens")

    @torch.no_grad()
    def hold(self, number: int, pairs: Mapping[str, AdapterPair], scale: float) -> None:
        """Use copies of these matrices for this adapter from now on."""
        for layer in self._layers.values():
            layer.pairs.pop(number, None)
        for name, pair in pairs.items():
            layer = self._adapted(name.removesuffix(WEIGHT))
            weight = next(layer.base.parameters())
            layer.pairs[number] = AdapterPair(*(t.to(weight, copy=True) for t in pair)), scale

    def _adapted(self, name: str) -> AdaptedLayer:
        if name not in self._layers:
            parent, _, last = name.rpartition(".")
            kind = AdaptedEmbedding if name == self._tokens else AdaptedLinear
            rows = self._head_rows if name == self._head else self._rows
            layer = kind(self.tree.get_submodule(name), rows, self._whole)
            setattr(self.tree.get_submodule(parent), last, layer)
            self._layers[name] = layer
        return self._layers[name]


def _name(tree: Any, module: Any) -> str | None:
    return next((name for name, m in tree.named_modules() if m is module), None)
