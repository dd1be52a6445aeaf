"""Tensors that other processes of this machine read from one buffer, so that the host holds one copy of them.

    a worker's process                  SharedTensors ──▶ its ranks: each copies its own shard to its GPU
    a publisher's process               SharedVersion ──▶ the trainer's engines: SharedReader maps the same pages
        OpenVersion.intact()   ◀──────────────────────────── "copied"

- Nothing is sent but the layout and a path under /proc/PID/fd, which leads to the buffer's file without a name. Only
  processes of the same user can open it.
- A worker pulls into a buffer that its ranks can map (pull.py). Weights that are computed during a swap (merged
  adapters) have none; they are written into one first (`TensorFile`).
- A publisher withdraws a version before it overwrites the first byte. If the version is `intact` after the reader has
  copied the tensors, the copy is whole, and no checksum is needed. If not, the copy is a mixture and must not be used.
- If the version is an adapter, its base comes with it, from a buffer that is never overwritten.
- A reader keeps its maps of the buffers, of which a publisher has three, and locks their pages for its GPU once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from windfall.errors import WindfallError
from windfall.weights.buffers import Buffer, BufferHandle, handle_of, views, write_at
from windfall.weights.manifest import ALIGN_BYTES, TensorEntry
from windfall.weights.merged import MergedWeights
from windfall.weights.source import Published, Source

if TYPE_CHECKING:
    import torch

MAX_MAPS = 3
"""Buffers of one publisher: of two versions, and of the base of adapters."""


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


class SharedVersion(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a reader must know."""

    tensors: SharedTensors
    base: SharedTensors | None = None  # the weights that the version is an adapter of
    scale: float = 1.0  # factor of the adapter


class OpenVersion:
    """A version in the process of its source. It can be read until `close`."""

    def __init__(self, source: Source, version: int) -> None:
        """Raises WindfallError if the source does not have the version, or no longer has it."""
        published = source.find(version)
        if published is None:
            raise _not_published(version)
        self._source = source
        self._published = published
        self._descriptors: list[int] = []
        self.version = version
        self.digest = published.manifest.digest
        base = source.base if published.manifest.base else None
        try:
            self.shared = SharedVersion(
                tensors=self._share(published),
                base=None if base is None else self._share(base),
                scale=published.manifest.scale,
            )
        except WindfallError:
            self.close()
            raise

    def _share(self, published: Published) -> SharedTensors:
        descriptor = published.buffer.dup()
        if descriptor is None:
            raise _not_published(self.version)
        self._descriptors.append(descriptor)
        return SharedTensors(handle_of(descriptor, published.buffer.nbytes), published.manifest.entries)

    def intact(self) -> bool:
        """Whether no byte of the version has been overwritten yet."""
        return self._source.find(self.version) is self._published

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()


def _not_published(version: int) -> WindfallError:
    return WindfallError(f"the trainer does not publish version {version}", where="weights")


class SharedReader:
    def __init__(self, *, pin: bool = False) -> None:
        """`pin`: lock the pages of the buffers for the GPU, so that copies are several times faster."""
        self._pin = pin
        self._maps: dict[tuple[int, int], Buffer] = {}  # by device and inode; the most recently used one is last

    def weights(self, shared: SharedVersion) -> Mapping[str, torch.Tensor]:
        """What an engine must copy: the tensors, or an adapter merged into its base."""
        tensors = self.tensors(shared.tensors)
        return tensors if shared.base is None else MergedWeights(self.tensors(shared.base), tensors, shared.scale)

    def tensors(self, shared: SharedTensors) -> dict[str, torch.Tensor]:
        """Views of the publisher's buffer, by name. Copy them; never write to them."""
        key = (shared.buffer.device, shared.buffer.inode)
        buffer = self._maps.pop(key, None) or Buffer.map(shared.buffer)
        if self._pin:
            buffer.lock([(0, buffer.nbytes)])
        self._maps[key] = buffer
        while len(self._maps) > MAX_MAPS:
            self._maps.pop(next(iter(self._maps))).close()
        return views(buffer.data, shared.entries)
