"""Weights of linear layers that read the same input, joined into one tensor, so that they are one matrix product.

The parameters stay the same objects with the same values and become adjacent views of the joined tensor. The module and
an optimizer see what is written to the joined tensor, and the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def join(parts: Sequence[Tensor]) -> Tensor:
    """One tensor of all parts, which become views of it. They are moved only if they are not adjacent yet."""
    joined = adjacent(parts)
    if joined is None:
        joined = torch.cat([p.data for p in parts])
        for p, view in zip(parts, joined.split([len(p) for p in parts]), strict=True):
            p.data = view
    return joined


def adjacent(parts: Sequence[Tensor]) -> Tensor | None:
    """Matrices or vectors that are adjacent in one storage, as one tensor; None if they are not."""
    first, address = parts[0], parts[0].data_ptr()
    for p in parts:
        here = p.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and p.data_ptr() == address
        if not here or not p.is_contiguous() or p.dtype != first.dtype or p.shape[1:] != first.shape[1:]:
            return None
        address += p.numel() * p.element_size()
    shape = (sum(len(p) for p in parts), *first.shape[1:])
    return first.detach().as_strided(shape, first.stride(), first.storage_offset())
