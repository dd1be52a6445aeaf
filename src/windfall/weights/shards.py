"""The tensors that a rank passes to the publisher: whole tensors, or shards with some of their rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from windfall.errors import WindfallError
from windfall.weights.plan import Rows

if TYPE_CHECKING:
    import torch


class Shard(Protocol):
    """The rows of a tensor that this rank holds."""

    @property
    def local(self) -> torch.Tensor: ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        ...

    @property
    def first_row(self) -> int: ...


Tensors = Mapping[str, "torch.Tensor | Shard"]


def describe(tensors: Tensors, dtype: str | None) -> tuple[tuple[Rows, ...], dict[str, torch.Tensor]]:
    """The rows for an offer, and the rows' values by name. `dtype`: the published dtype of floating-point tensors."""
    import torch

    if not tensors:
        raise WindfallError("no tensors to publish", where="weights", fix="Pass the state_dict() of the module.")
    rows, values, storages = [], {}, {}
    for name, tensor in tensors.items():
        if hasattr(tensor, "to_local"):  # a DTensor: its shape is that of the whole, its memory that of the shard
            raise WindfallError(f"tensor {name!r} is a DTensor", where="weights", fix="Pass a Shard of its local rows.")
        whole = isinstance(tensor, torch.Tensor)
        t, shape, first = (
            (tensor, tuple(tensor.shape), 0) if whole else (tensor.local, tuple(tensor.shape), tensor.first_row)
        )
        if t.device.type == "meta" or not hasattr(t, "data_ptr"):
            raise WindfallError(f"tensor {name!r} has no values", where="weights", fix="Load the model first.")
        count, total = (s[0] if len(s) else 1 for s in (t.shape, shape))
        if t.dim() != len(shape) or t.shape[1:] != shape[1:] or not 0 <= first <= total - count:
            what = f"tensor {name!r}: a shard {list(t.shape)} at row {first} is not part of {list(shape)}"
            raise WindfallError(what, where="weights", fix="Pass shards of dimension 0.")
        published = dtype if dtype and t.is_floating_point() else str(t.dtype).removeprefix("torch.")
        identity = (t.data_ptr(), t.dtype, t.shape, t.stride(), t.device)
        storage = storages.setdefault(identity, len(storages)) if t.numel() else -1
        held = count if t.numel() else 0
        rows.append(Rows(name=name, dtype=published, shape=shape, storage=storage, first=first, count=held))
        values[name] = t.detach()
    return tuple(rows), values
