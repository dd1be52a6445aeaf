"""Tensors of several ranks as one rank would have them. All ranks call these functions together."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from windfall.trainer.ranks.ranks import TrainerRanks
from windfall.trainer.ranks.sharding import is_sharded, rows


def weights(ranks: TrainerRanks, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Split tensors are joined. Of the others, all ranks must have the same bits."""
    out = {}
    for name, t in named.items():
        parts = ranks.all_gather(rows(t).clone())
        out[name] = torch.cat(parts) if is_sharded(t) else parts[0]
        assert is_sharded(t) or all(torch.equal(parts[0], other) for other in parts), f"ranks differ in {name}"
    return out


def gradients(ranks: TrainerRanks, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of these weights before an update. Those that are not split are not summed yet."""
    out = {}
    for name, p in named.items():
        if p.grad is not None:
            parts = ranks.all_gather(rows(p.grad).clone())
            out[name] = torch.cat(parts) if is_sharded(p) else torch.stack(parts).sum(0)
    return out
