"""Reads the rows of one file: JSONL with the standard library, parquet with pyarrow (the extra `data`)."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from windfall.errors import WindfallError, install_command

BATCH_ROWS = 1024
_LFS_POINTER = b"version https://git-lfs"
_FORMATS = {
    b"\x1f\x8b": "compressed with gzip",
    b"(\xb5/\xfd": "compressed with zstd",
    b"\xfd7zXZ": "compressed with xz",
    b"BZh": "compressed with bzip2",
    b"PK\x03\x04": "a zip archive",
    b"[": "one JSON array",
}
"""The first bytes of a file in a format that is not read, and its name."""


def place(file: Path, number: int) -> str:
    """Names a row in messages: the line of a text file, or the row of a table.

    >>> place(Path("a.jsonl"), 3), place(Path("b.parquet"), 3)
    ('a.jsonl:3', 'b.parquet row 3')
    """
    return f"{file} row {number}" if file.suffix == ".parquet" else f"{file}:{number}"


def read_rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with file.open("rb") as opened:
            start = opened.read(64)
        if start.startswith(_LFS_POINTER):
            fix = "Fetch the file itself: git lfs pull"
            raise WindfallError("this is a pointer of Git LFS, not the data", where=str(file), fix=fix)
        if start.startswith(b"PAR1") or file.suffix == ".parquet":
            yield from _table_rows(file)
        else:
            yield from _json_rows(file, start)
    except OSError as e:
        raise WindfallError(f"cannot read it: {e.strerror or e}", where=str(file), fix="Make it readable.") from e


def _json_rows(file: Path, start: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    _refuse_other_formats(file, start)
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, _parse_line(line, place(file, number))


def _refuse_other_formats(path: Path, start: bytes) -> None:
    start = start.lstrip() if start.lstrip().startswith(b"[") else start
    for magic, what in _FORMATS.items():
        if start.startswith(magic):
            fix = "Convert it to JSONL: a text file with one JSON object per line."
            raise WindfallError(f"this is {what}", where=str(path), fix=fix)


def _parse_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except UnicodeDecodeError as e:
        raise WindfallError(f"the line is not UTF-8: {e}", where=where, fix="Save the file as UTF-8.") from None
    except json.JSONDecodeError as e:
        fix = "Every line must be one JSON object."
        raise WindfallError(f"the line is not JSON: {e}", where=where, fix=fix) from None
    except RecursionError:
        fix = "Every line must be one flat JSON object."
        raise WindfallError("the JSON is nested too deeply", where=where, fix=fix) from None
    if not isinstance(row, dict):
        fix = "Every line must be one JSON object."
        raise WindfallError(f"the line is a JSON {type(row).__name__}", where=where, fix=fix)
    return row


def _table_rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    pyarrow, number = _pyarrow(file), 0
    try:
        with contextlib.closing(importlib.import_module("pyarrow.parquet").ParquetFile(file)) as table:
            names = table.schema_arrow.names
            if len(set(names)) < len(names):
                raise WindfallError("two columns have the same name", where=str(file), fix="Rename one of them.")
            for batch in table.iter_batches(batch_size=BATCH_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except pyarrow.ArrowException as e:
        after = f" after row {number}" if number else ""
        fix = "Write the file again, or download it again."
        raise WindfallError(f"the file is damaged{after}: {e}", where=str(file), fix=fix) from e


def _pyarrow(file: Path) -> Any:
    try:
        return importlib.import_module("pyarrow")
    except ImportError as e:
        fix = f"Install it: {install_command('data')}"
        raise WindfallError("pyarrow is not installed", where=str(file), fix=fix) from e
