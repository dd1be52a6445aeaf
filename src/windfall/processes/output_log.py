"""Keeps a limited part of what a program of the user prints: in a file of the run, or on the terminal.

A file is written by all processes of an environment. At LIMIT_BYTES it is renamed to FILE.1, which replaces the file
that had this name, so the newest output is always there. If two processes rename it at the same moment, older output is
lost.
"""

from __future__ import annotations

import contextlib
import os

LIMIT_BYTES = 8 << 20
"""Size at which a log is renamed and a new one begins."""
SHOWN_BYTES = 8 << 10
"""Bytes of the output of one process that are shown if there is no log."""
STANDARD_ERROR = "-"


def opened(name: str) -> ShownOutput | OutputFile:
    """The log in this file, or on standard error for "-"."""
    return ShownOutput() if name == STANDARD_ERROR else OutputFile(name)


class ShownOutput:
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
                self._append(data[start : start + self._limit // 2])

    def _append(self, data: bytes) -> None:
        if os.path.exists(self._path) and os.path.getsize(self._path) + len(data) > self._limit:
            os.replace(self._path, f"{self._path}.1")
        with open(self._path, "ab", buffering=0) as file:
            file.write(data)
