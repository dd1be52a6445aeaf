"""From hidden states to log-probs and back, without storing the logits of a whole batch.

The gradient of the negative sum of weight * log-prob with respect to the logits is weight * (softmax - one-hot). The
weights depend on the log-probs, and are computed on the host. Therefore rows are processed in tiles: while the host
computes the weights of one tile, the device computes the next one; then the logits of the first tile, which are still
in memory, are overwritten by their gradient. This takes three products with the head's matrix: logits, gradient of the
hidden states, gradient of the matrix. A tile ends where a response ends. A response that is too long for a tile is
split into several row ranges, whose logits are computed twice.

This holds for heads that are one linear map. A model that changes its logits further (a final soft cap, a scale)
computes them with its own code, `model_logits`, and autograd computes the gradient: one more product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from windfall.free_memory import free_bytes
from windfall.train import layers
from windfall.train.gradients import Gradients

CPU_LOGITS = 1 << 23
"""Logits held at once: 32 MiB in float32, close to the size of the caches."""
GPU_BYTES = (64 << 20, 3 << 29)
"""Minimum and maximum size of a tile. Two tiles are held at a time."""
GPU_SHARE = 1 / 24
"""Share of the free memory for a tile."""
Logits = Callable[[Tensor], Tensor]
WeightsFn = Callable[[int, int, np.ndarray, np.ndarray], np.ndarray]
"""From (first sample, end of the samples, log-probs, entropies) to weights, one per target."""


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


class Head:
    def __init__(
        self, linear: Any, gradients: Gradients | None = None, ops: Any = None, custom: Logits | None = None
    ) -> None:
        """`custom` is the model's code from hidden states to logits, if it does more than `linear`."""
        self.linear, self.gradients, self.custom = linear, gradients, custom
        self._logits: Logits = custom or linear
        self._ops = ops or layers.for_device(linear.weight.device)

    @torch.no_grad()
    def score(self, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
        """Returns (3, n) float32; the first two rows are log-probs and entropies."""
        size = self._tile_rows()
        parts = [
            self._ops.token_logprobs(self._logits(hidden[i : i + size]), targets[i : i + size], temperature)
            for i in range(0, len(hidden), size)
        ]
        return torch.cat(parts, 1) if parts else torch.empty(3, 0, device=hidden.device)

    @torch.no_grad()
    def learn(
        self, hidden: Tensor, targets: Tensor, sizes: Sequence[int], temperature: float, weights_fn: WeightsFn
    ) -> Tensor | None:
        """Add to the gradient of the head, and return that of the hidden states; None if every weight is zero. `sizes`
        are the rows of each sample."""
        back, waiting, any_gradient = torch.empty_like(hidden), None, False
        for samples, rows in tiles(sizes, self._tile_rows()):
            scored = self._score(hidden, targets, temperature, samples, rows)
            if waiting is not None:
                any_gradient |= self._backward(waiting, hidden, targets, temperature, weights_fn, back)
            waiting = scored
        if waiting is not None:
            any_gradient |= self._backward(waiting, hidden, targets, temperature, weights_fn, back)
        return back if any_gradient else None

    def _score(
        self, hidden: Tensor, targets: Tensor, temperature: float, samples: tuple[int, int], rows: list[tuple[int, int]]
    ) -> Tile:
        parts, logits = [], None
        for a, b in rows:
            logits = self._logits(hidden[a:b])
            parts.append(self._ops.token_logprobs(logits, targets[a:b], temperature))
        numbers = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        on_host, ready = numbers[:2].to("cpu", non_blocking=True), None
        if numbers.is_cuda:
            ready = torch.cuda.Event(blocking=True)
            ready.record()
        return Tile(
            samples=samples, rows=rows, numbers=numbers, on_host=on_host, ready=ready,
            logits=logits if len(rows) == 1 else None,
        )  # fmt: skip

    def _backward(
        self, tile: Tile, hidden: Tensor, targets: Tensor, temperature: float, weights_fn: WeightsFn, back: Tensor
    ) -> bool:
        """Add the gradient of a tile. Returns whether any of its weights is not zero."""
        if tile.ready is not None:
            tile.ready.synchronize()
        logp, entropy = tile.on_host.double().numpy()
        weights = torch.from_numpy(np.ascontiguousarray(weights_fn(*tile.samples, logp, entropy), np.float32))
        if not weights.any():
            for a, b in tile.rows:
                back[a:b] = 0.0
            return False
        if hidden.is_cuda:
            weights = weights.pin_memory().to(hidden.device, non_blocking=True)
        assert self.gradients is not None
        first = tile.rows[0][0]
        for a, b in tile.rows:
            span = slice(a - first, b - first)
            sums = tile.numbers[2, span]
            if self.custom is not None:
                back[a:b] = self._custom_backward(hidden[a:b], targets[a:b], sums, weights[span], temperature)
                continue
            logits = self.linear(hidden[a:b]) if tile.logits is None else tile.logits
            grad = self._ops.token_logprobs_backward(logits, targets[a:b], sums, weights[span], temperature)
            torch.mm(grad, self.linear.weight, out=back[a:b])
            self.gradients.add_product([self.linear.weight], grad, hidden[a:b])
            if getattr(self.linear, "bias", None) is not None:
                self.gradients.add(self.linear.bias, grad.float().sum(0))
        return True

    def _custom_backward(
        self, hidden: Tensor, targets: Tensor, sums: Tensor, weights: Tensor, temperature: float
    ) -> Tensor:
        """The gradient of the hidden states. Autograd adds those of the head's weights."""
        assert self.custom is not None
        with torch.enable_grad():
            hidden = hidden.detach().requires_grad_()
            logits = self.custom(hidden)
        grad = self._ops.token_logprobs_backward(logits.detach().clone(), targets, sums, weights, temperature)
        logits.backward(grad)
        assert hidden.grad is not None
        return hidden.grad

    def _tile_rows(self) -> int:
        weight = self.linear.weight
        if weight.device.type != "cuda":
            return max(1, CPU_LOGITS // len(weight))
        least, most = GPU_BYTES
        nbytes = min(max(least, int(GPU_SHARE * free_bytes(weight.device))), most)
        return max(1, nbytes // (len(weight) * weight.element_size()))


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
    linear, draw = model.get_output_embeddings(), torch.Generator().manual_seed(0)
    hidden = 100 * torch.randn(4, linear.weight.shape[1], generator=draw).to(linear.weight)
    plain, own = linear(hidden).float(), model_logits(model, hidden).float()
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
