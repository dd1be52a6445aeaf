"""Which device, dtype and matrix library a process uses, and a lock for allocating GPU memory. The functions import
torch when they are called.

A process uses at most one GPU, the first that it sees. Its device is therefore always "cuda", and no other code handles
device numbers. A process that a run starts sees only its own GPU (CUDA_VISIBLE_DEVICES), so no thread or library can
allocate on another one by mistake. (A vLLM engine that spans GPUs has one process for each.) CUDA reads the variable
when it is initialized, so it must be set before that: by the process that starts this one (`Place`), or by `restrict`.
A process that was forked from the fork server can still set it, because CUDA is not initialized there.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from windfall.errors import WindfallError

LOCK_TIMEOUT_S = 120.0
"""Seconds to wait until other processes have allocated their memory; then this process continues without the lock."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
_restricted_to: str | None = None
"""The device to which `restrict` has restricted this process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a process that is to be started will compute: on the CPU, or on the only GPU that it will see."""

    device: str = "cpu"
    gpu: str = ""
    """The GPU as CUDA_VISIBLE_DEVICES names it: its number or its UUID."""
    name: str = ""
    """The name of a device that several runs share, by turns. Empty: this run has it for itself."""

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        return {**base, VISIBLE: self.gpu} if self.gpu else dict(base)


def gpu_places(device: str, environment: Mapping[str, str] | None = None, installed: int | None = None) -> list[Place]:
    """The GPUs that processes on this machine may use if `device` is "auto", "cuda" or "cuda:N". Empty on a CPU, and if
    the number of GPUs is unknown.

    >>> [p.gpu for p in gpu_places("auto", {}, installed=3)]
    ['0', '1', '2']
    >>> [p.gpu for p in gpu_places("cuda:1", {"CUDA_VISIBLE_DEVICES": "5,2"}, installed=8)]
    ['2']
    """
    if device == "cpu":
        return []
    gpus = visible_gpus(os.environ if environment is None else environment, installed)
    if device.startswith("cuda:") and gpus:
        gpus = [gpus[_index(device, len(gpus))]]
    return [Place(device="cuda", gpu=gpu) for gpu in gpus]


def visible_gpus(environment: Mapping[str, str], installed: int | None = None) -> list[str]:
    """Names of the GPUs that a process with these environment variables sees, in CUDA's order.

    >>> visible_gpus({"CUDA_VISIBLE_DEVICES": "2,0,9,1"}, installed=4)  # CUDA ignores what follows an invalid entry
    ['2', '0']
    """
    installed = count_gpus() if installed is None else installed
    listed = environment.get(VISIBLE)
    if listed is None or not installed:
        return [str(n) for n in range(installed)]
    out: list[str] = []
    for entry in map(str.strip, listed.split(",")):
        if not entry.startswith(("GPU-", "MIG-")) and not (entry.isdecimal() and int(entry) < installed):
            break
        out.append(entry)
    return out


def count_gpus(library: str = "libnvidia-ml.so.1") -> int:
    """Number of GPUs of this machine according to NVML, which does not initialize CUDA. 0 if there is no NVML."""
    try:
        nvml, count = ctypes.CDLL(library), ctypes.c_uint()
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return 0
    except (OSError, AttributeError):
        return 0
    return count.value


def restrict(device: str) -> str:
    """Let this process see only the GPU N if the device is "cuda:N", and return "cuda"; other devices are returned
    unchanged. Call it before CUDA is initialized. The processes that this one starts see only that GPU, too."""
    global _restricted_to
    if not device.startswith("cuda:"):
        return device
    if device != _restricted_to:
        torch = sys.modules.get("torch")
        assert _restricted_to is None, f"this process uses {_restricted_to}"
        assert torch is None or not torch.cuda.is_initialized(), "CUDA has been initialized with all GPUs"
        gpus = visible_gpus(os.environ)
        os.environ[VISIBLE] = gpus[_index(device, len(gpus))]
        _restricted_to = device
    return "cuda"


def _index(device: str, count: int) -> int:
    index = int(device.removeprefix("cuda:"))
    if index >= count:
        what = f"there is no {device}: this process sees {count} GPUs"
        fix = f"Use cuda:0 to cuda:{count - 1}." if count else "Set it to 'cpu' or 'auto'."
        raise WindfallError(what, where="run.device", fix=fix)
    return index


def check_available(device: str) -> None:
    """Raise WindfallError unless torch can use this device. Changes nothing, unlike `resolve`."""
    import torch

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise WindfallError("no CUDA device can be used", where="run.device", fix="Set it to 'cpu' or 'auto'.")
    if device.startswith("cuda:"):
        _index(device, torch.cuda.device_count())


def resolve(device: str, dtype: str, threads: int) -> tuple[str, str]:
    """The device ("cuda" or "cpu") and the dtype, with "auto" replaced. Also sets the number of threads (0: unchanged),
    and restricts the process to one GPU if the device is "cuda:N"."""
    device = restrict(device)
    import torch

    if threads:
        torch.set_num_threads(threads)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    check_available(device)
    if device == "cuda":
        # cuDNN's attention builds a new plan for every shape; continuous batching has a new shape at almost every step.
        torch.backends.cuda.enable_cudnn_sdp(False)
    return device, ("bfloat16" if device == "cuda" else "float32") if dtype == "auto" else dtype


def choose_matmul_library() -> bool:
    """Let torch multiply matrices on this CPU with oneDNN or with its BLAS library, whichever was faster on
    machines of this architecture (docs/engine.md). Returns whether oneDNN is used. The setting applies to the whole
    process. The two libraries round differently, so all processes of a run must make the same choice."""
    import torch

    if not torch.backends.mkldnn.is_available():
        return False
    used = platform.machine() not in ("aarch64", "arm64")
    torch.backends.mkldnn.enabled = used  # pyright: ignore[reportAttributeAccessIssue]
    return used


def describe(device: str, count: int = 1) -> str:
    """The name of the device, or of `count` equal ones, for people and for controller/cost/prices.py.

    >>> describe("cpu"), describe("cpu", 2)
    ('cpu', '2x cpu')
    """
    name = cuda_device_name() or device if device == "cuda" else device
    return name if count == 1 else f"{count}x {name}"


def cuda_device_name(driver: str = "libcuda.so.1") -> str | None:
    """The name of the first CUDA device according to the driver, or None if there is no device. Unlike torch's function
    of this kind, it does not allocate memory on the device."""
    try:
        cuda = ctypes.CDLL(driver)
        device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
        if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0):
            return None
        if cuda.cuDeviceGetName(name, len(name), device):
            return None
    except (OSError, AttributeError):
        return None
    return name.value.decode(errors="replace")


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
