"""The state of a trainer that waits while another job trains on its device: out of the device's memory, and back.

    awake ── sleep(): copy elsewhere, free the device's memory ──▶ asleep ── wake(): allocate, copy back ──▶ awake

What sleeps is what only training needs: Adam's moments, float32 master weights and sums of gradients. The weights of
the model stay on the device, because the trainer's own engine generates with them.

Rules:
- the tensors stay the same objects; views of them follow. Their contents after `wake` are those before `sleep`, bit for
  bit;
- copies are in pinned memory of the machine, if it has enough free memory, otherwise in a file (turns/residence.py);
- pinned memory is allocated by the first sleep and kept: allocating it takes far longer than the copy. A file has no
  name, so nothing is left of it when the process ends, however it ends.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import BufferedRandom
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor

from windfall import free_memory
from windfall.engine.module_weights import return_freed_memory
from windfall.turns import residence

Tensors = Callable[[], Iterable[Tensor]]
Storages = Sequence[torch.UntypedStorage]
CHUNK_BYTES = 64 << 20
"""Bytes that are copied at once between a device and a file."""


class SleepingState:
    def __init__(
        self, tensors: Tensors, folder: Path | None = None, *, lent_bytes: Callable[[], int] = lambda: 0
    ) -> None:
        """`tensors` returns the state as it is now: Adam's moments exist only after the first update. `folder`: for
        files; by default, that of temporary files. `lent_bytes`: memory of the device that this process has freed until
        its next rollout turn."""
        self._tensors = tensors
        self._folder = folder or Path(tempfile.gettempdir())
        self._lent_bytes = lent_bytes
        self._asleep: list[tuple[torch.UntypedStorage, int]] = []
        """The storages that have no memory now, each with its bytes."""
        self._memory, self._file = _Memory(), _File()
        self._copies: _Copies = self._memory
        """Where they are."""
        self.expected_bytes = 0
        """What it will need once all its tensors exist."""

    @property
    def nbytes(self) -> int:
        """Bytes on the device that it needs while it is awake."""
        return max(self.expected_bytes, sum(n for _, n in self._asleep) or sum(s.nbytes() for s in self._storages()))

    @property
    def awake(self) -> bool:
        """Whether it has memory of the device."""
        return bool(not self._asleep and self._storages())

    @property
    def asleep(self) -> bool:
        return bool(self._asleep)

    def room(self) -> tuple[int, int]:
        """Free bytes of the device, and how many of them are only lent; (0, 0) on a CPU. If this process keeps more
        unused memory than is free, it returns that to the device."""
        storages, lent = self._storages(), self._lent_bytes()
        if not _on_gpu(storages):
            return 0, 0
        device = storages[0].device
        try:
            free = torch.cuda.mem_get_info(device)[0]
            if free_memory.free_bytes(device) - free > free - lent:
                return_freed_memory(on_gpu=True)
                free = torch.cuda.mem_get_info(device)[0]
        except RuntimeError:  # the device has failed; the caller learns of it in another way
            return 0, 0
        return free, lent

    def sleep(self) -> None:
        """Raises RuntimeError if there is no room for the copies. Then the state is awake, as before."""
        if self._asleep:
            return
        storages = self._storages()
        copies = self._save(storages)
        self._asleep = [(storage, storage.nbytes()) for storage in storages]
        for storage in storages:
            storage.resize_(0)
        self._copies = copies
        return_freed_memory(on_gpu=_on_gpu(storages))

    def wake(self) -> bool:
        """Returns whether it was asleep. Raises torch.OutOfMemoryError if the device has no room. Then the state is
        asleep, as before."""
        if not self._asleep:
            return False
        storages = [storage for storage, _ in self._asleep]
        try:
            for storage, nbytes in self._asleep:
                storage.resize_(nbytes)
            self._copies.load(storages)
        except (torch.OutOfMemoryError, OSError):
            for storage in storages:
                storage.resize_(0)
            raise
        self._asleep = []
        return True

    def _save(self, storages: Storages) -> _Copies:
        """Copy the storages to where there is room."""
        new, free = self._memory.new_bytes(storages), free_memory.free_bytes()
        disk, total = shutil.disk_usage(self._folder).free, sum(s.nbytes() for s in storages)
        where, why = residence.place_of_copies(total, new, memory_free=free, disk_free=disk), ""
        if where == "memory":
            try:
                self._memory.save(storages)
                return self._memory
            except RuntimeError as e:  # the machine has less pinned memory
                why = f" ({e})"
                where = residence.place_of_copies(total, new, memory_free=0, disk_free=disk)
        if where == "disk":
            try:
                self._file.save(storages, self._folder)
                return self._file
            except OSError as e:
                self._file.clear()
                why += f" ({e})"
        raise RuntimeError(
            f"no room for {total / 1e9:.1f} GB: {free / 1e9:.1f} GB of the machine's memory are free, and "
            f"{disk / 1e9:.1f} GB in {self._folder}{why}"
        )

    def _storages(self) -> list[torch.UntypedStorage]:
        found = {s.data_ptr(): s for t in self._tensors() if (s := t.untyped_storage()).nbytes()}
        return list(found.values())


class _Copies(Protocol):
    def load(self, storages: Storages) -> None:
        """Fill these storages with what was saved of them, in the same order."""
        ...


class _Memory:
    """Copies in memory of the machine, which is kept to be used again."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._saved: list[Tensor] = []

    def new_bytes(self, storages: Storages) -> int:
        """Bytes that `save` would have to allocate."""
        return sum(s.nbytes() for s, copy in zip(storages, self._fitting(storages), strict=True) if copy is None)

    def save(self, storages: Storages) -> None:
        """Raises RuntimeError if there is not enough memory."""
        copies = [
            _pinned(s) if kept is None else kept for s, kept in zip(storages, self._fitting(storages), strict=True)
        ]
        for storage, copy in zip(storages, copies, strict=True):
            copy.copy_(_bytes(storage), non_blocking=True)
        _wait_for_copies(storages)
        used = {id(copy) for copy in copies}
        self._saved, self._kept = copies, [copy for copy in self._kept if id(copy) not in used]

    def load(self, storages: Storages) -> None:
        for storage, copy in zip(storages, self._saved, strict=True):
            _bytes(storage).copy_(copy, non_blocking=True)
        _wait_for_copies(storages)
        self._kept, self._saved = self._kept + self._saved, []

    def _fitting(self, storages: Storages) -> Iterator[Tensor | None]:
        """For each storage, kept memory of its size."""
        kept = list(self._kept)
        for storage in storages:
            fits = next((i for i, copy in enumerate(kept) if copy.nbytes == storage.nbytes()), None)
            yield None if fits is None else kept.pop(fits)


class _File:
    """Copies in a file without a name."""

    def __init__(self) -> None:
        self._open: BufferedRandom | None = None

    def save(self, storages: Storages, folder: Path) -> None:
        """Raises OSError if the disk is full."""
        self._open = cast(BufferedRandom, tempfile.TemporaryFile(dir=folder))  # noqa: SIM115 (open until `clear`)
        os.posix_fallocate(self._open.fileno(), 0, sum(s.nbytes() for s in storages))
        for part, buffer in _parts(storages):
            buffer.copy_(part)
            self._open.write(buffer.numpy().data)
        self._open.flush()

    def load(self, storages: Storages) -> None:
        assert self._open is not None, "only what was saved is loaded"
        self._open.seek(0)
        for part, buffer in _parts(storages):
            if self._open.readinto(buffer.numpy().data) != buffer.nbytes:
                raise OSError("the copy of the trainer's state ends early")
            part.copy_(buffer)
        self.clear()

    def clear(self) -> None:
        if self._open is not None:
            self._open.close()
        self._open = None


def _parts(storages: Storages) -> Iterator[tuple[Tensor, Tensor]]:
    """All bytes in parts, each with a buffer of its size in memory of the machine."""
    buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=_on_gpu(storages))
    for storage in storages:
        for part in _bytes(storage).split(CHUNK_BYTES):
            yield part, buffer[: part.numel()]


def _pinned(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # pyright: ignore[reportArgumentType]


def _on_gpu(storages: Iterable[torch.UntypedStorage]) -> bool:
    return any(s.device.type == "cuda" for s in storages)


def _wait_for_copies(storages: Iterable[torch.UntypedStorage]) -> None:
    if _on_gpu(storages):
        torch.cuda.synchronize()
