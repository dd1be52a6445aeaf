# pyright: reportMissingImports=false
"""How the kernels of the GPU engine are launched.

From compute capability 9.0 on, a kernel may be put on the device while the one before it is still coming to its end;
it then waits, first of all, until everything before it is done and visible (`EARLY`). That takes the time of a launch
out of every kernel of a captured step, and changes nothing else.

Tiles were chosen on a card with 227 KiB of shared memory for a block. Others have 99 (L4, L40S, cards for desktops)
or 163 (A100): there they are made smaller until they fit.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from windfall.engine.cuda import splits


@cache
def options() -> dict[str, Any]:
    """What every kernel is launched with."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}


@cache
def shared_bytes() -> int:
    """Shared memory that one block may have."""
    if not torch.cuda.is_available():
        return 1 << 30
    from triton.runtime import driver

    return int(driver.active.utils.get_device_properties(torch.cuda.current_device())["max_shared_mem"])


def fitted(block: int, stages: int, *, tile: int, head: int, itemsize: int) -> tuple[int, int]:
    """(keys of a block, stages) that fit on this device."""
    return splits.fitted(block, stages, tile=tile, head=head, itemsize=itemsize, most_bytes=shared_bytes())
