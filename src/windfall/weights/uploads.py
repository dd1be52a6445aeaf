"""Uploads what a trainer publishes to a bucket, while training continues.

A worker that only reaches the bucket needs a way to the newest version: a full copy, and the deltas since. Every delta
is uploaded; a full copy again if there is no delta, or if the deltas since the last copy are more than half of it.

    version            0      1      2      3      4
    uploaded           copy   delta  delta  delta  delta and copy
    way of a joiner    0      0 1    0 1 2  ...    4

- An upload that fails is tried again until it succeeds or the trainer withdraws the file. Until then the copy's buffer
  is pinned: the publisher takes another one.
- If the way is broken, because a file was withdrawn before it was uploaded, the next version is uploaded as a copy.
- Files that no worker needs (`keep`) and that are not on the way are deleted.
- On several machines each uploads the bytes that it holds. All decide the same; the first one deletes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

from windfall.backoff import delay_s
from windfall.link import messages as m
from windfall.weights.bucket import BucketFailed, BucketStore
from windfall.weights.held_files import HeldFile, Withdrawn

MAX_SHARE = 0.5
"""Maximum of all deltas since a full copy, as a share of it."""
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0


def extend(way: tuple[m.FileRef, ...], copy: m.FileRef, delta: m.FileRef | None) -> tuple[m.FileRef, ...]:
    """The way to a new version, from the one to the version before.

    >>> copies = [m.FileRef(digest=f"c{i}", nbytes=100) for i in range(4)]
    >>> way = ()
    >>> for i, size in enumerate((0, 30, 20, 10)):
    ...     delta = m.FileRef(digest=f"d{i}", nbytes=size, before=f"c{i - 1}", after=f"c{i}")
    ...     way = extend(way, copies[i], delta if i else None)
    ...     print(*(file.digest for file in way))
    c0
    c0 d1
    c0 d1 d2
    c3
    """
    end = (way[-1].after or way[-1].digest) if way else ""
    if delta is None or delta.before != end:
        return (copy,)
    deltas = sum(file.nbytes for file in way[1:]) + delta.nbytes
    return (*way, delta) if deltas <= MAX_SHARE * way[0].nbytes else (copy,)


class BucketUploads:
    """Any thread may call it."""

    def __init__(self, store: BucketStore, report: Callable[[m.Uploaded], None], *, first: bool = True) -> None:
        """`report` is called in a thread of the uploads after each try. `first`: this is the first machine."""
        store.check()
        self.store = store
        self._report = report
        self._first = first
        self._way: tuple[m.FileRef, ...] = ()
        self._held: dict[str, m.FileRef] = {}
        self._busy: set[str] = set()  # files that are being uploaded
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="upload")  # a delta does not wait for a copy

    def holds(self) -> tuple[m.Holding, ...]:
        """What the bucket has, or will have soon."""
        with self._lock:
            return tuple(m.Holding(file=file) for file in self._held.values())

    def publish(
        self, copy: HeldFile, delta: HeldFile | None, keep: Collection[str], *, base: HeldFile | None = None
    ) -> None:
        """Upload what this version needs; `base`: of an adapter. `keep`: what workers may still read."""
        files = [file for file in (base, delta) if file is not None]
        with self._lock:
            copying = bool(self._way) and self._way[0].digest in self._busy
            way = extend(self._way, copy.manifest.ref, delta and delta.manifest.ref)
            if len(way) == 1 and copying and delta is not None:  # one copy at a time
                way = (*self._way, delta.manifest.ref)
            if len(way) == 1:
                files.append(copy)
            self._way = way
            needed = {*keep, *(file.digest for file in way), *(file.manifest.digest for file in files)}
            self._held = {name: ref for name, ref in self._held.items() if name in needed | self._busy}
            files = [file for file in files if file.manifest.digest not in self._held]
            for file in files:
                self._held[file.manifest.digest] = file.manifest.ref
                self._busy.add(file.manifest.digest)
                file.pinned = True
        for file in files:
            self._threads.submit(self._upload, file)
        if self._first:
            self._threads.submit(self._expire)

    def close(self, *, clear: bool = False) -> None:
        """Stop all uploads. `clear`: delete what was uploaded."""
        self._stop.set()
        self._threads.shutdown(cancel_futures=True)
        if clear and self._first:
            self.store.clear()

    def _upload(self, file: HeldFile) -> None:
        name, failures, began_s = file.manifest.digest, 0, time.monotonic()
        try:
            while not self._stop.is_set():
                try:
                    sent = self.store.upload(file, stopped=self._stop.is_set)
                    self._report(m.Uploaded(file=name, bytes=sent, s=time.monotonic() - began_s))
                    return
                except BucketFailed as e:
                    self._report(m.Uploaded(file=name, bytes=0, s=time.monotonic() - began_s, error=str(e)))
                    self._stop.wait(delay_s(failures, first_s=FIRST_WAIT_S, limit_s=LONGEST_WAIT_S))
                    failures += 1
        except Withdrawn as e:
            self._report(m.Uploaded(file=name, bytes=0, s=time.monotonic() - began_s, error=str(e)))
            with self._lock:
                self._held.pop(name, None)
                if any(file.digest == name for file in self._way):
                    self._way = ()
        finally:
            file.pinned = False
            with self._lock:
                self._busy.discard(name)

    def _expire(self) -> None:
        with self._lock:
            keep = set(self._held)
        try:
            self.store.expire(keep)
        except BucketFailed as e:  # the next version tries again
            self._report(m.Uploaded(file="", bytes=0, s=0.0, error=str(e)))
