# pyright: reportMissingImports=false
"""How the kernels of the GPU engine are launched.

From compute capability 9.0 on, a kernel may be put on the device while the one before it is still coming to its end;
it then waits, first of all, until everything before it is done and visible (`EARLY`). That takes the time of a launch
out of every kernel of a captured step, and changes nothing else.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


@cache
def options() -> dict[str, Any]:
    """What every kernel is launched with."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}
