"""The turns that have ended, for timelines: one JSON object per line. Kept: the newest 64 to 128 MiB."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

MOST_BYTES = 64 << 20


class TurnLog:
    def __init__(self, path: Path, most_bytes: int = MOST_BYTES) -> None:
        self._path, self._most_bytes = path, most_bytes
        self._file: IO[bytes] | None = None

    def add(self, turns: Iterable[Mapping[str, Any]]) -> None:
        """On a full disk, turns are missing in the timeline; nothing else needs them."""
        lines = b"".join(json.dumps(dict(turn)).encode() + b"\n" for turn in turns)
        if not lines:
            return
        try:
            if self._file is None:
                self._file = self._path.open("ab", buffering=0)
            self._file.write(lines)
            if self._file.tell() > self._most_bytes:
                self.close()
                self._path.replace(self._path.with_name(f"{self._path.name}.1"))
        except OSError:
            self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None
