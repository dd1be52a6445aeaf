"""How the tokens of an update spread over the experts of a model: counted while it is trained.

Every layer of experts is called with the experts that its router chose for each token. A hook adds them to counts on
the device. Nothing is copied to the host before the update, and ranks add their counts up only then. Rules:

- every token of every sample of an update is counted once: not when activations are recomputed, not in passes of the
  reference or before the first update of a step, and not for a rank without work;
- a model without experts, or whose experts are not called in transformers' usual way, has no counts.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

INDEX_NAMES = ("top_k_index", "router_indices")
"""Names in transformers for the chosen experts, which are the second argument of a layer of experts."""


class ExpertCounts:
    def __init__(self, model: Any, device: torch.device) -> None:
        found = [m for m in model.modules() if type(m).__name__.endswith("Experts") and _is_count(m)]
        self.sizes = [int(m.num_experts) for m in found]
        """Number of experts of each layer."""
        self._counts = torch.zeros(sum(self.sizes), dtype=torch.long, device=device)
        self._counting = False
        for module, counts in zip(found, self._counts.split(self.sizes) if found else (), strict=True):
            module.register_forward_pre_hook(_Hook(self, counts), with_kwargs=True)

    @contextlib.contextmanager
    def counting(self, enabled: bool = True) -> Iterator[None]:
        """Within this context, tokens are counted."""
        self._counting = enabled
        try:
            yield
        finally:
            self._counting = False

    @property
    def is_counting(self) -> bool:
        return self._counting

    def zero(self) -> None:
        self._counts.zero_()

    def read(self) -> np.ndarray:
        """The tokens of every expert since `zero`, layer after layer. Waits for the device."""
        return self._counts.cpu().numpy().copy()

    def describe(self, counts: np.ndarray) -> dict[str, Any] | None:
        """The spread of these counts, maybe of several ranks; None if there are none."""
        layers = np.split(counts, np.cumsum(self.sizes)[:-1]) if self.sizes else []
        return spread([layer.tolist() for layer in layers]) if counts.any() else None


class _Hook:
    """Adds the chosen experts of one layer to its counts."""

    def __init__(self, owner: ExpertCounts, counts: Tensor) -> None:
        self.owner = owner
        self.counts = counts

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.owner.is_counting:
            return
        chosen = next((kwargs[n] for n in INDEX_NAMES if n in kwargs), args[1] if len(args) > 1 else None)
        if isinstance(chosen, Tensor) and not chosen.is_floating_point():
            flat = chosen.detach().reshape(-1).long()
            self.counts.scatter_add_(0, flat, torch.ones_like(flat))  # unlike bincount, it does not wait for the device


def spread(layers: Sequence[Sequence[int]]) -> dict[str, Any]:
    """How evenly tokens spread over experts. `layers`: the tokens of every expert, by layer.

    `layers` in the result is the balance of each layer: the entropy of its tokens' distribution over the experts,
    divided by that of a uniform one. `balance` is their mean. `unused` is the number of experts without a token, in all
    layers. `load_max` and `load_min` are the most and fewest tokens of any expert, as a multiple of its layer's mean.

    >>> spread([[10, 10, 10, 10], [0, 0, 20, 20]])
    {'balance': 0.75, 'unused': 2, 'load_max': 2.0, 'load_min': 0.0, 'layers': [1.0, 0.5]}
    """
    balances, loads = [], []
    for counts in layers:
        total, size = sum(counts), len(counts)
        shares = [n / total for n in counts] if total else []
        entropy = -sum(s * math.log(s) for s in shares if s)
        balances.append(round(entropy / math.log(size), 6) if size > 1 and total else 1.0)
        loads += [s * size for s in shares]
    return {
        "balance": sum(balances) / len(balances),
        "unused": sum(not n for counts in layers for n in counts),
        "load_max": max(loads),
        "load_min": min(loads),
        "layers": balances,
    }


def _is_count(module: Any) -> bool:
    return isinstance(getattr(module, "num_experts", None), int)
