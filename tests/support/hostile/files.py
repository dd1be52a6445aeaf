"""Damaged, edited and misplaced files, caused by people, editors, full disks and other programs.

`damage(path, kind)` does to a file what `kind` names. Add a kind here and every test that goes through DAMAGES has it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path


def _directory(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def _half(data: bytes) -> bytes:
    """About the first half, which ends in the middle of a line: whole lines of TOML would be valid."""
    line = data.rfind(b"\n", 0, len(data) // 2) + 1
    return data[: line + 3] if line else data[: len(data) // 2]


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(_half(path.read_bytes())),
    "random bytes": lambda path: path.write_bytes(random.Random(1).randbytes(300)),
    "another encoding": lambda path: path.write_bytes("name = 'ü'\n".encode("utf-16")),
    "a JSON list": lambda path: path.write_text('[1, {"name": 3}]\n'),
    "a JSON number": lambda path: path.write_text("3\n"),
    "another JSON object": lambda path: path.write_text('{"pid": "x", "url": 3, "port": "no", "workers": 7}\n'),
    "JSON without an end": lambda path: path.write_text("[" * 100_000),
    "a directory": _directory,
}

FOREIGN_LINES: dict[str, bytes] = {
    "a number": b"3",
    "a list": b'[{"kind": "scalar", "name": "step"}]',
    "an object without a name": b'{"a": 1}',
    "a name that is no text": b'{"t": 1.0, "m": 1.0, "kind": "scalar", "name": 3}',
    "a step that is no number": b'{"t": 1.0, "m": 1.0, "kind": "scalar", "name": "step", "step": "x"}',
    "a time that is no number": b'{"t": null, "m": 1.0, "kind": "scalar", "name": "eval", "step": 1}',
    "resumed without a step": b'{"t": 1.0, "m": 1.0, "kind": "instant", "name": "resumed"}',
    "binary": b"\xff\xfe\x00\x81",
    "a line of another log": b"2026-01-01 12:00:00 INFO something else",
    "brackets without an end": b"[" * 100_000,
}
"""For an event log: lines that windfall did not write. All but the last three are JSON."""


def damage(path: Path, kind: str) -> None:
    DAMAGES[kind](path)
