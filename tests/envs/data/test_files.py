"""Which files a data set and its splits have, for every layout. No file is read here."""

from __future__ import annotations

from pathlib import Path

import pytest

from windfall.envs.data.files import find
from windfall.errors import WindfallError


def make(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def names(folder: Path, split: str | None = None, subset: str | None = None) -> list[str]:
    return [str(file.relative_to(folder)) for file in find(folder, split, subset).files]


def test_shards_of_a_split_are_read_in_order(tmp_path: Path) -> None:
    make(tmp_path, "data/train-00001-of-00002.parquet", "data/train-00000-of-00002.parquet", "README.md")
    make(tmp_path, "data/test-00000-of-00001.parquet", "data/hard_100-00000-of-00001.parquet", ".cache/x.parquet")
    assert names(tmp_path) == ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]
    assert names(tmp_path, "test") == ["data/test-00000-of-00001.parquet"]
    assert names(tmp_path, "hard_100") == ["data/hard_100-00000-of-00001.parquet"]
    with pytest.raises(WindfallError, match=r"no split 'tets'") as caught:
        names(tmp_path, "tets")
    assert "Did you mean 'test'?" in str(caught.value)


def test_words_in_names_and_folders_name_the_split(tmp_path: Path) -> None:
    make(tmp_path, "my-train-file.jsonl", "dev/a.parquet", "eval.jsonl", "trains.txt")
    assert names(tmp_path) == ["my-train-file.jsonl"]
    assert names(tmp_path, "validation") == names(tmp_path, "dev") == ["dev/a.parquet"]
    assert names(tmp_path, "test") == ["eval.jsonl"]


def test_files_without_a_split_are_one(tmp_path: Path) -> None:
    make(tmp_path, "a.jsonl", "b.jsonl")
    assert names(tmp_path) == names(tmp_path, "train") == ["a.jsonl", "b.jsonl"]


def test_a_file_that_may_not_belong_to_the_split_is_refused(tmp_path: Path) -> None:
    make(tmp_path, "train.jsonl", "heldout.jsonl", "test.jsonl")
    with pytest.raises(WindfallError, match=r"heldout.jsonl: the name says no split"):
        find(tmp_path)
    assert names(tmp_path, "test") == ["test.jsonl"]


def test_a_split_with_missing_files_is_refused(tmp_path: Path) -> None:
    make(tmp_path, "data/train-00001-of-00003.parquet", "data/train-00000-of-00003.parquet")
    with pytest.raises(WindfallError, match="only 2 of the 3 files of 'train' are here"):
        find(tmp_path)
    assert find(tmp_path / "data" / "train-00001-of-00003.parquet").files


def test_one_of_several_subsets_must_be_named(tmp_path: Path) -> None:
    make(tmp_path, "main/train-00000-of-00001.parquet", "socratic/train-00000-of-00001.parquet")
    with pytest.raises(WindfallError, match="one of: main, socratic"):
        names(tmp_path)
    assert names(tmp_path, subset="main") == ["main/train-00000-of-00001.parquet"]
    with pytest.raises(WindfallError, match="Did you mean 'main'"):
        names(tmp_path, subset="mian")


def test_saved_folders_are_refused_with_a_fix(tmp_path: Path) -> None:
    make(tmp_path, "train/data-00000-of-00001.arrow", "train/state.json", "dataset_dict.json")
    for folder in (tmp_path, tmp_path / "train"):
        with pytest.raises(WindfallError, match="written by save_to_disk") as caught:
            find(folder)
        assert "to_parquet" in caught.value.fix


def test_parts_of_a_split() -> None:
    here = Path(__file__)
    assert find(here, "train[:3]").part(10) == range(3)
    assert find(here, "train[-2:]").part(10) == range(8, 10)
    assert find(here, "train[10%:50%]").part(10) == range(1, 5)
    assert find(here).part(10) == range(10)
    with pytest.raises(WindfallError, match="not a split"):
        find(here, "train[1]")
    with pytest.raises(WindfallError, match="neither splits nor subsets"):
        find(here, "test")


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WindfallError, match="This does it: hf download OWNER/NAME --repo-type dataset"):
        find(tmp_path / "openai" / "gsm8k")
    with pytest.raises(WindfallError, match="no such file or folder") as missing:
        find(tmp_path / "rows.jsonl")
    assert "hf download" not in missing.value.fix
    with pytest.raises(WindfallError, match="no data in this folder"):
        find(tmp_path)
