"""A worker's copy of some weights: one buffer, and which of its chunks are verified."""

from __future__ import annotations

import contextlib
import mmap
import os
from concurrent.futures import Executor
from itertools import pairwise
from typing import TYPE_CHECKING

import xxhash

from windfall.errors import WindfallError
from windfall.shared_tensors import BufferTensors, SharedTensors
from windfall.weights import manifest
from windfall.weights.manifest import Manifest

if TYPE_CHECKING:
    import numpy as np
    import torch


def views(buffer: mmap.mmap | np.ndarray, of: Manifest) -> dict[str, torch.Tensor]:
    """The tensors of a manifest as views of the buffer that holds them, by name."""
    import torch

    out = {}
    for e in of.entries:
        kind = getattr(torch, e.dtype)
        count = e.nbytes // manifest.WIDTHS[e.dtype]
        flat = torch.frombuffer(buffer, dtype=kind, count=count, offset=e.offset) if count else None
        out[e.name] = torch.empty(e.shape, dtype=kind) if flat is None else flat.view(e.shape)
    return out


class LocalCopy:
    def __init__(self, *, shared: bool = False) -> None:
        """`shared`: other processes of this machine can map the buffer (shared_tensors.py)."""
        self._shared, self._fd = shared, -1
        self.held: Manifest | None = None  # what the buffer holds, with every chunk verified
        self.verified: list[int | None] = []  # checksums of the chunks in the buffer; None: not verified
        self.view = memoryview(b"")
        self._buffer = mmap.mmap(-1, 1)
        self._bounds: list[int] = []

    def prepare(self, wanted: Manifest) -> None:
        """Make the buffer as large as the wanted weights. Chunks that have the same place in both stay verified."""
        known: dict[tuple[int, int], int | None] = {}
        if len(self.view) == wanted.nbytes:
            known = dict(zip(pairwise(self._bounds), self.verified, strict=True))
        else:
            self._resize(wanted.nbytes)
        self._bounds = wanted.bounds()
        self.verified = [known.get(chunk) for chunk in pairwise(self._bounds)]

    def hash_all(self, pool: Executor) -> None:
        """Compute the checksums of all chunks in the buffer again."""
        chunks = list(pairwise(self._bounds))
        self.verified[:] = pool.map(lambda chunk: xxhash.xxh3_64_intdigest(self.view[chunk[0] : chunk[1]]), chunks)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Views of the buffer, by name."""
        if self.held is None:
            raise WindfallError("no complete version is held", where="weights", fix="Pull one first.")
        tensors = views(self._buffer, self.held)
        if self._fd < 0:
            return tensors
        entries = tuple((e.name, e.dtype, tuple(e.shape), e.offset) for e in self.held.entries)
        return BufferTensors(tensors, SharedTensors.of(self._fd, entries))

    def _resize(self, nbytes: int) -> None:
        try:
            if self._shared:
                before, self._fd = self._fd, os.memfd_create("windfall-weights")
                if before >= 0:
                    os.close(before)
                os.ftruncate(self._fd, max(nbytes, 1))
            self._buffer = mmap.mmap(self._fd, max(nbytes, 1))
        except (OSError, OverflowError) as e:
            raise WindfallError(f"no room for {nbytes / 1e9:.2f} GB of weights: {e}", where="weights") from e
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                self._buffer.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._buffer)[:nbytes]
