"""Joins the weights of linear layers that read the same input, so that one matrix product computes all of them.

The parameters stay the same objects with the same values and become adjacent views of the joined tensor. A write to the
joined tensor is seen by the module and by an optimizer, and vice versa.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def join(parts: Sequence[Tensor]) -> Tensor:
    """Join the parts into one tensor and make them views of it. They are copied only if they are not adjacent yet."""
    joined = adjacent(parts)
    if joined is None:
        joined = torch.cat([p.data for p in parts])
        for p, view in zip(parts, joined.split([len(p) for p in parts]), strict=True):
            p.data = view
    return joined


def adjacent(parts: Sequence[Tensor]) -> Tensor | None:
    """One tensor that covers all parts (matrices or vectors), or None if they are not adjacent in one storage."""
    first, address = parts[0], parts[0].data_ptr()
    for p in parts:
        here = p.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and p.data_ptr() == address
        if not here or not p.is_contiguous() or p.dtype != first.dtype or p.shape[1:] != first.shape[1:]:
            return None
        address += p.numel() * p.element_size()
    shape = (sum(len(p) for p in parts), *first.shape[1:])
    return first.detach().as_strided(shape, first.stride(), first.storage_offset())
