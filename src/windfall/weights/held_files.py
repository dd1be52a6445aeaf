"""The files of weights that this process holds, complete or being filled, for those who read them (serve.py).

A file is immutable: what is sent from it was verified before. Its buffer may be overwritten only after `withdraw`: new
reads are refused then, and the current ones end, or their connections are reset. A reader that got a mixture all the
same finds that out by the hashes of the chunks.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise

from windfall.link import messages as m
from windfall.weights.buffers import Buffer
from windfall.weights.manifest import Manifest
from windfall.weights.ranges import covers, normal


class Withdrawn(OSError):
    """The file, or this part of it, cannot be read here."""


class HeldFile:
    """Any thread may call it."""

    def __init__(
        self, manifest: Manifest, buffer: Buffer, *, ranges: m.Ranges | None = None, filled: bool = False
    ) -> None:
        """`ranges`: whole chunks, the part of the file that the buffer is for, if not all. `filled`: all of it is
        verified; otherwise `add` says what is."""
        self.manifest, self.buffer = manifest, buffer
        self.ranges = ((0, manifest.nbytes),) if ranges is None else ranges
        self.pinned = False
        """Whether it is being uploaded to a bucket: its buffer must not be overwritten."""
        self.revoked = False
        """Whether the reads that have begun must end, too."""
        self._bounds = manifest.bounds()
        self._ready = bytearray(len(self._bounds))  # 1: this chunk is verified; the last byte belongs to none
        self._refused = False
        self._readers = 0
        self._changed = threading.Condition()
        if filled:
            for i in self._chunks():
                self._ready[i] = 1

    @property
    def held(self) -> m.Ranges:
        """What is verified."""
        with self._changed:
            chunks = [i for i, ready in enumerate(self._ready) if ready]
        return normal((self._bounds[i], self._bounds[i + 1]) for i in chunks)

    def missing(self) -> list[int]:
        """The chunks that are not verified, of those that the buffer is for."""
        with self._changed:
            return [i for i in self._chunks() if not self._ready[i]]

    def _chunks(self) -> Iterator[int]:
        for start, stop in self.ranges:
            yield from range(bisect_left(self._bounds, start), bisect_left(self._bounds, stop))

    def add(self, chunk: int) -> None:
        """This chunk is verified, and may be sent from now on."""
        with self._changed:
            self._ready[chunk] = 1
            self._changed.notify_all()

    def check(self, chunk: int) -> bool:
        """Add this chunk if its bytes in the buffer have its checksum. Returns whether they have."""
        data = self.buffer.view[self._bounds[chunk] : self._bounds[chunk + 1]]
        intact = self.manifest.is_chunk(chunk, data, trusted=True)
        if intact:
            self.add(chunk)
        return intact

    def seals(self) -> dict[tuple[int, int], bytes]:
        """By range: the seals of the chunks that are verified."""
        with self._changed:
            return {chunk: self.manifest.seal(i) for i, chunk in enumerate(pairwise(self._bounds)) if self._ready[i]}

    def ready(self, start: int, stop: int, wait_s: float = 0.0) -> int:
        """Where the verified bytes from `start` on end, at most `stop`. Waits until there are some; returns `start` if
        there are none after `wait_s`. Raises Withdrawn if there never will be any."""
        if not covers(self.ranges, ((start, start + 1),)):
            raise Withdrawn(f"byte {start} is not held here")
        first = bisect_right(self._bounds, start) - 1
        with self._changed:
            self._changed.wait_for(lambda: self._ready[first] or self._refused, wait_s)
            if self._refused:
                raise Withdrawn("the file is withdrawn")
            return max(start, min(stop, self._bounds[self._ready.find(0, first)]))

    @contextmanager
    def reading(self) -> Iterator[int]:
        """A descriptor of the buffer, to send from."""
        with self._changed:
            fd = None if self._refused else self.buffer.dup()
            if fd is None:
                raise Withdrawn("the file is withdrawn")
            self._readers += 1
        try:
            yield fd
        finally:
            os.close(fd)
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()

    def withdraw(self, wait_s: float = 0.0) -> bool:
        """Refuse new reads, and let the current ones continue for up to `wait_s`. Returns whether all have ended."""
        with self._changed:
            self._refused = True
            self._changed.notify_all()
            ended = self._changed.wait_for(lambda: not self._readers, wait_s)
            self.revoked = True
            return ended


class HeldFiles:
    """By digest. One thread changes it, and any thread may read it."""

    def __init__(self) -> None:
        self._files: dict[str, HeldFile] = {}

    def find(self, digest: str) -> HeldFile | None:
        return self._files.get(digest)

    def add(self, file: HeldFile) -> None:
        """In place of a file with the same digest."""
        self._files[file.manifest.digest] = file

    def remove(self, file: HeldFile, wait_s: float = 0.0) -> bool:
        """Withdraw the file, whose buffer may be overwritten then. Returns whether all reads of it have ended."""
        if self.find(file.manifest.digest) is file:
            del self._files[file.manifest.digest]
        return file.withdraw(wait_s)

    def describe(self, most_files: int | None = None, most_ranges: int | None = None) -> tuple[m.Holding, ...]:
        """What is held; with limits, only the largest files, and of each only the longest ranges."""
        out = []
        for file in sorted(self._files.values(), key=lambda file: -file.manifest.nbytes)[:most_files]:
            held, whole = file.held, normal([(0, file.manifest.nbytes)])
            longest = sorted(held, key=lambda piece: piece[0] - piece[1])[:most_ranges]
            if held or not whole:
                out.append(m.Holding(file=file.manifest.ref, ranges=() if held == whole else tuple(sorted(longest))))
        return tuple(out)


class JoinedFiles(HeldFiles):
    """The files of several holders, for a server. Two of them may hold the same bytes, such as new adapters."""

    def __init__(self, holders: Iterable[HeldFiles]) -> None:
        super().__init__()
        self._holders = tuple(holders)

    def find(self, digest: str) -> HeldFile | None:
        return next((found for holder in self._holders if (found := holder.find(digest)) is not None), None)


class UploadLimit:
    """Paces what a process sends over all of its connections, and counts it."""

    def __init__(self, bytes_per_s: float = 0.0) -> None:
        """0: no limit."""
        self.bytes_per_s = bytes_per_s
        self.sent_bytes = 0
        self._lock = threading.Lock()
        self._free_at_s = 0.0  # when all that was taken is sent

    @property
    def piece_bytes(self) -> int:
        """How much to take at a time: so little that several connections all get some within a second."""
        return max(16 << 10, min(4 << 20, int(self.bytes_per_s / 50))) if self.bytes_per_s else 4 << 20

    def take(self, nbytes: int) -> None:
        """Wait until these bytes may be sent."""
        with self._lock:
            self.sent_bytes += nbytes
            if not self.bytes_per_s:
                return
            now = time.monotonic()
            starts_s = max(self._free_at_s, now)
            self._free_at_s = starts_s + nbytes / self.bytes_per_s
        time.sleep(starts_s - now)
