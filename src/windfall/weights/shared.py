"""Reads a version of the weights in another process of the publisher's machine: from the publisher's own buffer.

    publisher's process                                        reader's process
    OpenVersion(source, version).shared ──── message ─────────▶ SharedReader.tensors(): views of the same pages
    OpenVersion.intact()   ◀──────────────────── "copied" ──── copies them into an engine

- Nothing is sent but the manifest and a path under /proc/PID/fd, which leads to the buffer's file without a name. Only
  processes of the same user can open it.
- The publisher withdraws a version before it overwrites the first byte. If the version is `intact` after the reader has
  copied the tensors, the copy is whole, and no checksum is needed. If not, the copy is a mixture and must not be used.
- If the version is an adapter, its base comes with it, from a buffer that is never overwritten.
- A reader keeps its maps of the buffers, of which a publisher has three, and locks their pages for its GPU once.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from windfall.errors import WindfallError
from windfall.weights import manifest
from windfall.weights.buffers import views
from windfall.weights.manifest import Manifest
from windfall.weights.merged import MergedWeights
from windfall.weights.source import Published, Source

if TYPE_CHECKING:
    import torch

MAX_MAPS = 3
"""Buffers of one publisher: of two versions, and of the base of adapters."""


class SharedVersion(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a reader must know."""

    manifest: bytes  # the encoded manifest of the version
    path: str  # where the reader can open the buffer
    base: SharedVersion | None = None  # the weights that the version is an adapter of


class OpenVersion:
    """A version in the process of its source. Its path is valid until `close`."""

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
        try:
            self.shared = self._share(published, source.base if published.manifest.base else None)
        except WindfallError:
            self.close()
            raise

    def _share(self, published: Published, base: Published | None) -> SharedVersion:
        descriptor = published.buffer.dup()
        if descriptor is None:
            raise _not_published(self.version)
        self._descriptors.append(descriptor)
        return SharedVersion(
            manifest=published.manifest.encode(),
            path=f"/proc/{os.getpid()}/fd/{descriptor}",
            base=None if base is None else self._share(base, None),
        )

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
        self._maps: dict[tuple[int, int], _Map] = {}

    def weights(self, shared: SharedVersion) -> Mapping[str, torch.Tensor]:
        """What an engine must copy: the tensors, or an adapter merged into its base."""
        tensors = self.tensors(shared)
        if shared.base is None:
            return tensors
        found = manifest.decode(shared.manifest, Manifest)
        return MergedWeights(self.tensors(shared.base), tensors, found.scale)

    def tensors(self, shared: SharedVersion) -> dict[str, torch.Tensor]:
        """Views of the publisher's buffer, by name. Copy them; never write to them."""
        found = manifest.decode(shared.manifest, Manifest)
        return views(self._map(shared.path, found.nbytes).data, found)

    def _map(self, path: str, nbytes: int) -> _Map:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as e:
            raise WindfallError(f"cannot open the publisher's buffer: {e.strerror}", where=path) from e
        try:
            status = os.fstat(descriptor)
            key = (status.st_dev, status.st_ino)
            if status.st_size < nbytes:
                raise WindfallError(f"the buffer has {status.st_size} bytes instead of {nbytes}", where=path)
            found = self._maps.pop(key, None) or _Map(descriptor, status.st_size, pin=self._pin)
        finally:
            os.close(descriptor)
        self._maps[key] = found  # the most recently used one is last
        while len(self._maps) > MAX_MAPS:
            self._maps.pop(next(iter(self._maps))).release()
        return found


class _Map:
    """All of a file, mapped. The map ends when the last view of it is gone."""

    def __init__(self, descriptor: int, nbytes: int, *, pin: bool) -> None:
        # Shared and writable, although nothing is written: the driver copies the pages of a private map to lock them.
        self.data: np.ndarray = np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8)
        self._pinned = pin and int(_cuda().cudaHostRegister(self.data.ctypes.data, nbytes, 1)) == 0

    def release(self) -> None:
        if self._pinned:
            _cuda().cudaHostUnregister(self.data.ctypes.data)


def _cuda() -> Any:
    import torch

    return torch.cuda.cudart()
