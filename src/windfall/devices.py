"""Which device and which numbers a process works with, and how much memory is free. Imports torch when called."""

from __future__ import annotations

import os
from pathlib import Path

from windfall.errors import WindfallError


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


def describe(device: str) -> str:
    """What a person calls it."""
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    return device


def free_bytes(device: str) -> int:
    """What Linux says is available; elsewhere, half of what there is."""
    if device == "cuda":
        import torch

        return torch.cuda.mem_get_info()[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        found = [line.split()[1] for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:")]
        if found:
            return int(found[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
