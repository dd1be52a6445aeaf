"""Linear layers that read the same input, as one: their parameters become views, end to end, of one tensor.

The parameters stay the same objects with the same values. Whoever holds them (the module, an optimizer) sees what is
written to the one tensor, and the other way round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn


def fuse(*linears: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """One weight for all of them, and one bias; theirs become views of it."""
    weight = _joined([linear.weight for linear in linears])
    return weight, None if linears[0].bias is None else _joined([linear.bias for linear in linears])


def _joined(parts: Sequence[Tensor]) -> Tensor:
    whole = _already(parts)
    if whole is None:
        whole = torch.cat([p.data for p in parts])
        for p, view in zip(parts, _slices(whole, parts), strict=True):
            p.data = view
    return whole


def _slices(whole: Tensor, parts: Sequence[Tensor]) -> Iterator[Tensor]:
    yield from whole.split([len(p) for p in parts])


def _already(parts: Sequence[Tensor]) -> Tensor | None:
    """The tensor that these are views of, end to end, if they are: another engine may share the module."""
    first = parts[0].data
    rows = sum(len(p) for p in parts)
    storage, offset = first.untyped_storage(), first.storage_offset()
    if any(p.data.untyped_storage().data_ptr() != storage.data_ptr() or not p.is_contiguous() for p in parts):
        return None
    if (offset + rows * first[0].numel()) * first.element_size() > storage.nbytes():
        return None
    whole = first.as_strided((rows, *first.shape[1:]), first.stride(), offset)
    ends = [view.data_ptr() for view in _slices(whole, parts)]
    return whole if ends == [p.data_ptr() for p in parts] else None
