"""The weights of a model twice: in host memory, always whole, and in device memory while the model is active.

    load: new weights ──▶ host memory          activate: host memory ──▶ device memory, one copy

A model that does not run takes no device memory, and becomes active as fast as the bus copies. Both sides have the same
layout: every tensor at the same offset of one range of bytes. The device's range never moves, so graphs that were
captured with it stay valid while the model is inactive.

Rules:
- `load` changes host memory only, and all of it or nothing if the weights do not fit the model. Until it has ended, and
  after any other error, there is nothing to activate (`loaded`);
- `load` and `activate` may be called from several threads: one waits for the other;
- `activate` copies on a stream of its own, in the calling thread, and returns when the copy is complete. Other work on
  the device goes on; the model must not run meanwhile;
- host memory is page-locked on a machine with a GPU: otherwise the copy would be several times slower.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from windfall.engine.cuda.skeleton import ModelSkeleton
from windfall.engine.module_weights import copy_weights
from windfall.errors import WindfallError

ALIGN = 512
"""Bytes. Every tensor starts at a multiple of it, like an allocation of its own."""
PART = 256 << 20
"""Bytes that one copy transfers, in a few milliseconds: other copies come between two of them."""


class _Carver:
    """Makes tensors that lie one after another in a range of bytes. Without a range it only counts."""

    def __init__(self, dtype: torch.dtype, memory: Tensor | None = None) -> None:
        self._dtype = dtype
        self._memory = memory
        self.used = 0

    def __call__(self, shape: tuple[int, ...]) -> Tensor:
        start, size = self.used, torch.Size(shape).numel() * self._dtype.itemsize
        self.used += -(-size // ALIGN) * ALIGN
        if self._memory is None:
            return torch.empty(shape, dtype=self._dtype, device="meta")
        return self._memory[start : start + size].view(self._dtype).view(shape)


def weight_bytes(config: Mapping[str, Any], dtype: torch.dtype) -> int:
    """Bytes that all weights of this model take."""
    carver = _Carver(dtype)
    ModelSkeleton(config, dtype=dtype, device="cpu", empty=carver)
    return carver.used


class ReadyWeights:
    def __init__(self, config: Mapping[str, Any], *, dtype: torch.dtype, device: str) -> None:
        self.nbytes = weight_bytes(config, dtype)
        self._device = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        self._host = torch.empty(self.nbytes, dtype=torch.uint8)
        if self._device.is_cuda:
            lock_pages(self._host)
        self.model = ModelSkeleton(config, dtype=dtype, device=device, empty=_Carver(dtype, self._device))
        self._in_host = ModelSkeleton(config, dtype=dtype, device="cpu", empty=_Carver(dtype, self._host))
        self.loaded = False
        """Whether host memory holds weights, all of one version."""
        self._lock = threading.Lock()
        self.activation_s = 0.0
        """How long the last activation took (seconds)."""

    def load(self, version: int, weights: Mapping[str, Any]) -> None:
        with self._lock:
            before = self.loaded
            self.loaded = False
            try:
                copy_weights(self._in_host, version, weights)
            except WindfallError:  # nothing has changed
                self.loaded = before
                raise
            self.loaded = True

    def activate(self) -> None:
        with self._lock:
            self._copy()

    @torch.no_grad()
    def _copy(self) -> None:
        began_s = time.monotonic()
        cuda = self._device.is_cuda
        stream = torch.cuda.Stream(self._device.device) if cuda else None
        with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
            if stream is not None:  # what was there before may still be read or cleared
                stream.wait_stream(torch.cuda.default_stream(self._device.device))
            for start in range(0, self.nbytes, PART):
                self._device[start : start + PART].copy_(self._host[start : start + PART], non_blocking=True)
                if stream is not None:
                    stream.synchronize()
        self.activation_s = time.monotonic() - began_s


def lock_pages(memory: Tensor) -> None:
    """Lock the pages of a tensor until it is freed. `pin_memory` would round its size up to a power of two."""
    cudart: Any = torch.cuda.cudart()
    address = memory.data_ptr()
    if int(cudart.cudaHostRegister(address, memory.nbytes, 1)):
        print("host memory cannot be page-locked: copies to the GPU are slower", file=sys.stderr, flush=True)
        return
    weakref.finalize(memory, cudart.cudaHostUnregister, address)
