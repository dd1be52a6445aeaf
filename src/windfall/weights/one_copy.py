"""Many small tensors, copied to another device in one transfer.

Each copy between a GPU and the host takes tens of microseconds, and waits for the work that other processes do on the
same GPU. An adapter has two matrices per layer, hundreds in all, so copied one by one they take longer than a pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ALIGNED = 16
"""Every tensor starts at a multiple of this number of bytes, as kernels expect."""


def copy_together(
    tensors: Sequence[torch.Tensor], device: torch.device | str, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """Contiguous copies of the tensors on this device, in this dtype if one is given. Those of one dtype share their
    memory: it is freed with the last of them.

    >>> import torch
    >>> a, b = copy_together([torch.ones(2, 3), torch.arange(2)], "cpu")
    >>> a.shape, b.tolist(), a.data_ptr() % 16
    (torch.Size([2, 3]), [0, 1], 0)
    """
    import torch

    out: dict[int, torch.Tensor] = {}
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for n, t in enumerate(tensors):
        groups.setdefault((dtype or t.dtype, t.device), []).append(n)
    for (kind, origin), members in groups.items():
        step = max(1, ALIGNED // kind.itemsize)
        sizes = [math.ceil(tensors[n].numel() / step) * step for n in members]
        flat = torch.empty(sum(sizes), dtype=kind, device=origin)
        for n, part in zip(members, flat.split(sizes), strict=True):
            part[: tensors[n].numel()].view(tensors[n].shape).copy_(tensors[n].detach())
        for n, part in zip(members, flat.to(device).split(sizes), strict=True):
            out[n] = part[: tensors[n].numel()].view(tensors[n].shape)
    return [out[n] for n in range(len(tensors))]
