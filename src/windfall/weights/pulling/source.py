"""Sources: where a reader gets the bytes of files of weights.

    HttpSource      a weight server: of the trainer, or of another worker
    MachineSource   the same on this machine: the reader copies from the memory of the process that serves
    BucketSource    an object store or a folder

A file is named by the digest of its manifest, which the reader got over its link to the controller. So a manifest may
come from any source, and a source that sends wrong bytes is found out (download.py).
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from typing import ClassVar, Literal, Protocol

from windfall.link.messages import SourceRef
from windfall.weights.buffers import machine

CONNECT_S, PEER_CONNECT_S = 10.0, 2.0
"""Time limits for a connection (seconds). A worker may be behind a firewall, and there are other sources."""
PEER_SILENT_S = 3.0
"""A worker that sends no byte for this long (seconds) within an answer has stalled: it has promised these bytes."""


PACE_BYTES, PACE_S = 1 << 20, 10.0
"""A source that sends fewer bytes than this while a reader waits for them for this long (seconds) has stalled."""


class SourceBroken(Exception):
    """The source failed. The same one may answer when asked again, or another one."""

    why: ClassVar[Literal["gone", "unreachable", "stalled", "wrong"]] = "unreachable"
    """As in SourceUse."""


class SourceStalled(SourceBroken):
    """It has promised bytes and sends none."""

    why = "stalled"


class SourceGone(SourceBroken):
    """It does not have the file any more."""

    why = "gone"


class SourceWrong(SourceBroken):
    """It has sent wrong bytes. Whoever reads finds that out, not the source."""

    why = "wrong"


class SourceWaits(SourceBroken):
    """It has no more of the file yet. Ask again."""

    why = "stalled"


class Pace:
    """How fast a source sends, over all of its connections."""

    def __init__(self) -> None:
        self._bytes, self._waited_s, self._last_s = 0, 0.0, 0.0

    def add(self, nbytes: int, began_s: float) -> bool:
        """These bytes have come, for which a reader has waited since `began_s` (monotonic clock, seconds). Returns
        False if the source is too slow."""
        now_s = time.monotonic()
        self._waited_s += now_s - max(began_s, self._last_s)
        self._bytes, self._last_s = self._bytes + nbytes, now_s
        if self._waited_s < PACE_S:
            return True
        enough = self._bytes >= PACE_BYTES
        self._bytes, self._waited_s = 0, 0.0
        return enough


class Source(Protocol):
    """One connection, for one thread. Every call ends: with a result, with SourceBroken after the time limit, or with
    SourceBroken soon after `stopped` (an argument of `connect`) returns true."""

    ref: SourceRef
    trusted: bool
    """Nobody can forge its bytes: checksums suffice, which find damage. Otherwise seals are checked."""

    def manifest(self, file: str) -> bytes: ...

    def open(self, file: str, start: int, stop: int) -> int:
        """Ask for these bytes of a file. Returns how many of them it sends, at least 1: those from `start` on that it
        has. They must be read before the next call."""
        ...

    def read_into(self, view: memoryview) -> int:
        """Read at least one byte and at most the length of the view. Returns the number of bytes."""
        ...

    def close(self) -> None: ...


def connect(
    ref: SourceRef, *, key: str, tls: ssl.SSLContext | None, timeout_s: float, stopped: Callable[[], bool]
) -> Source:
    """`timeout_s`: after how long without a byte the source counts as broken; a worker's limit is shorter."""
    from windfall.link.listener import is_same_machine
    from windfall.weights.bucket import BucketSource
    from windfall.weights.pulling.http_source import HttpSource
    from windfall.weights.pulling.machine_source import MachineSource

    if ref.kind == "bucket":
        return BucketSource(ref, timeout_s=timeout_s, stopped=stopped)
    if ref.machine and ref.machine == machine():
        source = MachineSource(ref, key=key, tls=tls, timeout_s=timeout_s, stopped=stopped)
        if is_same_machine(*source.ends()):
            return source
        source.close()  # a worker can claim any machine. The key was not sent yet.
    return HttpSource(ref, key=key, tls=tls, timeout_s=timeout_s, stopped=stopped)
