"""Folders as the `datasets` package itself writes them. Skipped where it is not installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from windfall.envs.data.table import DataSource, RowFormat, read_table

datasets = pytest.importorskip("datasets", reason="folders are written with the package datasets")

ROWS: list[dict[str, Any]] = [
    {"prompt": [{"role": "user", "content": f"What is {n}+1?"}], "answer": str(n + 1), "tags": ["a"] * (n % 3)}
    for n in range(2500)
]


def read(path: Path, split: str | None = None) -> list[tuple[Any, str, list[str]]]:
    rows = read_table(DataSource(path=path, split=split), RowFormat())
    return [(row.prompt, row.answer, row.columns["tags"]) for row in rows]


def test_folders_of_the_package(tmp_path: Path) -> None:
    data = datasets.Dataset.from_list(ROWS)
    whole = datasets.DatasetDict({"train": data.select(range(2000)), "test": data.select(range(2000, 2500))})
    expected = [(row["prompt"], row["answer"], row["tags"]) for row in ROWS]
    for split, part in whole.items():
        (tmp_path / "hub" / "data").mkdir(parents=True, exist_ok=True)
        part.to_parquet(tmp_path / "hub" / "data" / f"{split}-00000-of-00001.parquet")
    assert read(tmp_path / "hub", "test") == expected[2000:]
    data.to_json(tmp_path / "lines.jsonl")
    assert read(tmp_path / "lines.jsonl") == expected
