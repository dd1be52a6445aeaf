"""Buffers that are files without a name, so that the kernel can send them to a socket without copying.

A buffer is a memfd when there is room for it in memory, else an unlinked file in a folder. Neither has a name that
could outlive the process: the memory is free again when the process ends, however it ends.
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

SPARE = 0.9
"""The part of the free memory that buffers may take."""


class Buffer:
    """`nbytes` zeroed bytes: `data` to write and read them, `dup` to send them. Numpy views may outlive `close`."""

    def __init__(self, nbytes: int, folder: Path | None = None) -> None:
        self.nbytes = nbytes
        self.in_memory = hasattr(os, "memfd_create") and nbytes < SPARE * free_bytes()
        where = "memory" if self.in_memory else str(folder or tempfile.gettempdir())
        self.fd = os.memfd_create("windfall-weights") if self.in_memory else _unnamed(Path(where))
        try:
            # Taking the pages now turns a full disk into an error here instead of a SIGBUS at some later write.
            os.posix_fallocate(self.fd, 0, max(nbytes, 1))
        except OSError as e:
            os.close(self.fd)
            fix = "Give the weight publisher a folder with more room."
            raise WindfallError(f"no room for {nbytes / 1e9:.2f} GB of weights: {e}", where=where, fix=fix) from e
        self.map = mmap.mmap(self.fd, max(nbytes, 1))
        self.data: np.ndarray = np.frombuffer(self.map, np.uint8)[:nbytes]
        self.open = True
        self._lock = threading.Lock()

    def dup(self) -> int | None:
        """A descriptor of one's own, or None once closed: `fd` itself could be another file's by the next moment."""
        with self._lock:
            return os.dup(self.fd) if self.open else None

    def close(self) -> None:
        """The descriptor now; the pages when the last view of them and the last `dup` are gone."""
        with self._lock:
            if self.open:
                self.open = False
                os.close(self.fd)


def _unnamed(folder: Path) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except (AttributeError, OSError):  # not on this file system: a name for as short as can be
            fd, name = tempfile.mkstemp(prefix=".weights-", dir=folder)
            os.unlink(name)
            return fd
    except OSError as e:
        raise WindfallError(f"cannot make a file here: {e}", where=str(folder), fix="Give a folder to write in.") from e
