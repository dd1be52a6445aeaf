"""The state of a trainer that waits while another job trains on its device, in pinned memory of the machine instead of
the device's.

    awake ── sleep(): copy to pinned memory, free the device's ──▶ asleep ── wake(): allocate, copy back ──▶ awake

What sleeps is what only training needs: Adam's moments, float32 master weights and sums of gradients. The weights of
the model stay on the device, because the trainer's own engine generates with them.

Rules:
- the tensors stay the same objects; views of them follow. Their contents after `wake` are those before `sleep`, bit for
  bit;
- pinned memory is allocated by the first sleep and kept: allocating it takes far longer than the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from windfall.engine.module_weights import return_freed_memory

Tensors = Callable[[], Iterable[Tensor]]


class SleepingState:
    def __init__(self, tensors: Tensors) -> None:
        """`tensors` returns the state as it is now: Adam's moments exist only after the first update."""
        self._tensors = tensors
        self._asleep: list[tuple[torch.UntypedStorage, Tensor]] = []
        """The storages that have no memory now, each with its copy."""
        self._copies: list[Tensor] = []
        """Memory of the machine, to be used again."""

    @property
    def nbytes(self) -> int:
        """Bytes on the device while the state is awake."""
        return sum(copy.nbytes for _, copy in self._asleep) or sum(s.nbytes() for s in self._storages())

    @property
    def asleep(self) -> bool:
        return bool(self._asleep)

    def sleep(self) -> None:
        """Raises RuntimeError if there is not enough pinned memory. Then the state is awake, as before."""
        if self._asleep:
            return
        storages, kept, copies = self._storages(), list(self._copies), []
        for storage in storages:
            fitting = next((i for i, copy in enumerate(kept) if copy.nbytes == storage.nbytes()), None)
            copies.append(_room(storage) if fitting is None else kept.pop(fitting))
        for storage, copy in zip(storages, copies, strict=True):
            copy.copy_(_bytes(storage), non_blocking=True)
        _wait_for_copies(storages)
        for storage in storages:
            storage.resize_(0)
        self._asleep, self._copies = list(zip(storages, copies, strict=True)), kept
        return_freed_memory(on_gpu=_on_gpu(storages))

    def wake(self) -> None:
        """Raises torch.OutOfMemoryError if the device has no room. Then the state is asleep, as before."""
        if not self._asleep:
            return
        try:
            for storage, copy in self._asleep:
                storage.resize_(copy.nbytes)
        except torch.OutOfMemoryError:
            for storage, _ in self._asleep:
                storage.resize_(0)
            raise
        for storage, copy in self._asleep:
            _bytes(storage).copy_(copy, non_blocking=True)
        _wait_for_copies([storage for storage, _ in self._asleep])
        self._copies += [copy for _, copy in self._asleep]
        self._asleep = []

    def _storages(self) -> list[torch.UntypedStorage]:
        found = {s.data_ptr(): s for t in self._tensors() if (s := t.untyped_storage()).nbytes()}
        return list(found.values())


def _room(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # pyright: ignore[reportArgumentType]


def _on_gpu(storages: Iterable[torch.UntypedStorage]) -> bool:
    return any(s.device.type == "cuda" for s in storages)


def _wait_for_copies(storages: Iterable[torch.UntypedStorage]) -> None:
    if _on_gpu(storages):
        torch.cuda.synchronize()
