"""Finds the files of a data set and of one of its splits:

    problems.jsonl, problems.parquet                            one file
    gsm8k/README.md, gsm8k/main/train-00000-of-00001.parquet    a repository of the Hugging Face hub, as downloaded

Rules for a folder of the hub: a folder in it is a subset, unless its name names a split. A name such as
`train-00000-of-00002` names the split, else a word in the name of the file or of its folder does (train, test,
validation and their usual short forms). Files that name none are the split `train`; if others name it, it is refused,
and so is a split of which files are missing. Nothing is downloaded.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from windfall.errors import WindfallError, nearest

SUFFIXES = (".parquet", ".jsonl", ".json", ".ndjson")
_NOT_DATA = {"dataset_info.json", "dataset_infos.json"}
_WORDS = {
    "train": "train", "training": "train", "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
}  # fmt: skip
_SHARD = re.compile(r"(?P<split>\w[\w.]*?)-\d{5}-of-(?P<of>\d{5})")
_SPLIT = re.compile(r"(?P<name>[\w.-]+)(?:\[(?P<first>-?\d+%?)?:(?P<last>-?\d+%?)?\])?")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFiles:
    files: tuple[Path, ...]
    split: str
    bounds: tuple[str | None, str | None] = (None, None)
    """The part of the split to use, as in `train[10:20%]`: a row number, a percentage, or None for the end."""

    def part(self, count: int) -> range:
        """The rows to use, of `count` rows in all.

        >>> DataFiles(files=(), split="train", bounds=("50%", None)).part(9)
        range(4, 9)
        """
        first, last = (None if b is None else _row(b, count) for b in self.bounds)
        return range(count)[first:last]


def _row(bound: str, count: int) -> int:
    return int(bound[:-1]) * count // 100 if bound.endswith("%") else int(bound)


def find(path: Path, split: str | None = None, subset: str | None = None, *, key: str = "env") -> DataFiles:
    """The files of a data set. `split`: as `datasets` writes it: `test` or `train[:1000]`; None: `train`, or the only
    split. `key`: the section of the recipe that names the data set, for errors."""
    name, bounds = _parse_split(split, key)
    if path.is_file():
        if name not in (None, "train") or subset is not None:
            what = "this is one file, which has neither splits nor subsets"
            fix = f"Remove {key}.split and {key}.subset, or give the folder of the data set."
            raise WindfallError(what, where=str(path), fix=fix)
        return DataFiles(files=(path,), split="", bounds=bounds)
    if not path.is_dir():
        fix = "Give a JSONL or parquet file, or the folder of a Hugging Face data set; nothing is downloaded."
        if path.suffix not in SUFFIXES:
            fix += f"\nThis does it: hf download OWNER/NAME --repo-type dataset --local-dir {path}"
            fix += "\nFor a recipe that comes with windfall, the README beside it has the whole command."
        raise WindfallError("no such file or folder", where=f"{key}.path = {path}", fix=fix)
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        fix = "Write it as parquet: for each split, dataset.to_parquet('FOLDER/SPLIT.parquet')."
        raise WindfallError("this folder was written by save_to_disk", where=str(path), fix=fix)
    splits = _hub(path, subset, key)
    chosen = _choose(splits, name, path, key)
    _check_whole(splits[chosen], path)
    return DataFiles(files=tuple(splits[chosen]), split=chosen, bounds=bounds)


def _check_whole(files: Sequence[Path], path: Path) -> None:
    """Raise WindfallError if files of this split of `path` are missing, or some of its files may be of another one."""
    shards = Counter((file.parent, m["split"], int(m["of"])) for file in files if (m := _SHARD.match(file.name)))
    for (folder, split, of), count in shards.items():
        if count < of:
            fix = "Download the others, or rename these files to use them alone."
            raise WindfallError(f"only {count} of the {of} files of {split!r} are here", where=str(folder), fix=fix)
    unnamed = [file for file in files if _split_of(file.relative_to(path)) is None]
    if 0 < len(unnamed) < len(files):
        what = "the name says no split, while that of other files says 'train'"
        fix = "Rename it, move it out of this folder, or give the path of one file."
        raise WindfallError(what, where=str(unnamed[0]), fix=fix)


def _parse_split(split: str | None, key: str) -> tuple[str | None, tuple[str | None, str | None]]:
    if split is None:
        return None, (None, None)
    found = _SPLIT.fullmatch(split.replace(" ", ""))
    if found is None:
        fix = "Write a name such as 'test', or a part of a split such as 'train[:1000]' or 'train[90%:]'."
        raise WindfallError("this is not a split", where=f"{key}.split = {split!r}", fix=fix)
    return found["name"], (found["first"], found["last"])


def _choose(splits: Mapping[str, list[Path]], name: str | None, path: Path, key: str) -> str:
    if name is None:
        if len(splits) == 1:
            return next(iter(splits))
        name = "train"
    for candidate in (name, _WORDS.get(name, name)):
        if candidate in splits:
            return candidate
    fix = f"{nearest(name, splits)} Set {key}.split."
    raise WindfallError(f"this data set has no split {name!r}", where=str(path), fix=fix)


def _hub(path: Path, subset: str | None, key: str) -> dict[str, list[Path]]:
    files = _data_files(path)
    if not files:
        fix = f"Expected files that end with {', '.join(SUFFIXES)}."
        raise WindfallError("there is no data in this folder", where=str(path), fix=fix)
    subsets = {s: f for s, f in _by_subset(path, files).items() if s}
    if subset is not None:
        if subset not in subsets:
            raise WindfallError(f"no subset {subset!r}", where=str(path), fix=nearest(subset, subsets))
        files = subsets[subset]
    elif len(subsets) > 1:
        fix = f"Set {key}.subset to one of: {', '.join(sorted(subsets))}."
        raise WindfallError("this data set has several subsets", where=str(path), fix=fix)
    return _by_split(path, files)


def _data_files(folder: Path) -> list[Path]:
    found = (p for p in folder.rglob("*") if p.suffix in SUFFIXES and p.name not in _NOT_DATA and p.is_file())
    return sorted(p for p in found if not any(part.startswith(".") for part in p.relative_to(folder).parts))


def _by_subset(path: Path, files: Iterable[Path]) -> dict[str, list[Path]]:
    out: dict[str, list[Path]] = {}
    for file in files:
        first, *more = file.relative_to(path).parts
        subset = first if more and first != "data" and _word(first) is None else ""
        out.setdefault(subset, []).append(file)
    return out


def _by_split(path: Path, files: Iterable[Path]) -> dict[str, list[Path]]:
    out: dict[str, list[Path]] = {}
    for file in files:
        out.setdefault(_split_of(file.relative_to(path)) or "train", []).append(file)
    return out


def _split_of(file: Path) -> str | None:
    """The split that the name of a file says.

    >>> [_split_of(Path(p)) for p in ("dev_tiny-00000-of-00001.parquet", "test/0.parquet", "my-val.jsonl", "a.json")]
    ['dev_tiny', 'test', 'validation', None]
    """
    if found := _SHARD.match(file.name):
        return found["split"]
    words = (word for part in reversed(file.with_suffix("").parts) if (word := _word(part)) is not None)
    return next(words, None)


def _word(name: str) -> str | None:
    """The split that a word in this name stands for."""
    return next((_WORDS[w] for w in re.split(r"[^a-z]+", name.lower()) if w in _WORDS), None)
