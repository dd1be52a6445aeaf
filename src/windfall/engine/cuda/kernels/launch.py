# pyright: reportMissingImports=false
"""How the kernels of the GPU engine are launched.

From compute capability 9.0 on, a kernel can be launched while the previous one is still finishing (programmatic
dependent launch, `PDL`). The kernel first waits until everything before it is done and visible. That hides the launch
latency of every kernel of a captured step, and changes nothing else.

Tile sizes were chosen on a GPU with 227 KiB of shared memory per block. Other GPUs have 99 KiB (L4, L40S, desktop
cards) or 163 KiB (A100): there the tiles shrink until they fit.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton.language as tl

from windfall.engine.cuda import splits


@cache
def options() -> dict[str, Any]:
    """Launch options of every kernel."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


ELEMENT_TYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float8_e4m3fn: tl.float8e4nv,
}


def kv_types(dtype: torch.dtype, kv_dtype: torch.dtype) -> dict[str, Any]:
    """The types in which attention reads keys and values, and in which it multiplies them. GPUs convert fp8 to float16
    in one instruction, but to bfloat16 in many; and float16 holds every fp8 value exactly."""
    narrow = kv_dtype.itemsize == 1
    return {"KV": ELEMENT_TYPES[kv_dtype], "COMPUTE": tl.float16 if narrow else ELEMENT_TYPES[dtype]}


@cache
def shared_bytes() -> int:
    """Upper limit for the shared memory of one block, in bytes."""
    if not torch.cuda.is_available():
        return 1 << 30
    from triton.runtime import driver

    return int(driver.active.utils.get_device_properties(torch.cuda.current_device())["max_shared_mem"])


def fit_tiling(block: int, stages: int, *, tile: int, head: int, itemsize: int) -> tuple[int, int]:
    """(keys of a block, stages) that fit on this device."""
    return splits.fit_tiling(block, stages, tile=tile, head=head, itemsize=itemsize, max_bytes=shared_bytes())
