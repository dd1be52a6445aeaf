"""Launch sizes of the training kernels."""

from __future__ import annotations

import torch
from torch import Tensor


def programs(x: Tensor, rows: int, num_warps: int) -> int:
    """The number of programs that run at once: a multiprocessor has room for about 32 warps of these kernels."""
    if not x.is_cuda:  # the Triton interpreter
        return min(rows, 3)
    return min(rows, max(2, 32 // num_warps) * torch.cuda.get_device_properties(x.device).multi_processor_count)


def warps(block: int) -> int:
    """The number of warps of a program for a row of `block` elements."""
    return max(1, min(16, block // 512))
