"""From hidden states to log-probs and back, without storing the logits of a whole batch.

The gradient of the negative sum of weight * log-prob with respect to the logits is weight * (softmax - one-hot). The
weights depend on the log-probs, and are computed on the host. Therefore rows are processed in tiles: while the host
computes the weights of one tile, the device computes the next one; then the logits of the first tile, which are still
in memory, are overwritten by their gradient. This takes three products with the head's matrix: logits, gradient of the
hidden states, gradient of the matrix. A tile ends where a response ends. A response that is too long for a tile is
split into several row ranges, whose logits are computed twice.

The head's matrix may have an adapter (lora.py): then a tile also takes the narrow products with its two matrices.

This holds for heads that are one linear map. A model that changes its logits further (a final soft cap, a scale)
computes them with its own code, `model_logits`, and autograd computes the gradient: one more product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers.modeling_outputs import BaseModelOutput

from windfall.free_memory import free_bytes
from windfall.trainer.model import layers
from windfall.trainer.model.gradients import Gradients, add_product
from windfall.trainer.model.lora import LoraLayer
from windfall.weights.merged import AdapterPair

CPU_LOGITS = 1 << 23
"""Logits held at once: 32 MiB in float32, close to the size of the caches."""
GPU_BYTES = (64 << 20, 3 << 29)
"""Minimum and maximum size of a tile. Two tiles are held at a time."""
GPU_SHARE = 1 / 24
"""Share of the free memory for a tile."""
Logits = Callable[[Tensor], Tensor]
WeightsFn = Callable[[int, int, np.ndarray, np.ndarray], np.ndarray]
"""From (first sample, end of the samples, log-probs, entropies) to weights, one per target."""


class Head:
    def __init__(self, model: Any, device: torch.device) -> None:
        self._model = model
        self.ops = layers.for_device(device)

    @property
    def linear(self) -> Any:
        """The layer of the head. It is replaced when it gets an adapter (lora.py)."""
        return self._model.get_output_embeddings()

    @property
    def adapter(self) -> tuple[AdapterPair, float] | None:
        """The adapter of the layer that has an effect now, and its scale."""
        layer = self.linear
        return layer.adapter if isinstance(layer, LoraLayer) else None

    @cached_property
    def custom(self) -> Logits | None:
        """The model's code from hidden states to logits, if it is more than one linear map. Determined at the first
        pass, when the weights are in memory."""
        return custom_head(self._model)

    def logits(self, hidden: Tensor) -> Tensor:
        if self.custom is not None:
            return self.custom(hidden)
        if self.adapter is None:
            return self.linear(hidden)
        (a, b), scale = self.adapter
        y = linear(hidden, self.linear.weight, self.linear.bias)
        return y.addmm_(linear(hidden, a), b.t(), alpha=scale)

    def weights(self) -> list[Tensor]:
        """The trained weights between hidden states and logits."""
        own = [
            self.linear.weight,
            getattr(self.linear, "bias", None),
            *(self.adapter[0] if self.adapter is not None else ()),
        ]
        if self.custom is not None:
            body = {id(p) for p in self._model.get_decoder().parameters()}
            own += [p for p in self._model.parameters() if id(p) not in body]
        return list({id(p): p for p in own if p is not None and p.requires_grad}.values())

    @torch.no_grad()
    def score(self, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
        """Returns (3, n) float32; the first two rows are log-probs and entropies."""
        size = self.tile_rows()
        parts = [
            self.ops.token_logprobs(self.logits(hidden[i : i + size]), targets[i : i + size], temperature)
            for i in range(0, len(hidden), size)
        ]
        return torch.cat(parts, 1) if parts else torch.empty(3, 0, device=hidden.device)

    @torch.no_grad()
    def top(self, hidden: Tensor, targets: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs of the targets, and for each row the `count` most likely tokens with their log-probs."""
        size = self.tile_rows()
        found = [torch.empty(0), torch.empty(0, count, dtype=torch.long), torch.empty(0, count)]
        parts = [[each.to(hidden.device) for each in found]]
        for i in range(0, len(hidden), size):
            logits = self.logits(hidden[i : i + size])
            logp, _, sums = self.ops.token_logprobs(logits, targets[i : i + size], 1.0)
            values, ids = logits.topk(count)
            parts.append([logp, ids, values.float() - sums[:, None]])
        logp, ids, values = (torch.cat(each) for each in zip(*parts, strict=True))
        return logp, ids, values

    def loss(
        self,
        hidden: Tensor,
        targets: Tensor,
        sizes: Sequence[int],
        temperature: float,
        weights_fn: WeightsFn,
        gradients: Gradients,
    ) -> Tensor:
        """The negative sum of weight * log-prob. `sizes` are the rows of each sample. Its gradients are computed at
        once, for a factor of 1. Unsharded, those of the head are also added at once. The result has no graph if
        every weight is zero, except with several ranks: all of them must run the same backward passes."""
        work = _Loss(self, hidden.detach(), targets, sizes, temperature, weights_fn, gradients)
        return cast(Tensor, _LossFunction.apply(hidden, work, *self.weights()))

    def tile_rows(self) -> int:
        weight = self.linear.weight
        if weight.device.type != "cuda":
            return max(1, CPU_LOGITS // len(weight))
        least, most = GPU_BYTES
        nbytes = min(max(least, int(GPU_SHARE * free_bytes(weight.device))), most)
        return max(1, nbytes // (len(weight) * weight.element_size()))


class _LossFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, work: _Loss, *weights: Tensor) -> Tensor:
        ctx.grads, loss = work.run(weights)
        out = torch.full((), loss, device=hidden.device)  # a copy from the host would wait for the device
        if ctx.grads is None:
            ctx.mark_non_differentiable(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (back, *rest), ctx.grads = ctx.grads, None
        return back, None, *rest


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """Samples whose log-probs have been computed, and their logits if the tile is one row range."""

    samples: tuple[int, int]
    rows: list[tuple[int, int]]
    numbers: Tensor
    """(3, rows): see layers.token_logprobs."""
    on_host: Tensor
    ready: Any
    """Event after which `on_host` can be read; None: now."""
    logits: Tensor | None


@dataclass
class _Loss:
    """One pass over all tiles."""

    head: Head
    hidden: Tensor
    targets: Tensor
    sizes: Sequence[int]
    temperature: float
    weights_fn: WeightsFn
    gradients: Gradients

    def run(self, weights: Sequence[Tensor]) -> tuple[list[Tensor | None] | None, float]:
        """The gradients of the hidden states and of `weights`, and the loss. No gradients if every weight is zero."""
        self._back = torch.empty_like(self.hidden)
        self._loss = 0.0
        self._weights = weights
        self._totals = {id(p): self.gradients.total(p) for p in weights}
        waiting, any_gradient = None, self.gradients.together
        for samples, rows in tiles(self.sizes, self.head.tile_rows()):
            scored = self._score(samples, rows)
            if waiting is not None:
                any_gradient |= self._backward(waiting)
            waiting = scored
        if waiting is not None:
            any_gradient |= self._backward(waiting)
        grads = [self._back, *map(self.gradients.returned, self._totals.values())] if any_gradient else None
        return grads, self._loss

    def _score(self, samples: tuple[int, int], rows: list[tuple[int, int]]) -> Tile:
        parts, logits = [], None
        for a, b in rows:
            logits = self.head.logits(self.hidden[a:b])
            parts.append(self.head.ops.token_logprobs(logits, self.targets[a:b], self.temperature))
        numbers = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        on_host, ready = numbers[:2].to("cpu", non_blocking=True), None
        if numbers.is_cuda:
            ready = torch.cuda.Event(blocking=True)
            ready.record()
        return Tile(
            samples=samples,
            rows=rows,
            numbers=numbers,
            on_host=on_host,
            ready=ready,
            logits=logits if len(rows) == 1 else None,
        )

    def _backward(self, tile: Tile) -> bool:
        """Add the gradient of a tile. Returns whether any of its weights is not zero."""
        if tile.ready is not None:
            tile.ready.synchronize()
        logp, entropy = tile.on_host.double().numpy()
        weights = np.ascontiguousarray(self.weights_fn(*tile.samples, logp, entropy), np.float32)
        if not weights.any():
            for a, b in tile.rows:
                self._back[a:b] = 0.0
            return False
        self._loss -= float(weights @ logp)
        on_device = torch.from_numpy(weights)
        if self.hidden.is_cuda:
            on_device = on_device.pin_memory().to(self.hidden.device, non_blocking=True)
        first = tile.rows[0][0]
        for a, b in tile.rows:
            span = slice(a - first, b - first)
            self._rows_backward(a, b, tile.logits, tile.numbers[2, span], on_device[span])
        return True

    def _rows_backward(self, a: int, b: int, logits: Tensor | None, sums: Tensor, weights: Tensor) -> None:
        """Add the gradients of the head for rows a to b, and store that of the hidden states."""
        head, hidden, targets = self.head, self.hidden[a:b], self.targets[a:b]
        if head.custom is not None:
            with torch.enable_grad():
                hidden = hidden.detach().requires_grad_()
                logits = head.custom(hidden)
            grad = head.ops.token_logprobs_backward(logits.detach().clone(), targets, sums, weights, self.temperature)
            self._back[a:b], *found = torch.autograd.grad(logits, (hidden, *self._weights), grad, allow_unused=True)
            for total, value in zip(self._totals.values(), found, strict=True):
                if total is not None and value is not None:
                    total.add_(value)
            return
        logits = head.logits(hidden) if logits is None else logits
        grad = head.ops.token_logprobs_backward(logits, targets, sums, weights, self.temperature)
        torch.mm(grad, head.linear.weight, out=self._back[a:b])
        self._add_product(head.linear.weight, grad, hidden)
        total = self._totals.get(id(getattr(head.linear, "bias", None)))
        if total is not None:
            total.add_(grad.float().sum(0))
        if head.adapter is not None:
            pair, scale = head.adapter
            inner = scale * (grad @ pair.b)
            self._back[a:b].addmm_(inner, pair.a)
            self._add_product(pair.a, inner, hidden)
            self._add_product(pair.b, grad, scale * linear(hidden, pair.a))

    def _add_product(self, weight: Tensor, grad: Tensor, x: Tensor) -> None:
        """Add grad.T @ x to the gradient of a weight, if it is trained."""
        total = self._totals.get(id(weight))
        if total is not None:
            add_product(total, grad, x)


class _BodyOutput(BaseModelOutput):
    """The output of a model's body: hidden states, and None for any other attribute that a head may read."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


def model_logits(model: Any, hidden: Tensor) -> Tensor:
    """The model's logits for these hidden states (rows, size), by its own code: its body is patched to return them."""
    body, rows = model.get_decoder(), torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
    output = _BodyOutput(last_hidden_state=cast(Any, hidden[None]))
    body.forward = lambda *args, **kwargs: output
    try:
        return model(input_ids=rows, use_cache=False).logits[0]
    finally:
        del body.forward


@torch.no_grad()
def custom_head(model: Any) -> Logits | None:
    """The model's own code for its logits; None if they are one linear map of its hidden states. Determined by a
    comparison, with hidden states that are large enough for any cap to have an effect."""
    layer, draw = model.get_output_embeddings(), torch.Generator().manual_seed(0)
    hidden = 100 * torch.randn(4, layer.weight.shape[1], generator=draw).to(layer.weight)
    plain, own = layer(hidden).float(), model_logits(model, hidden).float()
    same = plain.shape == own.shape and bool((plain - own).norm() <= 1e-3 * plain.norm())
    return None if same else partial(model_logits, model)


def tiles(sizes: Sequence[int], max_rows: int) -> Iterator[tuple[tuple[int, int], list[tuple[int, int]]]]:
    """Ranges of samples, and the row ranges in which to process each.

    >>> list(tiles([3, 2, 4, 11, 1], 5))
    [((0, 2), [(0, 5)]), ((2, 3), [(5, 9)]), ((3, 4), [(9, 14), (14, 19), (19, 20)]), ((4, 5), [(20, 21)])]
    """
    first, start, end = 0, 0, 0
    for i, size in enumerate(sizes):
        if i > first and end + size - start > max_rows:
            yield (first, i), _row_ranges(start, end, max_rows)
            first, start = i, end
        end += size
    if sizes:
        yield (first, len(sizes)), _row_ranges(start, end, max_rows)


def _row_ranges(start: int, end: int, max_rows: int) -> list[tuple[int, int]]:
    return [(a, min(a + max_rows, end)) for a in range(start, end, max_rows)]
