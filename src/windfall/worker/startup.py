"""The start of a worker process: the slow parts run in a thread while the worker connects to the controller.

    main thread    find the device (`detect_device`) ──▶ dial ──▶ Welcome ──▶ pull ───────────┐
    `Boot`         import torch and the engine ──▶ (Welcome) ──▶ build, warm ──▶ READY ◀┘

Rules:
- Only `prepare`, which runs in the thread, imports torch.
- If `detect_device` is not sure, it returns None and torch decides: a lease must not name a device that is not used.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import threading
from concurrent.futures import Future
from pathlib import Path

from windfall.errors import WindfallError
from windfall.link.messages import LoadTimes
from windfall.processes import process


class StartupThread:
    """Runs `prepare` in a thread, which starts immediately."""

    def __init__(self, device: str, threads: int, *, vllm: bool = False) -> None:
        """`vllm`: the engine will be vLLM's."""
        self._chosen: Future[str] = Future()
        self.took = LoadTimes()
        """How long the parts of the start took. The code that builds the engine adds to it."""
        self._thread = threading.Thread(target=self._run, args=(device, threads, vllm), name="startup", daemon=True)
        self._thread.start()

    def chosen_device(self) -> str:
        """Wait for the thread and return the device to use, or raise the error of `prepare`."""
        return self._chosen.result()

    def join(self) -> None:
        """Wait for the thread. A process that exits while a thread imports may crash."""
        self._thread.join()

    def _run(self, device: str, threads: int, vllm: bool) -> None:
        try:
            chosen = prepare(device, threads, vllm=vllm)
            self.took = LoadTimes(import_s=process.age_s())
            self._chosen.set_result(chosen)
        except BaseException as e:  # fault boundary: `chosen_device` raises it
            self._chosen.set_exception(e)


def prepare(device: str, threads: int, *, vllm: bool = False) -> str:
    """Do everything that is possible before the model is known. Returns the device, "cuda" or "cpu"."""
    from windfall import devices

    found, _ = devices.resolve(device, "auto", threads)
    if vllm:  # it initializes CUDA itself, in other processes if there are several ranks
        from windfall.engine.vllm import installed

        installed.prepare()
    elif found == "cuda":
        import torch

        torch.cuda.init()
        importlib.import_module("windfall.engine.cuda.engine")
        if importlib.util.find_spec("triton") is not None:
            importlib.import_module("windfall.engine.cuda.kernels")
    else:
        importlib.import_module("transformers.models.auto.modeling_auto")
        importlib.import_module("windfall.models.attention")
        importlib.import_module("windfall.engine.torch.engine")
    return found


def detect_device(device: str) -> tuple[str, str] | None:
    """("cuda" or "cpu", device name) as torch would report it, without importing torch. None if only torch can tell."""
    if device == "cpu":
        return "cpu", "cpu"
    spec = importlib.util.find_spec("torch")
    libraries = Path(spec.origin or "").parent / "lib" if spec else Path()
    if not libraries.is_dir():
        return None
    if not any(libraries.glob("*torch_cuda*")):
        return ("cpu", "cpu") if device == "auto" and not any(libraries.glob("*torch_hip*")) else None
    name = cuda_device_name()
    return None if name is None else ("cuda", name)


def cuda_device_name(driver: str = "libcuda.so.1") -> str | None:
    """The name of the first CUDA device according to the driver, or None if there is no device."""
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


def check_device(detected: tuple[str, str], chosen: str) -> None:
    """Raise unless torch uses the detected device, which the lease names."""
    if detected[0] != chosen:
        raise WindfallError(
            f"the driver reports {detected[1]}, but torch cannot use it",
            where="--device",
            fix="Install a torch that matches the driver, or use --device cpu.",
        )
