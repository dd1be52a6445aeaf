"""Buffers backed by files without a name, which the kernel can send to a socket without copying.

A buffer is a memfd if it fits in memory, otherwise an unlinked file in a folder. Neither has a name that could outlive
the process: the space is freed when the process ends, however it ends.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from pathlib import Path

import numpy as np

from windfall.errors import WindfallError
from windfall.free_memory import free_bytes

MAX_MEMORY_SHARE = 0.9  # share of the free memory that a buffer may take


class Buffer:
    """`nbytes` zeroed bytes. `data` is an array to read and write; `dup` gives a descriptor to send from. Numpy views
    may outlive `close`."""

    def __init__(self, nbytes: int, folder: Path | None = None) -> None:
        self.nbytes = nbytes
        self.in_memory = hasattr(os, "memfd_create") and nbytes < MAX_MEMORY_SHARE * free_bytes()
        where = "memory" if self.in_memory else str(folder or tempfile.gettempdir())
        self.fd = os.memfd_create("windfall-weights") if self.in_memory else _unlinked_file(Path(where))
        try:
            # Allocating the pages now makes a full disk an error here instead of a SIGBUS at a later write.
            os.posix_fallocate(self.fd, 0, max(nbytes, 1))
        except OSError as e:
            os.close(self.fd)
            fix = "Use a folder with more free space for the weight publisher."
            raise WindfallError(f"no room for {nbytes / 1e9:.2f} GB of weights: {e}", where=where, fix=fix) from e
        self.map = mmap.mmap(self.fd, max(nbytes, 1))
        self.data: np.ndarray = np.frombuffer(self.map, np.uint8)[:nbytes]
        self.open = True
        self._lock = threading.Lock()

    def dup(self) -> int | None:
        """A new descriptor, or None if the buffer is closed. `fd` itself could soon belong to another file."""
        with self._lock:
            return os.dup(self.fd) if self.open else None

    def close(self) -> None:
        """Close the descriptor. The pages are freed when the last view of them and the last `dup` are gone."""
        with self._lock:
            if self.open:
                self.open = False
                os.close(self.fd)


def _unlinked_file(folder: Path) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except (AttributeError, OSError):  # not supported by this file system: create a file and unlink it at once
            fd, name = tempfile.mkstemp(prefix=".weights-", dir=folder)
            os.unlink(name)
            return fd
    except OSError as e:
        raise WindfallError(f"cannot create a file here: {e}", where=str(folder), fix="Use a writable folder.") from e
