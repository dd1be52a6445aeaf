"""The start of a worker's process: what takes seconds goes on in a thread while a controller is dialled.

    main thread    find the device (`glance`) ──▶ dial ──▶ Welcome ──▶ pull ───────────┐
    `Boot`         import torch and the engine ──▶ (Welcome) ──▶ build, warm ──▶ READY ◀┘

Rules:
- nothing here imports torch but `prepare`, which runs in the thread;
- what a `glance` cannot tell for sure it leaves to torch (None): a lease must not name a device that is not used.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import importlib.util
import threading
import time
from pathlib import Path

from windfall.errors import WindfallError
from windfall.fleet import process
from windfall.link.messages import LoadTimes
from windfall.worker.engine_thread import EngineThread

BUILD_S = 900.0
"""For the engine to be built, kernels compiled and graphs captured, after the weights are here."""
LOOK_S = 0.01


class Boot:
    """`prepare`, in a thread from now on."""

    def __init__(self, device: str, threads: int) -> None:
        self._device, self._threads = device, threads
        self._found: str | None = None
        self._failed: BaseException | None = None
        self.took = LoadTimes()
        """What is known so far of how long things took. Whoever builds the engine adds to it."""
        self._thread = threading.Thread(target=self._run, name="boot", daemon=True)
        self._thread.start()

    def found(self) -> str:
        """Waits. The device to be used; or raises what the preparations raised."""
        self._thread.join()
        if self._failed is not None:
            raise self._failed
        assert self._found is not None
        return self._found

    def over(self) -> None:
        """Waits. A process that ends while a thread imports may crash."""
        self._thread.join()

    def _run(self) -> None:
        try:
            self._found = prepare(self._device, self._threads)
            self.took = LoadTimes(import_s=process.age_s())
        except BaseException as e:  # fault boundary: whoever needs the result is told, and nobody else would be
            self._failed = e


def prepare(device: str, threads: int) -> str:
    """Everything that can be had before the model is known. The device, "cuda" or "cpu"."""
    from windfall import devices

    found, _ = devices.resolve(device, "auto", threads)
    if found == "cuda":
        import torch

        torch.cuda.init()
        importlib.import_module("windfall.engine.cuda.engine")
        if importlib.util.find_spec("triton") is not None:
            importlib.import_module("windfall.engine.cuda.kernels")
    else:
        for name in (
            "transformers.models.auto.modeling_auto",
            "windfall.engine.torch.attention",
            "windfall.engine.torch.engine",
        ):
            importlib.import_module(name)
    return found


async def built(host: EngineThread, give_up: threading.Event) -> None:
    """Until the engine is there, or nobody needs it. Not an order to the host: that could not be taken back, and the
    tensors of a swap are in a buffer that the next pull writes to."""
    until_s = time.monotonic() + BUILD_S
    while not host.built and not give_up.is_set():
        if time.monotonic() > until_s:
            raise TimeoutError(f"waited {BUILD_S:g} s for the engine to be built")
        await asyncio.sleep(LOOK_S)


def glance(device: str) -> tuple[str, str] | None:
    """("cuda" or "cpu", its name) as torch would say, without torch. None: torch must be asked."""
    if device == "cpu":
        return "cpu", "cpu"
    spec = importlib.util.find_spec("torch")
    libraries = Path(spec.origin or "").parent / "lib" if spec else Path()
    if not libraries.is_dir():
        return None
    if not any(libraries.glob("*torch_cuda*")):
        return ("cpu", "cpu") if device == "auto" and not any(libraries.glob("*torch_hip*")) else None
    name = card()
    return None if name is None else ("cuda", name)


def card(driver: str = "libcuda.so.1") -> str | None:
    """The name of the first device that CUDA would use here, from its driver; None if there is none."""
    try:
        cuda = ctypes.CDLL(driver)
        found, name = ctypes.c_int(), ctypes.create_string_buffer(256)
        if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(found), 0):
            return None
        if cuda.cuDeviceGetName(name, len(name), found):
            return None
    except (OSError, AttributeError):
        return None
    return name.value.decode(errors="replace")


def agree(glanced: tuple[str, str], found: str) -> None:
    """Raise if torch does not use what the lease says."""
    if glanced[0] != found:
        raise WindfallError(
            f"the driver shows {glanced[1]}, but torch cannot use it", where="--device",
            fix="Install a torch that fits the driver, or give --device cpu.",
        )  # fmt: skip
