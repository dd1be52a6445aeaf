"""The memory of a module's weights, which can be given back to the device and taken again.

The tensors stay the same objects: their storage is resized to nothing and back. Views of it, such as joined weights,
follow. The contents are lost, and addresses may change: swap the weights afterwards, as the engines' `swap` does.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import torch


class WeightMemory:
    def __init__(self, model: Any) -> None:
        """Take all weights of the module's state dict. No weight may get other storage from now on."""
        storages = [tensor.untyped_storage() for tensor in model.state_dict().values()]
        self._storages = {s.data_ptr(): s for s in storages if s.nbytes()}  # tied and joined weights share one
        self._sizes = {address: s.nbytes() for address, s in self._storages.items()}
        self._on_gpu = any(s.device.type == "cuda" for s in storages)
        self.freed = False

    @property
    def nbytes(self) -> int:
        return sum(self._sizes.values())

    def free(self) -> None:
        for storage in self._storages.values():
            storage.resize_(0)
        self.freed = True
        if self._on_gpu:
            torch.cuda.empty_cache()
        else:
            with contextlib.suppress(AttributeError):  # not glibc, which would keep the pages for later
                ctypes.CDLL(None).malloc_trim(0)

    def allocate(self) -> None:
        """Allocate the memory, uninitialized, unless it is allocated already."""
        if self.freed:
            for address, storage in self._storages.items():
                storage.resize_(self._sizes[address])
            self.freed = False
