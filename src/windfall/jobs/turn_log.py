"""The turns that have ended, for timelines: one JSON object per line. Kept: the newest 64 to 128 MiB.

Lines about other machines also have the life of the process that reported the turn, and its number there. So the log
itself says which turns of a machine it has, also after a kill of the service between a line and its confirmation.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

MOST_BYTES = 64 << 20
SCANNED_BYTES = 16 << 20
"""Size of the end of the log that is read for the numbers of machines that may report again."""


class TurnLog:
    def __init__(self, path: Path, most_bytes: int = MOST_BYTES) -> None:
        self._path, self._most_bytes = path, most_bytes
        self._file: IO[bytes] | None = None
        self._next: dict[str, int] = {}
        """By life of a machine: the number of the first turn that is not here."""
        for file in (self._older, path):
            self._scan(file)

    def add(self, turns: Sequence[Mapping[str, Any]]) -> None:
        """On a full disk, turns are missing in the timeline; nothing else needs them."""
        self._append(turns)

    def add_reported(self, life: str, first: int, turns: Sequence[Mapping[str, Any]]) -> int:
        """Add the turns of a machine that are not here yet; `first` is the number of the first one. Returns the number
        of the first turn that is not here then."""
        known = max(first, self._next.get(life, 0))
        new = [{**turn, "life": life, "number": n} for n, turn in enumerate(turns, first) if n >= known]
        if self._append(new):
            self._next[life] = known + len(new)
        return self._next.get(life, first)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    @property
    def _older(self) -> Path:
        return self._path.with_name(f"{self._path.name}.1")

    def _append(self, turns: Sequence[Mapping[str, Any]]) -> bool:
        """Write all of these or none."""
        data = b"".join(json.dumps(turn).encode() + b"\n" for turn in turns)
        if not data:
            return True
        try:
            if self._file is None:
                self._file = self._path.open("ab", buffering=0)
            size = self._file.seek(0, os.SEEK_END)
            if self._file.write(data) != len(data):  # there was room for a part of it
                self._file.truncate(size)
                return False
        except OSError:
            self.close()
            return False
        if size + len(data) > self._most_bytes:
            self.close()
            with contextlib.suppress(OSError):  # the next turn tries it again
                self._path.replace(self._older)
        return True

    def _scan(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - SCANNED_BYTES))
                data = file.read(SCANNED_BYTES)
        except OSError:  # there is none
            return
        for line in data.splitlines():
            if b'"life"' not in line:
                continue
            try:
                turn = json.loads(line)
                life, number = str(turn["life"]), int(turn["number"])
            except (ValueError, LookupError, TypeError, RecursionError):  # half a line, or a damaged one
                continue
            self._next[life] = max(self._next.get(life, 0), number + 1)
