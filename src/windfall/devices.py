"""Which device, dtype and matrix library a process uses, and a lock for allocating GPU memory. The functions import
torch when they are called."""

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

from windfall.errors import WindfallError

LOCK_TIMEOUT_S = 120.0
"""Seconds to wait until other processes have allocated their memory; then this process continues without the lock."""
DECODE_ROWS = 32
"""Rows of the measured matrix products: about the batch size of a small engine."""
MAX_MEASURED_SIZE = 512
"""Larger matrices are measured at this size, so that the measurement takes milliseconds for every model."""
MARGIN = 1.1
"""oneDNN is turned off if it takes this many times as long as BLAS: it is the default, and measurements are noisy."""


def resolve(device: str, dtype: str, threads: int) -> tuple[str, str]:
    """The device and the dtype, with "auto" replaced. Also sets the number of threads (0: unchanged)."""
    import torch

    if threads:
        torch.set_num_threads(threads)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise WindfallError("no CUDA device can be used", where="run.device", fix="Set it to 'cpu' or 'auto'.")
    if device == "cuda":
        # cuDNN's attention builds a new plan for every shape; continuous batching has a new shape at almost every step.
        torch.backends.cuda.enable_cudnn_sdp(False)
    return device, ("bfloat16" if device == "cuda" else "float32") if dtype == "auto" else dtype


def choose_matmul_library(model: Any, *, deterministic: bool) -> bool:
    """Let torch multiply matrices on this CPU with oneDNN or, where that is faster, with its BLAS library. Returns
    whether oneDNN is used. The setting applies to the whole process, to the engine and the trainer.

    The two libraries round differently. So a deterministic run does not measure, because its workers must agree bit for
    bit. It uses the library that was faster on every measured machine of this architecture (docs/engine.md)."""
    import torch

    if not torch.backends.mkldnn.is_available():
        return False
    if deterministic:
        used = platform.machine() not in ("aarch64", "arm64")
    else:
        shapes = {m.weight.shape for m in model.modules() if isinstance(m, torch.nn.Linear)}
        measured = {(min(a, MAX_MEASURED_SIZE), min(b, MAX_MEASURED_SIZE)) for a, b in shapes}
        used = _onednn_is_faster(frozenset(measured), model.dtype, torch.get_num_threads())
    torch.backends.mkldnn.enabled = used  # pyright: ignore[reportAttributeAccessIssue]
    return used


@cache
def _onednn_is_faster(shapes: frozenset[tuple[int, int]], dtype: Any, threads: int) -> bool:
    """Measure one linear layer of each shape (outputs, inputs). `threads` only identifies the cached result."""
    import torch

    del threads
    layers = [(torch.ones(DECODE_ROWS, b, dtype=dtype), torch.ones(a, b, dtype=dtype)) for a, b in shapes]
    took_s = {True: float("inf"), False: float("inf")}
    with torch.inference_mode():
        for attempt in range(4):
            for used in took_s:
                torch.backends.mkldnn.enabled = used  # pyright: ignore[reportAttributeAccessIssue]
                began_s = time.perf_counter()
                for x, weight in layers:
                    torch.nn.functional.linear(x, weight)
                if attempt:  # the first call of each library includes its initialization
                    took_s[used] = min(took_s[used], time.perf_counter() - began_s)
    return took_s[True] <= MARGIN * took_s[False]


def describe(device: str) -> str:
    """The name of the device for people, for example "NVIDIA H200"."""
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    return device


@contextlib.contextmanager
def gpu_memory_lock(device: str, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Exclude other processes of this user on this machine from the same section for the same GPU. Without the lock,
    several processes could measure the same free memory and each allocate a share of it. On a CPU this does nothing."""
    if device != "cuda":
        yield
        return
    import torch

    card = getattr(torch.cuda.get_device_properties(0), "uuid", 0)
    path = Path(tempfile.gettempdir()) / f"windfall-{os.getuid()}-{card}.lock"
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+") as file:
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    waited = f"waited {timeout_s:g} s for another worker to allocate its GPU memory ({path})"
                    print(f"{waited}; continuing without the lock", file=sys.stderr, flush=True)
                    break
                time.sleep(0.05)
        yield
