"""Uploads what a trainer publishes to a bucket, while training continues.

A worker that only reaches the bucket needs a way to the newest version: a full copy, and the deltas since. Every delta
is uploaded; a full copy again if there is no delta, or if the deltas since the last copy are more than half of it.

    version            0      1      2      3      4
    uploaded           copy   delta  delta  delta  delta and copy
    way of a joiner    0      0 1    0 1 2  ...    4

- An upload that fails is tried again. Until it succeeds, the file is pinned: the publisher does not overwrite its
  buffer.
- An upload ends early if its file is neither on the way nor needed by a worker (`keep`).
- At most one copy is pinned. A new one replaces it if it fails, or if no worker needs it; otherwise the new one is left
  out, and the next version is uploaded as a copy.
- If a file of the way is damaged in the bucket, the newest version is uploaded as a copy. A damaged file that is not
  uploaded again is reported as failed: the bucket does not have it.
- Files that no worker needs (`keep`) and that are not on the way are deleted.
- On several machines each uploads the bytes that it holds. All know what is unfinished on each of them, so that they
  decide the same; the first one deletes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from windfall.backoff import delay_s
from windfall.link import messages as m
from windfall.weights.bucket import BucketFailed, BucketStore
from windfall.weights.held_files import HeldFile

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
    if end == copy.digest:
        return way
    if delta is None or delta.before != end:
        return (copy,)
    deltas = sum(file.nbytes for file in way[1:]) + delta.nbytes
    return (*way, delta) if deltas <= MAX_SHARE * way[0].nbytes else (copy,)


@dataclass(eq=False, slots=True)
class Upload:
    """A file that is not uploaded yet."""

    file: HeldFile
    again: bool
    """Whether to replace what the bucket has of it."""
    failing: bool = False
    stop: threading.Event = field(default_factory=threading.Event)
    work: Future[None] = field(init=False)

    def cancel(self) -> None:
        self.stop.set()
        if self.work.cancel():  # it has not begun
            self.file.pinned = False


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
        self._failing: set[str] = set()  # on some machine
        self._busy: dict[str, Upload] = {}
        self._copy = ""  # the last copy that was, or is being, uploaded
        self._expiring: Future[None] | None = None
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="upload")  # a delta does not wait for a copy

    def holds(self) -> tuple[m.Holding, ...]:
        """What the bucket has, or will have soon: not what could not be uploaded before the last version."""
        with self._lock:
            return tuple(m.Holding(file=file) for name, file in self._held.items() if name not in self._failing)

    def unfinished(self) -> dict[str, bool]:
        """Files that are not uploaded yet: whether the last try failed."""
        with self._lock:
            return {name: upload.failing for name, upload in self._busy.items()}

    def publish(
        self,
        copy: HeldFile,
        delta: HeldFile | None,
        *,
        base: HeldFile | None = None,
        keep: Collection[str] = (),
        wrong: Collection[str] = (),
        machines: Sequence[Mapping[str, bool]] = (),
    ) -> None:
        """Upload what this version needs and the bucket lacks; `base`: of an adapter. `keep`: files that workers
        may still read. `wrong`: files that are damaged in the bucket. `machines`: what is unfinished on each machine,
        if there are several."""
        unfinished: dict[str, bool] = {}
        for each in machines or [self.unfinished()]:
            unfinished |= {name: failing or unfinished.get(name, False) for name, failing in each.items()}
        files = [file for file in (base, delta) if file is not None]
        with self._lock:
            self._failing = {name for name, failing in unfinished.items() if failing}
            self._held = {name: ref for name, ref in self._held.items() if name not in wrong}
            if any(file.digest in wrong for file in self._way):
                self._way = ()
            way = extend(self._way, copy.manifest.ref, delta and delta.manifest.ref)
            needed = {*keep} - {*wrong}
            if len(way) == 1 and way != self._way:
                if self._copy in needed and self._copy in unfinished and not unfinished[self._copy]:
                    way = ()
                else:
                    if self._copy in unfinished:
                        needed.discard(self._copy)
                    files.append(copy)
                    self._copy = copy.manifest.digest
            self._way = way
            needed |= {*(file.digest for file in way), *(file.manifest.digest for file in files)}
            self._held = {name: ref for name, ref in self._held.items() if name in needed}
            for name in [name for name in self._busy if name not in self._held]:
                self._busy.pop(name).cancel()
            for file in files:
                if file.manifest.digest not in self._held:
                    self._held[file.manifest.digest] = file.manifest.ref
                    self._start(Upload(file, file.manifest.digest in wrong))
        if self._first:
            for name in {*wrong} - self._held.keys():
                self._report(m.Uploaded(file=name, bytes=0, s=0.0, error="damaged, and not uploaded again"))
            if self._expiring is not None:
                self._expiring.cancel()  # if it has not begun
            self._expiring = self._threads.submit(self._expire)

    def close(self) -> None:
        """Stop all uploads."""
        with self._lock:
            for upload in self._busy.values():
                upload.cancel()
        self._threads.shutdown(cancel_futures=True)

    def _start(self, upload: Upload) -> None:
        upload.file.pinned = True
        self._busy[upload.file.manifest.digest] = upload
        upload.work = self._threads.submit(self._upload, upload)

    def _upload(self, upload: Upload) -> None:
        file, stop, failures, began_s = upload.file, upload.stop, 0, time.monotonic()
        name = file.manifest.digest

        def report(sent: int, error: str = "") -> None:
            s = time.monotonic() - began_s
            self._report(m.Uploaded(file=name, bytes=sent, s=s, ranges=file.ranges, error=error))

        try:
            while not stop.is_set():
                try:
                    report(self.store.upload(file, again=upload.again, stopped=stop.is_set))
                    break
                except BucketFailed as e:
                    if not stop.is_set():
                        upload.failing = True
                        report(0, str(e))
                    stop.wait(delay_s(failures, first_s=FIRST_WAIT_S, limit_s=LONGEST_WAIT_S))
                    failures += 1
        finally:
            with self._lock:
                if self._busy.get(name) is upload:
                    del self._busy[name]
                file.pinned = any(other.file is file for other in self._busy.values())

    def _expire(self) -> None:
        with self._lock:
            keep = set(self._held)
        try:
            self.store.expire(keep)
        except BucketFailed as e:  # the next version tries again
            self._report(m.Uploaded(file="", bytes=0, s=0.0, error=str(e)))
