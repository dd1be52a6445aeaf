"""A weight server of this machine as a source of files.

The server answers a request with a handle of its buffer. The reader opens the buffer through /proc, which only a
process of the same user can, and copies from it: no byte passes through a socket. If it cannot open the buffer (another
user, another container), it reads over the socket. `connect` (source.py) uses this source only if the address of the
connection shows that the server is on this machine.
"""

from __future__ import annotations

import os

import msgspec

from windfall.errors import WindfallError
from windfall.weights.buffers import HANDLE_TYPE, BufferHandle, open_buffer
from windfall.weights.pulling.http_source import HttpSource

MAX_HANDLE_BYTES = 4 << 10


class MachineSource(HttpSource):
    _may_be_plain = True  # nothing leaves the machine
    _opened: tuple[BufferHandle, int] | None = None
    _at = _stop = 0
    _by_handle = True

    def open(self, file: str, start: int, stop: int) -> int:
        if self._by_handle:
            lines = f"Range: bytes={start}-{stop - 1}\r\nAccept: {HANDLE_TYPE}\r\n"
            length = self._get(f"/weights/{file}", 206, lines)
            if length > MAX_HANDLE_BYTES:
                raise self._broken(f"its handle of {file} has {length} bytes; the limit is {MAX_HANDLE_BYTES}")
            answer = self._read(length)
            try:
                handle, first, last = msgspec.msgpack.decode(answer, type=tuple[BufferHandle, int, int])
                if not start == first < last <= min(stop, handle.nbytes):
                    raise self._broken(f"promised bytes {first} to {last} of {file}, not from {start} on")
                self._open_buffer(handle)
                self._at, self._stop, self.trusted = first, last, True
                return last - first
            except msgspec.MsgspecError as e:
                raise self._broken(f"sent no handle of {file}: {e}") from e
            except WindfallError:
                self._by_handle, self.trusted = False, self.ref.kind == "trainer"
        return super().open(file, start, stop)

    def read_into(self, view: memoryview) -> int:
        if self._at == self._stop or self._opened is None:
            return super().read_into(view)
        n = os.preadv(self._opened[1], [view[: self._stop - self._at]], self._at)
        if n == 0:
            raise self._broken("its buffer ended early")
        self._at += n
        return n

    def close(self) -> None:
        super().close()
        if self._opened is not None:
            os.close(self._opened[1])
            self._opened = None

    def _open_buffer(self, handle: BufferHandle) -> None:
        if self._opened is None or self._opened[0] != handle:
            fd = open_buffer(handle, os.O_RDONLY)
            if self._opened is not None:
                os.close(self._opened[1])
            self._opened = handle, fd
