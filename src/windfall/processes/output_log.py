"""Keeps a limited part of what a program of the user prints: in a file of the run, or on the terminal.

A file is written by all processes of an environment. At LIMIT_BYTES it is renamed to FILE.1, which replaces the file
that had this name, so the newest output is always there, and at least LIMIT_BYTES of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import Protocol

LIMIT_BYTES = 8 << 20
"""Size at which a log is renamed and a new one begins."""
SHOWN_BYTES = 8 << 10
"""Bytes of the output of one process that are shown if there is no log."""
TRIES = 100
"""Number of attempts to write to a log that other processes rename. Some file systems make each look like another."""
STANDARD_ERROR = "-"


class OutputLog(Protocol):
    def write(self, data: bytes) -> None: ...


def opened(name: str) -> OutputLog:
    """The log in this file, or on standard error for "-"."""
    return ShownOutput() if name == STANDARD_ERROR else OutputFile(name)


class ShownOutput:
    """Shows the beginning of the output on standard error."""

    def __init__(self, limit: int = SHOWN_BYTES) -> None:
        self._left = limit

    def write(self, data: bytes) -> None:
        if self._left <= 0:
            return
        shown, self._left = data[: self._left], self._left - len(data)
        if self._left < 0:
            shown += b"\n(more was printed, which is not shown)\n"
        with contextlib.suppress(OSError):  # the terminal is gone
            while shown:
                shown = shown[os.write(2, shown) :]


class OutputFile:
    """Appends to a file that other processes may append to, and rename, at the same time."""

    def __init__(self, path: str, limit: int = LIMIT_BYTES) -> None:
        self._path = path
        self._limit = limit

    def write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # for example a full disk: the program must not wait for its output
            for start in range(0, len(data), self._limit // 2):
                piece = data[start : start + self._limit // 2]
                any(self._append(piece) for _ in range(TRIES))

    def _append(self, data: bytes) -> bool:
        """False: it must be tried again, because the file was full, or another process has renamed it meanwhile."""
        with open(self._path, "ab", buffering=0) as file:
            with contextlib.suppress(OSError):  # some network file systems have no locks
                fcntl.flock(file, fcntl.LOCK_EX)
            there = os.fstat(file.fileno())
            if there.st_nlink == 0 or not os.path.samestat(there, os.stat(self._path)):
                return False
            if there.st_size + len(data) <= self._limit:
                file.write(data)
                return True
            older = f"{self._path}.1"
            dropped = "; what was printed before that was dropped" if os.path.exists(older) else ""
            os.rename(self._path, older)
            with open(self._path, "ab", buffering=0) as new:
                new.write(f"(earlier output is in {os.path.basename(older)}{dropped})\n".encode())
            return False


class LogGrowth:
    """Whether something was written to a log since this object was made."""

    def __init__(self, path: Path | None) -> None:
        """`path`: None if there is no log."""
        self._path = path
        self._reported = False
        self._size = self._current_size()

    def begins(self) -> bool:
        """True for the first call after something was written."""
        if self._reported or self._current_size() == self._size:
            return False
        self._reported = True
        return True

    def _current_size(self) -> int:
        try:
            return self._path.stat().st_size if self._path is not None else 0
        except OSError:
            return 0
