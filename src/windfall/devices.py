"""Which device and which numbers a process works with, how much memory is free, and whose turn it is to take some.
Imports torch when called."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from windfall import free_memory
from windfall.errors import WindfallError

TURN_S = 120.0
"""Others have so long to take their memory; then this process goes on all the same."""
DECODE_ROWS = 32
"""Rows of a matrix product that is measured: about what a small engine decodes at once."""
LARGEST_SIDE = 512
"""Larger matrices are measured at this size, so that measuring takes milliseconds whatever the model."""
MARGIN = 1.1
"""oneDNN is turned off if it takes this much longer: it is torch's default, and a measurement is never exact."""


def place(device: str, dtype: str, threads: int) -> tuple[str, str]:
    """Device and dtype where "auto" was asked for; the number of threads is set (0: left as it is)."""
    import torch

    if threads:
        torch.set_num_threads(threads)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise WindfallError("no CUDA device can be used", where="run.device", fix="Set it to 'cpu' or 'auto'.")
    if device == "cuda":
        # cuDNN's attention plans anew for every shape; continuous batching has a new shape at almost every step.
        torch.backends.cuda.enable_cudnn_sdp(False)
    return device, ("bfloat16" if device == "cuda" else "float32") if dtype == "auto" else dtype


def choose_linear(model: Any, *, deterministic: bool) -> bool:
    """Let torch multiply matrices on this CPU with oneDNN or, where that is faster, with its BLAS library. Returns
    whether oneDNN is used. It is a setting of the whole process, for engine and trainer alike.

    The two round differently. So a deterministic run does not measure: its workers must agree, bit for bit. It takes
    what is faster on every machine of the architecture that was measured (docs/engine.md)."""
    import torch

    if not torch.backends.mkldnn.is_available():
        return False
    if deterministic:
        used = platform.machine() not in ("aarch64", "arm64")
    else:
        sides = {m.weight.shape for m in model.modules() if isinstance(m, torch.nn.Linear)}
        smaller = {(min(a, LARGEST_SIDE), min(b, LARGEST_SIDE)) for a, b in sides}
        used = _onednn_is_faster(frozenset(smaller), model.dtype, torch.get_num_threads())
    torch.backends.mkldnn.enabled = used  # pyright: ignore[reportAttributeAccessIssue]
    return used


@cache
def _onednn_is_faster(sides: frozenset[tuple[int, int]], dtype: Any, threads: int) -> bool:
    """For one linear layer of each (outputs, inputs). `threads` is what torch is set to."""
    import torch

    del threads
    layers = [(torch.ones(DECODE_ROWS, b, dtype=dtype), torch.ones(a, b, dtype=dtype)) for a, b in sides]
    took_s = {True: float("inf"), False: float("inf")}
    with torch.inference_mode():
        for attempt in range(4):
            for used in took_s:
                torch.backends.mkldnn.enabled = used  # pyright: ignore[reportAttributeAccessIssue]
                began_s = time.perf_counter()
                for x, weight in layers:
                    torch.nn.functional.linear(x, weight)
                if attempt:  # the first call of each also prepares
                    took_s[used] = min(took_s[used], time.perf_counter() - began_s)
    return took_s[True] <= MARGIN * took_s[False]


def describe(device: str) -> str:
    """What a person calls it."""
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    return device


def free_bytes(device: Any) -> int:
    """Memory that this process may still take on a device ("cpu", "cuda" or a torch.device). Of a GPU: what its driver
    has left, and what this process holds there and does not use. Else see free_memory.py."""
    if str(device).startswith("cuda"):
        import torch

        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held
    return free_memory.free_bytes()


@contextlib.contextmanager
def turn(device: str, timeout_s: float = TURN_S) -> Iterator[None]:
    """While in it, no other process of this user on this machine is, for the same GPU: several that look at once how
    much is free would each take their part of the same memory. On a CPU: nothing."""
    if device != "cuda":
        yield
        return
    import torch

    card = getattr(torch.cuda.get_device_properties(0), "uuid", 0)
    path = Path(tempfile.gettempdir()) / f"windfall-{os.getuid()}-{card}.lock"
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+") as file:
        late_s = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > late_s:
                    said = f"waited {timeout_s:g} s for another worker to take its memory ({path}); going on"
                    print(said, file=sys.stderr, flush=True)
                    break
                time.sleep(0.05)
        yield
