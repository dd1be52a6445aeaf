"""How wide the kernels of a training step are launched."""

from __future__ import annotations

import torch
from torch import Tensor


def programs(x: Tensor, rows: int, num_warps: int) -> int:
    """As many as run at once: a multiprocessor takes about 32 warps of what these kernels need."""
    if not x.is_cuda:  # interpreted
        return min(rows, 3)
    return min(rows, max(2, 32 // num_warps) * torch.cuda.get_device_properties(x.device).multi_processor_count)


def warps(block: int) -> int:
    """Of a program that has a row of so many elements."""
    return max(1, min(16, block // 512))
