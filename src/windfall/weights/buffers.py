"""Buffers backed by files without a name, which the kernel can send to a socket without copying.

A buffer is a memfd if it fits in memory, otherwise an unlinked file in a folder. Neither has a name that could outlive
the process: the space is freed when the process ends, however it ends.

Other processes of this machine can map a buffer: they open the descriptor of the process that created it through
/proc/PID/fd, which needs no socket and no name. `machine()` is equal for processes that can do so. A buffer that one
process created and others mapped is freed when the last of them has closed it or ended.
"""

from __future__ import annotations

import mmap
import os
import stat
import tempfile
import threading
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from windfall.errors import WindfallError
from windfall.free_memory import free_bytes
from windfall.weights.manifest import WIDTHS, TensorEntry

if TYPE_CHECKING:
    import torch

HANDLE_TYPE = "application/x-windfall-handle"
"""Media type of an answer with a BufferHandle."""
MAX_GAP_BYTES = 64 << 10  # two ranges that are at most this far apart are locked as one
MAX_MEMORY_SHARE = 0.9  # share of the free memory that a buffer may take


class BufferHandle(NamedTuple):
    """With this, another process of the machine can map a buffer."""

    pid: int
    fd: int
    device: int
    inode: int
    nbytes: int


def handle_of(fd: int, nbytes: int) -> BufferHandle:
    """The handle of a file that this process has open."""
    status = os.fstat(fd)
    return BufferHandle(os.getpid(), fd, status.st_dev, status.st_ino, nbytes)


def open_buffer(handle: BufferHandle, mode: int) -> int:
    """A descriptor of the buffer of another process of this machine, which must not have closed it."""
    path = f"/proc/{handle.pid}/fd/{handle.fd}"
    try:
        fd = os.open(path, mode | os.O_CLOEXEC | os.O_NONBLOCK)  # without waiting for the writer of a pipe
    except OSError as e:
        what = f"cannot open the weight buffer of process {handle.pid}: {e.strerror}"
        fix = "Run all processes of a machine as one user, and in one container."
        raise WindfallError(what, where=path, fix=fix) from e
    status = os.fstat(fd)
    if (status.st_dev, status.st_ino) != (handle.device, handle.inode) or not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise WindfallError("this is not the weight buffer any more", where=path, fix="Restart the trainer.")
    return fd


class Buffer:
    """`nbytes` zeroed bytes. `data` is an array to read and write; `dup` gives a descriptor to send from. Numpy views
    may outlive `close`."""

    def __init__(
        self,
        nbytes: int,
        folder: Path | None = None,
        *,
        used: Sequence[tuple[int, int]] | None = None,
        lazy: bool = False,
    ) -> None:
        """`used`: the ranges (start, stop) that will be written, if not all; only these get memory. `lazy`: get memory
        when it is written, which several threads do faster than one does now."""
        used = [(0, nbytes)] if used is None else used
        room = sum(stop - start for start, stop in used)
        in_memory = room < MAX_MEMORY_SHARE * free_bytes()
        where = "memory" if in_memory else str(folder or tempfile.gettempdir())
        fd = os.memfd_create("windfall-weights") if in_memory else _unlinked_file(Path(where))
        try:
            os.ftruncate(fd, max(nbytes, 1))
            # Allocating the pages now makes a full disk an error here instead of a SIGBUS at a later write.
            for start, stop in () if lazy and in_memory else used:
                os.posix_fallocate(fd, start, max(stop - start, 1))
        except OSError as e:
            os.close(fd)
            fix = "Use a folder with more free space for the weight publisher."
            raise WindfallError(f"no room for {room / 1e9:.2f} GB of weights: {e}", where=where, fix=fix) from e
        self._open(fd, nbytes)
        self.handle = handle_of(fd, nbytes)

    @classmethod
    def map(cls, handle: BufferHandle) -> Buffer:
        """The buffer of another process of this machine, which must not have closed it."""
        fd = open_buffer(handle, os.O_RDWR)
        self = cls.__new__(cls)
        self.handle = handle
        self._open(fd, handle.nbytes)
        return self

    def _open(self, fd: int, nbytes: int) -> None:
        self.fd, self.nbytes = fd, nbytes
        self.mapped = mmap.mmap(fd, max(nbytes, 1))
        self.data: np.ndarray = np.frombuffer(self.mapped, np.uint8)[:nbytes]
        self.open = True
        self._lock = threading.Lock()
        self._unlock: weakref.finalize[..., Buffer] | None = None  # after the first call of `lock`

    @property
    def view(self) -> memoryview:
        return memoryview(self.mapped)[: self.nbytes]

    def lock(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Lock the pages of these ranges, which are in order, for copies from and to a GPU. Only the first call has an
        effect. They are locked until the buffer is closed or collected: if its addresses were mapped again, the GPU
        would still write to the old pages."""
        if self._unlock is None:
            import torch

            runtime: Any = torch.cuda.cudart()
            base = self.data.ctypes.data
            locked = [
                base + start
                for start, stop in page_ranges(ranges, self.nbytes)
                if int(runtime.cudaHostRegister(base + start, stop - start, 1)) == 0
            ]
            self._unlock = weakref.finalize(self, lambda: [runtime.cudaHostUnregister(each) for each in locked])
            self._unlock.atexit = False  # the process then ends with all of its memory

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
                if self._unlock is not None:
                    self._unlock()


def page_ranges(ranges: Iterable[tuple[int, int]], nbytes: int) -> list[tuple[int, int]]:
    """Ranges of whole pages that cover these ranges, which are in order. Near ranges are joined.

    >>> page, far = mmap.PAGESIZE, 1 << 20
    >>> page_ranges([(0, 10), (64, page + 1), (far, far + 1)], far + 5) == [(0, 2 * page), (far, far + 5)]
    True
    """
    out: list[tuple[int, int]] = []
    for first, last in ranges:
        start = first // mmap.PAGESIZE * mmap.PAGESIZE
        stop = min(-(-last // mmap.PAGESIZE) * mmap.PAGESIZE, nbytes)
        if out and start - out[-1][1] <= MAX_GAP_BYTES:
            out[-1] = (out[-1][0], stop)
        else:
            out.append((start, stop))
    return out


def write_at(fd: int, at: int, data: memoryview) -> None:
    """Write all bytes at this position of a file."""
    while data:
        done = os.pwrite(fd, data, at)
        at, data = at + done, data[done:]


def views(buffer: mmap.mmap | np.ndarray, entries: Iterable[TensorEntry]) -> dict[str, torch.Tensor]:
    """The tensors of a manifest as views of the buffer that holds them, by name."""
    import torch

    out = {}
    for e in entries:
        kind = getattr(torch, e.dtype)
        count = e.nbytes // WIDTHS[e.dtype]
        flat = torch.frombuffer(buffer, dtype=kind, count=count, offset=e.offset) if count else None
        out[e.name] = torch.empty(e.shape, dtype=kind) if flat is None else flat.view(e.shape)
    return out


def machine() -> str:
    """Equal for all processes that can map each other's buffers: same kernel, same process numbers."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def _unlinked_file(folder: Path) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(prefix=".weights-", dir=folder)
        os.unlink(name)
    except OSError as e:
        raise WindfallError(f"cannot create a file here: {e}", where=str(folder), fix="Use a writable folder.") from e
    return fd
