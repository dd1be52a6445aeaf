"""Tensors that other processes of this machine read from one buffer, so that the host holds one copy of them.

    a worker's process   SharedTensors ──▶ its ranks: each copies its own shard to its GPU

- Nothing is sent but the layout and a path under /proc/PID/fd, which leads to the buffer's file without a name. Only
  processes of the same user can open it.
- A worker pulls into a buffer that its ranks can map (pull.py). Weights that are computed during a swap (merged
  adapters) have none; they are written into one first (`TensorFile`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from windfall.weights.buffers import Buffer, BufferHandle, handle_of, views, write_at
from windfall.weights.manifest import ALIGN_BYTES, TensorEntry

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class SharedTensors:
    """Where another process finds the tensors. It can be sent to that process."""

    buffer: BufferHandle
    entries: tuple[TensorEntry, ...]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Map the buffer. The tensors are views of it, and must not be written to."""
        mapped = Buffer.map(self.buffer)
        mapped.close()  # the views keep the map
        yield from views(mapped.data, self.entries).items()


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
        entries: list[TensorEntry] = []
        end = 0
        for name in tensors:  # one at a time: they may be computed on access
            tensor = tensors[name].detach().cpu().contiguous()
            data = memoryview(tensor.view(-1).view(torch.uint8).numpy())
            dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
            offset = -(-end // ALIGN_BYTES) * ALIGN_BYTES
            write_at(self._fd, offset, data)
            entries.append(TensorEntry(name=name, dtype=dtype, shape=shape, offset=offset, nbytes=len(data)))
            end = offset + len(data)
        self.shared = SharedTensors(handle_of(self._fd, end), tuple(entries))

    def close(self) -> None:
        os.close(self._fd)
