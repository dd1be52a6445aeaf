"""From hidden states to log-probs and back, without ever holding the logits of a whole batch.

The gradient of minus the sum of weight * log-prob, by the logits, is weight * (softmax - one-hot). The weights follow
from the log-probs, and are computed on the host. So rows are taken a tile at a time: while the host weighs one tile,
the device has the next one to compute; then the first one's logits, which are still there, become their own gradient.
Three products with the head's matrix, no more: logits, gradient of the hidden states, gradient of the matrix. A tile
ends where a response ends. A response too long for a tile is cut into several, whose logits are computed twice.

That is for heads that are one linear map. A model that does more to its logits (a final soft cap, a scale) computes
them with its own code, `own_logits`, and autograd finds the way back: one product more.
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
"""Held at once: 32 MiB in float32, which stays near the caches."""
GPU_BYTES = (64 << 20, 3 << 29)
"""Of a tile: at least, and at most. Two are held at a time."""
GPU_SHARE = 1 / 24
"""Of the free memory, for a tile."""
Logits = Callable[[Tensor], Tensor]
Weigh = Callable[[int, int, np.ndarray, np.ndarray], np.ndarray]
"""(first sample, sample after the last, log-probs, entropies) to weights, one per target."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """Samples whose rows have been scored, and perhaps their logits."""

    samples: tuple[int, int]
    rows: list[tuple[int, int]]
    numbers: Tensor
    """(3, rows): see layers.score."""
    on_host: Tensor
    there: Any
    """When `on_host` can be read."""
    logits: Tensor | None


class Head:
    def __init__(
        self, linear: Any, gradients: Gradients | None = None, ops: Any = None, own: Logits | None = None
    ) -> None:
        """`own`: the model's code from hidden states to logits, where that is more than `linear`."""
        self.linear, self.gradients, self.own = linear, gradients, own
        self._logits: Logits = own or linear
        self._ops = ops or layers.for_device(linear.weight.device)

    @torch.no_grad()
    def score(self, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
        """(3, n) float32; the first two are log-probs and entropies."""
        size = self._tile_rows()
        parts = [
            self._ops.score(self._logits(hidden[i : i + size]), targets[i : i + size], temperature)
            for i in range(0, len(hidden), size)
        ]
        return torch.cat(parts, 1) if parts else torch.empty(3, 0, device=hidden.device)

    @torch.no_grad()
    def learn(
        self, hidden: Tensor, targets: Tensor, sizes: Sequence[int], temperature: float, weigh: Weigh
    ) -> Tensor | None:
        """`sizes`: rows of each sample. Adds to the head's gradient, and returns that of the hidden states; None if it
        is zero because every weight is."""
        back, waiting, found = torch.empty_like(hidden), None, False
        for samples, rows in tiles(sizes, self._tile_rows()):
            scored = self._score(hidden, targets, temperature, samples, rows)
            if waiting is not None:
                found |= self._back(waiting, hidden, targets, temperature, weigh, back)
            waiting = scored
        if waiting is not None:
            found |= self._back(waiting, hidden, targets, temperature, weigh, back)
        return back if found else None

    def _score(
        self, hidden: Tensor, targets: Tensor, temperature: float, samples: tuple[int, int], rows: list[tuple[int, int]]
    ) -> Tile:
        parts, logits = [], None
        for a, b in rows:
            logits = self._logits(hidden[a:b])
            parts.append(self._ops.score(logits, targets[a:b], temperature))
        numbers = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        on_host, there = numbers[:2].to("cpu", non_blocking=True), None
        if numbers.is_cuda:
            there = torch.cuda.Event(blocking=True)
            there.record()
        return Tile(
            samples=samples, rows=rows, numbers=numbers, on_host=on_host, there=there,
            logits=logits if len(rows) == 1 else None,
        )  # fmt: skip

    def _back(
        self, tile: Tile, hidden: Tensor, targets: Tensor, temperature: float, weigh: Weigh, back: Tensor
    ) -> bool:
        """Whether there is anything to learn from this tile."""
        if tile.there is not None:
            tile.there.synchronize()
        logp, entropy = tile.on_host.double().numpy()
        weights = torch.from_numpy(np.ascontiguousarray(weigh(*tile.samples, logp, entropy), np.float32))
        if not weights.any():
            for a, b in tile.rows:
                back[a:b] = 0.0
            return False
        if hidden.is_cuda:
            weights = weights.pin_memory().to(hidden.device, non_blocking=True)
        assert self.gradients is not None
        first = tile.rows[0][0]
        for a, b in tile.rows:
            here = slice(a - first, b - first)
            sums = tile.numbers[2, here]
            if self.own is not None:
                back[a:b] = self._own_back(hidden[a:b], targets[a:b], sums, weights[here], temperature)
                continue
            logits = self.linear(hidden[a:b]) if tile.logits is None else tile.logits
            grad = self._ops.score_back(logits, targets[a:b], sums, weights[here], temperature)
            torch.mm(grad, self.linear.weight, out=back[a:b])
            self.gradients.add_product([self.linear.weight], grad, hidden[a:b])
            if getattr(self.linear, "bias", None) is not None:
                self.gradients.add(self.linear.bias, grad.float().sum(0))
        return True

    def _own_back(self, hidden: Tensor, targets: Tensor, sums: Tensor, weights: Tensor, temperature: float) -> Tensor:
        """The gradient of the hidden states; those of the head's weights are added by autograd."""
        assert self.own is not None
        with torch.enable_grad():
            hidden = hidden.detach().requires_grad_()
            logits = self.own(hidden)
        grad = self._ops.score_back(logits.detach().clone(), targets, sums, weights, temperature)
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


class _Said(BaseModelOutput):
    """What a body returns: hidden states, and None for whatever else a head may look at."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


def own_logits(model: Any, hidden: Tensor) -> Tensor:
    """What the model makes of these hidden states (rows, size), by its own code: the body is told to return them."""
    body, rows = model.get_decoder(), torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
    said = _Said(last_hidden_state=cast(Any, hidden[None]))
    body.forward = lambda *args, **kwargs: said
    try:
        return model(input_ids=rows, use_cache=False).logits[0]
    finally:
        del body.forward


@torch.no_grad()
def own_head(model: Any) -> Logits | None:
    """None: the model's logits are one linear map of its hidden states. Found out by trying, with hidden states large
    enough for any cap to show."""
    linear, draw = model.get_output_embeddings(), torch.Generator().manual_seed(0)
    hidden = 100 * torch.randn(4, linear.weight.shape[1], generator=draw).to(linear.weight)
    plain, own = linear(hidden).float(), own_logits(model, hidden).float()
    same = plain.shape == own.shape and bool((plain - own).norm() <= 1e-3 * plain.norm())
    return None if same else partial(own_logits, model)


def tiles(sizes: Sequence[int], most: int) -> Iterator[tuple[tuple[int, int], list[tuple[int, int]]]]:
    """Ranges of samples, and the ranges of rows to take them in.

    >>> list(tiles([3, 2, 4, 11, 1], 5))
    [((0, 2), [(0, 5)]), ((2, 3), [(5, 9)]), ((3, 4), [(9, 14), (14, 19), (19, 20)]), ((4, 5), [(20, 21)])]
    """
    first, start, end = 0, 0, 0
    for i, size in enumerate(sizes):
        if i > first and end + size - start > most:
            yield (first, i), _cut(start, end, most)
            first, start = i, end
        end += size
    if sizes:
        yield (first, len(sizes)), _cut(start, end, most)


def _cut(start: int, end: int, most: int) -> list[tuple[int, int]]:
    return [(a, min(a + most, end)) for a in range(start, end, most)]
