"""Tensors that several processes of one machine read from one buffer: the ranks of a tensor-parallel engine.

A worker pulls a version into a buffer without a name (weights/pull.py). Every rank maps that buffer through
/proc/PID/fd and copies its own shard to its GPU, so the host holds one copy, whatever the number of ranks. Weights that
are computed during a swap (merged adapters) have no such buffer; they are written into one first (`TensorFile`).

A rank opens the descriptor, checks that it is the file that the worker meant, and keeps nothing of it after the load.
The module imports torch only when tensors are made or mapped.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ALIGN_BYTES = 64
MAX_WRITE_BYTES = 1 << 30  # one system call writes at most 2 GiB
Entry = tuple[str, str, tuple[int, ...], int]
"""Name, dtype, shape, and offset in bytes of a tensor."""


@dataclass(frozen=True, slots=True)
class SharedTensors:
    """Where another process finds the tensors. It can be sent to that process."""

    path: str
    """/proc/PID/fd/N of the process that has the buffer open."""
    device: int
    inode: int
    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, fd: int, entries: tuple[Entry, ...]) -> SharedTensors:
        """Tensors in a file that this process has open."""
        status = os.fstat(fd)
        return cls(f"/proc/{os.getpid()}/fd/{fd}", status.st_dev, status.st_ino, entries)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Map the buffer. The tensors are views of it, and must not be written to."""
        import torch

        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            if (status.st_dev, status.st_ino) != (self.device, self.inode):
                raise RuntimeError(f"{self.path} is not the buffer of the weights any more")
            # Private and writable, because torch wants writable memory. Nothing is written.
            mapped = mmap.mmap(fd, status.st_size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(fd)
        for name, dtype, shape, offset in self.entries:
            kind, count = getattr(torch, dtype), math.prod(shape)
            if count:
                yield name, torch.frombuffer(mapped, dtype=kind, count=count, offset=offset).view(shape)
            else:
                yield name, torch.empty(shape, dtype=kind)


class BufferTensors(dict[str, "torch.Tensor"]):
    """Tensors by name, all of them views of one buffer that other processes can map."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], shared: SharedTensors) -> None:
        super().__init__(tensors)
        self.shared = shared


class TensorFile:
    """A copy of some tensors in memory that other processes can map."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        import torch

        self._fd = os.memfd_create("windfall-tensors")
        entries: list[Entry] = []
        end = 0
        for name in tensors:  # one at a time: they may be computed on access
            tensor = tensors[name].detach().cpu().contiguous()
            offset = -(-end // ALIGN_BYTES) * ALIGN_BYTES
            end = offset + self._write(memoryview(tensor.view(-1).view(torch.uint8).numpy()), offset)
            entries.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset))
        self.shared = SharedTensors.of(self._fd, tuple(entries))

    def _write(self, data: memoryview, offset: int) -> int:
        left = data
        while left:
            written = os.pwrite(self._fd, left[:MAX_WRITE_BYTES], offset)
            left, offset = left[written:], offset + written
        return len(data)

    def close(self) -> None:
        os.close(self._fd)
