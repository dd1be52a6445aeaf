"""Buffers backed by files without a name, which the kernel can send to a socket without copying.

A buffer is a memfd if it fits in memory, otherwise an unlinked file in a folder. Neither has a name that could outlive
the process: the space is freed when the process ends, however it ends.

Other processes of this machine can map a buffer: they open the descriptor of the process that created it through
/proc/PID/fd, which needs no socket and no name. `machine()` is equal for processes that can do so. A buffer that one
process created and others mapped is freed when the last of them has closed it or ended.

Rows are copied into a buffer from a GPU on a separate stream and into locked pages.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from windfall.errors import WindfallError
from windfall.free_memory import free_bytes
from windfall.weights import manifest
from windfall.weights.manifest import Manifest
from windfall.weights.plan import Piece

if TYPE_CHECKING:
    import torch

MAX_GAP_BYTES = 64 << 10  # two ranges that are at most this far apart are locked as one
MAX_MEMORY_SHARE = 0.9  # share of the free memory that a buffer may take


class BufferHandle(NamedTuple):
    """With this, another process of the machine can map a buffer."""

    pid: int
    fd: int
    device: int
    inode: int
    nbytes: int


class Buffer:
    """`nbytes` zeroed bytes. `data` is an array to read and write; `dup` gives a descriptor to send from. Numpy views
    may outlive `close`."""

    def __init__(
        self, nbytes: int, folder: Path | None = None, *, used: Sequence[tuple[int, int]] | None = None
    ) -> None:
        """`used`: the ranges (start, stop) that will be written, if not all; only these get memory."""
        used = [(0, nbytes)] if used is None else used
        room = sum(stop - start for start, stop in used)
        in_memory = room < MAX_MEMORY_SHARE * free_bytes()
        where = "memory" if in_memory else str(folder or tempfile.gettempdir())
        fd = os.memfd_create("windfall-weights") if in_memory else _unlinked_file(Path(where))
        try:
            os.ftruncate(fd, max(nbytes, 1))
            # Allocating the pages now makes a full disk an error here instead of a SIGBUS at a later write.
            for start, stop in used:
                os.posix_fallocate(fd, start, max(stop - start, 1))
        except OSError as e:
            os.close(fd)
            fix = "Use a folder with more free space for the weight publisher."
            raise WindfallError(f"no room for {room / 1e9:.2f} GB of weights: {e}", where=where, fix=fix) from e
        self._open(fd, nbytes)
        status = os.fstat(fd)
        self.handle = BufferHandle(os.getpid(), fd, status.st_dev, status.st_ino, nbytes)

    @classmethod
    def map(cls, handle: BufferHandle) -> Buffer:
        """The buffer of another process of this machine, which must not have closed it."""
        path = f"/proc/{handle.pid}/fd/{handle.fd}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as e:
            what = f"cannot open the weight buffer of process {handle.pid}: {e.strerror}"
            fix = "Run all ranks of a machine as one user, and in one container."
            raise WindfallError(what, where=path, fix=fix) from e
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) != (handle.device, handle.inode):
            os.close(fd)
            raise WindfallError("this is not the weight buffer any more", where=path, fix="Restart the trainer.")
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


def write_at(fd: int, at: int, data: memoryview) -> None:
    """Write all bytes at this position of a file."""
    while data:
        done = os.pwrite(fd, data, at)
        at, data = at + done, data[done:]


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


def ready_event(tensors: Iterable[torch.Tensor]) -> Any:
    """Record an event after which the tensors have their present values. None if they are not all on one GPU."""
    import torch

    devices = {t.device for t in tensors}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(next(iter(devices))))
    return event


def copy(buffer: Buffer, sources: Mapping[Piece, torch.Tensor], after: Any, pages: LockedPages) -> None:
    """Copy the rows, and wait until they have arrived. `after`: from `ready_event`, maybe of another thread."""
    import torch

    if after is None:
        for piece, source in sources.items():
            target(buffer, piece).view(source.shape).copy_(source)
        return
    pages.lock(buffer, list(sources))
    stream = torch.cuda.Stream(next(iter(sources.values())).device)
    stream.wait_event(after)
    with torch.cuda.stream(stream):
        for piece, source in sources.items():
            to = target(buffer, piece)
            to.copy_(source.to(to.dtype).contiguous().view(-1), non_blocking=True)
    stream.synchronize()


def target(buffer: Buffer, piece: Piece) -> torch.Tensor:
    """The part of the buffer for these rows, as a flat tensor."""
    import torch

    flat = torch.from_numpy(buffer.data[piece.start : piece.stop])
    return flat.view(getattr(torch, piece.entry.dtype))


class LockedPages:
    """Locks the pages that a GPU copies to, once: a copy into pageable memory is several times slower."""

    def __init__(self, *, whole: bool = False) -> None:
        """`whole`: lock whole buffers, from which the GPU also reads."""
        self._whole = whole
        self._locked: dict[int, tuple[list[tuple[int, int]], list[int]]] = {}  # by descriptor: ranges, addresses

    def lock(self, buffer: Buffer, pieces: Sequence[Piece]) -> None:
        import torch

        ranges = [(0, buffer.nbytes)] if self._whole else page_ranges(pieces, buffer.nbytes)
        if self._locked.get(buffer.fd, ([], []))[0] == ranges:
            return
        self.unlock(buffer)
        runtime: Any = torch.cuda.cudart()
        base, done = buffer.data.ctypes.data, []
        for start, stop in ranges:
            if int(runtime.cudaHostRegister(base + start, stop - start, 1)) == 0:
                done.append(base + start)
        self._locked[buffer.fd] = ranges, done

    def unlock(self, buffer: Buffer) -> None:
        if buffer.fd in self._locked:
            import torch

            runtime: Any = torch.cuda.cudart()
            for address in self._locked.pop(buffer.fd)[1]:
                runtime.cudaHostUnregister(address)


def page_ranges(pieces: Sequence[Piece], nbytes: int) -> list[tuple[int, int]]:
    """Ranges of whole pages that cover the pieces, which are in order. Near ranges are joined."""
    out: list[tuple[int, int]] = []
    for piece in pieces:
        start = piece.start // mmap.PAGESIZE * mmap.PAGESIZE
        stop = min(-(-piece.stop // mmap.PAGESIZE) * mmap.PAGESIZE, nbytes)
        if out and start - out[-1][1] <= MAX_GAP_BYTES:
            out[-1] = (out[-1][0], stop)
        else:
            out.append((start, stop))
    return out
