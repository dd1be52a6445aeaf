"""Weights that several processes of one machine read from one buffer: the ranks of a tensor-parallel engine.

The worker pulls a version into a buffer without a name (weights/buffers.py). Every rank maps that buffer through
/proc/PID/fd and copies its own shard to its GPU, so the host holds one copy, whatever the number of ranks. Weights that
are computed during the swap (merged adapters) have no such buffer; they are written into one first.

A rank opens the descriptor, checks that it is the same file as the worker's, and keeps nothing of it after the load.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

ALIGN_BYTES = 64


@dataclass(frozen=True, slots=True)
class SharedTensors:
    """Where another process finds the tensors. It can be pickled."""

    path: str
    """/proc/PID/fd/N of the process that has the buffer open."""
    device: int
    inode: int
    entries: tuple[tuple[str, str, tuple[int, ...], int], ...]
    """(name, dtype, shape, offset in bytes) of every tensor."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Map the buffer. The tensors are read-only views of it, valid until the iteration ends."""
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            if (status.st_dev, status.st_ino) != (self.device, self.inode):
                raise RuntimeError(f"{self.path} is not the buffer of the weights any more")
            # A private writable mapping, because torch wants writable memory. Nothing is written.
            mapped = mmap.mmap(fd, status.st_size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(fd)
        for name, dtype, shape, offset in self.entries:
            count = math.prod(shape)
            kind = getattr(torch, dtype)
            flat = torch.frombuffer(mapped, dtype=kind, count=count, offset=offset) if count else torch.empty(0)
            yield name, flat.to(kind).view(shape)


class OwnedBuffer:
    """A memfd with a copy of some tensors."""

    def __init__(self, weights: Mapping[str, Any]) -> None:
        self._fd = os.memfd_create("windfall-merged-weights")
        entries: list[tuple[str, str, tuple[int, ...], int]] = []
        end = 0
        for name in weights:
            tensor = weights[name].detach().cpu().contiguous()
            offset = -(-end // ALIGN_BYTES) * ALIGN_BYTES
            data = tensor.view(-1).view(torch.uint8).numpy()
            os.pwrite(self._fd, data.data, offset) if data.nbytes < 1 << 30 else _write(self._fd, data, offset)
            entries.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset))
            end = offset + data.nbytes
        status = os.fstat(self._fd)
        path = f"/proc/{os.getpid()}/fd/{self._fd}"
        self.shared = SharedTensors(path, status.st_dev, status.st_ino, tuple(entries))

    def close(self) -> None:
        os.close(self._fd)


def _write(fd: int, data: Any, offset: int) -> None:
    """Write an array of any size. One system call writes at most 2 GiB."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view[: 1 << 30], offset)
        view, offset = view[written:], offset + written
